"""What moves between the pools and main memory. No torch.

Out goes, of every group, what the query at a sequence's next token sees. What comes back is as it
was: the blocks behind the window are gone, and their places in the tables say nothing. A block that
the prefix cache has on the device is shared and not moved; samples of equal tokens share one.
"""

from __future__ import annotations

from typing import NamedTuple

from tilewise.cache.prefix import PrefixNode, first_block
from tilewise.engine.batch import Batch
from tilewise.engine.request import Sequence
from tilewise.engine.tables.admission import window_blocks
from tilewise.engine.tables.holdings import Holdings, Places
from tilewise.engine.tables.swap_space import slots_of, spread

__all__ = ["bring_back", "count_lacking", "count_seen", "revoke_moves", "seen", "take"]


class _Source(NamedTuple):
    """The place from which a block of a swapped sequence is brought back.

    Attributes:
        block: the block that is on the device already; -1 if there is none.
        slot: the slot in main memory; -1 if the block is on the device, or the window has passed
            it.
    """

    block: int
    slot: int


def seen(tables: Holdings, seq: Sequence) -> list[list[int]]:
    """Return a sequence's block table in each group, up to its computed tokens.

    Entries are -1 for blocks that the window of the next query excludes.
    """
    end, found = tables.blocks_for(seq.num_computed_tokens), list[list[int]]()
    for number, pool in enumerate(tables.pools):
        first = first_block(seq.num_computed_tokens, pool.window, tables.block_size)
        first = min(first, end)
        found.append([-1] * first + tables.table(seq, number)[first:end])
    return found


def count_seen(tables: Holdings, family: list[Sequence]) -> tuple[int, ...]:
    """Return for each group the number of blocks that the next queries of the sequences see
    together.

    A block that several sequences share counts once.
    """
    found = [seen(tables, seq) for seq in family]
    return tuple(
        len({block for own in found for block in own[number] if block >= 0})
        for number in range(len(tables.pools))
    )


def count_lacking(tables: Holdings, hits: list[PrefixNode]) -> int:
    """Return the number of blocks of a hit that must be brought from main memory in some group.

    Blocks that a group's window has passed need not be brought. `hits` are the hit's nodes, in
    order.
    """
    end, size = len(hits), tables.block_size
    firsts = [first_block(end * size, pool.window, size) for pool in tables.pools]
    return sum(
        any(i >= first and hits[i].blocks[number] < 0 for number, first in enumerate(firsts))
        for i in range(end)
    )


def take(
    tables: Holdings, number: int, nodes: list[PrefixNode], count: int
) -> tuple[list[int], list[int]]:
    """Share the blocks of prefix nodes in a group of layers, and allocate `count` more.

    A block that is in main memory only is copied back to a fresh one.

    Args:
        tables: the block tables.
        number: the index of the group of layers.
        nodes: the nodes of the prefix cache, in the order of their tokens.
        count: the number of further blocks.

    Returns:
        A block for each node, and `count` new ones.

    Raises:
        CacheFullError: the pool has too few free blocks.
    """
    pool, found = tables.allocator_of(number), [node.blocks[number] for node in nodes]
    pool.share([block for block in found if block >= 0])
    lacking = [i for i, block in enumerate(found) if block < 0]
    if not lacking:
        return found, pool.allocate(count)
    assert tables.memory is not None
    assert tables.prefix is not None
    slots = [nodes[i].slots[number] for i in lacking]
    room = tables.memory.rooms[number].allocator
    room.share(slots)  # before a block is kept in their place
    fresh = pool.allocate(count + len(lacking))
    for i, slot in zip(lacking, slots, strict=True):
        found[i] = fresh.pop(0)
        tables.memory.bring(number, slot, found[i])
        tables.prefix.put(nodes[i], number, found[i])
    room.release(slots)  # pinned now by what moves
    return found, fresh


def bring_back(tables: Holdings, group: list[Sequence], spare: int) -> bool:
    """Give all swapped-out samples of a request blocks, which the next step fills, or none of them.

    Args:
        tables: the tables of the samples.
        group: the samples; they wait, and share slots with no other request.
        spare: blocks that must stay free in each group; with some, those that the samples need
            next, too.

    Returns:
        Whether enough blocks were free; if not, nothing has changed. If so, the samples count as
        computed up to the tokens that were swapped out, and lose their slots.
    """
    memory, size = tables.memory, tables.block_size
    assert memory is not None
    kept = [slots_of(seq) for seq in group]
    chains = [_chain(tables, seq) for seq in group]
    plans = list[list[list[_Source]]]()
    for number in range(len(tables.pools)):
        plan = _plan(tables, number, group, [slots[number] for slots in kept], chains, spare)
        if plan is None:
            for chain in chains:
                if chain and tables.prefix is not None:
                    tables.prefix.drop(chain[-1])
            return False
        plans.append(plan)
    fetched = [_fetch(tables, number, plan, chains) for number, plan in enumerate(plans)]
    for i, (seq, chain) in enumerate(zip(group, chains, strict=True)):
        own = [found[i] for found in fetched]
        gone = [
            min(first_block(seq.num_swapped_tokens, pool.window, size), len(table))
            for pool, table in zip(tables.pools, own, strict=True)
        ]
        node = chain[-1] if chain else None
        seq.block_ids = own[0]
        tables.places[seq] = Places(own[1:], [0] * (len(own) - 1), gone, node)
        seq.num_registered_blocks = len(chain)
        seq.num_computed_tokens = seq.num_scheduled_tokens = seq.num_swapped_tokens
        seq.shares_tail = len(group) > 1
        memory.drop(seq)
    return True


