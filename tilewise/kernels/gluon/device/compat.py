"""Gluon's operations that are named differently, or not at all, from one Triton version to another.

Triton 3.6 to 3.9. The operation behind `tma_add` exists in all of them, its wrapper from 3.8 on.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

__all__ = ["partition_barrier", "reinterpret", "tma_add", "tma_load", "tma_store"]

if hasattr(tma, "async_load"):
    tma_load, tma_store = tma.async_load, tma.async_store
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

# A barrier of the warps of one partition, which is what orders their shared memory.
partition_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

if hasattr(tma, "async_atomic_add"):
    tma_add = tma.async_atomic_add
else:
    from triton._C.libtriton import ir

    @builtin
    def tma_add(tensor_desc, coord, src, _semantic=None):  # type: ignore[no-untyped-def]
        """Start to add a tile of shared memory to global memory, element by element, at `coord` of
        a descriptor."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        add = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(add, tensor_desc.handle, coord, src.handle)


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):  # type: ignore[no-untyped-def]
    """Return shared memory with another type, shape and layout of the same bytes."""
    view = memory.reinterpret if hasattr(memory, "reinterpret") else memory._reinterpret
    return view(dtype, shape, layout, _semantic=_semantic)
