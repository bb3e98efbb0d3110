"""Time candidate tiles of the paged decode kernel on a GPU and print which are fastest.

    python -m tilewise.bench.tune_paged --out FILE --seconds BUDGET

For every case the shipped choice comes first, then other tiles, then other split plans. Each is
checked against float64 before it is timed: a CUDA graph of calls over several caches, so that their
keys and values come from memory and not from L2. A row is one (case, candidate); its rate counts
the bytes of keys and values. A person reads the rows and commits the winners to `kernels.tiles`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels import device, tiles
from tilewise.kernels.spec import PagedSpec
from tilewise.kernels.tiles import SplitPlan, TileConfig
from tilewise.reference.paged import paged_attention
from tilewise.testing import budget_violation

ROTATED_BYTES = 512 << 20  # of caches per graph: several times the largest L2 in use
GRAPH_CALLS = 8  # at least, in one graph: the replay's own launch is shared among them
REPEATS = 11
CHECKED_SEQS = 4  # sequences compared with float64; all are timed


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of equal sequences, each with `run` new tokens."""

    batch: int
    num_q_heads: int
    num_kv_heads: int
    length: int
    block_size: int = 16
    head_dim: int = 128
    run: int = 1

    @property
    def name(self) -> str:
        """Shape in words."""
        return (
            f"B {self.batch}, {self.num_q_heads}/{self.num_kv_heads} heads, {self.length} keys, "
            f"D {self.head_dim}, block {self.block_size}, {self.run} new"
        )

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all keys and values."""
        values = self.batch * self.length * self.num_kv_heads * self.head_dim
        return 2 * values * dtype.itemsize


CASES = (
    Case(16, 32, 8, 8192),
    Case(1, 32, 8, 131072),
    Case(64, 32, 8, 4096),
    Case(128, 64, 8, 2048),
    Case(16, 32, 32, 4096),
    Case(1, 32, 8, 1024),
)
# (tile_m, tile_n, num_warps, num_stages); tile_m is raised to the rows of a run
KERNELS = (
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
PROGRAMS_PER_SM = (2, 4, 8, 16)
MIN_SPLIT_KEYS = (128, 256, 512)
SWEPT_KERNELS = 3  # the best ones, with every plan


@dataclass(slots=True)
class Inputs:
    """One case on the device: as many caches as a graph rotates through, one set of queries."""

    q: Tensor
    caches: list[tuple[Tensor, Tensor]]
    block_table: Tensor
    seqlens_k: Tensor
    cu_seqlens_q: Tensor
    truth: Tensor
    eager: Tensor


def make_inputs(case: Case, dtype: torch.dtype, where: str, rotated_bytes: int) -> Inputs:
    """Draw a case; block tables are shuffled, as after hours of serving."""
    generator = torch.Generator(device=where).manual_seed(0)
    blocks_each = -(-case.length // case.block_size)
    num_blocks = case.batch * blocks_each
    shape = (num_blocks, case.block_size, case.num_kv_heads, case.head_dim)
    copies = min(64, max(1, -(-rotated_bytes // case.cache_bytes(dtype))))

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, device=where, dtype=dtype)

    caches = [(draw(shape), draw(shape)) for _ in range(copies)]
    order = torch.randperm(num_blocks, generator=generator, device=where, dtype=torch.int64)
    block_table = order.view(case.batch, blocks_each).int()
    q = draw((case.batch * case.run, case.num_q_heads, case.head_dim))
    seqlens_k = torch.full((case.batch,), case.length, dtype=torch.int32, device=where)
    cu_seqlens_q = torch.arange(case.batch + 1, dtype=torch.int32, device=where) * case.run
    checked = min(case.batch, CHECKED_SEQS)
    rows = checked * case.run
    results = [
        paged_attention(
            q[:rows].to(wide),
            *caches[0],
            block_table=block_table[:checked],
            seqlens_k=seqlens_k[:checked],
            cu_seqlens_q=cu_seqlens_q[: checked + 1],
        )
        for wide in (torch.float64, dtype)
    ]
    truth, eager = results
    assert isinstance(truth, Tensor)
    assert isinstance(eager, Tensor)
    return Inputs(q, caches, block_table, seqlens_k, cu_seqlens_q, truth, eager)


def spec_of(case: Case, dtype: torch.dtype, where: str) -> PagedSpec:
    """Describe a case to the kernels."""
    return PagedSpec(
        device_type=where,
        dtype=dtype,
        cache_dtype=dtype,
        num_seqs=case.batch,
        num_tokens=case.batch * case.run,
        max_seqlen_q=case.run,
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.head_dim,
        block_size=case.block_size,
        max_blocks=-(-case.length // case.block_size),
        softmax_scale=case.head_dim**-0.5,
    )


def plan_of(
    spec: PagedSpec, config: TileConfig, programs_per_sm: int, min_split_keys: int, sm_count: int
) -> SplitPlan:
    """Plan the splits of a candidate with other constants than the shipped ones."""
    saved = tiles.PROGRAMS_PER_SM, tiles.MIN_SPLIT_KEYS
    tiles.PROGRAMS_PER_SM, tiles.MIN_SPLIT_KEYS = programs_per_sm, min_split_keys
    try:
        return tiles.plan_splits(spec, config, spec.max_seqlen_q, sm_count)
    finally:
        tiles.PROGRAMS_PER_SM, tiles.MIN_SPLIT_KEYS = saved


def call_of(
    inputs: Inputs, spec: PagedSpec, config: TileConfig, plan: SplitPlan
) -> Callable[[int], Tensor]:
    """Return a function of the cache's index that runs the decode kernels once."""
    from tilewise.kernels.triton.paged_decode import launch_decode

    def call(index: int) -> Tensor:
        k_cache, v_cache = inputs.caches[index % len(inputs.caches)]
        o = torch.empty_like(inputs.q)
        lse = torch.empty(o.shape[1], o.shape[0], dtype=torch.float32, device=o.device)
        launch_decode(
            inputs.q,
            k_cache,
            v_cache,
            spec,
            o,
            lse,
            block_table=inputs.block_table,
            seqlens_k=inputs.seqlens_k,
            cu_seqlens_q=inputs.cu_seqlens_q,
            alibi_slopes=None,
            sinks=None,
            config=config,
            plan=plan,
            max_run=spec.max_seqlen_q,
            clears=True,
        )
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


