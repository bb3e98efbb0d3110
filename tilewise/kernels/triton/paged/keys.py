"""Device helpers shared by the two kernels that read a paged cache.

what     the loop over cached keys, and where a row of q or o lies; `rows` and
         `paged_decode` differ only in who computes which rows and keys
grid     none: these functions are inlined
rows     a program owns TILE_M rows of one sequence and one key head. Row r is new token r // GROUP
         and query head r % GROUP of the head's group, so keys and values are read once per group
traffic  TILE_N keys and values per step, addressed one by one through the block table, so TILE_N
         does not depend on the block size; a block that holds whole tiles is looked up once
numerics logits in base 2; m, l and acc float32; products of float32 operands in full float32.
         keys and values of 8 and 4 bits are widened exactly to the type of q; the scale of a key
         multiplies its logits, that of a value its probabilities, before these are rounded. A cache
         of 4 bits holds rotated rows, so queries are rotated first, and sums of values at the end.
         m starts at a finite value, so a row that sees nothing never makes inf - inf
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl

from tilewise.kernels import device
from tilewise.kernels.spec import PagedSpec
from tilewise.kernels.tiles.paged import is_wide, parts_of_keys
from tilewise.kernels.triton.attention.tile import LN2, tanh
from tilewise.kernels.triton.paged.four_bits import (
    join_channels,
    log_of_rotated,
    rotate,
    split_channels,
    widen_codes,
)
from tilewise.kernels.triton.paged.quantise import (
    E4M3,
    E4M3_BITS,
    FLOAT,
    INT4,
    INT8,
    factor,
    widen,
    widen_once,
    widen_pairs,
)
from tilewise.kernels.triton.visible import inside_window

MERGE_TILE = 16  # splits merged at once by one warp: 16 * 256 float32 are 128 registers a thread
LOWEST = tl.constexpr(-1.7014118346046923e38)  # -2**127: m of a row without a key, safe to scale


class Form(NamedTuple):
    """Constexpr: the cache, its heads and the options of logits."""

    kv_heads: int
    group: int  # query heads of each
    tile_g: int  # a power of two
    d: int  # channels of the first product q k^T, of the second (0 without one), and of v
    rest: int
    dv: int
    d_pad: int  # powers of two
    rest_pad: int
    dv_pad: int
    block_size: int
    same_strides: bool  # keys and values have the same strides
    window_left: int
    softcap: bool
    alibi: bool
    sinks: bool
    kind: int  # see `quantise.cache_kind`
    widens_once: bool  # see `quantise.widen_once`
    pairs: bool  # True if even and odd channels of the cache are multiplied apart
    k_log: int  # of a cache of 4 bits, log2 of the channels that are rotated together
    v_log: int
    ptx: bool  # True if instructions of NVIDIA's may be written

    @classmethod
    def of(
        cls,
        spec: PagedSpec,
        dv_pad: int,
        kind: int,
        tile_m: int,
        *,
        same_strides: bool,
        alibi: bool,
        sinks: bool,
        has_words: bool = False,
    ) -> Self:
        """Return the constants of a call's kernels.

        Args:
            dv_pad: the power of two that holds Dv.
            kind: the format of the cache, see `quantise.cache_kind`.
            tile_m: the rows of a tile.
            same_strides: whether keys and values have the same strides.
            has_words: True if an 8-bit cache is read in words of two channels.
        """
        group = spec.group_size
        first, rest = parts_of_keys(spec.head_dim)
        pairs = kind == INT4.value or has_words
        least = 32 if pairs else 16  # halves of 16 channels
        widens_once = (
            is_wide(spec)
            and spec.dtype == torch.bfloat16
            and kind in (INT8.value, E4M3.value, E4M3_BITS.value)
            and tile_m <= 16  # beside the sums of more rows, a widened tile would spill
            and device.runs_ptx()
        )
        if (widens_once or (has_words and device.runs_ptx())) and kind == E4M3_BITS.value:
            kind = E4M3.value
        return cls(
            spec.num_kv_heads,
            group,
            triton.next_power_of_2(group),
            first.channels,
            rest.channels,
            spec.v_head_dim,
            max(first.padded, least),
            rest.padded,
            max(dv_pad, least),
            spec.block_size,
            same_strides,
            spec.window_left,
            spec.softcap > 0,
            alibi,
            sinks,
            kind,
            widens_once,
            pairs,
            log_of_rotated(spec.head_dim),
            log_of_rotated(spec.v_head_dim),
            device.runs_ptx(),
        )


@triton.jit
def cached_keys(seqlens_k_ptr, seq, inside, max_keys):
    """Return the numbers of keys of the sequences `seq`, 0 where `inside` is False.

    They are cut to max_keys, the keys to which a row of the block table can refer. A larger length
    would be an error, which a GPU cannot raise without a wait; it is cut here, so that nothing
    outside of the table is read.
    """
    seqlen_k = tl.load(seqlens_k_ptr + seq, mask=inside, other=0)
    return tl.minimum(tl.maximum(seqlen_k, 0), max_keys)


@triton.jit
def run_of(cu_seqlens_q_ptr, seq, inside, num_tokens):
    """Return the first rows and the numbers of rows of the sequences `seq`.

    Edges are clamped to the num_tokens rows that exist. Where `inside` is False both are 0.
    """
    start = tl.load(cu_seqlens_q_ptr + seq, mask=inside, other=0)
    stop = tl.load(cu_seqlens_q_ptr + seq + 1, mask=inside, other=0)
    start = tl.minimum(tl.maximum(start, 0), num_tokens)
    return start, tl.minimum(tl.maximum(stop, 0), num_tokens) - start


@triton.jit
def load_rest(row_ptrs, owned, form: tl.constexpr, MASKED: tl.constexpr):
    """Return the channels of rows of q that the second product q k^T takes, (rows, rest_pad).

    row_ptrs: the address of each row; owned: whether it exists, used with MASKED.
    """
    offs = tl.arange(0, form.rest_pad)
    return _load_rows(row_ptrs + form.d, offs, owned, form.rest, form.rest_pad, MASKED)


@triton.jit
def rotated_like_keys(x, form: tl.constexpr):
    """Return rows of q, or their second part, rotated as keys are in a cache of 4 bits.

    For other caches x is returned unchanged.
    """
    if form.kind == INT4:
        x = rotate(x.to(tl.float32), form.k_log).to(x.dtype)
    return x


@triton.jit
def rotated_back(o, form: tl.constexpr):
    """Return float32 outputs o with the rotation of values of a 4-bit cache undone.

    For other caches o is returned unchanged.
    """
    if form.kind == INT4:
        o = rotate(o, form.v_log, True)
    return o


@triton.jit
def _load_cached(
    row_ptrs,
    FIRST: tl.constexpr,
    owned,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    dtype: tl.constexpr,
    form: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return WIDTH channels of TILE_N cached rows from channel FIRST on, widened to `dtype`.

    The tile is (TILE_N, PADDED), 0 past WIDTH. row_ptrs: the address of each row; owned: whether it
    exists, used with MASKED.
    """
    x = _load_rows(row_ptrs + FIRST, tl.arange(0, PADDED), owned, WIDTH, PADDED, MASKED)
    return _as_operand(x, dtype, form)


