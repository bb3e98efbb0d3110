"""TMA descriptors of tensors: which tensors have one, and how the driver encodes it.

A descriptor holds an address, a shape and strides, and encoding one takes microseconds of host
time. Every tensor is seen as (batch, head, row, channel); a packed one is a batch of one.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable
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
    torch.int32: gl.int32,
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
_new = tuple.__new__  # a named tuple in a third of the time of its class


class _Base(NamedTuple):
    """The address and dtype of a descriptor's tensor, in place of it: no memory is kept alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class Form(NamedTuple):
    """The parts that all descriptors of one dtype and tile have in common.

    Attributes:
        layout: the layout of the tile in shared memory.
        kind: the dtype and the tile, for each of which kernels are compiled anew.
        map_type: the driver's number of the dtype.
        numbers: the other arguments of the driver. The first two point to memory to which `write`
            writes the sizes and steps of a descriptor before the driver encodes it.
    """

    layout: gl.NVMMASharedLayout
    kind: tuple[Any, ...]
    map_type: int
    numbers: tuple[Any, ...]
    write: Callable[..., None]


class Described(NamedTuple):
    """A TMA descriptor of a plan, whose address is not known yet; `at` makes a real one of it.

    Attributes:
        base: the tensor; within a plan the place of the tensor among all of its tensors.
        shape, strides: the sizes and steps of the described matrix, in elements.
        form: the dtype and tile.
    """

    base: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    form: Form


def why_no_descriptor(tensor: Tensor) -> str | None:
    """Return why TMA cannot address `tensor` in place, or None if it can.

    The tensor must have elements, start at a multiple of 16 bytes, and have strides of positive
    multiples of 16 bytes in all dimensions but the last, which is not looked at.
    """
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
    """Return `tensor`, or a contiguous copy of it where TMA cannot read it in place.

    The caller must keep the result alive for as long as its descriptors: these hold only addresses.
    """
    if tensor.stride(-1) == 1 and why_no_descriptor(tensor) is None:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@functools.cache
