"""Models with windows, and of latents: the same tokens from 1, 2 and 4 processes.

Windows make groups of layers, each with block tables of its own on every rank. Latents are whole on
every rank, and the heads that read them are shared.
"""

from __future__ import annotations

import pytest
import torch

from tests.engine.tensor_parallel.conftest import (
    SETTINGS,
    assert_nothing_stays,
    write_latents,
    write_mixture,
    write_windows,
)
from tests.engine.tensor_parallel.test_equal import _greedy, _prompts, _run
from tilewise.cache.spec import CacheSpec, KVSpec
from tilewise.engine import sizing
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.tensor_parallel.runner import fewest

KINDS = {"windows": write_windows, "latents": write_latents}
# Four ranks share two heads of keys. Latents have no such heads: there, more ranks are the same.
SIZES = [
    ("windows", 2),
    ("windows", 4),
    ("latents", 2),
    pytest.param("latents", 4, marks=pytest.mark.slow),
]
of_every_size = pytest.mark.parametrize(("kind", "size"), SIZES, indirect=["kind"], scope="module")


@pytest.fixture(scope="module")
def kind(request, tmp_path_factory):
    """The kind, and an LLM for each size, started when it is first asked for."""
    path = KINDS[request.param](tmp_path_factory.mktemp(request.param))
    made: dict[int, LLM] = {}

    def of(size: int) -> LLM:
        if size not in made:
            made[size] = LLM(path, tensor_parallel_size=size, **SETTINGS)
        return made[size]

    yield request.param, of
    for size, llm in made.items():
        assert llm.close()
        if size > 1:
            assert_nothing_stays(llm.engine.runner.workers)


@of_every_size
def test_chunks_and_lost_blocks(kind, size):
    _, llms = kind
    prompts = _prompts(20, 61, 3, 24, 25, 30)
    for preemption in ("recompute", "swap"):
        want, *_ = _run(llms(1), prompts, _greedy(14), preemption)
        got, counts, _ = _run(llms(size), prompts, _greedy(14), preemption)
        assert counts["num_preemptions"] > 0
        assert (counts["num_swapped"] > 0) == (preemption == "swap")
        assert got == want


@of_every_size
def test_common_beginnings_and_forks(kind, size):
    _, llms = kind
    [long] = _prompts(33)
    prompts = [{"prompt_token_ids": [*long["prompt_token_ids"], i]} for i in range(3)]
    params = SamplingParams(n=2, temperature=0.9, top_p=0.95, seed=11, max_tokens=20)
    want, *_ = _run(llms(1), prompts, params)
    got, counts, _ = _run(llms(size), prompts, params)
    assert counts["prefix_hit_tokens"] > 0
    assert got == want


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_mixtures_give_the_tokens_and_log_probabilities_of_one_process(name, tmp_path):
    """In chunks, with lost blocks and with common beginnings."""
    path = write_mixture(tmp_path, name)
    [long] = _prompts(33)
    common = [{"prompt_token_ids": [*long["prompt_token_ids"], i]} for i in range(2)]
    runs = [(_prompts(20, 61, 3, 24, 25, 30), 14), (common, 6)]
    assert_two_give_what_one_gives(path, SETTINGS, runs)


def assert_two_give_what_one_gives(path, settings, runs):
    """Compare tokens and log-probabilities of runs of prompts, each with its number of tokens."""
    found = []
    for size in (1, 2):
        with LLM(path, tensor_parallel_size=size, **settings) as llm:
            found.append([_run(llm, p, _greedy(n, logprobs=1)) for p, n in runs])
    for (want, _, one), (got, counts, two) in zip(*found, strict=True):
        assert got == want
        assert counts["num_preemptions"] + counts["prefix_hit_tokens"] > 0
        for mine, theirs in zip(_logprobs(two), _logprobs(one), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)


def _logprobs(outputs):
    return [
        [entry[token] for entry, token in zip(c.logprobs, c.token_ids, strict=True)]
        for output in outputs
        for c in output.outputs
    ]


@of_every_size
def test_the_cache_is_the_one_of_the_whole_model(kind, size):
    _, llms = kind
    whole, shared = (llms(n).engine.runner.storage for n in (1, size))
    assert shared.num_blocks == whole.num_blocks
    assert shared.spec.windows == whole.spec.windows


def test_every_worker_has_room_for_the_blocks():
    assert fewest([70, 64, 66]) == 64
    assert fewest([[70, 9], [64, 12]]) == (64, 9)


def test_processes_of_one_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(sizing, "available_memory", lambda: 2**20)
    spec = CacheSpec.of_windows(4, KVSpec(1, 8, 8, torch.float32), [None, 11, 11])
    alone, shared = (sizing.blocks_on_cpu(spec, 999, 999, 24, num_processes=n) for n in (1, 4))
    assert all(0 < mine <= theirs // 4 + 1 for mine, theirs in zip(shared, alone, strict=True))