def revoke_moves(
    tables: Holdings,
    batch: Batch,
    later: list[Batch],
    running: list[Sequence],
    waiting: list[Sequence],
) -> tuple[list[Sequence], list[Sequence]]:
    """Remove a failed step's moved blocks, and later copies of them, from the prefix cache.

    Args:
        batch: the failed step.
        later: the steps after it.
        running, waiting: the scheduler's sequences.

    Returns:
        The running sequences whose blocks, and the waiting ones whose slots in main memory, have
        not got their contents.
    """
    spoilt, lost = dict[int, Sequence](), dict[int, Sequence]()
    states = tables.states
    if states is not None:
        spoilt = {seq.seq_id: seq for seq in states.spoilt_by(batch)}
    if tables.memory is None:
        return list(spoilt.values()), []
    for number, room in enumerate(tables.memory.rooms):
        steps = [step.of_group(number) for step in later]
        moves = [(step.swap_out, step.swap_in, step.block_copies) for step in steps]
        coming = tuple((slot, block) for block, slot in room.coming.items())
        moves.append((tuple(room.going), coming, ()))
        blocks, slots = spread(batch.of_group(number), moves)
        tables.memory.forget_slots(number, slots)
        tables.forget_blocks(number, sorted(blocks))
        if states is not None and number == states.group:
            for step in (batch, *later):
                spoilt |= {seq.seq_id: seq for seq in states.filled_by(step, blocks)}
            continue
        for seq in running:
            if not blocks.isdisjoint(tables.held(seq, number)):
                spoilt[seq.seq_id] = seq
        for seq in waiting:
            if seq.swap_slots and not slots.isdisjoint(slots_of(seq)[number]):
                lost[seq.seq_id] = seq
    return list(spoilt.values()), list(lost.values())


def _chain(tables: Holdings, seq: Sequence) -> list[PrefixNode]:
    """Return the prefix nodes of a swapped sequence's full blocks, in order, made where they are
    missing.

    The last one is held, so that none is dropped. The list is empty without a prefix cache.
    """
    prefix, size = tables.prefix, tables.block_size
    chain: list[PrefixNode] = []
    if prefix is None:
        return chain
    for i in range(seq.num_swapped_tokens // size):
        tokens = seq.token_ids[i * size : (i + 1) * size]
        chain.append(prefix.child(chain[-1] if chain else None, seq.request.salt, tokens))
    if chain:
        prefix.hold(chain[-1])
    return chain


def _plan(
    tables: Holdings,
    number: int,
    group: list[Sequence],
    kept: list[list[int]],
    chains: list[list[PrefixNode]],
    spare: int,
) -> list[list[_Source]] | None:
    """Return, for each sample, the source of each of its blocks in a group; None if too few are
    free.

    Args:
        number: the group's number.
        group: the samples, swapped out.
        kept: the slots of main memory that each has in this group; -1 for a block that was not
            kept.
        chains: the prefix nodes of the full blocks of each.
        spare: blocks that must stay free; with some, those that the samples need next, too.
    """
    allocator, window = tables.pools[number].allocator, tables.pools[number].window
    sources: list[list[_Source]] = []
    slot_of: dict[int, int] = {}  # of nodes: samples with equal tokens share one
    moved, revived = set[int](), set[int]()
    grown = 0
    for seq, slots, chain in zip(group, kept, chains, strict=True):
        own: list[_Source] = []
        for i, slot in enumerate(slots):
            block = chain[i].blocks[number] if i < len(chain) and slot >= 0 else -1
            if slot >= 0 and block < 0:
                if i < len(chain):
                    slot = slot_of.setdefault(id(chain[i]), slot)
                moved.add(slot)
                own.append(_Source(-1, slot))
                continue
            if block >= 0 and allocator.ref_count(block) == 0:
                revived.add(block)
            own.append(_Source(block, -1))
        sources.append(own)
        lacking = tables.blocks_for(seq.num_tokens) - len(slots)
        if window is not None:
            lacking = min(lacking, window_blocks(window, tables.max_run, tables.block_size))
        grown += lacking
    needed = len(moved) + len(revived) + (spare + grown if spare else 0)
    return None if needed > allocator.num_free else sources


def _fetch(
    tables: Holdings,
    number: int,
    plan: list[list[_Source]],
    chains: list[list[PrefixNode]],
) -> list[list[int]]:
    """Take the blocks of a plan in group `number`; return the table of each sample.

    A block that is on the device is shared. For one in a slot a new block is allocated, which the
    next step fills, and which is entered into the sample's prefix node. Places without a block are
    0.
    """
    memory, prefix, allocator = tables.memory, tables.prefix, tables.pools[number].allocator
    assert memory is not None
    allocator.share([source.block for own in plan for source in own if source.block >= 0])
    slots = sorted({source.slot for own in plan for source in own if source.slot >= 0})
    block_of = dict(zip(slots, sorted(allocator.allocate(len(slots))), strict=True))
    for slot, block in block_of.items():
        memory.bring(number, slot, block)
    owned: set[int] = set()
    found: list[list[int]] = []
    for own, chain in zip(plan, chains, strict=True):
        table: list[int] = []
        for i, source in enumerate(own):
            block = source.block
            if source.slot >= 0:
                block = block_of[source.slot]
                if block in owned:
                    allocator.share([block])
                owned.add(block)
                if i < len(chain):
                    assert prefix is not None
                    same = prefix.put(chain[i], number, block)
                    assert same == block, "what is brought is not on the device"
            table.append(max(block, 0))
        found.append(table)
    return found
