"""Attention of e4m3 tensors on Hopper: the tiles of keys of a block mask.

What: the loops over keys of 64 rows, in the order of `forward.span`: the partial tiles of the mask,
      its full ones that every row sees whole, then those of which a rule hides keys.
Grid: none, inlined into the kernel.
One call: 64 queries; a tile of keys is one of the mask, of 128 x 128.
Traffic: 8 bytes an entry of the mask, 16 bytes a row of a partial tile.
Numerics: see `step`. A value that no row sees is multiplied by 0: values of 8 bits are finite, but
      where their head's scale is not, and zeros behind the end of a sequence.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from tilewise.kernels.gluon.device.e4m3 import pack_e4m3
from tilewise.kernels.gluon.device.logits import hide_by_bits
from tilewise.kernels.gluon.forward.fp8.step import (
    Bits,
    KeyScales,
    arrive_scheduler,
    logits_of,
    scales_of_keys,
    scores,
    softmax,
    step,
    wait_scheduler,
    words_of,
)
from tilewise.kernels.gluon.forward.span import block_of_step, walk_of
from tilewise.kernels.gluon.visible import keys_of_rows


@gluon.jit
def attend_masked(
    q, smem, bars, done, state, rows, work, mask, C: gl.constexpr, CONSUMER: gl.constexpr
):
    """Attend from a warpgroup's 64 queries to all tiles of keys of a block mask, but leave the
    product with the last tile's values to the caller.

    Args:
        state: sums, maximum, factors, rows (64,), and the scales of keys.
        rows: the CTA's tile of rows, whose walk all of its warpgroups take.

    Returns:
        acc, acc2, the last tile's packed p, m, sums, alpha, and `done`, the number of key tiles
        that the CTA has done.
    """
    acc, acc2, m, sums, scale, ratio, row, key_scales = state
    RULED: gl.constexpr = C.ruled
    LEFT: gl.constexpr = C.HAS_LEFT
    walk = walk_of(rows, work, mask, C, C)
    # The keys that each row sees by the rule.
    _diagonal, key_begin, key_end = keys_of_rows(
        row, rows.length_q, rows.length_k, work.window_left, work.window_right, C
    )
    # The first tile of keys: scores only.
    block, number = block_of_step(walk, 0, mask, C, C)
    first_key = block * C.TILE_N
    of_keys = KeyScales(key_scales, block, rows.length_k)
    bits = Bits(mask.bits, number, CONSUMER * 64)
    stage = done % C.STAGES
    mbarrier.wait(bars.k_full.index(stage), (done // C.STAGES) & 1)
    wait_scheduler(CONSUMER)
    token = scores(q, smem, stage, C)
    arrive_scheduler(CONSUMER, C)
    scales = scales_of_keys(of_keys, True, C)
    words = words_of(bits, True, C)
    s = warpgroup_mma_wait(0, deps=(token,))
    mbarrier.arrive(bars.k_empty.index(stage), count=1)
    s = hide_by_bits(logits_of(s, scales, ratio, C), words)
    begin = key_begin - first_key
    end = key_end - first_key
    p, m, sums, alpha = softmax(s, m, sums, scale, begin, end, LEFT, RULED, True)
    p = pack_e4m3(p)
    done += 1
    for index in range(1, walk.free_begin):
        block, number = block_of_step(walk, index, mask, C, C)
        first_key = block * C.TILE_N
        of_keys = KeyScales(key_scales, block, rows.length_k)
        bits = Bits(mask.bits, number, CONSUMER * 64)
        acc, acc2, p, m, sums, alpha = step(
            q,
            smem,
            bars,
            done,
            acc,
            acc2,
            p,
            m,
            sums,
            alpha,
            scale,
            ratio,
            of_keys,
            key_begin - first_key,
            key_end - first_key,
            bits,
            CONSUMER,
            C,
            LEFT,
            RULED,
            True,
        )
        done += 1
    for index in range(gl.maximum(walk.free_begin, 1), walk.free_end):
        block, _ = block_of_step(walk, index, mask, C, C)
        of_keys = KeyScales(key_scales, block, rows.length_k)
        acc, acc2, p, m, sums, alpha = step(
            q,
            smem,
            bars,
            done,
            acc,
            acc2,
            p,
            m,
            sums,
            alpha,
            scale,
            ratio,
            of_keys,
            key_begin,
            key_end,
            None,
            CONSUMER,
            C,
            False,
            False,
        )
        done += 1
    if RULED:
        for index in range(gl.maximum(walk.free_end, 1), walk.steps):
            block, _ = block_of_step(walk, index, mask, C, C)
            first_key = block * C.TILE_N
            of_keys = KeyScales(key_scales, block, rows.length_k)
            acc, acc2, p, m, sums, alpha = step(
                q,
                smem,
                bars,
                done,
                acc,
                acc2,
                p,
                m,
                sums,
                alpha,
                scale,
                ratio,
                of_keys,
                key_begin - first_key,
                key_end - first_key,
                None,
                CONSUMER,
                C,
                LEFT,
                True,
            )
            done += 1
    return acc, acc2, p, m, sums, alpha, done
