"""Each rule of the scheduler by itself, and the failures that other engines are known for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.engine.simulator import VirtualModel, run_alone, run_to_end
from tilewise.cache import prefix
from tilewise.engine.batch import PENDING, Batch, SampledToken, TokenEvent
from tilewise.engine.request import FinishReason, Request, SamplingParams
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.errors import RequestError


def make(num_blocks: int = 16, block_size: int = 4, **limits) -> Scheduler:
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64}
    return Scheduler(num_blocks, block_size, **{**defaults, **limits})


def ask(request_id: str, prompt: list[int] | int, **sampling) -> Request:
    """A request; an integer prompt is that many tokens of its own."""
    if isinstance(prompt, int):
        prompt = [1000 + ord(request_id[0])] * prompt
    eos = sampling.pop("eos_token_ids", ())
    salt = sampling.pop("salt", "")
    return Request(request_id, prompt, SamplingParams(**sampling), eos, salt)


def step(scheduler: Scheduler, *token_ids: int) -> tuple[Batch, list[TokenEvent]]:
    """Schedule and answer with these tokens in turn, 7 after they are used up."""
    batch = scheduler.schedule()
    assert batch is not None
    source = iter(token_ids)
    samples = [
        [SampledToken(next(source, 7)) for _ in range(run.num_samples)] for run in batch.sequences
    ]
    events = scheduler.update(batch, samples)
    scheduler.check_integrity()
    return batch, events


def run_ids(scheduler: Scheduler, batch: Batch) -> list[str]:
    """Who runs, while the batch is in flight."""
    return [scheduler.roster.live[run.seq_id].request.request_id for run in batch.sequences]


def run_ids_of(events: list[TokenEvent]) -> list[str]:
    """Whose tokens these are."""
    return [event.request_id for event in events]


def run_alone_in(request: Request, scheduler: Scheduler) -> list[int]:
    """The tokens of its first sample."""
    return run_alone(request, scheduler.limits.max_len(request)).tokens[request.request_id, 0]


# The token budget


def test_nothing_to_do_is_none():
    assert make().schedule() is None


def test_a_prompt_runs_whole_and_then_token_by_token():
    scheduler = make()
    scheduler.add(ask("a", [1, 2, 3, 4, 5], max_tokens=3))
    batch, events = step(scheduler, 11)
    [run] = batch.sequences
    assert (run.token_ids, run.start, run.num_samples, run.num_generated) == (
        (1, 2, 3, 4, 5),
        0,
        1,
        0,
    )
    assert len(run.block_ids) == 2
    assert [(e.token.token_id, e.finish_reason) for e in events] == [(11, None)]
    batch, _ = step(scheduler, 12)
    [run] = batch.sequences
    assert (run.token_ids, run.start, run.num_samples, run.num_generated) == ((11,), 5, 1, 1)


def test_a_long_prompt_runs_in_chunks_and_samples_once():
    scheduler = make(max_num_batched_tokens=4)
    scheduler.add(ask("a", 10, max_tokens=2))
    runs = [step(scheduler)[0].sequences[0] for _ in range(4)]
    assert [(r.start, len(r.token_ids), r.num_samples) for r in runs] == [
        (0, 4, 0),
        (4, 4, 0),
        (8, 2, 1),
        (10, 1, 1),
    ]
    assert [len(r.seeds) for r in runs] == [0, 0, 1, 1]


def test_decoding_goes_first_and_prompts_take_the_rest_of_the_budget():
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(ask("a", 3, max_tokens=9))
    step(scheduler)
    scheduler.add(ask("b", 20, max_tokens=1))
    batch, _ = step(scheduler)
    assert [len(r.token_ids) for r in batch.sequences] == [1, 7]


def test_a_chunk_limit_leaves_budget_to_others():
    scheduler = make(long_prefill_token_threshold=5)
    scheduler.add(ask("a", 20))
    scheduler.add(ask("b", 3))
    batch, _ = step(scheduler)
    assert [len(r.token_ids) for r in batch.sequences] == [5, 3]


def test_waiting_requests_take_seats_in_order_of_arrival():
    scheduler = make(max_num_seqs=2)
    for name in "abc":
        scheduler.add(ask(name, 3, max_tokens=2))
    assert run_ids(scheduler, scheduler.schedule()) == ["a", "b"]
    assert scheduler.explain("c") == "waiting: all 2 seats are taken"


def test_a_small_request_does_not_overtake_a_large_one():
    scheduler = make(num_blocks=6)
    scheduler.add(ask("a", 10, max_tokens=4))
    step(scheduler)
    scheduler.add(ask("large", 16, max_tokens=2))
    scheduler.add(ask("small", 1, max_tokens=1))
    batch = scheduler.schedule()
    assert run_ids(scheduler, batch) == ["a"]
    assert scheduler.explain("large") == "waiting: 2 more cache blocks must become free"
    assert scheduler.explain("small") == "waiting: 1 sequence is before it"


def test_half_computed_prompts_never_wait_for_each_others_blocks():
    scheduler = make(num_blocks=6, max_num_batched_tokens=4, long_prefill_token_threshold=2)
    scheduler.add(ask("a", 16, max_tokens=2))
    scheduler.add(ask("b", 16, max_tokens=2))
    batch = scheduler.schedule()
    assert run_ids(scheduler, batch) == ["a"]  # b's whole prompt does not fit beside a's
    scheduler.update(batch, [[]])
    finish_all(scheduler)
    assert scheduler.stats().num_preemptions == 0


def finish_all(scheduler: Scheduler) -> None:
    """Run to the end with arbitrary tokens."""
    for _ in range(1000):
        if not scheduler.has_unfinished():
            return
        step(scheduler)
    raise AssertionError("unfinished")


def test_two_schedules_without_results_are_refused():
    scheduler = make()
    scheduler.add(ask("a", 3))
    scheduler.schedule()
    with pytest.raises(RuntimeError, match="must follow schedule"):
        scheduler.schedule()


def test_results_of_the_wrong_shape_are_refused_and_change_nothing():
    scheduler = make()
    scheduler.add(ask("a", 3))
    batch = scheduler.schedule()
    with pytest.raises(ValueError, match=r"samples must be \[1\] tokens per sequence, got \[2\]"):
        scheduler.update(batch, [[SampledToken(1), SampledToken(2)]])
    with pytest.raises(ValueError, match=r"samples must be \[1\] tokens per sequence, got \[\]"):
        scheduler.update(batch, [])
    assert len(scheduler.update(batch, [[SampledToken(1)]])) == 1


def test_results_of_another_batch_are_refused():
    scheduler = make()
    scheduler.add(ask("a", 3))
    batch, _ = step(scheduler)
    with pytest.raises(ValueError, match="must be the one that schedule"):
        scheduler.update(batch, [[SampledToken(1)]])


# Endings


def ending(request: Request, *token_ids: int, **limits) -> TokenEvent:
    scheduler = make(**limits)
    scheduler.add(request)
    for token_id in token_ids:
        assert scheduler.has_unfinished()
        _, [event] = step(scheduler, token_id)
    assert not scheduler.has_unfinished()
    assert scheduler.stats().blocks_used == 0
    return event


def test_the_models_end_token_stops():
    event = ending(ask("a", 3, eos_token_ids=(2, 9)), 5, 9)
    assert (event.finish_reason, event.stop_reason) == (FinishReason.STOP, None)


def test_the_end_token_can_be_ignored():
    event = ending(ask("a", 3, eos_token_ids=(9,), ignore_eos=True, max_tokens=3), 9, 9, 9)
    assert event.finish_reason is FinishReason.LENGTH


def test_a_stop_token_stops_and_is_named_even_if_it_is_an_ignored_end_token():
    request = ask("a", 3, eos_token_ids=(9,), ignore_eos=True, stop_token_ids=[9])
    event = ending(request, 5, 9)
    assert (event.finish_reason, event.stop_reason) == (FinishReason.STOP, 9)


def test_max_tokens_ends_with_length():
    assert ending(ask("a", 3, max_tokens=2), 5, 5).finish_reason is FinishReason.LENGTH


def test_a_stop_on_the_last_allowed_token_counts_as_a_stop():
    event = ending(ask("a", 3, max_tokens=2, eos_token_ids=(9,)), 5, 9)
    assert event.finish_reason is FinishReason.STOP


def test_the_context_ends_with_length():
    event = ending(ask("a", 3, max_tokens=None), 5, 5, max_model_len=5)
    assert event.finish_reason is FinishReason.LENGTH


def test_without_max_tokens_the_cache_is_a_limit_too():
    event = ending(ask("a", 3, max_tokens=None), 5, 5, num_blocks=1, block_size=4)
    assert event.finish_reason is FinishReason.LENGTH


def test_a_stop_string_ends_one_sample_from_outside():
    scheduler = make()
    scheduler.add(ask("a", 6, n=2))
    step(scheduler)
    [first, second] = scheduler.sequences("a")
    assert scheduler.finish("a", 0, FinishReason.STOP, "\n\n")
    assert not scheduler.finish("a", 0, FinishReason.STOP, "\n\n")
    assert (first.finish_reason, first.stop_reason) == (FinishReason.STOP, "\n\n")
    assert second.finish_reason is None
    scheduler.check_integrity()
    _, events = step(scheduler)
    assert [e.index for e in events] == [1]


def test_finishing_an_unknown_sample_is_no_error():
    assert not make().finish("a", 0, FinishReason.STOP)


# Admission: what other engines accept and then hang or die on


def refusal(scheduler: Scheduler, request: Request) -> str:
    before = list(scheduler.roster.live)
    with pytest.raises(RequestError) as caught:
        scheduler.add(request)
    assert list(scheduler.roster.live) == before
    scheduler.check_integrity()
    return str(caught.value)


def test_an_empty_prompt_is_refused():
    assert refusal(make(), ask("a", [])) == "prompt must hold at least 1 token, got 0"


@pytest.mark.parametrize("token_id", [-1, 2**31])
def test_a_token_id_out_of_range_is_refused(token_id: int):
    message = refusal(make(), ask("a", [5, token_id, 6]))
    assert message == f"prompt token ids must be in 0 ... 2147483647, got {token_id}"


def test_a_prompt_that_fills_the_context_is_refused():
    scheduler = make(max_model_len=8)
    assert refusal(scheduler, ask("a", 8)) == (
        "prompt must be at most 7 tokens, so that 1 more fits the context of 8, got 8"
    )
    scheduler.add(ask("a", 7))
    run_to_end(scheduler)


def test_a_request_larger_than_the_cache_is_refused_with_the_numbers():
    scheduler = make(num_blocks=3, block_size=4)
    assert refusal(scheduler, ask("a", 6, max_tokens=8)) == (
        "prompt and max_tokens must be at most 13 tokens together, so that they fit the 3 cache "
        "blocks of 4 tokens, got 14 (prompt of 6)"
    )


def test_a_request_of_exactly_the_cache_ends_and_uses_every_block():
    scheduler = make(num_blocks=3, block_size=4)
    scheduler.add(ask("a", 6, max_tokens=7, ignore_eos=True))
    outputs = run_to_end(scheduler)
    assert len(outputs.tokens["a", 0]) == 7
    assert scheduler.stats().blocks_peak == 3
    assert scheduler.stats().num_preemptions == 0


def test_a_prompt_larger_than_the_cache_is_refused_whatever_max_tokens_is():
    message = refusal(make(num_blocks=3, block_size=4), ask("a", 13, max_tokens=None))
    assert message.endswith("got 14 (prompt of 13)")


def test_the_context_bounds_what_a_request_may_need():
    scheduler = make(num_blocks=3, block_size=4, max_model_len=13)
    scheduler.add(ask("a", 6, max_tokens=1000))
    assert len(run_to_end(scheduler).tokens["a", 0]) == 7


def test_a_refused_request_hurts_nobody():
    scheduler = make(num_blocks=4)
    scheduler.add(ask("a", 5, max_tokens=6, seed=1))
    refusal(scheduler, ask("b", 40))
    outputs = run_to_end(scheduler)
    assert outputs.tokens == run_alone(ask("a", 5, max_tokens=6, seed=1), 64).tokens


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    scheduler = make()
    scheduler.add(ask("a", 3, max_tokens=1))
    assert "must be unique among unfinished requests, got 'a'" in refusal(scheduler, ask("a", 3))
    run_to_end(scheduler)
    scheduler.add(ask("a", 3, max_tokens=1))


@pytest.mark.parametrize(
    "name",
    [
        "num_blocks",
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "long_prefill_token_threshold",
    ],
)
def test_limits_below_one_are_refused_by_name(name: str):
    with pytest.raises(ValueError, match=f"^{name} must be at least 1, got 0$"):
        make(**{name: 0})


def test_a_context_without_room_for_an_answer_is_refused():
    with pytest.raises(ValueError, match="max_model_len must be at least 2, got 1"):
        make(max_model_len=1)


# Preemption


def test_a_prompt_that_would_take_the_next_block_of_a_running_sequence_waits():
    scheduler = make(num_blocks=4)
    scheduler.add(ask("a", 6, max_tokens=5))
    step(scheduler)
    scheduler.add(ask("b", 8, max_tokens=3))
    step(scheduler)
    assert scheduler.explain("b") == "waiting: 1 more cache blocks must become free"
    finish_all(scheduler)
    assert scheduler.stats().num_preemptions == 0


def test_the_newest_loses_its_blocks_and_the_tokens_stay_the_same():
    scheduler = make(num_blocks=7)
    requests = [ask(name, 7, max_tokens=10, seed=ord(name)) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    outputs = run_to_end(scheduler)
    assert scheduler.stats().num_preemptions > 0
    for request in requests:
        alone = run_alone(request, 64)
        assert outputs.tokens[request.request_id, 0] == alone.tokens[request.request_id, 0]


def test_the_oldest_is_never_preempted():
    scheduler = make(num_blocks=5)
    for name in "abc":
        scheduler.add(ask(name, 5, max_tokens=12))
    [oldest] = scheduler.sequences("a")
    run_to_end(scheduler)
    assert oldest.num_preemptions == 0
    assert scheduler.stats().num_preemptions > 0


def test_a_preempted_request_keeps_its_place_in_the_queue():
    scheduler = make(num_blocks=5, block_size=4)
    scheduler.add(ask("a", 8, max_tokens=9))
    scheduler.add(ask("b", 8, max_tokens=3))
    step(scheduler)  # a and b hold 2 blocks each
    scheduler.add(ask("c", 4, max_tokens=1))
    step(scheduler)  # a takes the last block; b, the newest, has to go
    [b] = scheduler.sequences("b")
    assert (b.num_preemptions, b.block_ids, b.num_computed_tokens) == (1, [], 0)
    assert [s.request.request_id for s in scheduler.roster.waiting] == ["b", "c"]


def test_a_resumed_sequence_finds_what_it_had_in_the_prefix_cache():
    scheduler = make(num_blocks=5, block_size=4)
    scheduler.add(ask("a", 8, max_tokens=2))
    scheduler.add(ask("b", 8, max_tokens=3))
    step(scheduler)
    step(scheduler)  # b is preempted, a ends
    [b] = scheduler.sequences("b")
    assert b.num_preemptions == 1
    batch = scheduler.schedule()
    [run] = batch.sequences
    assert (run.start, run.token_ids, run.num_generated) == (8, (7,), 1)
    assert b.num_cached_tokens == 0  # at first admission nothing was


def test_samples_of_one_request_are_preempted_one_by_one():
    request = ask("a", 6, n=4, max_tokens=10, seed=3)
    scheduler = make(num_blocks=4, block_size=4)
    scheduler.add(request)
    outputs = run_to_end(scheduler)
    assert scheduler.stats().num_preemptions > 0
    assert outputs.tokens == run_alone(request, 64).tokens


# Samples: fork and copy-on-write


def test_samples_share_the_prompt_and_copy_its_partial_block_once_each_but_the_last():
    scheduler = make()
    scheduler.add(ask("a", 6, n=3, max_tokens=5))
    batch, events = step(scheduler, 10, 11, 12)
    assert batch.sequences[0].num_samples == 3
    assert [(e.index, e.token.token_id) for e in events] == [(0, 10), (1, 11), (2, 12)]
    assert scheduler.stats().blocks_used == 2
    tail = batch.sequences[0].block_ids[1]
    batch, events = step(scheduler)
    assert [source for source, _ in batch.block_copies] == [tail, tail]
    assert [r.token_ids for r in batch.sequences] == [(10,), (11,), (12,)]
    assert batch.sequences[2].block_ids[1] == tail
    assert len({r.block_ids[0] for r in batch.sequences}) == 1
    assert scheduler.stats().blocks_used == 4
    batch, _ = step(scheduler)
    assert batch.block_copies == ()


def test_samples_of_a_prompt_of_whole_blocks_copy_nothing():
    scheduler = make()
    scheduler.add(ask("a", 8, n=3, max_tokens=5))
    step(scheduler)
    batch, _ = step(scheduler)
    assert batch.block_copies == ()
    assert scheduler.stats().blocks_used == 2 + 3


def test_each_sample_has_a_seed_of_its_own_that_does_not_depend_on_the_others():
    def seeds(request: Request) -> tuple[int, ...]:
        scheduler = make()
        scheduler.add(request)
        return scheduler.schedule().sequences[0].seeds

    three = seeds(ask("a", 3, n=3, seed=5))
    assert len(set(three)) == 3
    assert all(0 <= s < 2**63 for s in three)
    assert seeds(ask("b", 9, n=2, seed=5)) == three[:2]
    assert seeds(ask("a", 3, n=3, seed=6)) != three


def test_a_seed_stays_with_its_sample_through_the_whole_generation():
    scheduler = make()
    scheduler.add(ask("a", 3, n=2, seed=5))
    batch, _ = step(scheduler)
    seeds = batch.sequences[0].seeds
    batch, _ = step(scheduler)
    assert tuple(r.seeds[0] for r in batch.sequences) == seeds


def test_requests_without_a_seed_draw_it_from_the_scheduler_and_their_arrival():
    def seeds(**limits) -> list[int]:
        scheduler = make(**limits)
        for name in "ab":
            scheduler.add(ask(name, 3))
        return [r.seeds[0] for r in scheduler.schedule().sequences]

    assert seeds() == seeds(num_blocks=9)
    assert len(set(seeds())) == 2
    assert set(seeds()).isdisjoint(seeds(seed=1))


def test_seats_are_kept_for_samples_that_have_not_forked_yet():
    scheduler = make(max_num_seqs=4, long_prefill_token_threshold=6)
    scheduler.add(ask("a", 10, n=3, max_tokens=4))
    scheduler.add(ask("b", 2, max_tokens=4))
    scheduler.add(ask("c", 2, max_tokens=4))
    batch, _ = step(scheduler)
    assert len(batch.sequences) == 2  # a and b; c would take the seat of a's third sample
    finish_all(scheduler)
    assert scheduler.stats().num_preemptions == 0


def test_a_request_for_many_samples_needs_one_seat_to_begin():
    scheduler = make(num_blocks=40, max_num_seqs=8)
    scheduler.add(ask("a", 4, max_tokens=50))
    step(scheduler)
    scheduler.add(ask("b", 6, n=8, max_tokens=5, seed=1))
    for name in "cdefg":
        scheduler.add(ask(name, 3, max_tokens=2))
    batch, events = step(scheduler)
    assert run_ids_of(events) == ["a"] + ["b"] * 8
    assert len(batch.sequences) == 2
    batch, events = step(scheduler)
    assert run_ids_of(events) == ["a"] + ["b"] * 7
    assert scheduler.explain("c") == "waiting: 1 sequence is before it"
    steps = 0
    while scheduler.has_unfinished() and {"b", *"cdefg"} & set(scheduler.roster.requests):
        batch, _ = step(scheduler)
        assert len(batch.sequences) >= 2 or steps > 8
        steps += 1
    assert steps < 12
    assert scheduler.explain("a").startswith("running")


def test_the_samples_that_find_a_seat_late_are_what_they_would_have_been():
    request = ask("b", 6, n=8, max_tokens=5, seed=1)
    scheduler = make(num_blocks=40, max_num_seqs=8)
    scheduler.add(ask("a", 4, max_tokens=20))
    scheduler.add(request)
    tokens, alone = run_to_end(scheduler).tokens, run_alone(request, 64).tokens
    assert {key: t for key, t in tokens.items() if key[0] == "b"} == alone


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sample_that_ends_before_the_fork_leaves_the_others(overlap):
    scheduler = make(max_num_batched_tokens=4, max_in_flight=1 + overlap)
    scheduler.add(ask("a", 10, n=3, max_tokens=4, seed=1))
    step(scheduler)
    assert scheduler.finish("a", 0, FinishReason.STOP, "END")
    assert not scheduler.finish("a", 0, FinishReason.STOP, "END")
    assert not scheduler.finish("a", 3, FinishReason.STOP, "END")
    scheduler.check_integrity()
    tokens = {1: [], 2: []}
    while scheduler.has_unfinished():
        _, events = step(scheduler)
        for event in events:
            tokens[event.index].append(event.token.token_id)
    assert tokens == {1: [7] * 4, 2: [7] * 4}
    assert scheduler.stats().blocks_used == 0


def test_samples_that_all_end_before_the_fork_end_the_request():
    scheduler = make(max_num_batched_tokens=4)
    scheduler.add(ask("a", 10, n=2))
    step(scheduler)
    assert scheduler.finish("a", 1, FinishReason.STOP)
    assert scheduler.has_unfinished()
    assert scheduler.finish("a", 0, FinishReason.STOP)
    assert not scheduler.has_unfinished()
    assert scheduler.stats().blocks_used == 0


def test_more_samples_than_seats_run_in_turns():
    request = ask("a", 6, n=5, max_tokens=4, seed=1)
    scheduler = make(max_num_seqs=2)
    scheduler.add(request)
    assert run_to_end(scheduler).tokens == run_alone(request, 64).tokens


def test_a_sample_that_ends_at_its_first_token_frees_its_share():
    scheduler = make()
    scheduler.add(ask("a", 6, n=3, eos_token_ids=(9,)))
    _, events = step(scheduler, 9, 8, 9)
    assert [e.finish_reason for e in events] == [FinishReason.STOP, None, FinishReason.STOP]
    batch, _ = step(scheduler)
    assert batch.block_copies == ()
    assert [r.token_ids for r in batch.sequences] == [(8,)]


# The prefix cache


def test_a_prompt_that_is_wholly_cached_computes_its_last_token_only():
    scheduler = make()
    scheduler.add(ask("a", list(range(8)), max_tokens=1))
    step(scheduler)
    scheduler.add(ask("b", list(range(8)), max_tokens=1))
    batch, [event] = step(scheduler)
    assert (batch.sequences[0].start, len(batch.sequences[0].token_ids)) == (7, 1)
    assert event.num_cached_tokens == 7


def test_a_prompt_that_goes_on_in_another_way_finds_the_beginning_of_a_block():
    scheduler = make(num_blocks=20, block_size=16, max_model_len=100, max_num_batched_tokens=100)
    first = list(range(48))
    scheduler.add(ask("a", first, max_tokens=1))
    step(scheduler)
    scheduler.add(ask("b", [*first[:31], *range(100, 117)], max_tokens=2))
    batch, [event] = step(scheduler)
    [run] = batch.sequences
    assert (event.num_cached_tokens, run.start, len(run.token_ids)) == (31, 31, 17)
    [(source, copy)] = batch.block_copies
    assert copy == run.block_ids[1] != source
    scheduler.add(ask("c", first, max_tokens=1))  # what it was copied from is as it was
    batch, [_, event] = step(scheduler)
    assert event.num_cached_tokens == 47
    assert [source for source, _ in batch.block_copies] == [batch.sequences[1].block_ids[2]] or (
        batch.sequences[1].block_ids[1] == source
    )


def test_of_many_blocks_the_one_with_most_in_common_is_copied():
    scheduler = make(num_blocks=40, max_model_len=40, max_num_batched_tokens=100)
    for i, tail in enumerate(
        ([7, 1, 1, 1], [7, 8, 1, 1], [7, 8, 9, 1], [7, 9, 9, 9], [6, 8, 9, 9])
    ):
        scheduler.add(ask(f"{i}", [0, 1, 2, 3, *tail, 5], max_tokens=1))
        step(scheduler)
    for tail, count in (
        ([7, 8, 9, 9, 5], 7), ([7, 8, 2, 9, 5], 6), ([7, 2, 9, 9, 5], 5), ([5, 8, 9, 9, 5], 4),
        ([7, 8], 5), ([7], 4),
    ):  # fmt: skip
        scheduler.add(ask("x", [0, 1, 2, 3, *tail], max_tokens=1))
        _, [event] = step(scheduler)
        assert event.num_cached_tokens == count, tail


def test_without_room_for_a_copy_a_block_that_agrees_in_part_is_computed():
    scheduler = make(num_blocks=3, max_model_len=12)
    scheduler.add(ask("a", list(range(8)), max_tokens=1))
    step(scheduler)
    scheduler.add(ask("b", [*range(6), 50, 51, 52], max_tokens=1))  # needs 3 blocks of 3
    batch, [event] = step(scheduler)
    assert (event.num_cached_tokens, batch.block_copies) == (4, ())


def test_a_prompt_finds_nothing_in_part_of_its_first_block_or_across_salts():
    scheduler = make(num_blocks=20)
    scheduler.add(ask("a", list(range(9)), max_tokens=1))
    step(scheduler)
    scheduler.add(ask("b", [0, 1, 2, 50, 51], max_tokens=1))
    scheduler.add(ask("c", [*range(6), 50], max_tokens=1, salt="other"))
    _, events = step(scheduler)
    assert [e.num_cached_tokens for e in events] == [0, 0]


@pytest.mark.parametrize("num_tokens", [1, 64])
def test_what_was_copied_in_part_is_forgotten_with_what_is_damaged(num_tokens):
    """The copy lies behind the block that both have, which leaves the cache with all behind it."""
    scheduler = make(num_blocks=20, max_num_batched_tokens=num_tokens + 9)
    scheduler.add(ask("a", list(range(9)), max_tokens=9))
    step(scheduler)
    scheduler.add(ask("b", [*range(6), 50, 51, 52, 53, 54, 55], max_tokens=9))
    batch, _ = step(scheduler)
    assert len(batch.block_copies) == 1
    scheduler.fail("a", FloatingPointError())
    while scheduler.has_unfinished():
        step(scheduler)
        scheduler.check_integrity()
    pool = scheduler.tables.allocator
    assert not any(map(pool.is_cached, range(pool.num_blocks)))


def test_who_is_preempted_before_its_copy_gives_the_source_back():
    scheduler = make(num_blocks=6, max_num_batched_tokens=64)
    scheduler.add(ask("a", list(range(9)), max_tokens=1))
    step(scheduler)
    seq_b = ask("b", [*range(6), 50], max_tokens=1)
    scheduler.add(seq_b)
    seq = scheduler.roster.first_waiting()
    assert scheduler.tables.reserve(seq, 0)
    assert seq.num_computed_tokens == 6
    scheduler.roster.admit(seq)
    scheduler.check_integrity()
    scheduler.abort("b")
    assert scheduler.stats().blocks_used == 0
    scheduler.check_integrity()


def test_every_sample_reports_what_its_prompt_found():
    scheduler = make()
    scheduler.add(ask("a", list(range(8)), max_tokens=1))
    step(scheduler)
    scheduler.add(ask("b", list(range(9)), n=2))
    _, events = step(scheduler)
    assert [e.num_cached_tokens for e in events] == [8, 8]


def test_a_follow_up_finds_the_generated_tokens_too():
    scheduler = make()
    scheduler.add(ask("a", [1, 2, 3], max_tokens=6))
    while scheduler.has_unfinished():
        step(scheduler)
    scheduler.add(ask("b", [1, 2, 3, 7, 7, 7, 7, 7, 50], max_tokens=1))
    _, [event] = step(scheduler)
    assert event.num_cached_tokens == 8


def test_salts_isolate_requests():
    scheduler = make()
    scheduler.add(ask("a", list(range(9)), max_tokens=1, salt="alice"))
    step(scheduler)
    scheduler.add(ask("b", list(range(9)), max_tokens=1, salt="bob"))
    batch, [event] = step(scheduler)
    assert (batch.sequences[0].start, event.num_cached_tokens) == (0, 0)
    scheduler.add(ask("c", list(range(9)), max_tokens=1, salt="alice"))
    _, [event] = step(scheduler)
    assert event.num_cached_tokens == 8


def test_without_prefix_caching_nothing_is_shared():
    scheduler = make(enable_prefix_caching=False)
    for name in "ab":
        scheduler.add(ask(name, list(range(9)), max_tokens=1))
        _, [event] = step(scheduler)
        assert event.num_cached_tokens == 0
    assert scheduler.stats().prefix_query_tokens == 0


def test_requests_that_computed_the_same_prefix_side_by_side_end_up_sharing_it():
    scheduler = make()
    for name in "ab":
        scheduler.add(ask(name, list(range(8)), max_tokens=4))
    for tokens in ([8], [1, 1], [1, 1]):  # b's last token is computed for its logits
        batch, _ = step(scheduler)
        assert [len(run.token_ids) for run in batch.sequences] == tokens
    assert batch.sequences[0].block_ids[:2] == batch.sequences[1].block_ids[:2]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [64, 100, 2048])
@pytest.mark.parametrize("chunk", [None, 64])
def test_equal_prompts_that_arrive_together_are_computed_once(overlap, budget, chunk):
    scheduler = make(
        num_blocks=400, block_size=16, max_num_batched_tokens=budget, max_model_len=600,
        long_prefill_token_threshold=chunk, max_in_flight=1 + overlap,
    )  # fmt: skip
    prompt = list(range(512))
    requests = [ask(name, prompt, max_tokens=3, seed=1, n=1 + (name == "c")) for name in "abcdefgh"]
    for request in requests:
        scheduler.add(request)
    schedule, computed = scheduler.schedule, []

    def counting():
        batch = schedule()
        if batch is not None:
            computed.extend(len(r.token_ids) for r in batch.sequences if r.num_generated == 0)
        return batch

    scheduler.schedule = counting
    outputs = run_to_end(scheduler)
    assert sum(computed) == 512 + 7
    assert scheduler.stats().prefix_hit_tokens == 7 * 511
    assert len(outputs.reasons) == 9
    assert outputs.tokens["h", 0] == run_alone_in(requests[7], scheduler)


def test_who_waits_for_a_block_keeps_nobody_else_waiting():
    scheduler = make()
    for name, prompt in (("a", 9), ("b", [1097] * 12), ("c", 5)):
        scheduler.add(ask(name, prompt, max_tokens=2))
    batch, _ = step(scheduler)
    assert [len(run.token_ids) for run in batch.sequences] == [9, 5]
    batch, events = step(scheduler)
    assert [len(run.token_ids) for run in batch.sequences] == [1, 4, 1]
    assert [event.num_cached_tokens for event in events] == [0, 8, 0]


def test_who_waits_for_a_block_goes_on_when_its_writer_ends():
    scheduler = make()
    for name in "ab":
        scheduler.add(ask(name, list(range(9)), max_tokens=2))
    batch = scheduler.schedule()
    assert len(batch.sequences) == 1
    assert scheduler.abort("a")
    scheduler.update(batch, [[SampledToken(7)]])
    batch, [event] = step(scheduler)
    assert len(batch.sequences[0].token_ids) == 9
    assert event.num_cached_tokens == 0


def test_blocks_of_a_failed_step_are_never_found():
    scheduler = make()
    scheduler.add(ask("a", list(range(9))))
    scheduler.add(ask("b", 3))
    batch = scheduler.schedule()
    assert scheduler.discard(batch) == ["a", "b"]
    assert not scheduler.has_unfinished()
    scheduler.check_integrity()
    scheduler.add(ask("a", list(range(9)), max_tokens=1))
    _, [event] = step(scheduler)
    assert event.num_cached_tokens == 0


def test_a_failed_step_ends_only_the_requests_that_were_in_it():
    scheduler = make(max_num_seqs=1)
    scheduler.add(ask("a", 3))
    scheduler.add(ask("b", 3, max_tokens=2))
    assert scheduler.discard(scheduler.schedule()) == ["a"]
    assert len(run_to_end(scheduler).tokens["b", 0]) == 2


def test_the_prefix_cache_is_reset_only_when_nothing_runs():
    scheduler = make()
    scheduler.add(ask("a", list(range(9)), max_tokens=2))
    step(scheduler)
    assert not scheduler.reset_prefix_cache()
    step(scheduler)
    assert scheduler.reset_prefix_cache()
    scheduler.add(ask("b", list(range(9)), max_tokens=1))
    _, [event] = step(scheduler)
    assert event.num_cached_tokens == 0


# Cancellation


def test_an_abort_frees_all_samples_at_once():
    scheduler = make()
    scheduler.add(ask("a", 6, n=3))
    step(scheduler)
    step(scheduler)
    assert scheduler.abort("a")
    assert not scheduler.has_unfinished()
    assert scheduler.stats().blocks_used == 0
    assert not scheduler.abort("a")
    scheduler.check_integrity()


def test_an_abort_while_waiting_leaves_the_queue():
    scheduler = make(max_num_seqs=1)
    for name in "abc":
        scheduler.add(ask(name, 3, max_tokens=1))
    assert scheduler.abort("b")
    assert sorted(r for r, _ in run_to_end(scheduler).tokens) == ["a", "c"]


def test_an_abort_in_flight_drops_its_results_and_keeps_those_of_others():
    scheduler = make()
    for name in "abc":
        scheduler.add(ask(name, 3, n=2, max_tokens=4))
    batch = scheduler.schedule()
    scheduler.abort("b")
    events = scheduler.update(batch, [[SampledToken(5), SampledToken(6)]] * 3)
    assert [(e.request_id, e.index) for e in events] == [("a", 0), ("a", 1), ("c", 0), ("c", 1)]
    scheduler.check_integrity()
    finish_all(scheduler)
    assert scheduler.stats().blocks_used == 0


def test_an_abort_of_one_sharer_leaves_the_prefix_to_the_other():
    scheduler = make()
    model = VirtualModel(scheduler)
    prompt = list(range(9))
    for name in "ab":
        scheduler.add(ask(name, prompt, max_tokens=6, seed=1))
        batch = scheduler.schedule()
        scheduler.update(batch, model.run(batch))
    scheduler.abort("a")
    scheduler.check_integrity()
    while (batch := scheduler.schedule()) is not None:
        scheduler.update(batch, model.run(batch))


# Steps beside an unfinished one


def overlapping(**settings) -> Scheduler:
    return make(max_in_flight=2, **settings)


def draw(scheduler: Scheduler, batch: Batch, token_id: int = 7) -> list[TokenEvent]:
    samples = [[SampledToken(token_id)] * run.num_samples for run in batch.sequences]
    events = scheduler.update(batch, samples)
    scheduler.check_integrity()
    return events


def test_the_next_step_is_scheduled_before_its_token_is_known():
    scheduler = overlapping()
    scheduler.add(ask("a", 5, max_tokens=4))
    first, second = scheduler.schedule(), scheduler.schedule()
    [run] = second.sequences
    assert (run.token_ids, run.start, run.num_generated) == ((PENDING,), 5, 1)
    with pytest.raises(RuntimeError, match="must follow schedule"):
        scheduler.schedule()
    with pytest.raises(ValueError, match="first of those unfinished"):
        scheduler.update(second, [[SampledToken(1)]])
    draw(scheduler, first)
    [run] = scheduler.schedule().sequences
    assert (run.token_ids, run.start, run.num_generated) == ((PENDING,), 6, 2)


def test_nothing_is_scheduled_past_the_length_that_is_known():
    scheduler = overlapping()
    scheduler.add(ask("a", 5, max_tokens=2))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert len(draw(scheduler, first)) == 1
    assert scheduler.schedule() is None
    [event] = draw(scheduler, second)
    assert event.finish_reason is FinishReason.LENGTH
    assert scheduler.stats().blocks_used == 0


def test_a_stop_found_late_drops_one_run_and_shows_nothing_of_it():
    scheduler = overlapping()
    scheduler.add(ask("a", 5, max_tokens=9, eos_token_ids=(2,)))
    scheduler.add(ask("b", 5, max_tokens=9))
    first, second = scheduler.schedule(), scheduler.schedule()
    draw(scheduler, first)
    third = scheduler.schedule()
    events = scheduler.update(second, [[SampledToken(2)], [SampledToken(7)]])
    assert [e.finish_reason for e in events] == [FinishReason.STOP, None]
    assert len(third.sequences) == 2
    assert scheduler.stats().blocks_used == 4  # a's are still in use by the third step
    assert [e.request_id for e in draw(scheduler, third)] == ["b"]
    assert scheduler.stats().blocks_used == 2
    fourth = scheduler.schedule()
    assert fourth.left == (0,)


def test_samples_wait_for_the_step_that_forks_them():
    scheduler = overlapping()
    scheduler.add(ask("a", 5, n=3, max_tokens=4))
    first = scheduler.schedule()
    assert scheduler.schedule() is None
    assert len(draw(scheduler, first)) == 3
    assert [run.token_ids for run in scheduler.schedule().sequences] == [(7,)] * 3


def test_who_lacks_a_block_waits_for_those_of_an_unfinished_step():
    scheduler = overlapping(num_blocks=5)
    scheduler.add(ask("a", 7, max_tokens=9))
    scheduler.add(ask("b", 7, max_tokens=9, eos_token_ids=(2,)))
    first, second = scheduler.schedule(), scheduler.schedule()
    [last] = scheduler.tables.allocator.allocate(1)
    scheduler.update(first, [[SampledToken(7)], [SampledToken(2)]])  # b has ended
    assert scheduler.schedule() is None  # and its blocks are free after the second step
    assert scheduler.stats().num_preemptions == 0
    scheduler.tables.allocator.release([last])
    draw(scheduler, second)
    assert len(scheduler.schedule().sequences) == 1


def test_what_was_drawn_for_a_sequence_that_lost_its_blocks_is_dropped():
    scheduler = overlapping(num_blocks=5)
    for name in "ab":
        scheduler.add(ask(name, 7, max_tokens=9))
    first, second = scheduler.schedule(), scheduler.schedule()
    draw(scheduler, first)
    third = scheduler.schedule()  # one block is left; b loses its two, but keeps its token
    assert [run.seq_id for run in third.sequences] == [0]
    [b] = scheduler.sequences("b")
    assert b.num_preemptions == 1
    assert b.output_token_ids == [7]
    assert [e.request_id for e in draw(scheduler, second)] == ["a"]
    assert third.left == (1,)


def test_a_failed_step_leaves_the_one_before_it():
    scheduler = overlapping()
    scheduler.add(ask("a", 5, max_tokens=9))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.discard(second) == ["a"]
    scheduler.check_integrity()
    assert scheduler.stats().blocks_used == 2  # the first step still uses them
    assert draw(scheduler, first) == []
    assert scheduler.stats().blocks_used == 0
    with pytest.raises(ValueError, match="batch must be one that schedule"):
        scheduler.discard(second)


def test_the_head_of_the_queue_looks_its_prefix_up_once(monkeypatch):
    scheduler = make(num_blocks=40, max_num_batched_tokens=200, max_model_len=200)
    scheduler.add(ask("a", list(range(100)), max_tokens=1))
    step(scheduler)
    scheduler.add(ask("b", 60, max_tokens=40))
    step(scheduler)
    scheduler.add(ask("c", [*range(100), *range(500, 560)], max_tokens=1))
    step(scheduler)
    lookups = []
    pack = prefix.pack
    for _ in range(10):
        with monkeypatch.context() as patched:
            patched.setattr(prefix, "pack", lambda ids: lookups.append(len(ids)) or pack(ids))
            batch = scheduler.schedule()
        scheduler.update(batch, [[SampledToken(7)]])
    assert scheduler.stats().num_waiting == 1
    # Of the block that would come next, where b has filled a block or evicted some meanwhile.
    assert 0 < len(lookups) <= 10


# Reports


def test_statistics_count_what_happened():
    scheduler = make(num_blocks=8)
    scheduler.add(ask("a", 6, max_tokens=3))
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.blocks_used) == (0, 1, 0)
    assert (stats.wasted_fraction, stats.peak_wasted_fraction) == (0.0, 0.0)
    step(scheduler)
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.blocks_used) == (1, 0, 2)
    assert (stats.slots_used, stats.wasted_fraction) == (6, 0.25)
    assert (stats.blocks_peak, stats.slots_peak, stats.peak_wasted_fraction) == (2, 6, 0.25)
    finish_all(scheduler)
    stats = scheduler.stats()
    assert (stats.blocks_used, stats.blocks_peak) == (0, 2)
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (6, 0)


def test_shared_slots_count_once():
    scheduler = make()
    scheduler.add(ask("a", 6, n=3))
    step(scheduler)
    assert (scheduler.stats().blocks_used, scheduler.stats().slots_used) == (2, 6)
    step(scheduler)
    assert (scheduler.stats().blocks_used, scheduler.stats().slots_used) == (4, 4 + 3 * 3)


def test_explain_says_what_a_request_does():
    scheduler = make(max_num_batched_tokens=4)
    scheduler.add(ask("a", 10))
    assert scheduler.explain("a") == "waiting: next in line for the token budget"
    step(scheduler)
    assert scheduler.explain("a") == "running: 4 of 10 tokens are computed"
    assert scheduler.explain("b") == "unknown or finished"


def test_damage_is_named():
    scheduler = make()
    scheduler.add(ask("a", 6))
    step(scheduler)
    [seq] = scheduler.sequences("a")
    scheduler.tables.allocator.share(seq.block_ids[:1])
    with pytest.raises(AssertionError, match="number of tables that hold the block"):
        scheduler.check_integrity()


# Adapters


def adapted(request_id: str, adapter: object, **sampling) -> Request:
    """A request of two tokens that uses an adapter."""
    request = ask(request_id, 2, **sampling)
    request.adapter = adapter
    return request


def test_no_more_adapters_run_than_there_are_slots():
    scheduler = make(max_loras=2)
    one, two, three = (SimpleNamespace(number=i, weights=None) for i in (1, 2, 3))
    for name, adapter, length in (
        ("a", one, 2), ("b", two, 6), ("c", one, 6), ("d", three, 2), ("e", None, 2),
    ):  # fmt: skip
        scheduler.add(adapted(name, adapter, max_tokens=length))
    batch = scheduler.schedule()
    assert run_ids(scheduler, batch) == ["a", "b", "c"]  # e, too, waits behind d
    assert [run.adapter for run in batch.sequences] == [one, two, one]
    assert scheduler.explain("d") == "waiting: one of the 2 adapters in use must be let go of"
    assert scheduler.stats().waiting_by_reason["adapters"] == 1
    scheduler.update(batch, [[SampledToken(7)]] * 3)
    for _ in range(4):  # a ends, but c uses its adapter
        batch, _ = step(scheduler)
        assert {run.adapter.number for run in batch.sequences} == {1, 2}
    step(scheduler)  # the last tokens of b and c
    batch = scheduler.schedule()
    assert run_ids(scheduler, batch) == ["d", "e"]


def test_a_sequence_that_gave_its_blocks_back_comes_back_with_its_adapter():
    adapter = SimpleNamespace(number=5, weights=None)
    scheduler = make(num_blocks=4, block_size=2, max_loras=1)
    for name in "ab":
        scheduler.add(adapted(name, adapter, max_tokens=5))
    seen = []
    while scheduler.has_unfinished():
        batch, _ = step(scheduler)
        seen += [run.adapter for run in batch.sequences]
    assert scheduler.stats().num_preemptions > 0
    assert set(map(id, seen)) == {id(adapter)}
