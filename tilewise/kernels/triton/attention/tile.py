"""Device helpers that all tiled Triton kernels share: addresses of tiles, and logits.

Everything here is inlined at compile time. Lengths, strides and windows are runtime values; only
values that change the code are constexpr. Strides come as tuples (batch, row, head) counted in
units of `HeadDims.unit` elements, which proves to the compiler that rows start on a vector
boundary.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # log2(e): exp(x) = exp2(x * LOG2E)
FAR = tl.constexpr(2.0**24)  # logits of this size are even numbers
LN2 = tl.constexpr(0.6931471805599453)  # 1 / LOG2E


class Sequences(NamedTuple):
    """The starts and lengths of a call's sequences, as tensors (pointers in a kernel) or None."""

    cu_q: object  # int32 (B + 1,), first row of each packed sequence
    cu_k: object  # int32 (B + 1,)
    seqlens_k: object  # int32 (B,), valid keys of each dense sequence
    # 2 T + 3 of packed rows: odd and never 1, so that no value of the argument is compiled
    # specially.
    rows_q: object = None
    rows_k: object = None


class HeadDims(NamedTuple):
    """Compile-time sizes of one head: its channels, as they are and padded for tl.dot."""

    d: int  # channels of q and k, up to 512
    dv: int  # channels of v and o
    rest: int  # channels of q and k past the first 512, multiplied on their own
    d_pad: int  # powers of two
    dv_pad: int
    rest_pad: int
    unit: int  # strides are counted in units of so many elements
    narrow: bool  # offsets inside a tile fit 32 bits


class Variant(NamedTuple):
    """Constexpr: the options that change the code of the loops."""

    left: bool  # True if keys far to the left of the diagonal are hidden
    right: bool  # True if keys far to its right are hidden
    softcap: bool
    alibi: bool
    bias: bool
    bias_rows: bool  # True if the bias differs from query to query, not only from key to key
    mask_q: int  # rows and keys of a tile of the block mask, 0 without one
    mask_k: int
    ruled: bool  # True if windows or lengths hide keys in addition to a block mask
    dropout: bool
    plain: bool  # 16 bits, s = softmax_scale * q . k, a positive scale: it is part of the fma


class Extras(NamedTuple):
    """The tensors and numbers that a call adds to plain attention; None for unused ones.

    Flat: beside plain fields, triton 3.6 loses the constants of a tuple in a tuple.
    """

    alibi: object = None  # slopes, float32 (Hq,) or (B, Hq)
    alibi_batch: object = None  # stride of a sequence's slopes, 0 where all share
    bias: object = None  # any tensor that broadcasts to (B, Hq, Sq, Sk)
    bias_batch: object = None  # its strides, in elements; 0 where shared
    bias_head: object = None
    bias_row: object = None
    bias_key: object = None
    mask_bits: object = None  # see kernels.spec.MaskTensors
    mask_reach: object = None  # keys that a row of a compute tile sees, see `visible.reached_keys`
    mask_rows: object = None
    mask_row_entries: object = None
    mask_columns: object = None
    mask_column_entries: object = None
    # strides of a head's and a sequence's lists; 0 if they are shared
    mask_row_tiles: object = None
    mask_all_row_tiles: object = None
    mask_column_tiles: object = None
    mask_all_column_tiles: object = None
    philox: object = None  # int64 (2,): seed and offset of dropout
    drop_limit: object = None  # see AttentionSpec
    keep_scale: object = None  # factor of the kept probabilities
    maxima: object = None  # output for the largest logit of each row, laid out as lse


class Scores(NamedTuple):
    """The parameters that turn products q . k of one head into logits; made inside a kernel.

    No function returns one: Triton 3.6 cannot return a tuple that contains None.
    """

    softmax_scale: object
    softcap: object
    slope: object  # slope of ALiBi, 0 without it
    bias: object  # address of the head's bias, None without one
    bias_row: object  # strides, in elements
    bias_key: object


