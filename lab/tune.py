"""Time every candidate row of the attention tile tables on this device.

    python lab/tune.py --out rows.json --seconds 540

Each part (fwd, dkdv, dq) is timed alone, on 16,384 tokens and a hidden size of 2,048 as in the
FlashAttention papers. A row whose result differs from that of the default row is reported and never
timed. A person reads the rows and commits the best ones to `kernels/tiles/attention.py`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tilewise.children import spawning
from tilewise.errors import UnsupportedError
from tilewise.kernels import device as facts
from tilewise.kernels.plan import Call, Plan, Refusal, Results
from tilewise.kernels.spec import AttentionSpec, AttentionTensors
from tilewise.kernels.tiles.attention import Part, candidates
from tilewise.kernels.tiles.paged import TileConfig
from tilewise.testing import make_qkv

__all__ = ["Row", "tune_attention"]

TOKENS = 16384  # B * N of every shape
HIDDEN = 2048  # H * D of every shape
PRODUCTS: dict[Part, int] = {"fwd": 2, "dkdv": 4, "dq": 3}  # matrix products of each part
TOLERANCE = 0.02  # of the largest entry: rows sum in different orders, in bf16 rounding


@dataclass(frozen=True)
class Row:
    """One timed or refused candidate."""

    part: Part
    head_dim: int
    seqlen: int
    causal: bool
    tile: tuple[int, int, int, int]
    milliseconds: float | None
    tflops: float | None
    error: str | None

    def __str__(self) -> str:
        shape = f"D {self.head_dim:3d} N {self.seqlen:5d} {'causal' if self.causal else 'full  '}"
        tile = "x".join(map(str, self.tile))
        if self.error is not None:
            return f"{self.part:5s} {shape} {tile:14s} refused: {self.error}"
        speed = f"{self.milliseconds:8.3f} ms {self.tflops:6.1f} TFLOP/s"
        return f"{self.part:5s} {shape} {tile:14s} {speed}"


def make_spec(head_dim: int, seqlen: int, causal: bool, tokens: int = TOKENS) -> AttentionSpec:
    """Return the bf16 shape of the papers with this head dim and length."""
    heads = HIDDEN // head_dim
    return AttentionSpec(
        device_type="cuda",
        dtype=torch.bfloat16,
        batch=tokens // seqlen,
        max_seqlen_q=seqlen,
        max_seqlen_k=seqlen,
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        window_right=0 if causal else -1,
        softmax_scale=head_dim**-0.5,
    )


def _calls(spec: AttentionSpec, device: str) -> dict[Part, Callable[[TileConfig | None], Results]]:
    """Return one function per part that runs it with given tiles on fixed random inputs."""
    from tilewise.kernels.triton.attention import plan as attention

    q, k, v = make_qkv(
        spec.batch, spec.max_seqlen_q, spec.max_seqlen_k, spec.num_q_heads, spec.num_kv_heads,
        spec.head_dim, dtype=spec.dtype, device=device,
    )  # fmt: skip
    tensors = AttentionTensors(q, k, v)

    def forward(tile: TileConfig | None) -> Plan | Refusal:
        return attention.plan_fwd(Call.of(spec, tensors), {} if tile is None else {"fwd": tile})

    first = forward(None)
    if isinstance(first, Refusal):
        raise UnsupportedError(first.reason)
    o, lse = first.run(*tensors)
    assert o is not None
    do = torch.randn_like(o)
    before = (do, None, o, lse, None, None, *tensors)
    row_terms = attention.plan_part("rows", Call.of(spec, before)).run(*before)
    given = (do, None, None, None, *row_terms, *tensors)
    call = Call.of(spec, given)
    return {
        "fwd": _Candidates(forward, tensors),
        "dkdv": _Candidates(partial(attention.plan_part, "dkdv", call), given),
        "dq": _Candidates(partial(attention.plan_part, "dq", call), given),
    }


class _Candidates:
    """A part of a call, which is planned once for each row that is tried."""

    def __init__(
        self, planner: Callable[[TileConfig | None], Plan | Refusal], given: Sequence[Tensor | None]
    ) -> None:
        self._planner, self._given = planner, given
        self._plans: dict[TileConfig | None, Plan] = {}

    def __call__(self, tile: TileConfig | None) -> Results:
        plan = self._plans.get(tile)
        if plan is None:
            found = self._planner(tile)
            assert not isinstance(found, Refusal)
            plan = self._plans[tile] = found
        return plan.run(*self._given)


def _difference(actual: Results, expected: Results) -> str | None:
    """Say how a candidate's result differs from the default row's, or return None."""
    for index, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert got is not None
        assert want is not None
        gap = (got.float() - want.float()).abs().max().item()
        limit = TOLERANCE * want.float().abs().max().item()
        if not gap <= limit:  # NaN must fail too
            return f"result {index} must be within {limit:.2e} of the default row, got {gap:.2e}"
    return None


def compile_ahead(jobs: Iterable[tuple[AttentionSpec, Part, TileConfig]], workers: int) -> None:
    """Fill Triton's disk cache from several processes; a row that fails is met again later."""
    context = multiprocessing.get_context("spawn")
    with spawning(), ProcessPoolExecutor(workers, mp_context=context) as pool:
        list(pool.map(_compile_one, jobs))


