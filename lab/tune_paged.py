"""Time candidate tiles of the paged kernels on a GPU and print which are fastest.

    python lab/tune_paged.py [--kernel decode|rows] [--heads usual|wide] --out FILE --seconds BUDGET

For every case the shipped choice comes first, then other tiles, then (decode) other split plans.
Each is checked against float64 before it is timed: a CUDA graph of calls over several caches, so
that keys and values come from memory and not from L2. A row is one (case, candidate). A person
reads the rows and commits the winners to `kernels.tiles.paged`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.plan import Call
from tilewise.kernels.spec import PagedSpec, PagedTensors
from tilewise.kernels.tiles import paged as tiles
from tilewise.kernels.tiles.paged import SplitPlan, TileConfig
from tilewise.reference.paged import paged_attention
from tilewise.testing import budget_violation

ROTATED_BYTES = 512 << 20  # of caches per graph: several times the largest L2 in use
MOST_CACHES = 64
GRAPH_CALLS = 8  # at least, in one graph: the replay's own launch is shared among them
REPEATS = 11
READ_TB_PER_S = 4.48  # what an H200 reads from memory (2026-11-20)
CHECKED_SEQS, CHECKED_ROWS = 4, 64  # the last rows of the first sequences; all are timed


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of equal sequences, each with `run` new tokens."""

    batch: int
    num_q_heads: int
    num_kv_heads: int
    length: int
    run: int = 1
    block_size: int = 16
    head_dim: int = 128
    v_head_dim: int = 0  # 0 is head_dim
    cache: str = ""  # dtype of the cache; "" is that of q

    @property
    def name(self) -> str:
        """Shape in words."""
        return (
            f"B {self.batch}, {self.num_q_heads}/{self.num_kv_heads} heads, {self.length} keys, "
            f"{self.run} new, D {self.head_dim}{self._others}, block {self.block_size}"
        )

    @property
    def _others(self) -> str:
        wide = f"/{self.v_head_dim}" if self.v_head_dim else ""
        return f"{wide}, {self.cache}" if self.cache else wide

    @property
    def width(self) -> int:
        """Channels of a key and its value."""
        return self.head_dim + (self.v_head_dim or self.head_dim)

    @property
    def cache_values(self) -> int:
        """Elements of all keys and values."""
        return self.batch * self.length * self.num_kv_heads * self.width

    @property
    def flops(self) -> int:
        """2 (D + Dv) per visible pair of query and key."""
        pairs = self.run * self.length - self.run * (self.run - 1) // 2
        return 2 * self.batch * self.num_q_heads * self.width * pairs


@dataclass(frozen=True, slots=True)
class Candidate:
    """Tiles to try, and how to split keys; no plan means the kernel for long runs."""

    name: str
    config: TileConfig
    plan: SplitPlan | None


