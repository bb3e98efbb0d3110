"""`tilewise bench hopper`: the Hopper kernels beside cuDNN, FlashAttention-3 and our portable ones.

All peers of a row are measured in turn, in short blocks, so that they see the same clocks; ratios
of one run are what counts. backward is the whole gradient, with what comes before and after the
products. FLOPs are counted as in the FlashAttention papers. FlashAttention-3 is measured where its
`flash_attn_interface` can be imported. A result that differs from sampled float64 rows, or their
gradients, gets no number.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tilewise.bench import host
from tilewise.bench.attention import document
from tilewise.bench.case import Case, make_case
from tilewise.bench.compile_ahead import compile_ahead
from tilewise.bench.measure import compare_features, compare_peers
from tilewise.bench.passes import WrongResult
from tilewise.bench.peers import OURS, PEERS, Run
from tilewise.bench.problem import Problem
from tilewise.bench.report import emit, format_table, positive, say, write
from tilewise.bench.roofline import Ceilings, measure_ceilings
from tilewise.bench.timing import time_together
from tilewise.bench.truth import (
    Truth,
    sample_truth,
    sampled_weights,
    wrong_gradient,
    wrong_output,
)

_TOKENS, _HIDDEN = 16384, 2048  # the scheme of the FlashAttention papers
_SEQLENS = (1024, 4096, 16384)
_HEAD_DIMS = (64, 128, 256)
_LENGTHS = (512, 1024, 2048, 4096, 8192, 512)
_WINDOW = 1023  # keys to the left: 1,024 with the query's own
_OPS = ("forward", "backward")
_BACKWARD_SHARE = 0.5  # of a row's rounds: a backward pass takes three times as long
_FEATURES = (
    "plain", "deterministic", "GQA 8:1", "seqlens_k", "softcap", "sinks", "ALiBi",
    "BlockMask, all visible", "dropout 0.1", "bias", "return_lse",
)  # fmt: skip
_COLUMNS = ["feature", "op", "peer", "N", "D", "causal", "ms", "spread", "TFLOP/s", "% of matmul"]
_COLUMNS += ["x best peer", "x plain", "error"]

Row = dict[str, Any]


def _problem(table: str, n: int, d: int, causal: bool, peers: tuple[str, ...]) -> Problem:
    heads = _HIDDEN // d
    batch = max(1, _TOKENS // n)
    return Problem(table, batch, n, heads, heads, d, d, peers, causal, ops=_OPS)


def dense() -> list[Problem]:
    """18 shapes, forward and backward."""
    peers = ("tilewise", "tilewise_triton", "sdpa_cudnn", "fa3")
    return [
        _problem("dense", n, d, causal, peers)
        for d in _HEAD_DIMS
        for n in _SEQLENS
        for causal in (False, True)
    ]


def features() -> list[Problem]:
    """What each feature costs, causal, D 128, N 4,096; none changes what is visible."""
    problems = []
    for feature in _FEATURES:
        plain = _problem("features", 4096, 128, True, ("tilewise",))
        if feature == "GQA 8:1":
            plain = replace(plain, num_kv_heads=plain.num_q_heads // 8)
        problems.append(replace(plain, feature=feature))
    return problems


def deterministic() -> list[Problem]:
    """The reproducible backward pass beside the fastest one."""
    return [
        replace(_problem("deterministic", n, d, causal, ("tilewise",)), feature=feature)
        for d in (64, 128)
        for n in _SEQLENS
        for causal in (False, True)
        for feature in ("plain", "deterministic")
    ]


def window() -> list[Problem]:
    """A causal window of 1,024 keys."""
    peers = ("tilewise", "tilewise_triton", "flex", "fa3")
    return [
        replace(_problem("window", n, 128, True, peers), window_left=_WINDOW) for n in _SEQLENS[1:]
    ]


def varlen() -> list[Problem]:
    """A packed causal batch."""
    peers = ("tilewise", "tilewise_triton", "varlen_attn", "fa3")
    shape = Problem("varlen", len(_LENGTHS), max(_LENGTHS), 16, 16, 128, 128, peers, True, ops=_OPS)
    return [replace(shape, lengths=_LENGTHS)]


TABLES: dict[str, Callable[[], list[Problem]]] = {
    "dense": dense,
    "window": window,
    "varlen": varlen,
    "features": features,
    "deterministic": deterministic,
}


def measure(
    problems: Sequence[Problem], ceilings: Ceilings, rounds: int, device: str = "cuda"
) -> list[Row]:
    """Measure problems that belong together: all peers of all of them, in turn."""
    runs: dict[tuple[Problem, str], tuple[Case, Truth, Run]] = {}
    rows = {
        (problem, peer, op): {"op": op, "peer": peer, **problem.columns()}
        for problem in problems
        for op in _OPS
        for peer in problem.peers
    }
    failed: dict[tuple[Problem, str], str] = {}
    for problem in problems:
        case = make_case(problem, device)
        truth = sample_truth(case)
        for peer in problem.peers:
            try:
                runs[problem, peer] = case, truth, PEERS[peer](case)
            except Exception as error:
                failed[problem, peer] = _reason(error)
    for op, prepare in (("forward", _forward), ("backward", _backward)):
        calls: dict[tuple[Problem, str], Callable[[], object]] = {}
        for key, (_, truth, run) in runs.items():
            try:
                calls[key] = prepare(run, truth)
            except Exception as error:
                rows[*key, op]["error"] = _reason(error)
        share = rounds if op == "forward" else max(3, round(rounds * _BACKWARD_SHARE))
        for (problem, peer), timing in time_together(calls, rounds=share).items():
            flops = problem.flops(op)
            row = rows[problem, peer, op]
            row |= {"ms": timing.median * 1e3, "spread": timing.spread, "repeats": timing.repeats}
            if flops is not None:
                row["TFLOP/s"] = flops / timing.median / 1e12
                row["% of matmul"] = 100 * flops / timing.median / ceilings.matmul_flops
    for (problem, peer, _), row in rows.items():
        if (problem, peer) in failed:
            row["error"] = failed[problem, peer]
    return list(rows.values())


def _forward(run: Run, truth: Truth) -> Callable[[], object]:
    """Check the forward pass and return it as a call."""
    with torch.no_grad():
        _raise(wrong_output(run.forward(), truth, run))

    def call() -> object:
        with torch.no_grad():
            return run.forward()

    return call


def _backward(run: Run, truth: Truth) -> Callable[[], object]:
    """Check the backward pass and return it as a call."""
    if run.no_backward is not None:
        raise NotImplementedError(run.no_backward)
    outputs, leaves = run.forward(), list(run.leaves.values())
    call = partial(torch.autograd.grad, outputs, leaves, retain_graph=True)
    _raise(wrong_gradient(call(sampled_weights(run, truth.rows)), truth, run))
    weights = (run.do,) if run.dlse is None else (run.do, run.dlse)
    return partial(call, weights)


def _raise(wrong: str | None) -> None:
    if wrong is not None:
        raise WrongResult(wrong)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def groups(names: Sequence[str]) -> list[list[Problem]]:
    """Problems to be measured together: a feature beside its plain call, else each alone."""
    found: list[list[Problem]] = []
    for name in names:
        problems = TABLES[name]()
        if name == "features":
            plain = problems[0]
            found += [[plain]] + [[plain, other] for other in problems[1:]]
        elif name == "deterministic":
            found += [problems[i : i + 2] for i in range(0, len(problems), 2)]
        else:
            found += [[problem] for problem in problems]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tilewise bench hopper", description=__doc__)
    tables = (*TABLES, "host")
    parser.add_argument(
        "--only", nargs="+", choices=tables, default=tables, metavar="TABLE",
        help=f"which tables: {', '.join(tables)}; default: all",
    )  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=10, help="blocks of each call")
    parser.add_argument(
        "--workers", type=int, default=12, help="processes that compile beforehand; 0 for none"
    )
    parser.add_argument("--json", metavar="FILE", default=None, help="also write the results here")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("it needs a GPU that torch can see")
    warnings.simplefilter("ignore")  # torch warns why a peer refuses; the row says it
    measured = groups([name for name in TABLES if name in options.only])
    if options.workers:
        jobs = [problem for group in measured for problem in group]
        failed = compile_ahead(jobs, options.workers, 120.0)
        say(f"{failed} of the compiling processes failed")
    ceilings = measure_ceilings("cuda")
    print(ceilings)
    rows: list[Row] = []
    for group in measured:
        found = measure(group, ceilings, options.rounds)
        compare_features(found)
        rows += found if len(group) == 1 else [row for row in found if row["feature"] != "plain"]
        if group[0].table == "deterministic":
            rows += [row for row in found if row["feature"] == "plain"]
        ours = [f"{r['op']} {r['ms']:.3f} ms" for r in found if "ms" in r and r["peer"] == OURS]
        say(f"{group[-1].label}: {', '.join(ours) or 'nothing of ours'}")
        if options.json is not None:
            write(document(rows, ceilings), options.json)
    compare_peers([row for row in rows if row["feature"] == "plain"])
    for name in TABLES:
        mine = [row for row in rows if row["table"] == name]
        if mine:
            print(f"\n{name}\n{format_table(mine, _COLUMNS)}")
    result = document(rows, ceilings)
    if "host" in options.only:
        result["host"] = host.measure()
        print("\nhost")
        for name, value in result["host"].items():
            print(f"{name}: {value}")
    emit(result, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
