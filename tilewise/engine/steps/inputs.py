"""From a Batch of token runs to the tensors of one model step: built in numpy, sent in one copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise.engine.batch import Batch, ScheduledSequence
from tilewise.engine.scheduling.draft_trees import depths
from tilewise.nn.context import AttentionContext, StepPlans, StepStates
from tilewise.nn.states import LayerStates
from tilewise.ops import shared_prefixes

__all__ = ["HostTables", "ModelInputs", "build_inputs", "send"]

# Triton compiles one variant of a kernel for pointers that are 16-byte aligned and another for the
# rest; parts that always start aligned keep it to one.
ALIGNMENT = 16  # bytes


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One packed step on the device of the model.

    Attributes:
        ids: (T,) int64 token ids.
        positions: (T,) int64 position of each token in its sequence.
        ctx: the context that says where in the paged cache the rows belong.
        logits_rows: (R,) int64 rows whose logits are sampled, one per sequence that samples, and
            one per draft.
        block_copies: (C, 2) int64 cache blocks (source, destination) to copy before the step.
        other_copies: the blocks to copy in groups of layers beyond the first, one tensor a group.
    """

    ids: Tensor
    positions: Tensor
    ctx: AttentionContext
    logits_rows: Tensor
    block_copies: Tensor
    other_copies: tuple[Tensor, ...] = ()


