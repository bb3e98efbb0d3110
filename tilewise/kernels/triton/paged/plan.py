"""Paged attention of any batch: prompt chunks, short runs and single tokens side by side.

what     o = softmax(scale * q k^T) v of packed rows over the cached keys of their own sequence
grid     none: a plan hands runs of few tokens to `paged_decode` and longer ones, draft trees and
         shared prefixes to `rows`
program  that of these kernels traffic  with shared prefixes: the keys after them once for each
sequence, they themselves once for
         each group; every pass of groups reads and writes o once more
numerics as in `keys`; a pass of groups is merged into o by lse, so o is rounded once a pass
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.host.plan import Maker as AddressedMaker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.plan import Call, LaunchPlan, Maker, Refusal
from tilewise.kernels.spec import FOUR_BITS, PagedSpec, PagedTensors, SharedKeys
from tilewise.kernels.tiles import paged as tiles
from tilewise.kernels.tiles.paged import PagedWork, SplitPlan, TileConfig
from tilewise.kernels.tiles.paged_rows import extend_config, plan_rows
from tilewise.kernels.triton.paged import decode as paged_decode
from tilewise.kernels.triton.paged.quantise import Scales, as_bytes
from tilewise.kernels.triton.paged.rows import launch_rows
from tilewise.kernels.triton.paged.splits import (
    FIELDS,
    SPLIT_OVERHEAD,
    TILE_B,
    _plan_kernel,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BYTE_DTYPES = (torch.int8, torch.float8_e4m3fn, FOUR_BITS)
# Of v and o: sums of 64 rows of 512 channels are 128 registers for each thread of 8 warps.
MAX_HEAD_DIM, MAX_V_HEAD_DIM = 576, 512
WIDEST_OF_FOUR_BITS = 256  # two sums of 16 rows of 256 channels each spilled 812 bytes a thread


def why_not(spec: PagedSpec) -> str | None:
    """Return why these kernels cannot run a call, or None if they can."""
    if spec.device_type != "cuda" and not device.interpreting():
        return f"needs a CUDA device, got {spec.device_type}"
    if spec.dtype not in DTYPES:
        return f"dtype of q must be float32, float16 or bfloat16, got {spec.dtype}"
    if spec.cache_dtype not in (*DTYPES, *BYTE_DTYPES):
        return (
            "dtype of the cache must be float32, float16, bfloat16, int8, float8_e4m3fn or uint8, "
            f"got {spec.cache_dtype}"
        )
    for name, width, widest in (
        ("head_dim", spec.head_dim, MAX_HEAD_DIM),
        ("v_head_dim", spec.v_head_dim, MAX_V_HEAD_DIM),
    ):
        if width > widest:
            return f"{name} must be at most {widest}, got {width}"
        if spec.cache_dtype == FOUR_BITS and (width % 16 or width > WIDEST_OF_FOUR_BITS):
            return (
                f"{name} must be a multiple of 16 of at most {WIDEST_OF_FOUR_BITS} in a cache of 4 "
                f"bits, got {width}"
            )
    return None


def plan_fwd(call: Call, work: PagedWork | None = None) -> LaunchPlan | Refusal:
    """Return the plan of a call, or a Refusal with the reason.

    Its results are o (T, Hq, Dv) in the dtype of q and lse (Hq, T) float32.
    Rows past cu_seqlens_q[B] get o = 0 and lse = -inf. The host does not wait: whatever depends on
    the lengths is decided on the device, so that a captured CUDA graph can be replayed with others.

    Args:
        work: the work table's entry, which overrides the table for tuning.
    """
    reason = why_not_call(call)
    return Refusal(reason) if reason is not None else made_fwd(call, work)


def why_not_call(call: Call) -> str | None:
    """Return why `plan_fwd` refuses a call, or None if it does not."""
    return why_not(call.spec)


def made_fwd(call: Call, work: PagedWork | None = None) -> LaunchPlan:
    """Return the plan of a call that `why_not` does not refuse, as `plan_fwd` does."""
    spec, maker = call.spec, AddressedMaker(call, PagedTensors._fields)
    given, shared = PagedTensors.of(maker.inputs, spec.shared_rows)
    results, chosen = add_fwd(maker, spec, given, shared, work)
    return maker.finish(results, lambda: chosen)


def add_fwd(
    maker: Maker,
    spec: PagedSpec,
    given: PagedTensors,
    shared: SharedKeys | None = None,
    work: PagedWork | None = None,
) -> tuple[tuple[Tensor, Tensor], dict[str, TileConfig]]:
    """Add the launches of a call to a plan.

    Args:
        given: the tensors of the call.
        shared: the keys that groups of sequences share, None without them.
        work: the kernels and tiles, which override the tables; None to look them up.

    Returns:
        (o, lse), tensors of the plan, and a dict of the tiles by kernel: "split", "rows", "shared".
    """
    q = given.q
    o = maker.empty((spec.num_tokens, spec.num_q_heads, spec.v_head_dim), q.dtype)
    lse = maker.empty((spec.num_q_heads, spec.num_tokens), torch.float32)
    if spec.num_tokens == 0:
        return (o, lse), {}
    arch, sm_count = device.arch_of(maker.device), device.sm_count_of(maker.device)
    scales = Scales.of(given.k_cache, given.k_scale, given.v_scale, lse, arch)
    caches = as_bytes(given.k_cache), as_bytes(given.v_cache)
    tensors: dict[str, Any] = {
        "block_table": given.block_table,
        "seqlens_k": given.seqlens_k,
        "cu_seqlens_q": given.cu_seqlens_q,
        "alibi_slopes": given.alibi_slopes,
        "sinks": given.sinks,
        "scales": scales,
    }
    chosen: dict[str, TileConfig] = {}
    if given.tree_mask is None and shared is None:
        if work is None:
            choose = tiles.paged_work if given.records is None else tiles.planned_work
            work = choose(spec, arch, sm_count)
        if work.split_run > 0:
            chosen["split"] = work.split_config
            paged_decode.launch_decode(
                maker,
                q,
                *caches,
                spec,
                o,
                lse,
                **tensors,
                config=work.split_config,
                plan=work.split_plan,
                max_run=work.split_run,
                clears=work.rows_config is None,
                records=given.records,
            )
        if work.rows_config is not None:
            chosen["rows"] = work.rows_config
            rows_plan = plan_rows(spec, work.rows_config, sm_count)
            launch_rows(
                maker, q, *caches, spec, o, lse, rows_plan, **tensors, split_run=work.split_run
            )
        return (o, lse), chosen
    chosen["rows"] = extend_config(spec, arch)
    launch_rows(
        maker,
        q,
        *caches,
        spec,
        o,
        lse,
        plan_rows(spec, chosen["rows"], sm_count),
        **tensors,
        tree_mask=given.tree_mask,
        skipped=None if shared is None else shared.skipped,
    )
    for level in () if shared is None else shared.levels:
        group_spec = spec.of_level(level)
        config = chosen["shared"] = extend_config(group_spec, arch)
        launch_rows(
            maker,
            q,
            *caches,
            group_spec,
            o,
            lse,
            plan_rows(group_spec, config, sm_count, adds=True),
            block_table=level.block_table,
            seqlens_k=level.seqlens_k,
            cu_seqlens_q=level.cu_seqlens_q,
            scales=scales,
            rows=level.rows,
            adds=True,
        )
    return (o, lse), chosen


def plan_pairs(spec: PagedSpec, where: torch.device) -> int:
    """Return the number of rows of a PagedPlan's records for `spec`; 0 if no kernel reads them.

    They are a record for each pair of a sequence and a split, then rows of counters.

    Args:
        where: the device of the plan.
    """
    if spec.has_tree or spec.has_shared or spec.num_tokens == 0:
        return 0
    sm_count = device.sm_count_of(where)
    work = tiles.planned_work(spec, device.arch_of(where), sm_count)
    if work.split_run == 0:
        return 0
    return work.split_plan.num_pairs + paged_decode.counter_rows(
        spec, work.split_config, work.split_plan, work.split_run
    )


@planned
def fill_plan(
    maker: Maker, records: Tensor, spec: PagedSpec, seqlens_k: Tensor, cu_seqlens_q: Tensor
) -> None:
    """Write the records for these lengths into the first rows of `records`, in place.

    The rows of counters after them are not touched. The arguments are those of `PagedPlan.update`,
    and the tensor and spec of the plan.
    """
    sm_count = device.sm_count_of(maker.device)
    work = tiles.planned_work(spec, device.arch_of(maker.device), sm_count)
    launch_plan(
        maker.launch,
        seqlens_k,
        cu_seqlens_q,
        records,
        plan=work.split_plan,
        tile_n=work.split_config.tile_n,
        max_run=work.split_run,
        window_left=spec.window_left,
        num_tokens=spec.num_tokens,
        max_keys=spec.max_blocks * spec.block_size,
    )


def launch_plan(
    start: Callable[..., object],
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    records: Tensor,
    *,
    plan: SplitPlan,
    tile_n: int,
    max_run: int,
    window_left: int,
    num_tokens: int,
    max_keys: int,
) -> None:
    """Start the kernel that writes the records (plan.num_pairs, FIELDS) int32 of short runs.

    They are for the sequences with 1 ... max_run new rows; `splits.plan_record` lists the fields.

    Args:
        start: the `launch` method of a maker.
        num_tokens, max_keys: the largest numbers of rows, and of keys of a sequence.
    """
    start(
        _plan_kernel,
        plan.num_pairs,
        seqlens_k,
        cu_seqlens_q,
        records,
        seqlens_k.shape[0],
        num_tokens,
        max_keys,
        max_run,
        plan.target_pairs,
        plan.split_tiles,
        plan.num_pairs,
        WINDOW_LEFT=window_left,
        TILE_N=tile_n,
        FIXED=plan.fixed,
        TILE_B=TILE_B,
        FIELDS=FIELDS,
        WEIGHED=plan.weighed and not plan.fixed,
        OVERHEAD=max(1, SPLIT_OVERHEAD // tile_n),
        num_warps=4,
    )
