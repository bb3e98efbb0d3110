"""DeepSeek-V2 with dense feed-forward blocks: a Llama with latent attention.

Source: DeepSeek-AI, 2024, "DeepSeek-V2".
"""

from __future__ import annotations

from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import (
    Json,
    UnknownModelError,
    count,
    count_or,
    flag,
    num_layers_of,
)
from tilewise.models.decoder_config import DecoderConfig
from tilewise.models.families.family import LLAMA_NAMES, Family, Names
from tilewise.models.families.llama import write_sizes
from tilewise.models.hf_rope import read_rope, write_rope
from tilewise.models.layer_config import AttentionConfig, FeedForwardConfig, LayerConfig, NormConfig
from tilewise.models.layer_fields import Sizes
from tilewise.nn.mla import LatentConfig
from tilewise.nn.rope import temperature

__all__ = ["FAMILIES"]


def _read(config: Json) -> dict[str, Any]:
    num_layers = num_layers_of(config, "num_hidden_layers")
    num_experts = config.get("n_routed_experts", 64)  # the default of the configuration class
    first = config.get("first_k_dense_replace", 0)
    if num_experts is not None and not (type(first) is int and first >= num_layers):
        raise UnknownModelError(
            f"first_k_dense_replace must be at least the {num_layers} layers (or n_routed_experts "
            f"null), as mixtures of experts are not supported, got {first!r} with "
            f"{num_experts} experts"
        )
    num_heads = count(config, "num_attention_heads")
    if count_or(config, "num_key_value_heads", num_heads) != num_heads:
        raise CheckpointError(
            f"num_key_value_heads must be num_attention_heads {num_heads} with latent attention, "
            f"got {config['num_key_value_heads']}"
        )
    # null means no query latent, an absent field the default
    q_rank = config.get("q_lora_rank", 1536)
    latent = LatentConfig(
        kv_rank=count(config, "kv_lora_rank"),
        nope_dim=count(config, "qk_nope_head_dim"),
        rope_dim=count(config, "qk_rope_head_dim"),
        v_head_dim=count(config, "v_head_dim"),
        q_rank=None if q_rank is None else count({"q_lora_rank": q_rank}, "q_lora_rank"),
    )
    head_dim = latent.nope_dim + latent.rope_dim
    sizes = Sizes.of(config)
    rope = read_rope(config, latent.rope_dim, sizes.positions, interleaved=True)
    scale = head_dim**-0.5
    if rope.rope_type != "default" and rope.mscale_all_dim:
        # The scaling of cos and sin does not reach the channels that are not rotated.
        scale *= temperature(rope.factor, rope.mscale_all_dim) ** 2
    has_bias = flag(config, "attention_bias", False)
    attention = AttentionConfig(
        num_heads,
        num_heads,
        head_dim,
        softmax_scale=scale,
        v_head_dim=latent.v_head_dim,
        rope=rope,
        qkv_bias=has_bias,
        o_bias=has_bias,
        latent=latent,
    )
    feed_forward = sizes.feed_forward(bias=flag(config, "mlp_bias", False))
    return {
        **sizes.model,
        "layers": (LayerConfig(attention, feed_forward),) * num_layers,
        "norm": NormConfig("rms", sizes.eps),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", False),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    layer, latent = config.layers[0], config.latent
    assert layer.attention.rope is not None
    assert latent is not None
    assert isinstance(layer.feed_forward, FeedForwardConfig)
    return {
        **write_sizes(config),
        "hidden_act": layer.feed_forward.activation,
        "attention_bias": layer.attention.qkv_bias,
        "mlp_bias": layer.feed_forward.bias,
        "first_k_dense_replace": config.num_layers,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.v_head_dim,
        "rope_parameters": write_rope(
            layer.attention.rope, latent.rope_dim, config.max_position_embeddings
        ),
    }


_NAMES = LLAMA_NAMES.but(
    {
        "attention.q_a_proj": "self_attn.q_a_proj",
        "attention.q_a_norm": "self_attn.q_a_layernorm",
        "attention.q_b_proj": "self_attn.q_b_proj",
        "attention.kv_a_proj": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_a_norm": "self_attn.kv_a_layernorm",
        "attention.kv_b_proj": "self_attn.kv_b_proj",
    }
)


def _names(config: DecoderConfig) -> Names:
    if config.latent is not None and config.latent.q_rank is None:
        return _NAMES.but({"attention.q_b_proj": "self_attn.q_proj"})
    return _NAMES


FAMILIES = (
    Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        _read,
        _names,
        _write,
        # Settings of mixtures, which a model with dense layers lacks, and head widths that follow
        # from other fields.
        harmless="head_dim qk_head_dim moe_intermediate_size moe_layer_freq n_group "
        "n_shared_experts norm_topk_prob num_experts_per_tok routed_scaling_factor scoring_func "
        "topk_group topk_method",
    ),
)