@triton.jit
def tile_of_program(num_tiles, heads_per_section, LAST_FIRST: tl.constexpr):
    """Return the tile of this program, and the number b H + h of its sequence b and head h.

    With LAST_FIRST the last tile of each head comes first.
    Heads are divided into sections whose keys and values stay in L2 together. Inside a section all
    heads of one tile index are neighbours, and tile indices are ordered from much to little work,
    so that the programs that start last are the cheapest.
    """
    num_heads = tl.num_programs(0) // num_tiles
    section = tl.program_id(0) // (num_tiles * heads_per_section)
    within = tl.program_id(0) % (num_tiles * heads_per_section)
    first_head = section * heads_per_section
    size = tl.minimum(heads_per_section, num_heads - first_head)
    tile = within // size
    if LAST_FIRST:
        tile = num_tiles - 1 - tile
    return tile, first_head + within % size


@triton.jit
def sequence(b, cu_seqlens_ptr, seqlens_ptr, seqlen, rows):
    """Return the first row of sequence b, 0 if it is dense, and its number of rows.

    They are clamped to the memory and to seqlen, whatever the tensors contain: a GPU cannot refuse
    wrong values without a wait. rows: `Sequences.rows_q` or `rows_k`.
    """
    first = b * 0
    if cu_seqlens_ptr is not None:
        last = (rows - 3) // 2
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + b), 0), last)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + b + 1), first), last)
        length = tl.minimum(end - first, seqlen)
    elif seqlens_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(seqlens_ptr + b), 0), seqlen)
    else:
        length = seqlen
    return first, length


@triton.jit
def head_base(ptr, b, first, h, strides, unit: tl.constexpr):
    """Return the address of row `first` of head h of sequence b, in 64-bit arithmetic."""
    offset = b.to(tl.int64) * strides[0] + first.to(tl.int64) * strides[1]
    return ptr + (offset + h.to(tl.int64) * strides[2]) * unit


@triton.jit
def row_pointers(
    base, first, count: tl.constexpr, row_stride, width: tl.constexpr, dims: tl.constexpr
):
    """Return the addresses (count, width) of the elements of rows first, first + 1, ...

    base: the address of row 0; row_stride: in units of dims.unit elements.
    """
    start = row_start(base, first, row_stride, dims.unit)
    return start + row_offsets(count, row_stride, width, dims)


@triton.jit
def row_start(base, first, row_stride, unit: tl.constexpr):
    """Return the address of row `first`, of rows from `base` on that lie row_stride units apart."""
    return base + (tl.zeros([], tl.int64) + first) * row_stride * unit


@triton.jit
def row_offsets(count: tl.constexpr, row_stride, width: tl.constexpr, dims: tl.constexpr):
    """Return the offset of each element of a (count, width) tile from the address of its first row.

    The offsets are the same for all tiles, so the ranges of a loop share their registers, half as
    many if 32 bits suffice: unsigned, so that widening them is free.
    """
    rows = tl.arange(0, count)
    if dims.narrow:
        offsets = rows * (row_stride * dims.unit)
        return (offsets[:, None] + tl.arange(0, width)[None, :]).to(tl.uint32)
    else:
        offsets = rows.to(tl.int64) * row_stride * dims.unit
        return offsets[:, None] + tl.arange(0, width)[None, :]


@triton.jit
def row_step(count: tl.constexpr, row_stride, unit: tl.constexpr):
    """Return the distance from a row to the row `count` rows later, in elements, int64."""
    return tl.full([], count, tl.int64) * row_stride * unit


