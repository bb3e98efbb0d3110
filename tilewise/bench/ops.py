"""`tilewise bench ops`: attention and paged decode beside torch's own, in one short run.

Attention is measured as by `tilewise bench attention`, on fewer problems. Decode reads a paged
bfloat16 cache; its bytes are those of the keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import tilewise
from tilewise.bench import attention
from tilewise.bench.decode import bench_decode
from tilewise.bench.passes import Budget
from tilewise.bench.problem import Problem
from tilewise.bench.report import emit, format_table, positive
from tilewise.bench.roofline import measure_ceilings
from tilewise.bench.tables import SCALES, dense
from tilewise.flags import Parser

SECONDS = 90.0  # of attention
_SEQLENS = {"cuda": (1024, 4096, 16384), "cpu": (1024, 4096)}
_PEERS = ("tilewise", "sdpa_flash", "sdpa_cudnn")


def plan(device: str, seqlens: Sequence[int] | None, passes: Sequence[str]) -> list[Problem]:
    """Return the problems of dense attention, beside the fastest peers; none without a pass.

    Args:
        device: "cpu" or "cuda".
        seqlens: the lengths N; None takes the device's own.
        passes: the passes to measure, of "forward" and "backward"; others are ignored.
    """
    scale = SCALES[device]
    peers = tuple(peer for peer in _PEERS if peer in scale.peers)
    lengths = tuple(seqlens or _SEQLENS[device])
    problems = dense(replace(scale, seqlens=lengths, ours_only=(), peers=peers))
    ops = tuple(op for op in ("forward", "backward") if op in passes)
    return [replace(problem, ops=ops) for problem in problems] if ops else []


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tilewise bench ops`: measure dense attention and decoding, or what --only names of them,
    and print tables; then all results as JSON in one line, unless standard output is a terminal and
    no --json names a file for them.

    Returns the exit status: 1 where nothing could be measured, else 0.
    """
    parser = Parser(prog="tilewise bench ops", description=__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default=None, help="default: cuda if any"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=("forward", "backward", "decode"),
        default=("forward", "backward", "decode"),
        help="which measurements to take",
    )
    parser.add_argument(
        "--seqlens", nargs="+", type=positive, default=None, help="N of dense attention"
    )
    parser.add_argument("--json", metavar="FILE", default=None, help="also write the results here")
    options = parser.parse_args(argv)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can see")
    ceilings = measure_ceilings(device)
    print(ceilings)
    rows: list[dict[str, Any]] = []
    problems = plan(device, options.seqlens, options.only)
    if problems:
        measurements = sum(len(problem.peers) * len(problem.ops) for problem in problems)
        rows += attention.run(problems, device, ceilings, Budget(SECONDS, measurements))
        attention.print_tables(rows)
    if "decode" in options.only:
        decode = bench_decode(device, ceilings)
        columns = ["op", "B", "heads", "N", "peer", "ms", "spread", "GB/s", "% of read", "error"]
        print(f"\ndecode\n{format_table(decode, columns)}")
        rows += decode
    emit(
        {"version": tilewise.__version__, "ceilings": ceilings.as_dict(), "rows": rows},
        options.json,
    )
    return 0 if any("ms" in row for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
