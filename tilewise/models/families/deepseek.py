"""DeepSeek-V2 and V3, Kimi K2, GLM-4.7-Flash: latent attention, mixtures behind the first layers.

Source: DeepSeek-AI, 2024, "DeepSeek-V2"; "DeepSeek-V3 technical report".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import Json, count, count_or, flag
from tilewise.models.decoder_config import DecoderConfig
from tilewise.models.families.family import LLAMA_NAMES, Family, Names
from tilewise.models.families.llama import write_sizes
from tilewise.models.families.mixtures import expert_names, first_dense, grouped_experts
from tilewise.models.hf_rope import read_rope, write_rope
from tilewise.models.layer_config import AttentionConfig, FeedForwardConfig, LayerConfig, NormConfig
from tilewise.models.layer_fields import Sizes
from tilewise.models.unread_fields import must_be
from tilewise.nn.experts import ExpertsConfig
from tilewise.nn.mla import LatentConfig
from tilewise.nn.rope import temperature

__all__ = ["FAMILIES"]


def _v2(config: Json) -> dict[str, Any]:
    sizes, bias = Sizes.of(config), flag(config, "mlp_bias", False)
    num_experts = config.get("n_routed_experts", 64)  # the default of the configuration class
    is_dense = first_dense(config, 0)
    if num_experts is None or all(is_dense(layer) for layer in range(sizes.num_layers)):
        return _read(config, sizes, None, lambda _: True, bias=bias)
    inner = count_or(config, "moe_intermediate_size", 1407)
    method = config.get("topk_method", "greedy")
    is_grouped = method == "group_limited_greedy"
    must_be(config, "topk_method", "greedy", "group_limited_greedy")
    must_be(config, "scoring_func", "softmax")
    must_be(config, "norm_topk_prob", False)
    must_be(config, "moe_layer_freq", 1)
    groups = count_or(config, "n_group", 1), count_or(config, "topk_group", 1)
    experts = grouped_experts(
        {**_V2, **{name: config.get(name) for name in _MIXTURE if config.get(name) is not None}},
        sizes,
        intermediate_size=inner,
        scores="softmax",
        normalised=False,
        norm_eps=0.0,
        has_correction_bias=False,
        num_groups=groups[0] if is_grouped else 1,
        num_active_groups=groups[1] if is_grouped else 1,
        best_in_group=1,
        shared_size=inner * count_or(config, "n_shared_experts", 2),
        shared_bias=bias,
    )
    return _read(config, sizes, experts, is_dense, bias=bias)


def _v3(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config)
    must_be(config, "topk_method", "noaux_tc")
    must_be(config, "scoring_func", "sigmoid")
    must_be(config, "moe_layer_freq", 1)
    must_be(config, "rope_interleave", True)
    given = {name: config.get(name) for name in _MIXTURE if config.get(name) is not None}
    experts = grouped_experts({**_V3, **given}, sizes)
    return _read(config, sizes, experts, first_dense(config, 3))


def _glm4_lite(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, eps=("rms_norm_eps", 1e-5))
    must_be(config, "topk_method", "noaux_tc")
    must_be(config, "rope_interleave", True)
    usual = ["dense", *["sparse"] * (sizes.num_layers - 1)]
    types = config.get("mlp_layer_types") or usual
    if not isinstance(types, list) or len(types) != sizes.num_layers:
        raise CheckpointError(
            f"mlp_layer_types must have one entry per layer ({sizes.num_layers}), got {types!r}"
        )
    is_dense = first_dense(config, 0)
    given = {name: config.get(name) for name in _MIXTURE if config.get(name) is not None}
    experts = grouped_experts({**_GLM4_LITE, **given}, sizes)
    return _read(config, sizes, experts, lambda layer: types[layer] == "dense" or is_dense(layer))


_MIXTURE = (
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "norm_topk_prob",
)
# The defaults of the configuration classes.
_V2: dict[str, Any] = {
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
}
_GLM4_LITE: dict[str, Any] = {
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
}
_V3: dict[str, Any] = {
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}


def _read(
    config: Json,
    sizes: Sizes,
    experts: ExpertsConfig | None,
    is_dense: Callable[[int], bool],
    *,
    bias: bool = False,
) -> dict[str, Any]:
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
    dense = sizes.feed_forward(bias=bias)
    layers = (
        LayerConfig(attention, dense if experts is None or is_dense(layer) else experts)
        for layer in range(sizes.num_layers)
    )
    return {
        **sizes.model,
        "layers": tuple(layers),
        "norm": NormConfig("rms", sizes.eps),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", False),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    attention, block = config.attentions[0], config.feed_forwards[0]
    latent = config.latent
    assert attention.rope is not None
    assert latent is not None
    if config.experts is not None or not isinstance(block, FeedForwardConfig):
        raise CheckpointError("layers must be dense to be written, got mixtures of experts")
    return {
        **write_sizes(config),
        "hidden_act": block.activation,
        "attention_bias": attention.qkv_bias,
        "mlp_bias": block.bias,
        "first_k_dense_replace": config.num_layers,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.v_head_dim,
        "rope_parameters": write_rope(
            attention.rope, latent.rope_dim, config.max_position_embeddings
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
    names = _NAMES
    if config.latent is not None and config.latent.q_rank is None:
        names = _NAMES.but({"attention.q_b_proj": "self_attn.q_proj"})
    return names if config.experts is None else expert_names(config, names)


_WIDTHS = "head_dim qk_head_dim"
"""Head widths that follow from other fields."""
_OF_EXPERTS = " ".join((*_MIXTURE, "topk_method", "scoring_func", "moe_layer_freq"))
"""Settings of mixtures, which a model with dense layers lacks."""

FAMILIES = (
    Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        _v2,
        _names,
        _write,
        harmless=f"{_WIDTHS} {_OF_EXPERTS}",
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        _v3,
        _names,
        harmless=_WIDTHS + " num_nextn_predict_layers",
        other_types=("kimi_k2",),
    ),
    Family(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        _glm4_lite,
        _names,
        harmless=_WIDTHS + " num_nextn_predict_layers scoring_func",
    ),
)
