"""Main memory that lies in the workers, as the parent knows it: how much, and bytes for files.

a worker's HostCache -> its window -> the parent: BlockFiles, and the other way round. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.cache.spec import CacheSpec
from tilewise.engine.tensor_parallel.processes import Workers

__all__ = ["RemoteHost", "Window"]

Arrays = list[NDArray[np.uint8]]


class Window:
    """A file that a worker and its parent both map: through it pass the bytes of one block.

    Args:
        path: the path of the file, which a worker makes by `make`.
    """

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, np.uint8, "r+")

    @classmethod
    def make(cls, path: Path, num_bytes: int) -> Window:
        """Make the file with all of its `num_bytes` allocated, and return its window.

        Allocation comes first, as a write to a mapped file on a full disk would end the process.

        Raises:
            OSError: the disk has no room, or the file exists.
        """
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        return cls(path)

    def put(self, arrays: Arrays) -> None:
        """Write arrays of bytes into the window one after another, from its beginning."""
        for array, end in zip(arrays, accumulate(map(len, arrays)), strict=True):
            self._bytes[end - len(array) : end] = array

    def get(self, sizes: Sequence[int]) -> Arrays:
        """Return copies of the arrays in the window, of `sizes` bytes each."""
        ends = accumulate(sizes)
        return [
            np.array(self._bytes[end - size : end]) for size, end in zip(sizes, ends, strict=True)
        ]


class RemoteHost:
    """Main memory for blocks, in the processes of the workers.

    Args:
        workers: the workers, which are ready.
        num_blocks: the number of blocks of each worker, and of every group of layers.
        link_blocks: the blocks that the slowest worker moved a second, as measured at its start.
        storage: the description of the cache of all workers.
        sizes: bytes of each array of a worker's block, by group; None where no files are written.

    Attributes:
        group_shares: the bytes of each group's block as a share of a block of all groups.
    """

    def __init__(
        self,
        workers: Workers,
        num_blocks: int,
        link_blocks: float,
        storage: Any,
        sizes: Sequence[Sequence[int]] | None,
    ) -> None:
        self.num_blocks, self._link_blocks, self.storage = num_blocks, link_blocks, storage
        spec: CacheSpec = storage.spec
        self.group_shares = spec.group_shares
        self._workers, self._sizes = workers, sizes
        self._windows = [] if sizes is None else list(map(Window, workers.windows))

    def measure(self) -> float:
        """Return how many blocks the slowest worker moved a second when it started."""
        return self._link_blocks

    def read(self, slot: int, group: int = 0) -> Arrays:
        """Return a copy of the block of main memory at `slot` as bytes: each worker's arrays, by
        rank.

        Raises:
            WorkerLostError: a worker is lost.
        """
        self._workers.call("read", slot, group)
        sizes = self._sizes_of(group)
        return [array for window in self._windows for array in window.get(sizes)]

    def write(self, slot: int, arrays: Arrays, group: int = 0) -> None:
        """Fill the block of main memory at `slot`, on all ranks, with the arrays that `read`
        returned.

        Raises:
            WorkerLostError: a worker is lost.
        """
        count = len(self._sizes_of(group))
        for rank, window in enumerate(self._windows):
            window.put(arrays[rank * count : (rank + 1) * count])
        self._workers.call("write", slot, group)

    def sizes(self, group: int = 0) -> list[int]:
        """Return the number of bytes of each array that `read` returns for a group, in its
        order."""
        return [size for _ in self._windows for size in self._sizes_of(group)]

    def _sizes_of(self, group: int) -> Sequence[int]:
        assert self._sizes is not None
        return self._sizes[group]
