"""Kimi Linear: Kimi's delta attention in most layers, latent attention without rotation in others.

Source: Kimi Team, 2025, "Kimi Linear".
"""

from __future__ import annotations

from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import (
    Json,
    count,
    count_or,
    flag,
    object_of,
    whole,
    with_fields,
)
from tilewise.models.decoder_config import DecoderConfig
from tilewise.models.families.family import LLAMA_NAMES, Family, Names
from tilewise.models.families.mixtures import expert_names, grouped_experts
from tilewise.models.layer_config import AttentionConfig, LayerConfig, NormConfig
from tilewise.models.layer_fields import Sizes, layer_types, layers_that_attend, mixer_of
from tilewise.models.unread_fields import must_be
from tilewise.nn.kimi_delta import KimiDeltaConfig
from tilewise.nn.mla import LatentConfig

__all__ = ["FAMILIES"]

# The names in the files, and those that other families have for the same.
_FORMER = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


def _read(config: Json) -> dict[str, Any]:
    config = with_fields(
        config, **{new: config[old] for old, new in _FORMER.items() if config.get(old) is not None}
    )
    must_be(config, "mla_use_nope", True)
    must_be(config, "moe_router_activation_func", "sigmoid")
    must_be(config, "moe_layer_freq", 1)
    must_be(config, "use_grouped_topk", True)
    must_be(config, "rope_scaling", None)
    config.get("head_dim"), config.get("qk_head_dim"), config.get("rope_theta")  # nothing rotates
    nope, rotary = (
        count_or(config, "qk_nope_head_dim", 128),
        count_or(config, "qk_rope_head_dim", 64),
    )
    sizes = Sizes.of(
        with_fields(config, head_dim=nope + rotary),
        positions=1 << 20,
        eps=("rms_norm_eps", 1e-5),
    )
    has_bias = flag(config, "attention_bias", False)
    latent = LatentConfig(
        count_or(config, "kv_lora_rank", 512),
        nope,
        rotary,
        count_or(config, "v_head_dim", 128),
        None if config.get("q_lora_rank") is None else count(config, "q_lora_rank"),
    )
    attention = AttentionConfig(
        sizes.num_q_heads,
        sizes.num_q_heads,
        sizes.head_dim,
        sizes.head_dim**-0.5,
        latent.v_head_dim,
        latent=latent,
        qkv_bias=has_bias,
        o_bias=has_bias,
    )
    must_be({"hidden_act": sizes.activation}, "hidden_act", "silu")  # of the convolutions, too
    linear = object_of(config, "linear_attn_config")
    inner = {
        "head_dim": count_or(config, "linear_head_dim", 128),
        "num_heads": count_or(config, "linear_num_heads", 32),
        "short_conv_kernel_size": count_or(config, "linear_conv_kernel_dim", 4),
    }
    sizes_of = {name: count_or(linear, name, value) for name, value in inner.items()}
    mixer = mixer_of(
        KimiDeltaConfig,
        sizes_of["num_heads"],
        sizes_of["head_dim"],
        sizes_of["short_conv_kernel_size"],
        sizes.eps,
    )
    experts, dense = grouped_experts(config, sizes), sizes.feed_forward()
    first = whole(config, "first_k_dense_replace", 1)
    blocks = ["dense" if i < first else "sparse" for i in range(sizes.num_layers)]
    blocks = layer_types({"layer_types": config.get("mlp_layer_types")}, sizes.num_layers, blocks)
    if any(kind not in ("dense", "sparse") for kind in blocks):
        raise CheckpointError(f"mlp_layer_types must be among dense, sparse, got {blocks!r}")
    attends = layers_that_attend(config, sizes.num_layers, _usual(linear, sizes.num_layers))
    layers = (
        LayerConfig(attention, block) if own else LayerConfig(None, block, mixer=mixer)
        for own, block in zip(
            attends, (dense if kind == "dense" else experts for kind in blocks), strict=True
        )
    )
    return {
        **sizes.model,
        "layers": tuple(layers),
        "norm": NormConfig("rms", sizes.eps),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", False),
    }


def _usual(linear: Json, num_layers: int) -> list[bool]:
    """Return for each layer whether it has attention, by the lists in linear_attn_config, which
    count from 1.

    Without both lists every fourth layer has it, but not the first.

    Raises:
        CheckpointError: the lists do not hold each layer once.
    """
    full, kda = linear.get("full_attn_layers"), linear.get("kda_layers")
    if full is None or kda is None:
        return [i > 0 and i % 4 == 0 for i in range(num_layers)]
    both = [*full, *kda] if isinstance(full, list) and isinstance(kda, list) else []
    if sorted(map(repr, both)) != sorted(map(repr, range(1, num_layers + 1))):
        raise CheckpointError(
            "full_attn_layers and kda_layers must hold each layer from 1 on once, "
            f"got {full!r} and {kda!r}"
        )
    return [i + 1 in full for i in range(num_layers)]


_NAMES = LLAMA_NAMES.but(
    {
        "attention.q_a_proj": "self_attn.q_a_proj",
        "attention.q_a_norm": "self_attn.q_a_layernorm",
        "attention.kv_a_proj": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_a_norm": "self_attn.kv_a_layernorm",
        "attention.kv_b_proj": "self_attn.kv_b_proj",
        "mixer.qkv_proj": tuple(f"self_attn.{part}_proj" for part in "qkv"),
        "mixer.a_proj": ("self_attn.b_proj", "self_attn.f_a_proj", "self_attn.g_a_proj"),
        "mixer.f_proj": "self_attn.f_b_proj",
        "mixer.z_proj": "self_attn.g_b_proj",
        "mixer.conv": tuple(f"self_attn.{part}_conv1d.weight" for part in "qkv"),
        "mixer.a_log": "self_attn.A_log",
        "mixer.dt_bias": "self_attn.dt_bias",
        "mixer.norm": "self_attn.o_norm",
        "mixer.o_proj": "self_attn.o_proj",
    },
    unit_dims={"mixer.conv": (1,), "mixer.a_log": (0, 1, 3)},
    renames=((r"\.block_sparse_moe\.", ".mlp."),),
)


def _names(config: DecoderConfig) -> Names:
    latent = config.latent
    has_rank = latent is not None and latent.q_rank is not None
    queries = "self_attn.q_b_proj" if has_rank else "self_attn.q_proj"
    names = _NAMES.but({"attention.q_b_proj": queries})
    shared = tuple(f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down"))
    return expert_names(config, names, parts=("w1", "w3", "w2")).but(
        {"mlp.shared.gate_up_proj": shared[:2], "mlp.shared.down_proj": shared[2]}
    )


FAMILIES = (
    Family(
        "KimiLinearForCausalLM",
        "kimi_linear",
        _read,
        _names,
        harmless="num_nextn_predict_layers",
    ),
)
