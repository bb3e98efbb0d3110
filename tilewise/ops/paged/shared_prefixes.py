"""shared_prefixes(): which sequences of a batch have leading cache blocks in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise.kernels.spec import SharedLevel
from tilewise.keywords import names, unknown_keyword
from tilewise.ops import checks

_Ints = NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """Groups of sequences that share leading blocks, for `paged_attention(shared=...)`.

    It stays right while the groups keep their blocks and `cu_seqlens_q` its values: sequences may
    grow, so one of a decoding batch serves many steps, all layers and a captured CUDA graph.

    Attributes:
        skipped: int32 (B,), leading tokens that a sequence's groups read for it.
        levels: one pass each; a group of a later level lies within one of an earlier level, or
            beside them all, and reads the blocks that follow.
        saved_tokens: keys of the batch that need not be read again, over all sequences.
        block_size: tokens of a cache block.
    """

    skipped: Tensor
    levels: tuple[SharedLevel, ...]
    saved_tokens: int
    block_size: int

    @classmethod
    def in_buffers(
        cls,
        skipped: Tensor,
        table: Tensor,
        lengths: Tensor,
        edges: Tensor,
        rows: Tensor,
        block_size: int,
    ) -> SharedPrefixes:
        """Return shared prefixes of one level over the given tensors, which are kept, not copied.

        The caller may write other groups into them later, under a captured CUDA graph.

        Args:
            skipped: int32 (B,), tokens that a sequence's group reads for it; 0 for a sequence in no
                group.
            table, lengths, edges, rows: as in `SharedLevel`, for as many groups as there may ever
                be: groups that do not exist now have no rows, and `rows` has all B rows, those in
                no group last.
            block_size: tokens of a cache block.
        """
        level = SharedLevel(table, lengths, edges, rows, max_rows=rows.shape[0])
        return cls(skipped, (level,), 0, block_size)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors for kernels in one list: `skipped`, then four of each level.

        `PagedTensors.of` makes the levels of such a list again.
        """
        return [self.skipped, *(x for level in self.levels for x in level[:-1])]

    @property
    def max_rows(self) -> list[int]:
        """The number of query rows of the largest group of each level."""
        return [level.max_rows for level in self.levels]


class _Group(NamedTuple):
    """Sequences that share the blocks first ... end - 1 of their block tables.

    Attributes:
        members: the indices of the sequences in the batch.
        first, end: the range of columns of the block tables.
        level: the depth in the tree of prefixes; each level is one pass of attention.
    """

    members: _Ints
    first: int
    end: int
    level: int