def _compile_one(job: tuple[AttentionSpec, Part, TileConfig]) -> None:
    # Lengths are not specialised, so a short call compiles the same kernel as a long one.
    spec, part, tile = job
    short = spec._replace(batch=1, max_seqlen_q=256, max_seqlen_k=256)
    try:
        _calls(short, "cuda")[part](tile)
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{part} D {spec.head_dim} {tile}: {type(error).__name__}", flush=True)


def _shapes(seqlens: Iterable[int], head_dims: Iterable[int]) -> Iterator[tuple[int, int, bool]]:
    for seqlen in seqlens:
        for head_dim in head_dims:
            for causal in (False, True):
                yield head_dim, seqlen, causal


def tune_attention(
    out: Path,
    seconds: float,
    *,
    head_dims: tuple[int, ...] = (128, 64, 256),
    seqlens: tuple[int, ...] = (4096, 16384, 1024),
    parts: tuple[Part, ...] = ("fwd", "dkdv", "dq"),
    tokens: int = TOKENS,
    workers: int = 0,
    device: str = "cuda",
    time_call: Callable[[Callable[[], object]], float] | None = None,
) -> list[Row]:
    """Time the candidates of every shape until `seconds` have passed, and write them as JSON.

    Args:
        out: path of the JSON, rewritten after each shape.
        seconds: budget of wall time; shapes come in the order of seqlens, then head_dims.
        tokens: B * N.
        workers: processes that compile ahead; 0 compiles on the way.
        device: "cuda", or "cpu" under Triton's interpreter.
        time_call: returns milliseconds of a call; triton.testing.do_bench's median by default.

    Returns:
        The rows in the order of measurement.
    """
    if time_call is None:
        from triton.testing import do_bench

        def time_call(call: Callable[[], object]) -> float:
            return float(do_bench(call, warmup=10, rep=60, return_mode="median"))

    stop = time.monotonic() + seconds
    arch = facts.arch_of(torch.device(device))
    if workers:
        specs = [make_spec(d, 256, causal) for d, _, causal in _shapes((256,), head_dims)]
        jobs = [(s, p, tile) for s in specs for p in parts for tile in candidates(s, p, arch)]
        compile_ahead(jobs, workers)
    rows: list[Row] = []
    for head_dim, seqlen, causal in _shapes(seqlens, head_dims):
        if time.monotonic() > stop:
            print(f"out of time before D {head_dim} N {seqlen}", flush=True)
            break
        spec = make_spec(head_dim, seqlen, causal, tokens)
        calls = _calls(spec, device)
        for part in parts:
            expected = calls[part](None)
            for tile in candidates(spec, part, arch):
                row = _measure(spec, part, tile, calls[part], expected, time_call)
                print(row, flush=True)
                rows.append(row)
        out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return rows


def _measure(
    spec: AttentionSpec,
    part: Part,
    tile: TileConfig,
    call: Callable[[TileConfig | None], Results],
    expected: Results,
    time_call: Callable[[Callable[[], object]], float],
) -> Row:
    shape = (tile.tile_m, tile.tile_n, tile.num_warps, tile.num_stages)
    milliseconds = tflops = None
    try:
        error = _difference(call(tile), expected)
        if error is None:
            milliseconds = time_call(lambda: call(tile))
            flops = 2.0 * PRODUCTS[part] * spec.batch * spec.num_q_heads * spec.head_dim
            flops *= spec.max_seqlen_q * spec.max_seqlen_k * (0.5 if spec.causal else 1.0)
            tflops = flops / milliseconds / 1e9
    except Exception as failure:  # a row that does not fit the device is an answer, not an end
        error = f"{type(failure).__name__}: {str(failure)[:120]}"
    return Row(
        part, spec.head_dim, spec.max_seqlen_q, spec.causal, shape, milliseconds, tflops, error
    )


def print_best(rows: list[Row]) -> None:
    """Print the fastest row of each shape, and the backward pass that they make together."""
    best: dict[tuple[int, int, bool], dict[Part, Row]] = {}
    for row in rows:
        if row.milliseconds is None:
            continue
        found = best.setdefault((row.head_dim, row.seqlen, row.causal), {})
        known = found.get(row.part)
        if known is None or row.milliseconds < (known.milliseconds or 0.0):
            found[row.part] = row
    print("\nbest")
    for found in best.values():
        for row in found.values():
            print(row)
        if "dkdv" in found and "dq" in found:
            together = sum(found[p].milliseconds or 0.0 for p in ("dkdv", "dq"))
            dq = found["dq"]
            # The papers count five products for a backward pass, whatever is recomputed.
            tflops = (dq.tflops or 0.0) * (dq.milliseconds or 0.0) / PRODUCTS["dq"] * 5 / together
            print(f"bwd   both kernels {together:8.3f} ms {tflops:6.1f} TFLOP/s by five products")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="path of the JSON to write")
    parser.add_argument("--seconds", type=float, default=540.0, help="budget of wall time")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile ahead")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64, 256])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[4096, 16384, 1024])
    parser.add_argument("--parts", nargs="+", default=["fwd", "dkdv", "dq"], choices=PRODUCTS)
    args = parser.parse_args()
    rows = tune_attention(
        args.out,
        args.seconds,
        head_dims=tuple(args.head_dims),
        seqlens=tuple(args.seqlens),
        parts=tuple(args.parts),
        workers=args.workers,
    )
    print_best(rows)


if __name__ == "__main__":
    main()
