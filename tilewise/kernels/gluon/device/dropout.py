"""Which probabilities dropout keeps: `reference.dropout`'s rule, in the layout of a WGMMA's sum.

What: p_ij where a byte of Philox4x32-7, of (seed, offset) and the place (b Hq + h, i, j), is above
      the limit, else 0.
Grid: none, inlined into the warpgroups.
One call: one (64, n) block of rows. The four threads of a row draw its words of 32 keys, each its
      own, and send them to one another; 64 keys are two rows' work.
Traffic: seed and offset, once a tile.
Numerics: integers; equal to the reference bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROUNDS = gl.constexpr(7)
MULTIPLIER_0 = gl.constexpr(0xD2511F53)
MULTIPLIER_1 = gl.constexpr(0xCD9E8D57)
KEY_STEP_0 = gl.constexpr(0x9E3779B9)
KEY_STEP_1 = gl.constexpr(0xBB67AE85)


class Draw(NamedTuple):
    """The random state and limit that decide which probabilities of a call are kept; all uint32."""

    key_low: object  # the seed
    key_high: object
    offset: object
    limit: object  # threshold - 1, 0 to 255: bytes above it are kept


@gluon.jit
def draw_of(philox, limit):
    """Return the Draw of a call, by which its probabilities are kept or dropped.

    Args:
        philox: int64 (2,), seed and offset.
        limit: `AttentionSpec.drop_limit`, int32; random bytes above its third byte are kept.
    """
    seed, offset = gl.load(philox), gl.load(philox + 1)
    return Draw(
        seed.to(gl.uint32),
        (seed >> 32).to(gl.uint32),
        offset.to(gl.uint32),
        limit.to(gl.uint32, bitcast=True) >> 16,
    )


@gluon.jit
def _multiply(word, factor: gl.constexpr):
    """Return the high and the low 32 bits of the product of `word` and `factor`; one
    instruction."""
    product = word.to(gl.uint64) * factor
    return (product >> 32).to(gl.uint32), product.to(gl.uint32)


@gluon.jit
def _philox(c0, c1, c2, c3, key_low, key_high):
    """Return the four words to which Philox4x32-7 encrypts four uint32 counters, which broadcast,
    with a key of two words."""
    for _ in gl.static_range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIER_0)
        high1, low1 = _multiply(c2, MULTIPLIER_1)
        c0 = high1 ^ c1 ^ key_low
        c1 = low1
        c2 = high0 ^ c3 ^ key_high
        c3 = low0
        key_low = key_low + KEY_STEP_0
        key_high = key_high + KEY_STEP_1
    return c0, c1, c2, c3


@gluon.jit
def kept_words(block, row, head, draw):
    """Return a word of uint32 for each row and block of 32 keys: bit k is 1 if key k of the block
    is kept.

    block, row: the numbers of blocks and query rows, uint32 that broadcast; head: b Hq + h. A byte
    is compared from its lowest bit on: where a bit of the limit is 0 the byte is above it if its
    bit is set, or its lower bits are above; where it is 1, if both. That is the majority of three
    bits, one instruction for 32 keys.
    """
    above = block * 0
    for half in gl.static_range(2):
        words = _philox(
            block, row * 2 + half, head.to(gl.uint32), draw.offset, draw.key_low, draw.key_high
        )
        for place in gl.static_range(4):
            word = words[place]
            free = ((draw.limit >> (4 * half + place)) & 1) - 1  # all bits where the limit's is 0
            above = (word & above) | (word & free) | (above & free)
    return above


@gluon.constexpr_function
def _drawn_layout(registers, rows):
    """Return the layout of random words (rows / 2, registers, 4) over threads that draw them.

    The last axis are the four threads of a row.
    """
    return gl.DistributedLinearLayout(
        [[0, 1, 0]] if registers == 2 else [],
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[8, 0, 0], [16, 0, 0], [32, 0, 0]][: 2 if rows == 64 else 3],
        [],
        [rows // 2, registers, 4],
    )


@gluon.jit
def _of_thread(words, thread: gl.constexpr):
    """Return words (..., 4), whose last axis are four neighbouring threads, with the word of thread
    `thread` in all four."""
    return gl.inline_asm_elementwise(
        f"shfl.sync.idx.b32 $0, $1, {thread}, 0x1c1f, 0xffffffff;", "=r,r", [words],
        dtype=gl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def random_words(
    draw,
    head,
    first_row,
    first_key,
    n: gl.constexpr,
    layout: gl.constexpr,
    rows: gl.constexpr = 64,
):
    """Draw for 64 or 128 rows from `first_row` and n (64 or 128) keys from `first_key`.

    The first key is a multiple of 32. The four threads that hold a row and that eight below it
    draw a word or two each of those that both rows need.

    Returns:
        uint32 (rows, n / 32, 4): the words of `kept_words`, each for the four threads that hold a
        row of a (rows, n) tile in `layout`, as `drop` and `drop_pairs` want them.
    """
    BLOCKS: gl.constexpr = n // 32
    REGISTERS: gl.constexpr = BLOCKS // 2
    drawn: gl.constexpr = _drawn_layout(REGISTERS, rows)
    of_words: gl.constexpr = gl.SliceLayout(0, drawn)
    register = gl.arange(0, REGISTERS, gl.SliceLayout(1, of_words))
    thread = gl.arange(0, 4, gl.SliceLayout(0, of_words))
    word = gl.expand_dims(gl.expand_dims(register, 1) * 4 + gl.expand_dims(thread, 0), 0)
    pair = gl.arange(0, rows // 2, gl.SliceLayout(1, gl.SliceLayout(2, drawn)))
    pair = gl.expand_dims(gl.expand_dims(pair, 1), 2)
    row = first_row + pair // 8 * 16 + pair % 8 + word // BLOCKS * 8
    block = first_key // 32 + word % BLOCKS
    words = kept_words(block.to(gl.uint32), row.to(gl.uint32), head, draw)
    even = gl.join(_of_thread(words, 0), _of_thread(words, 2))
    odd = gl.join(_of_thread(words, 1), _of_thread(words, 3))
    words = gl.join(even, odd)  # (pair, register, thread, from // 2, from % 2)
    words = words.permute([0, 1, 3, 4, 2]).reshape([rows // 16, 8, 2, BLOCKS, 4])
    words = words.permute([0, 2, 1, 3, 4]).reshape([rows, BLOCKS, 4])
    shape = gl.zeros([rows, n], gl.int32, layout).reshape([rows, BLOCKS, 4, 4, 2])  # no instruction
    threads: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, shape.type.layout))
    return gl.convert_layout(words, threads, assert_trivial=True)


@gluon.jit
def _shifts(layout: gl.constexpr):
    """Return uint32 (1, 1, 4): for each of the four threads of a row, the first of the bits in a
    word that stand for its keys, twice its number."""
    thread = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    return gl.expand_dims(gl.expand_dims(thread, 0), 1).to(gl.uint32) * 2


@gluon.jit
def drop(p, words, other):
    """Return p (rows, n) where the bits of `words`, from `random_words`, keep it, else `other` of
    the same shape."""
    n: gl.constexpr = p.shape[1]
    layout: gl.constexpr = p.type.layout
    rows: gl.constexpr = p.shape[0]
    p5 = p.reshape([rows, n // 32, 4, 4, 2])  # (row, block, eight keys, thread, key)
    l5: gl.constexpr = p5.type.layout
    l4: gl.constexpr = gl.SliceLayout(4, l5)
    l3: gl.constexpr = gl.SliceLayout(2, l4)
    words = gl.convert_layout(words, l3, assert_trivial=True) >> _shifts(l3)
    eight = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, l4))))
    eight = gl.expand_dims(gl.expand_dims(gl.expand_dims(eight, 0), 1), 3)
    key = gl.arange(
        0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, l5))))
    )
    for axis in gl.static_range(4):
        key = gl.expand_dims(key, axis)
    bit = 1 << (gl.expand_dims(eight, 4) * 8 + key)
    words = gl.expand_dims(gl.expand_dims(words, 2), 4)
    p5 = gl.where((words & bit.to(gl.uint32)) != 0, p5, other.reshape([rows, n // 32, 4, 4, 2]))
    return gl.convert_layout(p5.reshape([rows, n]), layout, assert_trivial=True)


@gluon.jit
def mask_of_signs(even, odd, byte):
    """Return int32 masks of pairs: the low half is all ones where byte number `byte` (0 to 3) of
    `even` has its highest bit set, the high half where that of `odd` has; else zeros."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [even, odd, byte * 0x1111 + 0xCC88],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def mask_of_sign(words, byte):
    """Return int32 masks: all ones where byte number `byte` (0 to 3) of `words` has its highest bit
    set, else 0."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $1, $2;", "=r,r,r", [words, byte * 0x1111 + 0x8888],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def mask_of_pair(words, byte):
    """Return int32 masks of pairs: the low half is all ones where byte number `byte` of `words` has
    its highest bit set, the high half where byte number `byte` + 2 has."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $1, $2;", "=r,r,r", [words, byte * 0x1111 + 0xAA88],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def two_bytes_each(even, odd, half):
    """Return uint32 words: the low half is two bytes of `even`, the high half the same two of
    `odd`; the first two bytes if `half` is 0, the last two if it is 1."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [even, odd, half * 0x2222 + 0x5410],
        dtype=gl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def drop_pairs(pairs, words):
    """Return pairs (rows, n / 2) of 16-bit probabilities, from `warpgroup.pack`, with the halves
    that `words` of `random_words` drop set to 0.

    The bits of a thread's pairs, two neighbours in each byte of a word, become signs of bytes.
    """
    n: gl.constexpr = pairs.shape[1] * 2
    layout: gl.constexpr = pairs.type.layout
    rows: gl.constexpr = pairs.shape[0]
    p4 = pairs.reshape([rows, n // 32, 4, 4])  # (row, block, eight keys, thread)
    l4: gl.constexpr = p4.type.layout
    l3: gl.constexpr = gl.SliceLayout(2, l4)
    words = gl.convert_layout(words, l3, assert_trivial=True)
    shifts = _shifts(l3)
    even = gl.expand_dims(words << (7 - shifts), 2)
    odd = gl.expand_dims(words << (6 - shifts), 2)
    eight = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, l4))))
    eight = gl.expand_dims(gl.expand_dims(gl.expand_dims(eight, 0), 1), 3)
    p4 = p4 & mask_of_signs(even, odd, eight)
    return gl.convert_layout(p4.reshape([rows, n // 2]), layout, assert_trivial=True)
