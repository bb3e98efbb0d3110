"""OLMo Hybrid: gated delta nets in layers with norms before the blocks, attention in layers with
norms behind them.

Source: Ai2, 2026, "OLMo Hybrid".
"""

from __future__ import annotations

from typing import Any

from tilewise.models.config_fields import Json, count_or, flag
from tilewise.models.families.family import Family
from tilewise.models.families.qwen3_next import GATED_DELTA_NAMES
from tilewise.models.hf_rope import read_rope
from tilewise.models.layer_config import POST_NORM, LayerConfig, NormConfig
from tilewise.models.layer_fields import Sizes, layers_that_attend, mixer_of
from tilewise.models.unread_fields import must_be
from tilewise.nn.gated_delta_net import GatedDeltaConfig

__all__ = ["FAMILIES"]

_NET_EPS = 1e-5  # of the norm behind the recurrence, whatever that of the model is


def _olmo_hybrid(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, positions=65_536)
    must_be({"hidden_act": sizes.activation}, "hidden_act", "silu")  # of the convolution, too
    norm, has_bias = NormConfig("rms", sizes.eps), flag(config, "attention_bias", False)
    rotates = "rope_parameters" not in config or config["rope_parameters"] is not None
    rope = read_rope(config, sizes.head_dim, sizes.positions) if rotates else None
    attention = sizes.attention(
        rope=rope, qkv_bias=has_bias, o_bias=has_bias, qk_norm=norm, qk_norm_over="heads"
    )
    key_heads = count_or(config, "linear_num_key_heads", sizes.num_q_heads)
    key_dim = count_or(config, "linear_key_head_dim", int(0.75 * sizes.hidden_size / key_heads))
    mixer = mixer_of(
        GatedDeltaConfig,
        key_heads,
        count_or(config, "linear_num_value_heads", sizes.num_q_heads),
        key_dim,
        count_or(config, "linear_value_head_dim", 2 * key_dim),
        count_or(config, "linear_conv_kernel_dim", 4),
        _NET_EPS,
        2.0 if flag(config, "linear_allow_neg_eigval", True) else 1.0,
    )
    usual, block = [i % 4 == 3 for i in range(sizes.num_layers)], sizes.feed_forward()
    usual[-1] = usual[-1] or not any(usual)
    layers = (
        LayerConfig(attention, block, POST_NORM)
        if attends
        else LayerConfig(None, block, mixer=mixer)
        for attends in layers_that_attend(config, sizes.num_layers, usual)
    )
    return {
        **sizes.model,
        "layers": tuple(layers),
        "norm": norm,
        "tie_word_embeddings": flag(config, "tie_word_embeddings", False),
    }


_CONVOLUTIONS = tuple(f"linear_attn.{part}_conv1d.weight" for part in "qkv")
_NAMES = GATED_DELTA_NAMES.but(
    {
        "mixer.qkvz_proj": tuple(f"linear_attn.{part}_proj" for part in "qkvg"),
        "mixer.ba_proj": ("linear_attn.b_proj", "linear_attn.a_proj"),
        "mixer.conv": _CONVOLUTIONS,
        "mixer.norm": "linear_attn.o_norm",
        "mixer.o_proj": "linear_attn.o_proj",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    cut_anywhere=frozenset(("mixer.conv",)),
    renames=(
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    ),
)
# Bounds between which parameters are drawn.
_DRAWN = "linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor"

FAMILIES = (Family("OlmoHybridForCausalLM", "olmo_hybrid", _olmo_hybrid, _NAMES, harmless=_DRAWN),)
