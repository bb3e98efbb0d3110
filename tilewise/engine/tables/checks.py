"""What must hold of block tables between two steps; for tests. No torch."""

from __future__ import annotations

from tilewise.cache.prefix import PrefixNode, first_block
from tilewise.engine.request import Sequence
from tilewise.engine.tables.admission import window_blocks
from tilewise.engine.tables.holdings import Holdings

__all__ = ["check_tables"]


def check_tables(tables: Holdings, holders: list[Sequence], waiting: list[Sequence]) -> None:
    """Verify that the block tables of sequences agree with the pools and the prefix cache.

    Args:
        holders: the sequences that own blocks.
        waiting: the sequences that own none.

    Raises:
        AssertionError: names the invariant that is broken.
    """
    rules = [
        (all(s in tables.places for s in holders), "a sequence holds blocks in all groups"),
        (len(tables.places) == len(holders), "a sequence that waits holds none"),
    ]
    for number, pool in enumerate(tables.pools):
        pool.allocator.check_integrity()
        owners = [0] * pool.allocator.num_blocks
        for blocks in (*(tables.held(seq, number) for seq in holders), *pool.fences, *pool.read):
            for block in blocks:
                owners[block] += 1
        counts = [pool.allocator.ref_count(b) for b in range(pool.allocator.num_blocks)]
        rules += [
            (owners == counts, "a ref count is the number of tables that hold the block"),
            (not pool.copies, "no copy is left between steps"),
            (
                all(
                    len(tables.table(s, number)) >= tables.blocks_for(s.num_scheduled_tokens)
                    for s in holders
                ),
                "a table covers the computed tokens",
            ),
            (
                all(
                    tables.places[s].gone[number]
                    <= first_block(s.num_scheduled_tokens, pool.window, tables.block_size)
                    for s in holders
                ),
                "what a later query sees is held",
            ),
            (
                all(_is_bounded(tables, s, number) for s in holders),
                "what lies behind the window is let go of",
            ),
            (
                all(_told(tables, s, number) <= len(tables.table(s, number)) for s in holders),
                "a batch has told no more blocks than there are",
            ),
        ]
    if tables.memory is not None:
        tables.memory.check_integrity(waiting, tables.block_size)
    if tables.prefix is not None:
        nodes = [(s, tables.places[s].node) for s in holders]
        tables.prefix.check_integrity([node for _, node in nodes if node is not None])
        rules.append(
            (
                all(_is_known(tables, s) for s in holders),
                "registered blocks hold their tokens",
            )
        )
    if tables.states is not None:
        tables.states.check_integrity(holders)
    for holds, rule in rules:
        if not holds:
            raise AssertionError(f"broken invariant: {rule}")


def _is_known(tables: Holdings, seq: Sequence) -> bool:
    """Return whether the registered blocks of a sequence are those of its tokens in the prefix
    cache."""
    assert tables.prefix is not None
    node, depth = tables.places[seq].node, seq.num_registered_blocks
    if node is None:
        return depth == 0
    if not tables.prefix.holds(node, depth, seq.token_ids, seq.request.salt):
        return False
    at: PrefixNode | None = node
    for i in range(depth - 1, -1, -1):
        assert at is not None
        for number in range(len(tables.pools)):
            block = tables.table(seq, number)[i]
            if i >= tables.places[seq].gone[number] and at.blocks[number] not in (block, -1):
                return False
        at = at.parent
    return True


def _is_bounded(tables: Holdings, seq: Sequence, number: int) -> bool:
    """Return whether a sequence holds, in group `number`, no more blocks than a window and a step
    need."""
    window, table = tables.pools[number].window, tables.table(seq, number)
    if window is None:
        return True
    held = len(table) - tables.places[seq].gone[number]
    # One more than admission counts: a decode lets go when it begins a block.
    return held <= window_blocks(window, tables.max_run, tables.block_size) + 1


def _told(tables: Holdings, seq: Sequence, number: int) -> int:
    return tables.places[seq].told[number - 1] if number else seq.num_told_blocks
