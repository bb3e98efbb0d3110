"""Fill and copy the blocks of a paged cache.

what     write_kv_cache: new keys and values into their slots (those of an 8-bit cache are written
         by `rope_write`); copy_blocks: whole blocks, for copy on write
grid     write: (T, tiles of heads); copy: (pairs, tiles of rows), a row being one slot and head
program  reads one slot number (one pair of block ids), moves keys and values in the same launch
traffic  every element read once and written once
numerics a value is rounded once, when the cache is narrower than the input; scales are copied

Sizes of a tile: 2,048 elements of each cache, 16 a thread, so that two 16-byte transfers of 2-byte
elements per thread are in flight at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.triton.paged import rope_write
from tilewise.kernels.triton.paged.quantise import as_bytes

TILE_ELEMENTS = 2048


@triton.jit
def _move(
    source,
    destination,
    rows,
    num_rows,
    stride_source,
    stride_destination,
    WIDTH: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
):
    """Copy some rows of WIDTH elements, converted to the type of the destination.

    source, destination: the addresses of row 0; stride_*: the elements from row to row; rows: the
    indices of the rows, of which those from num_rows on are skipped.
    """
    offs = tl.arange(0, TILE_WIDTH)[None, :]
    inside = (rows < num_rows)[:, None] & (offs < WIDTH)
    x = tl.load(source + rows[:, None] * stride_source + offs, mask=inside, other=0.0)
    to = destination + rows[:, None] * stride_destination + offs
    tl.store(to, x.to(destination.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_slots"])
def _write_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_kcb,
    stride_kcp,
    stride_kch,
    stride_vcb,
    stride_vcp,
    stride_vch,
    num_heads,
    num_slots,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_DV: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):  # skipped, as a GPU cannot refuse it without a wait
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    heads = (tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)).to(tl.int64)
    _move(
        k_ptr + token * stride_kt,
        k_cache_ptr + block * stride_kcb + offset * stride_kcp,
        heads,
        num_heads,
        stride_kh,
        stride_kch,
        HEAD_DIM,
        TILE_D,
    )
    _move(
        v_ptr + token * stride_vt,
        v_cache_ptr + block * stride_vcb + offset * stride_vcp,
        heads,
        num_heads,
        stride_vh,
        stride_vch,
        V_HEAD_DIM,
        TILE_DV,
    )


@triton.jit
def _copy_rows(
    cache_ptr,
    source,
    destination,
    first_row,
    num_rows,
    stride_b,
    stride_p,
    stride_h,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
):
    """Copy TILE_R rows of block `source` of a cache to block `destination`.

    A row is one slot and head; rows are numbered slot by slot, from first_row on.
    """
    row = first_row + tl.arange(0, TILE_R)
    offs = tl.arange(0, TILE_WIDTH)[None, :]
    inside = (row < num_rows)[:, None] & (offs < WIDTH)
    within = (row // NUM_HEADS).to(tl.int64) * stride_p + (row % NUM_HEADS).to(tl.int64) * stride_h
    x = tl.load(cache_ptr + source * stride_b + within[:, None] + offs, mask=inside)
    tl.store(cache_ptr + destination * stride_b + within[:, None] + offs, x, mask=inside)


@triton.jit(do_not_specialize=["num_blocks"])
def _copy_kernel(
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    pairs_ptr,
    stride_pair,
    stride_side,
    stride_kb,
    stride_kp,
    stride_kh,
    stride_vb,
    stride_vp,
    stride_vh,
    stride_ksb,
    stride_ksp,
    stride_ksh,
    stride_vsb,
    stride_vsp,
    stride_vsh,
    num_rows,
    num_blocks,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_DV: tl.constexpr,
):
    pair = pairs_ptr + tl.program_id(0).to(tl.int64) * stride_pair
    source = tl.load(pair).to(tl.int64)
    destination = tl.load(pair + stride_side).to(tl.int64)
    if (tl.minimum(source, destination) < 0) | (tl.maximum(source, destination) >= num_blocks):
        return  # skipped, as a GPU cannot refuse it without a wait
    first_row = tl.program_id(1) * TILE_R
    _copy_rows(
        k_cache_ptr,
        source,
        destination,
        first_row,
        num_rows,
        stride_kb,
        stride_kp,
        stride_kh,
        NUM_HEADS,
        HEAD_DIM,
        TILE_R,
        TILE_D,
    )
    _copy_rows(
        v_cache_ptr,
        source,
        destination,
        first_row,
        num_rows,
        stride_vb,
        stride_vp,
        stride_vh,
        NUM_HEADS,
        V_HEAD_DIM,
        TILE_R,
        TILE_DV,
    )
    if HAS_SCALES:
        _copy_rows(
            k_scale_ptr,
            source,
            destination,
            first_row,
            num_rows,
            stride_ksb,
            stride_ksp,
            stride_ksh,
            NUM_HEADS,
            1,
            TILE_R,
            1,
        )
        _copy_rows(
            v_scale_ptr,
            source,
            destination,
            first_row,
            num_rows,
            stride_vsb,
            stride_vsp,
            stride_vsh,
            NUM_HEADS,
            1,
            TILE_R,
            1,
        )


why_not = rope_write.why_not


def _tile_rows(rows: int, width: int) -> int:
    """Return the number of rows of `width` elements in a tile, a power of two.

    A tile has at most TILE_ELEMENTS elements, and no more rows than hold `rows`.
    """
    most = max(1, TILE_ELEMENTS // triton.next_power_of_2(width))
    return min(triton.next_power_of_2(rows), most)


@planned
def write_kv_cache(
    maker: Maker,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write k (T, Hk, D) and v (T, Hk, Dv) into the slots of slot_mapping (T,), in place.

    A slot outside of the cache, such as -1, is skipped. k_scale, v_scale: the scales of a cache of
    8 or 4 bits, (N, P, Hk), written too, or (Hk,), read only; None for other caches.
    """
    if k_scale is not None and v_scale is not None:
        rope_write.write_quantised.write(
            maker, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale
        )
        return
    num_tokens, num_heads, head_dim = k.shape
    v_head_dim = v.shape[2]
    if num_tokens == 0:
        return
    tile_h = _tile_rows(num_heads, max(head_dim, v_head_dim))
    maker.launch(
        _write_kernel,
        (num_tokens, triton.cdiv(num_heads, tile_h)),
        k,
        v,
        k_cache,
        v_cache,
        maker.dense(slot_mapping),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        num_heads,
        k_cache.shape[0] * k_cache.shape[1],
        BLOCK_SIZE=k_cache.shape[1],
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        TILE_H=tile_h,
        TILE_D=triton.next_power_of_2(head_dim),
        TILE_DV=triton.next_power_of_2(v_head_dim),
        num_warps=4,
    )


