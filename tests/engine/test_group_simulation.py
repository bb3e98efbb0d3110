"""Random schedules over groups of layers with windows: tokens never depend on others or on hits.

The virtual cache has slots for every group, of which a query reads what its window shows; a block
that was let go of too early has been given to somebody else or is spoilt, and shows.
"""

from __future__ import annotations

import random

import pytest

from tests.engine.simulator import Outputs, VirtualModel, check_idle
from tests.engine.test_scheduler_simulation import MAX_MODEL_LEN, Story, random_request
from tilewise.engine.admission import window_blocks
from tilewise.engine.replay import Pool
from tilewise.engine.scheduler import Scheduler
from tilewise.engine.speculative import PromptLookup
from tilewise.errors import RequestError

KINDS = ((7,), (1,), (None, 5), (None, 3, 12), (16, 2), (None, 1), (None, 9), (None, 30, 4))


def random_groups(rng: random.Random, max_in_flight: int) -> Scheduler:
    windows = rng.choice(KINDS)
    return Scheduler(
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
    )


class GroupStory(Story):
    """A random run over groups of layers; all else is as in Story."""

    def __init__(
        self, seed: int, *, overlap: bool = False, fails: bool = False, damages: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self.scheduler = random_groups(self.rng, 2 if overlap else 1)
        self.overlap, self.fails, self.damages = overlap, fails, damages
        self.model = VirtualModel(self.scheduler, self.is_damaging)
        self.outputs = Outputs()
        self.requests, self.aborted, self.stopped = {}, set(), set()
        self.first_runs, self.failed, self.known_damage = [], set(), set()

    def update(self, batch) -> None:
        """Take a step's results; what is known to be damaged then must not be findable."""
        tables = self.scheduler.tables
        samples = self.model.result(batch)
        owned = []
        for seq in self.scheduler.roster.live.values():
            if seq.places is None:
                continue
            for group, pool in enumerate(self.model.pools):
                first = seq.places.gone[group] * self.model.block_size
                slots = [v for b in tables._held(seq, group) for v in pool[b]]
                computed = slots[: seq.num_scheduled_tokens - first]
                damage = {v for v in computed if v is not None and v < 0}
                owned.append((seq.request.request_id, damage))
        events = self.scheduler.update(batch, samples)
        self.outputs.add(events)
        failed = {event.request_id for event in events if event.error is not None}
        self.failed |= failed
        for request_id, damage in owned:
            if request_id in failed:
                self.known_damage |= damage
        for pool, slots in zip(tables.pools, self.model.pools, strict=True):
            findable = [b for b in range(pool.allocator.num_blocks) if pool.allocator.is_cached(b)]
            found = {value for b in findable for value in slots[b]}
            assert not self.known_damage & found, "known damage is never found"

    def arrive(self, request_id: str) -> None:
        request = random_request(self.rng, request_id)
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

    def fail(self, unfinished) -> None:
        self.discard(unfinished)  # only steps that swap are taken back, and groups do not

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


@pytest.mark.parametrize("part", range(8))
def test_any_schedule_of_groups_gives_the_tokens_of_a_request_alone(part: int):
    for seed in range(part * 25, (part + 1) * 25):
        play(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_thousands_of_schedules_of_groups_give_the_tokens_of_a_request_alone(part: int):
    for seed in range(10_000 + part * 1000, 10_000 + (part + 1) * 1000):
        play(seed)


def test_the_random_schedules_reach_what_they_are_meant_to_test():
    seen = dict.fromkeys(
        ("passed", "preemptions", "hits", "window hits", "other copies", "taken over", "drafts"), 0
    )
    for seed in range(450):
        story = GroupStory(seed, overlap=seed % 2 == 1, fails=seed % 5 == 3)
        tables, submit = story.scheduler.tables, story.model.submit

        def passing(seq, number, first, go=tables._pass):
            before = seq.places.gone[number]
            go(seq, number, first)
            seen["passed"] += seq.places.gone[number] - before

        def reserving(seq, spare, reserve=tables.reserve):
            there = reserve(seq, spare)
            if there and seq.num_computed_tokens:
                seen["window hits"] += max(seq.places.gone) > 0
            return there

        def adopting(seq, adopt=tables.adopt):
            gained = adopt(seq)
            seen["taken over"] += gained
            return gained

        def submitting(batch, submit=submit):
            seen["other copies"] += sum(map(len, batch.other_copies))
            submit(batch)

        tables._pass, tables.reserve, tables.adopt = passing, reserving, adopting
        story.model.submit = submitting
        story.play()
        stats = story.scheduler.stats()
        seen["preemptions"] += stats.num_preemptions
        seen["hits"] += stats.prefix_hit_tokens
        seen["drafts"] += stats.num_accepted_drafts
    assert min(seen.values()) > 10, seen