def tile_layout(dtype: torch.dtype, rows: int, columns: int) -> gl.NVMMASharedLayout:
    """Return the layout of a (1, 1, rows, columns) tile in shared memory that WGMMA reads."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], _DTYPES[dtype])


@functools.cache
def _form_of_tiles(dtype: torch.dtype, rows: int, columns: int) -> Form:
    return _form_of((1, 1, rows, columns), tile_layout(dtype, rows, columns), dtype)


@functools.cache
def _form_of_matrix(dtype: torch.dtype, rows: int, columns: int) -> Form:
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], _DTYPES[dtype])
    return _form_of((rows, columns), layout, dtype)


@functools.cache
def _form_of_chunks(dtype: torch.dtype, *block: int) -> Form:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype])
    return _form_of(block, layout, dtype)


@functools.cache
def _form_of_numbers(dtype: torch.dtype, *block: int) -> Form:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(block))
    return _form_of(block, layout, dtype)


def _form_of(block: tuple[int, ...], layout: gl.NVMMASharedLayout, dtype: torch.dtype) -> Form:
    rank, box, swizzle = len(block), list(block), layout.swizzle_byte_width
    if swizzle > 0:  # a wider tile is several copies of one swizzled width
        box[-1] = min(box[-1], swizzle // dtype.itemsize)
    written = (ctypes.c_uint64 * (2 * rank))()
    write = functools.partial(struct.Struct(f"={2 * rank - 1}Q").pack_into, written, 0)
    numbers = (
        (ctypes.c_uint64 * rank).from_buffer(written),
        (ctypes.c_uint64 * max(1, rank - 1)).from_buffer(written, 8 * rank),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # not interleaved
        _MAP_SWIZZLES[swizzle],
        _MAP_L2_128_BYTES,
        0,  # what lies outside is zero
    )
    return Form(layout, (dtype, *block), _MAP_TYPES[dtype], numbers, write)


def descriptor(tensor: Tensor, rows: int, columns: int) -> Any:
    """Return the TMA descriptor of (rows, columns) tiles of a tensor (B, S, H, D) or (T, H, D).

    A tile has neighbouring tokens and channels of one sequence and head. Elements outside of the
    tensor are read as zero and not written.

    Returns:
        A TensorDescriptor; for a tensor of a plan, on "meta", a `Described`.
    """
    *batch, length, heads, width = tensor.shape
    *step, row, head, _ = tensor.stride()
    # TMA wants multiples of 16 bytes even where only one index exists.
    strides = (
        step[0] if step and batch[0] > 1 else columns,
        head if heads > 1 else columns,
        row if length > 1 else columns,
        1,
    )
    shape = (batch[0] if batch else 1, heads, length, width)
    return _of(tensor, shape, strides, _form_of_tiles(tensor.dtype, rows, columns))


def _of(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], form: Form) -> Any:
    found = _new(Described, (tensor, shape, strides, form))
    return found if tensor.is_meta else at(found, tensor.data_ptr())


def at(found: Described, address: int) -> TensorDescriptor:
    """Return the descriptor of a tensor with the shape, strides and form of `found`, at
    `address`."""
    dtype, *block = found.form.kind
    base, shape, strides = _Base(address, dtype), list(found.shape), list(found.strides)
    made = TensorDescriptor(base, shape, strides, block, found.form.layout)
    made.__dict__["form"] = found.form
    return made


def matrix_descriptor(tensor: Tensor, rows: int, columns: int) -> Any:
    """Return the TMA descriptor of (rows, columns) tiles of a matrix, in a layout that WGMMA reads.

    The matrix has stride 1 in its last dim. On "meta" the result is a `Described`.
    """
    # TMA wants a multiple of 16 bytes even where there is only one row.
    strides = (tensor.stride(0) if tensor.shape[0] > 1 else columns, 1)
    form = _form_of_matrix(tensor.dtype, rows, columns)
    return _of(tensor, tuple(tensor.shape), strides, form)


def chunk_descriptor(tensor: Tensor, chunks: int, rows: int, width: int) -> Any:
    """Return the TMA descriptor of boxes (chunks, rows, width) of a matrix.

    The matrix is read in chunks of `width` columns: a box holds `rows` rows of `chunks` chunks that
    follow one another.
    """
    form = _form_of_chunks(tensor.dtype, chunks, rows, width)
    count, columns = tensor.shape
    stride = tensor.stride(0) if count > 1 else columns
    shape = (-(-columns // width), count, width)
    return _of(tensor, shape, (width, stride, 1), form)


def row_descriptor(tensor: Tensor, count: int) -> Any:
    """Return the TMA descriptor of boxes (1, count) of a float32 tensor (planes, rows).

    A box holds the numbers of `count` neighbouring rows of one plane. The tensor is contiguous; a
    plane holds one number a query row, as the log-sum-exps of a head.
    """
    return _numbers(tensor, (1, count))


def token_descriptor(tensor: Tensor, rows: int, width: int) -> Any:
    """Return the TMA descriptor of boxes (1, rows, width) of a paged cache.

    The cache (blocks, block_size, heads, D) is read as (blocks, block_size, heads * D): a box holds
    `width` neighbouring numbers of each of `rows` tokens of one block.
    """
    blocks, tokens, heads, head = tensor.shape
    form = _form_of_chunks(tensor.dtype, 1, rows, width)
    return _of(tensor, (blocks, tokens, heads * head), (*tensor.stride()[:2], 1), form)


def _numbers(tensor: Tensor, block: tuple[int, ...]) -> Any:
    form = _form_of_numbers(tensor.dtype, *block)
    return _of(tensor, tuple(tensor.shape), tensor.stride(), form)


def form_of(found: TensorDescriptor) -> Form:
    """Return the Form of a descriptor: dtype, tile and layout, without its tensor."""
    form: Form | None = found.__dict__.get("form")
    if form is None:  # it was made elsewhere
        form = _form_of(tuple(found.block_shape), found.layout, found.base.dtype)
        found.__dict__["form"] = form
    return form


class Maps:
    """Memory for encoded descriptors, 128 bytes each, from which the copy engine reads them.

    Attributes:
        places: the address of each descriptor; valid as long as this object lives.
    """

    def __init__(self, count: int) -> None:
        self._memory = (ctypes.c_char * (_MAP_BYTES * count + _MAP_ALIGNMENT))()
        start = ctypes.addressof(self._memory)
        start += -start % _MAP_ALIGNMENT
        self.places = [start + _MAP_BYTES * index for index in range(count)]


_encoding = threading.Lock()


def encode(found: Described, place: int, address: int) -> None:
    """Write the 128 bytes of a descriptor, for its tensor at `address`, to host memory at `place`.

    Raises RuntimeError if the driver refuses the descriptor. Both numbers are addresses.
    """
    _, shape, strides, (_, kind, map_type, numbers, write) = found
    itemsize = kind[0].itemsize
    steps = [step * itemsize for step in strides[-2::-1]]
    with _encoding:
        write(*shape[::-1], *steps)
        status = driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(place), map_type, len(shape), ctypes.c_void_p(address), *numbers
        )
    if status != 0:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed with CUDA error {status} for {found}")


@functools.cache
def driver() -> Any:
    """Return the CUDA driver's library (ctypes), loaded once; OSError where there is none.

    Its functions are short, so they are called without releasing the interpreter's lock.
    """
    return ctypes.PyDLL("libcuda.so.1")
