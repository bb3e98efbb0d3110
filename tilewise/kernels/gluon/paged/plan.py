"""Paged attention on Hopper: which calls its own kernel takes, and what is launched for them.

The contract is that of `kernels.triton.paged.plan`. Taken are short runs over 8-bit caches,
where widening by the portable kernel costs more than memory; 16-bit caches it reads at the speed of
memory itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.gluon.device.warpgroup import LOG2E
from tilewise.kernels.gluon.paged.decode import HEADS, KEYS, ROWS, Shape, paged_decode_kernel
from tilewise.kernels.host.descriptors import descriptor, scale_descriptor, why_no_descriptor
from tilewise.kernels.host.plan import LaunchPlan, Maker
from tilewise.kernels.plan import Call, Refusal
from tilewise.kernels.spec import PagedSpec, PagedTensors
from tilewise.kernels.tiles import paged as tiles
from tilewise.kernels.tiles.paged import SplitPlan, TileConfig
from tilewise.kernels.triton.paged.decode import launch_merge
from tilewise.kernels.triton.paged.plan import at_once, launch_plan
from tilewise.kernels.triton.paged.splits import FIELDS

__all__ = ["fill_plan", "made_fwd", "plan_fwd", "plan_pairs", "why_not"]

_WIDTHS = (64, 128)
_KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2}
_REGISTERS = 128  # of a thread at the start: two CTAs of eight warps fill the file
_SMALLEST_BLOCK = 8  # rows of a swizzled tile; smaller copies are slower than 8 bits are worth


def why_not(spec: PagedSpec) -> str | None:
    """Say why this kernel cannot run `spec`, or return None when it can."""
    return device.why_not_hopper(spec.device_type) or why_not_decode(spec)


def why_not_decode(spec: PagedSpec) -> str | None:
    """Say why the kernel cannot run `spec` on Hopper, or return None when it can."""
    if spec.cache_dtype not in _KINDS:
        return f"dtype of the cache must be int8 or float8_e4m3fn, got {spec.cache_dtype}"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype of q must be bfloat16 or float16, got {spec.dtype}"
    if spec.head_dim not in _WIDTHS or spec.v_head_dim != spec.head_dim:
        return f"both head dims must be 64 or 128, got {spec.head_dim} and {spec.v_head_dim}"
    rows = spec.max_seqlen_q * spec.group_size
    if not 1 <= rows <= ROWS.value:
        return f"max_seqlen_q * Hq / Hk must be 1 ... {ROWS.value}, got {rows}"
    if spec.block_size < _SMALLEST_BLOCK or spec.block_size & (spec.block_size - 1):
        return f"block_size must be a power of two from {_SMALLEST_BLOCK} on, got {spec.block_size}"
    if spec.num_kv_heads % HEADS.value:
        return f"Hk must be a multiple of {HEADS.value}, got {spec.num_kv_heads}"
    if spec.softcap > 0 or spec.has_alibi:
        return "softcap and alibi_slopes are not in this kernel"
    if spec.has_tree or spec.has_shared or not spec.causal:
        return "tree_mask and shared are not in this kernel"
    if spec.batch_invariant:
        return "batch_invariant is not in this kernel: longer runs have another order of sums"
    return None


def plan_fwd(call: Call) -> LaunchPlan | Refusal:
    """Return how a call is run; its results are o (T, Hq, D) in the dtype of q and lse (Hq, T)."""
    reason = why_not_call(call)
    return Refusal(reason) if reason is not None else made_fwd(call)


def why_not_call(call: Call) -> str | None:
    """Say why `plan_fwd` refuses a call, or return None when it does not."""
    return why_not(call.spec) or why_not_layouts(call)


def why_not_layouts(call: Call) -> str | None:
    """Say why the copy engine cannot read what a call keeps of tokens, or return None."""
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        layout = call.layouts[PagedTensors._fields.index(name)]
        if layout is None or len(layout.shape) == 1:  # a scale for each head is read by its address
            continue
        reason = "tensors must start on a 16-byte boundary"
        if layout.is_aligned:
            reason = why_no_descriptor(layout.meta())
        if reason is None and layout.stride[-1] != 1:
            reason = f"the last stride must be 1, got {layout.stride}"
        if reason is not None:
            return f"{name} must be addressable by TMA: {reason}"
    return None


def made_fwd(call: Call, tuned: tuple[int, SplitPlan] | None = None) -> LaunchPlan:
    """Return the plan of a call that nothing refuses.

    Args:
        tuned: stages and splits instead of the table's, for tuning.
    """
    spec, maker = call.spec, Maker(call, PagedTensors._fields)
    given, _ = PagedTensors.of(maker.inputs, ())
    o = maker.empty((spec.num_tokens, spec.num_q_heads, spec.v_head_dim), spec.dtype)
    lse = maker.empty((spec.num_q_heads, spec.num_tokens), torch.float32)
    if spec.num_tokens == 0:
        return maker.finish((o, lse))
    stages, splits = tuned or tiles.byte_decode_plan(spec, device.sm_count_of(maker.device))
    _add_decode(maker, spec, given, o, lse, stages, splits)
    tile = TileConfig(_rows_of(spec), KEYS.value, 5, stages)  # a warp loads
    return maker.finish((o, lse), lambda: {"split": tile})


def _rows_of(spec: PagedSpec) -> int:
    """Return the rows of a tile."""
    return 8 if spec.max_seqlen_q * spec.group_size <= 8 else ROWS.value


def _add_decode(
    maker: Maker,
    spec: PagedSpec,
    given: PagedTensors,
    o: Tensor,
    lse: Tensor,
    stages: int,
    splits: SplitPlan,
) -> None:
    """Add the kernels, which write o and lse, to a plan."""
    q, sinks, run, records = given.q, given.sinks, spec.max_seqlen_q, given.records
    caches, scales = (given.k_cache, given.v_cache), (given.k_scale, given.v_scale)
    slot_scales = scales[0].dim() == 3
    if not slot_scales:  # one for all heads may come as `scale.expand(Hk)`
        scales = (maker.dense(scales[0]), maker.dense(scales[1]))
    table, starts = given.block_table, given.cu_seqlens_q
    if records is None:
        records = maker.empty((splits.num_pairs, FIELDS.value), torch.int32)
        _fill(maker.launch, records, spec, given.seqlens_k, starts, splits)
    parts = splits.num_pairs * spec.num_q_heads * run
    part_o, part_lse, bounds = o, lse, records  # never touched
    if not splits.alone:
        part_o = maker.empty((parts, spec.v_head_dim), torch.float32)
        part_lse = maker.empty((parts,), torch.float32)
        bounds = maker.empty((spec.num_seqs, 2), torch.int32)
    box = min(spec.block_size, KEYS.value)
    tensors = [_bytes_descriptor(cache, box, spec.head_dim) for cache in caches]
    if slot_scales:
        tensors += [scale_descriptor(x, box, HEADS.value) for x in scales]
    else:
        tensors += tensors
    variant = Shape(
        spec.num_kv_heads, spec.group_size, _rows_of(spec),
        spec.head_dim, spec.block_size, box, stages,
        _KINDS[spec.cache_dtype], slot_scales, spec.window_left >= 0, sinks is not None,
        splits.alone,
    )  # fmt: skip
    maker.launch(
        paged_decode_kernel, splits.num_pairs * spec.num_kv_heads,
        q, *tensors, *scales, sinks if sinks is not None else lse,
        o, lse, part_o, part_lse, bounds, records, table, starts,
        q.stride(0), q.stride(1), table.stride(0), spec.num_seqs, spec.num_tokens, run,
        splits.num_pairs, spec.window_left, spec.softmax_scale * LOG2E.value, shape=variant,
        maxnreg=_REGISTERS,
    )  # fmt: skip
    if not splits.alone:
        launch_merge(maker, part_o, part_lse, bounds, starts, spec, o, lse, run)


def _bytes_descriptor(cache: Tensor, rows: int, width: int) -> object:
    return descriptor(cache.view(torch.float8_e4m3fn), rows, width)


def plan_pairs(spec: PagedSpec, where: torch.device) -> int:
    """Return how many records a plan of `spec` has."""
    if spec.num_tokens == 0:
        return 0
    return tiles.byte_decode_plan(spec, device.sm_count_of(where))[1].num_pairs


def fill_plan(records: Tensor, spec: PagedSpec, seqlens_k: Tensor, cu_seqlens_q: Tensor) -> None:
    """Write the records of these lengths, as many as `plan_pairs` says."""
    _, splits = tiles.byte_decode_plan(spec, device.sm_count_of(records.device))
    _fill(at_once, records, spec, seqlens_k, cu_seqlens_q, splits)


def _fill(
    start: Callable[..., object],
    records: Tensor,
    spec: PagedSpec,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    splits: SplitPlan,
) -> None:
    launch_plan(
        start, seqlens_k, cu_seqlens_q, records, plan=splits, tile_n=KEYS.value,
        max_run=spec.max_seqlen_q, window_left=spec.window_left,
    )  # fmt: skip
