"""Policies: who is admitted next, what users are served, and how long anybody waits."""

from __future__ import annotations

import random

import pytest

from tests.engine.simulator import VirtualModel
from tests.engine.test_scheduler import ask, make, run_ids, step
from tilewise.engine.batch import Batch
from tilewise.engine.scheduling.explanation import explain
from tilewise.engine.scheduling.order import DRAWN, FairOrder, order_of
from tilewise.engine.scheduling.scheduler import Scheduler


def of(user: str, name: str, prompt: int, **sampling):
    request = ask(name, prompt, **sampling)
    request.user = user
    return request


def first_runs(scheduler: Scheduler) -> list[str]:
    """Run to the end and return the requests by their first step."""
    seen: list[str] = []
    model = VirtualModel(scheduler)
    while (batch := scheduler.schedule()) is not None:
        seen += [name for name in run_ids(scheduler, batch) if name not in seen]
        scheduler.update(batch, model.run(batch))
        scheduler.check_integrity()
    return seen


def test_a_short_prompt_waits_at_most_two_steps_behind_a_long_one():
    """131,072 tokens, and 32 behind them, with a budget of 8,192: counted in steps."""
    steps = {}
    for threshold in (None, 4096):
        scheduler = Scheduler(
            9000,
            16,
            max_num_seqs=8,
            max_num_batched_tokens=8192,
            max_model_len=140_000,
            long_prefill_token_threshold=threshold,
        )
        scheduler.add(ask("long", [1] * 131_072, max_tokens=1))
        step(scheduler)
        scheduler.add(ask("short", [2] * 32, max_tokens=1))
        count = 0
        while scheduler.sequences("short"):
            step(scheduler)
            count += 1
        steps[threshold] = count
    assert steps[4096] <= 2
    assert steps[None] == 16


def test_priorities_come_in_order_and_equal_ones_by_arrival():
    scheduler = make(max_num_seqs=1, scheduling_policy="priority")
    for name, priority in {"a": 5, "b": 1, "c": 5, "d": -2, "e": 1}.items():
        request = ask(name, 4, max_tokens=2)
        request.priority = priority
        scheduler.add(request)
    assert scheduler.explain("c") == "waiting: 4 sequences are before it"
    assert first_runs(scheduler) == ["d", "b", "e", "a", "c"]


def test_who_runs_gives_no_way_but_the_least_important_is_preempted_first():
    scheduler = make(num_blocks=5, scheduling_policy="priority", enable_prefix_caching=False)
    for name, priority in {"a": 3, "b": 9}.items():
        request = ask(name, 5, max_tokens=12)
        request.priority = priority
        scheduler.add(request)
    step(scheduler)
    urgent = ask("c", 1, max_tokens=1)
    urgent.priority = 0
    scheduler.add(urgent)
    [b] = scheduler.sequences("b")
    [a] = scheduler.sequences("a")
    while scheduler.has_unfinished():
        step(scheduler)
    assert a.num_preemptions == 0
    assert b.num_preemptions > 0


def test_users_take_turns_however_many_requests_one_has():
    scheduler = make(max_num_seqs=1, scheduling_policy="fair")
    for i in range(4):
        scheduler.add(of("greedy", f"g{i}", 8, max_tokens=4))
    scheduler.add(of("modest", "m0", 8, max_tokens=4))
    assert scheduler.explain("m0") == "waiting: 4 sequences are before it"
    assert first_runs(scheduler) == ["g0", "m0", "g1", "g2", "g3"]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_the_line_is_the_order_in_which_they_come(policy):
    """Under fair shares while no counter changes: a step of one user puts the others first."""
    scheduler = make(max_num_seqs=1, scheduling_policy=policy)
    for i, user in enumerate("aabbca"):
        request = of(user, f"{user}{i}", 4, max_tokens=2)
        request.priority = -i % 3
        scheduler.add(request)
    line = scheduler.insight.line(100)
    places = [scheduler.explain(name) for name in line]
    assert places[1:] == ["waiting: 1 sequence is before it"] + [
        f"waiting: {i} sequences are before it" for i in range(2, 6)
    ]
    assert scheduler.insight.line(2) == line[:2]
    assert [name for name, _ in scheduler.insight.picture()["waiting"]] == line
    assert explain(scheduler, line[3])["behind"] == line[:3]
    if policy == "fair":
        step(scheduler)
        assert scheduler.insight.line(100) == ["b2", "b3", "c4", "a1", "a5"]
    else:
        assert first_runs(scheduler) == line


