"""TMA descriptors of tensors: which tensors have one, and those of recent calls, remembered.

A descriptor holds an address, a shape and strides, and building one takes microseconds of host
time. Every tensor is seen as (batch, head, row, channel); a packed one is a batch of one.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
}
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
        while len(_recent) >= _REMEMBERED:
            _recent.popitem(last=False)
        _recent[key] = found
    return found
