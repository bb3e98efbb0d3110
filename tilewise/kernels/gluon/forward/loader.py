"""The loader of the forward pass: one warp that brings Q, K and V of one tile after the other.

What: TMA copies into rings of shared memory, in the order Q0 K0 Q1 V0 K1 V1 ... of a tile's walk;
      the bias of a block, where it comes so, before and behind its V, a warpgroup's rows each.
Grid: a partition of every CTA of `attention_fwd`.
One CTA: tiles of queries, dealt out by `scheduler`; of each the blocks of keys of `span`.
Traffic: Q once, K and V once a tile of queries (mostly from L2).
Numerics: none; what lies outside a tensor is read as zero.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.gluon.device.compat import tma_load
from tilewise.kernels.gluon.forward.scheduler import rows_of_tile
from tilewise.kernels.gluon.forward.span import block_of_step, walk_of


@gluon.jit
def load_tiles(given, tile: gl.constexpr, variant: gl.constexpr):
    """Run the loader warp: copy q, k, v and a copied bias of all tiles of this CTA into shared
    memory. The launch's last addition to `counter` resets it to 0.

    given: descriptors of q, k and v, and of the channels of q and k past tile.d; the counter of
    tiles; Work, Mask and Shared; the descriptor of the bias, and whether sequences and heads share
    it, or None.
    """
    q, q_high, k, k_high, v, counter, work, mask, shared, bias, shares = given
    GROUPS: gl.constexpr = tile.warpgroups
    grid = gl.num_programs(0)
    number = gl.program_id(0)
    visit = number * 0  # tiles so far: the phase of the queries' barriers
    step = number * 0  # blocks of keys so far: the place in the rings
    while number < work.num_tiles:
        rows = rows_of_tile(number, work, tile, variant)
        walk = walk_of(rows, work, mask, tile, variant)
        head_k = rows.h // work.group_size
        b = rows.b
        if variant.packed:
            b = rows.b * 0
        _load_queries(q, q_high, shared, rows, b, number, visit, 0, tile)
        for index in range(walk.steps):
            block, _ = block_of_step(walk, index, mask, tile, variant)
            first_key = rows.first_k + block * tile.keys
            stage = step % tile.stages
            phase = (step // tile.stages) & 1
            mbarrier.wait(shared.k_empty.index(stage), phase ^ 1)
            at = [b, head_k, first_key, 0]
            at_high = [b, head_k, first_key, tile.d]
            full = shared.k_full.index(stage)
            _load(k, k_high, at, at_high, full, shared.k, shared.k_high, stage, tile)
            if index == 0:
                for group in gl.static_range(1, GROUPS):
                    _load_queries(q, q_high, shared, rows, b, number, visit, group, tile)
            if tile.bias_stages > 0:
                _load_bias(bias, shares, shared, rows, block, step, 0, tile)
            mbarrier.wait(shared.v_empty.index(stage), phase ^ 1)
            mbarrier.expect(shared.v_full.index(stage), v.block_type.nbytes)
            tma_load(
                v, [b, head_k, first_key, 0], shared.v_full.index(stage), shared.v.index(stage)
            )
            if tile.bias_stages > 0:
                for group in gl.static_range(1, GROUPS):
                    _load_bias(bias, shares, shared, rows, block, step, group, tile)
            step += 1
        if tile.dynamic:
            number = gl.atomic_add(counter, 1) + grid
        else:
            number += grid
        visit += 1
    if tile.dynamic:
        # A launch adds once a tile, so this number comes from its last add.
        if number == work.num_tiles + grid - 1:
            gl.atomic_xchg(counter, 0)
        for group in gl.static_range(GROUPS):
            mbarrier.wait(shared.q_empty.index(group), (visit & 1) ^ 1)
            _announce(shared, group, work.num_tiles)
            mbarrier.arrive(shared.q_full.index(group), count=1)


@gluon.jit
def _load_queries(
    q, q_high, shared, rows, b, number, visit, group: gl.constexpr, tile: gl.constexpr
):
    """Wait until one warpgroup has read its last queries, and start to copy its next 64 rows of q.

    Args:
        rows: the tile of rows.
        b: the batch entry in the tensor.
        number: the number of the tile, which the warpgroup is told where tiles are dealt
            dynamically.
        visit: the number of tiles that this CTA had before.
    """
    mbarrier.wait(shared.q_empty.index(group), (visit & 1) ^ 1)
    if tile.dynamic:
        _announce(shared, group, number)
    row = rows.first_q + rows.first_row + group * 64
    at = [b, rows.h, row, 0]
    at_high = [b, rows.h, row, tile.d]
    full = shared.q_full.index(group)
    _load(q, q_high, at, at_high, full, shared.q, shared.q_high, group, tile)


@gluon.jit
def _load_bias(bias, shares, shared, rows, block, step, group: gl.constexpr, tile: gl.constexpr):
    """Wait for the buffer, and start to copy the bias of the 64 rows of one warpgroup and a block
    of keys into shared memory."""
    STAGES: gl.constexpr = tile.bias_stages
    slot = group * STAGES + step % STAGES
    b = gl.where(shares[0], 0, rows.b)
    h = gl.where(shares[1], 0, rows.h)
    mbarrier.wait(shared.bias_empty.index(slot), ((step // STAGES) & 1) ^ 1)
    full = shared.bias_full.index(slot)
    mbarrier.expect(full, bias.block_type.nbytes)
    at = [b, h, rows.first_row + group * 64, block * tile.keys]
    tma_load(bias, at, full, shared.bias.index(slot))


@gluon.jit
def _load(tiles, rests, at, at_high, full, memory, high_memory, index, tile: gl.constexpr):
    """Start to copy a tile's channels, in two parts if it is wide; `full` opens then.

    Args:
        tiles, rests: the descriptors of both parts.
        at, at_high: the coordinates of both parts.
        memory, high_memory, index: the rings, and the stage in them.
    """
    if tile.d_high > 0:
        mbarrier.expect(full, tiles.block_type.nbytes + rests.block_type.nbytes)
        tma_load(rests, at_high, full, high_memory.index(index))
    else:
        mbarrier.expect(full, tiles.block_type.nbytes)
    tma_load(tiles, at, full, memory.index(index))


@gluon.jit
def _announce(shared, group: gl.constexpr, number):
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    shared.number.index(group).store(gl.full([1], 0, gl.int32, lane) + number)
