"""Everything at once: each option, few blocks, main memory and failing steps, on every runner.

Whatever happens to a request, its tokens and log-probabilities are those that it gets alone.
"""

from __future__ import annotations

import random

import pytest
import torch

from tests.engine.checkpoint import write_checkpoint
from tests.engine.test_trace import assert_same, follow
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.config import RequestTerms
from tilewise.engine.engine import Engine
from tilewise.engine.llm import LLM
from tilewise.engine.record.replay import Pool
from tilewise.engine.request import FinishReason, SamplingParams
from tilewise.engine.sampling_options import StructuredOutputs
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.sizing import allocate
from tilewise.engine.steps.cpu_step import CompiledRunner
from tilewise.engine.steps.runner import ModelRunner
from tilewise.engine.tables.host_cache import HostCache

LENGTH, SEATS = 60, 8
RUNNERS = ("plain", "compiled", "device")


class Broken(Exception):
    """What a runner of these tests raises."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """What requests are prepared with, and the model."""
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, "llama")
    return LLM(path, device="cpu", block_size=4, num_blocks=100, max_model_len=LENGTH)


def engine_of(llm, kind, *, num_blocks=100, swap=0, overlap=False, **options):
    """Return an engine over a runner of that kind whose bits do not depend on the batch."""
    storage = allocate(llm.engine.runner.storage.spec, num_blocks, torch.device("cpu"))
    if kind == "device":
        runner = DeviceRunner(
            llm.model, storage, max_num_seqs=SEATS, max_model_len=LENGTH, batch_invariant=True
        )
    else:
        make = CompiledRunner if kind == "compiled" else ModelRunner
        runner = make(llm.model, storage, batch_invariant=True)
    if swap:
        runner.host = HostCache(storage, swap)
    settings = {
        "max_num_seqs": SEATS, "max_model_len": LENGTH, "max_num_batched_tokens": 64, **options
    }  # fmt: skip
    scheduler = Scheduler(num_blocks, 4, num_swap_blocks=swap, **settings)
    return Engine(scheduler, runner, overlap=overlap)


def fail_sometimes(runner, draw, share):
    """Let some steps fail: before they begin, when they have begun, or when they are waited for."""
    submit = runner.submit

    class Handle:
        def __init__(self, handle):
            self.handle = handle

        def result(self):
            self.handle.result()
            raise Broken

    def failing(batch):
        if draw.random() >= share:
            return submit(batch)
        where = draw.randrange(3)
        if where == 0:
            raise Broken
        handle = submit(batch)
        if where == 1:
            raise Broken
        return Handle(handle)

    runner.submit = failing


class Run:
    """Steps of an engine, with all that came of them, checked after each."""

    def __init__(self, engine):
        self.engine = engine
        self.tokens, self.scores, self.last = {}, {}, {}
        self.pool, self.number = Pool(), 0

    def step(self):
        for event in self.engine.step():
            key = event.request_id, event.index
            assert key not in self.last, "nothing follows an end"
            if event.token is not None:
                self.tokens.setdefault(key, []).append(event.token[:3])
                if event.token.prompt_logprobs is not None:
                    self.scores[key] = event.token.prompt_logprobs
            if event.finish_reason is not None:
                self.last[key] = event
        self.engine.scheduler.check_integrity()
        self.number = follow(self.pool, self.engine, self.number)
        assert_same(self.pool, self.engine)

    def finish(self):
        while self.engine.has_unfinished():
            self.step()
        assert self.engine.stats().scheduler.blocks_used == 0
        runner, left = self.engine.runner, set(self.engine.scheduler.preemption.left)
        if isinstance(runner, DeviceRunner):
            kept = runner.adjuster._states, runner.scores._scores, runner.rows._row_of
        else:
            kept = runner._adjuster._states, runner._scores._scores, runner._tables._row_of
        assert all(left.issuperset(each) for each in kept), "who has left is forgotten"
        return self


def alone(llm, kind, requests):
    run = Run(engine_of(llm, kind, enable_prefix_caching=False))
    for request in requests:
        run.engine.add_request(request)
        run.finish()
    return run


def shift(prompt, output, logits):
    return logits - 0.5 * (torch.arange(len(logits)) % 3 == len(output) % 3)


def refuse_the_fourth(prompt, output, logits):
    if len(output) == 3:
        raise ArithmeticError("three are enough")
    return logits


OPTIONS = (
    {}, {}, {},
    {"prompt_logprobs": 2, "logprobs": 1},
    {"prompt_logprobs": 0, "frequency_penalty": 0.7},
    {"structured": StructuredOutputs(regex="[a-f]{3,9}")},
    {"structured": StructuredOutputs(choice=["yes", "maybe so"]), "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "logprobs": 2},
    {"logits_processors": [shift], "presence_penalty": 1.0},
    {"logits_processors": [refuse_the_fourth]},
    {"bad_words": ["the", "cat a"], "logit_bias": {5: 3.0, 17: -4.0}},
)  # fmt: skip


def request_of(llm, name, draw, stem):
    count = draw.choice([1, 1, 2, 3])
    params = SamplingParams(
        n=count,
        temperature=0.0 if count == 1 and draw.random() < 0.5 else 1.0,
        max_tokens=draw.randrange(1, 14),
        seed=draw.randrange(1000),
        ignore_eos=True,
        **draw.choice(OPTIONS),
    )
    prompt = [*stem[: draw.randrange(25)], *draw.choices(range(5, 280), k=draw.randrange(1, 6))]
    terms = RequestTerms(
        user=draw.choice("ab"), priority=draw.randrange(3), cache_salt=draw.choice("  s")
    )
    return llm.prepare({"prompt_token_ids": prompt}, params, terms, request_id=name).request


def assert_as_alone(run, truth):
    for key, event in run.last.items():
        if isinstance(event.error, Broken):
            continue
        wanted, got = truth.tokens.get(key, []), run.tokens.get(key, [])
        assert event.finish_reason == truth.last[key].finish_reason
        if event.finish_reason == FinishReason.ERROR:  # when the first of its samples failed
            wanted = wanted[: len(got)]
        assert got == wanted
        if event.finish_reason != FinishReason.ERROR:
            assert run.scores.get(key) == truth.scores.get(key)


# Four seeds have each way to swap, with and without failures.
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 40), marks=pytest.mark.slow)])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("kind", RUNNERS)
def test_any_mixture_gives_the_tokens_of_a_request_alone(llm, kind, overlap, seeds):
    swapped = recalled = 0
    for seed in seeds:
        draw = random.Random(seed)
        engine = engine_of(
            llm,
            kind,
            num_blocks=draw.choice([16, 20, 24]),
            swap=(12, 40, 40, 0)[seed % 4],
            overlap=overlap,
            preemption="swap" if seed % 4 < 2 else "auto",
            scheduling_policy=draw.choice(["fcfs", "priority", "fair"]),
            victim=draw.choice(["newest", "cheapest"]),
            max_num_batched_tokens=draw.choice([8, 13, 64]),
            long_prefill_token_threshold=draw.choice([None, 3]),
        )
        if seed % 2:
            fail_sometimes(engine.runner, random.Random(seed), 0.04)
        stem = draw.choices(range(5, 280), k=30)
        requests = [request_of(llm, str(i), draw, stem) for i in range(14)]
        run, waiting = Run(engine), list(requests)
        while waiting:
            if draw.random() < 0.6:
                engine.add_request(waiting.pop())
            run.step()
        run.finish()
        assert_as_alone(run, alone(llm, kind, requests))
        stats = engine.stats().scheduler
        swapped, recalled = swapped + stats.num_swapped, recalled + stats.num_recalled_tokens
    assert swapped > 0
    assert recalled > 0


def scored(llm, name, prompt):
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    return llm.prepare({"prompt_token_ids": prompt}, params, request_id=name).request


def plain(llm, name, prompt, max_tokens=8):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return llm.prepare({"prompt_token_ids": prompt}, params, request_id=name).request


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_prompt_is_scored_though_main_memory_has_its_beginning(llm, kind):
    prompt = list(range(30, 53))
    engine = engine_of(llm, kind, num_blocks=12, swap=40)
    run = Run(engine)
    for request in (plain(llm, "a", prompt), plain(llm, "b", list(range(100, 140)))):
        engine.add_request(request)
        run.finish()
    assert engine.stats().scheduler.swap_blocks_cold > 0
    engine.add_request(scored(llm, "c", prompt))
    run.finish()
    assert engine.stats().scheduler.num_recalled_tokens == 0
    assert run.scores["c", 0] == alone(llm, kind, [scored(llm, "c", prompt)]).scores["c", 0]


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_prompt_that_is_scored_is_computed_again_and_not_swapped(llm, kind):
    engine = engine_of(
        llm, kind, num_blocks=16, swap=40, preemption="swap", max_num_batched_tokens=8
    )
    run, prompt = Run(engine), list(range(60, 90))
    engine.add_request(plain(llm, "old", list(range(5, 20)), max_tokens=40))
    for _ in range(3):
        run.step()
    engine.add_request(scored(llm, "new", prompt))
    run.step()
    [seq] = engine.scheduler.sequences("new")
    assert 0 < seq.num_computed_tokens < len(prompt)
    with engine.lock:
        engine.scheduler.preemption.preempt(1)
    assert not seq.block_ids
    assert not seq.swap_slots
    run.finish()
    truth = alone(llm, kind, [scored(llm, "new", prompt)])
    assert run.scores["new", 0] == truth.scores["new", 0]


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("kind", RUNNERS)
def test_a_step_that_fails_amid_a_prompt_loses_no_score(llm, kind, overlap):
    engine = engine_of(llm, kind, overlap=overlap, max_num_batched_tokens=8)
    run, prompt, submit = Run(engine), list(range(60, 90)), engine.runner.submit

    def failing(batch):
        if len(batch.sequences) > 1:
            raise Broken
        return submit(batch)

    engine.runner.submit = failing
    engine.add_request(plain(llm, "other", [7, 8, 9], max_tokens=20))
    engine.add_request(scored(llm, "a", prompt))
    run.finish()
    truth = alone(llm, kind, [scored(llm, "a", prompt)])
    assert run.scores == truth.scores
    assert len(run.scores["a", 0]) == len(prompt) - 1