def test_a_weight_of_two_gets_twice_the_tokens():
    scheduler = make(
        num_blocks=64,
        max_num_seqs=1,
        scheduling_policy="fair",
        user_weights={"paying": 2.0},
        enable_prefix_caching=False,
    )
    for i in range(12):
        scheduler.add(of("paying", f"p{i}", 6, max_tokens=3))
        scheduler.add(of("free", f"f{i}", 6, max_tokens=3))
    half = first_runs(scheduler)[:12]
    assert [sum(name[0] == user for name in half) for user in "pf"] == [8, 4]


def test_a_user_that_returns_has_saved_nothing_up():
    order = FairOrder()
    scheduler = make(max_num_seqs=1, scheduling_policy="fair")
    scheduler.order = scheduler.roster.order = order
    for i in range(3):
        scheduler.add(of("busy", f"b{i}", 8, max_tokens=8))
    step(scheduler)
    while scheduler.roster.num_queued == 2:
        step(scheduler)
    least = order.counters["busy"]
    assert least > 0
    scheduler.add(of("returning", "r", 8, max_tokens=1))
    assert order.counters["returning"] == least


def test_an_old_debt_is_forgotten_when_others_have_caught_up():
    order = FairOrder()
    order.counters = {"debtor": 50.0, "other": 400.0}
    scheduler = make(max_num_seqs=1, scheduling_policy="fair")
    scheduler.order = scheduler.roster.order = order
    scheduler.add(of("other", "o", 4))
    scheduler.add(of("debtor", "d", 4))
    assert order.counters["debtor"] == 400.0 == order.counters["other"]


def test_counters_of_users_long_gone_are_dropped():
    order = FairOrder()
    scheduler = make(max_num_seqs=1, scheduling_policy="fair")
    scheduler.order = scheduler.roster.order = order
    for i in range(3000):
        scheduler.add(of(f"user {i}", "a", 2, max_tokens=1))
        step(scheduler)
    assert len(order.counters) < 1100


@pytest.mark.parametrize("seed", range(6))
def test_service_of_users_who_always_wait_differs_by_at_most_the_bound(seed: int):
    rng = random.Random(seed)
    seats = rng.choice([1, 2, 4])
    scheduler = Scheduler(
        rng.choice([8, 20, 60]),
        4,
        max_num_seqs=seats,
        max_num_batched_tokens=rng.choice([4, 16, 64]),
        max_model_len=64,
        scheduling_policy="fair",
        user_weights={"b": 2.0},
        enable_prefix_caching=False,
    )
    longest, most, users = 12, 8, {"a": 1.0, "b": 2.0, "c": 1.0}
    bound = 2 * (longest + DRAWN * seats * most) / min(users.values())
    model = VirtualModel(scheduler)
    served = dict.fromkeys(users, 0.0)
    worst, number = 0.0, 0
    owner: dict[str, str] = {}
    admitted: set[str] = set()
    for _ in range(1500):
        for user in users:  # more of each wait all the time than one step admits
            while sum(owner[s.request.request_id] == user for s in scheduler.roster.waiting
                      if not s.was_admitted) < 6:  # fmt: skip
                size = {"a": 12, "b": rng.randrange(1, 13), "c": 1}[user]
                request = of(user, f"{user}{number}", size, max_tokens=rng.randrange(1, most + 1))
                owner[request.request_id], number = user, number + 1
                scheduler.add(request)
        batch = scheduler.schedule()
        for run in batch.sequences:
            seq = scheduler.roster.live[run.seq_id]
            name = seq.request.request_id
            if name not in admitted:
                admitted.add(name)
                served[seq.request.user] += seq.num_prompt_tokens / users[seq.request.user]
        for event in scheduler.update(batch, model.run(batch)):
            served[owner[event.request_id]] += DRAWN / users[owner[event.request_id]]
        worst = max(worst, max(served.values()) - min(served.values()))
    assert min(served.values()) > 3 * bound, "the run is long enough to tell"
    assert worst <= bound


