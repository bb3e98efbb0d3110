"""Blocks of the cache in main memory, and how a step's transfers are run.

out    before anything of the step is written: copies begin when the device has done all that it was
       given before, and whatever writes to a block that is still being read waits for them
in     after that: whatever reads a block that is on its way waits for it

On a GPU both run on the one stream of `ops.swap_blocks`, in turn, beside the step if its sequences
touch none of these blocks; the step after it waits for them in any case. On a CPU they are done
when `move` returns. Source: Kwon et al. 2023, section 4.5.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise import ops
from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import Batch
from tilewise.ops import BlockTransfer

__all__ = ["HostCache"]

TRIAL_BLOCKS = 64  # moved there and back to measure the link


class HostCache:
    """Main memory for `num_blocks` blocks beside the cache of a runner.

    Args:
        storage: the cache on the device.
        num_blocks: blocks of main memory.

    Attributes:
        blocks: the memory, pinned where the device is a GPU.

    Raises:
        ValueError: main memory has no room.
    """

    def __init__(self, storage: KVStorage, num_blocks: int) -> None:
        self.storage = storage
        is_cuda = storage.whole[0].is_cuda
        try:
            self.blocks = KVStorage(storage.spec, num_blocks, "cpu", pinned=is_cuda)
        except (RuntimeError, MemoryError) as error:
            raise ValueError(
                f"swap_space_gib must fit main memory, got {num_blocks:,} blocks of "
                f"{storage.spec.bytes_per_block:,} bytes"
            ) from error
        self._under_way: list[BlockTransfer] = []
        self._last: BlockTransfer | None = None  # they run in turn

    def move(self, batch: Batch) -> None:
        """Begin the transfers of a step, which is submitted next."""
        if self._under_way:
            self._let_device_wait()
        if not (batch.swap_out or batch.swap_in):
            return
        if batch.swap_out:
            self._under_way.append(self._out(batch.swap_out))
        if batch.swap_in:
            self._under_way.append(self._in(batch.swap_in))
        self._last = self._under_way[-1]
        moved = {block for block, _ in batch.swap_out} | {block for _, block in batch.swap_in}
        touched = {block for run in batch.sequences for block in run.block_ids}
        touched.update(block for pair in batch.block_copies for block in pair)
        if not moved.isdisjoint(touched):
            self._let_device_wait()

    def measure(self) -> float:
        """Return how many blocks move a second, one way; nobody owns a block yet.

        The first of some blocks are moved out and back, so nothing changes.
        """
        count = min(TRIAL_BLOCKS, self.storage.num_blocks, self.blocks.num_blocks)
        pairs = tuple((i, i) for i in range(count))
        seconds = float("inf")
        for _ in range(3):  # the first one touches the memory
            started = time.perf_counter()
            for transfer in (self._out(pairs), self._in(pairs)):
                transfer.synchronize()
            seconds = min(seconds, time.perf_counter() - started)
        return 2 * count / max(seconds, 1e-9)

    def read(self, slot: int) -> list[NDArray[np.uint8]]:
        """Return a copy of a block's bytes, one array for each of the cache's tensors."""
        self._wait()
        return [part.clone().numpy().reshape(-1) for part in self._parts(slot)]

    def write(self, slot: int, arrays: list[NDArray[np.uint8]]) -> None:
        """Fill a block with what `read` has given."""
        self._wait()
        for part, array in zip(self._parts(slot), arrays, strict=True):
            part.copy_(torch.from_numpy(array.copy()).view(part.shape))

    def sizes(self) -> list[int]:
        """Bytes of each array of `read`."""
        return [part.numel() for part in self._parts(0)]

    def _parts(self, slot: int) -> list[Tensor]:
        """Views of a block's bytes, (layers, bytes)."""
        layers = self.storage.spec.num_layers
        return [
            whole.view(torch.uint8).view(layers, self.blocks.num_blocks, -1)[:, slot]
            for whole in self.blocks.whole
        ]

    def _out(self, pairs: tuple[tuple[int, int], ...]) -> BlockTransfer:
        rows = self.storage.in_all_layers(torch.tensor(pairs, dtype=torch.int64), self.blocks)
        return ops.swap_blocks(self.storage.whole, self.blocks.whole, rows)

    def _in(self, pairs: tuple[tuple[int, int], ...]) -> BlockTransfer:
        rows = self.blocks.in_all_layers(torch.tensor(pairs, dtype=torch.int64), self.storage)
        return ops.swap_blocks(self.blocks.whole, self.storage.whole, rows)

    def _wait(self) -> None:
        """Let the host wait for all transfers: a step may have finished before its own had."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None

    def _let_device_wait(self) -> None:
        """Order what the device is given from now on after all transfers."""
        for transfer in self._under_way:
            if transfer.event is not None:  # not `wait`: the host need not
                torch.cuda.current_stream(self.storage.whole[0].device).wait_event(transfer.event)
        self._under_way.clear()
