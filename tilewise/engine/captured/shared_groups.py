"""Decoding rows that share leading blocks, in buffers on the device that graphs may read.

Which rows share what is found on the host, when the batch has changed; between two changes the rows
only grow, and what they share stays. The buffers have a fixed size, so that a captured decode step
follows the groups as they change: groups that are not there have no rows, and the rows that are in
none stand behind the others.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tilewise.engine.steps.inputs import send
from tilewise.ops import SharedPrefixes, shared_prefixes

__all__ = ["MOST_GROUPS", "SharedGroups"]

# Every program of a pass looks for its rows among all groups, and there is one more for each.
MOST_GROUPS = 64


class SharedGroups:
    """The groups of rows of a decode step that begin with the same blocks, in fixed device buffers.

    `DeviceRunner` has one such object; `find` overwrites the buffers when the batch has changed.

    Args:
        max_num_seqs, max_blocks, block_size, device: as those of `DeviceBatch`.

    Attributes:
        is_active: True if the last `find` has found groups that save enough reading.
        is_stale: True if the batch has changed since `find`; the runner sets it.
    """

    def __init__(
        self, max_num_seqs: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size, self.device = block_size, device
        count = max(1, min(MOST_GROUPS, max_num_seqs // 2))

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._skipped, self._rows = zeros(max_num_seqs), zeros(max_num_seqs)
        self._table, self._lengths = zeros(count, max_blocks), zeros(count)
        self._edges = zeros(count + 1)
        self.is_active, self.is_stale = False, True

    def prefixes(self, bucket: int) -> SharedPrefixes:
        """Return the shared prefixes of the first `bucket` rows, in buffers that `find`
        overwrites."""
        return SharedPrefixes.in_buffers(
            self._skipped[:bucket],
            self._table,
            self._lengths,
            self._edges,
            self._rows[:bucket],
            self.block_size,
        )

    def find(
        self, table: NDArray[np.int32], lengths: NDArray[np.int64], bucket: int, least: int
    ) -> None:
        """Look for rows that begin with the same blocks, and send their groups to the device.

        Only the MOST_GROUPS groups that save most are sent, and only if they save enough; then
        `is_active` is True.

        Args:
            table: (rows, max_blocks), the block tables of the rows in use.
            lengths: (rows,) the tokens of each row, its new one included; 0 for a row that does not
                run.
            bucket: the number of rows of the step, at least `rows`.
            least: the number of keys that need not be read again thanks to the groups, at least.
        """
        self.is_stale, self.is_active = False, False
        if len(lengths) < 2 or lengths.sum() < least:  # most steps: nothing to look for
            return
        width = int(lengths.max()) // self.block_size + 1
        found = shared_prefixes(
            table[:, :width],
            lengths,
            np.arange(len(lengths) + 1),
            block_size=self.block_size,
            max_levels=1,
        )
        if found is None or found.saved_tokens < least:
            return
        [level] = found.levels
        counts, shared = np.diff(level.cu_seqlens_q.numpy()), level.seqlens_k.numpy()
        worth = (counts - 1) * shared
        kept = np.sort(np.argsort(-worth, kind="stable")[: len(self._lengths)])
        if worth[kept].sum() < least:
            return
        edges, rows = level.cu_seqlens_q.numpy(), level.rows.numpy()
        members = [rows[edges[i] : edges[i + 1]] for i in kept]
        skipped = np.zeros(bucket, np.int32)
        for i, own in zip(kept, members, strict=True):
            skipped[own] = shared[i]
        others = np.flatnonzero(skipped == 0)
        ends = np.cumsum(counts[kept])
        padding = len(self._lengths) - len(kept)
        blocks = level.block_table.numpy()[kept]
        sent = send(
            (
                skipped,
                np.concatenate([*members, others]).astype(np.int32),
                np.concatenate([shared[kept], np.zeros(padding)]).astype(np.int32),
                np.concatenate([[0], ends, np.full(padding, ends[-1])]).astype(np.int32),
                np.ascontiguousarray(blocks).ravel(),
            ),
            self.device,
        )
        self._skipped[:bucket].copy_(sent[0])
        self._rows[:bucket].copy_(sent[1])
        self._lengths.copy_(sent[2])
        self._edges.copy_(sent[3])
        self._table[: len(kept), : blocks.shape[1]].copy_(sent[4].view(blocks.shape))
        self.is_active = True
