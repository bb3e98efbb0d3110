"""The block tables of a scheduler, from the sizes that it works within. No torch."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from tilewise.engine.tables.admission import Limits
from tilewise.engine.tables.block_tables import BlockTables
from tilewise.engine.tables.swap_space import BlockStore

__all__ = ["tables_of"]


def tables_of(
    limits: Limits,
    enable_prefix_caching: bool,
    num_swap_blocks: int | Seq[int],
    store: BlockStore | Seq[BlockStore] | None,
) -> BlockTables:
    """Return tables for the groups of layers of `limits`.

    Args:
        limits: the groups, and blocks of each.
        enable_prefix_caching: keep full blocks findable by content.
        num_swap_blocks: blocks of main memory, of every group, or one number for each.
        store: the store in main memory for cold prefixes; a sequence with one for each group, where
            there are several.

    Raises:
        ValueError: there is not one number, or one store, for each group.
    """
    slots, num_groups = num_swap_blocks, len(limits.windows)
    swaps = [slots] * num_groups if isinstance(slots, int) else [*slots]
    if len(swaps) != num_groups:
        raise ValueError(
            f"num_swap_blocks must be one number for each of {num_groups} groups, got {swaps}"
        )
    stores = store if isinstance(store, Seq) else () if store is None else (store,)
    if stores and len(stores) != num_groups:
        raise ValueError(f"store must be one for each of {num_groups} groups, got {len(stores)}")
    return BlockTables(
        (limits.num_blocks, *limits.other_blocks),
        limits.block_size,
        limits.windows,
        limits.max_run,
        enable_prefix_caching,
        swaps,
        stores,
    )
