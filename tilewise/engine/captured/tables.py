"""The block tables of further groups of layers on the device, beside the rows of `DeviceBatch`.

A row has a table in every group. What a batch changes of it is told like that of the first group:
blocks at (row, column), which travel with the rows' own changes, and `fresh`, a block a row that
the next token of a decoding sequence begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise.engine.batch import Batch

__all__ = ["GroupRows"]


class GroupRows:
    """The block tables of one group of layers beyond the first, on the device and on the host.

    A `DeviceBatch` has one for each such group.

    Args:
        group: the number of the group.
        max_num_seqs, max_blocks, block_size, device: as those of `DeviceBatch`.
        buffers: pinned buffers that are written in turn.

    Attributes:
        table: (max_num_seqs, max_blocks) int32.
        fresh: (max_num_seqs,) int32, a block that begins with the next token, or -1.
        host_table: the same table on the host.
    """

    def __init__(
        self,
        group: int,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        buffers: int,
    ) -> None:
        self.group, self.block_size = group, block_size
        self.table = torch.zeros((max_num_seqs, max_blocks), dtype=torch.int32, device=device)
        self.fresh = torch.full((max_num_seqs,), -1, dtype=torch.int32, device=device)
        self.host_table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._num_blocks = [0] * max_num_seqs
        self._fresh: list[tuple[int, int]] = []
        self._blocks: list[tuple[int, int, Sequence[int]]] = []
        self._moves: list[tuple[int, int]] = []
        self._buffers = [
            torch.full((max_num_seqs,), -1, dtype=torch.int32, pin_memory=device.type == "cuda")
            for _ in range(buffers)
        ]
        self._turn = 0

    def reset(self) -> None:
        """Forget the blocks of all rows; each sequence's table is sent whole when it next runs."""
        self._num_blocks = [0] * len(self._num_blocks)
        self.fresh.fill_(-1)

    def take(
        self, batch: Batch, rows: Sequence[int], moves: list[tuple[int, int]], *, decodes: bool
    ) -> None:
        """Bring the host's tables up to date by a batch, and note the changes that `parts` will
        send.

        Args:
            batch: the batch of the next step.
            rows: the row of each sequence of the batch, from `DeviceBatch.take`.
            moves: pairs (source, target) of rows that were moved, likewise.
            decodes: True for a decode step; a block that begins with the new token goes to `fresh`
                then.
        """
        self._moves, self._fresh, self._blocks = moves, [], []
        for source, target in moves:
            self._num_blocks[target] = self._num_blocks[source]
            self.host_table[target] = self.host_table[source]
        for row, run in zip(rows, batch.of_group(self.group).sequences, strict=True):
            blocks = run.block_ids
            have = min(run.first_new_block, self._num_blocks[row])
            # A row that another sequence had before is told from the first block on.
            if have < len(blocks):
                is_next = have == len(blocks) - 1 == run.start // self.block_size
                if decodes and is_next:
                    self._fresh.append((row, blocks[have]))
                else:
                    self._blocks.append((row, have, blocks[have:]))
                self.host_table[row, have : len(blocks)] = blocks[have:]
            self._num_blocks[row] = len(blocks)

    def parts(self) -> list[NDArray[np.integer]]:
        """Return the arrays that a step sends for `apply`; an empty list for no changes.

        They are the sources and targets of moved rows, and the places and ids of new blocks; fresh
        blocks are sent by `send_fresh`.
        """
        if not (self._blocks or self._moves):
            return []
        width = self.table.shape[1]
        places = [np.arange(len(b), dtype=np.int64) + r * width + c for r, c, b in self._blocks]
        blocks = [np.array(b, dtype=np.int32) for _, _, b in self._blocks]
        return [
            np.array([source for source, _ in self._moves], dtype=np.int64),
            np.array([target for _, target in self._moves], dtype=np.int64),
            np.concatenate(places) if places else np.empty(0, np.int64),
            np.concatenate(blocks) if blocks else np.empty(0, np.int32),
        ]

    def apply(self, sent: list[Tensor]) -> list[Tensor]:
        """Apply the changes that `parts` listed to the table on the device.

        Args:
            sent: the tensors on the device: those of `parts`, if there were any, then others.

        Returns:
            The tensors that follow those of `parts`.
        """
        if self._blocks or self._moves:
            source, target, places, blocks, *sent = sent
            if len(source):
                self.table.index_copy_(0, target, self.table.index_select(0, source))
            if len(places):
                self.table.view(-1).index_copy_(0, places, blocks)
        return sent

    def send_fresh(self, num_rows: int) -> int:
        """Send the fresh blocks of the first `num_rows` rows, if there are any; return the bytes
        sent."""
        if not self._fresh:
            return 0
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        values = buffer.numpy()
        values.fill(-1)
        for row, block in self._fresh:
            values[row] = block
        self.fresh[:num_rows].copy_(buffer[:num_rows], non_blocking=True)
        return 4 * num_rows