@triton.jit
def load_rows(ptrs, valid, d: tl.constexpr, d_pad: tl.constexpr, MASKED: tl.constexpr):
    """Return the (rows, d_pad) tile at `ptrs`, zero for channels from d on.

    With MASKED it is zero in rows that are not `valid`, too; without it all rows are loaded.
    """
    if MASKED and d < d_pad:
        inside = tl.arange(0, d_pad) < d
        tile = tl.load(ptrs, mask=valid[:, None] & inside[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(ptrs, mask=valid[:, None], other=0.0)
    elif d < d_pad:
        inside = tl.arange(0, d_pad) < d
        tile = tl.load(ptrs, mask=inside[None, :], other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def load_rest(
    base, first, count: tl.constexpr, row_stride, valid, dims: tl.constexpr, MASKED: tl.constexpr
):
    """Return the channels from `dims.d` on of rows first, first + 1, ... of q or k.

    The tile is (count, rest_pad), or None for heads without a rest. base: the address of row 0;
    valid, MASKED: as in `load_rows`.
    """
    rest = None
    if dims.rest > 0:
        ptrs = row_pointers(base + dims.d, first, count, row_stride, dims.rest_pad, dims)
        rest = load_rows(ptrs, valid, dims.rest, dims.rest_pad, MASKED)
    return rest


@triton.jit
def store_rows(ptrs, tile, valid, d: tl.constexpr, d_pad: tl.constexpr):
    """Store the valid rows and the first d channels of a tile, rounded to the pointer's type."""
    mask = valid[:, None]
    if d < d_pad:
        mask = mask & (tl.arange(0, d_pad) < d)[None, :]
    tl.store(ptrs, tile.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def tanh(x):
    """Return tanh to a few ulp, with a series near 0, where (1 - e) / (1 + e) cancels."""
    size = tl.abs(x)
    e = tl.exp2(size * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    x2 = tl.minimum(x * x, 1.0)
    # Taylor coefficients; at |x| = 1/4 the next term is 9e-9 of the value.
    series = tl.fma(x2, 62.0 / 2835.0, -17.0 / 315.0)
    series = tl.fma(x2, series, 2.0 / 15.0)
    series = tl.fma(x2, series, -1.0 / 3.0)
    near = tl.fma(x2 * series, x, x)
    return tl.where(size < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit
def probabilities(logits):
    """Return 2^x of x = logits minus lse in base 2, with x above 0, by rounding, taken as 0."""
    return tl.exp2(tl.minimum(logits, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def slope_of_head(extras, b, h, variant: tl.constexpr):
    """Return the slope of ALiBi of query head h of sequence b, 0 without ALiBi."""
    slope = 0.0
    if variant.alibi:
        slope = tl.load(extras.alibi + b * extras.alibi_batch + h)
    return slope


@triton.jit
def bias_of_head(extras, b, h, variant: tl.constexpr):
    """Return the address of the bias of query head h of sequence b, None without one."""
    bias = None
    if variant.bias:
        bias = extras.bias + b.to(tl.int64) * extras.bias_batch + h.to(tl.int64) * extras.bias_head
    return bias


@triton.jit
def load_bias(
    scores,
    rows,
    keys,
    loaded,
    variant: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return the float32 bias of pairs, (rows, keys), or (keys, rows) with KEYS_FIRST.

    loaded: with MASKED, which rows or keys along axis 1 are loaded; others get 0. The caller clamps
    rows and keys to their sequence, except for those that `loaded` excludes.
    """
    at_keys = keys.to(tl.int64) * scores.bias_key
    if KEYS_FIRST:
        at = at_keys[:, None]
    else:
        at = at_keys[None, :]
    if variant.bias_rows:
        at_rows = rows.to(tl.int64) * scores.bias_row
        if KEYS_FIRST:
            at = at + at_rows[None, :]
        else:
            at = at + at_rows[:, None]
    if MASKED and (variant.bias_rows or not KEYS_FIRST):
        values = tl.load(scores.bias + at, mask=loaded[None, :], other=0.0)
    else:
        values = tl.load(scores.bias + at)
    return values.to(tl.float32)


@triton.jit
def logits_log2(qk, distance, bias, scores, variant: tl.constexpr):
    """Return the logits of raw products q . k in base 2, and tanh(s / softcap).

    Logits are scaled, capped, and get their bias and ALiBi, but no mask. Without a softcap the
    second result is qk itself, which is not meant to be used.

    qk: the products; distance: keys between query and key, of qk's shape, for ALiBi; bias: values
    of qk's shape, None without a bias.
    """
    if variant.softcap:
        capped = tanh(qk * (scores.softmax_scale / scores.softcap))
        s = capped * (scores.softcap * LOG2E)
    else:
        capped = qk
        s = qk * (scores.softmax_scale * LOG2E)
    if variant.bias:
        s += bias * LOG2E
    if variant.alibi:
        s -= tl.abs(distance).to(tl.float32) * (scores.slope * LOG2E)
    return s, capped
