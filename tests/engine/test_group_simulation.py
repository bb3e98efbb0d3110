"""Random schedules over groups of layers with windows: tokens never depend on others or on hits.

The virtual cache has slots for every group, of which a query reads what its window shows; a block
that was let go of too early has been given to somebody else or is spoilt, and shows.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest

from tests.engine.simulator import Outputs, VirtualModel, VirtualStore, check_idle
from tests.engine.test_scheduler_simulation import MAX_MODEL_LEN, Story, random_request
from tests.engine.test_tier_simulation import keep_without_a_transfer, pin_nothing, use_what_is_torn
from tilewise.cache.prefix import PrefixCache
from tilewise.engine.config import PromptLookup
from tilewise.engine.record.replay import Pool
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.tables import block_tables
from tilewise.engine.tables.admission import window_blocks
from tilewise.engine.tables.swap_space import SwapSpace
from tilewise.errors import RequestError

KINDS = ((7,), (1,), (None, 5), (None, 3, 12), (16, 2), (None, 1), (None, 9), (None, 30, 4))


def random_groups(
    rng: random.Random, max_in_flight: int, chance: random.Random | None = None
) -> Scheduler:
    """Return a scheduler; with `chance`, main memory has stores that lose blocks by it."""
    windows = rng.choice(KINDS)
    room = rng.choice([0, 0, 1, 4, 30])
    stores = None
    if chance is not None and room:
        stores = [VirtualStore(chance.random, group) for group in range(len(windows))]
    scheduler = Scheduler(
        [rng.choice([3, 5, 8, 13, 30]) for _ in windows],
        rng.choice([1, 2, 3, 4, 8]),
        windows=windows,
        max_num_seqs=rng.choice([1, 2, 3, 8]),
        max_num_batched_tokens=rng.choice([1, 2, 7, 16, 64]),
        max_model_len=MAX_MODEL_LEN,
        long_prefill_token_threshold=rng.choice([None, None, 1, 7]),
        enable_prefix_caching=rng.random() < 0.8,
        max_in_flight=max_in_flight,
        speculative=PromptLookup(3, 2, 1, is_adaptive=False) if rng.random() < 0.3 else None,
        scheduling_policy=rng.choice(["fcfs", "fcfs", "priority", "fair"]),
        victim=rng.choice(["newest", "newest", "cheapest"]),
        preemption=rng.choice(["auto", "recompute", "swap", "swap"]) if room else "auto",
        num_swap_blocks=[room * rng.choice([1, 2]) for _ in windows],
        store=stores,
    )
    rates = scheduler.preemption.rates
    rates.prefill_tokens, rates.link_blocks = 10.0, rng.choice([0.0, 1.0, 100.0])
    return scheduler


def owned_damage(story, batch) -> list[tuple[str, set[int]]]:
    """Return for the sequences of each request what of theirs is damaged, before a result."""
    tables = story.scheduler.tables
    # What a later step, scheduled already, will write is still somebody else's.
    written = {run.seq_id: run.start + len(run.token_ids) for run in batch.sequences}
    owned = []
    for seq in story.scheduler.roster.live.values():
        if seq not in tables.places:
            continue
        for group, pool in enumerate(story.model.pools):
            first = tables.places[seq].gone[group] * story.model.block_size
            slots = [v for b in tables.held(seq, group) for v in pool[b]]
            end = written.get(seq.seq_id, seq.num_computed_tokens)
            computed = slots[: max(end - first, 0)]
            damage = {v for v in computed if v is not None and v < 0}
            owned.append((seq.request.request_id, damage))
    return owned


def check_damage(story) -> None:
    """Refuse damage that can be found."""
    tables = story.scheduler.tables
    for pool, slots in zip(tables.pools, story.model.pools, strict=True):
        findable = [b for b in range(pool.allocator.num_blocks) if pool.allocator.is_cached(b)]
        found = {value for b in findable for value in slots[b]}
        assert not story.known_damage & found, "known damage is never found"
    for room, host in zip(story.model.rooms, story.model.hosts, strict=False):
        kept = {value for slot in room.node_at for value in host[slot]}
        assert not story.known_damage & kept, "nor in main memory"
    for store in story.stores:
        kept = {v for _, values in store.files.values() for v in values}
        assert not story.known_damage & kept, "nor in files"


class GroupStory(Story):
    """A random run over groups of layers; all else is as in Story."""

    def __init__(
        self, seed: int, *, overlap: bool = False, fails: bool = False, damages: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        # Not drawn by the story's own numbers: a seed stays the story that it was.
        chance = random.Random(seed) if seed % 3 == 0 else None
        self.scheduler = random_groups(self.rng, 2 if overlap else 1, chance)
        self.overlap, self.fails, self.damages = overlap, fails, damages
        self.model = VirtualModel(self.scheduler, self.is_damaging)
        memory = self.scheduler.tables.memory
        self.stores = [] if memory is None else list(memory.stores)
        for store in self.stores:
            store.model = self.model
        self.outputs = Outputs()
        self.requests, self.aborted, self.stopped = {}, set(), set()
        self.first_runs, self.failed, self.known_damage = [], set(), set()
        self.num_withdrawn = 0

    def update(self, batch) -> None:
        """Take a step's results; what is known to be damaged then must not be findable."""
        samples = self.model.result(batch)
        has_damage = self.model.num_damages > 0
        owned = owned_damage(self, batch) if has_damage else []
        events = self.scheduler.update(batch, samples)
        self.outputs.add(events)
        failed = {event.request_id for event in events if event.error is not None}
        self.failed |= failed
        if has_damage:
            self.known_damage |= {v for r, damage in owned if r in failed for v in damage}
            check_damage(self)

    def arrive(self, request_id: str) -> None:
        """Beside main memory several at once, so that blocks are short."""
        for i in range(self.rng.choice([1, 2, 3]) if self.model.rooms else 1):
            self.arrive_alone(f"{request_id} {i}")

    def arrive_alone(self, request_id: str) -> None:
        request = random_request(self.rng, request_id)
        if self.model.rooms and self.rng.random() < 0.7:
            prompt = request.prompt_token_ids[-self.rng.randrange(1, 9) :]
            length = self.rng.choice([5, 9, 14])
            sampling = replace(request.sampling, max_tokens=length, stop_token_ids=None)
            request = replace(request, prompt_token_ids=prompt, sampling=sampling, eos_token_ids=())
        try:
            self.scheduler.add(request)
        except RequestError:
            limits = self.scheduler.limits
            tokens = len(request.prompt_token_ids) + (request.sampling.max_tokens or 1)
            assert any(
                (window is None or count < window_blocks(window, limits.max_run, limits.block_size))
                and min(tokens, MAX_MODEL_LEN) > count * limits.block_size + 1
                for window, count in zip(
                    limits.windows, (limits.num_blocks, *limits.other_blocks), strict=True
                )
            )
            return
        self.requests[request_id] = request

    def play(self) -> None:
        super().play()
        check_idle(self.scheduler)
        for used, _ in self.scheduler.stats().other_groups:
            assert used == 0
        self.check_replay()

    def check_replay(self) -> None:
        """What the trace says of the first group is what its pool holds."""
        pool, allocator = Pool(), self.scheduler.tables.allocator
        for event in self.scheduler.trace.since(0):
            pool.take(event)
        counts = [allocator.ref_count(b) for b in range(allocator.num_blocks)]
        assert pool.counts == counts
        assert pool.known == {b for b in range(len(counts)) if allocator.is_cached(b)}

    def judge(self) -> None:
        if self.scheduler.order.name != "fcfs":
            self.first_runs = [r for r in self.requests if r in set(self.first_runs)]
        super().judge()


