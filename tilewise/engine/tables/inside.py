"""Begin inside a block of the prefix cache: 31 common tokens of blocks of 16 are 31 hits. No torch.

A sequence that leaves what the cache knows inside a block takes that block into its table: the
first tokens of it are its own, too. It never writes there, as `BlockTables.extend` makes it a copy
first, like that of a block which samples share. So the copy is made in the step that computes the
rest of the block, and what holds for shared blocks (owners, fences, preemption) holds here.

What it costs: a look-up in O(log children), and a copy of one block for each time that a sequence
gets its blocks. The copy reads and writes the keys and values of block_size tokens, which is less
work than the products of a single token, so one token found is worth it. Admission does not depend
on it: it takes the room of a block that is free beside the spare ones. So a sequence that is alone
has a block for its copy, and the first in order advances as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise.engine.request import Sequence

if TYPE_CHECKING:
    from tilewise.engine.tables.block_tables import BlockTables

__all__ = ["begin_inside", "num_common"]


def begin_inside(tables: BlockTables, seq: Sequence, spare: int, *, is_fresh: bool) -> int:
    """Put a block that begins as a sequence goes on in place of its first unknown one.

    Only behind a block that was found whole: all that was made of a block which turns out to be
    damaged then lies behind the same first block, and is forgotten with it.

    Args:
        tables: those of the sequence.
        seq: nothing of its first unknown block is computed.
        spare: blocks that must stay free beside one for the copy.
        is_fresh: no step has been told of its first unknown block.

    Returns:
        How many more tokens are computed.
    """
    prefix, pool = tables.prefix, tables.allocator
    blocks, first = seq.block_ids, seq.num_registered_blocks
    if prefix is None or not 0 < first < len(blocks):  # one swapped out has no block more
        return 0
    start, size = first * tables.block_size, tables.block_size
    wanted = seq.token_ids[start : min(start + size, seq.num_tokens - 1)]
    source, count = prefix.begins_inside(blocks[first - 1], wanted)
    if count == 0:
        return 0
    # Steps may be unfinished that use the block which is given back, unless it is new to them.
    if pool.num_free + is_fresh - (pool.ref_count(source) == 0) <= spare:
        return 0
    pool.share([source])
    if is_fresh:
        pool.release([blocks[first]])
    else:
        tables.let_go([blocks[first]])
    blocks[first], seq.shares_tail = source, True
    return count


def num_common(one: list[int], other: list[int]) -> int:
    """Return how many blocks two tables begin with alike, comparing pieces rather than blocks."""
    low, high = 0, min(len(one), len(other))
    middle = high
    while low < high:
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low
