"""Families that differ from Llama by a switch: biases, factors, rotations, activations.

Seed-OSS, Granite 3, HyperCLOVA X, SmolLM3, Helium, ERNIE 4.5, Arcee, Ministral, HunYuan, Phi-3 and
4.
"""

from __future__ import annotations

from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import (
    Json,
    count,
    count_or,
    flag,
    num_layers_of,
    number,
    object_of,
    positive,
)
from tilewise.models.decoder_config import DecoderConfig
from tilewise.models.families.family import LLAMA_NAMES, Family
from tilewise.models.families.llama import write_llama_like
from tilewise.models.hf_rope import read_rope
from tilewise.models.layer_config import (
    PRE_NORM,
    SANDWICH,
    FeedForwardConfig,
    NormConfig,
    QueryGrowth,
)
from tilewise.models.layer_fields import Sizes, layer_types, windows_of_types

__all__ = ["FAMILIES", "FUSED_NAMES"]


def _seed_oss(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, head_dim=128, num_kv_heads=8)
    return sizes.decoder(
        NormConfig("rms", sizes.eps),
        read_rope(config, sizes.head_dim, sizes.positions),
        attention={
            "qkv_bias": flag(config, "attention_bias", True),
            "o_bias": flag(config, "attention_out_bias", False),
        },
        feed_forward=sizes.feed_forward(bias=flag(config, "mlp_bias", False)),
        tie_word_embeddings=flag(config, "tie_word_embeddings", False),
    )


def _granite(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config)
    has_bias = flag(config, "attention_bias", False)
    return sizes.decoder(
        NormConfig("rms", sizes.eps),
        read_rope(config, sizes.head_dim, sizes.positions),
        attention={
            "softmax_scale": number(config, "attention_multiplier", 1.0),
            "qkv_bias": has_bias,
            "o_bias": has_bias,
        },
        feed_forward=sizes.feed_forward(bias=flag(config, "mlp_bias", False)),
        tie_word_embeddings=flag(config, "tie_word_embeddings", False),
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        residual_scale=number(config, "residual_multiplier", 1.0),
        logit_scale=1 / positive(config, "logits_scaling", 1.0),
    )


def _hyperclovax(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config)
    has_bias = flag(config, "attention_bias", False)
    return sizes.decoder(
        NormConfig("rms", sizes.eps),
        read_rope(config, sizes.head_dim, sizes.positions),
        attention={
            "softmax_scale": number(config, "attention_multiplier", sizes.head_dim**-0.5),
            "qkv_bias": has_bias,
            "o_bias": has_bias,
        },
        feed_forward=sizes.feed_forward(bias=flag(config, "mlp_bias", False)),
        norms=SANDWICH if flag(config, "use_post_norm", True) else PRE_NORM,
        tie_word_embeddings=flag(config, "tie_word_embeddings", False),
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        residual_scale=number(config, "residual_multiplier", 1.0),
        logit_scale=number(config, "logits_scaling", 1.0),  # a factor here, Granite's divides
    )


def _smollm3(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, num_kv_heads=4)
    every = count_or(config, "no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers")
    if rotates is None:
        rotates = [int((i + 1) % every != 0) for i in range(sizes.num_layers)]
    if not isinstance(rotates, list) or len(rotates) != sizes.num_layers:
        raise CheckpointError(
            f"no_rope_layers must have one entry per layer ({sizes.num_layers}), got {rotates!r}"
        )
    is_given = config.get("sliding_window") is not None
    has_window = flag(config, "use_sliding_window", False) and is_given
    window = count(config, "sliding_window") if has_window else None
    usual = [
        "sliding_attention" if has_window and not turns else "full_attention" for turns in rotates
    ]
    rope = read_rope(config, sizes.head_dim, sizes.positions, theta=2_000_000.0)
    has_bias = flag(config, "attention_bias", False)
    return sizes.decoder(
        NormConfig("rms", sizes.eps),
        [rope if turns else None for turns in rotates],
        windows=windows_of_types(layer_types(config, sizes.num_layers, usual), window),
        attention={"qkv_bias": has_bias, "o_bias": has_bias},
        feed_forward=sizes.feed_forward(bias=flag(config, "mlp_bias", False)),
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
    )


