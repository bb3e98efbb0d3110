"""Block tables of a model whose layers are of several groups, or have a window. No torch.

Every group of layers has a pool, and every sequence a table in each. Block i of any of its tables
is of the same tokens, i * block_size and on. What `BlockTables` promises holds in each pool, and:

    behind the window  a block that no later query of its sequence sees is released when the
                       sequence begins its next block. Its number stays in the table for a step that
                       is unfinished or run again; later steps do not read it
    all or none        a sequence gets the blocks of a step in all groups, or in none
    a hit is common    a prefix counts as cached if every group has it, see `cache.grouped_prefix`.
                       The block inside which a hit ends is shared, too, until the sequence writes
                       there; then it is copied, in every group (`engine.tables.grouped.inside`)

At admission a sequence gets blocks for all known tokens in a group without a window. In a group
with a window it gets as many as its layers need at any time: those of a window and of a step. From
then on it releases a block for each that it takes. If a released block has other owners no block
becomes free, and the sequence may lack one like any other; the first in order is served first, as
the proof in `scheduler` needs.

With main memory (`swap`) a swap keeps the blocks that the query at the next token sees in each
group, and a prefix is found if every group has it in the cache or in main memory.

The events of a trace, and counts of blocks in stats, are those of the first group.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from tilewise.cache.allocator import BlockAllocator
from tilewise.cache.grouped_prefix import GroupedPrefix, PrefixNode, first_block
from tilewise.engine.batch import Batch
from tilewise.engine.request import Sequence
from tilewise.engine.tables.admission import window_blocks
from tilewise.engine.tables.block_tables import BlockTables
from tilewise.engine.tables.checks import check_groups
from tilewise.engine.tables.grouped.files import forget_files, read_files
from tilewise.engine.tables.grouped.inside import begin_inside_groups
from tilewise.engine.tables.grouped.moves import (
    bring_back,
    count_lacking,
    count_seen,
    revoke_moves,
    seen,
    take,
)
from tilewise.engine.tables.grouped.places import Places, Pool
from tilewise.engine.tables.grouped.swap import GroupSwap
from tilewise.engine.tables.swap_space import BlockStore, Transfers

__all__ = ["GroupedTables", "Places"]


class GroupedTables(BlockTables):
    """Give sequences their blocks in every group and take them back.

    Args:
        num_blocks: of each group.
        block_size: tokens per block.
        windows: of each group, None for all keys.
        max_run: tokens of one sequence in one step at most.
        enable_prefix_caching: keep full blocks findable by content.
        num_swap_blocks: blocks of main memory, of each group; none with () or zeros.
        stores: where cold prefixes of each group go from there; none with ().

    Attributes:
        places: where the blocks of each sequence are that holds some, beside its block_ids.

    Raises:
        ValueError: there is not one window for each number of blocks.
    """

    is_one_group = False

    def __init__(
        self,
        num_blocks: Seq[int],
        block_size: int,
        windows: Seq[int | None],
        max_run: int,
        enable_prefix_caching: bool,
        num_swap_blocks: Seq[int] = (),
        stores: Seq[BlockStore] = (),
    ) -> None:
        if len(num_blocks) != len(windows) or not num_blocks:
            raise ValueError(
                f"windows must be one for each of {len(num_blocks)} groups, got {len(windows)}"
            )
        super().__init__(num_blocks[0], block_size, enable_prefix_caching=False)
        allocators = [self.allocator, *map(BlockAllocator, num_blocks[1:])]
        self.pools = [Pool(a, w) for a, w in zip(allocators, windows, strict=True)]
        self.max_run = max_run
        self.tree: GroupedPrefix | None = None
        if enable_prefix_caching:
            self.tree = GroupedPrefix(allocators, windows, block_size)
            self.trace.watch(self.allocator)
        self.group_swap: GroupSwap | None = None
        if any(num_swap_blocks):
            self.group_swap = GroupSwap(num_swap_blocks, self.tree, stores)
        self.places: dict[Sequence, Places] = {}
        self._found: tuple[Sequence, int, list[PrefixNode]] | None = None  # for whom, version
        self._moves: list[tuple[Transfers, Transfers]] = []

    @property
    def memory(self) -> GroupSwap | None:
        """Main memory behind the blocks; None without."""
        return self.group_swap

    @property
    def prefix_counts(self) -> tuple[int, int]:
        """Tokens of all admitted sequences, and how many of them the prefix cache had."""
        return (self.tree.num_query_tokens, self.tree.num_hit_tokens) if self.tree else (0, 0)

    @property
    def num_free(self) -> int:
        """Blocks that every group has free at least."""
        return min(pool.allocator.num_free for pool in self.pools)

    @property
    def groups_used(self) -> tuple[tuple[int, int], ...]:
        """Of groups 1, 2, ...: blocks with an owner, and all blocks."""
        pools = [pool.allocator for pool in self.pools[1:]]
        return tuple((pool.num_used, pool.num_blocks) for pool in pools)

    @property
    def has_fenced(self) -> bool:
        """Whether blocks become free when unfinished steps finish."""
        return any(any(pool.fences) for pool in self.pools)

    def begin_step(self) -> tuple[Transfers, Transfers]:
        """Note that a step may use any block that has an owner now.

        Returns:
            What it moves out and in, of the first group.
        """
        for pool in self.pools:
            pool.fences.append([])
        if self.group_swap is None:
            return (), ()
        first, *self._moves = self.group_swap.begin_step()
        return first

    def take_other_moves(self) -> tuple[tuple[Transfers, Transfers], ...]:
        """Return what the step that has begun moves out and in, of groups 1, 2, ...."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def end_step(self, index: int) -> None:
        """Note that unfinished step `index`, 0 the oldest, has finished, or never will."""
        for number, pool in enumerate(self.pools):
            blocks = pool.fences[index]
            del pool.fences[index]
            if index == 0:
                self._release(number, blocks)
            else:
                pool.fences[index - 1] += blocks
        if self.group_swap is not None:
            self.group_swap.end_step(index)

    def parent_of(self, block: int) -> int:
        return self.tree.parent_of(block) if self.tree else -1

    def num_places(self, seq: Sequence) -> int:
        """Return how many blocks of tokens a sequence's tables have a place for."""
        return min(map(len, (seq.block_ids, *self.places[seq].tables)))

    def tell(self, seq: Sequence) -> tuple[tuple[list[int], int], ...]:
        """Return for groups 1, 2, ... the table and its first new block, which a batch tells."""
        places = self.places[seq]
        others = tuple(zip(places.tables, places.told, strict=True))
        places.told = [len(table) for table in places.tables]
        return others

    def missing_blocks(self, seq: Sequence, spare: int) -> int:
        """Return how many blocks of the scarcest group must become free before reserve() can."""
        needs = self._demands(seq, self._hits(seq))
        lacking = (
            need + spare - pool.allocator.num_free
            for need, pool in zip(needs, self.pools, strict=True)
        )
        return max(0, *lacking)

    def reserve(self, seq: Sequence, spare: int) -> bool:
        """Give a sequence without blocks those of its known tokens, or of a window and a step.

        What the prefix cache has in every group is shared and counts as computed.

        Args:
            seq: it waits.
            spare: blocks that must stay free in each group.

        Returns:
            Whether the blocks were there.
        """
        has_files = self.group_swap is not None and bool(self.group_swap.stores)
        if has_files and not seq.scores_prompt and self.missing_blocks(seq, spare) == 0:
            read_files(self, seq)
        hits = self._hits(seq)
        needs = self._demands(seq, hits)
        for need, pool in zip(needs, self.pools, strict=True):
            if need > pool.allocator.num_free - spare:
                return False
        self._found = None
        if hits:
            assert self.tree is not None
            self.tree.hold(hits[-1])  # before others' blocks are evicted for the new ones
            if self.group_swap is not None:
                self.group_swap.num_recalled += count_lacking(self, hits)
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
        inside = begin_inside_groups(self, seq, spare, is_fresh=True)
        seq.num_computed_tokens = seq.num_scheduled_tokens = len(hits) * size + inside
        if self.tree is not None:
            self.tree.count(seq.num_tokens, seq.num_computed_tokens)
        return True

    def swap_out(self, family: list[Sequence]) -> bool:
        """As `BlockTables.swap_out`; nothing is kept of who has passed what it needs to go on."""
        if self.group_swap is None or any(map(self.has_passed, family)):
            return False
        return self.group_swap.swap_out(family, [seen(self, seq) for seq in family])

    def num_kept(self, family: list[Sequence]) -> tuple[int, ...]:
        """Return how many blocks of each group swapping the sequences out would move."""
        return count_seen(self, family)

    def has_passed(self, seq: Sequence) -> bool:
        """Whether a later step, unfinished or taken back, let go of what its next token sees."""
        return any(
            gone > first_block(seq.num_computed_tokens, pool.window, self.block_size)
            for gone, pool in zip(self.places[seq].gone, self.pools, strict=True)
        )

    def swap_in(self, group: list[Sequence], spare: int) -> bool:
        """As `BlockTables.swap_in`; here all full blocks that come back are findable from then."""
        return bring_back(self, group, spare)

    def is_coming(self, seq: Sequence) -> bool:
        """Whether the next step brings some of a sequence's blocks from main memory."""
        if self.group_swap is None:
            return False
        return any(
            room.coming and not room.coming.keys().isdisjoint(self.held(seq, number))
            for number, room in enumerate(self.group_swap.rooms)
        )

    def drop_swapped(self, seq: Sequence) -> None:
        """Let go of what main memory keeps of a sequence that waits."""
        if self.group_swap is not None and seq.swap_slots:
            self.group_swap.drop(seq)

    def cancel_transfers(self) -> None:
        """Cancel all moves: no sequence is unfinished, so there may be no further step."""
        if self.group_swap is not None:
            for number, blocks in enumerate(self.group_swap.cancel()):
                self.forget_blocks(number, blocks)

    def revoke(
        self, batch: Batch, later: list[Batch], running: list[Sequence], waiting: list[Sequence]
    ) -> tuple[list[Sequence], list[Sequence]]:
        """As `BlockTables.revoke`."""
        return revoke_moves(self, batch, later, running, waiting)

    def forget_blocks(self, number: int, blocks: list[int]) -> None:
        """Make single blocks of a group unfindable: what they were to hold has not arrived."""
        if self.tree is not None:
            forgotten = [block for block in blocks if self.tree.forget_block(number, block)]
            if number == 0 and forgotten:
                self.trace.note("forget", tuple(forgotten))

    def extend(self, seq: Sequence, end: int) -> bool:
        """Make positions num_scheduled_tokens ... end - 1 writable by this sequence alone.

        Blocks behind the window of the first of these positions are let go of in any case.

        Returns:
            Whether the blocks were there in all groups; if not, no other thing has changed.
        """
        size, start = self.block_size, seq.num_scheduled_tokens
        first = start // size
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

    def _copy(self, seq: Sequence, number: int, place: int) -> None:
        pool, table = self.pools[number], self.table(seq, number)
        source = table[place]
        [copy] = pool.allocator.allocate(1)
        pool.copies.append((source, copy))
        table[place] = copy
        self._retell(seq, number, place)
        if number == 0:
            self.trace.note("copy", seq.seq_id, place, source, copy)
        # While steps are unfinished, the other owners may be fences that end before this copy.
        if not pool.fences:
            pool.sources[source] += 1

    def fork(self, parent: Sequence, child: Sequence, gone: Sequence | None = None) -> None:
        """Let a new sequence start from all that its parent has computed; `gone` keeps its own."""
        places = self.places[parent]
        for number, pool in enumerate(self.pools):
            pool.allocator.share(self.held(parent, number))
        parent.shares_tail = child.shares_tail = True
        child.block_ids = list(parent.block_ids)
        tables = [list(table) for table in places.tables]
        self.places[child] = Places(tables, [0] * len(tables), list(places.gone), places.node)
        if self.tree is not None and places.node is not None:
            self.tree.hold(places.node)
        child.num_registered_blocks = parent.num_registered_blocks
        child.is_doubtful = parent.is_doubtful
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_scheduled_tokens = parent.num_scheduled_tokens

    def release(self, seq: Sequence) -> None:
        """Take a sequence's blocks back; what the prefix cache knows of them it keeps."""
        if seq in self.places:
            for number in range(len(self.pools)):
                self._let_go_of(number, self.held(seq, number))
            places = self.places.pop(seq)
            if self.tree is not None:
                self.tree.drop(places.node)
        seq.block_ids = []
        seq.shares_tail = seq.is_doubtful = False
        seq.num_registered_blocks = seq.num_told_blocks = 0
        seq.num_computed_tokens = seq.num_scheduled_tokens = seq.num_pending = 0

    def truncate(self, seq: Sequence) -> None:
        """Let go of the blocks behind the scheduled tokens, which were for drafts."""
        kept = self.blocks_for(seq.num_scheduled_tokens)
        for number in range(len(self.pools)):
            table = self.table(seq, number)
            if kept >= len(table):
                continue
            if number == 0:
                self.trace.note("cut", seq.seq_id, kept)
            self._let_go_of(number, table[kept:])
            del table[kept:]
            self._retell(seq, number, kept)

    def register(self, seq: Sequence) -> None:
        """Make the blocks that became full findable; adopt older blocks of equal content."""
        tree, size, first = self.tree, self.block_size, seq.num_registered_blocks
        num_full = seq.num_computed_tokens // size
        if tree is None or seq.is_doubtful or num_full == first:
            return
        places, written = self.places[seq], tuple(seq.block_ids[first:num_full])
        for i in range(first, num_full):
            tokens = seq.token_ids[i * size : (i + 1) * size]
            node = tree.child(places.node, seq.request.salt, tokens)
            tree.hold(node)
            tree.drop(places.node)
            places.node = node
            for number, pool in enumerate(self.pools):
                if i < places.gone[number]:
                    continue  # a short window has passed it before its step had finished
                table = self.table(seq, number)
                kept = tree.put(node, number, table[i])
                if kept != table[i]:
                    pool.allocator.share([kept])
                    self._let_go_of(number, [table[i]])
                    table[i] = kept
                    self._retell(seq, number, i)
        kept_blocks = tuple(seq.block_ids[first:num_full])
        gone = max(0, places.gone[0] - first)
        if gone < len(written):
            self.trace.note(
                "register", seq.seq_id, first + gone, written[gone:], kept_blocks[gone:]
            )
        seq.num_registered_blocks = num_full

    def forget(self, family: list[Sequence], holders: list[Sequence]) -> None:
        """Remove from the prefix cache all that the samples of one request have computed or found.

        Nothing is cached any more of sequences that hold such blocks.

        Args:
            family: the samples, ended and waiting ones included.
            holders: sequences that hold blocks.
        """
        if self.tree is None:
            return
        forgotten: set[int] = set()
        for seq in family:
            forget_files(self, seq)
            if seq.num_tokens >= self.block_size:
                forgotten |= self.tree.forget(seq.token_ids, seq.request.salt)[0]
        self.trace.note("forget", tuple(forgotten))
        for seq in holders:
            places = self.places[seq]
            if places.node is not None and places.node.is_forgotten:
                self.tree.drop(places.node)
                places.node = None
                seq.num_registered_blocks, seq.is_doubtful = 0, True

    def adopt(self, seq: Sequence) -> int:
        """Share blocks of a prompt that were cached since its sequence got its own.

        It releases its own blocks in their places, whatever they hold. No unfinished step computes
        anything of the sequence.

        Returns:
            How many more tokens are computed than before.
        """
        tree, first, before = self.tree, seq.num_registered_blocks, seq.num_computed_tokens
        if tree is None or seq.is_doubtful or seq.scores_prompt:
            return 0
        places, size = self.places[seq], self.block_size
        found = tree.find(seq.token_ids, seq.request.salt, places.node, first)
        end = first + len(found)
        if end * size < before:  # it has begun a block of its own
            return 0
        if found:
            self._take_over(seq, found)
        inside = begin_inside_groups(self, seq, 0, is_fresh=False)
        if inside:
            self.trace.note("hit", seq.seq_id, end, (seq.block_ids[end],))
        seq.num_computed_tokens = seq.num_scheduled_tokens = end * size + inside
        tree.count(0, seq.num_computed_tokens - before)
        return seq.num_computed_tokens - before

    def _take_over(self, seq: Sequence, found: list[PrefixNode]) -> None:
        """Hold the blocks of nodes in place of a sequence's first unknown ones."""
        tree, places, size = self.tree, self.places[seq], self.block_size
        assert tree is not None
        first = seq.num_registered_blocks
        end = first + len(found)
        for number, pool in enumerate(self.pools):
            table, gone = self.table(seq, number), places.gone[number]
            passed = max(gone, first_block(end * size, pool.window, size))
            taken = [node.blocks[number] for node in found[max(0, passed - first) :]]
            pool.allocator.share(taken)
            self._let_go_of(number, table[first:end])
            table[first:end] = [0] * (end - first - len(taken)) + taken
            if passed > gone:
                self._let_go_of(number, table[gone : min(first, passed)])
                places.gone[number] = passed
            self._retell(seq, number, first)
            if number == 0:
                self.trace.note("hit", seq.seq_id, end - len(taken), tuple(taken))
                if passed > gone:
                    self.trace.note("pass", seq.seq_id, passed)
        tree.hold(found[-1])
        tree.drop(places.node)
        places.node = found[-1]
        seq.num_registered_blocks = end

    def next_content(self, seq: Sequence) -> tuple[int | str, tuple[int, ...]] | None:
        """Return the content of the first full block of known tokens that is not cached yet.

        None if there is no such block, or the sequence's contents are in doubt.
        """
        first, size = seq.num_registered_blocks, self.block_size
        if self.tree is None or seq.is_doubtful or (first + 1) * size > len(seq.token_ids):
            return None
        node = self.places[seq].node
        parent = seq.request.salt if node is None else node.number
        return parent, tuple(seq.token_ids[first * size : (first + 1) * size])

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Return the copies of the first group in the step, which has begun, and forget them."""
        return self._take_copies(0)

    def take_other_copies(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return those of groups 1, 2, ..., likewise."""
        return tuple(map(self._take_copies, range(1, len(self.pools))))

    def _take_copies(self, number: int) -> tuple[tuple[int, int], ...]:
        pool = self.pools[number]
        copies = tuple(pool.copies)
        pool.copies.clear()
        pool.sources.clear()
        for source, _ in copies:
            if len(pool.fences) > 1 or pool.allocator.ref_count(source) == 1:
                pool.fences[-1].append(source)
            else:
                self._release(number, [source])
        sources = {source for source, _ in copies}
        assert sources.isdisjoint(copy for _, copy in copies), "a source is never a destination"
        return copies

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes; no block has an owner."""
        if self.tree is not None:
            self.tree.reset()
        for store in self.group_swap.stores if self.group_swap is not None else ():
            store.clear()

    def check_integrity(self, holders: list[Sequence], waiting: list[Sequence]) -> None:
        """Verify that the tables of the sequences that hold blocks agree with pools and cache.

        Raises:
            AssertionError: names the invariant that is broken.
        """
        check_groups(self, holders, waiting)

    def _hits(self, seq: Sequence) -> list[PrefixNode]:
        """Return the nodes of the cached blocks that a sequence begins with.

        The first in the queue asks in every step; while no hit has changed, nothing is looked up.
        """
        if self.tree is None or seq.scores_prompt:
            return []
        last = self._found
        if last is not None and last[0] is seq and last[1] == self.tree.version:
            return last[2]
        found = self.tree.find(seq.token_ids, seq.request.salt, in_slots=True)
        self._found = seq, self.tree.version, found
        return found

    def _demands(self, seq: Sequence, hits: list[PrefixNode]) -> list[int]:
        """Blocks of each group that reserving would take from its free list."""
        demands, size = list[int](), self.block_size
        for number, pool in enumerate(self.pools):
            first = first_block(len(hits) * size, pool.window, size)
            count, blocks = pool.allocator.ref_count, [n.blocks[number] for n in hits[first:]]
            taken = sum(block < 0 or count(block) == 0 for block in blocks)  # brought, or revived
            demands.append(self._end(seq, number, first, len(hits)) - len(hits) + taken)
        return demands

    def _end(self, seq: Sequence, number: int, first: int, num_hits: int) -> int:
        """Return the end of the blocks that a sequence is given at admission, from `first` on."""
        total, window = self.blocks_for(seq.num_tokens), self.pools[number].window
        if window is None:
            return total
        most = window_blocks(window, self.max_run, self.block_size)
        return max(num_hits, min(total, first + most))

    def _pass(self, seq: Sequence, number: int, first: int) -> None:
        """Let go of a sequence's blocks before `first`; their numbers stay in its table."""
        gone = self.places[seq].gone
        if first > gone[number]:
            passed = self.table(seq, number)[gone[number] : first]
            gone[number] = first
            if number == 0:
                self.trace.note("pass", seq.seq_id, first)
            self._let_go_of(number, passed)

    def table(self, seq: Sequence, number: int) -> list[int]:
        """Return the table of a sequence in a group."""
        return self.places[seq].tables[number - 1] if number else seq.block_ids

    def held(self, seq: Sequence, number: int) -> list[int]:
        """Return the blocks that a sequence holds in a group."""
        return self.table(seq, number)[self.places[seq].gone[number] :]

    def _retell(self, seq: Sequence, number: int, place: int) -> None:
        """Let the next batch tell a sequence's blocks from `place` on."""
        if number == 0:
            seq.num_told_blocks = min(seq.num_told_blocks, place)
        else:
            told = self.places[seq].told
            told[number - 1] = min(told[number - 1], place)

    def _let_go_of(self, number: int, blocks: Iterable[int]) -> None:
        """Release blocks as soon as no step that has begun is unfinished."""
        fences = self.pools[number].fences
        if fences:
            fences[-1] += blocks
        else:
            self._release(number, list(blocks))

    def _release(self, number: int, blocks: list[int]) -> None:
        self.pools[number].allocator.release(blocks)
        if number == 0:
            self.trace.free(blocks)
