"""Nemotron-H and Nemotron 3: layers of one block each, Mamba-2, attention, a feed-forward block or
a mixture, none of them gated.

Sources: NVIDIA, 2025, "Nemotron-H"; NVIDIA, 2025, "Nemotron 3".
"""

from __future__ import annotations

import math
from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import Json, count, count_or, flag, number, with_fields
from tilewise.models.decoder_config import DecoderConfig
from tilewise.models.families.family import LLAMA_NAMES, Family, Names
from tilewise.models.families.mamba2 import TRAINING, mamba2_names
from tilewise.models.families.mixtures import expert_names, grouped_experts
from tilewise.models.layer_config import LayerConfig, NormConfig
from tilewise.models.layer_fields import Sizes, mixer_of
from tilewise.models.unread_fields import must_be
from tilewise.nn.mamba2 import Mamba2Config

__all__ = ["FAMILIES"]

_USUAL = ("linear_attention", "moe", "full_attention", "mlp")
_LETTERS = dict(zip("ME*-", _USUAL, strict=True))
_KINDS = {
    **{kind: kind for kind in _USUAL},
    "mamba": "linear_attention",
    "attention": "full_attention",
}
# The names in older files, and those of today.
_FORMER = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}


def _kinds(config: Json) -> list[str]:
    """Return the kind of each layer, one of _USUAL, from a list or from a text with a letter for
    each.

    Raises:
        CheckpointError: a kind or a letter is unknown.
    """
    pattern = config.get("hybrid_override_pattern")
    types = config.get("layers_block_type")
    types = config.get("layer_types") if types is None else types
    if pattern is not None and types is None:
        if not isinstance(pattern, str) or not pattern or not {*pattern} <= {*_LETTERS}:
            raise CheckpointError(
                f"hybrid_override_pattern must be a text of M, E, * and -, got {pattern!r}"
            )
        return [_LETTERS[letter] for letter in pattern]
    types = list(_USUAL) if types is None else types
    known = isinstance(types, list) and all(isinstance(x, str) and x in _KINDS for x in types)
    if not types or not known:
        raise CheckpointError(
            f"layers_block_type must be a list of {', '.join(_USUAL)}, got {types!r}"
        )
    return [_KINDS[kind] for kind in types]


def _read(config: Json) -> dict[str, Any]:
    config = with_fields(
        config, **{new: config[old] for old, new in _FORMER.items() if config.get(old) is not None}
    )
    kinds = _kinds(config)
    inner = count_or(config, "intermediate_size", 21_504)
    sizes = Sizes.of(
        with_fields(config, num_hidden_layers=len(kinds), intermediate_size=inner),
        head_dim=128,
        num_kv_heads=8,
        positions=4096,
        eps=("layer_norm_epsilon", 1e-5),
        activation=("mlp_hidden_act", "relu2"),
    )
    for name, allowed in (
        ("mamba_hidden_act", "silu"),
        ("mamba_ssm_cache_dtype", "float32"),
        ("mamba_proj_bias", False),
        ("attention_bias", False),
        ("sliding_window", None),
    ):
        must_be(config, name, allowed)
    mlp_bias = flag(config, "mlp_bias", False)
    blocks: dict[str, LayerConfig] = {}
    for kind in dict.fromkeys(kinds):
        if kind == "linear_attention":
            blocks[kind] = LayerConfig(None, None, ("attention_norm",), mixer=_mixer(config, sizes))
        elif kind == "full_attention":
            blocks[kind] = LayerConfig(sizes.attention(), None, ("attention_norm",))
        elif kind == "mlp":
            plain = sizes.feed_forward(is_gated=False, bias=mlp_bias)
            blocks[kind] = LayerConfig(None, plain, ("mlp_norm",))
        else:
            latent = config.get("moe_latent_size")
            mixture = grouped_experts(
                config,
                sizes,
                shared_size=count_or(config, "moe_shared_expert_intermediate_size", 7688),
                shared_bias=mlp_bias,
                is_gated=False,
                latent_size=0 if latent is None else count(config, "moe_latent_size"),
                latent_bias=mlp_bias,
            )
            blocks[kind] = LayerConfig(None, mixture, ("mlp_norm",))
    return {
        **sizes.model,
        "layers": tuple(blocks[kind] for kind in kinds),
        "norm": NormConfig("rms", sizes.eps),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", False),
    }


def _mixer(config: Json, sizes: Sizes) -> Mamba2Config:
    groups, has_bias = count_or(config, "n_groups", 8), flag(config, "use_bias", False)
    return mixer_of(
        Mamba2Config,
        count_or(config, "mamba_num_heads", 128),
        count_or(config, "mamba_head_dim", 64),
        groups,
        count_or(config, "ssm_state_size", 128),
        count_or(config, "conv_kernel", 4),
        sizes.eps,
        norm_groups=groups,
        has_conv_bias=flag(config, "use_conv_bias", True),
        has_in_bias=has_bias,
        has_out_bias=has_bias,
        dt_limits=(float(number(config, "time_step_min", 0.001)), math.inf),
    )


_NAMES = LLAMA_NAMES.but(
    {
        **mamba2_names("mixer"),
        "attention_norm": "norm",
        "attention.qkv_proj": tuple(f"mixer.{part}_proj" for part in "qkv"),
        "attention.o_proj": "mixer.o_proj",
        "mlp_norm": "norm",
        "mlp.up_proj": "mixer.up_proj",
        "mlp.down_proj": "mixer.down_proj",
    },
    outer={"embed_tokens": "model.embeddings", "norm": "model.norm_f", "lm_head": "lm_head"},
    unit_dims={"mixer.conv": (1,)},
    renames=((r"^backbone\.", "model."),),
    ignored=(*LLAMA_NAMES.ignored, r"mtp\..*"),  # heads that guess further tokens
)


def _names(config: DecoderConfig) -> Names:
    experts = range(0 if config.experts is None else config.experts.num_experts)
    return expert_names(config, _NAMES, "mixer").but(
        {
            "mlp.up": tuple(f"mixer.experts.{e}.up_proj.weight" for e in experts),
            "mlp.shared.up_proj": "mixer.shared_experts.up_proj",
            "mlp.latent_proj": "mixer.fc1_latent_proj",
            "mlp.latent_out_proj": "mixer.fc2_latent_proj",
        },
        whole={"mlp.up": "mixer.experts.up_proj", "mlp.down": "mixer.experts.down_proj"},
    )


FAMILIES = (
    Family(
        "NemotronHForCausalLM",
        "nemotron_h",
        _read,
        _names,
        # Steps of time are bounded below alone, as in transformers; a layer is as wide as its
        # heads; heads that guess are not loaded.
        harmless=TRAINING
        + " time_step_limit expand mamba_expand num_hidden_layers moe_shared_expert_overlap "
        "mtp_layers_block_type mtp_hybrid_override_pattern num_nextn_predict_layers "
        "residual_in_fp32 mamba_dt_max mamba_dt_limit mamba_dt_init_floor",
    ),
)
