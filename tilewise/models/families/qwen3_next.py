"""Qwen3-Next and Qwen3.5: three layers of four are gated delta nets, and attention has a gate.

Sources: Qwen team, 2025, "Qwen3-Next"; Yang, Kautz and Hatamizadeh, 2024, "Gated delta networks".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.models.config_fields import Json, count_or, flag, with_fields
from tilewise.models.decoder_config import DecoderConfig
from tilewise.models.families.family import LLAMA_NAMES, Family, Names
from tilewise.models.families.mixtures import expert_names, experts_of, named_dense
from tilewise.models.hf_rope import read_rope
from tilewise.models.layer_config import FeedForwardConfig, LayerConfig, NormConfig
from tilewise.models.layer_fields import Sizes, layers_that_attend, mixer_of
from tilewise.models.unread_fields import must_be
from tilewise.models.weight_table import gate_rows
from tilewise.nn.experts import ExpertsConfig
from tilewise.nn.gated_delta_net import GatedDeltaConfig

__all__ = ["FAMILIES", "GATED_DELTA_NAMES"]


def _layers(
    config: Json,
    sizes: Sizes,
    block: Callable[[int], FeedForwardConfig | ExpertsConfig],
) -> dict[str, Any]:
    """Return the arguments of `DecoderConfig` for Qwen3-Next and Qwen3.5.

    Args:
        config, sizes: the contents of config.json, and the sizes that were read from it.
        block: a function from a layer's number to its feed-forward block or mixture.
    """
    must_be(config, "attn_output_gate", True)
    must_be(config, "mamba_ssm_dtype", "float32")
    norm, has_bias = NormConfig("shifted_rms", sizes.eps), flag(config, "attention_bias", False)
    rope = read_rope(config, sizes.head_dim, sizes.positions, part=0.25)
    attention = sizes.attention(
        rope=rope, qk_norm=norm, qkv_bias=has_bias, o_bias=has_bias, has_gate=True
    )
    mixer = mixer_of(
        GatedDeltaConfig,
        count_or(config, "linear_num_key_heads", 16),
        count_or(config, "linear_num_value_heads", 32),
        count_or(config, "linear_key_head_dim", 128),
        count_or(config, "linear_value_head_dim", 128),
        count_or(config, "linear_conv_kernel_dim", 4),
        sizes.eps,
    )
    must_be({"hidden_act": sizes.activation}, "hidden_act", "silu")  # of the convolution, too
    every = count_or(config, "full_attention_interval", 4)
    usual = [(i + 1) % every == 0 for i in range(sizes.num_layers)]
    layers = (
        LayerConfig(attention, block(i)) if attends else LayerConfig(None, block(i), mixer=mixer)
        for i, attends in enumerate(layers_that_attend(config, sizes.num_layers, usual))
    )
    return {
        **sizes.model,
        "layers": tuple(layers),
        "norm": norm,
        "tie_word_embeddings": flag(config, "tie_word_embeddings", False),
    }


def _sizes(config: Json) -> Sizes:
    return Sizes.of(config, head_dim=256, positions=32_768)


def _qwen3_next(config: Json) -> dict[str, Any]:
    sizes = _sizes(config)
    experts = _experts(config, sizes, 10, flag(config, "norm_topk_prob", True))
    is_dense, dense = named_dense(config), sizes.feed_forward()
    return _layers(config, sizes, lambda layer: dense if is_dense(layer) else experts)


def _qwen3_5(config: Json) -> dict[str, Any]:
    sizes = _sizes(config)
    dense = sizes.feed_forward()
    return _layers(config, sizes, lambda _: dense)


def _qwen3_5_moe(config: Json) -> dict[str, Any]:
    inner = count_or(config, "moe_intermediate_size", 512)
    must_be(config, "norm_topk_prob", True)
    config.get("intermediate_size")  # of no layer
    sizes = _sizes(with_fields(config, intermediate_size=inner))
    experts = _experts(config, sizes, 8, True)
    return _layers(config, sizes, lambda _: experts)


def _experts(config: Json, sizes: Sizes, active: int, normalised: bool) -> ExpertsConfig:
    return experts_of(
        config,
        sizes,
        active,
        intermediate_size=count_or(config, "moe_intermediate_size", 512),
        normalised=normalised,
        shared_size=count_or(config, "shared_expert_intermediate_size", 512),
        shared_is_gated=True,
    )


def _by_key_head(
    net: GatedDeltaConfig, key_heads: range, sizes: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """Return the ranges of rows of the given key heads in a source that is ordered by key head.

    For each key head the source has the rows of all parts. The ranges are ordered by part.

    Args:
        sizes: the rows of each part of one key head.
    """
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    return tuple(
        (head * sum(sizes) + start, head * sum(sizes) + start + size)
        for start, size in zip(starts, sizes, strict=True)
        for head in key_heads
    )


def _qkvz_rows(
    net: GatedDeltaConfig, key_heads: range, value_heads: range
) -> tuple[tuple[int, int], ...]:
    values = net.num_value_heads // net.num_key_heads * net.value_dim
    return _by_key_head(net, key_heads, (net.key_dim, net.key_dim, values, values))


def _ba_rows(
    net: GatedDeltaConfig, key_heads: range, value_heads: range
) -> tuple[tuple[int, int], ...]:
    heads = net.num_value_heads // net.num_key_heads
    return _by_key_head(net, key_heads, (heads, heads))


GATED_DELTA_NAMES = LLAMA_NAMES.but(
    {
        "mixer.qkvz_proj": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        "mixer.ba_proj": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
        "mixer.conv": "linear_attn.conv1d.weight",
        "mixer.a_log": "linear_attn.A_log",
        "mixer.dt_bias": "linear_attn.dt_bias",
        "mixer.norm": "linear_attn.norm",
        "mixer.o_proj": "linear_attn.out_proj",
    },
    unit_dims={"mixer.conv": (1,)},
)
"""The names in a Llama, and those of a gated delta net in place of attention."""

_QWEN3_5_NAMES = GATED_DELTA_NAMES.but(
    orders={"attention.qkv_proj": gate_rows},
    ignored=(*LLAMA_NAMES.ignored, r"mtp\..*"),  # a head that guesses the token after the next
)
_QWEN3_NEXT_NAMES = _QWEN3_5_NAMES.but(
    {"mixer.qkvz_proj": "linear_attn.in_proj_qkvz", "mixer.ba_proj": "linear_attn.in_proj_ba"},
    orders={
        "attention.qkv_proj": gate_rows,
        "mixer.qkvz_proj": _qkvz_rows,
        "mixer.ba_proj": _ba_rows,
    },
)


def _names(config: DecoderConfig) -> Names:
    return expert_names(config, _QWEN3_NEXT_NAMES, shared="shared_expert")


def _moe_names(config: DecoderConfig) -> Names:
    return expert_names(config, _QWEN3_5_NAMES, shared="shared_expert").but(
        whole={"mlp.up": "mlp.experts.gate_up_proj", "mlp.down": "mlp.experts.down_proj"}
    )


# Of heads that guess further tokens: see `multi_token_head`.
_GUESSES = "mtp_num_hidden_layers mtp_use_dedicated_embeddings"

FAMILIES = (
    Family("Qwen3NextForCausalLM", "qwen3_next", _qwen3_next, _names, harmless=_GUESSES),
    Family("Qwen3_5ForCausalLM", "qwen3_5_text", _qwen3_5, _QWEN3_5_NAMES, harmless=_GUESSES),
    Family(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        _qwen3_5_moe,
        _moe_names,
        harmless=_GUESSES,
    ),
)
