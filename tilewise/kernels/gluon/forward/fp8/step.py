"""Attention of e4m3 tensors on Hopper: what one warpgroup does with one tile of keys.

What: scores, online softmax, product with values.
Grid: none, inlined into the kernel.
One call: 64 queries, TILE_N keys. A warpgroup first multiplies the last tile's probabilities with
      their values, then the queries with this tile's keys, then takes the exponentials, while the
      other warpgroups have the tensor core.
Traffic: K and V out of shared memory; probabilities never leave the registers.
Numerics: base 2, float32. The tensor core keeps about 14 bits of a sum of e4m3 products and rounds
      towards zero. So each tile's P V is summed from zero and added in float32, by the fused
      multiply-add that rescales the sum anyway. Summed through, values of one sign lost a quarter
      of o at 16,384 keys (H200, 2026-11-20); summed by tiles, 0.3 %.
      Rows beyond FAR have a power of two for a factor, as in `forward.softmax`; their p, which is
      1 or hardly anything, is not multiplied by 2 ** 8: it would not survive a sum with the shift.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.gluon.device.e4m3 import (
    byte_operand_layout,
    byte_sum_layout,
    pack_e4m3,
    unpack_e4m3,
)
from tilewise.kernels.gluon.device.logits import capped, hide_by_bits
from tilewise.kernels.gluon.device.warpgroup import exp2, keep_columns, named_barrier
from tilewise.kernels.gluon.forward.softmax import nearest_power_of_two
from tilewise.kernels.gluon.visible import load_bits

P_LOG2 = gl.constexpr(8.0)  # 2 ** 8 is the largest power of two that e4m3 (to 448) holds
# Above it the sum with a shift is off by so much that e4m3 would not round the largest p to 2 ** 8.
# Of 14 bits of a product of that size the last is 16.
FAR = gl.constexpr(2.0**18)
_SCHEDULER_BARRIER = gl.constexpr(9)  # the first of the hardware barriers that Triton leaves alone


@gluon.jit
def wait_scheduler(CONSUMER: gl.constexpr):
    """Wait until the warpgroup whose turn comes before has issued its products to the tensor
    core."""
    named_barrier("sync", _SCHEDULER_BARRIER + CONSUMER, 256, 4)


@gluon.jit
def arrive_scheduler(CONSUMER: gl.constexpr, C: gl.constexpr):
    """Give the next warpgroup its turn to issue products to the tensor core."""
    named_barrier("arrive", _SCHEDULER_BARRIER + (CONSUMER + 1) % C.NUM_CONSUMERS, 256, 4)


class KeyScales(NamedTuple):
    """The scales of a head's keys, if each key has its own, and the tile that is read next."""

    scales: object  # scales from its first key on, at a multiple of 16 bytes
    tile: object
    seqlen_k: object


@gluon.jit
def scales_of_keys(of_keys, MASKED: gl.constexpr, C: gl.constexpr):
    """Load the scales of a tile's keys, for the columns of scores, while products run.

    MASKED: keys may end in this tile.

    Returns:
        float32 (TILE_N,), or the number of the tile where keys have no scales of their own.
    """
    scale = of_keys.tile
    if C.PER_TOKEN:
        columns: gl.constexpr = gl.SliceLayout(0, byte_sum_layout(C.TILE_N))
        key = gl.arange(0, C.TILE_N, columns)
        start = of_keys.scales + of_keys.tile * C.TILE_N
        if MASKED:
            left = of_keys.seqlen_k - of_keys.tile * C.TILE_N
            scale = gl.load(start + key, mask=key < left, other=1.0)
        else:
            scale = gl.load(start + key)
    return scale


@gluon.jit
def logits_of(s, key_scales, ratio, C: gl.constexpr):
    """Return scores that softmax multiplies by its factor: scaled by each key's scale, and capped.

    Args:
        key_scales: the scales of keys, from `scales_of_keys`.
        ratio: the factor (64,) of scores inside the cap, with a softcap.
    """
    if C.PER_TOKEN:
        s = s * gl.expand_dims(key_scales, 0)
    if C.softcap != "none":
        s = capped(s, gl.expand_dims(ratio, 1), C)
    return s


