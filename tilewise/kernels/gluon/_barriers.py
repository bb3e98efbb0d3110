"""Barriers in shared memory, by which the partitions of a CTA wait for one another.

What: the mbarriers of a ring of stages, ready to be waited for.
Grid: none, inlined into the kernels.
One call: the barriers of one meaning, such as "this stage is full".
Traffic: shared memory, 8 bytes a barrier.
Numerics: none.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return COUNT barriers that ARRIVALS arrivals open, one a phase."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars
