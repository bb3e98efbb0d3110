"""What any schedule launches was launched at the start: nothing compiles when requests come."""

from __future__ import annotations

import random

import pytest
import torch

from tests.engine.launches import Launches, on_hopper
from tilewise.cache.storage import KVStorage
from tilewise.engine.device_runner import DeviceRunner
from tilewise.engine.engine import Engine
from tilewise.engine.graphs import prepare
from tilewise.engine.request import Request, SamplingParams
from tilewise.engine.runner import SHARING_BYTES
from tilewise.engine.scheduler import Scheduler
from tilewise.engine.settings import cache_spec
from tilewise.models.config import ModelConfig
from tilewise.models.registry import empty_model

QWEN = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1000,
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture(autouse=True)
def poisoned_empty():
    """Nothing is computed here, and memory that nobody touches costs nothing."""


def engine_of(config, *, max_num_seqs, max_model_len, budget, num_blocks=None, sharing=False):
    model = empty_model(ModelConfig.from_hf(config), "bfloat16", "cpu").eval()
    model.requires_grad_(False)
    spec = cache_spec(model.config, 16, torch.bfloat16, max_model_len)
    blocks = num_blocks or max_num_seqs * -(-max_model_len // 16)
    storage = KVStorage(spec, [blocks] * len(spec.groups), "cpu")
    runner = DeviceRunner(
        model, storage, max_num_seqs=max_num_seqs, max_model_len=max_model_len,
        max_num_batched_tokens=budget,
    )  # fmt: skip
    if sharing:
        runner.sharing_tokens = SHARING_BYTES // (spec.bytes_per_token // spec.num_layers)
    scheduler = Scheduler(
        storage.counts, 16, windows=spec.windows, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget, max_model_len=max_model_len,
        enable_prefix_caching=sharing,
    )  # fmt: skip
    return Engine(scheduler, runner, overlap=True)


def serve(engine, requests):
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished():
        for event in engine.step():
            assert event.error is None


def request(name, length, new, seed=0, **options):
    draw = random.Random(f"{name} {seed}")
    prompt = [draw.randrange(3, 999) for _ in range(length)]
    return Request(
        name, prompt, SamplingParams(max_tokens=new, ignore_eos=True, seed=seed, **options)
    )


def new_after(launches, engine, budget, work):
    """Prepare, then serve; return in words what was launched only then."""
    prepare(engine.runner, max_num_batched_tokens=budget, is_lazy=False)
    engine.runner.captures = False
    before = set(launches.keys)
    work(engine)
    return [launches.explain(key) for key in launches.keys - before]


@pytest.mark.parametrize("batch", [1, 32, 256])
def test_the_benchmark_compiles_nothing(batch):
    launches = Launches()
    with on_hopper(launches):
        engine = engine_of(QWEN, max_num_seqs=256, max_model_len=1152, budget=8192)
        found = new_after(
            launches, engine, 8192,
            lambda e: serve(e, [request(str(i), 1024, 9) for i in range(batch)]),
        )  # fmt: skip
    assert found == []
