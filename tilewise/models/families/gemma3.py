"""Gemma 3 for text: windows on most layers, two rotary bases, four norms a layer.

Source: the Gemma team, 2025, "Gemma 3 technical report".
"""

from __future__ import annotations

from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import Json, count_or, flag, number, positive
from tilewise.models.decoder_config import DecoderConfig
from tilewise.models.families.family import LLAMA_NAMES, Family
from tilewise.models.families.llama import write_sizes
from tilewise.models.hf_rope import read_gemma_rope, write_rope
from tilewise.models.layer_config import SANDWICH, LayerConfig, NormConfig
from tilewise.models.layer_fields import Sizes, layer_types, types_of_windows, windows_of_types
from tilewise.models.unread_fields import must_be

__all__ = ["FAMILIES", "GEMMA_NAMES"]


def _read(config: Json) -> dict[str, Any]:
    """Return the arguments of `ModelConfig` for Gemma 3; absent fields default as in transformers'
    configuration class."""
    sizes = Sizes.of(
        config,
        head_dim=256,
        num_kv_heads=4,
        positions=131_072,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
    )
    if flag(config, "use_bidirectional_attention", False):
        raise CheckpointError("use_bidirectional_attention must be false, got true")
    must_be(config, "attn_logit_softcapping")
    every = count_or(config, "sliding_window_pattern", 6)
    usual = [
        "sliding_attention" if (layer + 1) % every else "full_attention"
        for layer in range(sizes.num_layers)
    ]
    types = layer_types(config, sizes.num_layers, usual)
    windows = windows_of_types(types, count_or(config, "sliding_window", 4096))
    ropes = {
        kind: read_gemma_rope(config, sizes.head_dim, sizes.positions, kind, base, theta)
        for kind, base, theta in (
            ("full_attention", "rope_theta", 1_000_000.0),
            ("sliding_attention", "rope_local_base_freq", 10_000.0),
        )
    }
    norm = NormConfig("shifted_rms", sizes.eps)
    has_bias = flag(config, "attention_bias", False)
    scale = positive(config, "query_pre_attn_scalar", 256) ** -0.5
    layers = (
        LayerConfig(
            sizes.attention(
                softmax_scale=scale,
                window=window,
                rope=ropes[kind],
                qkv_bias=has_bias,
                o_bias=has_bias,
                qk_norm=norm,
            ),
            sizes.feed_forward(),
            SANDWICH,
        )
        for kind, window in zip(types, windows, strict=True)
    )
    return {
        **sizes.model,
        "layers": tuple(layers),
        "norm": norm,
        "tie_word_embeddings": flag(config, "tie_word_embeddings", True),
        "embedding_scale": sizes.hidden_size**0.5,
        "logit_softcap": number(config, "final_logit_softcapping", 0.0) or None,
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    attention, block = config.attentions[0], config.feed_forwards[0]
    head_dim, positions = attention.head_dim, config.max_position_embeddings
    windows = types_of_windows(config.windows)
    ropes = {
        kind: attention.rope
        for kind, attention in zip(windows["layer_types"], config.attentions, strict=True)
        if attention.rope is not None
    }
    given = next(iter(ropes.values()))
    return {
        **write_sizes(config),
        "head_dim": head_dim,
        "hidden_activation": block.activation,
        "attention_bias": attention.qkv_bias,
        "query_pre_attn_scalar": round(attention.softmax_scale**-2),
        "final_logit_softcapping": config.logit_softcap,
        **windows,
        "sliding_window": windows["sliding_window"] or positions,
        "rope_parameters": {
            kind: write_rope(ropes.get(kind, given), head_dim, positions)
            for kind in ("full_attention", "sliding_attention")
        },
    }


GEMMA_NAMES = LLAMA_NAMES.but(
    {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    ignored=(r".*rotary_emb\..*inv_freq", r".*embed_scale"),
)

FAMILIES = (
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _read,
        GEMMA_NAMES,
        _write,
        # An older form of layer_types, which is used if both are present.
        harmless="sliding_window_pattern _sliding_window_pattern",
    ),
)
