"""Device functions of a kernel that is launched while the one before it still runs; see
`kernels.early`.

what     lets the next kernel be launched, waits for the end of the one before, prefetches into L2
grid     none: these functions are inlined
program  nothing with EARLY = 0
traffic  memory to L2, of data that will be read anyway
numerics none
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilewise.kernels import early

__all__ = ["RUN", "await_previous", "begin_next", "options", "prefetch"]

_FIRST, _AFTER = tl.constexpr(early.FIRST), tl.constexpr(early.AFTER)
RUN = 128  # channels of 16 bits that one request fetches: 256 bytes


def options(kind: str) -> dict[str, Any]:
    """Return the keyword arguments of a launch that say when it begins and lets others begin.

    They follow from the mode that `early.launching` sets for this kind of kernel in this thread:
    the constant EARLY, and Triton's launch_pdl unless the mode is 0.
    """
    return options_of(early.mode(kind))


def options_of(mode: int) -> dict[str, Any]:
    """Return the keyword arguments of a launch in a mode of `kernels.early`, see `options`."""
    return {"EARLY": mode, "launch_pdl": True} if mode else {"EARLY": 0}


@triton.jit
def begin_next(EARLY: tl.constexpr):
    """Let the next kernel begin once all programs of this one have reached this point.

    It does so in the mode early.FIRST only, and nothing otherwise.
    """
    if EARLY == _FIRST:
        gdc_launch_dependents()


@triton.jit
def await_previous(EARLY: tl.constexpr):
    """Wait until the kernel before has ended and its results can be read, unless EARLY is 0.

    In the mode early.AFTER the next kernel may begin then.
    """
    if EARLY > 0:
        gdc_wait()
    if EARLY == _AFTER:
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers, inside, nbytes):
    """Let L2 fetch nbytes, a multiple of 16, from each 16-aligned pointer where `inside` is True.

    Nothing is read: later readers see whatever is written there before or after the fetch.
    """
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred wanted;
            setp.ne.b32 wanted, $2, 0;
            @wanted cp.async.bulk.prefetch.L2.global [$1], $3;
            mov.b32 $0, 0;
        }
        """,
        "=r,l,r,r", [pointers.to(tl.int64), inside.to(tl.int32), nbytes], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
