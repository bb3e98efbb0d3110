"""The roof is what the sizes of a model and two limits of a device say, and nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tilewise.bench.engines import workloads
from tilewise.bench.engines.roof import Roof
from tilewise.bench.engines.shapes import SHAPES, model_directory, read_sizes
from tilewise.models.config import ModelConfig
from tilewise.models.registry import build_model

H200 = (4.4e12, 750e12)  # bytes/s, FLOP/s


def roof_of(shape: str, **changes) -> Roof:
    return Roof(read_sizes(SHAPES[shape]), *H200, **changes)


@pytest.mark.parametrize(
    ("shape", "milliseconds"),
    [
        ("qwen3-0.6b", {1: 0.298, 32: 1.125, 256: 7.240}),
        ("llama-3-8b", {1: 3.442, 32: 4.387, 256: 12.932}),
    ],
)
def test_a_step_over_1024_tokens_costs_what_was_computed_by_hand(shape, milliseconds):
    roof = roof_of(shape)
    for batch, expected in milliseconds.items():
        assert 1e3 * roof.step(batch, batch * 1024) == pytest.approx(expected, abs=6e-4)


def test_a_token_of_the_cache_has_the_bytes_of_its_dtype():
    qwen, llama = (read_sizes(SHAPES[name]) for name in ("qwen3-0.6b", "llama-3-8b"))
    assert (qwen.cache_bytes(), llama.cache_bytes()) == (114_688, 131_072)
    assert qwen.cache_bytes(1) == 114_688 // 2 + 2 * 28 * 8 * 4  # a float32 scale for each head
    assert qwen.streamed_parameters == pytest.approx(1.19e9 / 2, rel=2e-3)
    assert llama.streamed_parameters == pytest.approx(15.0e9 / 2, rel=2e-3)


@pytest.mark.parametrize(("shape", "seconds"), [("qwen3-0.6b", 3.64), ("llama-3-8b", 10.15)])
def test_nanos_requests_cost_prompts_once_and_a_step_for_every_token(shape, seconds):
    assert roof_of(shape).whole(workloads.nano()) == pytest.approx(seconds, rel=2e-3)


def test_many_rows_are_bound_by_products_and_few_by_the_weights():
    roof = roof_of("llama-1b")
    weights = 2 * roof.sizes.streamed_parameters / roof.read_bytes
    assert roof.step(1, 0) == pytest.approx(weights)
    assert roof.step(170, 0) == pytest.approx(weights)  # 750e12 / 4.4e12 is 170.5 FLOPs a byte
    assert roof.step(341, 0) == pytest.approx(2 * weights, rel=1e-3)


def test_layers_with_a_state_count_as_those_with_attention_do():
    roof = roof_of("qwen3.5-0.8b")
    sizes, (read_bytes, flops) = roof.sizes, H200
    weights = 2 * sizes.streamed_parameters
    assert weights == pytest.approx(1.50e9, rel=3e-3)
    assert roof.step(1, 0) == pytest.approx((weights + sizes.states.state_bytes) / read_bytes)
    head = math.prod(sizes.head)
    pairs = 4096 * 4097 // 2
    attention = 4 * sizes.num_layers * sizes.num_q_heads * sizes.head_dim * pairs
    layers = 4096 * (2 * (sizes.streamed_parameters - head) + sizes.states.token_flops)
    expected = (layers + attention) / flops + 2 * head / read_bytes
    assert roof.prefill([4096]) == pytest.approx(expected)


def test_samples_read_their_prompt_once_and_wait_for_seats():
    one = workloads.samples(prompts=2, n=4, prompt_tokens=100, new_tokens=3, max_num_seqs=8)
    roof = roof_of("llama-1b")
    steps = [roof.step(8, 2 * 100 + 8 * made) for made in (1, 2)]
    assert roof.whole(one) == pytest.approx(roof.prefill([100, 100]) + sum(steps))
    waves = workloads.samples(prompts=2, n=4, prompt_tokens=100, new_tokens=3, max_num_seqs=4)
    steps = [2 * roof.step(4, 100 + 4 * made) for made in (1, 2)]
    assert roof.whole(waves) == pytest.approx(roof.prefill([100, 100]) + sum(steps))


@pytest.mark.parametrize("shape", [*SHAPES])
def test_every_shape_is_a_model_that_the_engine_builds(shape, tmp_path):
    directory, is_random = model_directory(shape, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    assert is_random
    ours = ModelConfig.from_hf(config)
    sizes = read_sizes(config)
    states = sizes.states
    with_states = 0 if states is None else states.count
    assert (sizes.num_layers + with_states, sizes.head_dim) == (ours.num_layers, ours.head_dim)
    kinds = {} if states is None else {"layer_types": ["linear_attention", "full_attention"]}
    fewest = {"num_hidden_layers": len(kinds.get("layer_types", ["full_attention"])), **kinds}
    model = build_model(ModelConfig.from_hf(config | fewest), device="meta")
    layers = sum(p.numel() for n, p in model.layers.named_parameters() if "proj" in n)
    own = 0 if states is None else sum(map(math.prod, states.products))
    assert layers == sizes.layer_parameters + own
    assert math.prod(sizes.head) == model.embed_tokens.weight.numel()


def test_the_small_shapes_have_the_parameters_that_their_names_say():
    counts = {name: read_sizes(SHAPES[name]).streamed_parameters for name in SHAPES}
    assert counts["llama-0.4b"] == pytest.approx(0.39e9, rel=0.01)
    assert counts["llama-1b"] == pytest.approx(1.24e9, rel=0.01)


def test_gpt2s_names_are_read_too():
    sizes = read_sizes(
        {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100}
        | {"n_positions": 32}
    )
    assert sizes.layer_parameters == 12 * 64 * 64
    assert (sizes.num_kv_heads, sizes.head_dim, sizes.max_len) == (4, 16, 32)


def test_an_unknown_shape_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"shape must be qwen3-0.6b, .*, got 'gpt-5'"):
        model_directory("gpt-5", tmp_path)
    assert model_directory("story", tmp_path)[1] is False


def test_the_page_has_the_sizes_of_every_shape(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "results" / "engine.md").read_text()
    for name in (*SHAPES, "story"):
        directory, _ = model_directory(name, tmp_path)
        sizes = read_sizes(json.loads((directory / "config.json").read_text()))
        [line] = [line for line in page.splitlines() if line.startswith(f"| `{name}` | random, ")
                  or line.startswith(f"| `{name}` | the packaged")]  # fmt: skip
        *_, weights, cache = [cell.strip() for cell in line.strip("|").split("|")]
        number, unit = weights.split()
        streamed = 2 * sizes.streamed_parameters / {"GB": 1e9, "MB": 1e6}[unit]
        assert float(number) == pytest.approx(streamed, rel=5e-3)
        assert cache == f"{sizes.cache_bytes():,} B"
