"""All that a scheduler can do at once: whatever meets, each request gets what it gets alone.

The stories beside this one each add one subject to the plain one. Here a schedule draws from all of
them: layers with windows, main memory and files, every order, victim and preemption, searches,
guesses, deadlines, salts, users who flood, prompts that are scored, texts whose next step waits for
the host, steps that fail or are taken back, and callers who look and meddle at any time.
"""

from __future__ import annotations

import random
from dataclasses import replace
from unittest import mock

import pytest

from tests.engine.beam_model import BeamModel
from tests.engine.simulator import Outputs, VirtualStore, check_idle
from tests.engine.state_model import StateStore
from tests.engine.test_beams import BeamStory, Recorder, is_search, random_beams
from tests.engine.test_group_simulation import GroupStory
from tests.engine.test_scheduler_simulation import MAX_MODEL_LEN, Story, random_request
from tests.engine.test_speculative import DraftStory, Oracle, TreeOracle
from tests.engine.test_tier_simulation import TierStory
from tilewise.engine.scheduling import newcomers
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.scheduling.withdrawal import pause_transfers, resume_transfers
from tilewise.engine.tables.state_tables import StateLimits
from tilewise.errors import RequestError

KINDS = ((None,), (None,), (7,), (None, 5), (None, 3, 12), (16, 2))


class WholeStory(BeamStory):
    """A random run with everything in it; a clock that goes one second a step.

    Attributes:
        crowds: how many arrive together.
    """

    crowds: tuple[int, ...] = (1, 1, 2, 3, 9)

    end_who_is_late, note_expiry = TierStory.end_who_is_late, TierStory.note_expiry
    model_type = BeamModel

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.overlap = rng.random() < 0.6
        self.fails, self.damages = rng.random() < 0.25, rng.random() < 0.15
        self.now, self.expired = 0.0, dict[str, float]()
        self.scheduler = self.random_scheduler()
        self.is_plain = self.scheduler.tables.is_one_group
        self.model = self.model_type(self.scheduler, self.is_damaging)
        for store in self.stores:
            store.model = self.model
        kinds = [None, Oracle, TreeOracle] if self.is_plain else [None, Oracle, Oracle]
        guesses = rng.choice(kinds)
        if guesses is not None:
            self.scheduler.speculation = guesses(random.Random(seed))
        self.outputs, self.sums = Outputs(), dict[tuple[str, int], float]()
        self.requests, self.aborted, self.stopped = {}, set(), set()
        self.first_runs, self.failed, self.known_damage = [], set(), set()
        self.num_withdrawn = 0

    def random_states(self) -> StateLimits | None:
        """Return the sizes of states, where the model has any."""
        return None

    def random_scheduler(self) -> Scheduler:
        rng = self.rng
        windows, room = rng.choice(KINDS), rng.choice([0, 0, 2, 6, 30])
        states = self.random_states()
        self.stores = [VirtualStore(rng.random, group) for group in range(len(windows))]
        if states is not None:
            self.stores.append(StateStore(rng.random, len(windows)))
        if not room or rng.random() < 0.4:
            self.stores = []
        is_plain = windows == (None,) and states is None
        store = self.stores[0] if self.stores and is_plain else self.stores or None
        policy = rng.choice(["fcfs", "priority", "fair", "fair"])
        scheduler = Scheduler(
            [rng.choice([5, 8, 13, 30]) for _ in windows],
            rng.choice([1, 2, 3, 4]),
            windows=windows,
            max_num_seqs=rng.choice([2, 3, 8, 12]),
            max_num_batched_tokens=rng.choice([2, 7, 16, 64]),
            max_model_len=MAX_MODEL_LEN,
            long_prefill_token_threshold=rng.choice([None, None, 1, 7]),
            enable_prefix_caching=rng.random() < 0.8,
            max_in_flight=2 if self.overlap else 1,
            scheduling_policy=policy,
            user_weights={"u1": 2.0} if policy == "fair" else None,
            preemption=rng.choice(["auto", "recompute", "swap", "swap"]) if room else "auto",
            victim=rng.choice(["newest", "cheapest"]),
            num_swap_blocks=[
                room * rng.choice([1, 2]) for _ in range(len(windows) + (states is not None))
            ],
            store=store,
            states=states,
            max_waiting_requests=rng.choice([None, None, None, 3]),
            fair_prompt_tokens=rng.choice([None, 1, 8]),
            clock=lambda: self.now,
        )
        rates = scheduler.preemption.rates
        rates.prefill_tokens, rates.link_blocks = 10.0, rng.choice([0.0, 1.0, 100.0])
        schedule = scheduler.schedule

        def expiring():
            self.now += 1.0
            self.end_who_is_late()
            self.look()
            batch = schedule()
            self.note_expiry(batch)
            return batch

        scheduler.schedule = expiring
        return scheduler

    def look(self) -> None:
        """Ask what a caller may ask at any time."""
        if self.rng.random() < 0.2:
            for request_id in list(self.scheduler.roster.requests):
                assert self.scheduler.explain(request_id)
            self.scheduler.stats()
        if self.rng.random() < 0.05:
            is_idle = not self.scheduler.roster.running
            assert self.scheduler.reset_prefix_cache() <= is_idle
        if self.rng.random() < 0.03:
            (pause_transfers if self.rng.random() < 0.5 else resume_transfers)(self.scheduler)

    def arrive_alone(self, request_id: str) -> None:
        rng = self.rng
        searches = rng.random() < 0.3
        request = (random_beams if searches else random_request)(rng, request_id)
        if rng.random() < 0.6:
            prompt = request.prompt_token_ids[-rng.randrange(1, 9) :]
            request = replace(request, prompt_token_ids=prompt)
            if not searches:
                sampling = replace(request.sampling, max_tokens=rng.choice([5, 9, 14]))
                request = replace(request, sampling=sampling, eos_token_ids=())
        if not searches and rng.random() < 0.1:
            request = replace(request, sampling=replace(request.sampling, prompt_logprobs=1))
        request.needs_tokens = not searches and rng.random() < 0.15
        request.user = rng.choice(["u0", "u0", "u0", "u1", "u2"])
        request.priority = rng.randrange(3)
        if rng.random() < 0.15:
            request.deadline_s = rng.choice([0.0, 3.0, 9.0, 20.0])
        if rng.random() < 0.1:
            request.max_queue_s = rng.choice([0.0, 2.0, 9.0])
        try:
            self.scheduler.add(request)
        except RequestError:
            return
        self.requests[request_id] = request

    def arrive(self, request_id: str) -> None:
        for i in range(self.rng.choice(self.crowds)):
            self.arrive_alone(f"{request_id} {i}")

    def update(self, batch) -> None:
        """Take a step's results by the story of the tables that these are."""
        outputs = self.outputs
        self.outputs = Recorder(outputs, self.sums)
        (Story if self.is_plain else GroupStory).update(self, batch)
        self.outputs = outputs

    def play(self) -> None:
        super().play()
        self.scheduler.check_integrity()
        resume_transfers(self.scheduler)
        check_idle(self.scheduler)
        assert all(used == 0 for used, _ in self.scheduler.stats().other_groups)
        assert not self.scheduler.roster.first_ids
        if self.is_plain:
            DraftStory.check_what_is_findable(self)

    def judge(self) -> None:
        self.first_runs = [r for r in self.requests if r in set(self.first_runs)]
        super().judge()


