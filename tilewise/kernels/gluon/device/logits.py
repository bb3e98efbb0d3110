"""From products q . k to logits, and which of them a row sees: softcap, bias, ALiBi, masks.

What: s = log2(e) * (cap(softmax_scale * q . k) + bias - slope * distance), -inf where hidden.
Grid: none, inlined into the warpgroups of the forward pass.
One call: one (64, n) block in the layout of a sum; a thread's columns are constants plus the first
      of its pair, so that columns are compared with constants.
Traffic: the bias and the bit tiles; slopes once a tile.
Numerics: float32. tanh is the special function unit's (2**-11 relative) where q and k have no more
bits than that, else 1 - 2 / (1 + exp(2x)), which is 2e-7 from it in absolute terms.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.gluon.device.warpgroup import (
    LOG2E,
    exp2,
    keep_columns,
    reciprocal,
    tanh,
    threads_of_row,
)
from tilewise.kernels.gluon.visible import keys_of_rows


class Extras(NamedTuple):
    """The optional tensors and the numbers from which products become logits in one call; None for
    absent ones."""

    softmax_scale: object
    softcap: object
    alibi: object  # slopes, float32
    alibi_batch: object  # stride of a sequence's slopes, 0 where all share
    bias: object
    bias_batch: object  # its strides, 0 where broadcast; in pairs with variant.bias_pairs
    bias_head: object
    bias_row: object
    bias_key: object


class Head(NamedTuple):
    """The numbers from which the logits of one tile of rows of one head are computed."""

    key_begin: object  # int32 (64,): the keys that each row sees
    key_end: object
    diagonal: object  # int32 (64,): the key that stands where the row does
    row: object  # int32 (64,), counted from the start of the sequence, no further than its end
    first_row: object  # first of the 64 rows
    slope_log2: object  # slope of the factor that the softmax adds, if variant.slanted
    bias: object  # start of the head's bias, in elements
    length_k: object


@gluon.jit
def head_of(
    rows,
    first_row,
    work,
    extras,
    layout: gl.constexpr,
    variant: gl.constexpr,
    COUNT: gl.constexpr = 64,
):
    """Return the `Head` of COUNT query rows of one attention head, from `first_row`.

    It says which keys each row sees, and holds the head's ALiBi slope and where its bias starts.

    layout: the layout of the rows of a sum.
    """
    row = first_row + gl.arange(0, COUNT, layout)
    diagonal, key_begin, key_end = keys_of_rows(
        row, rows.length_q, rows.length_k, work.window_left, work.window_right, variant
    )
    slope_log2 = 0.0
    if variant.alibi:
        slope = gl.load(extras.alibi + rows.b * extras.alibi_batch + rows.h)
        slope_log2 = slope * LOG2E
        if variant.slanted:
            slope_log2 = slope_log2 / factor_log2(extras, variant)
    bias = rows.b.to(gl.int64) * 0
    if variant.bias:
        at_head = rows.h.to(gl.int64) * extras.bias_head
        bias = rows.b.to(gl.int64) * extras.bias_batch + at_head
        if variant.bias_pairs:
            bias = bias * 2
    last_row = gl.minimum(row, rows.length_q - 1)
    return Head(key_begin, key_end, diagonal, last_row, first_row, slope_log2, bias, rows.length_k)


@gluon.jit
def factor_log2(extras, variant: gl.constexpr):
    """Return the factor by which products q . k, or the tanh of capped ones, become logits in
    base 2."""
    if variant.softcap != "none":
        return extras.softcap * LOG2E
    else:
        return extras.softmax_scale * LOG2E


@gluon.jit
def capped(s, ratio, variant: gl.constexpr):
    """Return tanh(s * ratio): the special function unit's if variant.softcap is "fast", else from
    an exponential; ratio: a number, or one for each row (64, 1).

    The variant comes whole: Triton 3.6 takes no field of one for a constexpr.
    """
    if variant.softcap == "fast":
        return tanh(s * ratio)
    else:
        far = exp2(s * (ratio * (2.0 * LOG2E)))
        return gl.fma(reciprocal(far + 1.0), gl.full_like(s, -2.0), gl.full_like(s, 1.0))


@gluon.jit
def logits(s, head, extras, first_key, bias, variant: gl.constexpr):
    """Return the logits of products s (64, n) with the keys from `first_key`.

    In base 2; with variant.factored they lack the factor of the last step, which the softmax adds.
    bias: the block's bias from `load_bias`, if variant.bias; else unread.
    """
    if variant.softcap != "none":
        s = capped(s, extras.softmax_scale / extras.softcap, variant)
    if not variant.factored:
        s = s * factor_log2(extras, variant)
    if variant.bias:
        factor = LOG2E
        if variant.factored:
            factor = LOG2E / factor_log2(extras, variant)
        s = gl.fma(bias.to(gl.float32), gl.full_like(s, 0.0) + factor, s)
    if variant.slanted:
        s = _add_slant(s, head)
    elif variant.alibi:
        s = _add_alibi(s, head, first_key)
    return s


@gluon.jit
def _add_slant(s, head):
    """Return s (64, n) plus slope * (key - the first key of the thread) for each column of a
    thread.

    That is ALiBi up to one number for each thread of a row (see `slant_of`), where no row sees a
    key behind its own.
    """
    n: gl.constexpr = s.shape[1]
    whole: gl.constexpr = s.type.layout
    rows: gl.constexpr = s.shape[0]
    THREADS: gl.constexpr = threads_of_row(whole)
    four = s.reshape([rows, n // (2 * THREADS), THREADS, 2])
    layout: gl.constexpr = four.type.layout
    eights: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    pair: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    eight = gl.arange(0, n // (2 * THREADS), eights) * (2 * THREADS)
    eight = gl.expand_dims(gl.expand_dims(gl.expand_dims(eight, 0), 2), 3)
    second = gl.arange(0, 2, pair)
    second = gl.expand_dims(gl.expand_dims(gl.expand_dims(second, 0), 1), 2)
    ahead = (eight + second).to(gl.float32)
    four = gl.fma(ahead, gl.full_like(four, 0.0) + head.slope_log2, four)
    return gl.convert_layout(four.reshape([rows, n]), whole, assert_trivial=True)


@gluon.jit
def slant_of(s, head, first_key):
    """Return the ALiBi term, slope * (key - diagonal), of the first key of each of the four threads
    of a row, (64, 4); s (64, n) only gives the layout."""
    THREADS: gl.constexpr = threads_of_row(s.type.layout)
    n: gl.constexpr = s.shape[1]
    four = s.reshape([s.shape[0], n // (2 * THREADS), THREADS, 2])  # no instruction
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, four.type.layout))
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    key = first_key + 2 * gl.arange(0, THREADS, gl.SliceLayout(0, layout))
    diagonal = gl.expand_dims(gl.convert_layout(head.diagonal, rows), 1)
    return (gl.expand_dims(key, 0) - diagonal).to(gl.float32) * head.slope_log2


@gluon.jit
def load_bias(s, head, extras, first_key, MASKED: gl.constexpr, variant: gl.constexpr):
    """Return the bias of a block in its own type, (64, n) or (1, n); offsets in it fit 32 bits.

    s: any (64, n) tile, whose layout the bias gets. MASKED: keys past the end of the sequence may
    be among those of the block.
    """
    n: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    column = gl.arange(0, n, gl.SliceLayout(0, layout))
    # What the compiler must know to load pairs: that they are neighbours and where they start.
    key_stride = extras.bias_key
    row_stride = extras.bias_row
    if variant.bias_pairs:
        key_stride = 1
        row_stride = row_stride * 2
    start = extras.bias + (head.bias + first_key.to(gl.int64) * key_stride)
    inside = column < head.length_k - first_key
    if variant.bias_pairs:  # whole pairs: the element after the last one is read, but hidden
        inside = column // 2 < (head.length_k - first_key + 1) // 2
    inside = gl.expand_dims(inside, 0)
    at = gl.expand_dims(column * key_stride, 0)
    if variant.bias_rows:
        start += head.first_row.to(gl.int64) * row_stride
        at = at + gl.expand_dims((head.row - head.first_row) * row_stride, 1)
    if MASKED:
        return gl.load(start + at, mask=inside, other=0.0)
    else:
        return gl.load(start + at)


@gluon.jit
def _add_alibi(s, head, first_key):
    """Return logits s (64, n) in base 2 minus slope * |row - key|."""
    n: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    rows: gl.constexpr = s.shape[0]
    s3 = s.reshape([rows, n // 8, 8])
    l3: gl.constexpr = s3.type.layout
    l2: gl.constexpr = gl.SliceLayout(1, l3)
    within = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, l2)), 0)
    ahead = gl.expand_dims(gl.convert_layout(head.diagonal - first_key, gl.SliceLayout(1, l2)), 1)
    ahead = gl.expand_dims((ahead - within).to(gl.float32), 1)
    eights = gl.arange(0, n // 8, gl.SliceLayout(0, gl.SliceLayout(2, l3))) * 8
    eights = gl.expand_dims(gl.expand_dims(eights, 0), 2).to(gl.float32)
    distance = gl.abs(ahead - eights)
    s3 = gl.fma(distance, gl.full_like(distance, 0.0) - head.slope_log2, s3)
    return gl.convert_layout(s3.reshape([rows, n]), layout, assert_trivial=True)


@gluon.jit
def hide(s, head, first_key, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Return logits s (64, n) with -inf where a row does not see a key: LEFT before its first,
    RIGHT past its last one."""
    return keep_columns(s, head.key_begin - first_key, head.key_end - first_key, LEFT, RIGHT)


