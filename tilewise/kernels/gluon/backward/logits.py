"""What a call adds to plain logits, where keys stand in rows: (64 keys, queries) of one warpgroup.

What: softcap, bias, ALiBi, bit tiles of a block mask, and which probabilities dropout keeps.
Grid: none, inlined into the consumers of the backward pass.
One call: one tile in the layout of a sum. Bits of (query, 32 keys) come as words, (2, queries), of
      which a thread holds those of its own 32 keys and queries.
Traffic: the bias and the words of bit tiles, where they are used; slopes once a step.
Numerics: float32, as in `device.logits`; random words equal the reference bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.gluon.device.dropout import (
    kept_words,
    mask_of_pair,
    mask_of_sign,
    mask_of_signs,
    two_bytes_each,
)
from tilewise.kernels.gluon.device.warpgroup import LOG2E


class BwdScores(NamedTuple):
    """The numbers and pointers from which logits are computed; None for what a call has not."""

    scale: object
    scale_log2: object  # times log2(e)
    cap_ratio: object  # scale / softcap
    cap_log2: object  # softcap * log2(e)
    keep_scale: object  # the factor of the probabilities that dropout keeps
    alibi: object  # slopes, float32
    bias: object
    philox: object  # int64 (2,), seed and offset
    mask_bits: object  # see kernels.spec.MaskTensors
    mask_spans: object  # the spans of columns
    mask_entries: object


class Places(NamedTuple):
    """Strides of the tensors of `BwdScores`, in elements, 0 where shared, and dropout's limit.

    It is made inside a kernel.
    """

    alibi_batch: object
    bias_batch: object
    bias_head: object
    bias_row: object
    bias_key: object
    mask_batch: object
    mask_head: object
    drop_limit: object


@gluon.jit
def add_alibi(s, b, head, diagonals, keys, scores, places):
    """Return logits s (keys, queries) in base 2 minus slope * |query - key|.

    Args:
        b, head: the sequence and the query head.
        diagonals: the key at the position of each query.
        keys: the keys of the tile.
        scores, places: the slopes, and their stride.
    """
    slope = gl.load(scores.alibi + b * places.alibi_batch + head) * LOG2E
    distance = gl.expand_dims(diagonals.to(gl.float32), 0) - gl.expand_dims(keys.to(gl.float32), 1)
    return gl.fma(gl.abs(distance), gl.full_like(distance, 0.0) - slope, s)


@gluon.jit
def add_bias(s, b, head, queries, keys, first_query, first_key, scores, places):
    """Return logits s (keys, queries) in base 2 plus the bias of head `head` of sequence b.

    queries, keys: the positions to read, clamped to the sequence by the caller. first_query,
    first_key: those of the tile; offsets from them fit 32 bits.
    """
    start = b.to(gl.int64) * places.bias_batch + head.to(gl.int64) * places.bias_head
    start += first_query.to(gl.int64) * places.bias_row + first_key.to(gl.int64) * places.bias_key
    at_keys = gl.expand_dims((keys - first_key) * places.bias_key, 1)
    at = at_keys + gl.expand_dims((queries - first_query) * places.bias_row, 0)
    bias = gl.load(scores.bias + start + at).to(gl.float32)
    return gl.fma(bias, gl.full_like(bias, LOG2E), s)


@gluon.jit
def keep_pairs(x, words, other):
    """Return x (keys, queries), with `other` where a bit is 0; words: int32 (keys / 32, queries),
    bit k for key k of 32."""
    n: gl.constexpr = x.shape[1]
    layout: gl.constexpr = x.type.layout
    rows: gl.constexpr = x.shape[0]
    x3 = x.reshape([rows // 32, 32, n])
    l3: gl.constexpr = x3.type.layout
    bit = 1 << gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, l3)))
    bit = gl.expand_dims(gl.expand_dims(bit, 0), 2)
    x3 = gl.where((gl.expand_dims(words, 1) & bit) != 0, x3, other)
    return gl.convert_layout(x3.reshape([rows, n]), layout, assert_trivial=True)


@gluon.jit
def drop_gradients(dp, words, scale, delta):
    """Return Z dp - delta for dp (64 keys, queries), where Z is `scale` where kept, else 0.

    dp is masked by words: a thread has seven predicates, and ptxas packs more of them into words.

    Args:
        words: the result of `words_of_pairs`.
        delta: one for each query.
    """
    n: gl.constexpr = dp.shape[1]
    layout: gl.constexpr = dp.type.layout
    bits = dp.to(gl.int32, bitcast=True).reshape([2, 2, 2, 8, n // 2, 2])
    l6: gl.constexpr = bits.type.layout
    l5: gl.constexpr = gl.SliceLayout(5, l6)
    words = gl.convert_layout(words, gl.SliceLayout(2, l5), assert_trivial=True)
    odd = gl.arange(0, 2, _of_axis(l6, 5, 6))
    for axis in gl.static_range(5):
        odd = gl.expand_dims(odd, axis)
    byte = gl.expand_dims(_eight_on(l5), 5) + 2 * odd
    mask = mask_of_sign(gl.expand_dims(gl.expand_dims(words, 2), 5), byte)
    kept = gl.convert_layout((bits & mask).reshape([64, n]), layout, assert_trivial=True)
    # A product with -1 is a sign of an operand, a difference an instruction.
    minus_delta = gl.full_like(dp, -1.0) * gl.expand_dims(delta, 0)
    return gl.fma(kept.to(gl.float32, bitcast=True), gl.full_like(dp, 0.0) + scale, minus_delta)


@gluon.jit
def masks_of_pairs(pairs, words):
    """Return the masks of pairs of 16-bit numbers that dropout keeps, from words of
    `words_of_pairs`."""
    n: gl.constexpr = pairs.shape[1] * 2
    layout: gl.constexpr = pairs.type.layout
    l5: gl.constexpr = pairs.reshape([2, 2, 2, 8, n // 2]).type.layout
    words = gl.convert_layout(words, gl.SliceLayout(2, l5), assert_trivial=True)
    masks = mask_of_pair(gl.expand_dims(words, 2), _eight_on(l5))
    return gl.convert_layout(masks.reshape([64, n // 2]), layout, assert_trivial=True)


@gluon.constexpr_function
def _of_axis(layout, axis, rank):
    """Return the layout of `axis` alone, of a tensor of `rank` axes in `layout`."""
    for other in reversed(range(rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _eight_on(layout: gl.constexpr):
    """Return (1, 1, 2, 1, 1) with the values 0 and 1: of a tile of five axes, whether a key is the
    second of two that are eight apart."""
    at = gl.arange(0, 2, _of_axis(layout, 2, 5))
    at = gl.expand_dims(gl.expand_dims(at, 0), 1)
    return gl.expand_dims(gl.expand_dims(at, 3), 4)


@gluon.jit
def kept_pairs(pairs, words):
    """Return int32 masks (64 keys, queries / 2) for pairs of 16-bit numbers: halves are all ones
    where dropout keeps a number, else 0.

    words: the result of `words_of_dropout`.
    """
    n: gl.constexpr = pairs.shape[1] * 2
    layout: gl.constexpr = pairs.type.layout
    l4: gl.constexpr = pairs.reshape([2, 4, 8, n // 2]).type.layout
    even, odd = gl.split(words.reshape([2, 8, n // 2, 2]))
    even = gl.convert_layout(even, gl.SliceLayout(1, l4), assert_trivial=True)
    odd = gl.convert_layout(odd, gl.SliceLayout(1, l4), assert_trivial=True)
    octet = gl.expand_dims(_octets(l4), 3)
    masks = mask_of_signs(gl.expand_dims(even, 1), gl.expand_dims(odd, 1), octet)
    return gl.convert_layout(masks.reshape([64, n // 2]), layout, assert_trivial=True)


@gluon.jit
def _octets(layout: gl.constexpr):
    """Return (1, 4, 1), the values 0 to 3: the byte of a word that each eight of its 32 keys have,
    in a tile (2, 4, 8, queries) of layout."""
    octet = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    return gl.expand_dims(gl.expand_dims(octet, 0), 2)


@gluon.jit
def keep_signed(p, dp, keep_scale):
    """Return (|p|, dp * keep_scale where dropout keeps p, else 0); p is negative where it is
    dropped."""
    return gl.abs(p), gl.where(p > 0.0, dp * keep_scale, 0.0)


@gluon.jit
def draw_words(n: gl.constexpr, draw, head, first_row, first_key):
    """Draw for 64 keys and n queries which pairs dropout keeps: words, uint32 (2, n).

    Bit k of word [i, j] is 1 if key first_key + 32 i + k is kept for query first_row + j. Each word
    is drawn by one thread of a warpgroup.
    head: b Hq + h.
    """
    drawn: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [2, 2], [1, 0])
    block = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(1, drawn)), 1) + first_key // 32
    row = gl.expand_dims(gl.arange(0, n, gl.SliceLayout(0, drawn)), 0) + first_row
    return kept_words(block.to(gl.uint32), row.to(gl.uint32), head, draw)


@gluon.jit
def words_of_dropout(like, draw, head, first_row, first_key):
    """Draw the words of a tile like `like` (64 keys, n queries) and send them to its threads.

    Returns:
        uint32 (2, 8, queries): the word of 32 keys, for each of eight neighbouring keys moved so
        that the highest bit of byte i is that of the key 8 i further on.
    """
    n: gl.constexpr = like.shape[1]
    words = draw_words(n, draw, head, first_row, first_key)
    l3: gl.constexpr = gl.SliceLayout(1, like.reshape([2, 4, 8, n]).type.layout)
    words = gl.expand_dims(gl.convert_layout(words, gl.SliceLayout(1, l3)), 1)
    key = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, l3)))
    return words << (7 - gl.expand_dims(gl.expand_dims(key, 0), 2)).to(gl.uint32)


@gluon.jit
def words_of_pairs(like, words):
    """Send words of `draw_words` to a tile like `like` (64 keys, n queries), two queries in one.

    Half as many words as those of `words_of_dropout` then stay in registers.

    Returns:
        uint32 (2, 2, 8, n / 2): of 32 keys, their half of 16, and each of eight neighbours in it.
        The highest bits of bytes are those of the key and the one 8 further on, of the even query
        and then of the odd one.
    """
    n: gl.constexpr = like.shape[1]
    l4: gl.constexpr = like.reshape([2, 4, 8, n]).type.layout
    words = gl.convert_layout(words, gl.SliceLayout(1, gl.SliceLayout(1, l4)))
    even, odd = gl.split(words.reshape([2, n // 2, 2]))
    by_pairs: gl.constexpr = gl.SliceLayout(5, like.reshape([2, 2, 2, 8, n // 2, 2]).type.layout)
    of_words: gl.constexpr = gl.SliceLayout(2, by_pairs)
    of_halves: gl.constexpr = gl.SliceLayout(2, of_words)
    even = gl.convert_layout(even, gl.SliceLayout(1, of_halves), assert_trivial=True)
    odd = gl.convert_layout(odd, gl.SliceLayout(1, of_halves), assert_trivial=True)
    half = gl.expand_dims(gl.expand_dims(gl.arange(0, 2, _of_axis(of_halves, 1, 3)), 0), 2)
    words = two_bytes_each(gl.expand_dims(even, 1), gl.expand_dims(odd, 1), half)
    key = gl.arange(0, 8, _of_axis(of_words, 2, 4))
    key = gl.expand_dims(gl.expand_dims(gl.expand_dims(key, 0), 1), 3)
    return gl.expand_dims(words, 2) << (7 - key).to(gl.uint32)
