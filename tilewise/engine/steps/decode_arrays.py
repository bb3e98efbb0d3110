"""The inputs of a decode step on a CPU, as numpy arrays that are allocated once.

At batch 1 a small model's step is half a millisecond, and its weights have pushed everything else
out of the caches: each call of torch or numpy that the host makes between two steps costs several
times what it costs in a loop. So each step writes its numbers into the same arrays, and leaves
alone what has not changed since the step before, such as most block tables.
"""

from __future__ import annotations

import numpy as np

from tilewise.engine.batch import Batch
from tilewise.engine.steps.inputs import HostTables
from tilewise.ops import cpu_step as step

__all__ = ["DecodeArrays"]


class DecodeArrays:
    """The inputs of a decode step: each sequence has one new token, and one more is drawn for each.

    A runner has one such object, which `fill` overwrites in each step.

    The names are those of `ModelInputs` and its context, so that a step's inputs are read in
    the same way from both.

    Args:
        block_size: tokens per cache block.
        has_states: True for a model with layers that keep states.

    Attributes:
        rows: all inputs of the step, as a compiled list takes them; their memory is used again by
            the next step.
        max_len: the largest of seqlens_k, in tokens.
    """

    def __init__(self, block_size: int, *, has_states: bool = False) -> None:
        self.block_size, self.has_states = block_size, has_states
        self.max_len = 0
        self._table = np.full((0, 0), -1, np.int32)
        # What the table was made of: tables, their version, and which rows of them.
        self._held: tuple[HostTables | None, int, list[int]] = (None, 0, [])
        self._make(1, 1)

    def _make(self, count: int, num_columns: int) -> None:
        """Set `rows` to views for `count` sequences with tables of at least `num_columns` blocks.

        Arrays that are too small are replaced by new ones, at least twice as long where they grow.
        """
        have = self._table.shape
        if count > have[0] or num_columns > have[1]:
            sizes = [
                old if new <= old else max(2 * old, new)
                for old, new in zip(have, (count, num_columns), strict=True)
            ]
            self._table = np.full(sizes, -1, np.int32)
            self._numbers = np.empty((4, sizes[0]), np.int64)
            self._lengths = np.empty(sizes[0], np.int32)
            self._places = np.arange(sizes[0] + 1)
            self._edges = np.arange(sizes[0] + 1, dtype=np.int32)
        ids, positions, slots, state_slots = self._numbers[:, :count]
        self.rows = step.Batch(
            ids,
            positions,
            slots,
            self._edges[: count + 1],
            self._lengths[:count],
            self._table[:count],
            self._places[:count],
            *((state_slots, positions, self._places[: count + 1]) if self.has_states else ()),
        )

    def fill(self, batch: Batch, tables: HostTables) -> DecodeArrays:
        """Write the inputs of a step into the arrays, and return this object.

        Args:
            batch: each sequence has one token and draws one; no block is copied.
            tables: the block tables of a runner, which have followed all batches before this one,
                and follow it here.
        """
        sequences, block_size = batch.sequences, self.block_size
        count = len(sequences)
        starts = [s.start for s in sequences]
        self.max_len = max(starts) + 1
        table_rows = tables.rows_of(batch)
        held, num_columns = (tables, tables.version, table_rows), -(-self.max_len // block_size)
        rows = self.rows
        if count != len(rows.ids) or num_columns > rows.table.shape[1]:
            self._make(count, num_columns)
            self._held, rows = (None, 0, []), self.rows
        rows.ids[:] = [s.token_ids[0] for s in sequences]
        rows.positions[:] = starts
        rows.slots[:] = [
            s.block_ids[at // block_size] * block_size + at % block_size
            for s, at in zip(sequences, starts, strict=True)
        ]
        if self.has_states:
            rows.state_slots[:] = [s.state_slot for s in sequences]
        np.add(rows.positions, 1, out=rows.lengths, casting="unsafe")
        if held != self._held:
            tables.copy(table_rows, rows.table)
            self._held = held
        return self

    @property
    def ids(self) -> np.ndarray:
        """(B,) int64 token ids."""
        return self.rows.ids

    @property
    def logits_rows(self) -> np.ndarray:
        """(B,) int64: the rows whose logits are sampled, which are all, 0 ... B - 1."""
        return self.rows.sampled

    @property
    def ctx(self) -> DecodeArrays:
        """This object itself, which has the fields of a step's attention context that callers
        read."""
        return self

    @property
    def seqlens_k(self) -> np.ndarray:
        """(B,) int32, the number of tokens of each sequence, including its new one."""
        return self.rows.lengths
