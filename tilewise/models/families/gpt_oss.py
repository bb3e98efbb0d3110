"""gpt-oss: attention sinks, windows on every second layer, mixtures of experts in MXFP4.

A checkpoint's experts are MXFP4 or plain tensors. Source: OpenAI, 2025, "gpt-oss-120b & gpt-oss-20b
model card".
"""

from __future__ import annotations

from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import Json, count_or, flag, number, object_of
from tilewise.models.decoder_config import DecoderConfig
from tilewise.models.families.family import LLAMA_NAMES, Family, Names
from tilewise.models.families.llama import write_sizes
from tilewise.models.hf_rope import read_rope, write_rope
from tilewise.models.layer_config import LayerConfig, NormConfig
from tilewise.models.layer_fields import Sizes, layer_types, types_of_windows, windows_of_types
from tilewise.nn.experts import ExpertsConfig

__all__ = ["FAMILIES"]

_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_PLAIN = [
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
]
"""What openai/gpt-oss-20b says of itself: modules that are not MXFP4."""


def _read(config: Json) -> dict[str, Any]:
    """Return the arguments of `DecoderConfig` for gpt-oss; absent fields default as in the
    configuration class."""
    sizes = Sizes.of(
        config, head_dim=64, num_kv_heads=8, positions=131_072, eps=("rms_norm_eps", 1e-5)
    )
    if sizes.activation != "silu":
        raise CheckpointError(f"hidden_act must be silu, got {sizes.activation!r}")
    usual = ["full_attention" if i % 2 else "sliding_attention" for i in range(sizes.num_layers)]
    types = layer_types(config, sizes.num_layers, usual)
    num_experts = count_or(config, "num_local_experts", 128)
    num_active = count_or(config, "num_experts_per_tok", 4)
    if num_active > num_experts:
        raise CheckpointError(
            f"num_experts_per_tok must be at most the {num_experts} experts, got {num_active}"
        )
    experts = ExpertsConfig(
        num_experts=num_experts,
        num_active=num_active,
        intermediate_size=sizes.intermediate_size,
        router_bias=True,
        activation="clamped",
        has_bias=True,
        is_interleaved=True,
        is_packed=bool(object_of(config, "quantization_config")),
        limit=float(number(config, "swiglu_limit", 7.0)),
        alpha=float(number(config, "swiglu_alpha", 1.702)),
    )
    rope = read_rope(config, sizes.head_dim, sizes.positions, theta=150_000.0, absent=_ROPE)
    has_bias = flag(config, "attention_bias", True)
    layers = (
        LayerConfig(
            sizes.attention(
                window=window, rope=rope, qkv_bias=has_bias, o_bias=has_bias, has_sinks=True
            ),
            experts,
        )
        for window in windows_of_types(types, count_or(config, "sliding_window", 128))
    )
    return {
        **sizes.model,
        "layers": tuple(layers),
        "norm": NormConfig("rms", sizes.eps),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", False),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    attention, experts = config.attentions[0], config.experts
    assert attention.rope is not None
    assert experts is not None
    positions, windows = config.max_position_embeddings, types_of_windows(config.windows)
    fields: dict[str, Any] = {
        **write_sizes(config),
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "attention_bias": attention.qkv_bias,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_active,
        "swiglu_limit": experts.limit,
        "swiglu_alpha": experts.alpha,
        **windows,
        "sliding_window": windows["sliding_window"] or positions,
        "rope_parameters": write_rope(attention.rope, attention.head_dim, positions),
    }
    if experts.is_packed:
        fields["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": _PLAIN,
        }
    return fields


_NAMES = LLAMA_NAMES.but(
    {
        "attention.sinks": "self_attn.sinks",
        "mlp.router": "mlp.router",
        "mlp.up": "mlp.experts.gate_up_proj",
        "mlp.up_bias": "mlp.experts.gate_up_proj_bias",
        "mlp.down": "mlp.experts.down_proj",
        "mlp.down_bias": "mlp.experts.down_proj_bias",
    },
    transposed=frozenset(("mlp.up", "mlp.down")),
)
_PACKED_NAMES = _NAMES.but(
    {
        "mlp.up": "mlp.experts.gate_up_proj_blocks",
        "mlp.up_scale": "mlp.experts.gate_up_proj_scales",
        "mlp.down": "mlp.experts.down_proj_blocks",
        "mlp.down_scale": "mlp.experts.down_proj_scales",
    },
    transposed=frozenset(),
)


def _names(config: DecoderConfig) -> Names:
    is_packed = config.experts is not None and config.experts.is_packed
    return _PACKED_NAMES if is_packed else _NAMES


FAMILIES = (
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        _read,
        _names,
        _write,
        # OpenAI's own names of fields that have transformers' names, too.
        harmless="experts_per_token initial_context_length",
        formats=("mxfp4",),
    ),
)
