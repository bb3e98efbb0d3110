"""Paged attention of any batch: prompt chunks, short runs and single tokens side by side.

what     o = softmax(scale * q k^T) v of packed rows over the cached keys of their own sequence
grid     none: `launch` hands runs of few tokens to `paged_decode` and longer ones, draft trees and
         shared prefixes to `rows`
program  see there
traffic  with shared prefixes: the keys after them once for each sequence, they themselves once for
         each group; every pass of groups reads and writes o once more
numerics as in `keys`; a pass of groups is merged into o by lse, so o is rounded once a pass
"""

from typing import Any

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.spec import PagedSpec, SharedKeys
from tilewise.kernels.tiles import paged as tiles
from tilewise.kernels.tiles.paged_rows import extend_config, plan_rows
from tilewise.kernels.triton.paged import decode as paged_decode
from tilewise.kernels.triton.paged.quantise import Scales, as_bytes
from tilewise.kernels.triton.paged.rows import launch_rows
from tilewise.kernels.triton.paged.splits import launch_plan
from tilewise.kernels.triton.start import Start, by_triton

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BYTE_DTYPES = (torch.int8, torch.float8_e4m3fn)
MAX_HEAD_DIM = 256  # a tile of keys of this width still fits shared memory twice


def why_not(spec: PagedSpec) -> str | None:
    """Say why these kernels cannot run a call, or return None when they can."""
    if spec.device_type != "cuda" and not device.interpreting():
        return f"needs a CUDA device, got {spec.device_type}"
    if spec.dtype not in DTYPES:
        return f"dtype of q must be float32, float16 or bfloat16, got {spec.dtype}"
    if spec.cache_dtype not in (*DTYPES, *BYTE_DTYPES):
        return (
            "dtype of the cache must be float32, float16, bfloat16, int8 or float8_e4m3fn, "
            f"got {spec.cache_dtype}"
        )
    for name, width in (("head_dim", spec.head_dim), ("v_head_dim", spec.v_head_dim)):
        if width > MAX_HEAD_DIM:
            return f"{name} must be at most {MAX_HEAD_DIM}, got {width}"
    return None


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    spec: PagedSpec,
    *,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    tree_mask: Tensor | None = None,
    shared: SharedKeys | None = None,
    plan: Tensor | None = None,
    start: Start = by_triton,
) -> tuple[Tensor, Tensor]:
    """Return o (T, Hq, Dv) in the dtype of q and lse (Hq, T) float32.

    Rows past cu_seqlens_q[B] get o = 0 and lse = -inf. No synchronisation: what depends on the
    lengths is decided on the device, so that a captured CUDA graph can be replayed with others.

    Args:
        plan: records of `fill_plan` for the short runs of these lengths; else programs find their
            keys.
        start: launches (kernel, grid, *arguments, **constants).
    """
    shape = (spec.num_tokens, spec.num_q_heads, spec.v_head_dim)
    o = torch.empty(shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((spec.num_q_heads, spec.num_tokens), dtype=torch.float32, device=q.device)
    if spec.num_tokens == 0:
        return o, lse
    arch, sm_count = device.arch_of(q.device), device.sm_count_of(q.device)
    scales = Scales.of(k_cache, k_scale, v_scale, lse)
    k_cache, v_cache = as_bytes(k_cache), as_bytes(v_cache)
    tensors: dict[str, Any] = {
        "block_table": block_table,
        "seqlens_k": seqlens_k,
        "cu_seqlens_q": cu_seqlens_q,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "scales": scales,
        "start": start,
    }
    if tree_mask is None and shared is None:
        choose = tiles.paged_work if plan is None else tiles.planned_work
        work = choose(spec, arch, sm_count)
        if work.split_run > 0:
            paged_decode.launch_decode(
                q, k_cache, v_cache, spec, o, lse, **tensors, config=work.split_config,
                plan=work.split_plan, max_run=work.split_run, clears=work.rows_config is None,
                records=plan,
            )  # fmt: skip
        if work.rows_config is not None:
            launch_rows(
                q, k_cache, v_cache, spec, o, lse, plan_rows(spec, work.rows_config, sm_count),
                **tensors, split_run=work.split_run,
            )  # fmt: skip
        return o, lse
    rows_plan = plan_rows(spec, extend_config(spec, arch), sm_count)
    skipped = None if shared is None else shared.skipped
    launch_rows(
        q, k_cache, v_cache, spec, o, lse, rows_plan, **tensors, tree_mask=tree_mask,
        skipped=skipped,
    )  # fmt: skip
    for level in () if shared is None else shared.levels:
        group_spec = spec.of_level(level)
        rows_plan = plan_rows(group_spec, extend_config(group_spec, arch), sm_count, adds=True)
        launch_rows(
            q, k_cache, v_cache, group_spec, o, lse, rows_plan, block_table=level.block_table,
            seqlens_k=level.seqlens_k, cu_seqlens_q=level.cu_seqlens_q, scales=scales,
            rows=level.rows, adds=True, start=start,
        )  # fmt: skip
    return o, lse


def plan_pairs(spec: PagedSpec, where: torch.device) -> int:
    """Return how many rows a plan of `spec` has; 0 where no kernel would read them."""
    if spec.has_tree or spec.has_shared or spec.num_tokens == 0:
        return 0
    sm_count = device.sm_count_of(where)
    work = tiles.planned_work(spec, device.arch_of(where), sm_count)
    if work.split_run == 0:
        return 0
    return work.split_plan.num_pairs + paged_decode.counter_rows(
        spec, work.split_config, work.split_plan, work.split_run
    )


def fill_plan(records: Tensor, spec: PagedSpec, seqlens_k: Tensor, cu_seqlens_q: Tensor) -> None:
    """Write the records of these lengths into the first rows; the counters behind them stay 0."""
    sm_count = device.sm_count_of(records.device)
    work = tiles.planned_work(spec, device.arch_of(records.device), sm_count)
    launch_plan(
        seqlens_k, cu_seqlens_q, records, plan=work.split_plan,
        tile_n=work.split_config.tile_n, max_run=work.split_run, window_left=spec.window_left,
    )  # fmt: skip
