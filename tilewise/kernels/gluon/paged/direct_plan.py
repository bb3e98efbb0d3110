"""Paged attention over 8-bit caches where mma.sync is the product: which calls its own kernel takes
beside the rules of `plan`, and what is launched for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.kernels.gluon.device.byte_operands import HEADS
from tilewise.kernels.gluon.device.warpgroup import LOG2E
from tilewise.kernels.gluon.paged.decode import FIELDS, ROWS
from tilewise.kernels.gluon.paged.direct import KEYS, Direct, direct_decode_kernel
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.plan import Call
from tilewise.kernels.spec import PagedSpec, PagedTensors, scale_per_slot
from tilewise.kernels.tiles import paged as tiles
from tilewise.kernels.tiles.paged import SplitPlan, TileConfig
from tilewise.kernels.triton.paged.decode import launch_merge
from tilewise.kernels.triton.paged.plan import launch_plan

__all__ = ["add_decode", "fill", "tile_of", "why_not", "why_not_layouts"]

_KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2}
_UNIT = 16  # bytes, which a lane loads at once and in which strides of caches are counted


def why_not(spec: PagedSpec) -> str | None:
    """Say why this kernel cannot run `spec`, by the rules that Hopper's has not, or return None: a
    cache of 8 bits, and blocks of whole products."""
    if spec.cache_dtype not in _KINDS:
        return f"dtype of the cache must be int8 or float8_e4m3fn, got {spec.cache_dtype}"
    if spec.block_size % KEYS.value:
        return f"block_size must be a multiple of {KEYS.value}, got {spec.block_size}"
    return None


def why_not_layouts(call: Call) -> str | None:
    """Say why lanes cannot read the call's caches 16 bytes at a time where they lie, or return
    None."""
    for name in ("k_cache", "v_cache", "block_table"):
        layout = call.layouts[PagedTensors._fields.index(name)]
        assert layout is not None
        if 0 in layout.shape:
            return f"{name} must not be empty"
        if name == "block_table":
            continue
        if not layout.is_aligned:
            return f"{name} must start on a 16-byte boundary"
        if layout.stride[-1] != 1 or any(step % _UNIT for step in layout.stride[:-1]):
            return f"{name} must have strides of 1 and of multiples of {_UNIT}, got {layout.stride}"
    return None


def tile_of(spec: PagedSpec) -> TileConfig:
    """Return the tile of a call, whose next one is loaded while it is multiplied."""
    return TileConfig(_rows_of(spec), tiles.direct_decode_tile(spec).keys, HEADS.value, 2)


def _rows_of(spec: PagedSpec) -> int:
    """Return the rows of a head's tile, new tokens times group, padded: 8 or 16."""
    return 8 if spec.max_seqlen_q * spec.group_size <= 8 else ROWS.value


def add_decode(
    maker: Maker, spec: PagedSpec, given: PagedTensors, o: Tensor, lse: Tensor, splits: SplitPlan
) -> None:
    """Add to the plan the launches of the kernel and of those around it (the plan's records, the
    merge of parts), which write o and lse."""
    q, sinks, run, records = given.q, given.sinks, spec.max_seqlen_q, given.records
    assert given.k_scale is not None
    assert given.v_scale is not None
    scales = [scale_per_slot(scale, given.k_cache) for scale in (given.k_scale, given.v_scale)]
    table, starts = given.block_table, given.cu_seqlens_q
    if records is None:
        records = maker.empty((splits.num_pairs, FIELDS.value), torch.int32)
        fill(maker.launch, records, spec, given.seqlens_k, starts, splits)
    part_o, part_lse, bounds = o, lse, records  # never touched
    if not splits.alone:
        parts = splits.num_pairs * spec.num_q_heads * run
        part_o = maker.empty((parts, spec.v_head_dim), torch.float32)
        part_lse = maker.empty((parts,), torch.float32)
        bounds = maker.empty((spec.num_seqs, 2), torch.int32)
    words = [cache.view(torch.int32) for cache in (given.k_cache, given.v_cache)]
    keys, registers, _, ahead = tiles.direct_decode_tile(spec)
    variant = Direct(
        spec.num_kv_heads,
        spec.group_size,
        _rows_of(spec),
        spec.head_dim,
        keys // KEYS.value,
        keys,
        spec.block_size,
        _KINDS[spec.cache_dtype],
        spec.window_left >= 0,
        sinks is not None,
        splits.alone,
        ahead,
    )
    maker.launch(
        direct_decode_kernel,
        splits.num_pairs * spec.num_kv_heads // HEADS.value,
        q,
        *words,
        *scales,
        sinks if sinks is not None else lse,
        o,
        lse,
        part_o,
        part_lse,
        bounds,
        records,
        table,
        starts,
        q.stride(0),
        q.stride(1),
        table.stride(0),
        *(step // _UNIT for cache in (given.k_cache, given.v_cache) for step in cache.stride()[:3]),
        *scales[0].stride(),
        *scales[1].stride(),
        spec.num_seqs,
        spec.num_tokens,
        words[0].shape[0],
        run,
        splits.num_pairs,
        spec.window_left,
        spec.softmax_scale * LOG2E.value,
        shape=variant,
        num_warps=HEADS.value,
        maxnreg=registers,
    )
    if not splits.alone:
        launch_merge(maker, part_o, part_lse, bounds, starts, spec, o, lse, splits.num_pairs, run)


def fill(
    start: Callable[..., object],
    records: Tensor,
    spec: PagedSpec,
    seqlens_k: Tensor,
    starts: Tensor,
    splits: SplitPlan,
) -> None:
    """Write the records of sequences with these lengths, which CTAs attend over which keys, to
    `records` (splits.num_pairs, FIELDS) int32.

    Args:
        start: the `launch` method of a maker.
        starts: the first row of each sequence, `cu_seqlens_q`.
    """
    launch_plan(
        start,
        seqlens_k,
        starts,
        records,
        plan=splits,
        tile_n=tiles.direct_decode_tile(spec).keys,
        max_run=spec.max_seqlen_q,
        window_left=spec.window_left,
        num_tokens=spec.num_tokens,
        max_keys=spec.max_blocks * spec.block_size,
    )
