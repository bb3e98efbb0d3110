"""Where the programs of a step's one kernel meet: a counter in memory."""

from __future__ import annotations

import triton
import triton.language as tl

# One thread waits: when all do, their loads keep the additions of others from the counter.
_WAIT = tl.constexpr(
    """{
    .reg .pred others, early; .reg .u32 thread; .reg .s32 seen;
    mov.u32 thread, %tid.x;
    setp.ne.u32 others, thread, 0;
    @others bra THERE;
    AGAIN: ld.acquire.gpu.global.s32 seen, [$1];
    setp.lt.s32 early, seen, $2;
    @early bra AGAIN;
    THERE: mov.s32 $0, 0;
    }"""
)


@triton.jit
def arrive(meeting_ptr, GRID: tl.constexpr):
    """Say that this program is done with a phase.

    What is asked for ahead of the next phase comes after this: a release waits for loads, too.
    """
    if GRID > 1:
        tl.debug_barrier()
        tl.atomic_add(meeting_ptr, 1, sem="release", scope="gpu")


@triton.jit
def meet(meeting_ptr, count, GRID: tl.constexpr):
    """Wait until all programs have arrived `count` times; what they wrote before can be read."""
    if GRID > 1:
        tl.inline_asm_elementwise(
            _WAIT, "=r,l,r", [meeting_ptr.to(tl.int64), count * GRID], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
        tl.debug_barrier()
