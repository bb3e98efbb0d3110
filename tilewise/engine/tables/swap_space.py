"""Blocks in main memory: of sequences that were swapped out, and of prefixes gone cold. No torch.

Each group of layers has a pool of slots, which serves both:

    swapped     a sequence keeps of each group what the query at its next token sees, in all groups
                or in none. These slots have an owner until the sequence is back
    cold        a block of a prefix that is given away on the device goes to a slot; the node of its
                content (`cache.prefix`) lists the slot beside the blocks, and a hit is what every
                group has in a block or in a slot. These slots have no owner; the least recently
                used of a group gives way, to a file if there is a store

What moves is told by the batch: `going` (device block, slot) before anything else of the step,
`coming` (slot, device block) after that and before copies and writes. A slot of either is pinned
until its step has finished, so nothing is read from it too early or written to it meanwhile. A
device block that is read may be written by the same step at the earliest, and after it was read.

Source: Kwon et al. 2023, "Efficient Memory Management for LLM Serving with PagedAttention",
section 4.5: swapping, all samples of a request or none.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from tilewise.cache.allocator import BlockAllocator
from tilewise.cache.contents import Content, content_of
from tilewise.cache.prefix import PrefixCache, PrefixNode
from tilewise.engine.batch import Batch
from tilewise.engine.request import Sequence

__all__ = ["BlockStore", "SlotRoom", "SwapSpace", "Transfers", "slots_of", "spread"]

Transfers = tuple[tuple[int, int], ...]


def spread(
    failed: Batch, later: Iterable[tuple[Transfers, Transfers, Transfers]]
) -> tuple[set[int], set[int]]:
    """Return the device blocks and slots that are wrong after a step's transfers have failed.

    Args:
        failed: the batch of the failed step.
        later: the moves since then, in turn: (block, slot), (slot, block), (block, its copy).
    """
    blocks = {block for _, block in failed.swap_in}
    slots = {slot for _, slot in failed.swap_out}
    for going, coming, copied in later:
        slots |= {slot for block, slot in going if block in blocks}
        blocks |= {block for slot, block in coming if slot in slots}
        blocks |= {copy for source, copy in copied if source in blocks}
    return blocks, slots


class BlockStore(Protocol):
    """A store of blocks that main memory has no room for; a block is found by its content."""

    def save(self, content: Content, slot: int) -> None:
        """Store the block in a slot of main memory, which has been read when this returns. Never
        fails."""
        ...

    def has(self, digest: bytes) -> bool:
        """Return whether the store has a block of this digest; load() may fail nevertheless."""
        ...

    def load(self, content: Content, slot: int) -> bool:
        """Read the block of this content into a slot of main memory; return whether it was found.

        An absent or damaged block is not found.
        """
        ...

    def forget(self, digest: bytes) -> None:
        """Remove a block, by its digest, and all blocks that follow it in their prefixes."""
        ...

    def clear(self) -> None:
        """Remove all blocks, as after a change of weights."""
        ...


@dataclass(slots=True)
class SlotRoom:
    """The slots of one group of layers in main memory, and their moves in the next step.

    Attributes:
        allocator: the free slots, and the number of owners of the others; a slot is `cached` while
            it holds a cold prefix's block.
        going: pairs (device block, slot) that the next batch copies to main memory.
        coming: the slots that the next batch copies to the device, by device block.
        pins: the slots of `going` and `coming`, which must not be given away before that.
        fences: the pins of each unfinished step, the oldest first.
        node_at: the node of the prefix that each cold slot holds.
    """

    allocator: BlockAllocator
    going: list[tuple[int, int]] = field(default_factory=list)
    coming: dict[int, int] = field(default_factory=dict)
    pins: list[int] = field(default_factory=list)
    fences: deque[list[int]] = field(default_factory=deque)
    node_at: dict[int, PrefixNode] = field(default_factory=dict)


class SwapSpace:
    """Slots of main memory for every group, and what is to move in the next step.

    Args:
        num_slots: the number of slots of each group.
        prefix: the prefix cache, whose evicted blocks are kept in main memory; None keeps none.
        stores: the store of each group, to which cold blocks go when main memory is full; () drops
            them.

    Attributes:
        num_recalled: the number of blocks of prefix hits that came from main memory, in one group
            at least, since the start.
    """

    def __init__(
        self,
        num_slots: Seq[int],
        prefix: PrefixCache | None,
        stores: Seq[BlockStore] = (),
    ) -> None:
        self.stores = tuple(stores) if prefix is not None else ()
        self.rooms = [SlotRoom(BlockAllocator(count)) for count in num_slots]
        for group, room in enumerate(self.rooms):
            room.allocator.on_evict = partial(self._evict, group)
        self.prefix = prefix
        if prefix is not None:
            prefix.keeper = self
        self.num_recalled = 0
        self._is_paused = False

    @property
    def is_paused(self) -> bool:
        """Whether transfers are paused: no block is kept in main memory then, and none is found
        there."""
        return self._is_paused

    @is_paused.setter
    def is_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        if self.prefix is not None:
            self.prefix.version += 1  # what was found before is not now, or the other way round

    @property
    def num_used(self) -> int:
        """Slots of all groups that hold blocks of swapped sequences or of transfers that have not
        finished."""
        return sum(room.allocator.num_used for room in self.rooms)

    @property
    def num_cold(self) -> int:
        """Slots of all groups that hold a block of a prefix."""
        return sum(len(room.node_at) for room in self.rooms)

    @property
    def is_moving(self) -> bool:
        """Whether the next step moves a block."""
        return any(room.going or room.coming for room in self.rooms)

    # What moves

    def begin_step(self) -> list[tuple[Transfers, Transfers]]:
        """Return for each group the moves of the step that begins now: (block, slot) out, (slot,
        block) back.

        Their slots are pinned until the step has finished.
        """
        moved: list[tuple[Transfers, Transfers]] = []
        for room in self.rooms:
            coming = tuple((slot, block) for block, slot in room.coming.items())
            moved.append((tuple(room.going), coming))
            room.fences.append(room.pins)
            room.going, room.coming, room.pins = [], {}, []
        return moved

    def end_step(self, index: int) -> None:
        """Note that unfinished step `index`, 0 the oldest, has finished or was taken back.

        The slots that it pinned become free, or wait for the older step that is unfinished.
        """
        for room in self.rooms:
            pins = room.fences[index]
            del room.fences[index]
            if index == 0:
                room.allocator.release(pins)
            else:
                room.fences[index - 1] += pins

    def bring(self, group: int, slot: int, block: int) -> None:
        """Let the next step copy a slot of a group to a device block; the slot is pinned until
        then."""
        room = self.rooms[group]
        room.allocator.share([slot])
        room.pins.append(slot)
        room.coming[block] = slot

    def cancel(self) -> list[list[int]]:
        """Cancel all moves of the next step, as there may be none; return each group's unfilled
        blocks.

        These are device blocks that were to be filled from main memory.
        """
        unfilled = [list(room.coming) for room in self.rooms]
        for group, room in enumerate(self.rooms):
            self.forget_slots(group, [slot for _, slot in room.going])
            room.going, room.coming, pins = [], {}, room.pins
            room.pins = []
            room.allocator.release(pins)
        return unfilled

    # Sequences

    def swap_out(self, family: list[Sequence], held: list[list[list[int]]]) -> bool:
        """Let the next step copy blocks of sequences to slots, in every group, or do nothing.

        The sequences note their slots, and the number of their computed tokens.

        Args:
            family: the sequences; they still hold their blocks.
            held: the table of each sequence in each group up to its computed tokens, with -1 for a
                block that is not kept.

        Returns:
            Whether there was room; False also while transfers are paused.
        """
        if self._is_paused:
            return False
        wanted = [
            sorted({block for tables in held for block in tables[group] if block >= 0})
            for group in range(len(self.rooms))
        ]
        for room, blocks in zip(self.rooms, wanted, strict=True):
            if len(blocks) > room.allocator.num_free or any(b in room.coming for b in blocks):
                return False
        slot_of: list[dict[int, int]] = []
        for room, blocks in zip(self.rooms, wanted, strict=True):
            slots = sorted(room.allocator.allocate(len(blocks)))
            slot_of.append(dict(zip(blocks, slots, strict=True)))
            room.going += slot_of[-1].items()
            room.pins += slots  # the owners are added now
        for seq, tables in zip(family, held, strict=True):
            kept = [
                [slots.get(block, -1) for block in table]
                for slots, table in zip(slot_of, tables, strict=True)
            ]
            seq.swap_slots, seq.other_swap_slots = kept[0], kept[1:]
            seq.num_swapped_tokens = seq.num_computed_tokens
            for room, slots in zip(self.rooms, kept, strict=True):
                room.allocator.share([slot for slot in slots if slot >= 0])
        return True

    def drop(self, seq: Sequence) -> None:
        """Release a sequence's slots: it is back on the device, has ended, or is to be
        recomputed."""
        for room, slots in zip(self.rooms, slots_of(seq), strict=False):
            room.allocator.release([slot for slot in slots if slot >= 0])
        seq.swap_slots, seq.other_swap_slots, seq.num_swapped_tokens = [], [], 0

    # Cold prefixes

    def keep(self, group: int, block: int, node: PrefixNode) -> None:
        """Let the next step copy a cached device block, which is evicted, to main memory if there
        is room.

        If a slot has the block already, nothing is copied and the slot counts as just used.

        Args:
            group: the number of the group of layers.
            block: the device block.
            node: the block's node in the prefix cache.
        """
        room = self.rooms[group]
        slot = node.slots[group]
        if block in room.coming:  # not there yet; where it comes from has it still
            del room.coming[block]
        elif slot >= 0:
            room.allocator.share([slot])  # it was used just now
            room.allocator.release([slot])
        elif room.allocator.num_free and not self._is_paused:
            [slot] = room.allocator.allocate(1)
            node.slots[group], room.node_at[slot] = slot, node
            room.allocator.mark_cached(slot)
            room.going.append((block, slot))
            room.pins.append(slot)

    def take_off(self, group: int, node: PrefixNode) -> None:
        """Free the slot in main memory that keeps a group's block of a node, if there is one."""
        slot = node.slots[group]
        if slot >= 0:
            assert self.prefix is not None
            room = self.rooms[group]
            del room.node_at[slot]
            room.allocator.unmark_cached(slot)
            node.slots[group] = -1
            self.prefix.version += 1  # those that wait look again

    def forget_slots(self, group: int, slots: Iterable[int]) -> None:
        """Remove the prefix blocks in slots of a group from the prefix cache: their contents never
        arrived."""
        for slot in slots:
            node = self.rooms[group].node_at.get(slot)
            if node is not None:
                assert self.prefix is not None
                self.take_off(group, node)
                self.prefix.prune(node)

    def check_integrity(self, waiting: list[Sequence], blocks_for: int) -> None:
        """Verify that owners, pins and nodes agree.

        Args:
            waiting: the sequences that wait, some of them swapped out.
            blocks_for: the number of tokens of a block.

        Raises:
            AssertionError: names the invariant that is broken.
        """
        for group, room in enumerate(self.rooms):
            pool = room.allocator
            pool.check_integrity()
            kept = [slots_of(seq)[group] for seq in waiting if seq.swap_slots]
            owners = Counter(slot for slots in kept for slot in slots if slot >= 0)
            for pins in (room.pins, *room.fences):
                owners.update(pins)
            slots = range(pool.num_blocks)
            rules = [
                (
                    {s: n for s in slots if (n := pool.ref_count(s))} == owners,
                    "a slot's owners are swapped sequences and transfers",
                ),
                (
                    {s for s in slots if pool.is_cached(s)} == set(room.node_at),
                    "slots of cold prefixes are marked",
                ),
                (
                    all(node.slots[group] == s for s, node in room.node_at.items()),
                    "a slot holds the content that is found there",
                ),
                (
                    all(
                        len(slots_of(s)[group]) == -(-s.num_swapped_tokens // blocks_for)
                        for s in waiting
                        if s.swap_slots
                    ),
                    "what is kept of a sequence is kept whole",
                ),
            ]
            for holds, rule in rules:
                if not holds:
                    raise AssertionError(f"broken invariant: {rule}")

    def _evict(self, group: int, slot: int) -> None:
        """Give the slot of a cold prefix's block away, after its store, if there is one, has saved
        the block."""
        assert self.prefix is not None
        node = self.rooms[group].node_at.pop(slot)
        if self.stores:
            self.stores[group].save(content_of(node), slot)
        node.slots[group] = -1
        self.prefix.version += 1
        self.prefix.prune(node)


def slots_of(seq: Sequence) -> list[list[int]]:
    """Return the slots of a swapped-out sequence in each group, block by block; [] for any other.

    A slot is -1 for a block that the group's window has passed.
    """
    return [seq.swap_slots, *seq.other_swap_slots] if seq.swap_slots else []
