"""Global memory as a kernel sees it: pointers and descriptors of tensors, and their bounds."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from triton.experimental.gluon import language as gl

from tools.gluon_emulator import numbers
from tools.gluon_emulator.errors import OutOfBounds
from tools.gluon_emulator.registers import Scalar, register, values_of

# Of each address that the host has asked for: where its memory ends, and whether it still lives.
Known = dict[int, tuple[int, StorageWeakRef]]


def _numpy_at(address: int, count: int, dtype: gl.dtype) -> np.ndarray:
    """Return `count` elements at an address, without a copy."""
    kind = numbers.stored(dtype)
    memory = (ctypes.c_uint8 * (count * numbers.itemsize_of(kind))).from_address(address)
    return np.frombuffer(memory, kind)


class Memory:
    """The elements of one tensor, from its first to its last, gaps included."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor  # keeps the memory alive
        self.dtype = numbers.of_torch(tensor.dtype)
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        count = 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0
        self.elements = (
            _numpy_at(tensor.data_ptr(), count, self.dtype) if count else np.empty(0, np.uint8)
        )


class Pointer:
    """One address of a tensor, or a tensor of them."""

    def __init__(self, memory: Memory, offset: Any = 0) -> None:
        self._memory, self._offset = memory, np.asarray(offset, np.int64)

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self._memory.dtype, scalar=self._memory.dtype)

    @property
    def type(self) -> Any:
        return self.dtype

    @property
    def shape(self) -> list[int]:
        return list(self._offset.shape)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self._memory, self._offset + values_of(other).astype(np.int64))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return Pointer(self._memory, self._offset - values_of(other).astype(np.int64))

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self._memory, self._offset[index])

    def expand_dims(self, axis: int) -> Pointer:
        return Pointer(self._memory, np.expand_dims(self._offset, axis))

    def places(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the element numbers and which of them are wanted; raise OutOfBounds."""
        wanted = np.asarray(True) if mask is None else values_of(mask)
        places, wanted = np.broadcast_arrays(self._offset, wanted)
        outside = wanted & ((places < 0) | (places >= self._memory.elements.size))
        if outside.any():
            tensor = self._memory.tensor
            raise OutOfBounds(
                f"element {int(places[outside].flat[0])} of a tensor of shape "
                f"{tuple(tensor.shape)}, strides {tensor.stride()}"
            )
        return places, wanted

    def read(self, mask: Any, other: Any) -> Any:
        """Return the wanted elements, `other` elsewhere (NaN, or an odd number, if not given)."""
        places, wanted = self.places(mask)
        dtype = self._memory.dtype
        missing = (np.nan if numbers.is_float(dtype) else 7) if other is None else values_of(other)
        result = np.broadcast_to(np.asarray(missing, numbers.working(dtype)), places.shape).copy()
        result[wanted] = numbers.from_memory(self._memory.elements[places[wanted]], dtype)
        return register(result, dtype)

    def write(self, value: Any, mask: Any) -> None:
        """Store the wanted elements."""
        places, wanted = self.places(mask)
        dtype = self._memory.dtype
        values = np.broadcast_to(values_of(value, dtype), places.shape)
        self._memory.elements[places[wanted]] = numbers.to_memory(values[wanted], dtype)

    def addresses(self, mask: Any) -> list[int]:
        """Return the addresses of the wanted elements."""
        places, wanted = self.places(mask)
        first, step = self._memory.elements.ctypes.data, self._memory.elements.itemsize
        return [first + step * int(place) for place in np.atleast_1d(places[wanted])]

    def update(self, function: Any, value: Any, mask: Any) -> Any:
        """Replace each wanted element by function(old, value) in turn; return the old ones."""
        places, wanted = self.places(mask)
        dtype, elements = self._memory.dtype, self._memory.elements
        values = np.broadcast_to(values_of(value, dtype), places.shape)
        old = np.zeros(places.shape, numbers.working(dtype))
        for at in zip(*np.nonzero(np.atleast_1d(wanted)), strict=True):
            at = at if places.ndim else ()
            old[at] = numbers.from_memory(elements[places[at]], dtype)
            elements[places[at]] = numbers.to_memory(function(old[at], values[at]), dtype)
        return register(old, dtype)


class Descriptor:
    """A TMA descriptor: boxes of a tensor; what lies outside reads as zero and is not written."""

    def __init__(self, host: Any, known: Known) -> None:
        base = host.base
        self.dtype = numbers.of_torch(base.dtype)
        self.shape = [Scalar(size) for size in host.shape]
        self.strides = [Scalar(step, gl.int64) for step in host.strides]
        self.layout = host.layout
        block = [int(size) for size in host.block_shape]
        nbytes = int(np.prod(block)) * numbers.itemsize(self.dtype)
        self.block_type = SimpleNamespace(
            nbytes=nbytes, shape=block, element_ty=self.dtype, scalar=self.dtype
        )
        self.block_shape, self.nbytes_per_cta = block, nbytes
        steps = list(zip(host.shape, host.strides, strict=True))
        count = 1 + sum((size - 1) * step for size, step in steps)
        address, itemsize = base.data_ptr(), numbers.itemsize(self.dtype)
        if address not in known or known[address][1].expired():
            raise OutOfBounds(f"the memory of a descriptor of {host.shape} has been freed")
        if address + count * itemsize > known[address][0]:
            raise OutOfBounds(f"a descriptor of {host.shape} reaches past the end of its memory")
        flat = _numpy_at(address, count, self.dtype)
        self._tensor = np.lib.stride_tricks.as_strided(
            flat, host.shape, [step * itemsize for step in host.strides]
        )

    @property
    def address(self) -> int:
        """Where the tensor starts."""
        return self._tensor.ctypes.data

    def box(self, place: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return which part of the tensor a box covers, and where that lies in the box."""
        there, here = [], []
        for first, size, limit in zip(place, self.block_shape, self._tensor.shape, strict=True):
            begin, end = min(max(first, 0), limit), max(min(first + size, limit), 0)
            there.append(slice(begin, max(begin, end)))
            here.append(slice(begin - first, max(begin, end) - first))
        return tuple(there), tuple(here)

    def read(self, place: list[int]) -> np.ndarray:
        """Return the values of a box."""
        there, here = self.box(place)
        box = np.zeros(self.block_shape, numbers.working(self.dtype))
        if all(part.stop > part.start for part in there):
            box[here] = numbers.from_memory(self._tensor[there], self.dtype)
        return box

    def write(self, place: list[int], values: np.ndarray, add: bool = False) -> None:
        """Store a box, or add it to what is there."""
        there, here = self.box(place)
        if all(part.stop > part.start for part in there):
            if add:
                old = numbers.from_memory(self._tensor[there], self.dtype)
                new = numbers.rounded(old + values[here], self.dtype)
            else:
                new = values[here]
            self._tensor[there] = numbers.to_memory(new, self.dtype)
