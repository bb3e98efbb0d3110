"""Device functions of a kernel that is launched while the one before it still runs; see
`kernels.early`.

what     lets the next kernel be launched, waits for the end of the one before
grid     none: these functions are inlined
program  every thread of a partition of WARPS warps
traffic  none
numerics none
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["await_previous", "begin_next"]


@gluon.jit
def begin_next(WARPS: gl.constexpr):
    """Allow the next kernel of the stream to be launched once all programs of this one have called
    this or ended."""
    _in_each_thread("griddepcontrol.launch_dependents", WARPS)


@gluon.jit
def await_previous(WARPS: gl.constexpr):
    """Wait until the kernel that was launched before this one has ended and its results can be
    read."""
    _in_each_thread("griddepcontrol.wait", WARPS)


@gluon.jit
def _in_each_thread(INSTRUCTION: gl.constexpr, WARPS: gl.constexpr):
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    thread = gl.arange(0, 32 * WARPS, lanes)
    gl.inline_asm_elementwise(
        f"{INSTRUCTION}; mov.b32 $0, $1;", "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1
    )
