"""Falcon-H1: attention and Mamba-2 read the same stream in every layer, and many factors.

Source: Technology Innovation Institute, 2025, "Falcon-H1".
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import Json, count_or, flag, number
from tilewise.models.families.bamba import BAMBA_NAMES
from tilewise.models.families.family import Family
from tilewise.models.families.mamba2 import TRAINING, read_mamba2
from tilewise.models.hf_rope import read_rope
from tilewise.models.layer_config import LayerConfig, NormConfig
from tilewise.models.layer_fields import Sizes

__all__ = ["FAMILIES"]


def _factors(config: Json, name: str, count: int) -> tuple[float, ...]:
    """Return the `count` factors of a field of config.json; all are 1 where it is absent.

    Raises:
        CheckpointError: the field is no list of that many finite numbers.
    """
    value = config.get(name)
    if value is None:
        return (1.0,) * count
    known = isinstance(value, list) and len(value) == count
    if not known or not all(type(x) in (int, float) and math.isfinite(x) for x in value):
        raise CheckpointError(f"{name} must be {count} numbers, got {value!r}")
    return tuple(map(float, value))


def _falcon_h1(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, num_kv_heads=8, positions=8192, eps=("rms_norm_eps", 1e-5))
    norm, has_bias = NormConfig("rms", sizes.eps), flag(config, "attention_bias", False)

    def factor(name: str) -> float:
        return float(number(config, name, 1.0))

    attention = sizes.attention(
        rope=read_rope(config, sizes.head_dim, sizes.positions),
        qkv_bias=has_bias,
        o_bias=has_bias,
        softmax_scale=sizes.head_dim**-0.5 * factor("key_multiplier"),
        input_scale=factor("attention_in_multiplier"),
        output_scale=factor("attention_out_multiplier"),
    )
    has_norm = flag(config, "mamba_rms_norm", False)
    is_gate_last = flag(config, "mamba_norm_before_gate", True)
    mixer = read_mamba2(
        config,
        sizes,
        width=None if config.get("mamba_d_ssm", 1024) is None else _width(config),
        gate_first=not is_gate_last,
        rounds_first=False,
        has_out_bias=flag(config, "projectors_bias", False),
        input_scale=factor("ssm_in_multiplier"),
        output_scale=factor("ssm_out_multiplier"),
        part_scales=_factors(config, "ssm_multipliers", 5),
    )
    mixer = replace(mixer, norm_groups=mixer.num_groups if has_norm else 0)
    gate_scale, output_scale = _factors(config, "mlp_multipliers", 2)
    block = sizes.feed_forward(
        bias=flag(config, "mlp_bias", False), gate_scale=gate_scale, output_scale=output_scale
    )
    return {
        **sizes.model,
        "layers": (LayerConfig(attention, block, mixer=mixer),) * sizes.num_layers,
        "norm": norm,
        "tie_word_embeddings": flag(config, "tie_word_embeddings", False),
        "embedding_scale": factor("embedding_multiplier"),
        "logit_scale": factor("lm_head_multiplier"),
    }


def _width(config: Json) -> int:
    return count_or(config, "mamba_d_ssm", 1024)


FAMILIES = (
    Family(
        "FalconH1ForCausalLM",
        "falcon_h1",
        _falcon_h1,
        BAMBA_NAMES,
        # Every layer has attention and a feed-forward block, whatever these say.
        harmless=TRAINING + " attn_layer_indices mamba_use_mlp mlp_expansion_factor",
    ),
)
