"""Shards under the runner of a GPU, on a CPU: rows on the device, a step ahead, through the wire.

The ranks are threads with collectives of their own, so that `DeviceRunner` and its decode steps run
over a shard without a GPU. The runner of a CPU's shards draws here as from many rows of a large
vocabulary: from each rank's share.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

from tests.distributed.thread_group import ThreadGroup, on_ranks
from tests.engine.tensor_parallel.conftest import SETTINGS, write_latents, write_windows
from tilewise.cache.storage import KVStorage
from tilewise.distributed.shards import VocabularyHead, load_shard
from tilewise.engine.captured import decode_step
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.engine import Engine
from tilewise.engine.llm import LLM
from tilewise.engine.request import Request, SamplingParams
from tilewise.engine.settings import cache_spec
from tilewise.engine.tensor_parallel import sharded_runner
from tilewise.engine.tensor_parallel.sharded_runner import ShardedRunner
from tilewise.engine.tensor_parallel.wire import (
    BatchReader,
    BatchWriter,
    read_samples,
    write_samples,
)

SIZE = 2


class _Ranks:
    """A runner whose steps are computed by a DeviceRunner of a shard in each of some threads."""

    host = None
    num_compilations = 0

    def __init__(self, path, storage, runner_class=DeviceRunner):
        self._runner_class = runner_class
        self.storage = storage
        self._writer, self.told = BatchWriter(), []
        self._threads = [ThreadPoolExecutor(1) for _ in range(SIZE)]
        places, barrier = [None] * SIZE, threading.Barrier(SIZE)
        groups = [ThreadGroup(rank, places, barrier) for rank in range(SIZE)]
        self._readers = [BatchReader(lambda _: None) for _ in range(SIZE)]
        self._runners = [f.result() for f in self._each(self._make, [path] * SIZE, groups)]

    def _each(self, function, *values):
        return [
            thread.submit(function, *own)
            for thread, own in zip(self._threads, zip(*values, strict=True), strict=True)
        ]

    def _make(self, path, group):
        model = load_shard(path, group)
        longest = SETTINGS["max_model_len"]
        spec = cache_spec(model.config, SETTINGS["block_size"], torch.float32, longest)
        storage = KVStorage(spec, SETTINGS["num_blocks"])
        if self._runner_class is ShardedRunner:
            return ShardedRunner(model, storage, batch_invariant=False)
        return DeviceRunner(
            model, storage, max_num_seqs=SETTINGS["max_num_seqs"],
            max_model_len=SETTINGS["max_model_len"],
        )  # fmt: skip

    def submit(self, batch):
        message = json.loads(json.dumps(self._writer.write(batch)))

        def compute(reader, runner):
            return runner.submit(reader.read(message))

        self.told.append(message[0])
        handles = self._each(compute, self._readers, self._runners)
        wait(handles)  # who fails waits for the others, as its parent does
        self._results = [h.result() for h in handles]
        return _Handle(self._results)

    def reset(self):
        self._writer.reset()
        for reader, runner in zip(self._readers, self._runners, strict=True):
            reader.reset()
            runner.reset()

    def is_lost(self):
        return False


class _Handle:
    def __init__(self, handles):
        self._handles = handles

    def result(self):
        told = [json.dumps(write_samples(handle.result())) for handle in self._handles]
        assert len(set(told)) == 1  # every rank has drawn the same
        return read_samples(json.loads(told[0]))


def _both(path, runner_class=DeviceRunner):
    settings = {**SETTINGS, "swap_space_gib": 0.0}
    whole, shards = (LLM(path, **settings) for _ in range(2))
    runner = _Ranks(path, shards.engine.runner.storage, runner_class)
    is_ahead = runner_class is DeviceRunner
    shards.engine = Engine(shards.loop.new_scheduler(), runner, overlap=is_ahead)
    yield whole, shards
    whole.close()
    shards.close()


@pytest.fixture(scope="module")
def both(checkpoint):
    yield from _both(checkpoint)


@pytest.fixture(scope="module", params=[write_windows, write_latents])
def both_of_kind(request, tmp_path_factory):
    yield from _both(request.param(tmp_path_factory.mktemp("kind")))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0, "max_tokens": 40},
        {"temperature": 0.8, "max_tokens": 20, "seed": 3, "n": 2, "top_p": 0.9},
        {"temperature": 0.0, "max_tokens": 12, "logprobs": 3, "prompt_logprobs": 1},
        {"temperature": 0.0, "max_tokens": 12, "presence_penalty": 1.0, "logit_bias": {4: 3.0}},
    ],
    ids=["greedy", "drawn", "scored", "adjusted"],
)
def test_rows_of_shards_give_the_tokens_of_the_whole(both, options):
    _assert_same_tokens(*both, **options)


@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (0.0, 0.8, 0.0)])
def test_greedy_rows_are_drawn_from_the_largest_logits(checkpoint, monkeypatch, temperatures):
    monkeypatch.setattr(decode_step, "GREEDY_ROWS", 2)
    for whole, shards in _both(checkpoint):
        params = [
            SamplingParams(temperature=t, max_tokens=24, seed=5, ignore_eos=True)
            for t in temperatures
        ]
        prompts = [{"prompt_token_ids": [(7 * i + n) % 290 for i in range(n)]} for n in (5, 9, 3)]
        want, got = (
            [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
            for llm in (whole, shards)
        )
        assert got == want
        for runner in shards.engine.runner._runners:
            assert bool(runner.greedy_steps) == (not any(temperatures))


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_stay_in_step_whoever_comes_ends_leaves_and_fails(both, monkeypatch, fails):
    """Steps a step ahead, told whole or in a word, with blocks that run out: the whole's tokens."""
    monkeypatch.setattr(decode_step, "GREEDY_ROWS", 2)
    whole, shards = both
    ranks, rng = shards.engine.runner, random.Random(fails)
    ranks.told.clear()
    for _ in range(7):
        plan, gone = _plan(rng)
        want = _run(Engine(whole.loop.new_scheduler(), whole.engine.runner), plan, gone)
        broken = {rng.randint(2, 40) for _ in range(3)} if fails else set()
        with monkeypatch.context() as patch:
            for runner in ranks._runners:
                patch.setattr(runner, "submit", _failing(runner.submit, broken))
            got = _run(Engine(shards.loop.new_scheduler(), ranks, overlap=True), plan, gone)
        for key in want | got:
            mine, theirs = got.get(key, []), want.get(key, [])
            if fails or key[0] in gone:  # one ends when it fails alone
                mine, theirs = (tokens[: min(len(mine), len(theirs))] for tokens in (mine, theirs))
            assert mine == theirs, key
    assert ranks.told.count("later") > 50


