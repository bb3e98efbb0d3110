"""Shared memory: allocations full of NaN, views of them, and every access on record."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.experimental.gluon import language as gl

from tools.gluon_emulator import numbers
from tools.gluon_emulator.barriers import Barriers
from tools.gluon_emulator.clocks import History
from tools.gluon_emulator.errors import OutOfBounds, Protocol
from tools.gluon_emulator.machine import current, machine, note
from tools.gluon_emulator.registers import Layout, register, values_of

POISON = 0x5555  # what integers hold before they are written
_WARPS_APART = 0.25  # how often the warps of a partition access memory one after the other


class BarrierLayout(Layout):
    """The layout of mbarriers, which tells that an allocation is made of them."""


def poison(dtype: gl.dtype) -> Any:
    """Return what memory holds that nobody has written."""
    if numbers.is_float(dtype):
        return np.nan
    return POISON if numbers.itemsize(dtype) > 1 else POISON & 0x7F


class SharedMemory:
    """A view of an allocation."""

    def __init__(self, memory: np.ndarray, dtype: gl.dtype, history: History) -> None:
        self.memory, self.dtype, self.history = memory, dtype, history

    @property
    def shape(self) -> list[int]:
        return list(self.memory.shape)

    @property
    def layout(self) -> Layout:
        return Layout()

    @property
    def type(self) -> Any:
        return SimpleNamespace(
            shape=self.shape, layout=Layout(), element_ty=self.dtype, scalar=self.dtype
        )

    @property
    def rank(self) -> int:
        return self.memory.ndim

    def _view(self, memory: np.ndarray) -> SharedMemory:
        return SharedMemory(memory, self.dtype, self.history)

    def index(self, index: Any) -> SharedMemory:
        if not 0 <= int(index) < self.memory.shape[0]:
            raise OutOfBounds(f"{self.history.name}[{int(index)}] of {self.memory.shape[0]}")
        return self._view(self.memory[int(index)])

    def slice(self, start: int, length: int, dim: int = 0) -> SharedMemory:
        if not 0 <= start <= start + length <= self.memory.shape[dim]:
            raise OutOfBounds(f"{self.history.name}: {length} from {start} of {self.shape}")
        return self._view(self.memory[(slice(None),) * dim + (slice(start, start + length),)])

    def permute(self, order: Any) -> SharedMemory:
        return self._view(self.memory.transpose([int(axis) for axis in order]))

    def reshape(self, shape: Any) -> SharedMemory:
        memory = self.memory.reshape([int(size) for size in shape])
        assert np.shares_memory(memory, self.memory), "reshape would copy"
        return self._view(memory)

    def load(self, layout: Any = None) -> Any:
        note("load", self.history, self.memory, _is_idempotent())
        machine().step()
        self.history.add(
            current(), self.memory, writes=False, what="loads from", settles=_is_idempotent()
        )
        values = np.empty_like(self.memory)
        for rows in _rows_of_warps(self.memory):
            values[rows] = self.memory[rows]
        return register(values, self.dtype)

    def store(self, value: Any) -> None:
        note("store", self.history, self.memory, _is_idempotent())
        machine().step()
        if list(value.shape) != self.shape or value.dtype != self.dtype:
            raise Protocol(
                f"{value.dtype}{value.shape} stored to {self.history.name}, which is "
                f"{self.dtype}{self.shape}"
            )
        self.history.add(
            current(), self.memory, writes=True, what="stores to", settles=_is_idempotent()
        )
        values = values_of(value)
        for rows in _rows_of_warps(self.memory):
            self.memory[rows] = values[rows]


def _rows_of_warps(memory: np.ndarray) -> Iterator[Any]:
    """Yield the rows of one warp after the other; sometimes others do something in between."""
    warps, rows = current().num_warps, memory.shape[0]
    if warps == 1 or rows % warps or machine().random.random() > _WARPS_APART:
        yield ...
        return
    for first in range(0, rows, rows // warps):
        yield slice(first, first + rows // warps)
        machine().step()


def _is_idempotent() -> bool:
    """Whether the kernel's function that loads or stores is declared idempotent."""
    return sys._getframe(2).f_code.co_name in machine().idempotent


def _name_of_caller() -> str:
    """Return which variable the kernel's line assigns, for messages."""
    frame = sys._getframe(2)
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    found = re.match(r"\s*(\w+)(?:\s*:[^=]*)?\s*=[^=]", line)
    return found[1] if found else f"the allocation of line {frame.f_lineno}"


def allocate_shared_memory(
    element_ty: gl.dtype, shape: Any, layout: Any = None, value: Any = None
) -> Any:
    """Allocate memory that nobody has written, or that holds `value`."""
    name, shape = _name_of_caller(), [int(size) for size in shape]
    if isinstance(layout, BarrierLayout) and element_ty == gl.int64:
        return Barriers(name, int(np.prod(shape)))
    history = History(name)
    current().cta.histories.append(history)
    memory = np.full(shape, poison(element_ty), numbers.working(element_ty))
    allocated = SharedMemory(memory, element_ty, history)
    if value is not None:
        allocated.store(value)
    return allocated


def reinterpret(memory: SharedMemory, dtype: gl.dtype, shape: Any, layout: Any = None) -> Any:
    """Return the same memory in another shape; lines keep their length, or the line is all.

    Where a value lies is not emulated: lines of another length would be swizzled differently.
    """
    shape = [int(size) for size in shape]
    if dtype != memory.dtype:
        raise Protocol(f"{memory.history.name} is of {memory.dtype}, not {dtype}")
    if len(shape) > 2 and shape[-1] != memory.shape[-1]:
        raise Protocol(f"lines of {memory.history.name} hold {memory.shape[-1]}, not {shape[-1]}")
    return memory.reshape(shape)


def fence_async_shared(cluster: bool = False) -> None:
    """Show ordinary writes to copies and products."""
    note("fence")
    machine().step()
    for history in current().cta.histories:
        history.fence(current())