def play(seed: int) -> GroupStory:
    story = GroupStory(seed, overlap=seed % 2 == 1, fails=seed % 5 == 3, damages=seed % 7 == 4)
    story.play()
    story.judge()
    if story.damages:
        story.retry_failed()
    return story


def test_a_hit_is_looked_for_again_when_what_main_memory_keeps_of_it_is_dropped():
    """A transfer fails between two looks at who waits: one in 16,667 random schedules showed it."""
    play(1_015_283)


# Of 200 schedules these alone show a mistake of tests/mutants.py: a block that lies behind a window
# is given away beside an unfinished step.
SHOWS_LATE = (147, 165)


@pytest.mark.parametrize("part", range(8))
def test_any_schedule_of_groups_gives_the_tokens_of_a_request_alone(part: int):
    for seed in (*range(part * 25, (part + 1) * 25), *(SHOWS_LATE if part == 0 else ())):
        play(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_thousands_of_schedules_of_groups_give_the_tokens_of_a_request_alone(part: int):
    for seed in range(10_000 + part * 1000, 10_000 + (part + 1) * 1000):
        play(seed)


def test_the_random_schedules_reach_what_they_are_meant_to_test():
    seen = dict.fromkeys(
        (
            "passed", "preemptions", "hits", "window hits", "other copies", "taken over", "drafts",
            "swapped", "families", "recalled", "kept", "full", "revoked", "withdrawn",
            "passed then", "files", "files in windows", "inside", "inside taken over",
            "inside behind a window", "one source twice", "inside beside others",
        ),
        0,
    )  # fmt: skip
    rare = ("passed then", "files", "inside taken over")
    # What is rare comes in these; where they reach it no longer, all others are played.
    first = (38, 45, 54, 128, 133, 150, 183, 194, 234, 311)
    for seed in dict.fromkeys((*first, *range(450))):
        story = GroupStory(seed, overlap=seed % 2 == 1, fails=seed % 5 == 3)
        tables, submit = story.scheduler.tables, story.model.submit
        size = tables.block_size

        def passing(seq, number, first, go=tables._pass, places=tables.places):
            before = places[seq].gone[number]
            go(seq, number, first)
            seen["passed"] += places[seq].gone[number] - before

        def reserving(seq, spare, reserve=tables.reserve, tables=tables, size=size):
            there = reserve(seq, spare)
            if there and seq.num_computed_tokens:
                seen["window hits"] += max(tables.places[seq].gone) > 0
                is_inside = seq.num_computed_tokens % size > 0
                seen["inside"] += is_inside
                seen["inside behind a window"] += is_inside and max(tables.places[seq].gone) > 0
                seen["inside beside others"] += is_inside and tables.has_fenced
            return there

        def adopting(seq, adopt=tables.adopt, size=size):
            gained = adopt(seq)
            seen["taken over"] += gained
            seen["inside taken over"] += gained > 0 and seq.num_computed_tokens % size > 0
            return gained

        def swapping(family, swap_out=tables.swap_out):
            done = swap_out(family)
            seen["families"] += done and len(family) > 1
            seen["full"] += not done
            return done

        def revoking(batch, later, running, waiting, revoke=tables.revoke):
            seen["revoked"] += batch.is_moving
            seen["withdrawn"] += 1
            return revoke(batch, later, running, waiting)

        def having(seq, has_passed=tables.has_passed):
            seen["passed then"] += has_passed(seq)
            return has_passed(seq)

        def submitting(batch, submit=submit, tables=tables):
            seen["other copies"] += sum(map(len, batch.other_copies))
            for number, pool in enumerate(tables.pools):
                sources = [source for source, _ in batch.of_group(number).block_copies]
                found = {s for s in sources if pool.allocator.is_cached(s)}
                seen["one source twice"] += any(sources.count(s) > 1 for s in found)
            seen["kept"] += sum(len(out) for out, _ in batch.other_moves)
            submit(batch)

        tables._pass, tables.reserve, tables.adopt = passing, reserving, adopting
        tables.swap_out, tables.revoke, tables.has_passed = swapping, revoking, having
        story.model.submit = submitting
        story.play()
        stats = story.scheduler.stats()
        seen["preemptions"] += stats.num_preemptions
        seen["hits"] += stats.prefix_hit_tokens
        seen["drafts"] += stats.num_accepted_drafts
        seen["swapped"] += stats.num_swapped
        seen["recalled"] += stats.num_recalled_tokens
        for store, window in zip(story.stores, tables.pools, strict=False):
            seen["files" if window.window is None else "files in windows"] += store.num_hits
        few = {name: n for name, n in seen.items() if n <= (0 if name in rare else 3)}
        if not few:
            return
    pytest.fail(f"these came too seldom: {few}")


def failing(seed: int) -> None:
    story = GroupStory(seed, overlap=seed % 2 == 1, fails=True)
    story.play()
    story.judge()


# Planted mistakes, see test_planted_mistakes.py.

FIRST, SEEN, BRING_BACK = block_tables.first_block, block_tables.seen, block_tables.bring_back
INSIDE = block_tables.begin_inside
COPY, BEGINS = block_tables.BlockTables._copy, PrefixCache.begins_inside
SWAP_OUT, TAKE = SwapSpace.swap_out, block_tables.take


def pass_a_key_too_early(position, window, block_size):
    return FIRST(position + 1, window, block_size)


def keep_one_block_too_few(tables, seq):
    found = SEEN(tables, seq)
    for own in found:
        first = own.count(-1)
        if first + 1 < len(own):
            own[first] = -1
    return found


def move_the_first_group_only(swap, family, held):
    done = SWAP_OUT(swap, family, held)
    for room in swap.rooms[1:] if done else ():
        room.going.clear()
    return done


def count_one_token_too_many(tables, group, spare):
    done = BRING_BACK(tables, group, spare)
    for seq in group if done else ():
        seq.num_computed_tokens += 1
        seq.num_scheduled_tokens += 1
    return done


def own_the_tail_alone(tables, group, spare):
    done = BRING_BACK(tables, group, spare)
    for seq in group if done else ():
        seq.shares_tail = False
    return done


def tell_of_more_than_came_back(tables, group, spare):
    done = BRING_BACK(tables, group, spare)
    for seq in group if done else ():
        tables.places[seq].gone[-1] = 0
    return done


def take_without_bringing(tables, number, nodes, count):
    room = tables.memory.rooms[number] if tables.memory else None
    before = dict(room.coming) if room else {}
    found = TAKE(tables, number, nodes, count)
    for block in set(room.coming) - set(before) if room else ():
        room.pins.remove(slot := room.coming.pop(block))
        room.allocator.release([slot])
    return found


def forget_whose_slot_it_was(swap, group, slot):
    swap.rooms[group].node_at.pop(slot)


def begin_one_token_too_far(tables, seq, spare, *, is_fresh):
    count = INSIDE(tables, seq, spare, is_fresh=is_fresh)
    return count + (0 < count < seq.num_tokens - seq.num_registered_blocks * tables.block_size - 1)


def begin_without_a_copy(tables, seq, spare, *, is_fresh):
    count = INSIDE(tables, seq, spare, is_fresh=is_fresh)
    seq.shares_tail = False
    return count


def hold_no_source_of_the_last_group(tables, seq, spare, *, is_fresh):
    count = INSIDE(tables, seq, spare, is_fresh=is_fresh)
    if count:
        last = len(tables.pools) - 1
        block = tables.table(seq, last)[seq.num_registered_blocks]
        tables.pools[last].allocator.release([block])
    return count


def copy_in_all_groups_but_the_last(tables, seq, number, place):
    source = tables.table(seq, number)[place]
    COPY(tables, seq, number, place)
    pool = tables.pools[number]
    if number == len(tables.pools) - 1 and pool.allocator.is_cached(source):
        pool.copies.pop()
        pool.sources[source] = max(0, pool.sources[source] - 1)
        tables.let_go(number, [source])


def take_a_child_that_a_group_lacks(tree, node, token_ids):
    blocks = [list(child.blocks) for child in node.children.values()]
    for child in node.children.values():
        child.blocks = [max(0, block) for block in child.blocks]
    found, count = BEGINS(tree, node, token_ids)
    kept = found.blocks if found else None
    for child, own in zip(node.children.values(), blocks, strict=True):
        child.blocks = own
    if found is not None and min(found.blocks) < 0:
        odd = copy.copy(found)
        odd.blocks = kept
        return odd, count
    return found, count


def begin_under_any_parent(tree, node, token_ids):
    found = [BEGINS(tree, other, token_ids) for other in tree._all() if other.parent is not None]
    return max(found, key=lambda pair: pair[1], default=(None, 0))


def take_any_child(tree, node, token_ids):
    found, count = BEGINS(tree, node, token_ids)
    whole = [child for child in node.children.values() if min(child.blocks) >= 0]
    return (whole[0], count) if found else (None, 0)


def give_back_beside_unfinished_steps(tables, seq, spare, *, is_fresh):
    return INSIDE(tables, seq, spare, is_fresh=True)


MISTAKES = {
    "a hit inside blocks of groups is a token too long": (
        block_tables, "begin_inside", begin_one_token_too_far, play,
    ),
    "one token behind a hit inside blocks is written in place": (
        block_tables, "begin_inside", begin_without_a_copy, play,
    ),
    "the source of one group is not held": (
        block_tables, "begin_inside", hold_no_source_of_the_last_group, play,
    ),
    "what was found inside blocks is not copied in one group": (
        block_tables.BlockTables, "_copy", copy_in_all_groups_but_the_last, play,
    ),
    "a source is taken that one group has no more": (
        PrefixCache, "begins_inside", take_a_child_that_a_group_lacks, play,
    ),
    "another prompt's blocks are copied in groups": (
        PrefixCache, "begins_inside", begin_under_any_parent, play,
    ),
    "another child's blocks are copied in groups": (
        PrefixCache, "begins_inside", take_any_child, play,
    ),
    "what a source replaces is given back at once": (
        block_tables, "begin_inside", give_back_beside_unfinished_steps, play,
    ),
    "a torn file of a group is used": (block_tables, "read_files", use_what_is_torn, play),
    "a window is a key too short": (block_tables, "first_block", pass_a_key_too_early, play),
    "the first block of a window is not swapped": (
        block_tables, "seen", keep_one_block_too_few, play,
    ),
    "one group alone is swapped": (SwapSpace, "swap_out", move_the_first_group_only, play),
    "slots of groups are not pinned": (SwapSpace, "begin_step", pin_nothing, play),
    "what a group keeps was never moved": (SwapSpace, "keep", keep_without_a_transfer, play),
    "one token too many is back in groups": (
        block_tables, "bring_back", count_one_token_too_many, play,
    ),
    "a shared tail of groups is written in place": (
        block_tables, "bring_back", own_the_tail_alone, play,
    ),
    "what a window has passed is held again": (
        block_tables, "bring_back", tell_of_more_than_came_back, play,
    ),
    "what a group finds in main memory stays there": (
        block_tables, "take", take_without_bringing, play,
    ),
    "a slot is given away and still found": (
        SwapSpace, "_evict", forget_whose_slot_it_was, play,
    ),
    "an ended sequence keeps slots of groups": (
        block_tables.BlockTables, "drop_swapped", lambda tables, seq: None, play,
    ),
    "a failed step's transfers of groups are trusted": (
        block_tables, "revoke_moves", lambda t, batch, later, running, waiting: ([], []), failing,
    ),
    "who has passed too much goes on": (
        block_tables.BlockTables, "has_passed", lambda tables, seq: False, failing,
    ),
    "damage stays in main memory": (SwapSpace, "take_off", lambda swap, group, node: None, play),
}  # fmt: skip
