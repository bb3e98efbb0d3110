"""Which cache blocks each sequence holds: reserve, extend, fork, release. No torch.

The only writer of Sequence.block_ids. Every group of layers has a pool, and every sequence a table
in each. Block i of any of its tables is of the same tokens, i * block_size and on. Most models are
one group that keeps every token; what is done for each step of such a model is short.

In each pool it keeps three promises to the steps that it prepares:

    exclusive writer   a block that is written has one owner; a shared one is copied first
    still sources      no copy's source is another copy's destination, so copies have no order
    fences             a block that is released while steps are unfinished keeps an owner, the
                       newest of these steps, until that one has finished: no step reads or writes a
                       block that got another owner meanwhile

and between the pools:

    behind the window  a block that no later query of its sequence sees is released when the
                       sequence begins its next block. Its number stays in the table for a step that
                       is unfinished or run again; later steps do not read it
    all or none        a sequence gets the blocks of a step in all groups, or in none
    a hit is common    a prefix counts as cached if every group has it, see `cache.prefix`, and
                       there is a checkpoint of the states at its end, see `state_tables`. The
                       block inside which a hit ends is shared, too, until the sequence writes
                       there; then it is copied, in every group (`inside`)

At admission a sequence gets blocks for all known tokens in a group without a window. In a group
with a window it gets as many as its layers need at any time: those of a window and of a step. From
then on it releases a block for each that it takes. If a released block has other owners no block
becomes free, and the sequence may lack one like any other; the first in order is served first, as
the proof in `scheduler` needs.

With main memory (`swap_space`) a swap keeps the blocks that the query at the next token sees in
each group, and a prefix is found if every group has it in the cache or in main memory. A batch
lists what moves.

The events of a trace, and counts of blocks in stats, are those of the first group.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from tilewise.cache.prefix import PrefixNode, first_block
from tilewise.engine.batch import Batch
from tilewise.engine.request import Sequence
from tilewise.engine.tables.admission import window_blocks
from tilewise.engine.tables.checks import check_tables
from tilewise.engine.tables.files import forget_files, read_files
from tilewise.engine.tables.holdings import Holdings, Places
from tilewise.engine.tables.inside import begin_inside, num_common
from tilewise.engine.tables.moves import (
    bring_back,
    count_lacking,
    count_seen,
    revoke_moves,
    seen,
    take,
)
from tilewise.engine.tables.state_tables import StateTables
from tilewise.engine.tables.swap_space import BlockStore, Transfers

__all__ = ["BlockTables", "Content"]


# Of a block: the block before it, or the salt of a first one, and its tokens.
Content = tuple[PrefixNode | str, tuple[int, ...]]


@dataclass(slots=True)
class _Match:
    """The result of the last search of the prefix cache for a sequence.

    Attributes:
        seq: the sequence that was searched for.
        nodes: the nodes of the cached blocks that its tokens begin with.
        version: the prefix cache's version at the search; `nodes` hold while the cache has it.
        refused_room: the number of free blocks, without those kept spare, with which the sequence
            was last refused; with as many or fewer it is refused again without a search. -1 if it
            was not refused.
    """

    seq: Sequence
    nodes: list[PrefixNode]
    version: int
    refused_room: int = -1


class BlockTables(Holdings):
    """Give sequences their blocks in every group of layers and take them back.

    The arguments are those of `Holdings`.

    Attributes:
        num_merged: blocks that gave way to older ones of equal content.
        blocks_peak: the most blocks of the first group that a step ever used.
        slots_peak: slots of these blocks that held a token in the first such step.
        on_full: a function that is called with the prefix cache's node of each block that becomes
            full and is new there; None calls nothing.
    """

    def __init__(
        self,
        num_blocks: Seq[int],
        block_size: int,
        windows: Seq[int | None],
        max_run: int,
        enable_prefix_caching: bool,
        num_swap_blocks: Seq[int] = (),
        stores: Seq[BlockStore] = (),
        states: StateTables | None = None,
    ) -> None:
        super().__init__(
            num_blocks,
            block_size,
            windows,
            max_run,
            enable_prefix_caching,
            num_swap_blocks,
            stores,
            states,
        )
        self.num_merged = 0
        self.blocks_peak = self.slots_peak = 0
        self._matched: _Match | None = None
        self.on_full: Callable[[PrefixNode], None] | None = None  # of each new full block
        self._moves: list[tuple[Transfers, Transfers]] = []

    @property
    def prefix_counts(self) -> tuple[int, int]:
        """The number of tokens of all admitted sequences, and of those that the prefix cache
        had."""
        return (self.prefix.num_query_tokens, self.prefix.num_hit_tokens) if self.prefix else (0, 0)

    @property
    def num_free(self) -> int:
        """The number of free blocks of the group that has the fewest."""
        return min(pool.allocator.num_free for pool in self.pools)

    @property
    def groups_used(self) -> tuple[tuple[int, int], ...]:
        """The blocks with an owner and all blocks, for each of groups 1, 2, ..."""
        pools = [pool.allocator for pool in self.pools[1:]]
        return tuple((pool.num_used, pool.num_blocks) for pool in pools)

    @property
    def has_fenced(self) -> bool:
        """Whether released blocks or checkpoints wait for an unfinished step, to become free after
        it."""
        if self.states is not None and self.states.has_fenced:
            return True
        return any(any(pool.fences) or any(pool.read) for pool in self.pools)

    def begin_step(self) -> tuple[Transfers, Transfers]:
        """Note that a step begins, which may use any block that has an owner now.

        Returns:
            The moves of the first group in this step: (block, slot) to main memory, and (slot,
            block) back.
        """
        for pool in self.pools:
            pool.fences.append([])
            pool.read.append([])
        if self.memory is None:
            return (), ()
        first, *self._moves = self.memory.begin_step()
        return first

    def take_other_moves(self) -> tuple[tuple[Transfers, Transfers], ...]:
        """Return the moves of the step that began last, to and from main memory, in groups 1, 2,
        ...."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def end_step(self, index: int) -> None:
        """Record that an unfinished step has ended or was taken back; index 0 is the oldest.

        Blocks that were released since it began become free, unless an older step is unfinished:
        they then wait for that one.
        """
        for number, pool in enumerate(self.pools):
            blocks, read = pool.fences[index], pool.read[index]
            del pool.fences[index], pool.read[index]
            if index == 0:
                self.release_now(number, read)  # a source before its parent, which may be in blocks
                self.release_now(number, blocks)
            else:
                pool.fences[index - 1] += blocks
                pool.read[index - 1] += read
        if self.memory is not None:
            self.memory.end_step(index)
        if self.states is not None:
            self.states.end_step(index)

    def parent_of(self, block: int) -> int:
        """Return the block before a block of the first group in its prefix; -1 for a first or
        unknown one."""
        return self.prefix.parent_of(block) if self.prefix else -1

    def tell(self, seq: Sequence) -> tuple[tuple[list[int], int], ...]:
        """Return for groups 1, 2, ... a sequence's block table and the index of its first new
        block.

        A batch tells them; all of these blocks count as told from now on. () for a single group.
        """
        if self.is_one_group:
            return ()
        places = self.places[seq]
        others = tuple(zip(places.tables, places.told, strict=True))
        places.told = [len(table) for table in places.tables]
        return others

    def _lacks_checkpoint(self, hits: list[PrefixNode]) -> bool:
        """Return whether a hit's checkpoint is in main memory alone, and the device has no free
        one.

        All checkpoints of the device are then read by steps.
        """
        states = self.states
        if states is None or not hits or hits[-1].blocks[states.group] >= 0:
            return False
        return self.allocator_of(states.group).num_free == 0

    def missing_blocks(self, seq: Sequence, spare: int) -> int:
        """Return the number of blocks that must become free, in the scarcest group, before
        reserve() works.

        0 if it works now. `spare` blocks must stay free in each group.
        """
        needs = self._demands(seq, self._match(seq))
        lacking = (
            need + spare - pool.allocator.num_free
            for need, pool in zip(needs, self.pools, strict=True)
        )
        return max(0, *lacking, self._lacks_checkpoint(self._match(seq)))

    def refuses(self, seq: Sequence, spare: int) -> bool:
        """Return whether reserve() would give a sequence nothing now; nothing is changed."""
        return self._is_refused(seq, self._match(seq), spare)

    def reserve(self, seq: Sequence, spare: int) -> bool:
        """Give a sequence without blocks those of its known tokens, or in a group with a window
        those of a window and a step.

        Without a window the whole prompt is reserved even if only a chunk of it runs now: two
        half-computed prompts could otherwise each wait for the blocks of the other. What the prefix
        cache has in every group is shared and counts as computed.

        Args:
            seq: the sequence, which waits.
            spare: blocks that must stay free in each group.

        Returns:
            Whether enough blocks were free; if not, the sequence has none.
        """
        has_files = self.memory is not None and bool(self.memory.stores)
        if has_files and not seq.scores_prompt and self.missing_blocks(seq, spare) == 0:
            read_files(self, seq)
        hits = self._match(seq)
        if self._is_refused(seq, hits, spare):
            return False
        self._matched = None
        if hits:
            assert self.prefix is not None
            self.prefix.hold(hits[-1])  # before others' blocks are evicted for the new ones
            if self.memory is not None:
                self.memory.num_recalled += count_lacking(self, hits)
        tables, gone, size = list[list[int]](), list[int](), self.block_size
        for number, pool in enumerate(self.pools):
            first = first_block(len(hits) * size, pool.window, size)
            count = self._end(seq, number, first, len(hits)) - len(hits)
            found, fresh = take(self, number, hits[first:], count)
            tables.append([0] * first + found + fresh)
            gone.append(first)
        seq.block_ids = tables[0]
        node = hits[-1] if hits else None
        self.places[seq] = Places(tables[1:], [0] * (len(tables) - 1), gone, node)
        seq.num_registered_blocks = len(hits)
        if self.states is not None:
            self._begin_state(seq, hits)
        inside = begin_inside(self, seq, spare, is_fresh=True)
        seq.num_computed_tokens = seq.num_scheduled_tokens = len(hits) * size + inside
        if self.prefix is not None:
            self.prefix.count(seq.num_tokens, seq.num_computed_tokens)
        return True

    def _begin_state(self, seq: Sequence, hits: list[PrefixNode]) -> None:
        """Give a sequence a slot of states, which is filled from the checkpoint at the end of a
        hit.

        Args:
            seq: the sequence, which is being admitted.
            hits: the nodes of the cached blocks with which it begins.
        """
        states, checkpoint = self.states, -1
        assert states is not None
        if hits:
            [checkpoint], _ = take(self, states.group, hits[-1:], 0)
        states.admit(seq, len(hits) * self.block_size, checkpoint)

    def shares(self, seq: Sequence, writer: Sequence) -> bool:
        """Return whether a sequence gains by waiting for its next block until `writer` has written
        it.

        Both have the same tokens in this block. Without states the answer is True.

        With states the two must agree as far as the next place of a checkpoint.

        Args:
            seq: the sequence that might wait for the block.
            writer: the sequence that writes the block.
        """
        if self.states is None:
            return True
        first, unit = seq.num_registered_blocks * self.block_size, self.states.unit
        end = (seq.num_computed_tokens // unit + 1) * unit
        return end < seq.num_tokens and seq.token_ids[first:end] == writer.token_ids[first:end]

    def cut(self, seq: Sequence, num_tokens: int) -> int:
        """Return the number of next tokens of a sequence to run, at most `num_tokens`.

        In a model with states a run ends at the next place where a checkpoint is wanted.
        """
        states, prefix = self.states, self.prefix
        if states is None or prefix is None or seq.is_doubtful or num_tokens < 2:
            return num_tokens
        node, first = self.places[seq].node, seq.num_registered_blocks
        depth = prefix.depth(seq.token_ids, seq.request.salt, node, first)
        return states.cut(seq, num_tokens, depth)

    def swap_out(self, family: list[Sequence]) -> bool:
        """Let the next step copy the blocks that sequences need to continue to main memory, all or
        none.

        Nothing is copied if a later step has released a block that one of them needs.

        Returns:
            Whether main memory had room; the sequences still hold their blocks.
        """
        if self.memory is None or any(map(self.has_passed, family)):
            return False
        return self.memory.swap_out(family, [seen(self, seq) for seq in family])

    def num_kept(self, family: list[Sequence]) -> tuple[int, ...]:
        """Return the number of blocks, for each group, that would move if the sequences were
        swapped out."""
        return count_seen(self, family)

    def has_passed(self, seq: Sequence) -> bool:
        """Return whether blocks that a sequence's next token sees were released already, or its
        state has left the token's chunk.

        A later step, unfinished or taken back, has released them behind its window.
        """
        if self.states is not None and self.states.has_passed(seq):
            return True
        return any(
            gone > first_block(seq.num_computed_tokens, pool.window, self.block_size)
            for gone, pool in zip(self.places[seq].gone, self.pools, strict=True)
        )

    def swap_in(self, group: list[Sequence], spare: int) -> bool:
        """Give all swapped-out samples of a request blocks, which the next step fills, or none of
        them.

        Contents that the prefix cache still holds are shared and not moved; all full blocks that
        come back are findable from then on.

        Args:
            group: the samples; they wait, and share slots with no other sequence.
            spare: blocks that must stay free in each group; with some, those that the samples need
                next, too.

        Returns:
            Whether enough blocks were free; if not, nothing has changed.
        """
        return bring_back(self, group, spare)

    def is_coming(self, seq: Sequence) -> bool:
        """Return whether the next step fills blocks, or the state, of a sequence from main
        memory."""
        if self.memory is None:
            return False
        held = [self.held(seq, number) for number in range(len(self.pools))]
        if self.states is not None:
            held.append(self.states.restores_of(seq))
        return any(
            room.coming and not room.coming.keys().isdisjoint(blocks)
            for blocks, room in zip(held, self.memory.rooms, strict=False)
        )

    def drop_swapped(self, seq: Sequence) -> None:
        """Free the slots of main memory that hold a waiting sequence's swapped blocks."""
        if self.memory is not None and seq.swap_slots:
            self.memory.drop(seq)

    def cancel_transfers(self) -> None:
        """Cancel the moves of the next step, as no sequence is unfinished and there may be no
        further step.

        Blocks that were to be filled leave the prefix cache.
        """
        if self.memory is not None:
            for number, blocks in enumerate(self.memory.cancel()):
                self.forget_blocks(number, blocks)

    def revoke(
        self, batch: Batch, later: list[Batch], running: list[Sequence], waiting: list[Sequence]
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Remove the blocks that a failed step was to move from the prefix cache, with their
        copies.

        Args:
            batch: the batch of the failed step.
            later: the batches of the unfinished steps that began after it.
            running: the sequences that hold blocks.
            waiting: the sequences that hold none.

        Returns:
            The running sequences whose blocks, and the waiting ones whose slots in main memory,
            have not got their contents. The caller must recompute them.
        """
        return revoke_moves(self, batch, later, running, waiting)

    def extend(self, seq: Sequence, end: int) -> bool:
        """Make positions num_scheduled_tokens ... end - 1 writable by this sequence alone.

        Only the first block to be written can be shared: by samples of one request that forked in
        its middle, of which the last writes in place, or because its beginning was found in the
        prefix cache. The others write to a copy. Blocks behind the window of the first of these
        positions are let go of in any case.

        Returns:
            Whether enough blocks were free in all groups; if not, the sequence's tables have not
            changed.
        """
        size, start = self.block_size, seq.num_scheduled_tokens
        first = start // size
        if self.is_one_group and first == len(seq.block_ids):  # nothing of its own to be copied
            return self._grow(seq, self.blocks_for(end) - first)
        plans: list[tuple[bool, int]] = []
        has_room = True
        for number, pool in enumerate(self.pools):
            if pool.window is not None:
                self._pass(seq, number, first_block(start, pool.window, size))
            table = self.table(seq, number)
            owners = pool.allocator.ref_count(table[first]) if first < len(table) else 1
            if owners > 1:  # those who have just got copies own the source no more
                owners -= pool.sources[table[first]]
            grown = max(0, self.blocks_for(end) - len(table))
            is_found = first < len(table) and pool.allocator.is_cached(table[first])
            plans.append((owners > 1 or is_found, grown))
            has_room &= (owners > 1 or is_found) + grown <= pool.allocator.num_free
        if not has_room:
            return False
        for number, (is_shared, grown) in enumerate(plans):
            if is_shared:
                self._copy(seq, number, first)
            if grown:
                table = self.table(seq, number)
                table += self.pools[number].allocator.allocate(grown)
                if number == 0:
                    self.trace.note("extend", seq.seq_id, tuple(table[-grown:]))
        seq.shares_tail = False
        return True

    def _grow(self, seq: Sequence, count: int) -> bool:
        """Add `count` new blocks to a sequence in a cache of one group; return whether they were
        free."""
        if count > self.allocator.num_free:
            return False
        blocks = self.allocator.allocate(count)
        seq.block_ids += blocks
        seq.shares_tail = False
        self.trace.note("extend", seq.seq_id, tuple(blocks))
        return True

    def _copy(self, seq: Sequence, number: int, place: int) -> None:
        pool, table = self.pools[number], self.table(seq, number)
        source = table[place]
        [copy] = pool.allocator.allocate(1)
        pool.copies.append((source, copy))
        table[place] = copy
        self.retell(seq, number, place)
        if number == 0:
            self.trace.note("copy", seq.seq_id, place, source, copy)
        # While steps are unfinished, the other owners may be fences that end before this copy.
        if not pool.fences:
            pool.sources[source] += 1

    def begin_blocks(self, sequences: list[Sequence]) -> bool:
        """Give each of the sequences, all of whose blocks are full, one new block, or give none
        any.

        It is `extend` for layers that are one group and keep every token.

        Returns:
            Whether there were enough free blocks; if not, nothing has changed.
        """
        if len(sequences) > self.allocator.num_free:
            return False
        for seq in sequences:
            blocks = self.allocator.allocate(1)
            seq.block_ids += blocks
            self.trace.note("extend", seq.seq_id, tuple(blocks))
        return True

    def fork(self, parent: Sequence, child: Sequence, gone: Sequence | None = None) -> None:
        """Let a new sequence, `child`, share all blocks of its parent, and start from its computed
        tokens.

        In a model with states the child gets a copy of the parent's state.

        Args:
            gone: a sequence that is released next, None for none. In a cache of one group the child
                takes over the ownership of the blocks that `gone` shares with the parent, nearly
                all of a long text, so that their counts need not change. Only while no step is
                unfinished: blocks released during a step are freed together, in an order in which
                the rest of `gone` would come after what the child releases meanwhile.
        """
        places, common = self.places[parent], 0
        if gone is not None and self.is_one_group and not self.pools[0].fences:
            common = num_common(parent.block_ids, gone.block_ids)
            self.trace.free(gone.block_ids[:common])
            del gone.block_ids[:common]
        for number, pool in enumerate(self.pools):
            held = self.held(parent, number)
            pool.allocator.share(held[common:] if common else held)
        parent.shares_tail = child.shares_tail = True
        child.block_ids = list(parent.block_ids)
        tables = [list(table) for table in places.tables]
        self.places[child] = Places(tables, [0] * len(tables), list(places.gone), places.node)
        if self.prefix is not None and places.node is not None:
            self.prefix.hold(places.node)
        child.num_registered_blocks = parent.num_registered_blocks
        child.is_doubtful = parent.is_doubtful
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_scheduled_tokens = parent.num_scheduled_tokens
        if self.states is not None:
            self.states.fork(parent, child)

    def release(self, seq: Sequence) -> None:
        """Take a sequence's blocks and its slot of states back, and reset its counters of tokens.

        Blocks that the prefix cache lists can still be found there. While a step is unfinished they
        become free only after it.
        """
        if seq in self.places:
            for number in range(len(self.pools)):
                self.let_go(number, self.held(seq, number))
            places = self.places.pop(seq)
            if self.prefix is not None:
                self.prefix.drop(places.node)
            if self.states is not None:
                self.states.release(seq)
        seq.block_ids = []
        seq.shares_tail = seq.is_doubtful = False
        seq.num_registered_blocks = seq.num_told_blocks = 0
        seq.num_computed_tokens = seq.num_scheduled_tokens = seq.num_pending = 0

    def truncate(self, seq: Sequence) -> None:
        """Release a sequence's blocks behind its scheduled tokens, which were taken for drafts."""
        kept = self.blocks_for(seq.num_scheduled_tokens)
        for number in range(len(self.pools)):
            table = self.table(seq, number)
            if kept >= len(table):
                continue
            if number == 0:
                self.trace.note("cut", seq.seq_id, kept)
            self.let_go(number, table[kept:])
            del table[kept:]
            self.retell(seq, number, kept)

    def register_states(self, seq: Sequence) -> None:
        """Enter the checkpoints that finished steps have made of a sequence's state into the prefix
        cache."""
        if self.states is not None:
            self.states.register(seq, self.places[seq].node, seq.num_registered_blocks)

    def register(self, seq: Sequence) -> None:
        """Enter a sequence's blocks that became full into the prefix cache.

        Where the cache has older blocks of equal content, the sequence uses these and releases its
        own.
        """
        prefix, size, first = self.prefix, self.block_size, seq.num_registered_blocks
        num_full = seq.num_computed_tokens // size
        if prefix is None or seq.is_doubtful or num_full == first:
            return
        places, written = self.places[seq], tuple(seq.block_ids[first:num_full])
        node, salt, token_ids = places.node, seq.request.salt, seq.token_ids
        for i in range(first, num_full):
            blocks = [written[i - first]] if self.is_one_group else self._held_at(seq, i)
            node = prefix.register(node, salt, token_ids[i * size : (i + 1) * size], blocks)
            if node.blocks is not blocks:
                self._merge(seq, i, blocks, node.blocks)
            elif self.on_full is not None:
                self.on_full(node)
        assert node is not None
        node.num_users += 1
        if places.node is not None:
            places.node.num_users -= 1  # and it stays, as it has a child
        places.node, seq.num_registered_blocks = node, num_full
        if (gone := places.gone[0]) > first:
            first, written = gone, written[gone - first :]
        if written:
            self.trace.note(
                "register", seq.seq_id, first, written, tuple(seq.block_ids[first:num_full])
            )

    def _held_at(self, seq: Sequence, place: int) -> list[int]:
        """Return a sequence's block at index `place` in each group; -1 where the window has passed
        it.

        A short window may have passed a block before the block's own step had finished.
        """
        held = [
            self.table(seq, number)[place] if place >= gone else -1
            for number, gone in enumerate(self.places[seq].gone)
        ]
        return held if self.states is None else [*held, -1]  # checkpoints come later

    def _merge(self, seq: Sequence, place: int, own: list[int], kept: list[int]) -> None:
        """Use older blocks of equal content in place of a sequence's own at index `place`, in each
        group.

        Args:
            own: the sequence's block in each group; -1 for none.
            kept: the older block in each group.
        """
        for number, (block, older) in enumerate(zip(own, kept, strict=True)):
            if block not in (-1, older):
                self.pools[number].allocator.share([older])
                self.let_go(number, [block])
                self.table(seq, number)[place] = older
                self.num_merged += 1
                self.retell(seq, number, place)

    def forget(self, family: list[Sequence], holders: list[Sequence]) -> None:
        """Remove from the prefix cache all that the samples of one request have computed or found.

        Their files are removed, too. Running sequences that hold such blocks are in doubt: none of
        their blocks enters the cache any more.

        Args:
            family: the samples, ended and waiting ones included.
            holders: sequences that hold blocks.
        """
        if self.prefix is None:
            return
        forgotten: set[int] = set()
        for seq in family:
            forget_files(self, seq)
            if seq.num_tokens >= self.block_size:
                forgotten |= self.prefix.forget(seq.token_ids, seq.request.salt)[0]
        self.trace.note("forget", tuple(forgotten))
        for seq in holders:
            places = self.places[seq]
            if places.node is not None and places.node.is_forgotten:
                self.prefix.drop(places.node)
                places.node = None
                seq.num_registered_blocks, seq.is_doubtful = 0, True

    def adopt(self, seq: Sequence) -> int:
        """Let a sequence share cached blocks of its next tokens, which entered the cache since its
        admission.

        The sequence releases its own blocks in their places, whatever these hold. No unfinished
        step computes anything of the sequence.

        Returns:
            The number of tokens that count as computed in addition, 0 if nothing was found.
        """
        prefix, first, before = self.prefix, seq.num_registered_blocks, seq.num_computed_tokens
        if prefix is None or seq.is_doubtful or seq.scores_prompt:
            return 0
        places, size = self.places[seq], self.block_size
        found = prefix.find(seq.token_ids, seq.request.salt, places.node, first)
        end = first + len(found)
        if end * size < before:  # it has begun a block of its own
            return 0
        if found:
            self._take_over(seq, found)
        inside = begin_inside(self, seq, 0, is_fresh=False)
        if inside:
            self.trace.note("hit", seq.seq_id, end, (seq.block_ids[end],))
        seq.num_computed_tokens = seq.num_scheduled_tokens = end * size + inside
        prefix.count(0, seq.num_computed_tokens - before)
        return seq.num_computed_tokens - before

    def _take_over(self, seq: Sequence, found: list[PrefixNode]) -> None:
        """Put the blocks of prefix nodes in place of a sequence's own, from its first unregistered
        one on.

        Args:
            seq: the sequence that takes the blocks.
            found: the nodes of its next full blocks of tokens, in order.
        """
        prefix, places, size = self.prefix, self.places[seq], self.block_size
        assert prefix is not None
        first = seq.num_registered_blocks
        end = first + len(found)
        for number, pool in enumerate(self.pools):
            table, gone = self.table(seq, number), places.gone[number]
            passed = max(gone, first_block(end * size, pool.window, size))
            taken = [node.blocks[number] for node in found[max(0, passed - first) :]]
            pool.allocator.share(taken)
            self.let_go(number, table[first:end])
            table[first:end] = [0] * (end - first - len(taken)) + taken
            if passed > gone:
                self.let_go(number, table[gone : min(first, passed)])
                places.gone[number] = passed
            self.retell(seq, number, first)
            if number == 0:
                self.trace.note("hit", seq.seq_id, end - len(taken), tuple(taken))
                if passed > gone:
                    self.trace.note("pass", seq.seq_id, passed)
        prefix.hold(found[-1])
        prefix.drop(places.node)
        places.node = found[-1]
        seq.num_registered_blocks = end
        if self.states is not None:
            [checkpoint], _ = take(self, self.states.group, found[-1:], 0)
            self.states.move(seq, end * size, checkpoint)

    def next_content(self, seq: Sequence) -> Content | None:
        """Return the content of a sequence's first full block of known tokens that is not
        registered yet.

        None if there is no such block, or the sequence's contents are in doubt.
        """
        first, size = seq.num_registered_blocks, self.block_size
        if self.prefix is None or seq.is_doubtful or (first + 1) * size > len(seq.token_ids):
            return None
        node = self.places[seq].node
        parent = seq.request.salt if node is None else node
        return parent, tuple(seq.token_ids[first * size : (first + 1) * size])

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Return the first group's copies (source, destination) of the step, and forget them.

        The step has begun. While it is built, a source stays owned by the sequences it is copied
        for, so that it becomes no other copy's destination even if all others that share it are
        preempted. If steps are unfinished or it has no other owner, it stays owned until this step
        has finished.
        """
        return self._take_copies(0)

    def take_other_copies(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return the copies of groups 1, 2, ... of the step, as `take_copies` does of group 0."""
        if self.is_one_group:
            return ()
        return tuple(map(self._take_copies, range(1, len(self.pools))))

    def _take_copies(self, number: int) -> tuple[tuple[int, int], ...]:
        pool = self.pools[number]
        if not pool.copies:
            return ()
        copies = tuple(pool.copies)
        pool.copies.clear()
        pool.sources.clear()
        for source, _ in copies:
            if len(pool.fences) > 1 or pool.allocator.ref_count(source) == 1:
                is_known = pool.allocator.is_cached(source)
                (pool.read if is_known else pool.fences)[-1].append(source)
            else:
                self.release_now(number, [source])
        sources = {source for source, _ in copies}
        assert sources.isdisjoint(copy for _, copy in copies), "a source is never a destination"
        return copies

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes, on the device, in main memory and in files.

        The caller must have made sure that no sequence owns a block.
        """
        if self.prefix is not None:
            self.prefix.reset()
        for store in self.memory.stores if self.memory is not None else ():
            store.clear()

    def note_peak(self, holders: list[Sequence], num_empty: int | None = None) -> None:
        """Update `blocks_peak` and `slots_peak` if the step just scheduled uses more blocks than
        any before.

        Args:
            holders: all sequences that hold blocks.
            num_empty: the number of slots without a token in blocks of `holders`, from a caller who
                knows that no last block is shared; None computes it.
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
        """Verify that the tables of the sequences that hold blocks agree with pools and cache.

        Raises:
            AssertionError: names the invariant that is broken.
        """
        check_tables(self, holders, waiting)

    def _match(self, seq: Sequence) -> list[PrefixNode]:
        """Return the nodes of the cached blocks that a sequence begins with.

        The first in the queue asks in every step, so what it found before is remembered. A sequence
        whose prompt is scored needs the rows of the whole prompt, so it is given none.
        """
        prefix, last = self.prefix, self._matched
        if prefix is None or seq.scores_prompt:
            return []
        salt, before = seq.request.salt, list[PrefixNode]()
        if last is not None and last.seq is seq:
            if last.version == prefix.version:
                return last.nodes
            before = last.nodes
        nodes = prefix.find_again(seq.token_ids, salt, before, in_slots=True)
        if last is not None and nodes is last.nodes:
            last.version = prefix.version
        else:
            self._matched = _Match(seq, nodes, prefix.version)
        return nodes

    def _is_refused(self, seq: Sequence, hits: list[PrefixNode], spare: int) -> bool:
        """Return whether a sequence that begins with cached blocks needs more than the free ones.

        Args:
            hits: the cached blocks.
            spare: blocks that must stay free.
        """
        if self._lacks_checkpoint(hits):
            return True
        if not self.is_one_group:
            return any(
                need > pool.allocator.num_free - spare
                for need, pool in zip(self._demands(seq, hits), self.pools, strict=True)
            )
        room, last = self.allocator.num_free - spare, self._matched
        if self.blocks_for(seq.num_tokens) - len(hits) > room:
            return True
        is_known = last is not None and last.nodes is hits
        if last is not None and is_known and room <= last.refused_room:
            return True
        if self._demands(seq, hits)[0] <= room:
            return False
        if last is not None and is_known:
            last.refused_room = room
        return True

    def _demands(self, seq: Sequence, hits: list[PrefixNode]) -> list[int]:
        """Return for each group the number of free blocks that the admission of a sequence would
        take.

        Cached blocks of the hit that have no owner count, too.

        Args:
            hits: the cached blocks with which the sequence begins.
        """
        demands, size = list[int](), self.block_size
        for number, pool in enumerate(self.pools):
            first = first_block(len(hits) * size, pool.window, size)
            count, blocks = pool.allocator.ref_count, [n.blocks[number] for n in hits[first:]]
            taken = sum(block < 0 or count(block) == 0 for block in blocks)  # brought, or revived
            demands.append(self._end(seq, number, first, len(hits)) - len(hits) + taken)
        return demands

    def _end(self, seq: Sequence, number: int, first: int, num_hits: int) -> int:
        """Return the index, in its table, at which the blocks end that a sequence gets at
        admission.

        Args:
            number: the group's number.
            first: the index of the first block that the group's window still sees.
            num_hits: the number of cached blocks with which it begins.
        """
        total, window = self.blocks_for(seq.num_tokens), self.pools[number].window
        if window is None:
            return total
        most = window_blocks(window, self.max_run, self.block_size)
        return max(num_hits, min(total, first + most))

    def _pass(self, seq: Sequence, number: int, first: int) -> None:
        """Release a sequence's blocks of group `number` before index `first`, which its window has
        passed.

        Their ids stay in the sequence's table.
        """
        gone = self.places[seq].gone
        if first > gone[number]:
            passed = self.table(seq, number)[gone[number] : first]
            gone[number] = first
            if number == 0:
                self.trace.note("pass", seq.seq_id, first)
            self.let_go(number, passed)
