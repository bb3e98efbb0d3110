"""The running sequences as rows on the device: a step sends what changed, in one copy.

A row holds what a decode step needs of a sequence: its last token, the position of that token, its
random stream, its sampling parameters and its block table. The rows in use are the first ones, in
no order: who leaves is replaced by who comes, or by the last row. The host keeps a mirror of what
it knows of the rows, so that it can tell what a batch changes:

    moves   row to row                       when sequences have left
    rows    parameters, position, stream     of a sequence that came, or ran other than by decoding
    table   blocks at (row, column)          that a sequence got or exchanged
    fresh   one block a row                  that the next token of a decoding sequence begins: the
                                             step itself puts it where it belongs

In a step in which all sequences decode, as they did in the one before, only `fresh` is sent, and
only if there is one: 4 bytes a row.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise.engine.batch import PENDING, Batch, LaterRuns, ScheduledSequence, first_of
from tilewise.engine.captured.tables import GroupRows
from tilewise.engine.request import SamplingParams
from tilewise.engine.steps.inputs import send

__all__ = ["Changes", "Columns", "DeviceBatch"]

# Pinned buffers that are written in turn. Copies are read from them while the step before runs, so
# two would do.
BUFFERS = 4
MAX_KNOWN = 16_384  # requests whose sampling parameters are remembered


class SamplingWords:
    """The sampling parameters of requests as four int32 words each, converted once a request."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}  # by id
        self._alive: list[SamplingParams] = []  # so that their ids stay theirs

    def of(self, samplings: Sequence[SamplingParams]) -> NDArray[np.int32]:
        """Return temperature, top_p and min_p, the bits of float32, and top_k of each: (4, n)."""
        found: list[Any] = [*map(self._known.get, map(id, samplings))]
        if not all(found):
            for place in [place for place, words in enumerate(found) if words is None]:
                sampling = samplings[place]
                found[place] = self._known.get(id(sampling)) or self._add(sampling)
        words = np.frombuffer(b"".join(found), np.int32).reshape(-1, 4)
        return np.ascontiguousarray(words.T)

    def _add(self, sampling: SamplingParams) -> bytes:
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
            self._alive.clear()
        top_k = min(sampling.top_k, 2**31 - 1)
        words = struct.pack("=3fi", *sampling.float32_rule, top_k)
        self._known[id(sampling)] = words
        self._alive.append(sampling)
        return words


class Columns:
    """The fields of a step's runs as columns, which is faster than reading them run by run.

    Attributes:
        seq_ids, token_ids, first, block_ids, samplings, seeds, first_new_blocks: lists of these
            fields of each run; `first` is the position at which a run starts.
        starts, lengths, ends, num_samples, num_generated: int64 (n,); a run ends before `ends`.
    """

    def __init__(self, runs: Sequence[ScheduledSequence]) -> None:
        (
            self.seq_ids,
            self.token_ids,
            first,
            self.block_ids,
            num_samples,
            self.samplings,
            self.seeds,
            num_generated,
            self.first_new_blocks,
            *_,
        ) = zip(*runs, strict=True)
        self.first, self.starts = first, np.array(first, np.int64)
        self.lengths = np.fromiter(map(len, self.token_ids), np.int64, len(first))
        self.ends = self.starts + self.lengths
        self.num_samples = np.array(num_samples, np.int64)
        self.num_generated = np.array(num_generated, np.int64)


_NOTHING_WRITTEN = np.empty(0, np.int64), np.empty(0, np.int32)


