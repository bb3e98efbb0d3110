"""The same launch once more: everything is remembered but the addresses.

What `launch.launch` works out anew, types, kinds, descriptors and numbers, follows from a call's
spec and strides. Who knows that those are the same gives addresses only, and a launch costs little
more than the driver's own time.
"""

from __future__ import annotations

import ctypes
import operator
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.kernels.gluon.host.descriptors import Encoder, Maps, parameters_of
from tilewise.kernels.gluon.host.launch import Grid, Prepared

__all__ = ["Repeat"]

_MAX_MET = 256
Slots = Callable[[Sequence[int]], tuple[int, ...]]


class Repeat:
    """A launch of `prepared` with these arguments, of which tensors and descriptors may move.

    Args:
        leaves: the arguments one by one, of tensors the addresses; `tensors` says where these are.
        slot_of: tells of an address which one it is among those that `start` is given.
    """

    def __init__(
        self,
        prepared: Prepared,
        grid: Grid,
        leaves: list[Any],
        tensors: list[int],
        slot_of: Callable[[int], int],
    ) -> None:
        self._prepared = prepared
        self._lock = threading.Lock()
        self._config = prepared.new_config()
        self._config.cut(grid)
        self._numbers = prepared.new_memory(leaves)
        moving = [index for index, place in enumerate(prepared.numbers) if place in tensors]
        self._addresses = (ctypes.c_uint64 * len(moving))()
        self._pack = struct.Struct(f"={len(moving)}Q").pack_into
        self._tensors = _picker([slot_of(leaves[prepared.numbers[index]]) for index in moving])
        found = [leaf for leaf in leaves if isinstance(leaf, TensorDescriptor)]
        self._encoders = [Encoder(each) for each in found]
        self._maps = _picker([slot_of(each.base.data_ptr()) for each in found])
        self._kept = found  # their sizes and strides are what the kernel reads
        self._met: dict[tuple[int, ...], tuple[Any, Maps]] = {}
        self._pointers = prepared.new_pointers()
        for place, each in zip(prepared.places, found, strict=True):
            self._pointers[place] = parameters_of(each)
        start = ctypes.addressof(self._numbers)
        for index, (position, offset) in enumerate(prepared.positions):
            self._pointers[position] = start + offset
            if index in moving:
                at = ctypes.addressof(self._addresses) + 8 * moving.index(index)
                self._pointers[position] = at

    def start(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on `stream`; addresses: of all tensors that `slot_of` knew, aligned alike."""
        places = self._maps(addresses)
        with self._lock:
            met = self._met.get(places)
            if met is None:
                met = self._meet(places)
            self._pack(self._addresses, 0, *self._tensors(addresses))
            self._config.submit(stream, met[0])

    def _meet(self, places: tuple[int, ...]) -> tuple[Any, Maps]:
        """Return the pointers to the parameters where descriptors are those of `places`."""
        if len(self._met) >= _MAX_MET:
            self._met.clear()
        maps = Maps(len(self._encoders))
        pointers = type(self._pointers).from_buffer_copy(self._pointers)
        for index, encoder in enumerate(self._encoders):
            encoder.write(maps.places[index], places[index])
            pointers[self._prepared.places[index].start] = maps.places[index]
        met = self._met[places] = pointers, maps
        return met


def _picker(slots: list[int]) -> Slots:
    """Return what picks the addresses of these slots."""
    if not slots:
        return lambda addresses: ()
    if len(slots) == 1:
        return lambda addresses: (addresses[slots[0]],)
    picker: Slots = operator.itemgetter(*slots)
    return picker
