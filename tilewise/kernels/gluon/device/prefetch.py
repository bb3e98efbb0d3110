"""Asking for global memory ahead of time: L2 fetches it, and no thread waits for it.

What: the bulk prefetch of sm_90, which Gluon has no name for.
Grid: none, inlined into the kernels.
One call: one run of bytes for each element of a tensor of pointers.
Traffic: memory to L2.
Numerics: none; the emulator of the tests leaves it out.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from tilewise.kernels.gluon.device.compat import builtin

__all__ = ["prefetch"]


@builtin
def prefetch(pointers, nbytes, _semantic=None):  # type: ignore[no-untyped-def]
    """Start to fetch `nbytes` (constexpr, a multiple of 16) from each of `pointers`, 16-aligned,
    into L2; nothing waits for it."""
    count = getattr(nbytes, "value", nbytes)
    gl.inline_asm_elementwise(
        f"cp.async.bulk.prefetch.L2.global [$1], {count}; mov.u32 $0, 0;", "=r,l", [pointers],
        dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip
