"""lab/model_speed.py: the roof counts what a step reads, and a tiny model of each kind decodes."""

from __future__ import annotations

from argparse import Namespace

import pytest

from lab.profile_decode import Slice
from tests.lab.scripts import load
from tilewise.bench.roofline import Ceilings
from tilewise.models.config import read_config
from tilewise.models.registry import empty_model

model_speed = load("model_speed")


@pytest.mark.parametrize(
    ("name", "all_weights", "rows", "read"),
    [
        ("qwen3-30b-a3b", 61.06e9, 1, 6.07e9),
        ("qwen3-30b-a3b", 61.06e9, 256, 60.44e9),
        ("gpt-oss-20b", 13.76e9, 1, 3.71e9),
        ("gemma-4-12b", 23.85e9, 32, 23.85e9),
    ],
)
def test_a_step_reads_the_experts_that_are_hit(tmp_path, name, all_weights, rows, read):
    path, config = model_speed.write(name, tmp_path, tiny=False)
    model = empty_model(read_config(path), "bfloat16", "meta")
    assert sum(t.nbytes for t in model.state_dict().values()) == pytest.approx(
        all_weights, rel=1e-3
    )
    found = model_speed.reads_of_weights(model, config, rows)
    assert sum(each.nbytes for each in found) == pytest.approx(read, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("qwen3-30b-a3b", 3.04e9), ("gpt-oss-20b", 3.61e9), ("gemma-4-12b", 11.9e9)],
)
def test_a_step_multiplies_the_experts_of_each_token(tmp_path, name, numbers):
    path, config = model_speed.write(name, tmp_path, tiny=False)
    model = empty_model(read_config(path), "bfloat16", "meta")
    found = model_speed.reads_of_weights(model, config, rows=5)
    assert sum(each.flops for each in found) == pytest.approx(2 * 5 * numbers, rel=1e-2)


def test_4_bits_are_written_and_count_as_they_are_held(tmp_path):
    options = Namespace(
        device="cpu", tiny=True, rows=[2], prompt=16, tokens=6, turns=1, layers=2, prefill=0,
        trace=False,
    )  # fmt: skip
    peak = Ceilings("cpu", "", "", 1e15, 1e10, 1e10)
    narrow, wide = (
        model_speed.measure(name, options, peak)["2"]
        for name in ("llama-3-8b-4-bits", "llama-3-8b")
    )
    assert narrow["roof_ms"] < 0.8 * wide["roof_ms"]
    assert narrow["floor_ms"] == narrow["roof_ms"]


@pytest.mark.parametrize("name", ["gpt-oss-20b", "llama-3-8b-4-bits"])
def test_a_tiny_model_of_each_format_of_4_bits_decodes(tmp_path, name):
    options = Namespace(
        device="cpu", tiny=True, rows=[1, 2], prompt=16, tokens=6, turns=1, layers=2, prefill=0,
        trace=False,
    )  # fmt: skip
    found = model_speed.measure(name, options, Ceilings("cpu", "", "", 1e12, 1e10, 1e10))
    assert all(found[rows]["tokens_per_s"] > 0 for rows in ("1", "2"))
    told = model_speed.write(name, tmp_path, tiny=True)[1]["quantization_config"]
    assert ("group_size" in told) == (told["quant_method"] == "gptq")


def test_windows_and_shared_tensors_bound_what_is_read_of_a_cache():
    config = model_speed.SHAPES["gemma-4-12b"]
    local, all_tokens = 40 * 8 * 256 * 2, 8 * 2 * 512
    assert model_speed.bytes_of_cache(config, 3, 2000) == 2 * 3 * (1024 * local + 2000 * all_tokens)
    latent = model_speed.SHAPES["deepseek-v2-lite"]
    assert model_speed.bytes_of_cache(latent, 2, 100) == 2 * 27 * 2 * 100 * 576


def test_a_tiny_model_decodes():
    options = Namespace(
        device="cpu", tiny=True, rows=[2], prompt=16, tokens=6, turns=1, layers=2, prefill=40,
        trace=False,
    )  # fmt: skip
    peak = Ceilings("cpu", "", "", 1e12, 1e10, 1e10)
    found = model_speed.measure("qwen3-30b-a3b", options, peak)
    assert found["2"]["tokens_per_s"] > 0
    assert 0 < found["2"]["share"] < 1
    assert found["prefill"]["tokens"] == 40
    assert 0 < found["prefill"]["share"] < 1


def test_a_prompt_multiplies_the_experts_of_each_token_and_its_keys(tmp_path):
    path, config = model_speed.write("qwen3.5-35b-a3b", tmp_path, tiny=False)
    model = empty_model(read_config(path), "bfloat16", "meta")
    found = model_speed.flops_of_prompt(model, config, 1000)
    attention = 10 * 2 * 16 * 256 * 1000**2  # of ten layers, half of the pairs
    assert found - attention == pytest.approx(2 * 1000 * 2.4e9, rel=0.03)


def test_the_step_that_is_repeated_most_is_told_by_kernel():
    prompt = [Slice("product", 50.0, 0.0), Slice("_draw_kernel<4>", 2.0, 0.0)]
    decode = [
        Slice("product", 5.0, 1.0), Slice("norm", 1.0, 0.5), Slice("product", 7.0, 0.0),
        Slice("_draw_kernel<4>", 2.0, 0.0),
    ]  # fmt: skip
    found = model_speed.time_by_kernel([*prompt, *decode, *decode, Slice("copy", 1.0, 0.0)])
    assert found["steps"] == 2
    assert found["kernels"] == [
        {"name": "product", "count": 2, "us": 12.0, "gap_us": 1.0},
        {"name": "_draw_kernel<4>", "count": 1, "us": 2.0, "gap_us": 0.0},
        {"name": "norm", "count": 1, "us": 1.0, "gap_us": 0.5},
    ]
