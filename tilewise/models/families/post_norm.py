"""Families with norms behind the blocks: OLMo 2 and 3, EXAONE 4; GLM-4, before and behind."""

from __future__ import annotations

from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import Json, count_or, flag
from tilewise.models.families.family import LLAMA_NAMES, Family
from tilewise.models.hf_rope import read_gemma_rope, read_rope
from tilewise.models.layer_config import POST_NORM, PRE_NORM, SANDWICH, NormConfig
from tilewise.models.layer_fields import Sizes, layer_types, windows_of_types

__all__ = ["FAMILIES"]

_EVERY_FOURTH = 4  # layer of OLMo 3 and EXAONE 4 sees all keys


def _olmo2(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, eps=("rms_norm_eps", 1e-5))
    rope = read_rope(config, sizes.head_dim, sizes.positions)
    return _olmo(config, sizes, [rope] * sizes.num_layers, (None,) * sizes.num_layers)


def _olmo3(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, eps=("rms_norm_eps", 1e-5))
    types = layer_types(config, sizes.num_layers, _usual(sizes.num_layers, _EVERY_FOURTH))
    windows = windows_of_types(types, count_or(config, "sliding_window", 4096))
    ropes = {
        kind: read_gemma_rope(
            config, sizes.head_dim, sizes.positions, kind, "rope_theta", 500_000.0
        )
        for kind in ("full_attention", "sliding_attention")
    }
    return _olmo(config, sizes, [ropes[kind] for kind in types], windows)


def _olmo(config: Json, sizes: Sizes, ropes: list[Any], windows: Any) -> dict[str, Any]:
    norm = NormConfig("rms", sizes.eps)
    has_bias = flag(config, "attention_bias", False)
    return sizes.decoder(
        norm,
        ropes,
        windows=windows,
        attention={
            "qkv_bias": has_bias,
            "o_bias": has_bias,
            "qk_norm": norm,
            "qk_norm_over": "heads",
        },
        norms=POST_NORM,
        tie_word_embeddings=flag(config, "tie_word_embeddings", False),
    )


def _exaone4(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, eps=("rms_norm_eps", 1e-5))
    norm, num_layers = NormConfig("rms", sizes.eps), sizes.num_layers
    has_windows = not ("sliding_window" in config and config["sliding_window"] is None)
    window = count_or(config, "sliding_window", 4096) if has_windows else None
    every = config.get("sliding_window_pattern", _EVERY_FOURTH)
    has_types = config.get("layer_types") is not None
    if has_windows and (type(every) is not int or every < 1) and not has_types:
        raise CheckpointError(f"sliding_window_pattern must be a positive integer, got {every!r}")
    usual = None if has_types else _usual(num_layers, every if has_windows else 1)
    windows = windows_of_types(layer_types(config, num_layers, usual), window)
    rope = read_rope(config, sizes.head_dim, sizes.positions)
    return sizes.decoder(
        norm,
        # Beside layers with windows, those without rotate nothing.
        [rope if own is not None or not has_windows else None for own in windows],
        windows=windows,
        attention={"qk_norm": norm},
        norms=POST_NORM,
        tie_word_embeddings=flag(config, "tie_word_embeddings", False),
    )


def _usual(num_layers: int, every: int) -> list[str]:
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]


def _glm(config: Json, norms: tuple[str, ...] = PRE_NORM) -> dict[str, Any]:
    sizes = Sizes.of(
        config,
        head_dim=128,
        num_kv_heads=2,
        positions=131_072,
        eps=("rms_norm_eps", 1.5625e-07),
    )
    return sizes.decoder(
        NormConfig("rms", sizes.eps),
        read_rope(config, sizes.head_dim, sizes.positions, interleaved=True, part=0.5),
        attention={"qkv_bias": flag(config, "attention_bias", True)},
        norms=norms,
        tie_word_embeddings=flag(config, "tie_word_embeddings", False),
    )


def _glm4(config: Json) -> dict[str, Any]:
    return _glm(config, SANDWICH)


_POST_NAMES = LLAMA_NAMES.but(
    {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }
)
_GLM_NAMES = LLAMA_NAMES.but({"mlp.gate_up_proj": "mlp.gate_up_proj"})
_GLM4_NAMES = _GLM_NAMES.but(
    {
        "attention_out_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    }
)

FAMILIES = (
    Family("Olmo2ForCausalLM", "olmo2", _olmo2, _POST_NAMES),
    Family("Olmo3ForCausalLM", "olmo3", _olmo3, _POST_NAMES),
    Family("Exaone4ForCausalLM", "exaone4", _exaone4, _POST_NAMES),
    Family("GlmForCausalLM", "glm", _glm, _GLM_NAMES),
    Family("Glm4ForCausalLM", "glm4", _glm4, _GLM4_NAMES),
)
