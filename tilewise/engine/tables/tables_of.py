"""Which tables a scheduler has: plain ones, or those of several groups of layers. No torch."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from tilewise.engine.tables.admission import Limits
from tilewise.engine.tables.block_tables import BlockTables
from tilewise.engine.tables.grouped.tables import GroupedTables
from tilewise.engine.tables.swap_space import BlockStore

__all__ = ["tables_of"]


def tables_of(
    limits: Limits,
    enable_prefix_caching: bool,
    num_swap_blocks: int | Seq[int],
    store: BlockStore | Seq[BlockStore] | None,
) -> BlockTables:
    """Return tables for the groups of layers of `limits`: plain ones where that is one of all keys.

    Args:
        limits: the groups, and blocks of each.
        enable_prefix_caching: keep full blocks findable by content.
        num_swap_blocks: blocks of main memory, of every group, or one number for each.
        store: where cold prefixes go from there; one for each group, in a sequence, where there
            are several or one with a window.

    Raises:
        ValueError: there is not one number, or one store, for each group.
    """
    slots = num_swap_blocks
    swaps = [slots] * len(limits.windows) if isinstance(slots, int) else [*slots]
    if len(swaps) != len(limits.windows):
        raise ValueError(
            f"num_swap_blocks must be one number for each of {len(limits.windows)} groups, "
            f"got {swaps}"
        )
    if limits.windows == (None,):
        size = limits.block_size
        assert not isinstance(store, Seq), "one group without a window has one store"
        return BlockTables(limits.num_blocks, size, enable_prefix_caching, swaps[0], store)
    stores = store if isinstance(store, Seq) else () if store is None else (store,)
    if stores and len(stores) != len(limits.windows):
        raise ValueError(
            f"store must be one for each of {len(limits.windows)} groups, got {len(stores)}"
        )
    counts = (limits.num_blocks, *limits.other_blocks)
    return GroupedTables(
        counts,
        limits.block_size,
        limits.windows,
        limits.max_run,
        enable_prefix_caching,
        swaps,
        stores,
    )
