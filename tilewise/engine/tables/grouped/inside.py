"""Begin inside a block of the prefix cache where layers are of several groups. No torch.

As `inside`, with one source in every group: the blocks of one node of `GroupedPrefix`. A
block of a node holds all its tokens, so a window adds nothing: what the query behind the hit sees
lies in the source, and before it in blocks that the hit of whole blocks has. The sequence owns the
sources until it writes there; `GroupedTables.extend` then makes a copy in each group.

Sources are blocks of the device only. What is in main memory comes back as whole blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise.cache.grouped_prefix import PrefixNode
from tilewise.engine.request import Sequence

if TYPE_CHECKING:
    from tilewise.engine.tables.grouped.tables import GroupedTables

__all__ = ["begin_inside_groups"]


def begin_inside_groups(tables: GroupedTables, seq: Sequence, spare: int, *, is_fresh: bool) -> int:
    """Put blocks that begin as a sequence goes on in place of its first unknown ones.

    Only behind a block that was found whole, see `inside.begin_inside`. It is done in all groups or
    in none.

    Args:
        tables: those of the sequence.
        seq: nothing of its first unknown block is computed.
        spare: blocks that must stay free in each group beside one for the copy.
        is_fresh: no step has been told of its first unknown blocks.

    Returns:
        How many more tokens are computed.
    """
    tree, node, first = tables.tree, tables.places[seq].node, seq.num_registered_blocks
    if tree is None or node is None or tables.num_places(seq) <= first:
        return 0
    start, size = first * tables.block_size, tables.block_size
    wanted = seq.token_ids[start : min(start + size, seq.num_tokens - 1)]
    source, count = tree.begins_inside(node, wanted)
    if source is None or not _has_room(tables, source, spare - is_fresh):
        return 0
    for number, (pool, block) in enumerate(zip(tables.pools, source.blocks, strict=True)):
        table = tables.table(seq, number)
        pool.allocator.share([block])
        if is_fresh:  # the trace does not know of it either
            pool.allocator.release([table[first]])
        else:
            tables._let_go_of(number, [table[first]])
            tables._retell(seq, number, first)
        table[first] = block
    seq.shares_tail = True
    return count


def _has_room(tables: GroupedTables, source: PrefixNode, spare: int) -> bool:
    """Whether every group has a block for a copy beside the spare ones.

    A source without an owner is among the free ones until it is owned. A block that is given back
    beside unfinished steps is not free yet, and not counted.
    """
    return all(
        pool.allocator.num_free - (pool.allocator.ref_count(block) == 0) > spare
        for pool, block in zip(tables.pools, source.blocks, strict=True)
    )
