"""What a kernel does that is launched while the one before it still runs; see `kernels.early`.

what     lets the next kernel be launched, waits for the end of the one before, asks L2 for bytes
grid     none: these functions are inlined
program  nothing with EARLY = 0
traffic  memory to L2, what will be read anyway
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
RUN = 128  # channels of 16 bits that one request asks for: 256 bytes


def options(kind: str) -> dict[str, Any]:
    """Return constants and options of a launch of this kind."""
    return options_of(early.mode(kind))


def options_of(mode: int) -> dict[str, Any]:
    """Return those of a launch in this mode."""
    return {"EARLY": mode, "launch_pdl": True} if mode else {"EARLY": 0}


@triton.jit
def begin_next(EARLY: tl.constexpr):
    """Let the next kernel be launched as soon as all programs of this one have come here."""
    if EARLY == _FIRST:
        gdc_launch_dependents()


@triton.jit
def await_previous(EARLY: tl.constexpr):
    """Wait until the kernel before has ended and what it wrote can be read."""
    if EARLY > 0:
        gdc_wait()
    if EARLY == _AFTER:
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers, inside, nbytes):
    """Have L2 fetch bytes, a multiple of 16 from 16-aligned pointers on, where `inside` holds.

    Nothing is read: what is written there before the fetch or after it is what readers will find.
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
