"""The state of block tables: pools, what is findable of them, and who holds which blocks. No torch.

`BlockTables` decides; its parts (`inside`, `moves`, `files`, `checks`) and it share what is here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from tilewise.cache.allocator import BlockAllocator
from tilewise.cache.prefix import PrefixCache, PrefixNode
from tilewise.engine.record.trace import Trace
from tilewise.engine.request import Sequence
from tilewise.engine.tables.state_tables import StateTables
from tilewise.engine.tables.swap_space import BlockStore, SwapSpace

__all__ = ["Holdings", "Places", "Pool"]


@dataclass(slots=True)
class Places:
    """The blocks of a sequence that holds some, beside `Sequence.block_ids`.

    Attributes:
        tables: the blocks in groups 1, 2, ...; those of group 0 are the sequence's own list.
        told: the number of leading blocks of each of these tables that a batch has told, and that
            have not changed since.
        gone: the number of leading blocks, in every group from 0 on, that the window has passed and
            the sequence has released.
        node: the prefix cache's node of its last registered block; None while none is registered.
    """

    tables: list[list[int]]
    told: list[int]
    gone: list[int]
    node: PrefixNode | None = None


@dataclass(slots=True)
class Pool:
    """The blocks of one group of layers.

    Attributes:
        allocator: the free blocks, and the number of owners of the others.
        window: keys that a query of the group's layers sees; None for all.
        copies: pairs (source, destination) of blocks that the next step copies.
        sources: the number of these copies by source, of copies made while no step is unfinished:
            their sequences still count as owners of the source, though they hold the copies.
        fences: blocks that wait for an unfinished step to finish, one list for each step, the
            oldest first.
        read: sources of copies that the prefix cache knows and that wait for a step likewise. They
            become free before the fenced blocks, one of which may be the block before theirs.
    """

    allocator: BlockAllocator
    window: int | None
    copies: list[tuple[int, int]] = field(default_factory=list)
    sources: Counter[int] = field(default_factory=Counter)
    fences: deque[list[int]] = field(default_factory=deque)
    read: deque[list[int]] = field(default_factory=deque)


class Holdings:
    """Pools of all groups of layers, and the blocks that each sequence holds in them.

    Args:
        num_blocks: blocks of each group.
        block_size: tokens per block.
        windows: keys that a query of each group's layers sees, None for all.
        max_run: tokens of one sequence in one step at most.
        enable_prefix_caching: whether full blocks stay findable by content.
        num_swap_blocks: blocks of main memory for each group; () or zeros for none.
        stores: the store, such as files, of each group's prefixes for which main memory has no
            room; () for none.
        states: the slots and checkpoints of layers with states; None for a model without. With
            checkpoints they are one more group of the prefix cache, of main memory and of stores.

    Attributes:
        allocator: the allocator of the first group's blocks.
        pools: the pools of all groups.
        is_one_group: whether there is one group of layers, it keeps every token, and no other layer
            has a state.
        prefix: the index of the blocks that can be found; None without prefix caching.
        memory: main memory behind the pools; None without.
        places: the places of the blocks of each sequence that holds some, beside its block_ids.
        trace: the record of what happens to the blocks of the first group.

    Raises:
        ValueError: block_size is below 1, or there is not one window for each number of blocks.
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
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        if len(num_blocks) != len(windows) or not num_blocks:
            raise ValueError(
                f"windows must be one for each of {len(num_blocks)} groups, got {len(windows)}"
            )
        self.block_size, self.max_run = block_size, max_run
        allocators = [BlockAllocator(count) for count in num_blocks]
        self.allocator = allocators[0]
        self.pools = [Pool(a, w) for a, w in zip(allocators, windows, strict=True)]
        self.is_one_group = list(windows) == [None] and states is None
        self.prefix: PrefixCache | None = None
        self.states = states
        if states is None and enable_prefix_caching:
            self.prefix = PrefixCache(allocators, windows, block_size)
        if states is not None and states.allocator is not None and enable_prefix_caching:
            # Of checkpoints a hit needs the last one, as of blocks with a window of two keys.
            self.prefix = PrefixCache([*allocators, states.allocator], [*windows, 2], block_size)
            states.prefix = self.prefix
        self.trace = Trace(num_blocks[0], block_size)
        self.trace.watch(self.allocator)
        self.memory: SwapSpace | None = None
        if any(num_swap_blocks):
            self.memory = SwapSpace(num_swap_blocks, self.prefix, stores)
        self.places: dict[Sequence, Places] = {}

    def allocator_of(self, number: int) -> BlockAllocator:
        """Return the allocator of group `number` of the prefix cache; the last group is the
        checkpoints."""
        if number < len(self.pools):
            return self.pools[number].allocator
        assert self.states is not None
        assert self.states.allocator is not None
        return self.states.allocator

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens: ceil(num_tokens /
        block_size)."""
        return -(-num_tokens // self.block_size)

    def table(self, seq: Sequence, number: int) -> list[int]:
        """Return the block table of a sequence in group `number`: the list itself, which callers
        change in place; of group 0 it is `Sequence.block_ids`.

        Its first entries may be blocks that the window has passed and the sequence holds no longer.
        """
        return self.places[seq].tables[number - 1] if number else seq.block_ids

    def held(self, seq: Sequence, number: int) -> list[int]:
        """Return the blocks that a sequence holds in group `number`, without those that the group's
        window has passed. If there are none of these, it is the table itself, not a copy."""
        gone = self.places[seq].gone[number]
        table = self.table(seq, number)
        return table[gone:] if gone else table

    def num_places(self, seq: Sequence) -> int:
        """Return the number of blocks of tokens that a sequence's tables cover in every group."""
        return min(map(len, (seq.block_ids, *self.places[seq].tables)))

    def retell(self, seq: Sequence, number: int, place: int) -> None:
        """Make the next batch list a sequence's blocks of group `number` again, from index `place`
        on."""
        if number == 0:
            seq.num_told_blocks = min(seq.num_told_blocks, place)
        else:
            told = self.places[seq].told
            told[number - 1] = min(told[number - 1], place)

    def let_go(self, number: int, blocks: Iterable[int]) -> None:
        """Release blocks of group `number`, at once or when all steps that are unfinished now have
        ended."""
        fences = self.pools[number].fences
        if fences:
            fences[-1] += blocks
        else:
            self.release_now(number, list(blocks))

    def release_now(self, number: int, blocks: list[int]) -> None:
        """Release blocks of group `number` at once; no unfinished step may still use them."""
        self.pools[number].allocator.release(blocks)
        if number == 0:
            self.trace.free(blocks)

    def forget_blocks(self, number: int, blocks: list[int]) -> None:
        """Remove blocks of a group from the prefix cache, since their contents have not arrived. If
        all groups see whole prefixes, blocks that follow them there are removed, too."""
        if self.prefix is not None:
            forgotten = [b for block in blocks for b in self.prefix.forget_block(number, block)]
            if number == 0 and forgotten:
                self.trace.note("forget", tuple(forgotten))