def kernels_of(case: Case, spec: PagedSpec, arch: int) -> list[TileConfig]:
    """List the tiles to try, the default first."""
    default = tiles.paged_split_config(spec, case.run, arch)
    tried = [
        TileConfig(max(m, default.tile_m), n, warps, stages) for m, n, warps, stages in KERNELS
    ]
    return [default, *(config for config in tried if config != default)]


def measure_case(
    case: Case, inputs: Inputs, spec: PagedSpec, arch: int, sm_count: int, deadline: float
) -> list[dict[str, Any]]:
    """Time every kernel with the default plan, then the best three with the other plans."""
    rows: list[dict[str, Any]] = []

    def add(name: str, config: TileConfig, plan: SplitPlan) -> None:
        if not rows or time.monotonic() < deadline:
            rows.append(measure(case, inputs, name, config, plan, spec))
            print(_line(rows[-1]), flush=True)

    timed: list[tuple[float, TileConfig, SplitPlan]] = []
    for config in kernels_of(case, spec, arch):
        plan = tiles.plan_splits(spec, config, case.run, sm_count)
        before = len(rows)
        add("default plan", config, plan)
        if len(rows) > before and "wrong" not in rows[-1]:
            timed.append((rows[-1].get("us", 0.0), config, plan))
    for _, config, default_plan in sorted(timed, key=lambda entry: entry[0])[:SWEPT_KERNELS]:
        seen = {default_plan}
        for programs in PROGRAMS_PER_SM:
            for keys in MIN_SPLIT_KEYS:
                plan = plan_of(spec, config, programs, keys, sm_count)
                if plan not in seen:
                    seen.add(plan)
                    add(f"{programs} programs/SM, {keys} keys/split", config, plan)
    return rows


def measure(case: Case, inputs: Inputs, name: str, config: TileConfig, plan: SplitPlan,
            spec: PagedSpec) -> dict[str, Any]:  # fmt: skip
    """Check one candidate, then time it; a wrong or failing one has no time, only its reason."""
    row: dict[str, Any] = {"case": case.name, "name": name, **asdict(config), **asdict(plan)}
    call = call_of(inputs, spec, config, plan)
    try:
        o = call(0)
        wrong = budget_violation(o[: inputs.truth.shape[0]], inputs.truth, inputs.eager)
    except Exception as error:  # what a compiler refuses is a result here
        wrong = f"{type(error).__name__}: {str(error)[:160]}"
    if wrong is not None:
        return {**row, "wrong": wrong}
    if inputs.q.device.type != "cuda":
        return row
    seconds = seconds_per_call(call, len(inputs.caches))
    rate = case.cache_bytes(inputs.q.dtype) / seconds / 1e12
    return {**row, "us": round(seconds * 1e6, 2), "tb_per_s": round(rate, 3)}


def tune(
    cases: Sequence[Case], dtype: torch.dtype, where: str, budget: float, rotated_bytes: int
) -> list[dict[str, Any]]:
    """Measure candidates of every case until its share of the budget is spent."""
    rows: list[dict[str, Any]] = []
    deadline = time.monotonic() + budget
    arch = device.arch_of(torch.device(where))
    sm_count = device.sm_count(torch.cuda.current_device()) if where == "cuda" else 4
    for number, case in enumerate(cases):
        share = (deadline - time.monotonic()) / (len(cases) - number)
        case_deadline = time.monotonic() + share
        spec = spec_of(case, dtype, where)
        inputs = make_inputs(case, dtype, where, rotated_bytes)
        found = measure_case(case, inputs, spec, arch, sm_count, case_deadline)
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
    result = row.get("wrong") or f"{row.get('us', '-')} us, {row.get('tb_per_s', '-')} TB/s"
    return f"{row['case']} | {tile} | {row['name']} ({row['num_pairs']} pairs) | {result}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tuner; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=300.0, help="budget of the whole run")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--block-size", type=int, default=16, help="tokens per cache block")
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype)
    cases = [replace(case, block_size=args.block_size) for case in CASES]
    rows = tune(cases, dtype, "cuda", args.seconds, ROTATED_BYTES)
    where = torch.cuda.get_device_name()
    document = {"device": where, "torch": torch.__version__, "dtype": args.dtype, "rows": rows}
    if args.out is not None:
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
