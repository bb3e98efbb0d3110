"""`tilewise bench attention`: attention beside torch's own, in time and memory, in one run.

Tables: dense (N from 512 on), window, blocks, varlen, features, head_dims, derivatives, published
(shapes that peers publish figures of; on a GPU), fp8 (8 bits: kernel and whole op; on a GPU).
--peers adds FlashAttention-3 and 4 where they are installed, and "x best peer" compares with the
fastest peer of the row. The peers are
scaled_dot_product_attention by backend (sdpa_...), FlexAttention compiled for the shape (flex),
varlen_attn, and softmax(QK^T)V in bfloat16 (standard). backward is the backward pass alone,
peak_MB what a pass needs beyond its inputs. FLOPs are counted as in the FlashAttention papers over
the visible entries. A result that differs from sampled float64 rows, or their gradients, gets no
number. The first call of each pass, which is checked and compiles, is never timed; how many those
were, and what no time was left for, stands in the last lines on standard error.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import torch

import tilewise
from tilewise.bench.compile_ahead import compile_ahead
from tilewise.bench.measure import NO_TIME, Row, compare_features, compare_peers, measure
from tilewise.bench.passes import Budget
from tilewise.bench.peers import OPTIONAL, is_installed
from tilewise.bench.problem import Problem
from tilewise.bench.report import emit, format_table, positive, say, write
from tilewise.bench.roofline import Ceilings, measure_ceilings
from tilewise.bench.tables import SCALES, TABLES, Scale, with_peers
from tilewise.flags import Parser

SECONDS = {"cuda": 400.0, "cpu": 330.0}
_SHOWN = 3  # names listed of what is left out
_COLUMNS = ["op", "peer", "N", "D", "causal", "ms", "spread", "TFLOP/s", "% of matmul", "peak_MB"]
_COLUMNS += ["x best peer", "error"]
_COLUMNS_OF = {"features": ["feature", "x plain"], "blocks": ["feature", "x plain"]}
_COLUMNS_OF |= {"window": ["x plain"], "head_dims": ["Dv"]}
_COLUMNS_OF |= {"published": ["H", "Hk", "Dv", "feature"]}


def run(
    problems: Sequence[Problem],
    device: str,
    ceilings: Ceilings,
    budget: Budget,
    json_path: str | None = None,
) -> list[Row]:
    """Measure the problems one after the other and return their rows, one for each peer and op.

    Problems that begin when the budget is spent get rows with an error. Progress and what was left
    out go to standard error. With `json_path`, the file is rewritten with all rows so far after
    each problem that begins while time is left.
    """
    rows: list[Row] = []
    left_out = []
    for number, problem in enumerate(problems, 1):
        is_spent = budget.is_spent
        rows += measure(problem, device, ceilings, budget)
        if is_spent:
            left_out.append(problem.label)
            continue
        mine = [row for row in rows[-len(problem.peers) * len(problem.ops) :] if "ms" in row]
        ours = [f"{row['op']} {row['ms']:.4g} ms" for row in mine if row["peer"] == "tilewise"]
        say(
            f"{budget.elapsed:4.0f} s  {number}/{len(problems)}  {problem.label}: "
            f"{len(mine)} numbers; tilewise {', '.join(ours) or 'has none'}"
        )
        if json_path is not None:
            write(document(rows, ceilings), json_path)
    if budget.first_calls:
        say(
            f"left out: {budget.first_calls} first calls, which compile and load kernels "
            f"({budget.first_seconds:.1f} s)"
        )
    if left_out:
        say(
            f"left out: {len(left_out)} of {len(problems)} calls, as {budget.seconds:.0f} s were "
            f"up: {', '.join(left_out[:_SHOWN])}{', ...' if len(left_out) > _SHOWN else ''}; the "
            "next run finds the kernels of this one"
        )
    compare_peers(rows)
    compare_features([row for row in rows if row["table"] in ("features", "blocks", "window")])
    return rows


def document(rows: list[Row], ceilings: Ceilings) -> dict[str, Any]:
    """Return the JSON document of a run: versions, ceilings and rows."""
    versions = {"version": tilewise.__version__, "triton": _version("triton")}
    return {**versions, "ceilings": ceilings.as_dict(), "rows": rows}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def print_tables(rows: Sequence[Row]) -> None:
    """Print the rows of each table below its name, without those that no time was left for."""
    for table in TABLES:
        mine = [row for row in rows if row["table"] == table and row.get("error") != NO_TIME]
        if mine:
            more = _COLUMNS_OF.get(table, [])
            print(f"\n{table}\n{format_table(mine, [*more, *_COLUMNS])}")


def plan(tables: Sequence[str], scale: Scale) -> list[Problem]:
    """Return the problems of the named tables, scaled to a device, in the order of measurement."""
    return [problem for name in TABLES if name in tables for problem in TABLES[name](scale)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tilewise bench attention`: measure the tables that the options name, and print them;
    then all results as JSON in one line, unless standard output is a terminal and no --json names a
    file for them.

    Returns the exit status: 1 where nothing could be measured, else 0.
    """
    parser = Parser(prog="tilewise bench attention", description=__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default=None, help="default: cuda if any"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=tuple(TABLES),
        default=tuple(TABLES),
        metavar="TABLE",
        help=f"which tables: {', '.join(TABLES)}; default: all",
    )
    parser.add_argument("--seqlens", nargs="+", type=positive, help="N of the dense table")
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=tuple(OPTIONAL),
        default=(),
        metavar="PEER",
        help=f"beside torch's own, where installed: {', '.join(OPTIONAL)}",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="wall time to fit in, with fewer repeats if need be "
        "(default: 400 on a GPU, 330 on a CPU); what does not begin in it is left out",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=min(12, os.cpu_count() or 1),
        help="processes that compile for a GPU beforehand; 0 compiles on the way",
    )
    parser.add_argument("--json", metavar="FILE", default=None, help="also write the results here")
    options = parser.parse_args(argv)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can see")
    scale = SCALES[device]
    if options.seqlens:
        scale = replace(scale, seqlens=tuple(options.seqlens), ours_only=())
    more = [name for name in options.peers if is_installed(name)]
    for name in options.peers:
        if name not in more:
            say(f"{name} is left out: {OPTIONAL[name]} is not installed")
    problems = with_peers(plan(options.only, scale), more)
    measurements = sum(len(problem.peers) * len(problem.ops) for problem in problems)
    budget = Budget(options.seconds or SECONDS[device], measurements)
    ceilings = measure_ceilings(device)
    print(ceilings)
    if device == "cuda" and options.workers:
        say(f"{budget.elapsed:4.0f} s  compiling")
        failed = compile_ahead(problems, options.workers, 0.4 * budget.seconds)
        say(f"{budget.elapsed:4.0f} s  {failed} of the compiling processes failed")
    rows = run(problems, device, ceilings, budget, options.json)
    print_tables(rows)
    emit(document(rows, ceilings), options.json)
    return 0 if any("ms" in row for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
