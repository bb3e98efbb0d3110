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
    """The blocks of a sequence, beside `Sequence.block_ids`.

    Attributes:
        tables: the blocks in groups 1, 2, ...; those of group 0 are the sequence's own list.
        told: leading blocks of each of these tables that a batch has told, and that have not
            changed since.
        gone: leading blocks that the sequence no longer holds, of every group.
        node: the content of its last known block; None while none is known.
    """

    tables: list[list[int]]
    told: list[int]
    gone: list[int]
    node: PrefixNode | None = None


@dataclass(slots=True)
class Pool:
    """The blocks of one group of layers.

    Attributes:
        allocator: the owners of the blocks.
        window: keys that a query of the group's layers sees; None for all.
        copies: (source, destination) of the next step.
        sources: the number of these copies that own each source beside no step.
        fences: blocks that wait for an unfinished step to finish, one list for each step, the
            oldest first.
        read: sources that the prefix cache knows and that wait likewise. They become free before
            the fenced blocks, one of which may be the block before theirs.
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
        num_swap_blocks: blocks of main memory for each group; () or zeros are none.
        stores: the store in main memory for each group's cold prefixes; () lets go of them.
        states: the slots and checkpoints of layers with states; None for a model without. With
            checkpoints they are one more group of the prefix cache, of main memory and of stores.

    Attributes:
        allocator: the pool of the first group.
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
        """Return the owners of group `number` of the prefix cache, checkpoints being the last."""
        if number < len(self.pools):
            return self.pools[number].allocator
        assert self.states is not None
        assert self.states.allocator is not None
        return self.states.allocator

    def blocks_for(self, num_tokens: int) -> int:
        """Return ceil(num_tokens / block_size)."""
        return -(-num_tokens // self.block_size)

    def table(self, seq: Sequence, number: int) -> list[int]:
        """Return the table of a sequence in group `number`."""
        return self.places[seq].tables[number - 1] if number else seq.block_ids

    def held(self, seq: Sequence, number: int) -> list[int]:
        """Return the blocks that a sequence holds in group `number`."""
        gone = self.places[seq].gone[number]
        table = self.table(seq, number)
        return table[gone:] if gone else table

    def num_places(self, seq: Sequence) -> int:
        """Return how many blocks of tokens a sequence's tables have a place for, in every group."""
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
        """Release blocks of group `number` as soon as no step that has begun is unfinished."""
        fences = self.pools[number].fences
        if fences:
            fences[-1] += blocks
        else:
            self.release_now(number, list(blocks))

    def release_now(self, number: int, blocks: list[int]) -> None:
        """Release blocks of group `number`; no unfinished step uses them for an ended owner."""
        self.pools[number].allocator.release(blocks)
        if number == 0:
            self.trace.free(blocks)

    def forget_blocks(self, number: int, blocks: list[int]) -> None:
        """Remove blocks of a group from the prefix cache, since their contents have not arrived."""
        if self.prefix is not None:
            forgotten = [b for block in blocks for b in self.prefix.forget_block(number, block)]
            if number == 0 and forgotten:
                self.trace.note("forget", tuple(forgotten))
