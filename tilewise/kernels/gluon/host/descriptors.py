"""TMA descriptors of tensors: which tensors have one, and those of recent calls, remembered.

A descriptor holds an address, a shape and strides, and building one takes microseconds of host
time. Every tensor is seen as (batch, head, row, channel); a packed one is a batch of one.
"""

from __future__ import annotations

import ctypes
import functools
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int8: gl.int8,
}
# CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion of the driver's interface.
_MAP_TYPES = {
    torch.int8: 0,
    torch.float8_e4m3fn: 0,
    torch.int32: 3,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}
_MAP_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_MAP_L2_128_BYTES = 2
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_REMEMBERED = 512


class _Base(NamedTuple):
    """What a descriptor needs of its tensor; it must not keep the memory alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


_recent: OrderedDict[tuple[object, ...], TensorDescriptor] = OrderedDict()


def why_no_descriptor(tensor: Tensor) -> str | None:
    """Say why TMA cannot read or write `tensor` (..., heads, channels), or return None."""
    if tensor.numel() == 0:
        return "an empty tensor has no descriptor"
    if tensor.data_ptr() % 16 != 0:
        return "tensors must start on a 16-byte boundary"
    sizes_steps = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    for size, step in sizes_steps:
        if size > 1 and (step * tensor.itemsize % 16 != 0 or step <= 0):
            return f"strides must be positive multiples of 16 bytes, got {tuple(tensor.stride())}"
    return None


def addressable(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a copy of it where TMA cannot read it in place.

    The caller keeps the copy alive: a descriptor does not.
    """
    if tensor.stride(-1) == 1 and why_no_descriptor(tensor) is None:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@functools.cache
def tile_layout(dtype: torch.dtype, rows: int, columns: int) -> gl.NVMMASharedLayout:
    """Return how a (1, 1, rows, columns) tile lies in shared memory, as WGMMA wants it."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], _DTYPES[dtype])


def descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return the descriptor of (rows, columns) tiles of (B, S, H, D) or (T, H, D).

    What lies outside the tensor is read as zero and not written.
    """
    key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), rows, columns)
    found = _recent.get(key)
    if found is None:
        view = tensor.transpose(-2, -3)
        view = view.unsqueeze(0) if view.dim() == 3 else view
        layout = tile_layout(tensor.dtype, rows, columns)
        strides = [
            # TMA wants multiples of 16 bytes even where only one index exists.
            step if size > 1 else columns
            for size, step in zip(view.shape[:-1], view.stride()[:-1], strict=True)
        ]
        block = [1, 1, rows, columns]
        base = _Base(tensor.data_ptr(), tensor.dtype)
        found = TensorDescriptor(base, list(view.shape), [*strides, 1], block, layout)
        _remember(key, found)
    return found


def _remember(key: tuple[object, ...], found: TensorDescriptor) -> None:
    while len(_recent) >= _REMEMBERED:
        _recent.popitem(last=False)
    _recent[key] = found


