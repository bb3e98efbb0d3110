"""Bamba and Granite 4: most layers are Mamba-2, the others attention, each with a feed-forward
block.

Sources: IBM, 2024, "Bamba: inference-efficient hybrid Mamba2 model"; IBM, 2025, "Granite 4.0".
"""

from __future__ import annotations

from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import Json, count_or, flag, number, positive, whole
from tilewise.models.families.family import LLAMA_NAMES, Family
from tilewise.models.families.mamba2 import TRAINING, mamba2_names, read_mamba2
from tilewise.models.families.mixtures import experts_of
from tilewise.models.hf_rope import read_rope
from tilewise.models.layer_config import FeedForwardConfig, LayerConfig, NormConfig
from tilewise.models.layer_fields import Sizes, layers_that_attend
from tilewise.models.unread_fields import must_be
from tilewise.nn.experts import ExpertsConfig

__all__ = ["BAMBA_NAMES", "FAMILIES"]


def _bamba(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, num_kv_heads=8, positions=262_144, eps=("rms_norm_eps", 1e-5))
    norm, has_bias = NormConfig("rms", sizes.eps), flag(config, "attention_bias", False)
    attention = sizes.attention(
        rope=read_rope(config, sizes.head_dim, sizes.positions, part=0.5),
        qkv_bias=has_bias,
        o_bias=has_bias,
    )
    block = sizes.feed_forward(bias=flag(config, "mlp_bias", False))
    mixer, places = read_mamba2(config, sizes), config.get("attn_layer_indices") or []
    if not isinstance(places, list):
        raise CheckpointError(f"attn_layer_indices must be a list of layers, got {places!r}")
    layers = (
        LayerConfig(attention, block) if i in places else LayerConfig(None, block, mixer=mixer)
        for i in range(sizes.num_layers)
    )
    return {
        **sizes.model,
        "layers": tuple(layers),
        "norm": norm,
        "tie_word_embeddings": flag(config, "tie_word_embeddings", False),
    }


def _granite(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config)
    must_be(config, "position_embedding_type", "rope", "nope")
    norm, has_bias = NormConfig("rms", sizes.eps), flag(config, "attention_bias", False)
    rope = read_rope(config, sizes.head_dim, sizes.positions)
    attention = sizes.attention(
        rope=rope if config.get("position_embedding_type") == "rope" else None,
        qkv_bias=has_bias,
        o_bias=has_bias,
        softmax_scale=float(number(config, "attention_multiplier", 1.0)),
    )
    has_types = config.get("layer_types") is not None
    field = "layer_types" if has_types else "layers_block_type"  # in older files
    attends = layers_that_attend(config, sizes.num_layers, [False] * sizes.num_layers, field)
    block, mixer = _block(config, sizes), read_mamba2(config, sizes)
    layers = (
        LayerConfig(attention, block) if own else LayerConfig(None, block, mixer=mixer)
        for own in attends
    )
    return {
        **sizes.model,
        "layers": tuple(layers),
        "norm": norm,
        "tie_word_embeddings": flag(config, "tie_word_embeddings", False),
        "embedding_scale": float(number(config, "embedding_multiplier", 1.0)),
        "residual_scale": float(number(config, "residual_multiplier", 1.0)),
        "logit_scale": 1 / positive(config, "logits_scaling", 1.0),
    }


def _block(config: Json, sizes: Sizes) -> FeedForwardConfig | ExpertsConfig:
    """Return the feed-forward of a Granite 4 layer: a mixture with shared experts, or without
    experts a block."""
    shared = count_or(config, "shared_intermediate_size", 1024)
    if whole(config, "num_local_experts", 8) == 0:
        config.get("num_experts_per_tok")
        return FeedForwardConfig(shared, sizes.activation)
    return experts_of(
        config, sizes, 2, intermediate_size=sizes.intermediate_size, shared_size=shared
    )


BAMBA_NAMES = LLAMA_NAMES.but(
    {
        **mamba2_names("mamba"),
        "mlp_norm": "pre_ff_layernorm",
        "mlp.gate_up_proj": ("feed_forward.gate_proj", "feed_forward.up_proj"),
        "mlp.down_proj": "feed_forward.down_proj",
    },
    outer={**LLAMA_NAMES.outer, "norm": "model.final_layernorm"},
    unit_dims={"mixer.conv": (1,)},
)
_GRANITE_NAMES = LLAMA_NAMES.but(
    {
        **mamba2_names("mamba"),
        "mlp.gate_up_proj": "shared_mlp.input_linear",
        "mlp.down_proj": "shared_mlp.output_linear",
        "mlp.router": "block_sparse_moe.router.layer",
        "mlp.up": "block_sparse_moe.input_linear.weight",
        "mlp.down": "block_sparse_moe.output_linear.weight",
        "mlp.shared.gate_up_proj": "shared_mlp.input_linear",
        "mlp.shared.down_proj": "shared_mlp.output_linear",
    },
    unit_dims={"mixer.conv": (1,)},
)

FAMILIES = (
    Family("BambaForCausalLM", "bamba", _bamba, BAMBA_NAMES, harmless=TRAINING),
    Family(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        _granite,
        _GRANITE_NAMES,
        harmless=TRAINING + " router_jitter_noise normalization_function init_method",
    ),
)