def _helium(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, head_dim=128, eps=("rms_norm_eps", 1e-8))
    return sizes.decoder(
        NormConfig("rms", sizes.eps),
        read_rope(config, sizes.head_dim, sizes.positions, theta=100_000.0, interleaved=True),
        attention={"qkv_bias": flag(config, "attention_bias", False)},
        feed_forward=sizes.feed_forward(bias=flag(config, "mlp_bias", False)),
        tie_word_embeddings=flag(config, "tie_word_embeddings", False),
    )


def _ernie(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(
        config, head_dim=128, num_kv_heads=2, positions=131_072, eps=("rms_norm_eps", 1e-5)
    )
    has_bias = flag(config, "use_bias", False)
    return sizes.decoder(
        NormConfig("rms", sizes.eps),
        read_rope(config, sizes.head_dim, sizes.positions, theta=500_000.0, interleaved=True),
        attention={"qkv_bias": has_bias, "o_bias": has_bias},
        feed_forward=sizes.feed_forward(bias=has_bias),
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
    )


def _arcee(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, eps=("rms_norm_eps", 1e-5), activation=("hidden_act", "relu2"))
    has_bias = flag(config, "attention_bias", False)
    return sizes.decoder(
        NormConfig("rms", sizes.eps),
        read_rope(config, sizes.head_dim, sizes.positions),
        attention={"qkv_bias": has_bias, "o_bias": has_bias},
        feed_forward=sizes.feed_forward(is_gated=False, bias=flag(config, "mlp_bias", False)),
        tie_word_embeddings=flag(config, "tie_word_embeddings", False),
    )


def _ministral(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, num_kv_heads=8)
    num_layers = num_layers_of(config, "num_hidden_layers")
    is_null = config.get("sliding_window", 4096) is None
    window = None if is_null else count_or(config, "sliding_window", 4096)
    usual = ["full_attention" if window is None else "sliding_attention"] * num_layers
    return sizes.decoder(
        NormConfig("rms", sizes.eps),
        read_rope(config, sizes.head_dim, sizes.positions),
        windows=windows_of_types(layer_types(config, num_layers, usual), window),
        tie_word_embeddings=flag(config, "tie_word_embeddings", False),
    )


# What its configuration class says where a file says nothing.
_MINISTRAL3_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _ministral3(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(
        config, head_dim=128, num_kv_heads=8, positions=262_144, eps=("rms_norm_eps", 1e-5)
    )
    config.get("rope_theta")
    settings = dict(object_of(config, "rope_parameters") or _MINISTRAL3_ROPE)
    beta = settings.pop("llama_4_scaling_beta", None)
    settings.pop("max_position_embeddings", None)
    original = settings.get("original_max_position_embeddings")
    growth = None
    if beta is not None:
        beta = float(number({"llama_4_scaling_beta": beta}, "llama_4_scaling_beta", 0.0))
        growth = QueryGrowth(beta, original if original is not None else sizes.positions)
    window = None
    if config.get("sliding_window") is not None:
        window = count(config, "sliding_window")
    return sizes.decoder(
        NormConfig("rms", sizes.eps),
        read_rope({"rope_parameters": settings}, sizes.head_dim, sizes.positions),
        windows=(window,) * sizes.num_layers,
        attention={"query_growth": growth},
        tie_word_embeddings=flag(config, "tie_word_embeddings", False),
    )


def _hunyuan(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, eps=("rms_norm_eps", 1e-5))
    norm = NormConfig("rms", sizes.eps)
    has_bias = flag(config, "attention_bias", False)
    return sizes.decoder(
        norm,
        read_rope(config, sizes.head_dim, sizes.positions),
        attention={
            "qkv_bias": has_bias,
            "o_bias": has_bias,
            "qk_norm": norm,
            "norms_after_rope": True,
        },
        tie_word_embeddings=flag(config, "tie_word_embeddings", False),
    )


def _phi3(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, eps=("rms_norm_eps", 1e-5))
    original = config.get("original_max_position_embeddings")
    settings: dict[str, Any] = {
        name: config.get(name)
        for name in ("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor")
    }
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(settings[name], dict) and "short_factor" in settings[name]:
            settings[name] = {
                **settings[name],
                "rope_type": "longrope",
                "original_max_position_embeddings": original or sizes.positions,
            }
    rope = read_rope(settings, sizes.head_dim, sizes.positions, part=1.0)
    window = None
    if config.get("sliding_window") is not None:
        window = count_or(config, "sliding_window", 1)
    return sizes.decoder(
        NormConfig("rms", sizes.eps),
        rope,
        windows=(window,) * sizes.num_layers,
        tie_word_embeddings=flag(config, "tie_word_embeddings", False),
    )


def _write_hyperclovax(config: DecoderConfig) -> dict[str, Any]:
    attention, block = config.attentions[0], config.feed_forwards[0]
    assert isinstance(block, FeedForwardConfig)
    return write_llama_like(config) | {
        "attention_bias": attention.qkv_bias,
        "mlp_bias": block.bias,
        "use_post_norm": config.layers[0].norms == SANDWICH,
        "attention_multiplier": attention.softmax_scale,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": config.logit_scale,
    }


def _write_ministral3(config: DecoderConfig) -> dict[str, Any]:
    fields, growth = write_llama_like(config), config.attentions[0].query_growth
    if growth is not None:
        fields["rope_parameters"] |= {
            "llama_4_scaling_beta": growth.beta,
            "original_max_position_embeddings": growth.length,
        }
    return fields | {"sliding_window": config.windows[0]}


FUSED_NAMES = LLAMA_NAMES.but(
    {"attention.qkv_proj": "self_attn.qkv_proj", "mlp.gate_up_proj": "mlp.gate_up_proj"}
)
_HYPERCLOVAX_NAMES = LLAMA_NAMES.but(
    {"attention_out_norm": "post_norm1", "mlp_out_norm": "post_norm2"}
)
_HUNYUAN_NAMES = LLAMA_NAMES.but(
    {"attention.q_norm": "self_attn.query_layernorm", "attention.k_norm": "self_attn.key_layernorm"}
)

FAMILIES = (
    Family("SeedOssForCausalLM", "seed_oss", _seed_oss, LLAMA_NAMES, harmless="residual_dropout"),
    Family("GraniteForCausalLM", "granite", _granite, LLAMA_NAMES),
    Family(
        "HyperCLOVAXForCausalLM",
        "hyperclovax",
        _hyperclovax,
        _HYPERCLOVAX_NAMES,
        _write_hyperclovax,
    ),
    Family("SmolLM3ForCausalLM", "smollm3", _smollm3, LLAMA_NAMES, harmless="max_window_layers"),
    Family("HeliumForCausalLM", "helium", _helium, LLAMA_NAMES),
    Family("Ernie4_5ForCausalLM", "ernie4_5", _ernie, LLAMA_NAMES),
    Family("ArceeForCausalLM", "arcee", _arcee, LLAMA_NAMES),
    Family("MinistralForCausalLM", "ministral", _ministral, LLAMA_NAMES),
    Family("Ministral3ForCausalLM", "ministral3", _ministral3, LLAMA_NAMES, _write_ministral3),
    Family(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        _hunyuan,
        _HUNYUAN_NAMES,
        harmless="eod_token_id",
    ),
    Family("Phi3ForCausalLM", "phi3", _phi3, FUSED_NAMES, harmless="attention_bias"),
)