@dataclass(slots=True)
class Changes:
    """The writes that a batch needs in the rows on the device; all but `moves` count rows after the
    moves.

    Attributes:
        rows: the row of each sequence of the batch, in the batch's order.
        index: the numbers of `rows` as an array.
        moves: pairs (source, target) of rows to copy; no source is a target.
        set_rows: tuples (row, run, position, counter) of the rows of which everything but the token
            is written.
        set_whole: the arrays that take the place of `set_rows` where all rows of the batch are
            written, in its order: (4, n) of position, active, seed and counter, and (4, n) of
            `SamplingWords`; None where `set_rows` lists the rows.
        tokens: pairs (row, token id) of tokens that the host knows.
        active: pairs (row, 0 or 1) of rows that begin or cease to run.
        blocks: tuples (row, column, blocks) of cache blocks to be written into a row of the block
            table, from that column on.
        written: the places in the block table of all of `blocks`, and their ids.
        fresh: pairs (row, block) of the block that a row's next token is the first of.
    """

    rows: list[int] = field(default_factory=list)
    index: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    moves: list[tuple[int, int]] = field(default_factory=list)
    set_rows: list[tuple[int, ScheduledSequence, int, int]] = field(default_factory=list)
    set_whole: tuple[NDArray[np.int64], NDArray[np.int32]] | None = None
    tokens: list[tuple[int, int]] = field(default_factory=list)
    active: list[tuple[int, int]] = field(default_factory=list)
    blocks: list[tuple[int, int, Sequence[int]]] = field(default_factory=list)
    written: tuple[NDArray[np.int64], NDArray[np.int32]] = _NOTHING_WRITTEN
    fresh: list[tuple[int, int]] = field(default_factory=list)

    def parts(self, words_of: SamplingWords) -> list[NDArray[np.integer]]:
        """Return all changes but `fresh` as arrays, in the order in which `DeviceBatch` applies
        them.

        The last two are int32, the others int64.
        """
        if self.set_whole is not None:
            set_rows, (ints, words) = self.index, self.set_whole
        else:
            set_rows = _column(self.set_rows, 0)
            ints = np.array(
                [
                    (position, 1, run.seeds[0] if run.seeds else 0, counter)
                    for _, run, position, counter in self.set_rows
                ],
                np.int64,
            ).T
            words = words_of.of([run.sampling for _, run, _, _ in self.set_rows])
        places, blocks = self.written
        return [
            _column(self.moves, 0),
            _column(self.moves, 1),
            set_rows,
            ints.ravel(),
            _column(self.tokens, 0),
            _column(self.tokens, 1),
            _column(self.active, 0),
            _column(self.active, 1),
            places,
            words.ravel(),
            blocks,
        ]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send but `fresh`."""
        return self.set_whole is None and not (
            self.moves or self.set_rows or self.tokens or self.active or self.blocks
        )


@dataclass(slots=True)
class _Steady:
    """The rows of the last plain step, kept for a next one with the same sequences (`LaterRuns`).

    Attributes:
        first, number: the fields of the last step's `LaterRuns`; for a step with other runs, these
            runs and 0.
        rows, index: the rows of the step's sequences in its order, as a list and as an array.
    """

    first: Sequence[ScheduledSequence]
    number: int
    rows: list[int]
    index: NDArray[np.int64]


class DeviceBatch:
    """The running sequences as rows on the device, and a mirror of them on the host.

    `take` brings the mirror up to date by a batch, `send` the device.

    Args:
        max_num_seqs: the number of rows.
        max_blocks: cache blocks of a sequence at most.
        block_size: tokens per cache block.
        device: the device of the rows.
        num_groups: groups of layers, each with a table of its own.

    Attributes:
        token, position, active, seed, counter: (max_num_seqs,) int64: the last token, its position,
            1 if the row runs in the next decode step or else 0, and key and counter of its random
            number.
        temperature, top_p, min_p: (max_num_seqs,) float32; top_k: int32.
        table: (max_num_seqs, max_blocks) int32, the block table of each row.
        fresh: (max_num_seqs,) int32, a block that begins with the next token, or -1.
        others: the tables of groups 1, 2, ...
        num_rows: the number of rows in use, which are the first ones.
        num_bytes_sent: the bytes that were sent to the device since the object was made.
        sampling_words: the sampling parameters of requests, as words that are sent.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        num_groups: int = 1,
    ) -> None:
        self.max_num_seqs, self.max_blocks, self.block_size = max_num_seqs, max_blocks, block_size
        self.device = device
        # As wide as lets each row begin at a multiple of 16 bytes: kernels are compiled for that.
        width = -(-max_num_seqs // 4) * 4
        self._ints = torch.zeros((5, width), dtype=torch.int64, device=device)[:, :max_num_seqs]
        self._words = torch.zeros((4, width), dtype=torch.int32, device=device)[:, :max_num_seqs]
        self.table = torch.zeros((max_num_seqs, max_blocks), dtype=torch.int32, device=device)
        self.fresh = torch.full((max_num_seqs,), -1, dtype=torch.int32, device=device)
        self.token, self.position, self.active, self.seed, self.counter = self._ints
        self.temperature, self.top_p, self.min_p = self._words[:3].view(torch.float32)
        self.top_k = self._words[3]
        self._buffers = [
            torch.full((max_num_seqs,), -1, dtype=torch.int32, pin_memory=device.type == "cuda")
            for _ in range(BUFFERS)
        ]
        self._turn = 0
        self._sent: tuple[int, Tensor, list[Tensor]] = 0, self.fresh[:0], []  # rows, and parts
        self.others = [
            GroupRows(i, max_num_seqs, max_blocks, block_size, device, BUFFERS)
            for i in range(1, num_groups)
        ]
        self.num_bytes_sent = 0
        self.sampling_words = SamplingWords()
        self.host_table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.reset()

    def reset(self) -> None:
        """Forget all sequences; each is written to a row anew when it next runs."""
        size = self.max_num_seqs
        self.num_rows = 0
        self._steady: _Steady | None = None
        self._row_of: dict[int, int] = {}
        self._owner = [-1] * size
        self._next = [-1] * size  # position of the next token, -1 if the row does not say
        self._num_blocks = [0] * size  # leading blocks that the row has
        # Rows that were active may still be so on the device.
        self._is_active = [True] * size
        self.fresh.fill_(-1)
        for other in self.others:
            other.reset()

    def take(self, batch: Batch, *, decodes: bool, columns: Columns | None = None) -> Changes:
        """Bring the host's mirror up to date by a batch; return the changes that the device needs.

        `send` must be called with the result before the batch's step begins.

        Args:
            batch: the batch of the next step, every one in order.
            decodes: True if every run is one token, from which one is drawn, so that the step
                advances the rows itself. Else the rows are told where the step leaves them, but for
                the tokens that it draws (`store_tokens`).
            columns: the columns of the runs if they were made before; only for a step that does not
                decode.

        Raises:
            RuntimeError: a token is PENDING and no row has it.
            ValueError: a sequence has more than `max_blocks` blocks.
        """
        runs = batch.sequences
        if decodes and isinstance(runs, LaterRuns) and not batch.left:
            steady = self._take_steady(runs)
            if steady is not None:
                return steady
        self._leave_steady()
        changes = Changes()
        if columns is None and not decodes:
            columns = Columns(runs)
        row_of = self._row_of
        ids = [run.seq_id for run in runs] if columns is None else columns.seq_ids
        rows: list[Any] = [*map(row_of.get, ids)]
        if batch.left or None in rows:
            self._seat(batch, changes)
            rows = [*map(row_of.__getitem__, ids)]
        changes.rows, changes.index = rows, np.array(rows, np.int64)
        if columns is None:
            self._follow_decode(batch, changes)
        else:
            self._follow(batch, columns, changes)
        for other in self.others:
            other.take(batch, rows, changes.moves, decodes=decodes)
        if decodes and batch.is_plain and not self.others:
            first, number = first_of(runs)
            self._steady = _Steady(first, number, rows, changes.index)
        return changes

    def _take_steady(self, runs: LaterRuns) -> Changes | None:
        """Follow a step of the same sequences as the step before, each with one token more.

        Returns:
            The changes for the device, new blocks only; None if the step is not of this kind.
        """
        steady = self._steady
        if steady is None or steady.first is not runs.first or steady.number + 1 != runs.number:
            return None
        changes = Changes(steady.rows, steady.index)
        for place, told in runs.told:
            run, row = runs.first[place], steady.rows[place]
            self._follow_blocks(row, told, run.block_ids, run.start + runs.number, changes)
        self._store_fresh(changes)
        steady.number = runs.number
        return changes

    def _leave_steady(self) -> None:
        """Write the position of each row's next token, which steady steps know of all rows
        together."""
        if self._steady is not None:
            for row, run in zip(self._steady.rows, self._steady.first, strict=True):
                self._next[row] = run.start + self._steady.number + 1
            self._steady = None

    def send(self, changes: Changes, more: Sequence[NDArray[np.integer]] = ()) -> list[Tensor]:
        """Copy changes and further arrays to the device at once, and apply the changes there.

        Args:
            changes: the changes of rows.
            more: further arrays for the step.

        Returns:
            `more` as tensors on the device.
        """
        sent: list[Tensor] = []
        if self.others:
            more = [*(part for other in self.others for part in other.parts()), *more]
        if more or not changes.is_empty:
            parts = changes.parts(self.sampling_words)
            sent = send([*parts, *more], self.device)
            self.num_bytes_sent += sum(part.nbytes for part in (*parts, *more))
            self._apply(sent[: len(parts)])
            sent = sent[len(parts) :]
        if changes.fresh:
            self._send_fresh(changes.fresh)
        for other in self.others:
            sent = other.apply(sent)
            self.num_bytes_sent += other.send_fresh(self.num_rows)
        return sent

    def store_tokens(self, rows: Tensor, tokens: Tensor) -> None:
        """Write the last tokens (n,) int64 of rows (n,) int64."""
        self.token.index_copy_(0, rows, tokens)

    def _apply(self, sent: list[Tensor]) -> None:
        source, target, rows, ints, token_rows, tokens, active_rows, active, *rest = sent
        places, words, blocks = rest
        if len(source):
            for rows_of in (self._ints.t(), self._words.t(), self.table):
                rows_of.index_copy_(0, target, rows_of.index_select(0, source))
        if len(rows):
            self._ints[1:].index_copy_(1, rows, ints.view(4, -1))
            self._words.index_copy_(1, rows, words.view(4, -1))
        if len(tokens):
            self.token.index_copy_(0, token_rows, tokens)
        if len(active):
            self.active.index_copy_(0, active_rows, active)
        if len(blocks):
            self.table.view(-1).index_copy_(0, places, blocks)

    def _send_fresh(self, fresh: list[tuple[int, int]]) -> None:
        end = self.num_rows
        if self._sent[0] != end:
            self._sent = end, self.fresh[:end], [buffer[:end] for buffer in self._buffers]
        buffer = self._sent[2][self._turn]
        self._turn = (self._turn + 1) % BUFFERS
        values = buffer.numpy()
        values.fill(-1)
        rows, blocks = zip(*fresh, strict=True)
        values[list(rows)] = blocks
        self._sent[1].copy_(buffer, non_blocking=True)
        self.num_bytes_sent += 4 * end

    def _seat(self, batch: Batch, changes: Changes) -> None:
        """Free the rows of sequences that left, seat new ones, and close the gaps.

        New sequences take free rows first. If rows are still free below the last one in use, last
        rows move down into them; `changes` notes these moves.
        """
        row_of = self._row_of
        holes = sorted(row_of.pop(s) for s in batch.left if s in row_of)
        is_hole = set(holes)
        for run in batch.sequences:
            if run.seq_id in row_of:
                continue
            if holes:
                row = holes.pop(0)
                is_hole.discard(row)
            else:
                row, self.num_rows = self.num_rows, self.num_rows + 1
            row_of[run.seq_id] = row
            self._owner[row], self._next[row], self._num_blocks[row] = run.seq_id, -1, 0
        for hole in holes:
            while self.num_rows - 1 in is_hole and self.num_rows - 1 >= hole:
                is_hole.discard(self.num_rows - 1)
                self.num_rows -= 1
            if hole >= self.num_rows:
                break
            last = self.num_rows = self.num_rows - 1
            is_hole.discard(hole)
            self._move(last, hole)
            changes.moves.append((last, hole))

    def _move(self, source: int, target: int) -> None:
        seq_id = self._owner[source]
        self._row_of[seq_id], self._owner[target] = target, seq_id
        self._next[target] = self._next[source]
        self._num_blocks[target] = self._num_blocks[source]
        self._is_active[target] = self._is_active[source]
        self.host_table[target] = self.host_table[source]

    def _follow_decode(self, batch: Batch, changes: Changes) -> None:
        next_of, num_blocks = self._next, self._num_blocks
        for row, run in zip(changes.rows, batch.sequences, strict=True):
            start = run.start
            if next_of[row] != start:
                self._expect_known(run)
                changes.set_rows.append((row, run, start, run.num_generated))
                changes.tokens.append((row, run.token_ids[0]))
                self._is_active[row] = True
            elif run.is_chosen:  # all else is where the step before has left it
                self._expect_known(run)
                changes.tokens.append((row, run.token_ids[0]))
            next_of[row] = start + 1
            if run.first_new_block < len(run.block_ids) or num_blocks[row] < len(run.block_ids):
                self._follow_blocks(row, run.first_new_block, run.block_ids, start, changes)
        self._store_fresh(changes)
        self._set_active(changes)

    def _follow_blocks(
        self, row: int, told: int, blocks: Sequence[int], start: int, changes: Changes
    ) -> None:
        """Note the new blocks of a sequence that decodes the token at position `start`.

        A single block that begins with this token goes to `changes.fresh`, others to
        `changes.blocks`.

        Args:
            row: the sequence's row.
            told: the number of leading blocks that the batch says have not changed.
            blocks: all blocks of the sequence.
            start: the position of the token.
            changes: the changes of the batch, to which the blocks are added.
        """
        have = min(told, self._num_blocks[row])
        if have >= len(blocks):
            return
        if have == len(blocks) - 1 == start // self.block_size:
            changes.fresh.append((row, blocks[have]))
            self._num_blocks[row] = len(blocks)
        else:
            self._store_blocks(row, have, blocks, changes)

    def _store_fresh(self, changes: Changes) -> None:
        self._write_blocks(changes)
        if changes.fresh:
            rows, fresh = zip(*changes.fresh, strict=True)
            columns = [self._num_blocks[row] - 1 for row in rows]
            self.host_table[rows, columns] = fresh

    def _follow(self, batch: Batch, columns: Columns, changes: Changes) -> None:
        rows, next_of, is_active, num_blocks = (
            changes.rows,
            self._next,
            self._is_active,
            self._num_blocks,
        )
        expected = map(next_of.__getitem__, rows)
        is_other = np.fromiter(map(operator.ne, expected, columns.first), bool, len(rows))
        for place in np.flatnonzero(is_other).tolist():
            self._expect_known(batch.sequences[place])
        samples = columns.num_samples > 0
        for row, following in zip(rows, np.where(samples, columns.ends, -1).tolist(), strict=True):
            next_of[row], is_active[row] = following, True
        firsts, tables = columns.first_new_blocks, columns.block_ids
        for row, told, blocks in zip(rows, firsts, tables, strict=True):
            count = len(blocks)
            if told < count or num_blocks[row] < count:
                self._store_blocks(row, min(told, num_blocks[row]), blocks, changes)
        self._write_blocks(changes)
        ints = np.ones((4, len(rows)), np.int64)
        ints[0] = columns.ends
        ints[2] = [own[0] if own else 0 for own in columns.seeds]
        ints[3] = columns.num_generated + samples
        changes.set_whole = ints, self.sampling_words.of(columns.samplings)

    def _store_blocks(self, row: int, first: int, blocks: Sequence[int], changes: Changes) -> None:
        if len(blocks) > self.max_blocks:  # they would be written to the next row
            raise ValueError(f"a row must have at most {self.max_blocks} blocks, got {len(blocks)}")
        self._num_blocks[row] = len(blocks)
        changes.blocks.append((row, first, blocks[first:]))

    def _write_blocks(self, changes: Changes) -> None:
        """Write the blocks of `changes` into the host's copy of the block tables, all at once."""
        if not changes.blocks:
            return
        rows, columns, blocks = zip(*changes.blocks, strict=True)
        counts = np.fromiter(map(len, blocks), np.int64, len(blocks))
        ends = np.cumsum(counts)
        starts = np.array(rows, np.int64) * self.max_blocks + np.array(columns, np.int64)
        places = np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
        new = np.fromiter(chain.from_iterable(blocks), np.int32, int(ends[-1]))
        self.host_table.reshape(-1)[places] = new
        changes.written = places, new

    def _set_active(self, changes: Changes) -> None:
        """Add to `changes` the rows that must begin or cease to run, so that the batch's rows run
        alone."""
        num_rows, is_active = self.num_rows, self._is_active
        if len(changes.rows) < num_rows:
            runs = set(changes.rows)
            wanted = [row in runs for row in range(num_rows)]
        else:
            wanted = [True] * num_rows
        wanted += [False] * (self.max_num_seqs - num_rows)
        if wanted != is_active:
            changes.active += [
                (row, int(want))
                for row, (want, have) in enumerate(zip(wanted, is_active, strict=True))
                if want != have
            ]
            self._is_active = wanted

    def _expect_known(self, run: ScheduledSequence) -> None:
        if run.token_ids[-1] == PENDING:
            raise RuntimeError(f"no row has the token of sequence {run.seq_id} that was drawn")


def _column(rows: Sequence[tuple[object, ...]], column: int) -> NDArray[np.int64]:
    return np.array([row[column] for row in rows], dtype=np.int64)
