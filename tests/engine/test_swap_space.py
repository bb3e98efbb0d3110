"""Main memory behind the cache: what goes there, what comes back, and when nothing does."""

from __future__ import annotations

import pytest

from tests.engine.simulator import VirtualModel, check_idle, run_alone
from tests.engine.test_scheduler import ask, make, run_ids
from tilewise.engine.scheduling.preemption import Preemption
from tilewise.engine.scheduling.scheduler import Scheduler


class Run:
    """A scheduler and its virtual model, step by step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.model = scheduler, VirtualModel(scheduler)
        self.tokens: dict[tuple[str, int], list[int]] = {}

    def step(self):
        batch = self.scheduler.schedule()
        assert batch is not None
        names = run_ids(self.scheduler, batch)
        for event in self.scheduler.update(batch, self.model.run(batch)):
            key = event.request_id, event.index
            self.tokens.setdefault(key, []).append(event.token.token_id)
        self.scheduler.check_integrity()
        return batch, names

    def finish(self) -> None:
        while self.scheduler.has_unfinished():
            self.step()
        check_idle(self.scheduler)


def swapping(**settings) -> Scheduler:
    defaults = {"preemption": "swap", "num_swap_blocks": 16, "enable_prefix_caching": False}
    return make(**{**defaults, **settings})


def pressed(**settings) -> tuple[Run, list]:
    """Two requests that outgrow the cache together."""
    scheduler = swapping(num_blocks=5, **settings)
    requests = [ask("a", 7, max_tokens=10, seed=1), ask("b", 7, max_tokens=4, seed=2)]
    for request in requests:
        scheduler.add(request)
    return Run(scheduler), requests


def test_who_is_swapped_computes_nothing_twice_and_draws_the_same():
    run, requests = pressed()
    computed = 0
    while run.scheduler.has_unfinished():
        batch, _ = run.step()
        computed += batch.num_tokens
    stats = run.scheduler.stats()
    assert stats.num_swapped == stats.num_preemptions == 1
    assert computed == sum(7 + r.sampling.max_tokens - 1 for r in requests)
    for request in requests:
        key = request.request_id, 0
        assert run.tokens[key] == run_alone(request, 64).tokens[key]
    check_idle(run.scheduler)


def test_a_full_swap_space_falls_to_recomputing():
    run, requests = pressed(num_swap_blocks=1)
    run.finish()
    stats = run.scheduler.stats()
    assert (stats.num_swapped, stats.num_preemptions) == (0, 1)
    for request in requests:
        key = request.request_id, 0
        assert run.tokens[key] == run_alone(request, 64).tokens[key]


def test_all_samples_go_together_in_consecutive_blocks_and_share_again():
    scheduler = swapping(num_blocks=9)
    scheduler.add(ask("a", 12, max_tokens=14, seed=1))
    scheduler.add(ask("b", 6, n=2, max_tokens=8, seed=2))
    run = Run(scheduler)
    family, outs, ins = [], (), ()
    while scheduler.has_unfinished():
        batch, _ = run.step()
        if batch.swap_out:
            outs = batch.swap_out
            family = [s for s in scheduler.roster.waiting if s.swap_slots]
            slots = [s.swap_slots for s in family]
            assert slots[0][0] == slots[1][0]  # the prompt's first block is kept once
            assert [s for _, s in outs] == list(range(len(outs)))
        ins = ins or batch.swap_in
    assert len(family) == 2
    assert len(outs) == len(ins) < sum(len(s.block_ids) or 3 for s in family)
    assert (
        run.tokens["b", 1] == run_alone(ask("b", 6, n=2, max_tokens=8, seed=2), 64).tokens["b", 1]
    )
    check_idle(scheduler)


def test_what_comes_back_travels_beside_a_step_of_others():
    run, _ = pressed()
    while True:
        batch, names = run.step()
        if batch.swap_in:
            break
    if len(run.scheduler.roster.running) > 1:
        assert names == ["a"]
    run.finish()


@pytest.mark.parametrize(
    ("prefill", "link", "swaps"), [(10.0, 1e6, True), (1e9, 1.0, False), (0.0, 1e6, False)]
)
def test_auto_does_what_takes_less_time(prefill: float, link: float, swaps: bool):
    run, _ = pressed(preemption="auto")
    run.scheduler.preemption.rates.prefill_tokens = prefill
    run.scheduler.preemption.rates.link_blocks = link
    run.finish()
    assert run.scheduler.stats().num_swapped == swaps
    assert run.scheduler.stats().num_preemptions == 1


@pytest.mark.parametrize(("caching", "cost"), [(False, 15 / 4), (True, 3 / 4)])
def test_the_cheapest_victim_loses_least_for_each_block_that_becomes_free(caching, cost):
    chosen = {}
    for victim in ("newest", "cheapest"):
        scheduler = make(victim=victim, enable_prefix_caching=caching)
        for name, prompt in {"a": 1, "b": 15, "c": 3}.items():
            scheduler.add(ask(name, prompt, max_tokens=12))
        Run(scheduler).step()
        [b] = scheduler.sequences("b")
        assert scheduler.preemption._cost(b) == cost  # "c" loses 3 tokens for 1 block, "a" less
        scheduler.preemption.preempt(0)
        [chosen[victim]] = [s.request.request_id for s in scheduler.roster.waiting]
    assert chosen == {"newest": "c", "cheapest": "b" if caching else "c"}


def test_blocks_of_others_free_nothing():
    scheduler = make(victim="cheapest")
    scheduler.add(ask("a", 8, n=3, max_tokens=4))
    Run(scheduler).step()
    assert [scheduler.preemption._cost(s) for s in scheduler.sequences("a")] == [float("inf")] * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preemption": "drop"}, "preemption must be one of auto, recompute, swap, got 'drop'"),
        ({"victim": "oldest"}, "victim must be one of newest, cheapest, got 'oldest'"),
        ({"preemption": "swap", "num_swap_blocks": 0}, "preemption must be auto or recompute"),
    ],
)
def test_what_means_nothing_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


# Cold prefixes


def cold(**settings) -> Run:
    """The prompt of "a" has been computed, and everything the device had is overwritten."""
    run = Run(make(num_blocks=4, num_swap_blocks=8, **settings))
    run.scheduler.add(ask("a", [1] * 12, max_tokens=1))
    run.finish()
    run.scheduler.add(ask("b", [2] * 15, max_tokens=1))
    run.finish()
    return run


def test_a_prefix_that_was_given_away_is_found_in_main_memory():
    run = cold()
    run.scheduler.add(ask("c", [1] * 12 + [3], max_tokens=1, seed=4))
    batch, _ = run.step()
    assert (len(batch.swap_in), batch.sequences[0].start) == (3, 12)
    assert run.scheduler.stats().num_recalled_tokens == 12
    key = "c", 0
    assert (
        run.tokens[key] == run_alone(ask("c", [1] * 12 + [3], max_tokens=1, seed=4), 64).tokens[key]
    )
    check_idle(run.scheduler)


def test_other_salts_and_other_beginnings_find_nothing():
    for request in (
        ask("c", [1] * 13, salt="x", max_tokens=1),
        ask("c", [9] + [1] * 12, max_tokens=1),
    ):
        run = cold()
        run.scheduler.add(request)
        batch, _ = run.step()
        assert batch.swap_in == ()
        assert batch.sequences[0].start == 0


def test_what_failed_leaves_main_memory_too():
    run = cold()
    run.scheduler.add(ask("c", [1] * 13, max_tokens=4))
    run.step()
    run.scheduler.fail("c", FloatingPointError())
    run.scheduler.check_integrity()
    run.scheduler.add(ask("d", [1] * 13, max_tokens=1))
    batch, _ = run.step()
    assert (batch.swap_in, batch.sequences[0].start) == ((), 0)


def test_a_reset_forgets_main_memory_too():
    run = cold()
    assert run.scheduler.stats().swap_blocks_cold > 0
    assert run.scheduler.reset_prefix_cache()
    assert run.scheduler.stats().swap_blocks_cold == 0
    run.scheduler.check_integrity()


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_a_reset_forgets_what_was_swapped_out_as_other_weights_have_other_keys(windows):
    run, [_, request] = pressed(enable_prefix_caching=True, windows=windows)
    [b] = run.scheduler.sequences("b")
    while not b.swap_slots:
        run.step()
    assert not run.scheduler.reset_prefix_cache()
    assert b.swap_slots
    run.scheduler.abort("a")
    assert run.scheduler.reset_prefix_cache()
    assert not b.swap_slots
    run.scheduler.check_integrity()
    batch, _ = run.step()
    assert batch.sequences[0].start == 0
    assert not any(batch.of_group(number).swap_in for number in range(len(windows)))
    run.finish()
    alone = run_alone(request, 200)
    assert run.tokens["b", 0] == alone.tokens["b", 0]


def test_a_block_that_has_not_arrived_is_not_kept_as_if_it_had():
    run = cold()
    tables = run.scheduler.tables
    [room] = tables.memory.rooms
    run.scheduler.add(ask("c", [1] * 13, max_tokens=1))
    [c] = run.scheduler.sequences("c")
    assert tables.reserve(c, 0)  # as in a step that could not begin
    tables.release(c)
    before = list(room.going)
    [block, *_] = room.coming
    while block in room.coming:
        tables.allocator.allocate(1)
    assert all(source != block for source, _ in room.going[len(before) :])


def test_nothing_is_pinned_when_all_have_gone_before_a_step():
    run = cold()
    run.scheduler.add(ask("c", [1] * 13, max_tokens=1))
    [c] = run.scheduler.sequences("c")
    assert run.scheduler.tables.reserve(c, 0)
    run.scheduler.roster.admit(c)
    run.scheduler.abort("c")
    run.scheduler.check_integrity()
    check_idle(run.scheduler)
    run.scheduler.add(ask("d", [1] * 13, max_tokens=1, seed=1))
    run.finish()


def test_the_choice_of_a_family_needs_all_of_it_behind():
    run, _ = pressed()
    run.step()
    running = run.scheduler.roster.running
    preemption: Preemption = run.scheduler.preemption
    assert preemption._family(running[0], 1) == []
    assert preemption._family(running[1], 1) == [running[1]]