@triton.jit
def _load_codes(
    row_ptrs,
    FIRST: tl.constexpr,
    owned,
    scale,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    dtype: tl.constexpr,
    form: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return WIDTH channels of TILE_N rows of a cache of 4 or 8 bits, widened to `dtype`, unscaled.

    Args:
        row_ptrs: the addresses of the rows.
        FIRST: the first channel, an even one.
        owned: the rows that exist, a mask (TILE_N,).
        scale: (TILE_N,) float32, the scale of each row of 4 bits.
        WIDTH, PADDED: the number of channels, and the power of two that holds it.

    Returns:
        The even channels and the odd ones, (TILE_N, PADDED / 2) each.
    """
    if form.kind != INT4:
        row_ptrs = row_ptrs.to(tl.pointer_type(tl.int16), bitcast=True)
    x = _load_rows(
        row_ptrs + FIRST // 2, tl.arange(0, PADDED // 2), owned, WIDTH // 2, PADDED // 2, MASKED
    )
    if form.kind == INT4:
        even, odd = widen_codes(x, scale, dtype, form.ptx)
    else:
        even, odd = widen_pairs(x, dtype, form.kind, form.ptx)
    return even, odd


@triton.jit
def _as_operand(x, dtype: tl.constexpr, form: tl.constexpr):
    """Return loaded keys or values x converted to `dtype`, the type of a product; unscaled."""
    if form.widens_once:
        x = widen_once(x, form.kind)
    else:
        x = widen(x, dtype, form.kind)
    return x


@triton.jit
def attend_keys(
    q,
    q_rest,
    acc,
    l,
    m,
    pos,
    slope,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    block_row_ptr,
    stride_kb,
    stride_kp,
    stride_vb,
    stride_vp,
    stride_ksb,
    stride_ksp,
    stride_vsb,
    stride_vsp,
    first,
    last,
    key_lo,
    key_hi,
    num_blocks,
    scale_log2,
    softcap_log2,
    form: tl.constexpr,
    TILE_N: tl.constexpr,
    MASKED: tl.constexpr,
    tree_row_ptr=None,
    first_new=0,
    tree_width=0,
    TREE: tl.constexpr = False,
):
    """Fold the keys of tiles first ... last - 1 into acc, l and m of the rows of q; return these.

    acc, l and m are the running output, sum and base-2 maximum, float32. q (TILE_M, d_pad), and
    q_rest (TILE_M, rest_pad) where form.rest > 0; pos (TILE_M,) is the last key each row sees. With
    MASKED a tile may reach beyond key_lo ... key_hi - 1 or beyond a row's own keys; without, every
    row sees all of it. With TREE too, pos is only a row's position: the row sees all keys before
    first_new, and key first_new + j if byte j of its own tree_row_ptr (TILE_M,), of tree_width
    bytes, is not 0.
    """
    offs_n = tl.arange(0, TILE_N)
    acc_odd = 0.0
    if form.pairs:  # a word has an even channel and an odd one: products of either
        q, q_odd = split_channels(q)
        acc, acc_odd = split_channels(acc)
        if form.rest > 0:
            q_rest, rest_odd = split_channels(q_rest)
    # Block ids are loaded a tile ahead of the keys they refer to: the pipeline of loads below then
    # starts from a known value and spends no stages on the chain id -> key.
    block = _load_blocks(
        block_row_ptr, first, last, key_lo, key_hi, num_blocks, TILE_N, form.block_size
    )
    for tile in range(first, last):
        key = tile * TILE_N + offs_n
        owned = (key >= key_lo) & (key < key_hi)
        if form.block_size % TILE_N == 0:
            slot = (tile % (form.block_size // TILE_N)) * TILE_N + offs_n[:, None]
            k_row = k_ptr + block * stride_kb + slot * stride_kp
            v_row = v_ptr + block * stride_vb + slot * stride_vp
            place = (tile % (form.block_size // TILE_N)) * TILE_N + offs_n
        else:
            slot = (key % form.block_size)[:, None]
            place = key % form.block_size
            k_offset = block[:, None] * stride_kb + slot * stride_kp
            v_offset = k_offset
            if not form.same_strides:
                v_offset = block[:, None] * stride_vb + slot * stride_vp
            k_row = k_ptr + k_offset
            v_row = v_ptr + v_offset
        if form.kind != FLOAT:
            k_scale = _load_scales(
                k_scale_ptr + block * stride_ksb + place * stride_ksp, owned, MASKED
            )
            v_scale = _load_scales(
                v_scale_ptr + block * stride_vsb + place * stride_vsp, owned, MASKED
            )
        block = _load_blocks(
            block_row_ptr, tile + 1, last, key_lo, key_hi, num_blocks, TILE_N, form.block_size
        )
        if form.pairs:
            k, odd = _load_codes(
                k_row, 0, owned, k_scale, form.d, form.d_pad, q.dtype, form, MASKED
            )
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            s = tl.dot(q_odd, tl.trans(odd), s, input_precision="ieee")
        else:
            k = _load_cached(k_row, 0, owned, form.d, form.d_pad, q.dtype, form, MASKED)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if form.rest > 0:
            if form.pairs:
                k, odd = _load_codes(
                    k_row, form.d, owned, k_scale, form.rest, form.rest_pad, q.dtype, form, MASKED
                )
                s = tl.dot(rest_odd, tl.trans(odd), s, input_precision="ieee")
            else:
                k = _load_cached(
                    k_row, form.d, owned, form.rest, form.rest_pad, q.dtype, form, MASKED
                )
            s = tl.dot(q_rest, tl.trans(k), s, input_precision="ieee")
        s = s * scale_log2
        if form.kind != FLOAT:
            s *= (k_scale * factor(form.kind))[None, :]
        if form.softcap:
            s = softcap_log2 * tanh(s / softcap_log2)
        if form.alibi:
            distance = (pos[:, None] - key[None, :]).to(tl.float32)
            if TREE:
                distance = tl.abs(distance)
            s -= slope[:, None] * distance
        if MASKED:
            if TREE:
                is_new = owned & (key >= first_new) & (key - first_new < tree_width)
                seen = tl.load(
                    tree_row_ptr[:, None] + (key - first_new)[None, :],
                    mask=is_new[None, :],
                    other=1,
                )
                visible = owned[None, :] & (seen != 0)
            else:
                visible = owned[None, :] & (key[None, :] <= pos[:, None])
            if form.window_left >= 0:
                visible &= inside_window(key, pos, form.window_left)
            s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        alpha = tl.math.exp2(m - m_new)
        p = tl.math.exp2(s - m_new[:, None])
        l = l * alpha + tl.sum(p, 1)
        if form.pairs:
            v, v_odd = _load_codes(
                v_row, 0, owned, v_scale, form.dv, form.dv_pad, q.dtype, form, MASKED
            )
        else:
            v = _load_cached(v_row, 0, owned, form.dv, form.dv_pad, q.dtype, form, MASKED)
        if form.kind != FLOAT and q.dtype == tl.float16:
            # p times a scale may underflow in float16; times the scale's share of the largest it
            # does not.
            v_scale *= factor(form.kind)
            largest = tl.max(v_scale, 0)
            p *= (v_scale / tl.where(largest > 0.0, largest, 1.0))[None, :]
            o = tl.dot(p.to(q.dtype), v, input_precision="ieee")
            acc = acc * alpha[:, None] + o * largest
            if form.pairs:
                o = tl.dot(p.to(q.dtype), v_odd, input_precision="ieee")
                acc_odd = acc_odd * alpha[:, None] + o * largest
        else:
            if form.kind != FLOAT:
                p *= (v_scale * factor(form.kind))[None, :]
            acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision="ieee")
            if form.pairs:
                acc_odd = tl.dot(
                    p.to(q.dtype), v_odd, acc_odd * alpha[:, None], input_precision="ieee"
                )
        m = m_new
    if form.pairs:
        acc = join_channels(acc, acc_odd)
    return acc, l, m


@triton.jit
def _load_blocks(
    block_row_ptr,
    tile,
    last,
    key_lo,
    key_hi,
    num_blocks,
    TILE_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Return the int64 block ids of a tile's keys (TILE_N,), or the one id of a tile in one block.

    Entries of the table outside key_lo ... key_hi - 1 or after tile last - 1 are not read. An
    invalid id, which a GPU cannot refuse without a wait, is replaced by the last block's: compared
    as unsigned, a negative id is above it, too.
    """
    if BLOCK_SIZE % TILE_N == 0:
        column = tile // (BLOCK_SIZE // TILE_N)
        block = tl.load(block_row_ptr + column, mask=tile < last, other=0)
    else:
        key = tile * TILE_N + tl.arange(0, TILE_N)
        owned = (key >= key_lo) & (key < key_hi)
        block = tl.load(block_row_ptr + key // BLOCK_SIZE, mask=owned & (tile < last), other=0)
    block = tl.minimum(block.to(tl.uint32, bitcast=True), (num_blocks - 1).to(tl.uint32))
    return block.to(tl.int64)


@triton.jit
def _load_rows(
    row_ptrs, offs_d, owned, HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr, MASKED: tl.constexpr
):
    """Return rows of a cache, or of q, (rows, TILE_D); channels from HEAD_DIM on are 0.

    With MASKED rows that are not `owned` are 0, too; without it they must all exist.
    """
    if HEAD_DIM == TILE_D:
        if MASKED:
            x = tl.load(row_ptrs + offs_d[None, :], mask=owned[:, None], other=0)
        else:
            x = tl.load(row_ptrs + offs_d[None, :])
    else:
        inside = offs_d[None, :] < HEAD_DIM
        if MASKED:
            inside &= owned[:, None]
        x = tl.load(row_ptrs + offs_d[None, :], mask=inside, other=0)
    return x


@triton.jit
def _load_scales(pointers, owned, MASKED: tl.constexpr):
    """Return the (TILE_N,) scales at `pointers`; with MASKED 0 for keys that are not owned."""
    if MASKED:
        scales = tl.load(pointers, mask=owned, other=0.0)
    else:
        scales = tl.load(pointers)
    return scales


@triton.jit
def add_sink(acc, l, m, sink_log2):
    """Return the sums (acc, l, m) with one more logit of each row in the denominator alone.

    sink_log2: the logit of each row in base 2; -inf adds nothing.
    """
    m_new = tl.maximum(m, sink_log2)
    alpha = tl.math.exp2(m - m_new)
    l = l * alpha + tl.math.exp2(sink_log2 - m_new)
    return acc * alpha[:, None], l, m_new


@triton.jit
def normalise(acc, l, m):
    """Return o and lse (natural log), float32, of the running sums (acc, l, m), m in base 2.

    A row without a key has o = 0 and lse = -inf.
    """
    seen = l != 0.0  # True for NaN, too
    l = tl.where(seen, l, 1.0)
    lse = tl.where(seen, (m + tl.math.log2(l)) * LN2, float("-inf"))
    return acc / l[:, None], lse


@triton.jit
def clear_padding_rows(
    o_ptr,
    lse_ptr,
    stride_ot,
    stride_oh,
    stride_lh,
    first,
    step,
    num_tokens,
    head,
    GROUP: tl.constexpr,
    TILE_G: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    TILE_DV: tl.constexpr,
):
    """Write o = 0 and lse = -inf to rows after the last sequence, for the heads of one group.

    They are rows first, first + step, ... below num_tokens: programs share them. head: the number
    of the key head.
    """
    offs_g = tl.arange(0, TILE_G)
    offs_dv = tl.arange(0, TILE_DV)
    in_group = offs_g < GROUP
    heads = head * GROUP + offs_g
    zeros = tl.zeros([TILE_G, TILE_DV], dtype=o_ptr.dtype.element_ty)
    for token in range(first, num_tokens, step):
        o_row = o_ptr + tl.full([TILE_G], token, tl.int64) * stride_ot + heads * stride_oh
        inside = in_group[:, None] & (offs_dv[None, :] < V_HEAD_DIM)
        tl.store(o_row[:, None] + offs_dv[None, :], zeros, mask=inside)
        empty = tl.full([TILE_G], float("-inf"), dtype=tl.float32)
        tl.store(lse_ptr + heads * stride_lh + token, empty, mask=in_group)
