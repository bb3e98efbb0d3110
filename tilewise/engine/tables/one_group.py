"""What block tables say of groups of layers beyond the first where there is none. No torch."""

from __future__ import annotations

from tilewise.cache.allocator import BlockAllocator
from tilewise.cache.prefix import PrefixCache
from tilewise.engine.record.trace import Trace
from tilewise.engine.request import Sequence
from tilewise.engine.tables.grouped.swap import GroupSwap
from tilewise.engine.tables.swap_space import SwapSpace, Transfers

__all__ = ["OneGroup"]


class OneGroup:
    """Answers of tables whose layers all keep every token; `GroupedTables` has others.

    Attributes:
        allocator: the pool.
        prefix: what is findable of it.
        swap: main memory behind it, None without.
        trace: what happens to the blocks.
        is_one_group: whether there is one group of layers, which keeps every token.
    """

    is_one_group = True

    trace: Trace
    allocator: BlockAllocator
    prefix: PrefixCache | None
    swap: SwapSpace | None

    @property
    def num_free(self) -> int:
        """Blocks that could be handed out, in the group that has fewest."""
        return self.allocator.num_free

    @property
    def prefix_counts(self) -> tuple[int, int]:
        """Tokens of all admitted sequences, and how many of them the prefix cache had."""
        prefix = self.prefix
        return (prefix.num_query_tokens, prefix.num_hit_tokens) if prefix else (0, 0)

    @property
    def groups_used(self) -> tuple[tuple[int, int], ...]:
        """Of groups 1, 2, ...: blocks with an owner, and all blocks."""
        return ()

    def parent_of(self, block: int) -> int:
        """Return the block before a known one in its prefix; -1 where there is none."""
        parent = self.prefix.key(block)[0] if self.prefix else -1
        return parent if isinstance(parent, int) else -1  # a first block's is its salt

    def num_places(self, seq: Sequence) -> int:
        """Return how many blocks of tokens a sequence's tables have a place for."""
        return len(seq.block_ids)

    def take_other_copies(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return the copies (source, destination) of groups 1, 2, ... in the step that begins."""
        return ()

    def take_other_moves(self) -> tuple[tuple[Transfers, Transfers], ...]:
        """Return what the step that begins moves out and in, of groups 1, 2, ...."""
        return ()

    def begin_blocks(self, sequences: list[Sequence]) -> bool:
        """Do what extend() does for the next token of sequences whose blocks are full, in turn.

        Returns:
            Whether the blocks were there; if not, nothing has changed.
        """
        if len(sequences) > self.allocator.num_free:
            return False
        for seq in sequences:
            blocks = self.allocator.allocate(1)
            seq.block_ids += blocks
            self.trace.note("extend", seq.seq_id, tuple(blocks))
        return True

    def held(self, seq: Sequence, number: int) -> list[int]:
        """Return the blocks that a sequence holds in group `number`, 0 the only one."""
        return seq.block_ids

    def has_passed(self, seq: Sequence) -> bool:
        """Whether a sequence has let go of what the query at its next token sees."""
        return False

    @property
    def memory(self) -> SwapSpace | GroupSwap | None:
        """Main memory behind the blocks; None without."""
        return self.swap

    def tell(self, seq: Sequence) -> tuple[tuple[list[int], int], ...]:
        """Return for groups 1, 2, ... the table and its first new block, which a batch tells."""
        return ()
