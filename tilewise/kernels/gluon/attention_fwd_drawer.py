"""The drawer of the forward pass: four warps that decide ahead of time what dropout drops.

What: bits of dropped probabilities, a step or more before the warpgroups want them.
Grid: a partition of every CTA of `attention_fwd` that has dropout and shared memory for it.
One CTA: for every step of a walk 64 rows of each warpgroup, into a ring of `tile.slots` places.
Traffic: shared memory, 1 KiB a warpgroup and step.
Numerics: integers; see `_dropout`.

Philox and its comparisons are as many instructions as the rest of a step. Between the products of a
warpgroup they would wait where it waits; warps of their own fill the slots that it leaves.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.gluon._blocks import block_of_step, walk_of
from tilewise.kernels.gluon._dropout import draw_of, drop_pairs, dropped_bits, random_words
from tilewise.kernels.gluon._tiles import rows_of_tile
from tilewise.kernels.gluon._warpgroup import sum_layout


@gluon.jit
def draw_tiles(given, tile: gl.constexpr, variant: gl.constexpr):
    """Draw for every tile that the loader brings. given: Output, Work, Mask, Shared."""
    output, work, mask, shared = given
    GROUPS: gl.constexpr = tile.warpgroups
    KEYS: gl.constexpr = tile.keys
    S: gl.constexpr = sum_layout(KEYS)
    number = gl.program_id(0)
    turn = number * 0
    step = number * 0
    while number < work.num_tiles:
        rows = rows_of_tile(number, work, tile, variant)
        walk = walk_of(rows, work, mask, tile, variant)
        head = rows.b * work.num_q_heads + rows.h
        draw = draw_of(output.philox, output.drop_limit, head)
        for index in range(walk.steps):
            block, _ = block_of_step(walk, index, mask, tile, variant)
            slot = step % tile.slots
            mbarrier.wait(shared.bits_empty.index(slot), ((step // tile.slots) & 1) ^ 1)
            for group in gl.static_range(GROUPS):
                words = random_words(draw, rows.first_row + 64 * group, block * KEYS, KEYS, S)
                bits = dropped_bits(words, draw, variant.drops_most)
                shared.bits.index(slot * GROUPS + group).store(bits)
            mbarrier.arrive(shared.bits_full.index(slot), count=1)
            step += 1
        if tile.dynamic:
            # No phase is missed, since the next number comes only after this one is given back.
            mbarrier.wait(shared.q_full.index(0), turn & 1)
            mbarrier.arrive(shared.q_empty.index(0), count=1)
        turn += 1
        if tile.dynamic:
            mbarrier.wait(shared.q_full.index(0), turn & 1)
            lane: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            number = gl.max(shared.number.index(0).load(lane), 0)
        else:
            number += gl.num_programs(0)


@gluon.jit
def drop_drawn(pairs, shared, step, tile: gl.constexpr, GROUP: gl.constexpr):
    """Set what the drawer dropped of this step to 0 in packed pairs (64, n / 2)."""
    slot = step % tile.slots
    four = pairs.reshape([64, tile.keys // 32, 4, 4])  # no instruction
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, four.type.layout))
    mbarrier.wait(shared.bits_full.index(slot), (step // tile.slots) & 1)
    bits = shared.bits.index(slot * tile.warpgroups + GROUP).load(layout)
    mbarrier.arrive(shared.bits_empty.index(slot), count=1)
    return drop_pairs(pairs, bits)
