"""Memory that tells whether a kernel went outside of its tensors.

`banded` puts a tensor between two bands, which must keep their bytes, and whose numbers are NaN, so
that one that is read shows in what is computed. `watched` looks at each address itself, where
Triton's interpreter runs a kernel: it must lie in an argument of the launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

BAND = 4096  # bytes on each side of a tensor


class Banded:
    """Tensors between bands.

    Attributes:
        kept: the memory of each, in bytes, and where its own begin and end.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, int, int, Tensor]] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to between two bands of bytes that no float reads as a number."""
        size = tensor.numel() * tensor.element_size()
        memory = torch.full((size + 2 * BAND,), 0xFF, dtype=torch.uint8, device=tensor.device)
        own = memory[BAND : BAND + size].view(tensor.dtype).view(tensor.shape)
        own.copy_(tensor)
        self.kept.append((memory, BAND, BAND + size, tensor))
        return own

    def check(self) -> None:
        """Assert that no band has changed."""
        for memory, begin, end, tensor in self.kept:
            bands = torch.cat([memory[:begin], memory[end:]])
            assert bool((bands == 0xFF).all()), f"a band of {tuple(tensor.shape)} was written to"


def _extents(value: Any) -> Iterator[tuple[int, int]]:
    if isinstance(value, tuple):
        for field in value:
            yield from _extents(field)
    elif isinstance(value, Tensor) and value.numel() > 0:
        steps = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        yield value.data_ptr(), value.data_ptr() + (steps + 1) * value.element_size()


class _Watch:
    """Stands for the interpreter's memory, and knows what a launch was given."""

    def __init__(self, memory: Any) -> None:
        self._memory, self._starts, self._ends = memory, np.empty(0), np.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def given(self, arguments: Any) -> None:
        """Take note of the tensors of a launch, joined where they overlap."""
        joined: list[list[int]] = []
        for start, end in sorted(_extents(tuple(arguments))):
            if joined and start <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([start, end])
        self._starts, self._ends = (np.array([x[i] for x in joined], np.uint64) for i in (0, 1))

    def _look(self, what: str, addresses: Any, mask: Any, size: int) -> None:
        mask = np.broadcast_to(np.asarray(mask, bool), np.shape(addresses))
        at = np.asarray(addresses, np.uint64)[mask]
        if at.size == 0:
            return
        place = np.searchsorted(self._starts, at, side="right").astype(np.int64) - 1
        inside = (place >= 0) & (at + np.uint64(size) <= self._ends[np.maximum(place, 0)])
        assert inside.all(), f"{what} outside of all tensors, at {int(at[~inside][0]):#x}"

    def load(self, ptrs: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._look("a kernel reads", ptrs, mask, np.dtype(dtype).itemsize)
        return self._memory.load(ptrs, mask, other, dtype)

    def store(self, ptrs: Any, value: Any, mask: Any) -> Any:
        self._look("a kernel writes", ptrs, mask, np.asarray(value).dtype.itemsize)
        return self._memory.store(ptrs, value, mask)

    def atomic_rmw(self, operation: Any, ptrs: Any, value: Any, mask: Any, sem: Any) -> Any:
        self._look("a kernel adds", ptrs, mask, np.asarray(value).dtype.itemsize)
        return self._memory.atomic_rmw(operation, ptrs, value, mask, sem)


@contextlib.contextmanager
def watched(monkeypatch: Any) -> Iterator[None]:
    """Raise where an interpreted kernel uses an address outside of its launch's tensors."""
    watch, call = _Watch(interpreter._interpreter), interpreter.GridExecutor._init_args_hst

    def init(self: Any, args: Any, kwargs: Any) -> Any:
        found = call(self, args, kwargs)
        watch.given([*found[0], *found[1].values()])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(interpreter, "_interpreter", watch)
        patch.setattr(interpreter.GridExecutor, "_init_args_hst", init)
        yield
