"""Llama 4 for text: attention in chunks, layers without rotation, mixtures that weigh their input.

Queries of layers without rotation grow with their position. Source: Meta, 2025, "The Llama 4 herd".
"""

from __future__ import annotations

from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import Json, count_or, flag, number
from tilewise.models.decoder_config import DecoderConfig
from tilewise.models.families.family import LLAMA_NAMES, Family
from tilewise.models.families.llama import write_sizes
from tilewise.models.hf_rope import read_rope, write_rope
from tilewise.models.layer_config import FeedForwardConfig, LayerConfig, NormConfig, QueryGrowth
from tilewise.models.layer_fields import Sizes, layer_types
from tilewise.nn.experts import ExpertsConfig

__all__ = ["FAMILIES"]


def _read(config: Json) -> dict[str, Any]:
    """Return the arguments of `DecoderConfig` for Llama 4; absent fields default as in the
    configuration class."""
    sizes = Sizes.of(
        config, head_dim=128, num_kv_heads=8, positions=131_072, eps=("rms_norm_eps", 1e-5)
    )
    num_layers, norm = sizes.num_layers, NormConfig("rms", sizes.eps)
    every = count_or(config, "no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(num_layers)]
    if not isinstance(rotates, list) or len(rotates) < num_layers:
        raise CheckpointError(
            f"no_rope_layers must have one entry per layer ({num_layers}), got {rotates!r}"
        )
    rotates = rotates[:num_layers]
    usual = ["chunked_attention" if turns else "full_attention" for turns in rotates]
    types = layer_types(config, num_layers, usual)
    chunk = count_or(config, "attention_chunk_size", 8192)
    if config.get("attention_chunk_size", 8192) is None:
        raise CheckpointError("attention_chunk_size must be a positive integer, got null")
    if unknown := [kind for kind in types if kind not in ("chunked_attention", "full_attention")]:
        raise CheckpointError(
            f"layer_types must be chunked_attention or full_attention, got {unknown[0]!r}"
        )
    rope = read_rope(config, sizes.head_dim, sizes.positions, theta=500_000.0, interleaved=True)
    growth = QueryGrowth(
        float(number(config, "attn_scale", 0.1)), count_or(config, "floor_scale", 8192), 1
    )
    grows = flag(config, "attn_temperature_tuning", True)
    has_norm, has_bias = flag(config, "use_qk_norm", True), flag(config, "attention_bias", False)
    dense = FeedForwardConfig(count_or(config, "intermediate_size_mlp", 16384), sizes.activation)
    experts, mixed = _experts(config, sizes), _mixed_layers(config, num_layers)
    layers = []
    for i, (turns, kind) in enumerate(zip(rotates, types, strict=True)):
        is_chunked = kind == "chunked_attention"
        attention = sizes.attention(
            window=chunk if is_chunked else None,
            is_chunked=is_chunked,
            rope=rope if turns else None,
            qkv_bias=has_bias,
            o_bias=has_bias,
            qk_norm=NormConfig("rms", sizes.eps, has_weight=False) if has_norm and turns else None,
            norms_after_rope=has_norm and bool(turns),
            query_growth=growth if grows and not turns else None,
        )
        layers.append(LayerConfig(attention, experts if i in mixed else dense))
    return {
        **sizes.model,
        "layers": tuple(layers),
        "norm": norm,
        "tie_word_embeddings": flag(config, "tie_word_embeddings", False),
    }


def _experts(config: Json, sizes: Sizes) -> ExpertsConfig:
    try:
        return ExpertsConfig(
            count_or(config, "num_local_experts", 16),
            count_or(config, "num_experts_per_tok", 1),
            sizes.intermediate_size,
            scores="sigmoid",
            normalised=False,
            weighs_input=True,
            activation=sizes.activation,
            shared_size=sizes.intermediate_size,
        )
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error


def _mixed_layers(config: Json, num_layers: int) -> list[int]:
    """Return the numbers of the layers with a mixture: moe_layers, or every
    interleave_moe_layer_step-th."""
    step, named = count_or(config, "interleave_moe_layer_step", 1), config.get("moe_layers")
    if named is None:
        return list(range(step - 1, num_layers, step))
    if not isinstance(named, list) or not all(type(layer) is int for layer in named):
        raise CheckpointError(f"moe_layers must be a list of layers, got {named!r}")
    return named


def _write(config: DecoderConfig) -> dict[str, Any]:
    attentions, experts = config.attentions, config.experts
    dense = [x.feed_forward for x in config.layers if isinstance(x.feed_forward, FeedForwardConfig)]
    growth = next((a.query_growth for a in attentions if a.query_growth is not None), None)
    chunk = next((a.window for a in attentions if a.is_chunked), config.max_position_embeddings)
    own = experts or ExpertsConfig(1, 1, config.intermediate_size)
    return {
        **write_sizes(config),
        "intermediate_size": own.intermediate_size,
        "intermediate_size_mlp": dense[0].intermediate_size if dense else own.intermediate_size,
        "head_dim": attentions[0].head_dim,
        "hidden_act": config.feed_forwards[0].activation,
        "attention_bias": attentions[0].qkv_bias,
        "num_local_experts": own.num_experts,
        "num_experts_per_tok": own.num_active,
        "moe_layers": [
            i for i, x in enumerate(config.layers) if isinstance(x.feed_forward, ExpertsConfig)
        ],
        "no_rope_layers": [int(attention.rope is not None) for attention in attentions],
        "layer_types": [
            "chunked_attention" if attention.is_chunked else "full_attention"
            for attention in attentions
        ],
        "attention_chunk_size": chunk,
        "use_qk_norm": any(attention.qk_norm is not None for attention in attentions),
        "attn_temperature_tuning": growth is not None,
        "attn_scale": 0.1 if growth is None else growth.beta,
        "floor_scale": 8192 if growth is None else growth.length,
        "rope_parameters": write_rope(
            config.ropes[0], attentions[0].head_dim, config.max_position_embeddings
        ),
    }


_NAMES = LLAMA_NAMES.but(
    {
        "mlp.gate_up_proj": ("feed_forward.gate_proj", "feed_forward.up_proj"),
        "mlp.down_proj": "feed_forward.down_proj",
        "mlp.router": "feed_forward.router",
        "mlp.up": "feed_forward.experts.gate_up_proj",
        "mlp.down": "feed_forward.experts.down_proj",
        "mlp.shared.gate_up_proj": (
            "feed_forward.shared_expert.gate_proj",
            "feed_forward.shared_expert.up_proj",
        ),
        "mlp.shared.down_proj": "feed_forward.shared_expert.down_proj",
    },
    transposed=frozenset(("mlp.up", "mlp.down")),
)

FAMILIES = (
    Family(
        "Llama4ForCausalLM",
        "llama4_text",
        _read,
        _NAMES,
        _write,
        harmless="router_jitter_noise for_llm_compressor",
    ),
)
