"""A step for those alone who come beside a flood: when, how often, and that all end."""

from __future__ import annotations

import random

import pytest

from tests.engine import test_scheduler_simulation as simulation
from tests.engine.simulator import VirtualModel
from tests.engine.test_order import of, stepped
from tests.engine.test_scheduler import run_ids
from tilewise.engine.scheduling import newcomers
from tilewise.engine.scheduling.scheduler import Scheduler

FLOOD = 64


def make(fair_prompt_tokens=64, policy="fair", seats=128):
    return Scheduler(
        4000, 16, max_num_seqs=seats, max_num_batched_tokens=2048, max_model_len=1024,
        scheduling_policy=policy, fair_prompt_tokens=fair_prompt_tokens,
        enable_prefix_caching=False,
    )  # fmt: skip


def flooded(users=("flood",), **settings):
    """A scheduler in which FLOOD sequences decode, of these users in turn, and its model."""
    scheduler = make(**settings)
    model = VirtualModel(scheduler)
    for i in range(FLOOD):
        scheduler.add(of(users[i % len(users)], f"f{i}", [i + 1] * 24, max_tokens=64))
    while scheduler.roster.waiting:
        stepped(scheduler, model)
    return scheduler, model


def test_a_short_prompt_beside_a_flood_has_a_step_of_its_own():
    scheduler, model = flooded()
    scheduler.add(of("other", "o", [99] * 30, max_tokens=3))
    own = stepped(scheduler, model)
    assert (len(own.sequences), own.num_tokens) == (1, 30)
    assert len(scheduler.sequences("o")[0].token_ids) == 31, "its first token is there"
    everybody = stepped(scheduler, model)
    assert len(everybody.sequences) == FLOOD + 1
    assert everybody.num_tokens == FLOOD + 1


def test_prompts_of_the_flood_that_wait_do_not_come_with_it():
    scheduler, model = flooded()
    for i in range(20):
        scheduler.add(of("flood", f"more{i}", [100 + i] * 24, max_tokens=64))
    scheduler.add(of("other", "o", [99] * 30, max_tokens=3))
    scheduler.order.charge("other", -1000, 0)  # served least, as one who asks seldom is
    assert run_ids(scheduler, stepped(scheduler, model)) == ["o"]
    assert len(stepped(scheduler, model).sequences) > FLOOD


@pytest.mark.parametrize("count", [1, 5])
def test_all_who_come_together_share_it(count):
    scheduler, model = flooded()
    for i in range(count):
        scheduler.add(of(f"user {i}", f"o{i}", [200 + i] * 10, max_tokens=3))
    assert len(stepped(scheduler, model).sequences) == count


def test_who_runs_advances_in_every_second_step_whoever_comes():
    scheduler, model = flooded()
    sizes = []
    for i in range(12):
        scheduler.add(of(f"user {i}", f"o{i}", [200 + i] * 10, max_tokens=200))
        sizes.append(len(stepped(scheduler, model).sequences))
    assert [size < FLOOD for size in sizes] == [True, False] * 6


@pytest.mark.parametrize(
    ("users", "settings"),
    [
        (("a", "b"), {}),  # neither has more than half
        (tuple(f"u{i}" for i in range(FLOOD)), {}),
        (("flood",), {"fair_prompt_tokens": None}),  # a device whose steps are short
        (("flood",), {"policy": "fcfs"}),
    ],
)
def test_without_a_flood_under_fair_shares_a_prompt_joins_the_others(users, settings):
    scheduler, model = flooded(users, **settings)
    scheduler.add(of("other", "o", [99] * 30, max_tokens=3))
    assert len(stepped(scheduler, model).sequences) == FLOOD + 1


def test_the_flood_itself_and_few_sequences_have_none():
    scheduler, model = flooded()
    scheduler.add(of("flood", "again", [99] * 30, max_tokens=3))
    assert len(stepped(scheduler, model).sequences) == FLOOD + 1
    few = make()
    model = VirtualModel(few)
    for i in range(newcomers.FLOOD - 1):
        few.add(of("flood", f"f{i}", [i + 1] * 4, max_tokens=64))
    stepped(few, model)
    few.add(of("other", "o", [99] * 30, max_tokens=3))
    assert len(stepped(few, model).sequences) == newcomers.FLOOD


def test_a_step_that_was_sought_in_vain_was_not_everybodys(monkeypatch):
    """Beside an unfinished step for newcomers nobody could run: the next one is not theirs, too."""
    scheduler, model = flooded()
    scheduler.max_in_flight = 2
    scheduler.add(of("other", "o", [99] * 30, max_tokens=3))
    own = scheduler.schedule()
    assert own is not None
    model.submit(own)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "_schedule_running", lambda: ([], 2048, True))  # lacks blocks
        assert scheduler.schedule() is None
    scheduler.update(own, model.result(own))
    scheduler.add(of("third", "t", [98] * 30, max_tokens=3))
    assert len(stepped(scheduler, model).sequences) > FLOOD


def test_without_a_seat_everybody_goes_on():
    scheduler, model = flooded(seats=FLOOD)
    scheduler.add(of("other", "o", [99] * 30, max_tokens=3))
    for _ in range(3):
        assert len(stepped(scheduler, model).sequences) == FLOOD


class Crowd(simulation.Story):
    """A random run of users of whom one mostly floods, and two sequences are a flood."""

    def __init__(self, seed, **settings):
        super().__init__(seed, **settings)
        self.draw, self.num_apart = random.Random(seed), 0
        old, block_size = self.scheduler.limits, self.scheduler.tables.block_size
        in_flight = self.scheduler.max_in_flight
        self.scheduler = Scheduler(
            old.num_blocks, block_size, max_num_seqs=max(3, old.max_num_seqs),
            max_num_batched_tokens=old.max_num_batched_tokens, max_model_len=old.max_model_len,
            long_prefill_token_threshold=old.long_prefill_token_threshold,
            enable_prefix_caching=self.draw.random() < 0.8, max_in_flight=in_flight,
            scheduling_policy="fair", fair_prompt_tokens=self.draw.choice([1, 8, 64]),
        )  # fmt: skip
        self.model = VirtualModel(self.scheduler, self.is_damaging)
        add = self.scheduler.add

        def adding(request):
            request.user = self.draw.choice(["flood", "flood", "flood", "a", "b"])
            add(request)

        self.scheduler.add = adding

    def update(self, batch):
        self.num_apart += self.scheduler.newcomers.ran_alone
        super().update(batch)

    def judge(self):
        self.first_runs = list(self.requests)  # users overtake one another here
        super().judge()


@pytest.mark.parametrize("overlap", [False, True])
def test_any_schedule_with_newcomers_gives_the_tokens_of_a_request_alone(monkeypatch, overlap):
    monkeypatch.setattr(newcomers, "FLOOD", 2)
    num_apart = 0
    for seed in range(150):
        story = Crowd(seed, overlap=overlap, fails=seed % 3 == 0)
        story.play()
        story.judge()
        num_apart += story.num_apart
    assert num_apart > 20