def _plan(rng):
    """Return requests by the step in which they come, and who is aborted in which."""
    plan, gone = list[tuple[int, Request]](), dict[str, int]()
    for i in range(rng.randint(2, 9)):
        ids = [rng.randrange(290) for _ in range(rng.choice((1, 3, 9, 30, 50)))]
        options = rng.choice(
            [{"temperature": 0.0}] * 6
            + [{"temperature": 0.8, "n": 3}, {"temperature": 0.0, "presence_penalty": 1.0},
               {"temperature": 0.0, "logprobs": 2}, {"temperature": 0.7}]
        )  # fmt: skip
        params = SamplingParams(max_tokens=rng.choice((1, 5, 20, 40)), seed=i, **options)
        begin = rng.randint(0, 40)
        plan.append((begin, Request(str(i), ids, params)))
        if rng.random() < 0.2:
            gone[str(i)] = begin + rng.randint(1, 15)
    return plan, gone


def _run(engine, plan, gone):
    """Return the tokens of each sample."""
    engine.runner.reset()
    found, coming, step = dict[tuple[str, int], list[int]](), list(plan), 0
    while coming or engine.has_unfinished():
        for one in [one for one in coming if one[0] <= step]:
            coming.remove(one)
            engine.add_request(one[1])
        for request_id, last in gone.items():
            if last == step:
                engine.abort(request_id)
        for event in engine.step():
            if event.token is not None:
                found.setdefault((event.request_id, event.index), []).append(event.token.token_id)
        step += 1
    return found


def _failing(submit, steps):
    """Return what fails in some of its calls, before anything of them is computed."""
    calls = itertools.count()

    def failing(batch):
        if next(calls) in steps:
            raise MemoryError("planted")
        return submit(batch)

    return failing


