"""The compiled step of a CPU reads every field of a configuration, or a module has it."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

from tilewise.models import native_program
from tilewise.models.decoder_config import DecoderConfig
from tilewise.models.layer_config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
)
from tilewise.nn.experts import ExpertsConfig
from tilewise.nn.mla import LatentConfig

# Fields whose value the writer finds in a module of the model, by that module.
IN_MODULES = {
    NormConfig: {"kind", "has_weight", "has_bias"},  # RMSNorm, ShiftedRMSNorm, LayerNorm
    AttentionConfig: {  # Attention: its projections, norms and sinks
        "qkv_bias", "o_bias", "qk_norm", "has_sinks",
    },
    FeedForwardConfig: {"is_gated"},  # MLP or GatedMLP
    DecoderConfig: {  # embeddings and the head, and what no step computes by
        "architecture", "max_position_embeddings", "learned_positions", "embedding_norm",
        "tie_word_embeddings", "head_bias", "is_native", "can_be_captured", "bos_token_id",
        "eos_token_ids",
    },
    ExpertsConfig: {  # Experts.packed, which is written as one operation
        "num_active", "scores", "norm_eps", "weight_scale", "has_correction_bias", "num_groups",
        "num_active_groups", "best_in_group", "jitter", "router_bias", "routes_in_float32",
        "router_norm_eps", "scales_experts", "weighs_input", "limit", "alpha", "has_bias",
        "is_packed", "shared_bias", "shared_is_gated", "is_gated",
        "latent_size", "latent_bias",  # of `are_gated_tokens`, which it reads
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        NormConfig, AttentionConfig, FeedForwardConfig, LayerConfig, DecoderConfig, ExpertsConfig,
        LatentConfig,
    ],
)  # fmt: skip
def test_no_field_is_left_out_in_silence(config):
    """A field that is new must be written there, refused there, or named above with its module."""
    source = inspect.getsource(native_program)
    fields = {field.name for field in dataclasses.fields(config)}
    read = {name for name in fields if re.search(rf"\b{name}\b", source)}
    in_modules = IN_MODULES.get(config, set())
    assert fields - read - in_modules == set()
    assert in_modules <= fields - read
