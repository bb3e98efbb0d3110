"""The step, with the real scheduler, runner and sampler around a model that reads its own cache."""

from __future__ import annotations

import copy
import functools
import random

import pytest
import torch

from tilewise.cache.spec import CacheSpec, KVSpec
from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import Batch, ScheduledSequence
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.engine import Engine
from tilewise.engine.request import FinishReason, Request, SamplingParams
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.steps.runner import ModelRunner
from tilewise.engine.steps.sampler import sample
from tilewise.errors import RequestError

VOCAB = 50
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def logits_after(tokens):
    """The model: logits that depend on every token so far and on their order."""
    seed = 17
    for token in tokens:
        seed = (seed * 1_000_003 + token + 1) % (2**31 - 1)
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


class CacheReader:
    """Computes `logits_after` from the token ids that it wrote to the cache in earlier steps."""

    def __init__(self):
        self.steps = 0

    def __call__(self, ids, positions, *, ctx, kv):
        self.steps += 1
        [(k_cache, v_cache)] = kv
        is_row = ctx.slot_mapping >= 0  # rows that pad a bucket have no slot and no keys
        k_cache.view(-1)[ctx.slot_mapping[is_row]] = ids[is_row].float()
        v_cache.view(-1)[ctx.slot_mapping[is_row]] = positions[is_row].float()
        block_size, prefixes = k_cache.shape[1], []
        bounds, lengths = ctx.cu_seqlens_q.tolist(), ctx.seqlens_k.tolist()
        for b, length in enumerate(lengths):
            if length == 0:
                assert not is_row[bounds[b] : bounds[b + 1]].any()
                prefixes += [[0]] * (bounds[b + 1] - bounds[b])
                continue
            blocks = ctx.block_table[b, : -(-length // block_size)].long()
            tokens = k_cache[blocks].flatten()[:length]
            seen = v_cache[blocks].flatten()[:length]
            assert torch.equal(seen, torch.arange(length, device=seen.device).float())
            assert torch.equal(
                tokens[length - (bounds[b + 1] - bounds[b]) :], ids_of(ids, bounds, b)
            )
            rows = bounds[b + 1] - bounds[b]
            prefixes += [tokens[: length - rows + i + 1].long().tolist() for i in range(rows)]
        self.prefixes = prefixes
        return torch.arange(len(prefixes), device=ids.device).float()[:, None]

    def compute_logits(self, hidden):
        if len(hidden) == 0:
            return torch.zeros(0, VOCAB, device=hidden.device)
        rows = [logits_after(self.prefixes[int(row)]) for row in hidden[:, 0]]
        return torch.stack(rows).to(hidden.device)


def ids_of(ids, bounds, b):
    return ids[bounds[b] : bounds[b + 1]].float()


def expected_tokens(prompt, params, seed=0, eos=()):
    """One sample, computed alone, without cache or scheduler."""
    tokens = list(prompt)
    for step in range(params.max_tokens):
        run = ScheduledSequence(0, (0,), 0, (0,), 1, params, (seed,), step)
        tokens.append(sample(logits_after(tokens)[None], Batch((run,)))[0][0].token_id)
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


@pytest.fixture(
    params=[("model", False), ("model", True), ("device", False), ("device", True)],
    ids=["in turn", "overlap", "device batch in turn", "device batch with overlap"],
)
def make_engine(request):
    """Every test runs with steps in turn and with overlap, on either runner."""
    kind, overlap = request.param
    return functools.partial(build_engine, kind=kind, overlap=overlap)


def build_engine(num_blocks=64, block_size=4, *, kind="model", overlap=False, **options):
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 100, **options}
    storage = KVStorage(CacheSpec(1, block_size, KVSpec(1, 1, 1, torch.float32)), num_blocks)
    scheduler = Scheduler(num_blocks, block_size, **settings)
    if kind == "model":
        runner = ModelRunner(CacheReader(), storage)
    else:
        limits = {name: settings[name] for name in ("max_num_seqs", "max_model_len")}
        runner = DeviceRunner(CacheReader(), storage, **limits)
    return Engine(scheduler, runner, overlap=overlap)


def run(engine, *requests):
    """Run to the end; returns {(request id, index): tokens}."""
    for request in requests:
        engine.add_request(request)
    tokens = {}
    while engine.has_unfinished():
        for event in engine.step():
            tokens.setdefault((event.request_id, event.index), []).append(event.token.token_id)
        engine.scheduler.check_integrity()
    return tokens


def prompt_of(length, seed):
    return [random.Random(seed * 1000 + length).randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_chunks_and_batches_leave_the_tokens_alone(make_engine, budget):
    prompts = {str(n): prompt_of(n, n) for n in (1, 3, 4, 5, 17, 40)}
    engine = make_engine(max_num_batched_tokens=budget)
    got = run(engine, *(Request(i, p, GREEDY) for i, p in prompts.items()))
    assert got == {(i, 0): expected_tokens(p, GREEDY) for i, p in prompts.items()}


def test_preemption_leaves_the_tokens_alone(make_engine):
    prompts = {str(n): prompt_of(n, n) for n in (6, 9, 10, 13, 3)}
    engine = make_engine(num_blocks=8)
    got = run(engine, *(Request(i, p, GREEDY) for i, p in prompts.items()))
    assert engine.stats().scheduler.num_preemptions > 0
    assert got == {(i, 0): expected_tokens(p, GREEDY) for i, p in prompts.items()}


@pytest.mark.parametrize("num_blocks", [64, 9])
def test_samples_of_a_fork_are_what_each_would_be_alone(make_engine, num_blocks):
    params = SamplingParams(n=4, seed=5, max_tokens=9)
    engine = make_engine(num_blocks=num_blocks)
    request = Request("a", prompt_of(10, 1), params)
    engine.add_request(request)
    seeds, got = {}, {}
    while engine.has_unfinished():
        for event in engine.step():
            got.setdefault(event.index, []).append(event.token.token_id)
        seeds |= {seq.index: seq.seed for seq in engine.scheduler.sequences("a")}
    assert len(set(seeds.values())) == 4
    single = SamplingParams(max_tokens=9)
    prompt = request.prompt_token_ids
    assert got == {i: expected_tokens(prompt, single, seed) for i, seed in seeds.items()}
    # and the first sample is the request with n = 1
    alone = run(make_engine(), Request("b", prompt, SamplingParams(seed=5, max_tokens=9)))
    assert alone["b", 0] == got[0]


def test_a_prefix_hit_leaves_the_tokens_alone(make_engine):
    engine = make_engine()
    shared = prompt_of(21, 7)
    first = run(engine, Request("a", [*shared, 1, 2], GREEDY))
    before = engine.stats().scheduler.prefix_hit_tokens
    second = run(engine, Request("b", [*shared, 3], GREEDY))
    assert engine.stats().scheduler.prefix_hit_tokens - before == 21
    assert first["a", 0] == expected_tokens([*shared, 1, 2], GREEDY)
    assert second["b", 0] == expected_tokens([*shared, 3], GREEDY)


@pytest.mark.parametrize("budget", [9, 64])
def test_what_is_taken_over_from_another_prompt_leaves_the_tokens_alone(make_engine, budget):
    engine = make_engine(max_num_batched_tokens=budget)
    shared = prompt_of(22, 7)
    prompts = {str(i): [*shared, *prompt_of(i % 3, i)] for i in range(5)} | {"alone": [1, 2, 3]}
    got = run(engine, *(Request(i, p, GREEDY) for i, p in prompts.items()))
    assert engine.stats().scheduler.prefix_hit_tokens >= 4 * 20
    assert got == {(i, 0): expected_tokens(p, GREEDY) for i, p in prompts.items()}


def test_end_tokens_stop_unless_ignored(make_engine):
    prompt = prompt_of(5, 3)
    free = expected_tokens(prompt, GREEDY)
    end = free[4]
    stopped = run(make_engine(), Request("a", prompt, GREEDY, eos_token_ids=(end,)))
    assert stopped["a", 0] == free[: free.index(end) + 1]
    ignoring = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    ignored = run(make_engine(), Request("a", prompt, ignoring, eos_token_ids=(end,)))
    assert ignored["a", 0] == free


@pytest.mark.parametrize("budget", [3, 64])
def test_aborting_midway_leaks_nothing_and_disturbs_nobody(make_engine, budget):
    prompts = {str(n): prompt_of(n, n) for n in (6, 9, 20, 13)}
    engine = make_engine(max_num_batched_tokens=budget)
    for i, p in prompts.items():
        engine.add_request(Request(i, p, GREEDY))
    kept = {}
    for step in range(100):
        if step == 4:
            assert engine.abort("9")
            assert engine.abort("20")
            assert not engine.abort("9")
        for event in engine.step():
            kept.setdefault(event.request_id, []).append(event.token.token_id)
        engine.scheduler.check_integrity()
    assert not engine.has_unfinished()
    assert engine.stats().scheduler.blocks_used == 0
    for i in ("6", "13"):
        assert kept[i] == expected_tokens(prompts[i], GREEDY)


def test_a_sample_can_be_finished_from_outside(make_engine):
    engine = make_engine()
    engine.add_request(Request("a", prompt_of(5, 1), SamplingParams(n=2, seed=1, max_tokens=30)))
    for _ in range(3):
        engine.step()
    assert engine.finish("a", 1, FinishReason.STOP, "END")
    indices = {event.index for _ in range(3) for event in engine.step()}
    assert indices == {0}
    engine.abort("a")
    assert engine.stats().scheduler.blocks_used == 0


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(make_engine):
    engine = make_engine(max_num_seqs=2)
    whole = engine.runner.model.compute_logits

    def fail(hidden):
        raise FloatingPointError("logits must be finite")

    for i in range(3):
        engine.add_request(Request(str(i), prompt_of(6, i), GREEDY))
    engine.step()
    engine.runner.model.compute_logits = fail
    failed = []
    while not failed:  # with overlap, after the step that was unfinished
        failed = [event for event in engine.step() if event.finish_reason == "error"]
    assert [event.request_id for event in failed] == ["0", "1"]
    assert all(isinstance(event.error, FloatingPointError) for event in failed)
    engine.runner.model.compute_logits = whole
    rest = run(engine)  # the third had only waited
    assert rest == {("2", 0): expected_tokens(prompt_of(6, 2), GREEDY)}
    assert engine.stats().scheduler.blocks_used == 0


def test_a_refused_request_is_as_it_was_and_the_live_one_of_its_id_stays_under_audit():
    engine = build_engine()
    engine.use_version("2")
    engine.watch(1.0, 0.0, seed=0, stops=False)
    live, refused = (Request("a", prompt_of(9, seed=i), GREEDY) for i in range(2))
    engine.add_request(live)
    before = copy.copy(refused)
    with pytest.raises(RequestError, match="unique among unfinished requests"):
        engine.add_request(refused)
    assert refused == before
    assert list(engine.auditor.watched) == ["a"]
    assert live.row_sampling.logprobs == 0


def test_a_step_without_work_does_nothing(make_engine):
    engine = make_engine()
    assert engine.step() == []
    assert engine.runner.model.steps == 0


def test_stats_separate_prompts_from_decoding(make_engine):
    engine = make_engine()
    run(engine, Request("a", prompt_of(10, 1), SamplingParams(temperature=0.0, max_tokens=6)))
    stats = engine.stats()
    assert (stats.prefill_tokens, stats.decode_tokens) == (10, 5)
    assert stats.prefill_rate > 0
    assert stats.decode_rate > 0
    assert stats.cache_bytes_per_token == 8
    assert stats.scheduler.blocks_peak == 4
    assert make_engine().stats().decode_rate == 0


def test_random_loads_come_out_as_if_each_were_alone(make_engine):
    draw = random.Random(1)
    for trial in range(12):
        engine = make_engine(
            num_blocks=draw.choice([10, 14, 40]),
            block_size=draw.choice([1, 3, 4]) if trial % 3 else 4,
            max_num_seqs=draw.choice([2, 5, 8]),
            max_num_batched_tokens=draw.choice([1, 5, 16, 64]),
            enable_prefix_caching=bool(trial % 2),
        )
        stem = prompt_of(9, trial)
        requests, wanted = [], {}
        for i in range(6):
            prompt = [*stem[: draw.randrange(10)], *prompt_of(draw.randrange(1, 4), i)]
            limit = engine.scheduler.limits.max_cached_len - len(prompt)
            params = SamplingParams(temperature=0.0, max_tokens=max(1, min(limit, 8)))
            if len(prompt) + 1 > engine.scheduler.limits.max_cached_len:
                continue
            requests.append(Request(str(i), prompt, params))
            wanted[str(i), 0] = expected_tokens(prompt, params)
        assert run(engine, *requests) == wanted