class _Model:
    def __init__(self, packed_head):
        self.packed_head = packed_head


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_draw_together_the_first_of_equal_tokens(size, dtype):
    """Of 3 ranks the last has no part of the vocabulary, and of 2 none of its own padding."""
    vocab, width, rows = 100, 64, 40
    logits = torch.randn(vocab, rows, generator=torch.Generator().manual_seed(0))
    logits[[3, 70, 99], 1] = logits[[64, 65], 2] = logits[[63, 64], 3] = 9.0
    logits[:, 4] = 0.0
    logits[:, 5], logits[99, 6], logits[80, 7] = -torch.inf, torch.nan, torch.inf
    logits[:99, 8], logits[:, 9] = -torch.inf, -logits[:, 9].abs()
    logits = logits.to(dtype)
    best = logits.float().amax(dim=0)
    want = [int(row.eq(m).nonzero()[0]) for row, m in zip(logits.t().float(), best, strict=True)
            if m.isfinite()]  # fmt: skip

    def draw(group):
        weight = torch.zeros(width, rows, dtype=dtype)
        first, end = (min(vocab, width * (group.rank + i)) for i in (0, 1))
        weight[: end - first] = logits[first:end]
        linear = torch.nn.Linear(rows, width, bias=False, dtype=dtype)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        head = decode_step.shared_head(_Model(VocabularyHead(linear, vocab, group)))
        assert head is not None
        assert (head.first, head.end) == (first, end)
        # Each row of states picks a column: 0 times what is not finite would spoil the others.
        head._padded = lambda hidden: weight.t()[hidden.argmax(dim=-1)]
        return head.greedy(torch.eye(rows))

    for tokens, is_finite in on_ranks(size, draw):
        assert is_finite.tolist() == best.isfinite().tolist()
        assert is_finite.logical_not().nonzero().flatten().tolist() == [5, 6, 7]
        assert tokens[is_finite].tolist() == want
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < vocab


@pytest.fixture(scope="module")
def both_of_many_logits(checkpoint):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_runner, "GATHERED_BYTES", 0)
        yield from _both(checkpoint, ShardedRunner)


DRAWN = [
    {"temperature": 0.8, "max_tokens": 20, "seed": 3, "n": 2, "top_p": 0.9},
    {"temperature": 1.3, "max_tokens": 20, "seed": 4},
    {"temperature": 0.9, "max_tokens": 20, "seed": 5, "top_k": 12, "min_p": 0.01},
    {"temperature": 1.0, "max_tokens": 12, "seed": 6, "logprobs": 3},
    {"temperature": 0.0, "max_tokens": 12, "logprobs": 3},
    # What changes logits, or scores a prompt, gathers them.
    {"temperature": 0.7, "max_tokens": 12, "seed": 7, "presence_penalty": 1.0,
     "repetition_penalty": 1.2, "logit_bias": {4: 3.0}},
    {"temperature": 0.7, "max_tokens": 12, "seed": 8, "logprobs": 2, "prompt_logprobs": 1},
]  # fmt: skip


@pytest.mark.parametrize("options", DRAWN, ids=[str(i) for i in range(len(DRAWN))])
def test_what_is_drawn_from_shares_is_drawn_from_the_whole(
    both_of_many_logits, options, monkeypatch
):
    steps = []

    def counted(head, logits, batch):
        steps.append(logits.shape[1])
        return draw(head, logits, batch)

    draw = sharded_runner.draw_from_shares
    monkeypatch.setattr(sharded_runner, "draw_from_shares", counted)
    _assert_same_tokens(*both_of_many_logits, **options)
    gathers = {"presence_penalty", "prompt_logprobs"} & set(options)
    assert (not steps) == bool(gathers)
    assert sum(set(steps)) in (0, 300)  # the two shares of the vocabulary


def test_rows_of_many_rules_are_drawn_in_one_step(both_of_many_logits):
    whole, shards = both_of_many_logits
    prompts = [{"prompt_token_ids": [(5 * i + n) % 290 for i in range(n)]} for n in range(3, 10)]
    params = [SamplingParams(ignore_eos=True, **{**rule, "max_tokens": 15}) for rule in DRAWN]
    want, got = (llm.generate(prompts, params) for llm in (whole, shards))
    for mine, theirs in zip(got, want, strict=True):
        assert [c.token_ids for c in mine.outputs] == [c.token_ids for c in theirs.outputs]


def test_rows_of_groups_and_of_latents_give_the_tokens_of_the_whole(both_of_kind):
    _assert_same_tokens(*both_of_kind, temperature=0.0, max_tokens=24)


def _assert_same_tokens(whole, shards, **options):
    prompts = [
        {"prompt_token_ids": [(7 * i + n) % 290 for i in range(n)]} for n in (1, 30, 9, 22, 41)
    ]
    params = SamplingParams(ignore_eos=True, **options)
    want, got = (llm.generate(prompts, params) for llm in (whole, shards))
    for mine, theirs in zip(got, want, strict=True):
        assert [c.token_ids for c in mine.outputs] == [c.token_ids for c in theirs.outputs]
    shards.loop.call(shards.engine.scheduler.check_integrity)
