"""Where the blocks of a sequence are in each group of layers, and the groups' pools. No torch."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from tilewise.cache.allocator import BlockAllocator
from tilewise.cache.grouped_prefix import PrefixNode

__all__ = ["Places", "Pool"]


@dataclass(slots=True)
class Places:
    """Where the blocks of a sequence are, beside `Sequence.block_ids`.

    Attributes:
        tables: of groups 1, 2, ...; that of the first is the sequence's.
        told: leading blocks of these that a batch has told, and that have not changed since.
        gone: of every group, leading blocks that the sequence has no more.
        node: of its last known block.
    """

    tables: list[list[int]]
    told: list[int]
    gone: list[int]
    node: PrefixNode | None = None


@dataclass(slots=True)
class Pool:
    """Blocks of one group.

    Attributes:
        allocator: their owners.
        window: of the group's layers; None for all keys.
        copies: (source, destination) of the next step.
        sources: of these copies, what they own beside no step.
        fences: blocks that wait for unfinished steps, one list for each, the oldest first.
    """

    allocator: BlockAllocator
    window: int | None
    copies: list[tuple[int, int]] = field(default_factory=list)
    sources: Counter[int] = field(default_factory=Counter)
    fences: deque[list[int]] = field(default_factory=deque)