DECODE_CASES: tuple[Case, ...] = (
    Case(16, 32, 8, 8192),
    Case(1, 32, 8, 131072),
    Case(64, 32, 8, 4096),
    Case(128, 64, 8, 2048),
    Case(16, 32, 32, 4096),
    Case(1, 32, 8, 1024),
)
ROWS_CASES: tuple[Case, ...] = (
    Case(8, 32, 8, 1024, run=1024),
    Case(1, 32, 8, 8192, run=8192),
    Case(4, 32, 8, 16384, run=512),
    Case(8, 16, 16, 2048, run=2048),
)
# Heads of more than 256 channels, and of 256 beside them.
WIDE_DECODE_CASES: tuple[Case, ...] = (
    *(
        Case(batch, group, 1, 4096, head_dim=512, cache=cache)
        for cache in ("", "int8", "float8_e4m3fn")
        for batch in (1, 32, 64)
        for group in (8, 16)
    ),
    Case(32, 16, 1, 4096, head_dim=576, v_head_dim=512),
    Case(32, 64, 1, 4096, head_dim=512),
    Case(32, 16, 2, 4096, head_dim=256),
)
WIDE_ROWS_CASES: tuple[Case, ...] = (
    Case(4, 16, 2, 4096, run=4096, head_dim=512),
    Case(4, 16, 2, 4096, run=4096, head_dim=256),
    Case(4, 16, 2, 8192, run=512, head_dim=512, cache="int8"),
    Case(4, 16, 1, 4096, run=4096, head_dim=576, v_head_dim=512),
)
# (tile_m, tile_n, num_warps, num_stages); tile_m is raised to the rows of a run
DECODE_TILES = (
    (16, 64, 4, 3),
    (16, 64, 4, 4),
    (16, 64, 4, 2),
    (16, 128, 4, 2),
    (16, 128, 8, 3),
    (16, 128, 4, 3),
    (16, 32, 4, 4),
    (16, 32, 4, 6),
    (16, 32, 2, 4),
    (16, 64, 2, 3),
    (16, 64, 8, 3),
    (16, 64, 8, 4),
    (64, 64, 4, 3),
    (16, 256, 8, 2),
)
ROWS_TILES = (
    (128, 64, 8, 3),
    (128, 64, 8, 2),
    (128, 64, 8, 4),
    (128, 128, 8, 2),
    (128, 128, 8, 3),
    (128, 32, 8, 4),
    (64, 64, 4, 3),
    (64, 64, 4, 2),
    (64, 128, 4, 2),
    (64, 32, 4, 4),
)
WIDE_DECODE_TILES = (
    (16, 16, 8, 3),
    (16, 16, 4, 3),
    (16, 16, 4, 4),
    (16, 16, 8, 4),
    (16, 16, 4, 2),
    (16, 32, 4, 2),
    (16, 32, 8, 2),
    (16, 32, 4, 3),
    (16, 32, 8, 3),
    (16, 64, 8, 2),
)
WIDE_ROWS_TILES = (
    (64, 32, 8, 2),
    (64, 16, 8, 3),
    (64, 16, 8, 2),
    (64, 32, 8, 1),
    (64, 64, 8, 1),
    (32, 32, 8, 2),
)
PROGRAMS_PER_SM = (2, 4, 8, 16)
MIN_SPLIT_KEYS = (128, 256, 512)
SWEPT_TILES = 3  # the best ones, with every plan


@dataclass(slots=True)
class Inputs:
    """One case on the device: as many caches as a graph rotates through, one set of queries."""

    spec: PagedSpec
    q: Tensor
    caches: list[tuple[Tensor, Tensor]]
    scales: tuple[Tensor, ...]  # of keys and of values of an 8-bit cache, the same in all caches
    block_table: Tensor
    seqlens_k: Tensor
    cu_seqlens_q: Tensor
    checked: Tensor  # rows of q that truth and eager hold
    truth: Tensor
    eager: Tensor


