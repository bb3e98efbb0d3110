"""Paged attention on Hopper: which calls its own kernel takes, and where it is launched.

The contract is that of `kernels.triton.paged.launch`. Taken are short runs over 8-bit caches,
where widening by the portable kernel costs more than memory; 16-bit caches it reads at the speed of
memory itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.gluon.device.warpgroup import LOG2E
from tilewise.kernels.gluon.host.descriptors import descriptor, scale_descriptor, why_no_descriptor
from tilewise.kernels.gluon.host.launch import launch as start
from tilewise.kernels.gluon.paged.decode import HEADS, KEYS, ROWS, Shape, paged_decode_kernel
from tilewise.kernels.spec import PagedSpec
from tilewise.kernels.tiles import paged as tiles
from tilewise.kernels.tiles.paged import SplitPlan
from tilewise.kernels.triton.paged.decode import launch_merge
from tilewise.kernels.triton.paged.splits import FIELDS, launch_plan

__all__ = ["fill_plan", "launch", "plan_pairs", "why_not"]

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
    plan: Tensor | None = None,
    tuned: tuple[int, SplitPlan] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o (T, Hq, D) in the dtype of q and lse (Hq, T) float32.

    Args:
        plan: records of the pairs, from `launch_plan`; None makes them for this call.
        tuned: stages and plan instead of the table's, for tuning.
    """
    shape = (spec.num_tokens, spec.num_q_heads, spec.v_head_dim)
    o = torch.empty(shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((spec.num_q_heads, spec.num_tokens), dtype=torch.float32, device=q.device)
    if spec.num_tokens == 0:
        return o, lse
    assert k_scale is not None
    assert v_scale is not None
    run = spec.max_seqlen_q
    stages, splits = tuned or tiles.byte_decode_plan(spec, device.sm_count_of(q.device))
    if plan is None:
        size = (splits.num_pairs, FIELDS.value)
        plan = torch.empty(size, dtype=torch.int32, device=q.device)
        _fill(plan, spec, seqlens_k, cu_seqlens_q, splits)
    parts = splits.num_pairs * spec.num_q_heads * run
    part_o, part_lse, bounds = o, lse, plan  # never touched
    if not splits.alone:
        part_o = torch.empty((parts, spec.v_head_dim), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((parts,), dtype=torch.float32, device=q.device)
        bounds = torch.empty((spec.num_seqs, 2), dtype=torch.int32, device=q.device)
    box = min(spec.block_size, KEYS.value)
    tensors = [_bytes_descriptor(cache, box, spec.head_dim) for cache in (k_cache, v_cache)]
    slot_scales = k_scale.dim() == 3
    if slot_scales:
        tensors += [scale_descriptor(x, box, HEADS.value) for x in (k_scale, v_scale)]
    else:
        tensors += tensors
    variant = Shape(
        spec.num_kv_heads, spec.group_size, 8 if run * spec.group_size <= 8 else 16,
        spec.head_dim, spec.block_size, box, stages,
        _KINDS[spec.cache_dtype], slot_scales, spec.window_left >= 0, sinks is not None,
        splits.alone,
    )  # fmt: skip
    start(
        paged_decode_kernel, splits.num_pairs * spec.num_kv_heads,
        q, *tensors, k_scale, v_scale, sinks if sinks is not None else lse,
        o, lse, part_o, part_lse, bounds, plan, block_table, cu_seqlens_q,
        q.stride(0), q.stride(1), block_table.stride(0), spec.num_seqs, spec.num_tokens, run,
        splits.num_pairs, spec.window_left, spec.softmax_scale * LOG2E.value, shape=variant,
        maxnreg=_REGISTERS,
    )  # fmt: skip
    if not splits.alone:
        launch_merge(part_o, part_lse, bounds, cu_seqlens_q, spec, o, lse, run)
    return o, lse


def _bytes_descriptor(cache: Tensor, rows: int, width: int) -> object:
    reason = why_no_descriptor(cache)
    if reason is not None:
        raise ValueError(f"caches of 8 bits must be addressable by TMA: {reason}")
    return descriptor(cache.view(torch.float8_e4m3fn), rows, width)


def plan_pairs(spec: PagedSpec, where: torch.device) -> int:
    """Return how many records a plan of `spec` has."""
    if spec.num_tokens == 0:
        return 0
    return tiles.byte_decode_plan(spec, device.sm_count_of(where))[1].num_pairs


def fill_plan(records: Tensor, spec: PagedSpec, seqlens_k: Tensor, cu_seqlens_q: Tensor) -> None:
    """Write the records of these lengths, as many as `plan_pairs` says."""
    _, splits = tiles.byte_decode_plan(spec, device.sm_count_of(records.device))
    _fill(records, spec, seqlens_k, cu_seqlens_q, splits)


def _fill(
    records: Tensor, spec: PagedSpec, seqlens_k: Tensor, cu_seqlens_q: Tensor, splits: SplitPlan
) -> None:
    launch_plan(
        seqlens_k, cu_seqlens_q, records, plan=splits, tile_n=KEYS.value,
        max_run=spec.max_seqlen_q, window_left=spec.window_left,
    )  # fmt: skip