@planned
def copy_blocks(
    maker: Maker,
    k_cache: Tensor,
    v_cache: Tensor,
    block_pairs: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Copy block block_pairs[i, 0] onto block block_pairs[i, 1] of both caches, for every i.

    Pairs with a block that does not exist are skipped. k_scale, v_scale: scales (N, P, Hk) are
    copied too; those of heads (Hk,) serve all blocks.
    """
    num_pairs = block_pairs.shape[0]
    if num_pairs == 0:
        return
    _, block_size, num_heads, head_dim = k_cache.shape
    v_head_dim = v_cache.shape[3]
    num_rows = block_size * num_heads
    tile_r = _tile_rows(num_rows, max(head_dim, v_head_dim))
    scales, strides = (k_cache, v_cache), [0] * 6
    has_scales = k_scale is not None and v_scale is not None and k_scale.dim() == 3
    if has_scales:
        assert k_scale is not None
        assert v_scale is not None
        scales, strides = (k_scale, v_scale), [*k_scale.stride(), *v_scale.stride()]
    maker.launch(
        _copy_kernel,
        (num_pairs, triton.cdiv(num_rows, tile_r)),
        *map(as_bytes, (k_cache, v_cache, *scales)),
        block_pairs,
        *block_pairs.stride(),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *strides,
        num_rows,
        k_cache.shape[0],
        HAS_SCALES=has_scales,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        TILE_R=tile_r,
        TILE_D=triton.next_power_of_2(head_dim),
        TILE_DV=triton.next_power_of_2(v_head_dim),
        num_warps=4,
    )