@gluon.jit
def next_tile(of_keys, count):
    """Return the KeyScales for the tile that lies `count` tiles of keys further to the left."""
    return KeyScales(of_keys.scales, of_keys.tile - count, of_keys.seqlen_k)


class Bits(NamedTuple):
    """The bit tiles of a block mask, the number of the current one, and the first of the
    warpgroup's rows in it."""

    bits: object
    number: object  # -1 has all bits, -2 none
    row: object  # first of the 64 rows


@gluon.jit
def words_of(bits, BITS: gl.constexpr, C: gl.constexpr):
    """Return the words of `load_bits` for what 64 rows see of a tile of keys; may overlap a
    product. 0 without BITS."""
    words = 0
    if BITS:
        WORDS: gl.constexpr = C.mask_keys // 32
        start = bits.bits + bits.number.to(gl.int64) * (C.mask_rows * WORDS)
        layout: gl.constexpr = byte_sum_layout(C.TILE_N)
        words = load_bits(start, bits.number, bits.row, 0, layout, C.TILE_N, WORDS)
    return words


@gluon.jit
def softmax(
    s,
    m,
    sums,
    scale,
    begin,
    end,
    HAS_BEGIN: gl.constexpr,
    HAS_END: gl.constexpr,
    HIDDEN: gl.constexpr = False,
):
    """Return p, the new m (64,), the new sums (64, 4) and alpha (64,), by which what was summed
    before must be multiplied, for a tile of scores s (64, n).

    p is multiplied by 2 ** 8, except in rows with a maximum beyond FAR. scale: the factor of a
    row's logits, (64,). sums are those of a thread's own columns, which are added up at the end of
    a tile of rows. Columns outside [begin, end) are hidden with HAS_BEGIN, HAS_END. HIDDEN: s may
    hold -inf.
    """
    TILE_N: gl.constexpr = s.shape[1]
    MASKED: gl.constexpr = HAS_BEGIN or HAS_END or HIDDEN
    if HAS_BEGIN or HAS_END:
        s = keep_columns(s, begin, end, HAS_BEGIN, HAS_END)
    m_new = gl.maximum(m, gl.max(s, 1))
    is_far = gl.abs(m_new * scale) > FAR
    factor = gl.where(is_far, nearest_power_of_two(scale), scale)
    top = m_new * factor
    if MASKED:
        top = gl.where(m_new == float("-inf"), 0.0, top)
    zeros = gl.full_like(s, 0.0)
    shift = gl.where(is_far, 0.0, P_LOG2) - top
    p = exp2(gl.fma(s, zeros + gl.expand_dims(factor, 1), zeros + gl.expand_dims(shift, 1)))
    alpha = exp2(gl.fma(m, factor, 0.0 - top))
    part = gl.sum(gl.sum(p.reshape([64, TILE_N // 8, 4, 2]), 3), 1)
    rows: gl.constexpr = gl.SliceLayout(1, part.type.layout)
    sums = sums * gl.expand_dims(gl.convert_layout(alpha, rows), 1) + part
    return p, m_new, sums, alpha


@gluon.jit
def scores(q, smem, stage, C: gl.constexpr):
    """Start the product q k^T with the keys in `stage`, and return the token of the asynchronous
    (64, TILE_N) sum."""
    TILE_N: gl.constexpr = C.TILE_N
    HEAD_DIM: gl.constexpr = C.HEAD_DIM
    k = smem.k.index(stage).reshape([TILE_N, HEAD_DIM]).permute((1, 0))
    zeros = gl.zeros([64, TILE_N], gl.float32, byte_sum_layout(TILE_N))
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_part(acc, p, alpha, smem, stage, PART: gl.constexpr, C: gl.constexpr):
    """Return acc * alpha + p v of one block of channels."""
    TILE_N: gl.constexpr = C.TILE_N
    WIDTH: gl.constexpr = C.HEAD_DIM // C.PARTS
    layout: gl.constexpr = byte_sum_layout(WIDTH)
    v = smem.v.index(stage * C.PARTS + PART).reshape([WIDTH, TILE_N]).permute((1, 0))
    operand = unpack_e4m3(p, byte_operand_layout(WIDTH))
    zeros = gl.zeros([64, WIDTH], gl.float32, layout)
    token = warpgroup_mma(operand, v, zeros, use_acc=False, is_async=True)
    # p's registers are read until the product is done.
    fresh, p = warpgroup_mma_wait(0, deps=(token, p))
    factor = gl.convert_layout(alpha, gl.SliceLayout(1, layout), assert_trivial=True)
    return gl.fma(acc, gl.full_like(acc, 0.0) + gl.expand_dims(factor, 1), fresh)


@gluon.jit
def add_values(acc, acc2, p, alpha, smem, stage, C: gl.constexpr):
    """Return acc and acc2 multiplied by alpha plus p v of the tile in `stage`, one block of
    channels after the other.

    acc2 is the second of PARTS = 2 blocks, else unused: registers have no room for all of a fresh
    sum of 256 channels beside the old one.
    """
    acc = _add_part(acc, p, alpha, smem, stage, 0, C)
    if C.PARTS == 2:
        acc2 = _add_part(acc2, p, alpha, smem, stage, 1, C)
    return acc, acc2


@gluon.jit
def step(
    q,
    smem,
    bars,
    count,
    acc,
    acc2,
    p,
    m,
    sums,
    alpha,
    scale,
    ratio,
    of_keys,
    begin,
    end,
    bits,
    CONSUMER: gl.constexpr,
    C: gl.constexpr,
    HAS_BEGIN: gl.constexpr,
    HAS_END: gl.constexpr,
    BITS: gl.constexpr = False,
):
    """Add the previous tile's p v to the sums, and take the softmax of tile number `count` of the
    CTA.

    Its K and V buffers are waited for and given back, and the warpgroup waits for its turn. BITS: a
    bit tile, of `bits`, hides keys. Returns acc, acc2, this tile's p as `pack_e4m3` has it, m,
    sums, alpha.
    """
    stage = count % C.STAGES
    last = (count - 1) % C.STAGES
    mbarrier.wait(bars.v_full.index(last), ((count - 1) // C.STAGES) & 1)
    wait_scheduler(CONSUMER)
    acc, acc2 = add_values(acc, acc2, p, alpha, smem, last, C)
    mbarrier.arrive(bars.v_empty.index(last), count=1)
    mbarrier.wait(bars.k_full.index(stage), (count // C.STAGES) & 1)
    token = scores(q, smem, stage, C)
    arrive_scheduler(CONSUMER, C)
    key_scales = scales_of_keys(of_keys, HAS_END or BITS, C)
    words = words_of(bits, BITS, C)
    s = warpgroup_mma_wait(0, deps=(token,))
    mbarrier.arrive(bars.k_empty.index(stage), count=1)
    s = logits_of(s, key_scales, ratio, C)
    if BITS:
        s = hide_by_bits(s, words)
    p, m, sums, alpha = softmax(s, m, sums, scale, begin, end, HAS_BEGIN, HAS_END, BITS)
    return acc, acc2, pack_e4m3(p), m, sums, alpha


@gluon.jit
def skip(bars, count, CONSUMER: gl.constexpr, C: gl.constexpr):
    """Give back K and V of tile number `count` unread, and take and pass on the turn at the tensor
    core."""
    stage = count % C.STAGES
    phase = (count // C.STAGES) & 1
    mbarrier.wait(bars.k_full.index(stage), phase)
    mbarrier.arrive(bars.k_empty.index(stage), count=1)
    mbarrier.wait(bars.v_full.index(stage), phase)
    mbarrier.arrive(bars.v_empty.index(stage), count=1)
    wait_scheduler(CONSUMER)
    arrive_scheduler(CONSUMER, C)
