"""Blocks in main memory: of sequences that were swapped out, and of prefixes gone cold. No torch.

One pool of slots serves both. Slots of a swapped sequence have an owner until it is back; those of
a cold prefix have none, and the least recently used gives way, to a file if there is a directory.

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
from typing import Protocol

from tilewise.cache.allocator import BlockAllocator
from tilewise.cache.contents import Content, Contents, Node, child_digest
from tilewise.cache.prefix import PrefixCache
from tilewise.engine.batch import Batch
from tilewise.engine.request import Sequence

__all__ = ["BlockStore", "SwapSpace", "Transfers", "spread"]

Transfers = tuple[tuple[int, int], ...]


def spread(
    failed: Batch, later: Iterable[tuple[Transfers, Transfers, Transfers]]
) -> tuple[set[int], set[int]]:
    """Return what does not hold what its owners think after a step's transfers have failed.

    Args:
        failed: the step.
        later: what moved since then, in turn: (block, slot), (slot, block), (block, its copy).

    Returns:
        Device blocks, and slots.
    """
    blocks = {block for _, block in failed.swap_in}
    slots = {slot for _, slot in failed.swap_out}
    for going, coming, copied in later:
        slots |= {slot for block, slot in going if block in blocks}
        blocks |= {block for slot, block in coming if slot in slots}
        blocks |= {copy for source, copy in copied if source in blocks}
    return blocks, slots


class BlockStore(Protocol):
    """Keeps blocks that main memory has no room for, found by content."""

    def save(self, content: Content, slot: int) -> None:
        """Keep what a slot holds; the slot is read before this returns. Never fails."""
        ...

    def has(self, digest: bytes) -> bool:
        """Return whether load() is worth trying."""
        ...

    def load(self, content: Content, slot: int) -> bool:
        """Fill a slot with exactly this content, and return whether it was there and whole."""
        ...

    def forget(self, digest: bytes) -> None:
        """Drop a block and all that follow it."""
        ...

    def clear(self) -> None:
        """Drop everything."""
        ...


class SwapSpace:
    """Slots of main memory and what is to move in the next step.

    Args:
        num_slots: blocks of main memory.
        block_size: tokens per block.
        prefix: the cache whose evicted blocks are kept; None keeps none.
        store: where cold blocks go when main memory is full; None lets go of them.

    Attributes:
        allocator: owners of slots; a slot is `cached` while it holds a cold prefix's block.
        going: (device block, slot) of the next batch.
        coming: slots of the next batch by device block.
        num_recalled: blocks that were found here, since the start.
        is_paused: nothing is kept, and nothing found, as transfers fail.
    """

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        prefix: PrefixCache | None = None,
        store: BlockStore | None = None,
    ) -> None:
        self.allocator = BlockAllocator(num_slots)
        self.allocator.on_evict = self._evict
        self.block_size, self.prefix, self.store = block_size, prefix, store
        self.contents = Contents()
        self.going: list[tuple[int, int]] = []
        self.coming: dict[int, int] = {}
        self.num_recalled = 0
        self.is_paused = False
        self._pins: list[int] = []  # one for each of going and coming
        self._fences: deque[list[int]] = deque()  # the same of unfinished steps
        self._node_at: dict[int, Node] = {}  # by slot
        self._node_of: dict[int, Node] = {}  # by device block, where it is known
        if prefix is not None:
            prefix.on_evict = self.keep

    @property
    def num_used(self) -> int:
        """Slots of swapped sequences, and those of transfers that have not finished."""
        return self.allocator.num_used

    @property
    def num_cold(self) -> int:
        """Slots that hold a block of a prefix."""
        return len(self._node_at)

    # What moves

    def begin_step(self) -> tuple[Transfers, Transfers]:
        """Return what the step that begins now moves out, and in."""
        moved = tuple(self.going), tuple((slot, block) for block, slot in self.coming.items())
        self._fences.append(self._pins)
        self.going, self.coming, self._pins = [], {}, []
        return moved

    def end_step(self, index: int) -> None:
        """Note that unfinished step `index`, 0 the oldest, has finished or never will."""
        pins = self._fences[index]
        del self._fences[index]
        if index == 0:
            self.allocator.release(pins)
        else:
            self._fences[index - 1] += pins

    def bring(self, slot: int, block: int) -> None:
        """Copy a slot to a device block in the next step."""
        self.allocator.share([slot])
        self._pins.append(slot)
        self.coming[block] = slot

    def cancel(self) -> list[int]:
        """Move nothing, as there may be no next step; return the blocks that will not be filled."""
        unfilled = list(self.coming)
        self.forget_slots([slot for _, slot in self.going])
        self.going, self.coming, pins = [], {}, self._pins
        self._pins = []
        self.allocator.release(pins)
        return unfilled

    # Sequences

    def swap_out(self, family: list[Sequence]) -> bool:
        """Keep what all the sequences have computed, or nothing.

        Returns:
            Whether there was room; the sequences still hold their blocks.
        """
        size = self.block_size
        held = [s.block_ids[: -(-s.num_computed_tokens // size)] for s in family]
        blocks = sorted({block for some in held for block in some})
        is_full = len(blocks) > self.allocator.num_free
        if self.is_paused or is_full or any(b in self.coming for b in blocks):
            return False
        slots = sorted(self.allocator.allocate(len(blocks)))
        slot_of = dict(zip(blocks, slots, strict=True))
        self.going += slot_of.items()
        self._pins += slots  # the owners are added now
        for seq, some in zip(family, held, strict=True):
            seq.swap_slots = [slot_of[block] for block in some]
            seq.num_swapped_tokens = seq.num_computed_tokens
            self.allocator.share(seq.swap_slots)
        return True

    def drop(self, seq: Sequence) -> None:
        """Let go of what is kept of a sequence: it is back, has ended, or is computed again."""
        self.allocator.release(seq.swap_slots)
        seq.swap_slots, seq.num_swapped_tokens = [], 0

    # Cold prefixes

    def keep(self, block: int) -> None:
        """Keep a cached device block that is about to be given away."""
        node = self._name(block)
        if block in self.coming:  # not there yet; where it comes from has it still
            del self.coming[block]
        elif node.slot is not None:
            self.allocator.share([node.slot])  # it was used just now
            self.allocator.release([node.slot])
        elif self.allocator.num_free and not self.is_paused:
            [slot] = self.allocator.allocate(1)
            self._put(node, slot)
            self.going.append((block, slot))
            self._pins.append(slot)
        self._unname(block)  # not before: the slot may have been that of the last who needs it
        self.contents.prune(node)

    def recall(self, seq: Sequence, first: int, last: int) -> list[int]:
        """Return slots that hold blocks first, first + 1 ... last - 1 of a sequence, while found.

        Each has one owner more: the caller.
        """
        if self.is_paused or (not len(self.contents) and self.store is None):
            return []
        size, salt = self.block_size, seq.request.salt
        node = self.contents.root(salt)
        slots: list[int] = []
        for i in range(last):
            tokens = PrefixCache.pack(seq.token_ids[i * size : (i + 1) * size])
            if i >= first:
                slot = self._find(node, tokens)
                if slot is None:
                    break
                slots.append(slot)
            elif self.store is None and tokens not in node.children:
                break
            node = self.contents.child(node, tokens)
        self.contents.prune(node)
        self.num_recalled += len(slots)
        return slots

    def forget(self, seq: Sequence) -> None:
        """Drop all that begins with the first block of a sequence."""
        if seq.num_tokens < self.block_size:
            return
        tokens = PrefixCache.pack(seq.token_ids[: self.block_size])
        root = self.contents.root(seq.request.salt)
        node = self.contents.child(root, tokens)
        if self.store is not None:
            self.store.forget(node.digest)
        self._forget_below(node)

    def forget_slots(self, slots: Iterable[int]) -> None:
        """Drop the prefixes' blocks in these slots: what was to go there has not arrived."""
        for slot in slots:
            node = self._node_at.get(slot)
            if node is not None:
                self._take_off(node)
                self.contents.prune(node)

    def forget_blocks(self, blocks: Iterable[int]) -> None:
        """Forget what device blocks are called: the prefix cache has forgotten them."""
        for block in blocks:
            if block in self._node_of:
                node = self._node_of[block]
                self._unname(block)
                self.contents.prune(node)

    def clear(self) -> None:
        """Drop all prefixes, as after a change of weights."""
        if self.store is not None:
            self.store.clear()
        for node in self.contents.all():
            self._take_off(node)
        self.contents = Contents()
        self._node_of.clear()

    def check_integrity(self, waiting: list[Sequence]) -> None:
        """Verify that owners, pins and names agree.

        Raises:
            AssertionError: names the invariant that is broken.
        """
        self.allocator.check_integrity()
        owners = Counter(slot for seq in waiting for slot in seq.swap_slots)
        for pins in (self._pins, *self._fences):
            owners.update(pins)
        nodes = self.contents.all()
        at = {node.slot: node for node in nodes if node.slot is not None}
        held = Counter(map(id, self._node_of.values()))
        slots = range(self.allocator.num_blocks)
        rules = [
            (
                {s: n for s in slots if (n := self.allocator.ref_count(s))} == owners,
                "a slot's owners are swapped sequences and transfers",
            ),
            (at == self._node_at, "a slot holds the content that is found there"),
            (
                {slot for slot in slots if self.allocator.is_cached(slot)} == set(at),
                "slots of cold prefixes are marked",
            ),
            (all(node.holders == held[id(node)] for node in nodes), "names are counted"),
            (
                all(n.children or n.holders or n.slot is not None for n in nodes),
                "no content is kept for nothing",
            ),
            (
                all(
                    len(s.swap_slots) == -(-s.num_swapped_tokens // self.block_size)
                    for s in waiting
                ),
                "what is kept of a sequence is kept whole",
            ),
        ]
        for holds, rule in rules:
            if not holds:
                raise AssertionError(f"broken invariant: {rule}")

    def _find(self, parent: Node, tokens: bytes) -> int | None:
        """Return the slot of a block after its parent, read from the store if it is there."""
        node = parent.children.get(tokens)
        if node is not None and node.slot is not None:
            self.allocator.share([node.slot])
            return node.slot
        if self.store is None or not self.allocator.num_free:
            return None
        if not self.store.has(child_digest(parent.digest, tokens)):
            return None
        parent.holders += 1  # what is evicted for the slot must not take the names along
        [slot] = self.allocator.allocate(1)
        node = self.contents.child(parent, tokens)
        parent.holders -= 1
        if not self.store.load(node.content(), slot):
            self.allocator.release([slot])
            self.contents.prune(node)
            return None
        self._put(node, slot)
        return slot

    def _name(self, block: int) -> Node:
        """Return the content of a cached device block; names those before it, too."""
        assert self.prefix is not None
        chain: list[tuple[int, bytes]] = []
        at: int | str = block
        while not isinstance(at, str) and at not in self._node_of:
            parent, tokens = self.prefix.key(at)
            chain.append((at, tokens))
            at = parent
        node = self.contents.root(at) if isinstance(at, str) else self._node_of[at]
        for named, tokens in reversed(chain):
            node = self.contents.child(node, tokens)
            node.holders += 1
            self._node_of[named] = node
        return node

    def _unname(self, block: int) -> None:
        self._node_of.pop(block).holders -= 1

    def _put(self, node: Node, slot: int) -> None:
        node.slot, self._node_at[slot] = slot, node
        self.allocator.mark_cached(slot)

    def _take_off(self, node: Node) -> None:
        if node.slot is not None:
            del self._node_at[node.slot]
            self.allocator.unmark_cached(node.slot)
            node.slot = None

    def _forget_below(self, node: Node) -> None:
        for each in reversed(self.contents.below(node)):
            self._take_off(each)
            self.contents.prune(each)

    def _evict(self, slot: int) -> None:
        """Give the slot of a cold block away; the store keeps what it holds."""
        node = self._node_at.pop(slot)
        if self.store is not None:
            self.store.save(node.content(), slot)
        node.slot = None
        self.contents.prune(node)
