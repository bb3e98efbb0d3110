"""What any schedule launches was launched at the start: nothing compiles when requests come."""

from __future__ import annotations

import json
import random
from typing import ClassVar

import pytest
import torch

from tests.engine.launches import Launches, on_hopper
from tests.models.tiny import config_of
from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import Batch, ScheduledSequence
from tilewise.engine.captured import graphs
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.engine import Engine
from tilewise.engine.request import Request, SamplingParams
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.settings import cache_spec
from tilewise.models.config import ModelConfig
from tilewise.models.registry import empty_model

SMALL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1000,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
# Query heads, key heads and channels; sequences, tokens of one and of a step, tokens of a block.
SHAPES = {
    "qwen3-0.6b": ((16, 8, 128), (96, 1152, 2048, 16)),
    "llama-3-8b": ((32, 8, 128), (200, 2011, 1024, 16)),
    "llama-1b": ((32, 8, 64), (40, 4096, 512, 16)),
    "eight a group": ((32, 4, 128), (64, 3000, 1024, 32)),
    "a head each": ((12, 12, 64), (32, 1000, 512, 16)),
    "three a group, few rows": ((24, 8, 128), (5, 1000, 32, 4)),
}


@pytest.fixture(autouse=True)
def poisoned_empty():
    """Nothing is computed here, and memory that nobody touches costs nothing."""


def config_for(heads):
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    return SMALL | dict(zip(names, heads, strict=True))


def tiny_config(case):
    config_class, model_class, fields = config_of(case)
    config = config_class(**{**fields, "vocab_size": 300})
    config.architectures = [model_class.__name__]
    return json.loads(config.to_json_string(use_diff=False))


