"""Shards under the runner of a GPU, on a CPU: rows on the device, a step ahead, through the wire.

The ranks are threads with collectives of their own, so that `DeviceRunner` and its decode steps run
over a shard without a GPU.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.distributed.thread_group import ThreadGroup
from tests.engine.tensor_parallel.conftest import SETTINGS, write_latents, write_windows
from tilewise.cache.storage import KVStorage
from tilewise.distributed.shards import load_shard
from tilewise.engine.device_runner import DeviceRunner
from tilewise.engine.engine import Engine
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.settings import cache_spec
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

    def __init__(self, path, storage):
        self.storage = storage
        self._writer = BatchWriter()
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

    @staticmethod
    def _make(path, group):
        model = load_shard(path, group)
        longest = SETTINGS["max_model_len"]
        spec = cache_spec(model.config, SETTINGS["block_size"], torch.float32, longest)
        storage = KVStorage(spec, SETTINGS["num_blocks"])
        return DeviceRunner(
            model, storage, max_num_seqs=SETTINGS["max_num_seqs"],
            max_model_len=SETTINGS["max_model_len"],
        )  # fmt: skip

    def submit(self, batch):
        message = json.loads(json.dumps(self._writer.write(batch)))

        def compute(reader, runner):
            return runner.submit(reader.read(message))

        handles = self._each(compute, self._readers, self._runners)
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


def _both(path):
    settings = {**SETTINGS, "swap_space_gib": 0.0}
    whole, shards = (LLM(path, **settings) for _ in range(2))
    runner = _Ranks(path, shards.engine.runner.storage)
    shards.engine = Engine(shards._new_scheduler(), runner, overlap=True)
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


def test_rows_of_groups_and_of_latents_give_the_tokens_of_the_whole(both_of_kind):
    _assert_same_tokens(*both_of_kind, temperature=0.0, max_tokens=40)


def _assert_same_tokens(whole, shards, **options):
    prompts = [
        {"prompt_token_ids": [(7 * i + n) % 290 for i in range(n)]} for n in (1, 30, 9, 22, 41)
    ]
    params = SamplingParams(ignore_eos=True, **options)
    want, got = (llm.generate(prompts, params) for llm in (whole, shards))
    for mine, theirs in zip(got, want, strict=True):
        assert [c.token_ids for c in mine.outputs] == [c.token_ids for c in theirs.outputs]
    shards.loop.call(shards.engine.scheduler.check_integrity)
