"""The same launch once more: everything is remembered but the addresses.

What `_launch.launch` works out anew, types, kinds, descriptors and numbers, follows from a call's
spec and strides. Who knows that those are the same gives addresses only, and a launch costs little
more than the driver's own time.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.kernels.gluon._descriptors import parameters_of
from tilewise.kernels.gluon._launch import Prepared

__all__ = ["Repeat", "map_address", "observed"]


def observed() -> bool:
    """Whether a profiler wants to see launches, which only Triton's launcher shows it."""
    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


class Repeat:
    """A launch of `prepared` with these arguments, of which tensors and descriptors may move.

    Attributes:
        device: the index of the device that it runs on.
    """

    def __init__(self, prepared: Prepared, grid: int, arguments: Sequence[Any]) -> None:
        leaves: list[Any] = []
        for argument in arguments:
            leaves += argument if isinstance(argument, tuple) else (argument,)
        self.device = prepared.device
        self._prepared, self._grid = prepared, grid
        self._lock = threading.Lock()
        self._pointers = prepared.new_pointers()
        self._maps = [place.start for place in prepared.places]
        descriptors = [leaf for leaf in leaves if isinstance(leaf, TensorDescriptor)]
        for place, found in zip(prepared.places, descriptors, strict=True):
            self._pointers[place] = parameters_of(found)
        self._descriptors = descriptors  # their sizes and strides are what the kernel reads
        numbers = [x for x in leaves if isinstance(x, int | float | Tensor)]
        values = [x.data_ptr() if isinstance(x, Tensor) else x for x in numbers]
        self._numbers = prepared.new_numbers(values)
        tensors = [place for place, x in enumerate(numbers) if isinstance(x, Tensor)]
        self._addresses = (ctypes.c_uint64 * len(tensors))()
        self._pack = struct.Struct(f"={len(tensors)}Q").pack_into
        start = ctypes.addressof(self._numbers)
        for number, (position, offset) in enumerate(prepared.positions):
            self._pointers[position] = start + offset
            if number in tensors:
                at = ctypes.addressof(self._addresses) + 8 * tensors.index(number)
                self._pointers[position] = at

    def start(self, addresses: Sequence[int], maps: Sequence[int]) -> None:
        """Launch on the current stream.

        Args:
            addresses: of the tensors, in the order of the arguments, aligned as they were.
            maps: addresses of the descriptors' 128 bytes, likewise.
        """
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        with self._lock:
            self._pack(self._addresses, 0, *addresses)
            for place, address in zip(self._maps, maps, strict=True):
                self._pointers[place] = address
            self._prepared.submit(self._grid, stream, self._pointers)


def map_address(found: TensorDescriptor) -> int:
    """Return where the 128 bytes of a descriptor lie, for as long as it lives."""
    return parameters_of(found)[0]
