"""Blocks of the cache in main memory, and how a step's transfers are run.

out    before anything of the step is written: copies begin when the device has done all that it was
       given before, and whatever writes to a block that is still being read waits for them
in     after that: whatever reads a block that is on its way waits for it

On a GPU both run on the one stream of `ops.swap_blocks`, in turn, beside the step if its sequences
touch none of these blocks; the step after it waits for them in any case. On a CPU they are done
when `move` returns. Of a model whose layers are of several groups each has blocks of its own here,
too. Source: Kwon et al. 2023, section 4.5.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise import ops
from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import Batch
from tilewise.ops import BlockTransfer

__all__ = ["HostCache", "HostGroup", "HostMemory"]

TRIAL_BLOCKS = 64  # moved there and back to measure the link


class HostCache:
    """Main memory for `num_blocks` blocks beside the cache of a runner.

    Args:
        storage: the cache on the device.
        num_blocks: blocks of main memory, of every group of layers, or one number for each.
        num_checkpoints: checkpoints of states in main memory; they are the group behind all others.

    Attributes:
        blocks: the blocks in main memory, pinned where the device is a GPU.
        checkpoints: the checkpoints in main memory, (num_checkpoints, bytes) uint8; None without
            any.
        group_shares: the bytes of each group's block as a share of a block of all groups.

    Raises:
        ValueError: main memory has no room.
    """

    def __init__(
        self, storage: KVStorage, num_blocks: int | tuple[int, ...], num_checkpoints: int = 0
    ) -> None:
        self.storage = storage
        is_cuda = storage.device.type == "cuda"
        self.checkpoints: Tensor | None = None
        try:
            spec = replace(storage.spec, states=()) if storage.layers else storage.spec
            self.blocks = KVStorage(spec, num_blocks, "cpu", pinned=is_cuda)
            if storage.states is not None and num_checkpoints:
                width = storage.states.checkpoints.shape[1]
                self.checkpoints = torch.empty(
                    num_checkpoints, width, dtype=torch.uint8, pin_memory=is_cuda
                )
        except (RuntimeError, MemoryError) as error:
            raise ValueError(
                f"swap_space_gib must fit main memory, got {num_blocks} blocks of "
                f"{storage.spec.bytes_per_block:,} bytes"
            ) from error
        sizes = [storage.spec.group_block_bytes(i) for i in range(len(storage.parts))]
        if self.checkpoints is not None:
            sizes.append(self.checkpoints.shape[1])
        self.group_shares = tuple(size / sum(sizes) for size in sizes)
        self._under_way: list[BlockTransfer] = []
        self._last: BlockTransfer | None = None  # they run in turn

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of blocks of each group; of checkpoints last, in a model that has some."""
        own = () if self.storage.states is None else (self._num_checkpoints,)
        return (*self.blocks.counts, *own)

    @property
    def _num_checkpoints(self) -> int:
        return 0 if self.checkpoints is None else len(self.checkpoints)

    def move(self, batch: Batch) -> None:
        """Begin the transfers of a batch, whose step is submitted next.

        The device is made to wait for transfers of the step before, and for these if the step's
        sequences touch their blocks. The host waits for them on a CPU only.
        """
        if self._under_way:
            self._let_device_wait()
        if not batch.is_moving:
            return
        is_touched = False
        for group in range(len(self.storage.parts) + (self.checkpoints is not None)):
            part = batch.of_group(group)
            if part.swap_out:
                self._under_way.append(self._out(part.swap_out, group))
            if part.swap_in:
                self._under_way.append(self._in(part.swap_in, group))
            moved = {block for block, _ in part.swap_out} | {block for _, block in part.swap_in}
            if moved and not is_touched:
                touched = {block for run in part.sequences for block in run.block_ids}
                touched.update(block for pair in part.block_copies for block in pair)
                if group == len(self.storage.parts):
                    touched = {place for place, _, _ in batch.states.restores}
                    touched.update(place for _, place, _ in batch.states.saves)
                is_touched = not moved.isdisjoint(touched)
        self._last = self._under_way[-1]
        if is_touched:
            self._let_device_wait()

    def measure(self) -> float:
        """Return how many blocks of all groups move a second, one way; no block has an owner yet.

        The first blocks, at most TRIAL_BLOCKS, are moved out and back, so their contents stay.
        """
        count = min(TRIAL_BLOCKS, *self.storage.counts, *self.blocks.counts)
        pairs = tuple((i, i) for i in range(count))
        groups = range(len(self.storage.parts))
        seconds = float("inf")
        for _ in range(3):  # the first one touches the memory
            started = time.perf_counter()
            for move in (self._out, self._in):
                for transfer in [move(pairs, group) for group in groups]:
                    transfer.synchronize()
            seconds = min(seconds, time.perf_counter() - started)
        return 2 * count / max(seconds, 1e-9)

    def read(self, slot: int, group: int = 0) -> list[NDArray[np.uint8]]:
        """Return a copy of a group's block at `slot` as bytes, one array for each of the cache's
        tensors.

        It waits for all transfers.
        """
        self._wait()
        return [part.clone().numpy().reshape(-1) for part in self._parts(slot, group)]

    def write(self, slot: int, arrays: list[NDArray[np.uint8]], group: int = 0) -> None:
        """Fill a group's block at `slot` of main memory with the arrays that `read` returned."""
        self._wait()
        for part, array in zip(self._parts(slot, group), arrays, strict=True):
            part.copy_(torch.from_numpy(array.copy()).view(part.shape))

    def sizes(self, group: int = 0) -> list[int]:
        """Return the number of bytes of each array that `read` returns for a group."""
        return [part.numel() for part in self._parts(0, group)]

    def _parts(self, slot: int, group: int) -> list[Tensor]:
        """Return views of the bytes of a group's block at `slot`, (layers, bytes) for each
        tensor."""
        if group == len(self.storage.parts):
            assert self.checkpoints is not None
            return [self.checkpoints[slot]]
        blocks = self.blocks.parts[group]
        layers = len(blocks.spec.groups[0].layers)
        if not layers:
            return []
        return [
            whole.view(torch.uint8).view(layers, blocks.num_blocks, -1)[:, slot]
            for whole in blocks.whole
        ]

    def _out(self, pairs: tuple[tuple[int, int], ...], group: int) -> BlockTransfer:
        if group == len(self.storage.parts):
            return self._swap_states(pairs, to_host=True)
        return _swap(self.storage.parts[group], self.blocks.parts[group], pairs)

    def _in(self, pairs: tuple[tuple[int, int], ...], group: int) -> BlockTransfer:
        if group == len(self.storage.parts):
            return self._swap_states(pairs, to_host=False)
        return _swap(self.blocks.parts[group], self.storage.parts[group], pairs)

    def _swap_states(self, pairs: tuple[tuple[int, int], ...], *, to_host: bool) -> BlockTransfer:
        assert self.storage.states is not None
        assert self.checkpoints is not None
        sides = self.storage.states.checkpoints, self.checkpoints
        source, target = sides if to_host else sides[::-1]
        return ops.swap_blocks(source, target, torch.tensor(pairs, dtype=torch.int64))

    def _wait(self) -> None:
        """Let the host wait for all transfers: a step may have finished before its own had."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None

    def _let_device_wait(self) -> None:
        """Make the device wait for all transfers before its next work; the host does not wait."""
        for transfer in self._under_way:
            if transfer.event is not None:  # not `wait`: the host need not
                torch.cuda.current_stream(self.storage.device).wait_event(transfer.event)
        self._under_way.clear()


class HostMemory(Protocol):
    """The main memory from which block files are written, and into which they are read.

    It is a `HostCache`, or a `RemoteHost` for that of all worker processes.
    """

    @property
    def storage(self) -> Any:
        """The cache on the device; its spec is read."""
        ...

    @property
    def group_shares(self) -> Sequence[float]:
        """The bytes of each group's block as a share of a block of all groups."""
        ...

    def read(self, slot: int, group: int = 0) -> list[NDArray[np.uint8]]:
        """Return a copy of a group's block at `slot` as bytes, one array for each of the cache's
        tensors."""
        ...

    def write(self, slot: int, arrays: list[NDArray[np.uint8]], group: int = 0) -> None:
        """Fill a group's block at `slot` of main memory with the arrays that `read` returned."""
        ...

    def sizes(self, group: int = 0) -> list[int]:
        """Return the number of bytes of each array that `read` returns for a group."""
        ...


class HostGroup:
    """The blocks of one group of layers in main memory, for the block files of that group.

    Args:
        host: the memory of all groups.
        group: the number of the group.
    """

    def __init__(self, host: HostMemory, group: int) -> None:
        self.host, self.group = host, group

    def read(self, slot: int) -> list[NDArray[np.uint8]]:
        """Return a copy of the group's block at `slot` as bytes, one array for each of the cache's
        tensors."""
        return self.host.read(slot, self.group)

    def write(self, slot: int, arrays: list[NDArray[np.uint8]]) -> None:
        """Fill the group's block at `slot` of main memory with the arrays that `read` returned."""
        self.host.write(slot, arrays, self.group)

    def sizes(self) -> list[int]:
        """Return the number of bytes of each array that `read` returns."""
        return self.host.sizes(self.group)


def _swap(
    source: KVStorage, target: KVStorage, pairs: tuple[tuple[int, int], ...]
) -> BlockTransfer:
    rows = source.in_all_layers(torch.tensor(pairs, dtype=torch.int64), target)
    return ops.swap_blocks(source.whole, target.whole, rows)