def test_a_full_queue_of_one_user_costs_another_one_long_step():
    scheduler = make(
        num_blocks=400, max_num_seqs=16, max_num_batched_tokens=32, scheduling_policy="fair"
    )
    for i in range(100):
        scheduler.add(of("greedy", f"g{i}", [i] * 30, max_tokens=2))
    for _ in range(3):
        step(scheduler)
    scheduler.add(of("other", "o", [200] * 20, max_tokens=1))
    steps = 0
    while scheduler.sequences("o"):
        step(scheduler)
        steps += 1
    assert steps <= 2  # the one that was under way, and its own


def stepped(scheduler: Scheduler, model: VirtualModel) -> Batch:
    """Run a step and return what it was."""
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.update(batch, model.run(batch))
    scheduler.check_integrity()
    return batch


def test_a_flood_of_prompts_is_admitted_in_parts_and_whoever_comes_is_next():
    """Only under the policy "fair": who comes waits for a step of few prompts, not of all."""
    found = {}
    for most in (None, 8):
        scheduler = Scheduler(
            2000, 16, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=512,
            scheduling_policy="fair", fair_prompt_tokens=most,
        )  # fmt: skip
        model = VirtualModel(scheduler)
        for i in range(40):
            scheduler.add(of("flood", f"f{i}", [i + 1] * 6, max_tokens=30))
        sizes = [stepped(scheduler, model).num_tokens for _ in range(2)]
        scheduler.add(of("other", "o", [99] * 300, max_tokens=1))
        batch = stepped(scheduler, model)
        found[most] = sizes, len(batch.sequences), batch.num_tokens
        while scheduler.has_unfinished():  # and all of them end
            stepped(scheduler, model)
    assert found[None] == ([240, 40], 41, 340)
    # Two prompts a step; then the long one, whole, beside the four that decode and no other.
    assert found[8] == ([12, 14], 5, 304)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_other_policies_admit_as_many_prompts_as_there_is_room_for(policy):
    scheduler = make(max_num_seqs=8, scheduling_policy=policy, fair_prompt_tokens=1)
    for i in range(3):
        scheduler.add(ask(f"r{i}", [i + 1] * 4))
    assert len(stepped(scheduler, VirtualModel(scheduler)).sequences) == 3


def test_an_endless_stream_of_others_does_not_starve_a_user():
    scheduler = make(max_num_seqs=1, scheduling_policy="fair")
    scheduler.add(of("stream", "s0", 4, max_tokens=2))
    scheduler.add(of("quiet", "q", 16, max_tokens=2))
    for i in range(1, 60):
        scheduler.add(of("stream", f"s{i}", 4, max_tokens=2))
        step(scheduler)
        if not scheduler.sequences("q"):
            break
    assert i < 20


@pytest.mark.parametrize(
    ("policy", "weights", "message"),
    [
        ("lifo", None, "scheduling_policy must be one of fcfs, priority, fair, got 'lifo'"),
        ("fcfs", {"a": 1.0}, "user_weights must be None unless the policy is fair, got 'fcfs'"),
        ("fair", {"a": 0.0}, "user_weights must be above 0, got 0.0 for 'a'"),
        ("fair", {"a": float("inf")}, "user_weights must be above 0, got inf for 'a'"),
    ],
)
def test_what_means_nothing_is_refused(policy, weights, message):
    with pytest.raises(ValueError, match=message):
        order_of(policy, weights)
