"""LFM2: most layers are short convolutions between gates, the others attention; dense or a mixture.

Source: Liquid AI, 2025, "LFM2 technical report".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import Json, count_or, flag, number, whole
from tilewise.models.decoder_config import DecoderConfig
from tilewise.models.families.family import LLAMA_NAMES, Family, Names
from tilewise.models.families.mixtures import expert_names, experts_of
from tilewise.models.hf_rope import read_rope
from tilewise.models.layer_config import FeedForwardConfig, LayerConfig, NormConfig
from tilewise.models.layer_fields import Sizes, layers_that_attend, mixer_of
from tilewise.nn.experts import ExpertsConfig
from tilewise.nn.short_conv import ShortConvConfig

__all__ = ["FAMILIES"]


def _layers(
    config: Json, sizes: Sizes, block: Callable[[int], FeedForwardConfig | ExpertsConfig]
) -> dict[str, Any]:
    """Return the arguments of `DecoderConfig` for LFM2.

    Args:
        config, sizes: the contents of config.json, and the sizes that were read from it.
        block: a function from a layer's number to its feed-forward block or mixture.
    """
    norm, places = NormConfig("rms", sizes.eps), config.get("full_attn_idxs")
    if places is not None and not isinstance(places, list):
        raise CheckpointError(f"full_attn_idxs must be a list of layers, got {places!r}")
    attention = sizes.attention(
        rope=read_rope(config, sizes.head_dim, sizes.positions, theta=1e6), qk_norm=norm
    )
    mixer = mixer_of(
        ShortConvConfig,
        sizes.hidden_size,
        count_or(config, "conv_L_cache", 3),
        flag(config, "conv_bias", False),
    )
    usual = [places is None or i in places for i in range(sizes.num_layers)]
    layers = (
        LayerConfig(attention, block(i)) if attends else LayerConfig(None, block(i), mixer=mixer)
        for i, attends in enumerate(layers_that_attend(config, sizes.num_layers, usual))
    )
    # The name of older files first, as in transformers.
    tied = flag(config, "tie_word_embeddings", True)
    return {
        **sizes.model,
        "layers": tuple(layers),
        "norm": norm,
        "tie_word_embeddings": flag(config, "tie_embedding", tied),
    }


def _sizes(config: Json) -> Sizes:
    sizes = Sizes.of(config, num_kv_heads=8, positions=128_000, eps=("norm_eps", 1e-5))
    return replace(sizes, activation="silu")


def _lfm2(config: Json) -> dict[str, Any]:
    sizes = _sizes(config)
    inner = count_or(config, "block_ff_dim", sizes.intermediate_size)
    multiple = count_or(config, "block_multiple_of", 256)
    factor = float(number(config, "block_ffn_dim_multiplier", 1.0))
    if flag(config, "block_auto_adjust_ff_dim", True):
        inner = int(factor * int(2 * inner / 3))
        inner = -(-inner // multiple) * multiple
    block = FeedForwardConfig(inner)
    return _layers(config, sizes, lambda _: block)


def _lfm2_moe(config: Json) -> dict[str, Any]:
    sizes = _sizes(config)
    experts = experts_of(
        config,
        sizes,
        4,
        intermediate_size=count_or(config, "moe_intermediate_size", 1792),
        scores="sigmoid",
        normalised=flag(config, "norm_topk_prob", True),
        norm_eps=1e-6,
        weight_scale=float(number(config, "routed_scaling_factor", 1.0)),
        has_correction_bias=flag(config, "use_expert_bias", True),
    )
    first, dense = whole(config, "num_dense_layers", 2), sizes.feed_forward()
    return _layers(config, sizes, lambda layer: dense if layer < first else experts)


_NAMES = LLAMA_NAMES.but(
    {
        "attention_norm": "operator_norm",
        "attention.q_norm": "self_attn.q_layernorm",
        "attention.k_norm": "self_attn.k_layernorm",
        "attention.o_proj": "self_attn.out_proj",
        "mixer.in_proj": "conv.in_proj",
        "mixer.conv": "conv.conv.weight",
        "mixer.conv_bias": "conv.conv.bias",
        "mixer.o_proj": "conv.out_proj",
        "mlp_norm": "ffn_norm",
        "mlp.gate_up_proj": ("feed_forward.w1", "feed_forward.w3"),
        "mlp.down_proj": "feed_forward.w2",
    },
    outer={**LLAMA_NAMES.outer, "norm": "model.embedding_norm"},
    unit_dims={"mixer.conv": (1,)},
)


def _moe_names(config: DecoderConfig) -> Names:
    return expert_names(
        config,
        _NAMES,
        "feed_forward",
        parts=("w1", "w3", "w2"),
        correction_bias="expert_bias",
    )


# Of older files: widths that others say, too, and how weights are drawn.
_FORMER = """
    conv_dim conv_dim_out conv_use_xavier_init block_dim block_mlp_init_scale block_norm_eps
    block_use_swiglu block_use_xavier_init num_heads use_pos_enc theta
"""

FAMILIES = (
    Family("Lfm2ForCausalLM", "lfm2", _lfm2, _NAMES, harmless=_FORMER),
    Family("Lfm2MoeForCausalLM", "lfm2_moe", _lfm2_moe, _moe_names, harmless=_FORMER),
)
