"""Files behind main memory: what is read at admission, and what is forgotten. No torch.

Every group has a store of its own (`swap_space.BlockStore`): what main memory gives away of
a group goes there by content, and a prompt that is admitted reads what makes its hit longer. A hit
is what every group has, on the device, in main memory or in its store; of a group with a window
only what the query behind the hit sees is read, so that of a long prompt few files are.

Content says the first block of its prefix, not its parent: of a group with a window files in the
middle of a prefix may be the only ones, and what a failure makes unfindable is a first block and
all behind it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from tilewise.cache.contents import child_digest, content_of, path_to, root_digest
from tilewise.cache.prefix import PrefixNode, first_block, pack
from tilewise.engine.request import Sequence
from tilewise.engine.tables.holdings import Holdings

__all__ = ["forget_files", "read_files"]


class _Place(NamedTuple):
    """One block of a prompt.

    Attributes:
        tokens: the tokens of the block, packed.
        at_hand: a bool for each group: whether the block is on the device or in main memory.
        in_store: a bool for each group: whether its store has the block.
    """

    tokens: bytes
    at_hand: tuple[bool, ...]
    in_store: tuple[bool, ...]


def forget_files(tables: Holdings, seq: Sequence) -> None:
    """Remove from all stores the files of blocks whose prefix begins with a sequence's first
    block."""
    memory, size = tables.memory, tables.block_size
    if memory is None or seq.num_tokens < size:
        return
    tokens = pack(seq.token_ids[:size])
    digest = child_digest(root_digest(seq.request.salt), tokens)
    for store in memory.stores:
        store.forget(digest)


def read_files(tables: Holdings, seq: Sequence) -> None:
    """Read files of blocks into main memory where they make a sequence's prefix hit longer.

    Reading ends when main memory is full or a file is invalid; blocks read until then stay.
    """
    memory, prefix, size = tables.memory, tables.prefix, tables.block_size
    if memory is None or prefix is None or not memory.stores or memory.is_paused:
        return
    places, ends = _look(tables, seq)
    if ends:
        found = len(prefix.find(seq.token_ids, seq.request.salt, in_slots=True))
        ends = [end for end in ends if end > found]
    if not ends:
        return
    firsts = [[first_block(end * size, w, size) for w in prefix.windows] for end in ends]

    def lacks(place: int) -> list[list[int]]:
        """Return the blocks of each group that hit number `place` needs and only files have."""
        return [
            [i for i in range(first, ends[place]) if not places[i].at_hand[group]]
            for group, first in enumerate(firsts[place])
        ]

    node = _chain(tables, seq, places)
    nodes = path_to(node)
    prefix.hold(node)
    pins = [
        [n.slots[g] for n in nodes if n.slots[g] >= 0] for g in range(len(memory.rooms))
    ]  # not to be given away for those that are read
    for room, slots in zip(memory.rooms, pins, strict=True):
        room.allocator.share(slots)

    def has_room(place: int) -> bool:
        return all(
            len(some) <= room.allocator.num_free
            for some, room in zip(lacks(place), memory.rooms, strict=True)
        )

    best = _last(len(ends), has_room)
    if best is not None:
        _read(tables, nodes, lacks(best), pins)
    for room, slots in zip(memory.rooms, pins, strict=True):
        room.allocator.release(slots)
    prefix.drop(node)
    prefix.version += 1


def _look(tables: Holdings, seq: Sequence) -> tuple[list[_Place], list[int]]:
    """Return the blocks of a prompt, up to the first that is nowhere, and the lengths of possible
    hits.

    Lengths count blocks, ascending: a hit of that many blocks is found on the device, in main
    memory or in files.
    """
    memory, prefix, size = tables.memory, tables.prefix, tables.block_size
    assert memory is not None
    assert prefix is not None
    node, digest = prefix.root(seq.request.salt), root_digest(seq.request.salt)
    runs, places, ends = [0] * len(prefix.windows), list[_Place](), list[int]()
    for i in range((seq.num_tokens - 1) // size):
        tokens = pack(seq.token_ids[i * size : (i + 1) * size])
        digest = child_digest(digest, tokens)
        node = None if node is None else node.children.get(tokens)
        groups = range(len(prefix.windows))
        at_hand = tuple(
            node is not None and max(node.blocks[g], node.slots[g]) >= 0 for g in groups
        )
        in_store = tuple(
            not there and store.has(digest)
            for there, store in zip(at_hand, memory.stores, strict=True)
        )
        places.append(_Place(tokens, at_hand, in_store))
        is_hit = True
        for g, window in enumerate(prefix.windows):
            runs[g] = runs[g] + 1 if at_hand[g] or in_store[g] else 0
            is_hit &= runs[g] >= i + 1 - first_block((i + 1) * size, window, size)
            if window is None and not runs[g]:
                return places[:i], ends
        if is_hit:
            ends.append(i + 1)
    return places, ends


def _chain(tables: Holdings, seq: Sequence, places: list[_Place]) -> PrefixNode:
    """Return the prefix cache's node of the last of a prompt's `places`, making nodes that are
    missing."""
    prefix, size = tables.prefix, tables.block_size
    assert prefix is not None
    node: PrefixNode | None = None
    for i in range(len(places)):
        tokens = seq.token_ids[i * size : (i + 1) * size]
        node = prefix.child(node, seq.request.salt, tokens)
    assert node is not None
    return node


def _last(count: int, holds: Callable[[int], bool]) -> int | None:
    """Return the last of `count` places for which `holds` is True; None if there is none.

    `holds` must be True up to some place and False after it.
    """
    found = bisect_right(range(count), False, key=lambda place: not holds(place))
    return found - 1 if found else None


def _read(
    tables: Holdings,
    nodes: list[PrefixNode],
    lacking: list[list[int]],
    pins: list[list[int]],
) -> None:
    """Load blocks from the stores into slots of main memory, enter them into their nodes and pin
    them.

    It ends with the first block that a store cannot load.

    Args:
        nodes: the nodes of the prompt's blocks.
        lacking: the indices of the blocks to load, for each group.
        pins: the pinned slots of each group, to which those loaded are added.
    """
    memory = tables.memory
    assert memory is not None
    for group, (room, places) in enumerate(zip(memory.rooms, lacking, strict=True)):
        for i in places:
            [slot] = room.allocator.allocate(1)
            if not memory.stores[group].load(content_of(nodes[i]), slot):
                room.allocator.release([slot])
                return
            nodes[i].slots[group], room.node_at[slot] = slot, nodes[i]
            room.allocator.mark_cached(slot)
            pins[group].append(slot)
