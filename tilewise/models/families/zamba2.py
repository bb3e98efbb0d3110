"""Zamba2: layers of Mamba-2, and before some of them a block that several layers share.

Source: Zyphra, 2024, "The Zamba2 suite: technical report".
"""

from __future__ import annotations

import math
from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import Json, count_or, flag, number, with_fields
from tilewise.models.decoder_config import DecoderConfig
from tilewise.models.families.family import LLAMA_NAMES, Family, Names
from tilewise.models.families.mamba2 import TRAINING, mamba2_names
from tilewise.models.hf_rope import read_rope
from tilewise.models.layer_config import LayerConfig, NormConfig, SharedBlockConfig
from tilewise.models.layer_fields import Sizes, mixer_of
from tilewise.models.unread_fields import must_be
from tilewise.nn.mamba2 import Mamba2Config

__all__ = ["FAMILIES"]

_KINDS = {
    "mamba": False,
    "linear_attention": False,
    "hybrid": True,
}
# Of 54 layers, the ninth of each of seven groups, and two more.
_USUAL = [6 * i for i in range(1, 8)] + [47, 51]
_EPS_OF_GATED_NORM = 1e-5  # whatever the file says


def _has_block(config: Json, num_layers: int) -> list[bool]:
    """Return for each layer whether a shared block comes before it: its kind is "hybrid".

    A file without kinds has the usual ones of 54 layers.

    Raises:
        CheckpointError: a kind is unknown, or there is not one for each layer.
    """
    kinds = config.get("layers_block_type")
    kinds = config.get("layer_types") if kinds is None else kinds
    if kinds is None:
        return [i in _USUAL for i in range(num_layers)]
    known = isinstance(kinds, list) and all(isinstance(x, str) and x in _KINDS for x in kinds)
    if not known or len(kinds) != num_layers:
        raise CheckpointError(
            f"layers_block_type must have one of {', '.join(_KINDS)} per layer ({num_layers}), "
            f"got {kinds!r}"
        )
    return [_KINDS[kind] for kind in kinds]


def _read(config: Json) -> dict[str, Any]:
    width, num_heads = (
        count_or(config, "hidden_size", 2560),
        count_or(config, "num_attention_heads", 32),
    )
    head_dim = 2 * width // num_heads
    inner = config.get("intermediate_size") or 4 * width
    # What follows from the width in all files, some of which say it again.
    for name, value in (
        ("attention_hidden_size", 2 * width),
        ("attention_head_dim", head_dim),
        ("head_dim", head_dim),
    ):
        must_be(config, name, value, None)
    sizes = Sizes.of(
        with_fields(config, intermediate_size=inner, head_dim=head_dim),
        positions=4096,
        eps=("rms_norm_eps", 1e-5),
        activation=("hidden_act", "gelu"),
    )
    has_bias = flag(config, "add_bias_linear", False)
    must_be(config, "use_long_context", False)  # which stretches the rotation
    must_be(config, "tie_word_embeddings", True)  # without it layers share no blocks either
    rope = read_rope(config, head_dim, sizes.positions)
    attention = sizes.attention(
        rope=rope if flag(config, "use_mem_rope", False) else None,
        softmax_scale=(head_dim / 2) ** -0.5,
    )
    block = sizes.feed_forward(bias=has_bias)
    mixer = _mixer(config, sizes, has_bias)
    blocks, rank = count_or(config, "num_mem_blocks", 1), count_or(config, "adapter_rank", 128)
    has_adapters = flag(config, "use_shared_attention_adapter", False)
    layers, turn = [], 0
    for has_block in _has_block(config, sizes.num_layers):
        if not has_block:
            layers.append(LayerConfig(None, None, ("attention_norm",), mixer=mixer))
            continue
        shared = SharedBlockConfig(turn % blocks, rank, has_adapters)
        layers.append(
            LayerConfig(attention, block, ("attention_norm",), mixer=mixer, shared=shared)
        )
        turn += 1
    return {
        **sizes.model,
        "layers": tuple(layers),
        "norm": NormConfig("rms", sizes.eps),
        "tie_word_embeddings": True,
    }


def _mixer(config: Json, sizes: Sizes, has_bias: bool) -> Mamba2Config:
    heads, groups = count_or(config, "n_mamba_heads", 8), count_or(config, "mamba_ngroups", 1)
    width = count_or(config, "mamba_expand", 2) * sizes.hidden_size
    if width % heads:
        raise CheckpointError(
            f"n_mamba_heads must divide mamba_expand times hidden_size {width}, got {heads}"
        )
    return mixer_of(
        Mamba2Config,
        heads,
        width // heads,
        groups,
        count_or(config, "mamba_d_state", 64),
        count_or(config, "mamba_d_conv", 4),
        _EPS_OF_GATED_NORM,
        norm_groups=groups,
        has_in_bias=has_bias,
        has_out_bias=has_bias,
        dt_limits=(float(number(config, "time_step_min", 0.001)), math.inf),
    )


# Fields that say again what others say.
_TOLD_AGAIN = " kv_channels num_query_groups hybrid_layer_ids mamba_headdim"
_SHARED = "shared_transformer"
_NAMES = LLAMA_NAMES.but(
    {
        **mamba2_names("mamba"),
        "shared.norm": f"{_SHARED}.input_layernorm",
        "shared.attention.qkv_proj": tuple(f"{_SHARED}.self_attn.{x}_proj" for x in "qkv"),
        "shared.attention.o_proj": f"{_SHARED}.self_attn.o_proj",
        "shared.mlp_norm": f"{_SHARED}.pre_ff_layernorm",
        "shared.mlp.gate_up_proj": f"{_SHARED}.feed_forward.gate_up_proj",
        "shared.mlp.down_proj": f"{_SHARED}.feed_forward.down_proj",
        "turn.proj": "linear",
        "turn.qkv_down": tuple(f"{x}_adapter.0" for x in "qkv"),
        **{f"turn.{x}_up": f"{x}_adapter.1" for x in "qkv"},
        "turn.gate_up_down": "gate_up_adapter.0",
        "turn.gate_up_up": "gate_up_adapter.1",
    },
    outer={**LLAMA_NAMES.outer, "norm": "model.final_layernorm"},
    unit_dims={"mixer.conv": (1,)},
)


def _names(config: DecoderConfig) -> Names:
    """Return the names of a checkpoint's tensors.

    In a checkpoint the first layer of each shared block has the adapters of all layers that use the
    block; here each of these layers has its own.
    """
    places = [i for i, layer in enumerate(config.layers) if layer.shared is not None]
    renames = [(r"^((?:model\.)?layers\.\d+\.)mamba_decoder\.", r"\1")]
    for turn, place in enumerate(places):
        beginning = rf"^((?:model\.)?layers)\.\d+\.{_SHARED}\."
        renames += [
            (
                rf"{beginning}self_attn\.linear_([qkv])_adapter_list\.{turn}\.",
                rf"\1.{place}.\2_adapter.",
            ),
            (
                rf"{beginning}feed_forward\.gate_up_proj_adapter_list\.{turn}\.",
                rf"\1.{place}.gate_up_adapter.",
            ),
        ]
    return _NAMES.but(renames=tuple(renames))


FAMILIES = (
    Family(
        "Zamba2ForCausalLM",
        "zamba2",
        _read,
        _names,
        harmless=TRAINING + " use_conv_bias" + _TOLD_AGAIN,
    ),
)