def play(seed: int) -> WholeStory:
    story = WholeStory(seed)
    with mock.patch.object(newcomers, "FLOOD", 2):  # so few blocks hold no real one
        story.play()
    story.judge()
    return story


@pytest.mark.parametrize("part", range(3))
def test_any_schedule_gives_the_beams_and_tokens_of_a_request_alone(part: int):
    for seed in range(part * 20, (part + 1) * 20):
        play(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_thousands_of_schedules_give_the_beams_and_tokens_of_a_request_alone(part: int):
    for seed in range(10_000 + part * 1000, 10_000 + (part + 1) * 1000):
        play(seed)


def test_the_random_schedules_reach_what_they_are_meant_to_test(monkeypatch):
    kinds = (
        "beams over windows", "beams late", "beams beside swapped", "guesses over windows",
        "swapped over windows", "files", "apart", "reset", "needs tokens", "scored",
    )  # fmt: skip
    seen = dict.fromkeys(kinds, 0)
    schedule = Scheduler.schedule

    def scheduling(self):
        batch = schedule(self)
        seen["apart"] += batch is not None and self.newcomers.ran_alone
        live = self.roster.live.values()
        seen["beams beside swapped"] += bool(self.beams.searches) and any(
            s.swap_slots for s in live
        )
        return batch

    monkeypatch.setattr(Scheduler, "schedule", scheduling)
    for seed in range(300):
        story = play(seed)
        stats, ended = story.scheduler.stats(), story.outputs.reasons
        searches = [r for r in story.requests.values() if is_search(r)]
        draws = [r for r in story.requests.values() if not is_search(r)]
        has_windows = not story.is_plain
        seen["beams over windows"] += has_windows and any(
            (r.request_id, 0) in ended for r in searches
        )
        seen["beams late"] += any(r.request_id in story.expired for r in searches)
        seen["guesses over windows"] += has_windows and stats.num_accepted_drafts > 0
        seen["swapped over windows"] += has_windows and stats.num_swapped > 0
        seen["files"] += sum(store.num_hits for store in story.stores)
        seen["reset"] += any(e["kind"] == "reset" for e in story.scheduler.trace.since(0))
        seen["needs tokens"] += any(r.needs_tokens for r in draws)
        seen["scored"] += any(r.sampling.prompt_logprobs is not None for r in draws)
        if all(seen.values()):
            return
    pytest.fail(f"not all came: {seen}")