def matrix_descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return the descriptor of (rows, columns) tiles of a matrix, as WGMMA wants them."""
    key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), rows, columns)
    found = _recent.get(key)
    if found is None:
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], _DTYPES[tensor.dtype])
        # TMA wants a multiple of 16 bytes even where there is only one row.
        step = tensor.stride(0) if tensor.shape[0] > 1 else columns
        base = _Base(tensor.data_ptr(), tensor.dtype)
        found = TensorDescriptor(base, list(tensor.shape), [step, 1], [rows, columns], layout)
        _remember(key, found)
    return found


def row_descriptor(tensor: Tensor, count: int) -> TensorDescriptor:
    """Return the descriptor of runs of `count` numbers of contiguous (planes, rows), float32."""
    key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), count)
    found = _recent.get(key)
    if found is None:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        base = _Base(tensor.data_ptr(), tensor.dtype)
        shape, strides = list(tensor.shape), list(tensor.stride())
        found = TensorDescriptor(base, shape, strides, [1, count], layout)
        _remember(key, found)
    return found


def scale_descriptor(tensor: Tensor, rows: int, heads: int) -> TensorDescriptor:
    """Return the descriptor of (rows, heads) tiles of float32 (num_blocks, block_size, Hk)."""
    key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), rows, heads)
    found = _recent.get(key)
    if found is None:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
        base = _Base(tensor.data_ptr(), tensor.dtype)
        shape, strides = list(tensor.shape), list(tensor.stride())
        found = TensorDescriptor(base, shape, strides, [1, rows, heads], layout)
        _remember(key, found)
    return found


def found_kind(found: TensorDescriptor) -> tuple[object, ...]:
    """Return what of a descriptor changes the code of a kernel: its dtype and its tile."""
    kept = found.__dict__.get("kind")
    if kept is None:
        kept = found.__dict__["kind"] = (found.base.dtype, *found.block_shape)
    kind: tuple[object, ...] = kept
    return kind


def parameters_of(found: TensorDescriptor) -> list[int]:
    """Return the addresses of a descriptor's 128 bytes, its sizes (int32) and strides (int64).

    They are what a kernel takes for it, and live as long as the descriptor.
    """
    kept = found.__dict__.get("parameters")
    if kept is None:
        kept = found.__dict__["parameters"] = _Parameters(found)
    addresses: list[int] = kept.addresses
    return addresses


class _Parameters:
    """The encoded form of a descriptor."""

    def __init__(self, found: TensorDescriptor) -> None:
        rank = len(found.shape)
        self._map = Maps(1)
        Encoder(found).write(self._map.places[0], found.base.data_ptr())
        self._shape = (ctypes.c_int32 * rank)(*found.shape)
        self._strides = (ctypes.c_int64 * rank)(*found.strides)
        shape, strides = ctypes.addressof(self._shape), ctypes.addressof(self._strides)
        self.addresses = [
            self._map.places[0],
            *(shape + 4 * axis for axis in range(rank)),
            *(strides + 8 * axis for axis in range(rank)),
        ]


class Maps:
    """Memory for what the copy engine reads, 128 bytes of each of some descriptors.

    Attributes:
        places: their addresses; they live as long as this object.
    """

    def __init__(self, count: int) -> None:
        self._memory = ctypes.create_string_buffer(_MAP_BYTES * count + _MAP_ALIGNMENT)
        start = ctypes.addressof(self._memory)
        start += -start % _MAP_ALIGNMENT
        self.places = [start + _MAP_BYTES * index for index in range(count)]


class Encoder:
    """Writes the 128 bytes of a descriptor, for its own tensor or one like it elsewhere."""

    def __init__(self, found: TensorDescriptor) -> None:
        rank, dtype = len(found.shape), found.base.dtype
        swizzle = found.layout.swizzle_byte_width
        box = list(found.block_shape)
        if swizzle > 0:  # a wider tile is several copies of one swizzled width
            box[-1] = min(box[-1], swizzle // dtype.itemsize)
        steps = [step * dtype.itemsize for step in found.strides[:-1]]
        self._found = found
        self._before = (_MAP_TYPES[dtype], rank)
        self._after = (
            (ctypes.c_uint64 * rank)(*reversed(found.shape)),
            (ctypes.c_uint64 * max(1, rank - 1))(*reversed(steps)),
            (ctypes.c_uint32 * rank)(*reversed(box)),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,  # not interleaved
            _MAP_SWIZZLES[swizzle],
            _MAP_L2_128_BYTES,
            0,  # what lies outside is zero
        )

    def write(self, place: int, address: int) -> None:
        """Encode the descriptor of the tensor at `address`."""
        status = driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(place), *self._before, ctypes.c_void_p(address), *self._after
        )
        if status != 0:
            raise RuntimeError(
                f"cuTensorMapEncodeTiled failed with CUDA error {status} for {self._found}"
            )


@functools.cache
def driver() -> Any:
    """Return the CUDA driver's library; calls keep the interpreter's lock, they are short."""
    return ctypes.PyDLL("libcuda.so.1")
