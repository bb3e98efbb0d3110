"""GPT-2: learned positions, layer norms before each block, biases everywhere.

Source: Radford et al., 2019.
"""

from __future__ import annotations

from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import Json, count, count_or, flag, num_layers_of, number
from tilewise.models.decoder_config import DecoderConfig
from tilewise.models.families.family import Family, Names
from tilewise.models.layer_config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
)

__all__ = ["FAMILIES", "NAMES"]


def _read(config: Json) -> dict[str, Any]:
    width, num_heads = count(config, "n_embd"), count(config, "n_head")
    num_layers = num_layers_of(config, "n_layer")
    if width % num_heads:
        raise CheckpointError(f"n_embd must be a multiple of n_head {num_heads}, got {width}")
    head_dim, positions = width // num_heads, count(config, "n_positions")
    scale = head_dim**-0.5 if flag(config, "scale_attn_weights", True) else 1.0
    by_layer = flag(config, "scale_attn_by_inverse_layer_idx", False)
    feed_forward = FeedForwardConfig(
        count_or(config, "n_inner", 4 * width),
        config.get("activation_function", "gelu_new"),
        is_gated=False,
        bias=True,
    )
    attentions = (
        AttentionConfig(
            num_heads,
            num_heads,
            head_dim,
            softmax_scale=scale / (layer + 1) if by_layer else scale,
            qkv_bias=True,
            o_bias=True,
        )
        for layer in range(num_layers)
    )
    return {
        "hidden_size": width,
        "max_position_embeddings": positions,
        "learned_positions": positions,
        "layers": tuple(LayerConfig(attention, feed_forward) for attention in attentions),
        "norm": NormConfig("layer", number(config, "layer_norm_epsilon", 1e-5), has_bias=True),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", True),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    attention, block = config.attentions[0], config.feed_forwards[0]
    scales = config.softmax_scales
    return {
        "n_embd": config.hidden_size,
        "n_inner": block.intermediate_size,
        "n_layer": config.num_layers,
        "n_head": attention.num_q_heads,
        "n_positions": config.max_position_embeddings,
        "layer_norm_epsilon": config.norm.eps,
        "activation_function": block.activation,
        "scale_attn_weights": scales[0] == attention.head_dim**-0.5,
        "scale_attn_by_inverse_layer_idx": scales[-1] != scales[0],
    }


NAMES = Names(
    prefix="transformer.",
    layer="transformer.h.{}",
    outer={
        "embed_tokens": "transformer.wte",
        "embed_positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    inner={
        "attention_norm": "ln_1",
        "attention.qkv_proj": "attn.c_attn",
        "attention.o_proj": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    },
    ignored=(r".*\.attn\.(bias|masked_bias)",),  # causal masks in old checkpoints
    transposed=frozenset(
        ("attention.qkv_proj", "attention.o_proj", "mlp.up_proj", "mlp.down_proj")
    ),
)

FAMILIES = (
    # n_ctx is an older name of the number of positions.
    Family("GPT2LMHeadModel", "gpt2", _read, NAMES, _write, harmless="n_ctx"),
)
