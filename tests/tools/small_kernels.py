"""Small Gluon kernels with which the emulator is tested: a product of matrices, and single rules.

What: `multiply` computes a @ b by TMA and WGMMA from a ring; the others show one behaviour each.
Grid: one CTA for each (64, N) tile of `multiply`; what each test says elsewhere.
One CTA: a warpgroup that multiplies and a warp that loads.
Traffic: see above.
Numerics: float32 sums.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.gluon.device.compat import tma_add, tma_load, tma_store
from tilewise.kernels.gluon.device.warpgroup import exp2, named_barrier, pack, sum_layout, unpack


@gluon.jit
def _load(a, b, a_tiles, b_tiles, full, empty, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    row = gl.program_id(0) * 64
    for step in range(DEPTH // 64):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), a.block_type.nbytes + b.block_type.nbytes)
        tma_load(a, [0, 0, row, step * 64], full.index(stage), a_tiles.index(stage))
        tma_load(b, [0, 0, step * 64, 0], full.index(stage), b_tiles.index(stage))


@gluon.jit
def _multiply(
    o, o_tile, a_tiles, b_tiles, full, empty,
    DEPTH: gl.constexpr, STAGES: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    n: gl.constexpr = b_tiles.shape[4]
    acc = gl.zeros([64, n], gl.float32, sum_layout(n))
    for step in range(DEPTH // 64):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        a = a_tiles.index(stage).reshape([64, 64])
        acc = warpgroup_mma(a, b_tiles.index(stage).reshape([64, n]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(stage), count=1)
    o_tile.reshape([64, n]).store(acc)
    fence_async_shared()
    if ADD:
        tma_add(o, [0, 0, gl.program_id(0) * 64, 0], o_tile)
    else:
        tma_store(o, [0, 0, gl.program_id(0) * 64, 0], o_tile)
    tma.store_wait(0)


@gluon.jit
def multiply(a, b, o, DEPTH: gl.constexpr, STAGES: gl.constexpr, ADD: gl.constexpr):
    n: gl.constexpr = b.block_type.shape[3]
    a_tiles = gl.allocate_shared_memory(a.dtype, [STAGES, 1, 1, 64, 64], a.layout)
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES, 1, 1, 64, n], b.layout)
    o_tile = gl.allocate_shared_memory(o.dtype, [1, 1, 64, n], o.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    gl.warp_specialize(
        [
            (_multiply, (o, o_tile, a_tiles, b_tiles, full, empty, DEPTH, STAGES, ADD)),
            (_load, (a, b, a_tiles, b_tiles, full, empty, DEPTH, STAGES)),
        ],
        [1],
        [24],
    )


@gluon.jit
def in_turn(total, turn, SPINS: gl.constexpr):
    """Double and add in the order of the programs, which wait for one another."""
    me = gl.program_id(0)
    if SPINS:
        while gl.atomic_add(turn, 0) != me:
            pass
    else:
        while gl.atomic_add(turn, 0) != me + 1:
            pass
    gl.store(total, gl.load(total) * 2 + me)
    gl.atomic_add(turn, 1)


@gluon.jit
def integers(result, a, b):
    """Divide and wrap as the hardware does, once as scalars and once as a tensor."""
    gl.store(result, a // b)
    gl.store(result + 1, a % b)
    seven = 7
    for _ in range(1):
        seven = seven - 14
        gl.store(result + 2, seven // 2)
    lanes = gl.arange(0, 4, gl.BlockedLayout([1], [32], [1], [0]))
    gl.store(result + 4 + lanes, (lanes + a) // b)
    word = a.to(gl.uint32) * 65537
    gl.store(result + 8, (word >> 16).to(gl.int32))


@gluon.jit
def overflow(result, a):
    gl.store(result, a * 65536 * 65536)


@gluon.jit
def past_the_end(result, a):
    lanes = gl.arange(0, 4, gl.BlockedLayout([1], [32], [1], [0]))
    gl.store(result, gl.sum(gl.load(a + lanes), 0))


@gluon.jit
def round_trip(result, a, dtype: gl.constexpr):
    """Store exp2(a) rounded to 16 bits and back, through packed pairs."""
    layout: gl.constexpr = sum_layout(8)
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    at = row * 8 + gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, layout)), 0)
    pairs = pack(exp2(gl.load(a + at)), dtype)
    gl.store(result + at, unpack(pairs, dtype, layout).to(gl.float32))


@gluon.jit
def _first_half(memory, result):
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    memory.slice(0, 64).store(gl.arange(0, 64, lanes))
    named_barrier("arrive", 9, 256, 4)


@gluon.jit
def _second_half(memory, result):
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    named_barrier("sync", 9, 256, 4)
    at = gl.arange(0, 64, lanes)
    gl.store(result + at, memory.slice(0, 64).load(lanes))


@gluon.jit
def handed_over(result):
    memory = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize(
        [(_first_half, (memory, result)), (_second_half, (memory, result))], [4], [24]
    )


@gluon.jit
def _copy_rows(x, tiles, index, rows):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    row = index * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    at = gl.expand_dims(row * 16, 1) + gl.expand_dims(
        gl.arange(0, 16, gl.SliceLayout(0, LAYOUT)), 0
    )
    inside = gl.expand_dims(row < rows, 1)
    async_copy.async_copy_global_to_shared(tiles.index(index % 2), x + at, mask=inside)


@gluon.jit
def sum_of_rows(x, result, rows, STEPS: gl.constexpr):
    """Add up tiles of 64 rows of x (rows, 16), copied by cp.async one step ahead."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    tiles = gl.allocate_shared_memory(x.dtype.element_ty, [2, 64, 16], shared)
    _copy_rows(x, tiles, gl.program_id(0), rows)
    async_copy.commit_group()
    total = gl.zeros([64, 16], gl.float32, LAYOUT)
    for index in range(STEPS):
        async_copy.wait_group(0)
        _copy_rows(x, tiles, index + 1, rows)
        async_copy.commit_group()
        total = total + tiles.index(index % 2).load(LAYOUT).to(gl.float32)
    async_copy.wait_group(0)
    at = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))
    gl.store(result + at, gl.sum(total, 0))