class HostTables:
    """The block tables of the sequences of a runner, kept from step to step.

    A batch says which blocks of a sequence are new; the others are here already, so that a step
    costs the host no Python for each block of each context.

    Attributes:
        version: a counter that grows whenever a row gets new blocks.
    """

    def __init__(self) -> None:
        self.version = 0
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []
        self._table = np.full((0, 0), -1, dtype=np.int64)

    def follow(self, batch: Batch, block_size: int) -> NDArray[np.int64]:
        """Update the block tables by a batch; return the tables of its runs (B, max_blocks), int64.

        A table ends with the block of the run's last token; behind it stands -1.
        """
        rows = self.rows_of(batch)
        counts = [-(-(s.start + len(s.token_ids)) // block_size) for s in batch.sequences]
        most = max(counts)
        table = self._table[rows, :most]
        if min(counts) < most:
            table[np.arange(most) >= _int64(counts)[:, None]] = -1
        return table

    def copy(self, rows: list[int], target: NDArray[np.int32]) -> None:
        """Write the block tables in `rows` to target (B, M), whose further columns keep their
        contents."""
        width = min(self._table.shape[1], target.shape[1])
        target[:, :width] = self._table[rows, :width]

    def rows_of(self, batch: Batch) -> list[int]:
        """Update the block tables by a batch; return the row that each of its sequences has here.

        Sequences that left free their rows.
        """
        row_of = self._row_of
        self._free += [row_of.pop(seq_id) for seq_id in batch.left if seq_id in row_of]
        rows = []
        for run in batch.sequences:
            first, blocks = run.first_new_block, run.block_ids
            row = row_of.get(run.seq_id)
            if row is None:
                row, first = self._free.pop() if self._free else len(row_of), 0
                row_of[run.seq_id] = row
            if first < len(blocks):
                if row >= len(self._table) or len(blocks) > self._table.shape[1]:
                    self._grow(row + 1, len(blocks))
                self._table[row, first : len(blocks)] = blocks[first:]
                self.version += 1
            rows.append(row)
        return rows

    def _grow(self, num_rows: int, num_columns: int) -> None:
        old = self._table
        shape = [
            have if want <= have else max(2 * have, want)
            for have, want in zip(old.shape, (num_rows, num_columns), strict=True)
        ]
        self._table = np.full(shape, -1, dtype=np.int64)
        self._table[: old.shape[0], : old.shape[1]] = old


def build_inputs(
    batch: Batch,
    block_size: int,
    device: torch.device,
    *,
    tables: HostTables | None = None,
    group_of: tuple[int, ...] = (),
    other_tables: Sequence[HostTables] = (),
    sharing_tokens: int | None = None,
    batch_invariant: bool = False,
    states: Mapping[int, LayerStates] | None = None,
) -> ModelInputs:
    """Lay out `batch` as packed tensors on `device`.

    Row r at position p of a sequence writes slot ``block_ids[p // block_size] * block_size +
    p % block_size``. Everything is computed on the host and sent as one copy, which on a CUDA
    device starts from pinned memory and does not wait.

    Args:
        batch: at least one sequence, each with at least one token and enough blocks.
        block_size: tokens per cache block.
        device: the device of the model and its cache.
        tables: the tables of a runner that has built the inputs of all batches before; None reads
            every table whole.
        group_of: the number of each layer's group, see `CacheSpec.group_of`.
        other_tables: the block tables of groups 1, 2, ...
        sharing_tokens: the number of keys that must be saved for the step to read shared prefixes
            once instead of once a sequence; None for never.
        batch_invariant: True if a row's bits must not depend on other rows, see `AttentionContext`.
        states: the slots of each layer with a state; None for a model without.
    """
    sequences = batch.sequences
    counts = [len(s.token_ids) for s in sequences]
    longest, starts = max(counts), _int64([s.start for s in sequences])
    assert min(counts) > 0
    if longest == 1:  # a decode step: what follows would be the same in ten times as many calls
        lengths = np.ones_like(starts)
        cu_seqlens_q = np.arange(len(starts) + 1)
        row_of, positions = cu_seqlens_q[:-1], starts
    else:
        lengths = _int64(counts)
        cu_seqlens_q = np.concatenate([[0], np.cumsum(lengths)])  # (B + 1,)
        row_of = np.repeat(np.arange(len(sequences)), lengths)  # (T,) sequence of each row
        positions = np.arange(len(row_of)) + (starts - cu_seqlens_q[:-1])[row_of]  # (T,)
    if tables is None:
        block_table = _block_table(sequences, block_size)
    else:
        block_table = tables.follow(batch, block_size)
    groups = [batch.of_group(i + 1) for i in range(len(other_tables))]
    all_tables = [block_table]
    all_tables += [t.follow(b, block_size) for t, b in zip(other_tables, groups, strict=True)]
    columns = positions // block_size
    offsets = positions - columns * block_size
    slots, *other_slots = (table[row_of, columns] * block_size + offsets for table in all_tables)
    mask = _place_trees(sequences, lengths, cu_seqlens_q, positions)
    samples = np.array([s.num_samples > 0 for s in sequences], dtype=bool)
    parts = (
        _flatten(s.token_ids for s in sequences),
        positions,
        slots,
        _logits_rows(sequences, cu_seqlens_q[1:], samples),
        _flatten(batch.block_copies),
        cu_seqlens_q.astype(np.int32),
        (starts + lengths).astype(np.int32),
        block_table.astype(np.int32).ravel(),
        _int64([s.state_slot for s in sequences] if states is not None else []),
        starts if states is not None else starts[:0],
    )
    if mask is not None:
        sharing_tokens = None
    more = [
        part
        for own, group, table in zip(other_slots, groups, all_tables[1:], strict=True)
        for part in (own, _flatten(group.block_copies), table.astype(np.int32).ravel())
    ]
    # Nothing to send, and no kernel that asks how it lies.
    if longest == 1 and device.type == "cpu":
        sent = [torch.from_numpy(np.ascontiguousarray(part)) for part in (*parts, *more)]
    else:
        sent = send((*parts, *more), device)
    ids, positions_, slots_, rows, copies, cu, seqlens, table, state_slots, begins, *sent = sent
    shared = None
    if sharing_tokens is not None:
        edges, ends = parts[5:7]
        shared = shared_prefixes(block_table, ends, edges, block_size=block_size, device=device)
        if shared is not None and shared.saved_tokens < sharing_tokens:
            shared = None
    ctx = AttentionContext(
        cu_seqlens_q=cu,
        max_seqlen_q=longest,
        seqlens_k=seqlens,
        block_table=table.view(block_table.shape),
        slot_mapping=slots_,
        batch_invariant=batch_invariant,
        shared=shared,
        tree_mask=None if mask is None else torch.from_numpy(mask).to(device),
        plans=StepPlans.on(device),
        states=None if states is None else StepStates(state_slots, begins, states),
    )
    if groups:
        others = tuple(
            replace(
                ctx,
                block_table=own.view(shape.shape),
                slot_mapping=own_slots,
                shared=None,
                plans=StepPlans.on(device),
            )
            for own_slots, own, shape in zip(sent[::3], sent[2::3], all_tables[1:], strict=True)
        )
        ctx = replace(ctx, group_of=group_of, others=others)
    return ModelInputs(
        ids=ids,
        positions=positions_,
        ctx=ctx,
        logits_rows=rows,
        block_copies=copies.view(-1, 2),
        other_copies=tuple(part.view(-1, 2) for part in sent[1::3]),
    )


def _place_trees(
    sequences: Sequence[ScheduledSequence],
    lengths: NDArray[np.int64],
    edges: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> NDArray[np.bool_] | None:
    """Return the mask of rows that each row of draft trees sees, see `tree_mask`; None without
    trees.

    The positions of a tree's rows are changed in place: a row's position is that of the tree's
    first row plus the row's depth.
    """
    trees: dict[int, tuple[int, tuple[int, ...]]] = {}
    for i, run in enumerate(sequences):
        if run.draft_parents:
            before = len(run.token_ids) - 1 - run.num_drafts
            trees[i] = before, run.draft_parents
            first = int(edges[i]) + before
            positions[first : int(edges[i + 1])] = positions[first] + depths(run.draft_parents)
    return tree_mask(lengths, trees) if trees else None


def tree_mask(
    lengths: NDArray[np.int64], trees: dict[int, tuple[int, tuple[int, ...]]]
) -> NDArray[np.bool_]:
    """Return a mask (T, longest run) of the rows of its own run that each row sees; True is seen.

    Args:
        lengths: (B,) rows of each run.
        trees: the runs that end in a tree, by their numbers: how many rows stand before the tree's
            first row, and the parent of each further row. Other runs are causal.
    """
    starts = np.concatenate([[0], np.cumsum(lengths)])
    places = np.arange(int(starts[-1])) - np.repeat(starts[:-1], lengths)
    mask: NDArray[np.bool_] = np.arange(int(lengths.max()))[None, :] <= places[:, None]
    for run, (before, parents) in trees.items():
        first = int(starts[run]) + before
        for i, parent in enumerate(parents, start=1):
            mask[first + i, before:] = mask[first + parent, before:]
            mask[first + i, before + i] = True
    return mask


def _logits_rows(
    sequences: Sequence[ScheduledSequence], ends: NDArray[np.int64], samples: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return the rows (R,) from which tokens are drawn, sequence by sequence.

    A sequence that draws has its last row; with drafts the row before the first draft and those of
    all drafts.

    Args:
        ends: the end of each sequence's rows.
        samples: whether each sequence draws a token.
    """
    drafts = [s.num_drafts for s in sequences]
    if not any(drafts):
        return ends[samples] - 1
    return _flatten(
        range(end - 1 - count, end)
        for end, count, is_sampled in zip(ends.tolist(), drafts, samples.tolist(), strict=True)
        if is_sampled
    )


def _block_table(sequences: Sequence[ScheduledSequence], block_size: int) -> NDArray[np.int64]:
    """Return the (B, max_blocks) ids of the blocks, -1 past the last one of a sequence."""
    counts = _blocks_of(sequences, block_size)
    table = np.full((len(sequences), int(counts.max())), -1, dtype=np.int64)
    table[np.arange(table.shape[1]) < counts[:, None]] = _flatten(
        s.block_ids[:count] for s, count in zip(sequences, counts.tolist(), strict=True)
    )
    return table


def _blocks_of(sequences: Sequence[ScheduledSequence], block_size: int) -> NDArray[np.int64]:
    """Return how many blocks each sequence has written to after the step, (B,)."""
    ends = _int64([s.start + len(s.token_ids) for s in sequences])
    counts: NDArray[np.int64] = -(-ends // block_size)
    return counts


def send(parts: Sequence[NDArray[np.integer]], device: torch.device) -> list[Tensor]:
    """Copy integer arrays to a device at once; return them as flat tensors, views of one buffer
    there.

    The arrays are int64 or int32. On a GPU the copy starts from pinned memory and is not waited
    for.
    """
    offsets = [0]
    for part in parts:
        offsets.append(offsets[-1] + -(-part.nbytes // ALIGNMENT) * ALIGNMENT)
    # The pinned allocator of torch keeps the memory until the copies that read it are done. Nobody
    # reads what lies between the parts: to clear so much would wake torch's threads.
    host = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    views = {dtype: host.view(kind).numpy() for dtype, kind in _TORCH_DTYPES.items()}
    places = [
        (offset // part.itemsize, offset // part.itemsize + part.size)
        for part, offset in zip(parts, offsets, strict=False)
    ]
    for part, (first, last) in zip(parts, places, strict=True):
        views[part.dtype][first:last] = part
    buffer = host.to(device, non_blocking=True)
    sent = {dtype: buffer.view(kind) for dtype, kind in _TORCH_DTYPES.items()}
    return [sent[part.dtype][first:last] for part, (first, last) in zip(parts, places, strict=True)]


_TORCH_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


def _int64(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def _flatten(values: Iterable[Iterable[int]]) -> NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(values), dtype=np.int64)
