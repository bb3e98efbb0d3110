"""Begin inside a block of the prefix cache: 31 common tokens of blocks of 16 are 31 hits. No torch.

A sequence that leaves what the cache knows inside a block takes that block into its table: the
first tokens of it are its own, too. It never writes there, as `BlockTables.extend` makes it a copy
first, like that of a block which samples share. So the copy is made in the step that computes the
rest of the block, and what holds for shared blocks (owners, fences, preemption) holds here.

In every group of layers the source is the block of one node of the prefix cache. It holds all the
node's tokens, so a window adds nothing: what the query behind the hit sees lies in the source, and
before it in blocks that the hit of whole blocks has. Sources are blocks of the device only: what is
in main memory comes back as whole blocks.

What it costs: a look-up in O(log children), and a copy of one block for each time that a sequence
gets its blocks. The copy reads and writes the keys and values of block_size tokens, which is less
work than the products of a single token, so one token found is worth it. Admission does not depend
on it: it takes the room of a block that is free beside the spare ones. So a sequence that is alone
has a block for its copy, and the first in order advances as ever.
"""

from __future__ import annotations

from tilewise.cache.prefix import PrefixNode
from tilewise.engine.request import Sequence
from tilewise.engine.tables.holdings import Holdings

__all__ = ["begin_inside", "num_common"]


def begin_inside(tables: Holdings, seq: Sequence, spare: int, *, is_fresh: bool) -> int:
    """Let a sequence share a cached block that begins with its next tokens, though not with all.

    The block takes the place of the sequence's first unregistered one, in all groups or in none.

    Only behind a block that was found whole: all that was made of a block which turns out to be
    damaged then lies behind the same first block, and is forgotten with it. In a model with states
    nothing is done.

    Args:
        tables: the tables of the sequence.
        seq: a sequence of whose first unknown block nothing is computed.
        spare: blocks that must stay free in each group beside one for the copy.
        is_fresh: whether no step has been told of the sequence's first unknown blocks.

    Returns:
        The number of tokens that are found in this way; the caller counts them as computed. 0 for
        none.
    """
    prefix, node, first = tables.prefix, tables.places[seq].node, seq.num_registered_blocks
    if prefix is None or node is None or tables.num_places(seq) <= first:
        return 0
    if tables.states is not None:  # no checkpoint stands inside a block
        return 0
    start, size = first * tables.block_size, tables.block_size
    wanted = seq.token_ids[start : min(start + size, seq.num_tokens - 1)]
    source, count = prefix.begins_inside(node, wanted)
    if source is None or not _has_room(tables, source, spare - is_fresh):
        return 0
    for number, (pool, block) in enumerate(zip(tables.pools, source.blocks, strict=True)):
        table = tables.table(seq, number)
        pool.allocator.share([block])
        if is_fresh:  # the trace does not know of it either
            pool.allocator.release([table[first]])
        else:
            tables.let_go(number, [table[first]])
            tables.retell(seq, number, first)
        table[first] = block
    seq.shares_tail = True
    return count


def _has_room(tables: Holdings, source: PrefixNode, spare: int) -> bool:
    """Return whether every group has, beside `spare` blocks, a free one to which the source is
    copied.

    A source without an owner is among the free ones until it is owned. A block that is given back
    beside unfinished steps is not free yet, and not counted.
    """
    return all(
        pool.allocator.num_free - (pool.allocator.ref_count(block) == 0) > spare
        for pool, block in zip(tables.pools, source.blocks, strict=True)
    )


def num_common(one: list[int], other: list[int]) -> int:
    """Return the number of equal blocks at the beginning of two tables.

    It compares slices of the lists, by bisection, rather than block by block.
    """
    low, high = 0, min(len(one), len(other))
    middle = high
    while low < high:
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low