def spec_of(case: Case, dtype: torch.dtype, where: str) -> PagedSpec:
    """Describe a case to the kernels."""
    return PagedSpec(
        device_type=where,
        dtype=dtype,
        cache_dtype=getattr(torch, case.cache) if case.cache else dtype,
        num_seqs=case.batch,
        num_tokens=case.batch * case.run,
        max_seqlen_q=case.run,
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim or case.head_dim,
        block_size=case.block_size,
        max_blocks=-(-case.length // case.block_size),
        softmax_scale=case.head_dim**-0.5,
    )


def make_inputs(case: Case, dtype: torch.dtype, where: str, rotated_bytes: int) -> Inputs:
    """Draw a case; block tables are shuffled, as after hours of serving."""
    generator = torch.Generator(device=where).manual_seed(0)
    blocks_each = -(-case.length // case.block_size)
    spec = spec_of(case, dtype, where)
    shape = (case.batch * blocks_each, case.block_size, case.num_kv_heads)
    copies = -(-rotated_bytes // (case.cache_values * spec.cache_dtype.itemsize))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=where, dtype=dtype)

    def draw_cache(width: int) -> Tensor:
        if spec.cache_dtype != torch.int8:
            return draw(*shape, width).to(spec.cache_dtype)
        size = (*shape, width)
        return torch.randint(
            -127, 128, size, generator=generator, device=where, dtype=spec.cache_dtype
        )

    caches = [
        (draw_cache(spec.head_dim), draw_cache(spec.v_head_dim))
        for _ in range(min(copies, MOST_CACHES))
    ]
    scales: tuple[Tensor, ...] = ()
    if spec.cache_dtype.itemsize == 1:
        largest = 64.0 if spec.cache_dtype == torch.int8 else 1.0
        scales = tuple(draw(*shape).float().abs() / largest for _ in range(2))
    order = torch.randperm(shape[0], generator=generator, device=where)
    block_table = order.view(case.batch, blocks_each).int()
    q = draw(case.batch * case.run, case.num_q_heads, case.head_dim)
    seqlens_k = torch.full((case.batch,), case.length, dtype=torch.int32, device=where)
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=where)
    seqs, rows = min(case.batch, CHECKED_SEQS), min(case.run, CHECKED_ROWS)
    checked = torch.arange(seqs * case.run, device=where).view(seqs, -1)[:, -rows:].flatten()
    scaled: dict[str, Any] = dict(zip(("k_scale", "v_scale"), scales, strict=False))
    results = []
    for wide in (torch.float64, dtype):
        result = paged_attention(
            q[checked].to(wide),
            *caches[0],
            block_table=block_table[:seqs],
            seqlens_k=seqlens_k[:seqs],
            cu_seqlens_q=starts[: seqs + 1] * rows,
            **scaled,
        )
        assert isinstance(result, Tensor)
        results.append(result)
    return Inputs(
        spec=spec,
        q=q,
        caches=caches,
        scales=scales,
        block_table=block_table,
        seqlens_k=seqlens_k,
        cu_seqlens_q=starts * case.run,
        checked=checked,
        truth=results[0],
        eager=results[1],
    )


def call_of(inputs: Inputs, candidate: Candidate) -> Callable[[int], Tensor]:
    """Return a function of the cache's index that runs the candidate once."""
    from tilewise.kernels.triton.paged.plan import made_fwd

    spec, rows_config = inputs.spec, None
    split_run, splits = spec.max_seqlen_q, candidate.plan
    if splits is None:
        split_run, rows_config = 0, candidate.config
        splits = tiles.plan_splits(spec, candidate.config, 1, 1)  # of no kernel
    work = tiles.PagedWork(split_run, candidate.config, splits, rows_config)
    beside = (inputs.block_table, inputs.seqlens_k, inputs.cu_seqlens_q)
    tensors = PagedTensors(inputs.q, *inputs.caches[0], *beside)
    if inputs.scales:
        tensors = tensors._replace(k_scale=inputs.scales[0], v_scale=inputs.scales[1])
    plan = made_fwd(Call.of(spec, tensors), work)

    def call(index: int) -> Tensor:
        k_cache, v_cache = inputs.caches[index % len(inputs.caches)]
        o, _ = plan.run(*tensors._replace(k_cache=k_cache, v_cache=v_cache))
        assert o is not None
        return o

    return call


def seconds_per_call(call: Callable[[int], Tensor], copies: int) -> float:
    """Median time of one call within a replayed graph of calls over all caches."""
    count = max(GRAPH_CALLS, copies)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            call(index)
    graph.replay()
    torch.cuda.synchronize()
    seconds: list[float] = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / count)
    return statistics.median(seconds)


def measure(case: Case, inputs: Inputs, candidate: Candidate) -> dict[str, Any]:
    """Check one candidate, then time it; a wrong or failing one has no time, only its reason."""
    row: dict[str, Any] = {"case": case.name, "name": candidate.name, **asdict(candidate.config)}
    if candidate.plan is not None:
        row |= asdict(candidate.plan)
    call = call_of(inputs, candidate)
    try:
        wrong = budget_violation(call(0)[inputs.checked], inputs.truth, inputs.eager)
    except Exception as error:  # what a compiler refuses is a result here
        wrong = f"{type(error).__name__}: {str(error)[:160]}"
    if wrong is not None:
        return {**row, "wrong": wrong}
    if inputs.q.device.type != "cuda":
        return row
    seconds = seconds_per_call(call, len(inputs.caches))
    # A byte has its share of a scale of its own, of 4 bytes for all channels of a head.
    read = case.cache_values * inputs.spec.cache_dtype.itemsize
    read += 4 * len(inputs.scales) * case.batch * case.length * case.num_kv_heads
    rate = read / seconds / 1e12
    return {
        **row,
        "us": round(seconds * 1e6, 2),
        "tb_per_s": round(rate, 3),
        "percent_of_read": round(100 * rate / READ_TB_PER_S, 1),
        "tflops": round(case.flops / seconds / 1e12, 1),
    }


def tiles_to_try(case: Case, spec: PagedSpec, arch: int) -> list[TileConfig]:
    """List the tiles to try, the shipped ones first."""
    if case.run > tiles.MAX_SPLIT_RUN:
        shipped = tiles.paged_rows_config(spec, arch)
        rows_tiles = WIDE_ROWS_TILES if tiles.is_wide(spec) else ROWS_TILES
        tried = [TileConfig(*numbers) for numbers in rows_tiles]
    else:
        shipped = tiles.paged_split_config(spec, case.run, arch)
        decode_tiles = WIDE_DECODE_TILES if tiles.is_wide(spec) else DECODE_TILES
        tried = [TileConfig(max(m, shipped.tile_m), *rest) for m, *rest in decode_tiles]
    return [shipped, *(config for config in tried if config != shipped)]


def other_plans(
    case: Case, spec: PagedSpec, config: TileConfig, sm_count: int
) -> Iterator[Candidate]:
    """Yield candidates that split keys otherwise than the shipped constants."""
    seen = {tiles.plan_splits(spec, config, case.run, sm_count)}
    for programs in PROGRAMS_PER_SM:
        for keys in MIN_SPLIT_KEYS:
            plan = tiles.plan_splits(
                spec, config, case.run, sm_count, programs_per_sm=programs, min_split_keys=keys
            )
            if plan not in seen:
                seen.add(plan)
                yield Candidate(f"{programs} programs/SM, {keys} keys/split", config, plan)


def measure_case(
    case: Case, inputs: Inputs, arch: int, sm_count: int, deadline: float
) -> list[dict[str, Any]]:
    """Time all tiles with the shipped plan, then the best ones with the other plans."""
    rows: list[dict[str, Any]] = []
    timed: list[tuple[float, TileConfig]] = []
    spec = inputs.spec
    splits = case.run <= tiles.MAX_SPLIT_RUN

    def add(candidate: Candidate) -> None:
        if rows and time.monotonic() > deadline:
            return
        rows.append(measure(case, inputs, candidate))
        timed.append((rows[-1].get("us", float("inf")), candidate.config))
        print(_line(rows[-1]), flush=True)

    for config in tiles_to_try(case, spec, arch):
        plan = tiles.plan_splits(spec, config, case.run, sm_count) if splits else None
        add(Candidate("shipped plan", config, plan))
    if splits:
        for _, config in sorted(timed, key=lambda entry: entry[0])[:SWEPT_TILES]:
            for candidate in other_plans(case, spec, config, sm_count):
                add(candidate)
    return rows


def tune(
    cases: Sequence[Case], dtype: torch.dtype, where: str, budget: float, rotated_bytes: int
) -> list[dict[str, Any]]:
    """Measure candidates of every case until its share of the budget (seconds) is spent."""
    rows: list[dict[str, Any]] = []
    deadline = time.monotonic() + budget
    arch = device.arch_of(torch.device(where))
    sm_count = device.sm_count_of(torch.device(where))
    for number, case in enumerate(cases):
        now = time.monotonic()
        inputs = make_inputs(case, dtype, where, rotated_bytes)
        found = measure_case(
            case, inputs, arch, sm_count, now + (deadline - now) / (len(cases) - number)
        )
        best = min(found, key=lambda row: row.get("us", float("inf")))
        print(f"best: {_line(best)}\n", flush=True)
        rows += found
        del inputs
        if where == "cuda":
            torch.cuda.empty_cache()
    return rows


def _line(row: dict[str, Any]) -> str:
    """One row as text."""
    tile = "x".join(str(row[key]) for key in ("tile_m", "tile_n", "num_warps", "num_stages"))
    rates = f"{row.get('us')} us, {row.get('tb_per_s')} TB/s, {row.get('tflops')} TFLOP/s"
    pairs = f" ({row['num_pairs']} pairs)" if "num_pairs" in row else ""
    return f"{row['case']} | {tile} | {row['name']}{pairs} | {row.get('wrong', rates)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tuner; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", default="decode", choices=("decode", "rows"))
    parser.add_argument("--heads", default="usual", choices=("usual", "wide"))
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=300.0, help="budget of the whole run")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--block-size", type=int, default=16, help="tokens per cache block")
    args = parser.parse_args(argv)
    is_decode = args.kernel == "decode"
    cases = DECODE_CASES if is_decode else ROWS_CASES
    if args.heads == "wide":
        cases = WIDE_DECODE_CASES if is_decode else WIDE_ROWS_CASES
    cases = tuple(replace(case, block_size=args.block_size) for case in cases)
    rows = tune(cases, getattr(torch, args.dtype), "cuda", args.seconds, ROTATED_BYTES)
    document = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "dtype": args.dtype,
        "kernel": args.kernel,
        "heads": args.heads,
        "rows": rows,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