def runner_of(config, limits, *, sharing=False, dtype="bfloat16"):
    max_num_seqs, max_model_len, budget, block_size = limits
    model = empty_model(ModelConfig.from_hf(config), dtype, "cpu").eval().requires_grad_(False)
    spec = cache_spec(model.config, block_size, model.dtype, max_model_len)
    blocks = 2 * -(-max_model_len // block_size)
    runner = DeviceRunner(
        model, KVStorage(spec, [blocks] * len(spec.groups), "cpu"), max_num_seqs=max_num_seqs,
        max_model_len=max_model_len, max_num_batched_tokens=budget,
    )  # fmt: skip
    runner.sharing_tokens = 1 if sharing else None
    return runner


def random_batch(draw, first, limits, left, *, shares, num_blocks):
    """Decodes, short runs, prompts and their later parts, in any mixture; some begin alike."""
    max_num_seqs, max_len, budget, block_size = limits
    count = min(max_num_seqs, draw.choice([1, 1, 2, 2, 3, 4, 8, 16, 32, 64, max_num_seqs]))
    kind, runs = draw.randrange(4), []
    short = draw.choice([2, 8, 16, 32, 64, 130])
    for i in range(count):
        run = {
            0: 1,
            1: 1 if i < count - 2 else draw.randint(1, max(1, min(budget, max_len))),
            2: draw.randint(1, short),
            3: int(2 ** draw.uniform(0, 11)),
        }[kind]
        run = min(run, max_len, budget - sum(runs) - (count - 1 - i))
        if run > 0:
            runs.append(run)
    common = draw.randrange(8, max(9, max_len // block_size // 2)) if shares else 0
    sequences = []
    for i, run in enumerate(runs, first):
        begin = common * block_size
        room = max_len - run
        start = draw.randint(0, room) if draw.random() < 0.7 else 0
        if shares and begin <= room:
            start = draw.randint(begin, min(room, begin + 200))
        tables = range(-(-(start + run) // block_size))
        blocks = [j if j < common else (7 * i + j) % num_blocks for j in tables]
        samples = draw.choice([1, 1, 1, 0, 2])
        sampling = SamplingParams(logprobs=draw.choice([None, None, 1, 0]), n=max(1, samples))
        sequences.append(
            ScheduledSequence(
                i, (5,) * run, start, blocks, samples, sampling, tuple(range(samples)),
                draw.randrange(3) if samples else 0,
            )
        )  # fmt: skip
    return Batch(tuple(sequences), left=left)


def found_later(runner, launches, limits, count, *, shares=False):
    """Prepare, then compute random steps; return in words what was launched only then."""
    graphs.prepare(runner, max_num_batched_tokens=limits[2], is_lazy=False)
    before, draw, left, first = set(launches.keys), random.Random(1), (), 10
    for _ in range(count):
        batch = random_batch(
            draw, first, limits, left, shares=shares, num_blocks=runner.storage.num_blocks
        )
        runner.submit(batch).result()
        left = tuple(s.seq_id for s in batch.sequences)
        first = left[-1] + 1
    assert len(before) > 15
    return [launches.explain(key) for key in launches.keys - before]


EVERY_DAY = ("qwen3-0.6b", "three a group, few rows")


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(
    "name", [n if n in EVERY_DAY else pytest.param(n, marks=pytest.mark.slow) for n in SHAPES]
)
def test_no_step_needs_another_kernel(name, shares):
    heads, limits = SHAPES[name]
    launches = Launches()
    with on_hopper(launches):
        runner = runner_of(config_for(heads), limits, sharing=shares)
        assert found_later(runner, launches, limits, 25, shares=shares) == []


@pytest.mark.parametrize("fewer", [graphs.FEWER, 200])
def test_samples_of_a_prompt_need_no_other_kernel(monkeypatch, fewer):
    """Sequences that share a prefix: some dozen have other tiles than a crowd."""
    monkeypatch.setattr(graphs, "FEWER", fewer)
    limits, launches = (200, 600, 1024, 16), Launches()
    with on_hopper(launches):
        runner = runner_of(config_for((32, 8, 64)), limits, sharing=True)
        graphs.prepare(runner, max_num_batched_tokens=1024, is_lazy=False)
        before, left = set(launches.keys), ()
        for first, count in ((10, 200), (210, 130), (340, 100), (440, 30)):
            rows = range(first, first + count)
            runs = [
                ScheduledSequence(
                    i, (5,), 330, [*range(20), 20 + i % 30], 1, SamplingParams(), (0,), 3
                )
                for i in rows
            ]
            runner.submit(Batch(tuple(runs), left=left)).result()
            assert runner.groups.is_active
            left = tuple(rows)
    assert (launches.keys - before == set()) == (fewer == graphs.FEWER)


@pytest.mark.parametrize(
    "case", ["mistral_window", "qwen2_second_layer_window", "deepseek", "deepseek_q_rank_biases"]
)
def test_nor_does_one_over_windows_or_latents(case):
    """The models of test_group_models, within its limits."""
    limits, launches = (8, 200, 64, 16), Launches()
    with on_hopper(launches):
        runner = runner_of(tiny_config(case), limits, dtype="float32")
        assert found_later(runner, launches, limits, 60) == []


def test_a_workload_of_the_engine_launches_nothing_new():
    """Prompts in chunks beside sequences that decode, as a benchmark sends them."""
    heads, launches = SHAPES["qwen3-0.6b"][0], Launches()
    limits = (32, 700, 1024, 16)
    with on_hopper(launches):
        runner = runner_of(config_for(heads), limits)
        graphs.prepare(runner, max_num_batched_tokens=1024, is_lazy=False)
        before = set(launches.keys)
        scheduler = Scheduler(
            2000, 16, max_num_seqs=32, max_num_batched_tokens=1024, max_model_len=700
        )
        runner.rows.host_table[:] = 0
        engine, draw = Engine(scheduler, runner, overlap=True), random.Random(0)
        for i in range(9):
            prompt = [draw.randrange(3, 999) for _ in range(512)]
            engine.add_request(
                Request(str(i), prompt, SamplingParams(max_tokens=8, ignore_eos=True, seed=i))
            )
        while engine.has_unfinished():
            for event in engine.step():
                assert event.error is None
    assert [launches.explain(key) for key in launches.keys - before] == []


@pytest.mark.parametrize("is_left_out", [False, True])
def test_sequences_that_change_their_logits_launch_nothing_new(monkeypatch, is_left_out):
    """Nor do those that tell log-probabilities, where no memory was measured before."""
    heads, launches = SHAPES["qwen3-0.6b"][0], Launches()
    if is_left_out:
        batches = graphs.warm_up_batches
        monkeypatch.setattr(graphs, "warm_up_batches", lambda *given: batches(*given)[:-1])
    with on_hopper(launches):
        runner = runner_of(config_for(heads), (9, 200, 64, 16))
        graphs.prepare(runner, max_num_batched_tokens=64, is_lazy=False)
        before = set(launches.keys)
        scheduler = Scheduler(
            2000, 16, max_num_seqs=9, max_num_batched_tokens=64, max_model_len=200
        )
        runner.rows.host_table[:] = 0
        engine = Engine(scheduler, runner, overlap=True)
        options = (
            {"logprobs": 5}, {"logit_bias": {3: 1.0}}, {"frequency_penalty": 0.5},
            {"allowed_token_ids": [3, 4, 5]}, {"repetition_penalty": 1.3, "logit_bias": {5: 2.0}},
            {"min_tokens": 3, "stop_token_ids": [7]}, {"prompt_logprobs": 1, "logprobs": 1},
        )  # fmt: skip
        for count in (1, 3, 7):  # together, and the first ones alone
            for i, option in enumerate(options[:count]):
                sampling = SamplingParams(max_tokens=8, ignore_eos=True, seed=i, **option)
                engine.add_request(Request(f"{count} {i}", [5] * (3 + 7 * i), sampling))
            while engine.has_unfinished():
                for event in engine.step():
                    assert event.error is None
    later = [launches.explain(key) for key in launches.keys - before]
    assert ([] if not is_left_out else ["_draw_kernel"]) == [
        name.partition(":")[0].rpartition(".")[2] for name in later
    ], later


@pytest.mark.parametrize(
    "left_out", ["MIXED", *(pytest.param(n, marks=pytest.mark.slow) for n in ("PROMPTS", "RUNS"))]
)
def test_what_is_not_warmed_up_is_seen(monkeypatch, left_out):
    heads, limits = SHAPES["qwen3-0.6b"]
    monkeypatch.setattr(graphs, left_out, getattr(graphs, left_out)[:1])
    if left_out == "PROMPTS":
        monkeypatch.setattr(graphs, "MIXED", graphs.MIXED[:1])
    launches = Launches()
    with on_hopper(launches):
        runner = runner_of(config_for(heads), limits)
        assert found_later(runner, launches, limits, 40) != []


def test_what_triton_compiles_anew_for_is_told_apart():
    launches = Launches()
    x = torch.zeros(64)

    class Kernel:
        kwargs: ClassVar = {"do_not_specialize": ["length"]}

        @staticmethod
        def fn(x_ptr, stride, length, TILE: torch.Size):
            """Parameters of a kernel."""

    def noted(*arguments, **options):
        before = len(launches.keys)
        launches.note(Kernel, arguments, options)
        return len(launches.keys) > before

    Kernel.fn.__annotations__["TILE"] = "tl.constexpr"
    assert noted(x, 32, 5, TILE=8, num_warps=4)
    assert not noted(x[4:], 48, 16, TILE=8, num_warps=4)  # other lengths, as well aligned
    assert noted(x[1:], 32, 5, TILE=8, num_warps=4)  # an address that is not
    assert noted(x, 33, 5, TILE=8, num_warps=4)
    assert noted(x, 1, 5, TILE=8, num_warps=4)
    assert noted(x, 32, 5, TILE=16, num_warps=4)
    assert noted(x, 32, 5, TILE=8, num_warps=8)
    assert noted(x, 32, 2**31, TILE=8, num_warps=4)
    assert noted(x.double(), 32, 5, TILE=8, num_warps=4)
    assert "stride" in launches.explain(next(k for k in launches.keys if ("stride", "1") in k))
