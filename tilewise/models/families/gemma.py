"""Gemma 1 and 2: a scaled embedding, norms whose weights are excesses over 1, soft caps in 2.

Source: the Gemma team, 2024, "Gemma" and "Gemma 2".
"""

from __future__ import annotations

from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import Json, count_or, flag, number, positive
from tilewise.models.families.family import LLAMA_NAMES, Family
from tilewise.models.families.gemma3 import GEMMA_NAMES
from tilewise.models.hf_rope import read_rope
from tilewise.models.layer_config import SANDWICH, NormConfig
from tilewise.models.layer_fields import Sizes, layer_types, windows_of_types

__all__ = ["FAMILIES"]


def _gemma(config: Json) -> dict[str, Any]:
    _check_direction(config)
    sizes = Sizes.of(
        config, head_dim=256, positions=8192, activation=("hidden_act", "gelu_pytorch_tanh")
    )
    has_bias = flag(config, "attention_bias", False)
    return sizes.decoder(
        NormConfig("shifted_rms", sizes.eps),
        read_rope(config, sizes.head_dim, sizes.positions),
        attention={"qkv_bias": has_bias, "o_bias": has_bias},
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
        embedding_scale=sizes.hidden_size**0.5,
    )


def _gemma2(config: Json) -> dict[str, Any]:
    _check_direction(config)
    sizes = Sizes.of(
        config,
        head_dim=256,
        num_kv_heads=4,
        positions=8192,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
    )
    usual = ["full_attention" if i % 2 else "sliding_attention" for i in range(sizes.num_layers)]
    types = layer_types(config, sizes.num_layers, usual)
    has_bias = flag(config, "attention_bias", False)
    return sizes.decoder(
        NormConfig("shifted_rms", sizes.eps),
        read_rope(config, sizes.head_dim, sizes.positions),
        windows=windows_of_types(types, count_or(config, "sliding_window", 4096)),
        attention={
            "softmax_scale": positive(config, "query_pre_attn_scalar", 256) ** -0.5,
            "softcap": _cap(config, "attn_logit_softcapping", 50.0) or 0.0,
            "qkv_bias": has_bias,
            "o_bias": has_bias,
        },
        norms=SANDWICH,
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
        embedding_scale=sizes.hidden_size**0.5,
        logit_softcap=_cap(config, "final_logit_softcapping", 30.0),
    )


def _cap(config: Json, name: str, default: float) -> float | None:
    """Return a softcap, None for none: an absent field means the default, null or 0 means none."""
    if name in config and config[name] is None:
        return None
    return number(config, name, default) or None


def _check_direction(config: Json) -> None:
    if flag(config, "use_bidirectional_attention", False):
        raise CheckpointError("use_bidirectional_attention must be false, got true")


FAMILIES = (
    # Gemma's files name the function of its GELU twice.
    Family("GemmaForCausalLM", "gemma", _gemma, LLAMA_NAMES, harmless="hidden_activation"),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        _gemma2,
        GEMMA_NAMES,
        harmless="hidden_act",
    ),
)
