"""The block tables of a scheduler, from the sizes that it works within. No torch."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from tilewise.engine.tables.admission import Limits
from tilewise.engine.tables.block_tables import BlockTables
from tilewise.engine.tables.state_tables import StateLimits, StateTables
from tilewise.engine.tables.swap_space import BlockStore

__all__ = ["tables_of"]


def tables_of(
    limits: Limits,
    enable_prefix_caching: bool,
    num_swap_blocks: int | Seq[int],
    store: BlockStore | Seq[BlockStore] | None,
    states: StateLimits | None = None,
) -> BlockTables:
    """Return tables for the groups of layers of `limits`.

    Args:
        limits: the groups, and blocks of each.
        enable_prefix_caching: True to keep full blocks findable by content.
        num_swap_blocks: blocks of main memory, of every group, or one number for each.
        store: the store, such as files, of prefixes for which main memory has no room; a sequence
            with one for each group, where there are several; None for none.
        states: the sizes of states; None for a model without. Its checkpoints are one more group of
            main memory and of stores.

    Raises:
        ValueError: there is not one number, or one store, for each group.
    """
    slots, num_groups = num_swap_blocks, len(limits.windows) + (states is not None)
    swaps = [slots] * num_groups if isinstance(slots, int) else [*slots]
    if len(swaps) != num_groups:
        raise ValueError(
            f"num_swap_blocks must be one number for each of {num_groups} groups, got {swaps}"
        )
    stores = store if isinstance(store, Seq) else () if store is None else (store,)
    if stores and len(stores) != num_groups:
        raise ValueError(f"store must be one for each of {num_groups} groups, got {len(stores)}")
    found = None
    if states is not None:
        found = StateTables(states, limits.max_num_seqs, limits.block_size, len(limits.windows))
    return BlockTables(
        (limits.num_blocks, *limits.other_blocks),
        limits.block_size,
        limits.windows,
        limits.max_run,
        enable_prefix_caching,
        swaps,
        stores,
        found,
    )
