"""Which cache blocks each sequence holds: reserve, extend, fork, release. No torch.

The only writer of Sequence.block_ids. It keeps three promises to the steps that it prepares:

    exclusive writer  a block that is written has one owner; a shared one is copied first
    still sources     no copy's source is another copy's destination, so copies have no order
    fences            a block that is released while steps are unfinished keeps an owner, the newest
                      of these steps, until that one has finished: no step reads or writes a block
                      that got another owner meanwhile

A sequence whose prefix hit ends inside a block holds that cached block in its table until it writes
there (`inside`). With a `SwapSpace` the contents of blocks go to main memory and come back; a batch
lists what moves.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from tilewise.cache.allocator import BlockAllocator
from tilewise.cache.prefix import PrefixCache
from tilewise.engine.batch import Batch
from tilewise.engine.record.trace import Trace
from tilewise.engine.request import Sequence
from tilewise.engine.tables.checks import check_blocks
from tilewise.engine.tables.inside import begin_inside, num_common
from tilewise.engine.tables.one_group import OneGroup
from tilewise.engine.tables.swap_space import BlockStore, SwapSpace, Transfers, spread

__all__ = ["BlockTables"]


class _Match(NamedTuple):
    """What the prefix cache had for a sequence when it was last asked.

    Attributes:
        stamps: of the blocks; while one has its own, it and those before it are what they were.
        refused_room: blocks that were free and not spare when these were too few; -1 if they were
            not. With as few, or fewer, they still are.
    """

    seq: Sequence
    blocks: list[int]
    stamps: list[int]
    refused_room: int = -1


class BlockTables(OneGroup):
    """Give sequences their blocks and take them back.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block.
        enable_prefix_caching: keep full blocks findable by content.
        num_swap_blocks: blocks of main memory for what is swapped out and for cold prefixes.
        store: where cold prefixes go from there; None lets go of them.

    Attributes:
        trace: what happens to the blocks.
        swap: None without main memory.
        num_merged: blocks that gave way to older ones of equal content.
        blocks_peak: the most blocks that a step ever used.
        slots_peak: slots of them that held a token in the first such step.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        num_swap_blocks: int = 0,
        store: BlockStore | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks)
        self.prefix = PrefixCache(self.allocator, block_size) if enable_prefix_caching else None
        self.trace = Trace(num_blocks, block_size)
        self.trace.watch(self.allocator)
        self.swap: SwapSpace | None = None
        if num_swap_blocks:
            self.swap = SwapSpace(num_swap_blocks, block_size, self.prefix, store)
        self.num_merged = 0
        self.blocks_peak = 0
        self.slots_peak = 0
        self._copies: list[tuple[int, int]] = []
        self._sources: Counter[int] = Counter()  # of these copies, owned without an unfinished step
        self._fences: deque[list[int]] = deque()  # one for each unfinished step, the oldest first
        self._read: deque[list[int]] = deque()  # the same, for sources that the prefix cache knows
        self._matched: _Match | None = None

    def blocks_for(self, num_tokens: int) -> int:
        """Return ceil(num_tokens / block_size)."""
        return -(-num_tokens // self.block_size)

    @property
    def has_fenced(self) -> bool:
        """Whether blocks become free when unfinished steps finish."""
        return any(self._fences) or any(self._read)

    def begin_step(self) -> tuple[Transfers, Transfers]:
        """Note that a step may use any block that has an owner now.

        Returns:
            What it moves out and in: (device block, slot) and (slot, device block).
        """
        self._fences.append([])
        self._read.append([])
        return ((), ()) if self.swap is None else self.swap.begin_step()

    def end_step(self, index: int) -> None:
        """Note that a step has finished, or never will: unfinished step `index`, 0 the oldest.

        What was let go of since it began stays with the step before it, if that is unfinished.
        """
        blocks, read = self._fences[index], self._read[index]
        del self._fences[index], self._read[index]
        if index == 0:
            for some in (read, blocks):  # a source before its parent, which may be in `blocks`
                self.allocator.release(some)
                self.trace.free(some)
        else:
            self._fences[index - 1] += blocks
            self._read[index - 1] += read
        if self.swap is not None:
            self.swap.end_step(index)

    def missing_blocks(self, seq: Sequence, spare: int) -> int:
        """Return how many blocks must become free before reserve() can succeed; 0 is now."""
        return max(0, self._demand(seq, self._match(seq)) + spare - self.allocator.num_free)

    def refuses(self, seq: Sequence, spare: int) -> bool:
        """Return whether reserve() would give a sequence nothing now."""
        return self._is_refused(seq, self._match(seq), self.allocator.num_free - spare)

    def reserve(self, seq: Sequence, spare: int) -> bool:
        """Give a sequence without blocks all those that its known tokens need, or none.

        The whole prompt is reserved even if only a chunk of it runs now: two half-computed prompts
        could otherwise each wait for the blocks of the other. What the prefix cache has is shared
        and counts as computed.

        Args:
            seq: it waits.
            spare: blocks that must stay free.

        Returns:
            Whether the blocks were there.
        """
        hits, room = self._match(seq), self.allocator.num_free - spare
        if self._is_refused(seq, hits, room):
            return False
        self._matched = None
        self.allocator.share(hits)
        num_fresh = self.blocks_for(seq.num_tokens) - len(hits)
        seq.num_registered_blocks = len(hits)
        if self.swap is None or self.prefix is None or seq.scores_prompt:
            seq.block_ids = hits + self.allocator.allocate(num_fresh)
        else:
            last = (seq.num_tokens - 1) // self.block_size
            slots = self.swap.recall(seq, len(hits), last)  # before a block is kept in their place
            seq.block_ids = hits + self.allocator.allocate(num_fresh)
            self._fill(seq, slots)
        inside = begin_inside(self, seq, spare, is_fresh=True)
        known = seq.num_registered_blocks * self.block_size + inside
        seq.num_computed_tokens = seq.num_scheduled_tokens = known
        if self.prefix is not None:
            self.prefix.count(seq.num_tokens, seq.num_computed_tokens)
        return True

    def _fill(self, seq: Sequence, slots: list[int]) -> None:
        """Let the next step copy slots to a sequence's blocks, from the first unknown one on."""
        assert self.swap is not None
        assert self.prefix is not None
        size, blocks = self.block_size, seq.block_ids
        for i, slot in enumerate(slots, start=seq.num_registered_blocks):
            parent = blocks[i - 1] if i else seq.request.salt
            kept = self.prefix.register(blocks[i], parent, seq.token_ids[i * size : (i + 1) * size])
            assert kept == blocks[i], "what is found in main memory only is not on the device"
            self.swap.bring(slot, blocks[i])
        self.swap.allocator.release(slots)  # pinned now by what moves
        seq.num_registered_blocks += len(slots)

    def swap_in(self, group: list[Sequence], spare: int) -> bool:
        """Swap in all samples of a request that were swapped out, or none.

        Contents that the prefix cache still holds are shared and not moved.

        Args:
            group: the samples; they wait, and share slots with no other sequence.
            spare: blocks that must stay free; with some, those that the samples need next, too.

        Returns:
            Whether the blocks were there.
        """
        assert self.swap is not None
        size, pool = self.block_size, self.allocator
        found: list[list[int]] = []
        for seq in group:
            hits = [] if self.prefix is None else self.prefix.match(seq.token_ids, seq.request.salt)
            found.append(hits[: seq.num_swapped_tokens // size])
        fresh = dict.fromkeys(
            slot
            for seq, hits in zip(group, found, strict=True)
            for slot in seq.swap_slots[len(hits) :]
        )
        revived = {b for hits in found for b in hits if pool.ref_count(b) == 0}
        needed = len(fresh) + len(revived)
        if spare:
            grown = (self.blocks_for(s.num_tokens) - len(s.swap_slots) for s in group)
            needed += spare + sum(grown)
        if needed > pool.num_free:
            return False
        for hits in found:
            pool.share(hits)
        slots = sorted(fresh)
        block_of = dict(zip(slots, sorted(pool.allocate(len(slots))), strict=True))
        for slot, block in block_of.items():
            self.swap.bring(slot, block)
        owned: set[int] = set()
        for seq, hits in zip(group, found, strict=True):
            rest = [block_of[slot] for slot in seq.swap_slots[len(hits) :]]
            pool.share([block for block in rest if block in owned])
            owned.update(rest)
            seq.block_ids = hits + rest
            seq.num_registered_blocks = len(hits)
            seq.num_computed_tokens = seq.num_scheduled_tokens = seq.num_swapped_tokens
            seq.shares_tail = len(group) > 1
            self.swap.drop(seq)
        return True

    def swap_out(self, family: list[Sequence]) -> bool:
        """Keep in main memory what all the sequences have computed, or nothing.

        Returns:
            Whether there was room; the sequences still hold their blocks.
        """
        return self.swap is not None and self.swap.swap_out(family)

    def num_kept(self, family: list[Sequence]) -> tuple[int, ...]:
        """Return how many blocks of each group of layers swapping the sequences out would move."""
        size = self.block_size
        return (len({b for s in family for b in s.block_ids[: -(-s.num_computed_tokens // size)]}),)

    def is_coming(self, seq: Sequence) -> bool:
        """Whether the next step brings some of a sequence's blocks from main memory."""
        if self.swap is None or not self.swap.coming:
            return False
        return not self.swap.coming.keys().isdisjoint(seq.block_ids)

    def drop_swapped(self, seq: Sequence) -> None:
        """Let go of what main memory keeps of a sequence that waits."""
        if self.swap is not None and seq.swap_slots:
            self.swap.drop(seq)

    def cancel_transfers(self) -> None:
        """Cancel all moves: no sequence is unfinished, so there may be no further step."""
        if self.swap is not None:
            self._forget_blocks(self.swap.cancel())

    def revoke(
        self, batch: Batch, later: list[Batch], running: list[Sequence], waiting: list[Sequence]
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Remove from the prefix cache what a failed step was to move, and all copies made of it.

        Args:
            batch: of the failed step.
            later: of the steps that began after it and are unfinished.
            running: sequences that hold blocks.
            waiting: those that hold none.

        Returns:
            The running and the waiting sequences whose blocks and slots lack their contents.
        """
        if self.swap is None:
            return [], []
        pending = [(b.swap_out, b.swap_in, b.block_copies) for b in later]
        coming = tuple((slot, block) for block, slot in self.swap.coming.items())
        pending.append((tuple(self.swap.going), coming, ()))
        blocks, slots = spread(batch, pending)
        self.swap.forget_slots(slots)
        self._forget_blocks(sorted(blocks))
        return (
            [seq for seq in running if not blocks.isdisjoint(seq.block_ids)],
            [seq for seq in waiting if not slots.isdisjoint(seq.swap_slots)],
        )

    def _forget_blocks(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.prefix is not None and self.allocator.is_cached(block):
                forgotten = self.prefix.forget(block)
                self.trace.note("forget", tuple(forgotten))
                if self.swap is not None:
                    self.swap.forget_blocks(forgotten)

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes, wherever they are; no block has an owner."""
        if self.prefix is not None:
            self.prefix.reset()
        if self.swap is not None:
            self.swap.clear()

    def extend(self, seq: Sequence, end: int) -> bool:
        """Make positions num_scheduled_tokens ... end - 1 writable by this sequence alone.

        Only the first block to be written can be shared: by samples of one request that forked in
        its middle, of which the last writes in place, or because its beginning was found in the
        prefix cache. The others write to a copy.

        Returns:
            Whether the blocks were there; if not, nothing has changed.
        """
        blocks, size = seq.block_ids, self.block_size
        first = seq.num_scheduled_tokens // size
        is_found = first < len(blocks) and self.allocator.is_cached(blocks[first])
        shared = first < len(blocks) and self.allocator.ref_count(blocks[first]) > 1
        if shared and self._sources:  # those who have just got copies own the source no more
            shared = self.allocator.ref_count(blocks[first]) - self._sources[blocks[first]] > 1
        shared = shared or is_found
        grown = -(-end // size) - len(blocks)
        if not shared and grown <= 0:
            seq.shares_tail = False
            return True
        grown = max(grown, 0)
        if shared + grown > self.allocator.num_free:
            return False
        if shared:
            source = blocks[first]
            [copy] = self.allocator.allocate(1)
            self._copies.append((source, copy))
            blocks[first] = copy
            self.trace.note("copy", seq.seq_id, first, source, copy)
            seq.num_told_blocks = min(seq.num_told_blocks, first)
            # While steps are unfinished, the other owners may be fences that end before this copy.
            if not self._fences:
                self._sources[source] += 1
        seq.shares_tail = False
        if grown:
            blocks += self.allocator.allocate(grown)
            self.trace.note("extend", seq.seq_id, tuple(blocks[-grown:]))
        return True

    def fork(self, parent: Sequence, child: Sequence, gone: Sequence | None = None) -> None:
        """Let a new sequence start from all that its parent has computed.

        Args:
            gone: a sequence that is released next. The child takes over its ownership of the blocks
                that it shares with the parent: of a long text nearly all. Only while no step is
                unfinished: blocks released during a step are freed together, in an order in which
                the rest of `gone` would come after what the child releases meanwhile.
        """
        common = 0
        if gone is not None and not self._fences:
            common = num_common(parent.block_ids, gone.block_ids)
            self.trace.free(gone.block_ids[:common])
            del gone.block_ids[:common]
        self.allocator.share(parent.block_ids[common:] if common else parent.block_ids)
        parent.shares_tail = child.shares_tail = True
        child.block_ids = list(parent.block_ids)
        child.num_registered_blocks = parent.num_registered_blocks
        child.is_doubtful = parent.is_doubtful
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_scheduled_tokens = parent.num_scheduled_tokens

    def release(self, seq: Sequence) -> None:
        """Take a sequence's blocks back; what the prefix cache knows of them it keeps."""
        self.let_go(seq.block_ids)
        seq.block_ids = []
        seq.shares_tail = seq.is_doubtful = False
        seq.num_registered_blocks = seq.num_told_blocks = 0
        seq.num_computed_tokens = seq.num_scheduled_tokens = seq.num_pending = 0

    def truncate(self, seq: Sequence) -> None:
        """Let go of the blocks behind the scheduled tokens, which were for drafts."""
        blocks, kept = seq.block_ids, self.blocks_for(seq.num_scheduled_tokens)
        if kept < len(blocks):
            self.trace.note("cut", seq.seq_id, kept)
            self.let_go(blocks[kept:])
            del blocks[kept:]
            seq.num_told_blocks = min(seq.num_told_blocks, kept)

    def register(self, seq: Sequence) -> None:
        """Make the blocks that became full findable; adopt an older block of equal content."""
        size, blocks = self.block_size, seq.block_ids
        num_full = seq.num_computed_tokens // size
        if self.prefix is None or seq.is_doubtful or num_full == seq.num_registered_blocks:
            return
        written = tuple(blocks[seq.num_registered_blocks : num_full])
        for i in range(seq.num_registered_blocks, num_full):
            parent = blocks[i - 1] if i else seq.request.salt
            if self.allocator.is_cached(blocks[i]):
                continue  # another sample has told of it, with which it came from main memory
            tokens = seq.token_ids[i * size : (i + 1) * size]
            kept = self.prefix.register(blocks[i], parent, tokens)
            if kept != blocks[i]:
                self.allocator.share([kept])
                self.let_go([blocks[i]])
                blocks[i] = kept
                self.num_merged += 1
                seq.num_told_blocks = min(seq.num_told_blocks, i)
        kept_blocks = tuple(blocks[seq.num_registered_blocks : num_full])
        self.trace.note("register", seq.seq_id, seq.num_registered_blocks, written, kept_blocks)
        seq.num_registered_blocks = num_full

    def forget(self, family: list[Sequence], holders: list[Sequence]) -> None:
        """Remove from the prefix cache all that the samples of one request have computed or found.

        Sequences that hold such blocks keep them, and none of their own blocks is cached any more:
        what is computed from a damaged block is damaged.

        Args:
            family: the samples, ended and waiting ones included.
            holders: sequences that hold blocks.
        """
        if self.prefix is None:
            return
        forgotten: set[int] = set()
        for seq in family:
            whole = [*seq.token_ids, 0]  # match() leaves out the last one
            chain = self.prefix.match(whole[: self.block_size + 1], seq.request.salt)
            if chain:
                forgotten |= self.prefix.forget(chain[0])
        self.trace.note("forget", tuple(forgotten))
        if self.swap is not None:
            self.swap.forget_blocks(forgotten)
            for seq in family:
                self.swap.forget(seq)
        for seq in holders:
            known = seq.block_ids[: seq.num_registered_blocks]
            kept = next((i for i, block in enumerate(known) if block in forgotten), len(known))
            if kept < len(known):
                seq.num_registered_blocks, seq.is_doubtful = kept, True

    def adopt(self, seq: Sequence) -> int:
        """Share blocks of a prompt that were cached since its sequence got its own.

        It releases its own blocks in their places, whatever they hold. No unfinished step computes
        anything of the sequence.

        Returns:
            How many more tokens are computed than before.
        """
        prefix, blocks, size = self.prefix, seq.block_ids, self.block_size
        first, before = seq.num_registered_blocks, seq.num_computed_tokens
        if prefix is None or seq.is_doubtful or seq.scores_prompt:
            return 0
        found = prefix.match(seq.token_ids, seq.request.salt, blocks[:first])
        if len(found) * size < before:  # more came back from main memory than is known
            return 0
        if len(found) > first:
            self.allocator.share(found[first:])
            self.let_go(blocks[first : len(found)])
            blocks[first : len(found)] = found[first:]
            seq.num_registered_blocks = len(found)
        inside = begin_inside(self, seq, 0, is_fresh=False)
        taken = tuple(blocks[first : len(found) + (inside > 0)])
        if not taken:
            return 0
        self.trace.note("hit", seq.seq_id, first, taken)
        seq.num_told_blocks = min(seq.num_told_blocks, first)
        seq.num_computed_tokens = seq.num_scheduled_tokens = len(found) * size + inside
        prefix.count(0, seq.num_computed_tokens - before)
        return seq.num_computed_tokens - before

    def next_content(self, seq: Sequence) -> tuple[int | str, tuple[int, ...]] | None:
        """Return the content of the first full block of known tokens that is not cached yet.

        Two sequences with equal contents write equal blocks there. None if there is no such block,
        or the sequence's contents are in doubt.
        """
        first, size = seq.num_registered_blocks, self.block_size
        if self.prefix is None or seq.is_doubtful or (first + 1) * size > len(seq.token_ids):
            return None
        parent = seq.block_ids[first - 1] if first else seq.request.salt
        return parent, tuple(seq.token_ids[first * size : (first + 1) * size])

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Return the copies (source, destination) of the step, which has begun, and forget them.

        While the step is built, a source stays owned by the sequences it is copied for, so that it
        becomes no other copy's destination even if all others that share it are preempted. If steps
        are unfinished or it has no other owner, it stays owned until this step has finished.
        """
        copies = tuple(self._copies)
        self._copies.clear()
        self._sources.clear()
        sources = {source for source, _ in copies}
        for source, _ in copies:
            if len(self._fences) > 1 or self.allocator.ref_count(source) == 1:
                known = self.allocator.is_cached(source)
                (self._read if known else self._fences)[-1].append(source)
            else:
                self.allocator.release([source])
                self.trace.free([source])
        assert sources.isdisjoint(copy for _, copy in copies), "a source is never a destination"
        return copies

    def note_peak(self, holders: list[Sequence], num_empty: int | None = None) -> None:
        """Remember the step just scheduled if it uses more blocks than any before.

        Args:
            holders: sequences that hold blocks.
            num_empty: slots of these without a token, if it is known and no last block is shared.
        """
        if self.allocator.num_used > self.blocks_peak:
            self.blocks_peak = self.allocator.num_used
            size, empty = self.block_size, num_empty or 0
            rest: dict[Sequence, int] = {}
            for seq in holders if num_empty is None else ():  # nearly all end in one of their own
                scheduled = seq.num_scheduled_tokens
                room = len(seq.block_ids) * size - scheduled
                if room < size and not seq.shares_tail:
                    empty += room
                else:
                    rest[seq] = scheduled
            self.slots_peak = self.slots_used(rest) - empty

    def slots_used(self, computed: dict[Sequence, int]) -> int:
        """Return how many slots of used blocks hold a token; shared blocks count once.

        Args:
            computed: tokens in the cache of each sequence that holds blocks.
        """
        size = self.block_size
        empty: dict[int, int] = {}
        for seq, num_tokens in computed.items():
            for i in range(num_tokens // size, len(seq.block_ids)):
                if self.allocator.is_cached(seq.block_ids[i]):
                    continue  # full, of which this sequence wants the beginning
                filled = min(size, max(0, num_tokens - i * size))
                empty[seq.block_ids[i]] = size - filled  # the same for all that share the block
        return self.allocator.num_used * size - sum(empty.values())

    def check_integrity(self, holders: list[Sequence], waiting: list[Sequence]) -> None:
        """Verify that the tables of the sequences that hold blocks agree with pool and cache.

        Raises:
            AssertionError: names the invariant that is broken.
        """
        check_blocks(self, holders, waiting)

    def let_go(self, blocks: list[int]) -> None:
        """Release blocks as soon as no step that has begun is unfinished."""
        if self._fences:
            self._fences[-1] += blocks
        else:
            self.allocator.release(blocks)
            self.trace.free(blocks)

    def _match(self, seq: Sequence) -> list[int]:
        """Return the cached blocks that a sequence begins with.

        The first in the queue asks in every step, so what it found before is remembered. A sequence
        whose prompt is scored needs the rows of the whole prompt, so it is given none.
        """
        prefix, last = self.prefix, self._matched
        if prefix is None or seq.scores_prompt:
            return []
        known: list[int] = []
        stamps: list[int] = []
        if last is not None and last.seq is seq:
            known, stamps = last.blocks, last.stamps
            kept = len(known)
            while kept and prefix.stamp(known[kept - 1]) != stamps[kept - 1]:
                kept -= 1  # evicted since, the last ones first
            if kept < len(known):
                known, stamps = known[:kept], stamps[:kept]
        blocks = prefix.match(seq.token_ids, seq.request.salt, known)
        if last is not None and last.blocks is known and len(blocks) == len(known):
            return known
        stamps = stamps + [prefix.stamp(block) for block in blocks[len(known) :]]
        self._matched = _Match(seq, blocks, stamps)
        return blocks

    def _is_refused(self, seq: Sequence, hits: list[int], room: int) -> bool:
        """Whether a sequence that begins with cached blocks `hits` needs more than `room` others.

        Counting the hits that are free is left for when more blocks are free than at the last time.
        """
        if self.blocks_for(seq.num_tokens) - len(hits) > room:
            return True
        last = self._matched
        is_known = last is not None and last.blocks is hits
        if last is not None and is_known and room <= last.refused_room:
            return True
        if self._demand(seq, hits) <= room:
            return False
        if last is not None and is_known:
            self._matched = last._replace(refused_room=room)
        return True

    def _demand(self, seq: Sequence, hits: list[int]) -> int:
        """Blocks that reserving would take from the free list: new ones and revived ones."""
        revived = sum(self.allocator.ref_count(block) == 0 for block in hits)
        return self.blocks_for(seq.num_tokens) - len(hits) + revived
