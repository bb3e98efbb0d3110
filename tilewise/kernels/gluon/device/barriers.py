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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate and initialise COUNT mbarriers in shared memory, int64 (COUNT, 1); each phase of one
    completes after ARRIVALS arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def release_loaded(empty):
    """Arrive at the barrier `empty` of a buffer in shared memory, after ordinary loads have read it
    to registers, so that the copy engine may overwrite it.

    A barrier orders ordinary accesses among themselves. The copy engine goes past it: a load that
    was issued before the arrival may take its data after the first rows of the next copy have
    landed, unless a fence stands between them (on an H200, once in 100,000 short tiles).
    """
    fence_async_shared()
    mbarrier.arrive(empty, count=1)
