"""Clearing values that no row sees: in a product, 0 * NaN would reach every row of the tile.

What: rows of a V tile in shared memory -> 0, where a key is hidden from the whole tile of queries.
Grid: none, inlined into the warpgroups of the forward pass.
One call: one V tile, or nothing where all its keys are seen. Each warpgroup does it for itself:
      both write the same zeros, and neither waits for the other.
Traffic: shared memory only, in blocks at the edge of what a tile sees.
Numerics: exact.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tilewise.kernels.gluon.device.compat import partition_barrier
from tilewise.kernels.gluon.visible import reached

CHUNK = gl.constexpr(32)  # keys at a time: a word of a bit tile, and few registers


@gluon.jit
def clear_hidden(v, begin, end, reach, number, REACH: gl.constexpr):
    """Set to 0, in shared memory, the rows of v (1, 1, n, width) outside [begin, end) and, if
    REACH, those of which no bit is set.

    reach: a pointer to the n / 32 words of the keys that some row of bit tile `number` sees: -1 has
    all bits, -2 none.
    """
    n: gl.constexpr = v.shape[2]
    width: gl.constexpr = v.shape[3]
    tile = v.reshape([n, width])
    # Eight columns, 16 bytes, a thread; a warp covers whole rows.
    across: gl.constexpr = width // 8 if width < 256 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    for chunk in gl.static_range(n // CHUNK):
        seen = (row >= begin - chunk * CHUNK) & (row < end - chunk * CHUNK)
        if REACH:
            seen = seen & (((reached(reach + chunk, number) >> row) & 1) != 0)
        part = tile.slice(chunk * CHUNK, CHUNK)
        part.store(gl.where(gl.expand_dims(seen, 1), part.load(layout), 0.0))
    fence_async_shared()
    partition_barrier()
