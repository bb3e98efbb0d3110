"""From a problem to rows of a report, whatever its peers do.

A result that differs from the float64 rows, a refusal, or too little memory is the `error` of a
row, which then has no numbers; the run goes on.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from tilewise.bench.case import Case, make_case
from tilewise.bench.passes import Budget, WrongResult, numbers_of
from tilewise.bench.peers import OURS, PEERS, SQUARES
from tilewise.bench.problem import Problem
from tilewise.bench.roofline import Ceilings
from tilewise.bench.truth import Truth, sample_truth

Row = dict[str, Any]
OUT_OF_MEMORY = "out of memory"
NO_TIME = "not measured, the time was up"


def measure(problem: Problem, device: str, ceilings: Ceilings, budget: Budget) -> list[Row]:
    """Measure every peer of a problem; return a row for each peer and op, in this order.

    A failure becomes the "error" of its rows. The measurements count as done in the budget.
    """
    rows: list[Row] = []
    try:
        _raise_if_spent(budget)
        case = make_case(problem, device)
        truth = sample_truth(case)
    except Exception as error:
        reason = _reason(error, [])
        rows = [
            _row(problem, peer, op) | {"error": reason}
            for peer in problem.peers
            for op in problem.ops
        ]
    else:
        for peer in problem.peers:
            rows += _measure_peer(case, truth, peer, ceilings, budget)
            if rows[-1].get("error", "").startswith(OUT_OF_MEMORY):
                gc.collect()  # what a failed call held
                if device == "cuda":
                    torch.cuda.empty_cache()
    budget.finish(len(rows))
    return rows


def _row(problem: Problem, peer: str, op: str) -> Row:
    return {"op": op, "peer": peer, **problem.columns()}


def _measure_peer(
    case: Case, truth: Truth, peer: str, ceilings: Ceilings, budget: Budget
) -> list[Row]:
    problem = case.problem
    rows = {op: _row(problem, peer, op) for op in problem.ops}
    # torch says by warnings why one of its backends refuses.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            _raise_if_spent(budget)
            if case.device.type == "cpu":
                _raise_if_too_large(problem, peer)
            for op, numbers in numbers_of(case, truth, PEERS[peer](case), budget):
                rows[op] |= numbers
                flops = problem.flops(op)
                if flops is not None:
                    speed = flops / (numbers["ms"] / 1e3)
                    rows[op]["TFLOP/s"] = speed / 1e12
                    rows[op]["% of matmul"] = 100 * speed / ceilings.matmul_flops
        except Exception as error:
            reason = _reason(error, [str(warning.message) for warning in said])
            for row in rows.values():
                if "ms" not in row:
                    row["error"] = reason
    return list(rows.values())


def _raise_if_spent(budget: Budget) -> None:
    if budget.is_spent:
        raise TimeoutError(NO_TIME)


def _raise_if_too_large(problem: Problem, peer: str) -> None:
    """Raise MemoryError if a CPU's memory cannot hold the N x N matrices that a peer makes.

    The operating system would end the whole process there.
    """
    if peer not in SQUARES:
        return
    entries = problem.batch * problem.num_q_heads * problem.seqlen**2
    need, free = 2 * SQUARES[peer] * entries, _free_bytes()
    if free is not None and need > 0.8 * free:
        raise MemoryError(f"N x N matrices of {need / 2**30:.0f} GiB, {free / 2**30:.0f} are free")


def _free_bytes() -> int | None:
    try:
        with open("/proc/meminfo") as info:
            line = next(line for line in info if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) * 1024


def _reason(error: Exception, said: Sequence[str]) -> str:
    """Return the text of a failure for a row, in one line.

    Args:
        error: the exception that was raised.
        said: the warnings of torch meanwhile, which say why a backend refuses.
    """
    text = " ".join(str(error).split())
    if isinstance(error, WrongResult | TimeoutError):
        return text
    if isinstance(error, MemoryError):
        return f"{OUT_OF_MEMORY}: {text}" if text else OUT_OF_MEMORY
    if isinstance(error, torch.OutOfMemoryError) or any(
        sign in text for sign in ("out of memory", "DefaultCPUAllocator")
    ):
        return OUT_OF_MEMORY
    if "No available kernel" in text:
        reasons = [line for line in said if "because" not in line and "disabled" not in line]
        text = " ".join(" ".join([text, *reasons[:1]]).split())
    return f"{type(error).__name__}: {text}"[:200]


def compare_peers(rows: Sequence[Row]) -> None:
    """Add "x best peer" to each row that was measured: how many times as fast it is as the fastest
    peer of the same call and op."""
    calls: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if "ms" in row:
            calls.setdefault(_place(row) + _values(row, "Dv", "feature"), []).append(row)
    for measured in calls.values():
        peers = [row["ms"] for row in measured if not row["peer"].startswith(OURS)]
        for row in measured if peers else []:
            row["x best peer"] = min(peers) / row["ms"]


def compare_features(rows: Sequence[Row]) -> None:
    """Add "x plain" to each row that was measured: its time over that of our plain call with the
    same table, op, N, D and causality."""
    plain = {
        _place(row): row["ms"]
        for row in rows
        if "ms" in row and row["peer"] == OURS and row["feature"] == "plain"
    }
    for row in rows:
        if "ms" in row and _place(row) in plain:
            row["x plain"] = row["ms"] / plain[_place(row)]


def _place(row: Row) -> tuple[Any, ...]:
    return _values(row, "table", "op", "N", "D", "causal")


def _values(row: Row, *keys: str) -> tuple[Any, ...]:
    return tuple(row[key] for key in keys)
