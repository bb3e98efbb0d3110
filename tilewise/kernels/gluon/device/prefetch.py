"""Asking for global memory ahead of time: L2 fetches it, and nobody waits for it.

What: the bulk prefetch of sm_90, which Gluon has no name for.
Grid: none, inlined into the kernels.
One call: one run of bytes for each element of a tensor of pointers.
Traffic: memory to L2.
Numerics: none; the emulator of the tests leaves it out.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

__all__ = ["prefetch", "prefetch_rows"]


@builtin
def prefetch(pointers, nbytes, aligned=True, _semantic=None):  # type: ignore[no-untyped-def]
    """Start to fetch `nbytes` (constexpr, a multiple of 16) from each of `pointers`.

    aligned: pointers are multiples of 16; else bytes from the 16 that a pointer lies in on.
    """
    count, aligned = getattr(nbytes, "value", nbytes), getattr(aligned, "value", aligned)
    fetch = f"cp.async.bulk.prefetch.L2.global [$1], {count}; mov.u32 $0, 0;"
    if not aligned:
        fetch = (
            "{ .reg .b64 at; and.b64 at, $1, 0xfffffffffffffff0; "
            f"cp.async.bulk.prefetch.L2.global [at], {count}; mov.u32 $0, 0; }}"
        )
    gl.inline_asm_elementwise(
        fetch, "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic
    )


@gluon.jit
def prefetch_rows(start, row_stride, rows, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Start to fetch the first COLUMNS elements of rows of a matrix; for a partition of one warp.

    start: pointer to the first row; row_stride: elements; rows: how many of ROWS there are.
    """
    BYTES: gl.constexpr = start.dtype.element_ty.primitive_bitwidth // 8
    lanes: gl.constexpr = gl.BlockedLayout([ROWS // 32], [32], [1], [0])
    row = gl.minimum(gl.arange(0, ROWS, lanes), rows - 1)
    prefetch(start + row * row_stride, COLUMNS * BYTES, aligned=False)
