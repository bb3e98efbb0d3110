"""Mamba-2 alone, and what the families with its layers share.

Source: Dao and Gu, 2024, "Transformers are SSMs".
"""

from __future__ import annotations

import math
from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import Json, count, count_or, flag, num_layers_of, number
from tilewise.models.families.family import Family, Names
from tilewise.models.layer_config import LayerConfig, NormConfig
from tilewise.models.layer_fields import Sizes, mixer_of
from tilewise.models.unread_fields import must_be
from tilewise.nn.mamba2 import Mamba2Config

__all__ = ["FAMILIES", "TRAINING", "mamba2_names", "read_mamba2", "step_limits"]

# How layers are drawn for training, how transformers cuts sequences, which kernels it takes.
TRAINING = """
    time_step_min time_step_max time_step_floor time_step_rank rescale_prenorm_residual chunk_size
    mamba_chunk_size use_mamba_kernels use_mem_eff_path num_logits_to_keep mamba_dt_rank
    z_loss_coefficient
"""


def step_limits(config: Json, name: str = "time_step_limit") -> tuple[float, float]:
    """Return the smallest and the largest time step from a field, 0 and infinity if it is absent.

    Raises:
        CheckpointError: the field is no pair of numbers.
    """
    value = config.get(name)
    value = [0.0, math.inf] if value is None else value
    found = [_wide(x) for x in value] if isinstance(value, list | tuple) else []
    if len(found) != 2 or any(x is None or math.isnan(x) for x in found):
        raise CheckpointError(f"{name} must be two numbers, got {value!r}")
    low, high = found
    assert low is not None
    assert high is not None
    return low, high


def _wide(value: Any) -> float | None:
    """Return a number, which may be infinite, or None for anything else.

    JSON has no infinity: files write it as a text or as {"__float__": "Infinity"}.
    """
    if isinstance(value, dict):
        value = value.get("__float__")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def read_mamba2(
    config: Json, sizes: Sizes, *, width: int | None = None, **options: Any
) -> Mamba2Config:
    """Return a Mamba-2 layer's configuration by the fields of Bamba, which most families have.

    Args:
        config: the contents of config.json.
        sizes: the sizes of the model.
        width: the channels of the layer; None for mamba_expand times those of the model.
        options: further options of `Mamba2Config`.

    Raises:
        CheckpointError: a field is wrong, or the heads do not fill the width.
    """
    must_be({"hidden_act": sizes.activation}, "hidden_act", "silu")  # of the convolution, too
    must_be(config, "mamba_ssm_cache_dtype", "float32")
    expanded = count_or(config, "mamba_expand", 2) * sizes.hidden_size
    width = expanded if width is None else width
    heads, dim = count_or(config, "mamba_n_heads", 128), config.get("mamba_d_head")
    dim = width // heads if dim in (None, "auto") else count(config, "mamba_d_head")
    if heads * dim != width:
        raise CheckpointError(
            f"mamba_n_heads times mamba_d_head must be {width}, got {heads} times {dim}"
        )
    groups = count_or(config, "mamba_n_groups", 1)
    return mixer_of(
        Mamba2Config,
        heads,
        dim,
        groups,
        count_or(config, "mamba_d_state", 256),
        count_or(config, "mamba_d_conv", 4),
        sizes.eps,
        **{
            "has_conv_bias": flag(config, "mamba_conv_bias", True),
            "has_in_bias": flag(config, "mamba_proj_bias", False),
            "has_out_bias": flag(config, "mamba_proj_bias", False),
            "dt_limits": step_limits(config),
            "norm_groups": groups,
            **options,
        },
    )


def mamba2_names(block: str) -> dict[str, str]:
    """Return the checkpoint's names of a Mamba-2 layer's parameters, by ours, where the layer is
    called `block`."""
    return {
        "mixer.in_proj": f"{block}.in_proj",
        "mixer.conv": f"{block}.conv1d.weight",
        "mixer.conv_bias": f"{block}.conv1d.bias",
        "mixer.a_log": f"{block}.A_log",
        "mixer.d": f"{block}.D",
        "mixer.dt_bias": f"{block}.dt_bias",
        "mixer.norm": f"{block}.norm",
        "mixer.o_proj": f"{block}.out_proj",
    }


def _mamba2(config: Json) -> dict[str, Any]:
    width, eps = count(config, "hidden_size"), float(number(config, "layer_norm_epsilon", 1e-5))
    must_be(config, "hidden_act", "silu")
    heads, dim = count_or(config, "num_heads", 128), count_or(config, "head_dim", 64)
    if heads * dim != count_or(config, "expand", 2) * width:
        raise CheckpointError(
            f"num_heads times head_dim must be expand times hidden_size, got {heads} times {dim}"
        )
    has_bias, groups = flag(config, "use_bias", False), count_or(config, "n_groups", 8)
    mixer = mixer_of(
        Mamba2Config,
        heads,
        dim,
        groups,
        count_or(config, "state_size", 128),
        count_or(config, "conv_kernel", 4),
        eps,
        has_conv_bias=flag(config, "use_conv_bias", True),
        has_in_bias=has_bias,
        has_out_bias=has_bias,
        dt_limits=step_limits(config),
        norm_groups=groups,
    )
    layer = LayerConfig(None, None, ("attention_norm",), mixer=mixer)
    return {
        "hidden_size": width,
        # A recurrence has no longest text; this is the one that its tests were made with.
        "max_position_embeddings": count_or(config, "max_position_embeddings", 1 << 20),
        "layers": (layer,) * num_layers_of(config, "num_hidden_layers"),
        "norm": NormConfig("rms", eps),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", False),
    }


_NAMES = Names(
    prefix="backbone.",
    layer="backbone.layers.{}",
    outer={"embed_tokens": "backbone.embeddings", "norm": "backbone.norm_f", "lm_head": "lm_head"},
    inner={"attention_norm": "norm", **mamba2_names("mixer")},
    unit_dims={"mixer.conv": (1,)},
)

FAMILIES = (
    Family(
        "Mamba2ForCausalLM",
        "mamba2",
        _mamba2,
        _NAMES,
        harmless=TRAINING + " residual_in_fp32",
    ),
)