@gluon.jit
def hide_by_bits(s, words):
    """Return logits s (64, n) with -inf where the bits of `words`, from `load_bits`, are not
    set."""
    n: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    rows: gl.constexpr = s.shape[0]
    s5 = s.reshape(
        [rows, n // 32, 4, 4, 2]
    )  # row, word, eight of the word, pair of it, column of it
    l5: gl.constexpr = s5.type.layout
    l4: gl.constexpr = gl.SliceLayout(4, l5)
    l3: gl.constexpr = gl.SliceLayout(3, l4)
    l4_column: gl.constexpr = gl.SliceLayout(3, l5)
    eight = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, l3)))
    pair = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, l4))))
    column = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, l4_column))))
    for axis in gl.static_range(2):
        eight = gl.expand_dims(eight, axis)
    for axis in gl.static_range(3):
        pair = gl.expand_dims(pair, axis)
    for axis in gl.static_range(4):
        column = gl.expand_dims(column, axis)
    # The lane's own columns first, so that the others are constants.
    words = gl.expand_dims(gl.expand_dims(words, 2), 3) >> (2 * pair)
    bit = gl.expand_dims(gl.full_like(eight, 1) << (8 * eight), 3)
    bit = gl.expand_dims(bit, 4) << column
    s5 = gl.where((gl.expand_dims(words, 4) & bit) != 0, s5, float("-inf"))
    return gl.convert_layout(s5.reshape([rows, n]), layout, assert_trivial=True)