@names
def shared_prefixes(
    block_table: Tensor | NDArray[np.integer],
    seqlens_k: Tensor | NDArray[np.integer],
    cu_seqlens_q: Tensor | NDArray[np.integer],
    *,
    block_size: int,
    min_blocks: int = 8,
    max_levels: int = 2,
    device: torch.device | str | None = None,
    **unknown: Never,
) -> SharedPrefixes | None:
    """Find sequences that share leading blocks, from the block tables alone.

    Of the tree that the tables form, those groups are taken that save the most reads, nested at
    most `max_levels` deep. A block that holds a new token is in no prefix, so every new token of
    a group sees all of what it shares.

    Args:
        block_table, seqlens_k, cu_seqlens_q: as `paged_attention` takes them, on the host: arrays
            or CPU tensors (an engine has them there).
        block_size: tokens of a cache block.
        min_blocks: blocks that a group must share, at least; below some hundred tokens a pass of
            its own costs more than it saves.
        max_levels: passes over shared keys, each with a launch and a merge of its own.
        device: the device of the result; None is the CPU.

    Returns:
        SharedPrefixes, or None where no two sequences share min_blocks blocks.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.

    Source: Hydragen (Juravsky et al. 2024), section 3; cascade attention (Ye et al. 2024).

    Example:
        >>> shared = shared_prefixes(table.cpu(), lengths.cpu(), cu.cpu(), block_size=16,
        ...                          device="cuda")
    """
    if unknown:
        raise unknown_keyword(shared_prefixes, unknown)
    table = _on_host("block_table", block_table, "(B, max_blocks)")
    lengths = _on_host("seqlens_k", seqlens_k, "(B)").astype(np.int64)
    edges = _on_host("cu_seqlens_q", cu_seqlens_q, "(B + 1)").astype(np.int64)
    _check_lengths(table, lengths, edges)
    for name, value in (
        ("block_size", block_size),
        ("min_blocks", min_blocks),
        ("max_levels", max_levels),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    runs = np.diff(edges)
    limits = np.where(runs > 0, np.maximum(lengths - runs, 0) // block_size, 0)
    groups = _find_groups(table, np.minimum(limits, table.shape[1]), min_blocks, max_levels)
    if not groups:
        return None
    skipped = np.zeros(len(table), np.int64)
    for group in groups:
        skipped[group.members] = np.maximum(skipped[group.members], group.end * block_size)
    levels = []
    for level in range(max(group.level for group in groups) + 1):
        chosen = [group for group in groups if group.level == level]
        levels.append(_make_level(chosen, table, edges, block_size, device))
    saved = sum((len(g.members) - 1) * (g.end - g.first) for g in groups) * block_size
    return SharedPrefixes(_int32(skipped, device), tuple(levels), saved, block_size)


def _on_host(name: str, values: Tensor | NDArray[np.integer], layout: str) -> NDArray[np.integer]:
    if isinstance(values, Tensor):
        checks.check_device(name, values, torch.device("cpu"))
        values = values.numpy()
    if values.ndim != layout.count(",") + 1:
        raise ValueError(f"{name} must be {layout}, got shape {values.shape}")
    if not np.issubdtype(values.dtype, np.integer):
        raise TypeError(f"{name} must have an integer dtype, got {values.dtype}")
    return values


def _check_lengths(table: _Ints, lengths: _Ints, edges: _Ints) -> None:
    for name, values, wanted in (
        ("seqlens_k", lengths, len(table)),
        ("cu_seqlens_q", edges, len(table) + 1),
    ):
        if len(values) != wanted:
            raise ValueError(f"{name} must have {wanted} entries, got {len(values)}")


def _find_groups(table: _Ints, limits: _Ints, min_blocks: int, max_levels: int) -> list[_Group]:
    """Return the groups of sequences that save the most reads of blocks, [] if none shares enough.

    Args:
        table: (B, max_blocks), the block tables.
        limits: (B,), the number of leading blocks of each sequence that may be shared.
        min_blocks, max_levels: as in `shared_prefixes`.
    """
    candidates = np.flatnonzero(limits >= min_blocks)
    if len(candidates) < 2:
        return []
    firsts = np.sort(table[candidates, 0])
    if (firsts[1:] != firsts[:-1]).all():  # as in most batches: no two begin with the same block
        return []
    heads, counts = np.unique(firsts, return_counts=True)
    candidates = candidates[np.isin(table[candidates, 0], heads[counts > 1])]
    if len(candidates) < 2:
        return []
    width = int(limits[candidates].max())
    rows = table[candidates, :width].astype(np.int32)
    rows[np.arange(width) >= limits[candidates, None]] = -1
    # In whatever order bytes compare, sequences with a prefix in common end up side by side.
    places = sorted(range(len(rows)), key=[row.tobytes() for row in rows].__getitem__)
    order, rows = candidates[places], rows[places]
    differs = rows[1:] != rows[:-1]
    alike = np.where(differs.any(1), differs.argmax(1), width)
    alike = np.minimum(alike, np.minimum(limits[order[1:]], limits[order[:-1]]))

    def best(first: int, last: int, start: int, level: int) -> tuple[int, list[_Group]]:
        """Return the most reads of blocks that groups among some sequences save, and the groups.

        Args:
            first, last: the range of the sequences in sorted order, all of which begin with the
                same `start` blocks.
            start: the blocks that groups of earlier levels read already.
            level: the level of the next group.
        """
        common = int(alike[first : last - 1].min())
        # Groups within that share little more are not told apart: it bounds the search.
        deeper = alike[first : last - 1] >= common + max(min_blocks, common // 8)
        parts = [(first + a, first + b + 1) for a, b in _runs_of(deeper)]
        apart = _joined(best(a, b, start, level) for a, b in parts)
        if level == max_levels or common - start < min_blocks:
            return apart
        saved, groups = _joined(best(a, b, common, level + 1) for a, b in parts)
        saved += (last - first - 1) * (common - start)
        if saved <= apart[0]:
            return apart
        return saved, [_Group(np.sort(order[first:last]), start, common, level), *groups]

    parts = [(a, b + 1) for a, b in _runs_of(alike >= min_blocks)]
    return _joined(best(a, b, 0, 0) for a, b in parts)[1]


def _joined(parts: Iterable[tuple[int, list[_Group]]]) -> tuple[int, list[_Group]]:
    saved, groups = 0, []
    for more, found in parts:
        saved += more
        groups += found
    return saved, groups


def _runs_of(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return a pair (first, end) of indices, end excluded, for each run of True in flags."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def _make_level(
    groups: list[_Group],
    table: _Ints,
    edges: _Ints,
    block_size: int,
    device: torch.device | str | None,
) -> SharedLevel:
    counts = np.array([group.end - group.first for group in groups])
    blocks = np.zeros((len(groups), counts.max()), np.int64)
    rows = []
    for index, group in enumerate(groups):
        blocks[index, : counts[index]] = table[group.members[0], group.first : group.end]
        rows.append(np.concatenate([np.arange(edges[b], edges[b + 1]) for b in group.members]))
    sizes = [len(own) for own in rows]
    return SharedLevel(
        block_table=_int32(blocks, device),
        seqlens_k=_int32(counts * block_size, device),
        cu_seqlens_q=_int32(np.concatenate([[0], np.cumsum(sizes)]), device),
        rows=_int32(np.concatenate(rows), device),
        max_rows=max(sizes),
    )


def _int32(values: _Ints, device: torch.device | str | None) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device or "cpu")
