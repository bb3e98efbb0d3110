"""Frequencies equal transformers' for every scaling; tables grow and serve training."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tilewise.nn.rope import RopeConfig, RotaryEmbedding, inverse_frequencies

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CPU = torch.device("cpu")

SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "original": 8192, **LLAMA3},
    "llama3_other_bands": {
        "rope_type": "llama3",
        "original": 512,
        "factor": 32.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 16.0,
    },
    "yarn": {"rope_type": "yarn", "original": 4096, "factor": 16.0},
    "yarn_bounds": {
        "rope_type": "yarn",
        "original": 2048,
        "factor": 4.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.25,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "original": 4096,
        "factor": 40.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
    "yarn_no_stretch": {"rope_type": "yarn", "original": 4096, "factor": 1.0},
    "yarn_shrunk": {"rope_type": "yarn", "original": 4096, "factor": 0.5},
    "yarn_ramp_of_no_width": {"rope_type": "yarn", "original": 6, "factor": 4.0},
}


def make(settings, head_dim=64, theta=500_000.0, max_positions=16384):
    """Return our config and transformers' of the same rotation."""
    settings = dict(settings)
    original = settings.pop("original", None)
    ours = RopeConfig(
        rotary_dim=head_dim,
        theta=theta,
        max_positions=max_positions,
        original_max_positions=original,
        **settings,
    )
    if original is not None:
        settings["original_max_position_embeddings"] = original
    theirs = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_theta": theta, **settings},
    )
    return ours, theirs


@pytest.mark.parametrize("head_dim", [64, 128, 6])
@pytest.mark.parametrize("name", SCALED)
def test_scaled_frequencies_equal_transformers(name, head_dim):
    ours, theirs = make(SCALED[name], head_dim)
    inv_freq, factor = inverse_frequencies(ours)
    expected, expected_factor = ROPE_INIT_FUNCTIONS[ours.rope_type](theirs, CPU)
    # Two float32 orders of the same formula: a few roundings apart.
    torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


@pytest.mark.parametrize("name", ["default", *SCALED])
def test_tables_equal_transformers(name):
    ours, theirs = make(SCALED.get(name, {"rope_type": "default"}))
    positions = torch.tensor([[0, 1, 2, 100, 4095, 16383]])
    cos, sin = RotaryEmbedding(ours)(positions)
    expected = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions)
    for table, wanted in zip((cos, sin), expected, strict=True):
        assert table.dtype == torch.float32
        assert table.shape == (1, 6, 32)
        # Angles reach 16383 radians, where one rounding of a frequency is 1e-3.
        torch.testing.assert_close(table, wanted[..., :32], rtol=0, atol=3e-3)
        torch.testing.assert_close(table[:, :4], wanted[:, :4, :32], rtol=0, atol=2e-5)


def test_default_tables_equal_transformers_to_the_bit():
    ours, theirs = make({"rope_type": "default"})
    positions = torch.randint(0, 16384, (3, 50))
    for table, wanted in zip(
        RotaryEmbedding(ours)(positions),
        LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions),
        strict=True,
    ):
        assert torch.equal(table, wanted[..., :32])


def test_angles_are_positions_times_frequencies_in_float64():
    config = RopeConfig(rotary_dim=32, theta=10_000.0)
    positions = torch.arange(64)
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    cos, sin = RotaryEmbedding(config)(positions)
    # An angle below 64 in float32 is within 64 * 2 eps of the true one.
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=64 * 2.4e-7)
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=64 * 2.4e-7)


def test_tables_grow_past_max_positions_without_changing():
    rotary = RotaryEmbedding(RopeConfig(rotary_dim=8, max_positions=16))
    before, _ = rotary(torch.arange(16))
    cos, sin = rotary(torch.tensor([5000, 3]))
    assert cos.shape == sin.shape == (2, 4)
    assert torch.equal(cos[1], before[3])
    fresh, _ = RotaryEmbedding(rotary.config).prefix(5001, CPU)
    assert torch.equal(cos[0], fresh[5000])


def test_prefix_equals_looking_up_each_position():
    rotary = RotaryEmbedding(RopeConfig(rotary_dim=8))
    for given, looked_up in zip(rotary.prefix(7, CPU), rotary(torch.arange(7)), strict=True):
        assert torch.equal(given, looked_up)


def test_no_positions_give_no_rows():
    cos, sin = RotaryEmbedding(RopeConfig(rotary_dim=8))(torch.empty(0, dtype=torch.int64))
    assert cos.shape == sin.shape == (0, 4)


def test_tables_made_in_inference_mode_serve_training_afterwards():
    rotary = RotaryEmbedding(RopeConfig(rotary_dim=4))
    with torch.inference_mode():
        rotary.prefix(3, CPU)
    x = torch.ones(3, 2, requires_grad=True)
    (x * rotary.prefix(3, CPU)[0]).sum().backward()
    assert x.grad is not None


def test_tables_stay_float32_when_the_module_is_cast():
    rotary = RotaryEmbedding(RopeConfig(rotary_dim=4))
    before = rotary.prefix(9, CPU)[0]
    after = rotary.to(torch.bfloat16).prefix(9, CPU)[0]
    assert after.dtype == torch.float32
    assert torch.equal(before, after)
    assert not rotary.state_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_type": "other"}, "rope_type must be one of default, .*, got 'other'"),
        ({"rope_type": "longrope"}, "short_factor must have .* numbers, got 0"),
        ({"rotary_dim": 7}, "rotary_dim must be even and at least 2, got 7"),
        ({"rotary_dim": 0}, "rotary_dim must be even and at least 2, got 0"),
        ({"theta": 0.0}, "theta must be positive and finite, got 0.0"),
        ({"factor": float("nan")}, "factor must be positive and finite, got nan"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig(**{"rotary_dim": 8, **changes})
