"""Beams and guessed tokens under every order, victim and preemption, beside main memory and files.

The stories are those of test_tier_simulation.py with searches in them, and guesses in half of them.
"""

from __future__ import annotations

import random

import pytest

from tests.engine.beam_model import BeamModel
from tests.engine.test_beams import BeamStory, is_search, random_beams
from tests.engine.test_speculative import DraftStory, Oracle
from tests.engine.test_tier_simulation import TierStory
from tilewise.engine.scheduling.beams import Beams
from tilewise.engine.scheduling.deadlines import Deadlines
from tilewise.engine.scheduling.preemption import Preemption
from tilewise.errors import RequestError


class EveryStory(BeamStory, TierStory):
    """A story of tiers in which half of the requests search, and what others draw is guessed."""

    def __init__(self, seed: int, **settings) -> None:
        super().__init__(seed, **settings)
        self.model = self.store.model = BeamModel(self.scheduler, self.is_damaging)
        if seed % 3:
            self.scheduler.speculation = Oracle(random.Random(seed))

    def arrive(self, request_id: str) -> None:
        TierStory.arrive(self, request_id)

    def arrive_alone(self, request_id: str) -> None:
        if self.rng.random() < 0.5:
            super().arrive_alone(request_id)
            return
        request = random_beams(self.rng, request_id)
        request.user = self.rng.choice(["u0", "u1", "u2"])
        request.priority = self.rng.randrange(3)
        if self.rng.random() < 0.2:
            request.deadline_s = self.rng.choice([3.0, 9.0, 20.0])
        if self.rng.random() < 0.1:
            request.max_queue_s = self.rng.choice([0.0, 2.0, 9.0])
        try:
            self.scheduler.add(request)
        except RequestError:
            return
        self.requests[request_id] = request

    def play(self) -> None:
        super().play()
        DraftStory.check_what_is_findable(self)
        assert not self.scheduler.roster.first_ids
        assert not self.scheduler.trace._lost, "what nobody waits for is forgotten"

    def judge(self) -> None:
        if self.scheduler.order.name != "fcfs" or self.aborted:
            self.first_runs = [r for r in self.requests if r in set(self.first_runs)]
        super().judge()

    def retry_failed(self) -> None:
        self.failed = {r for r in self.failed if not is_search(self.requests[r])}
        super().retry_failed()


def play(seed: int) -> EveryStory:
    story = EveryStory(seed, overlap=seed % 2 == 1, fails=seed % 5 == 3, damages=seed % 7 == 4)
    story.play()
    story.judge()
    return story


@pytest.mark.parametrize("part", range(8))
def test_any_schedule_gives_the_beams_and_tokens_of_a_request_alone(part: int):
    for seed in range(part * 25, (part + 1) * 25):
        play(seed).retry_failed()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_thousands_of_schedules_give_the_beams_and_tokens_of_a_request_alone(part: int):
    for seed in range(10_000 + part * 1000, 10_000 + (part + 1) * 1000):
        play(seed).retry_failed()


def test_the_random_schedules_reach_what_they_are_meant_to_test(monkeypatch):
    seen = dict.fromkeys(("for another", "late", "swapped", "right", "recalled"), 0)
    who_makes_way = Beams.who_makes_way

    def making_way(self, seq, lacks_seat):
        found = who_makes_way(self, seq, lacks_seat)
        seen["for another"] += found is not None and found.request is not seq.request
        return found

    monkeypatch.setattr(Beams, "who_makes_way", making_way)
    for seed in range(150):
        story = play(seed)
        stats = story.scheduler.stats()
        seen["late"] += sum(is_search(story.requests[r]) for r in story.expired)
        seen["swapped"] += stats.num_swapped
        seen["right"] += stats.num_accepted_drafts
        seen["recalled"] += stats.num_recalled_tokens
        if all(seen.values()):
            return
    pytest.fail(f"not all came: {seen}")


FAMILY, RECOMPUTE = Preemption._family, Preemption.recompute


def make_way_for_none_but_siblings(beams, seq, lacks_seat):
    if beams.search_of(seq) is None or (beams.tables.has_fenced and not lacks_seat):
        return None
    resting = filter(beams.is_resting, reversed(beams.roster.running))
    return next((s for s in resting if s.request is seq.request), None)


def forget_the_deadline_of_who_was_dropped(deadlines, entry):
    family = deadlines._roster.requests.get(entry.request_id)
    if family is None or family[0].seq_id != entry.seq_id:
        return False
    return not (entry.may_run and family[0].was_admitted)


def swap_beams(preemption, seq, first):
    searches, preemption.beams.searches = preemption.beams.searches, {}
    try:
        return FAMILY(preemption, seq, first)
    finally:
        preemption.beams.searches = searches


def leave_the_ranks(preemption, seq):
    searches, preemption.beams.searches = preemption.beams.searches, {}
    try:
        RECOMPUTE(preemption, seq)
    finally:
        preemption.beams.searches = searches


MISTAKES = [
    (Beams, "who_makes_way", make_way_for_none_but_siblings),
    (Deadlines, "_concerns", forget_the_deadline_of_who_was_dropped),
    (Preemption, "_family", swap_beams),
    (Preemption, "recompute", leave_the_ranks),
]
