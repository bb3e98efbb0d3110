"""Families with layer norms: Cohere, StarCoder2, GPT-NeoX, Phi, StableLM, Nemotron, OLMo, GPT-J."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import (
    Json,
    UnknownModelError,
    count,
    count_or,
    flag,
    num_layers_of,
    number,
)
from tilewise.models.families.family import LLAMA_NAMES, Family, Names
from tilewise.models.hf_rope import read_rope
from tilewise.models.layer_config import (
    PARALLEL,
    PRE_NORM,
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
)
from tilewise.models.layer_fields import Sizes, layer_types, windows_of_types
from tilewise.models.weight_table import grouped_rows
from tilewise.nn.rope import RopeConfig

__all__ = ["FAMILIES", "GPTJ_NAMES", "read_gptj"]

_EPS = ("layer_norm_eps", 1e-5)


def _cohere(config: Json) -> dict[str, Any]:
    if flag(config, "use_qk_norm", False):
        raise UnknownModelError("use_qk_norm must be false, got true")
    sizes = Sizes.of(config, positions=8192, eps=_EPS)
    rope = read_rope(config, sizes.head_dim, sizes.positions, theta=500_000.0, interleaved=True)
    return _in_parallel(config, sizes, [rope] * sizes.num_layers, [None] * sizes.num_layers)


def _cohere2(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, positions=8192, eps=_EPS)
    every = count_or(config, "sliding_window_pattern", 4)
    usual = [
        "sliding_attention" if (i + 1) % every else "full_attention"
        for i in range(sizes.num_layers)
    ]
    types = layer_types(config, sizes.num_layers, usual)
    windows = windows_of_types(types, count_or(config, "sliding_window", 4096))
    rope = read_rope(config, sizes.head_dim, sizes.positions, interleaved=True)
    ropes = [rope if window is not None else None for window in windows]
    return _in_parallel(config, sizes, ropes, list(windows))


def _in_parallel(
    config: Json, sizes: Sizes, ropes: list[RopeConfig | None], windows: list[int | None]
) -> dict[str, Any]:
    has_bias = flag(config, "attention_bias", False)
    return sizes.decoder(
        NormConfig("layer", sizes.eps),
        ropes,
        windows=windows,
        attention={"qkv_bias": has_bias, "o_bias": has_bias},
        norms=PARALLEL,
        is_parallel=True,
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
        logit_scale=number(config, "logit_scale", 0.0625),
    )


def _starcoder2(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(
        config,
        num_kv_heads=2,
        positions=4096,
        eps=("norm_epsilon", 1e-5),
        activation=("hidden_act", "gelu_pytorch_tanh"),
    )
    has_bias = flag(config, "use_bias", True)
    has_window = config.get("sliding_window") is not None
    window = count(config, "sliding_window") if has_window else None
    return sizes.decoder(
        NormConfig("layer", sizes.eps, has_bias=True),
        read_rope(config, sizes.head_dim, sizes.positions),
        windows=(window,) * sizes.num_layers,
        attention={"qkv_bias": has_bias, "o_bias": has_bias},
        feed_forward=sizes.feed_forward(is_gated=False, bias=has_bias),
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
    )


def _gpt_neox(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, positions=2048, eps=_EPS, activation=("hidden_act", "gelu"))
    sizes = replace(sizes, num_kv_heads=sizes.num_q_heads)
    part = number(config, "rotary_pct", 0.25)
    theta = number(config, "rotary_emb_base", 10_000.0)
    has_bias = flag(config, "attention_bias", True)
    return sizes.decoder(
        NormConfig("layer", sizes.eps, has_bias=True),
        read_rope(config, sizes.head_dim, sizes.positions, theta=theta, part=part),
        attention={"qkv_bias": has_bias, "o_bias": has_bias},
        feed_forward=sizes.feed_forward(is_gated=False, bias=True),
        is_parallel=flag(config, "use_parallel_residual", True),
        tie_word_embeddings=flag(config, "tie_word_embeddings", False),
    )


def _phi(config: Json) -> dict[str, Any]:
    if flag(config, "qk_layernorm", False):
        raise UnknownModelError("qk_layernorm must be false, got true")
    sizes = Sizes.of(config, positions=2048, eps=_EPS, activation=("hidden_act", "gelu_new"))
    return sizes.decoder(
        NormConfig("layer", sizes.eps, has_bias=True),
        read_rope(config, sizes.head_dim, sizes.positions, part=0.5),
        attention={"qkv_bias": True, "o_bias": True},
        feed_forward=sizes.feed_forward(is_gated=False, bias=True),
        norms=PARALLEL,
        is_parallel=True,
        head_bias=True,
        tie_word_embeddings=flag(config, "tie_word_embeddings", False),
    )


def _stablelm(config: Json) -> dict[str, Any]:
    if flag(config, "qk_layernorm", False):
        raise UnknownModelError("qk_layernorm must be false, got true")
    sizes = Sizes.of(config, positions=4096, eps=_EPS)
    is_parallel = flag(config, "use_parallel_residual", False)
    return sizes.decoder(
        NormConfig("layer", sizes.eps, has_bias=True),
        read_rope(config, sizes.head_dim, sizes.positions, part=0.25),
        attention={"qkv_bias": flag(config, "use_qkv_bias", False)},
        norms=PARALLEL if is_parallel else PRE_NORM,
        is_parallel=is_parallel,
        tie_word_embeddings=flag(config, "tie_word_embeddings", False),
    )


def _nemotron(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(
        config, positions=4096, eps=("norm_eps", 1e-5), activation=("hidden_act", "relu2")
    )
    has_bias = flag(config, "attention_bias", False)
    return sizes.decoder(
        NormConfig("shifted_layer", sizes.eps, has_bias=True),
        read_rope(config, sizes.head_dim, sizes.positions, part=0.5),
        attention={"qkv_bias": has_bias, "o_bias": has_bias},
        feed_forward=sizes.feed_forward(is_gated=False, bias=flag(config, "mlp_bias", False)),
        tie_word_embeddings=flag(config, "tie_word_embeddings", False),
    )


def _olmo(config: Json) -> dict[str, Any]:
    if config.get("clip_qkv") is not None:
        raise UnknownModelError(f"clip_qkv must be null, got {config['clip_qkv']}")
    sizes = Sizes.of(config, positions=2048)
    has_bias = flag(config, "attention_bias", False)
    return sizes.decoder(
        NormConfig("layer", 1e-5, has_weight=False),
        read_rope(config, sizes.head_dim, sizes.positions),
        attention={"qkv_bias": has_bias, "o_bias": has_bias},
        tie_word_embeddings=flag(config, "tie_word_embeddings", False),
    )


def read_gptj(config: Json) -> dict[str, Any]:
    """Return the arguments of `DecoderConfig` for the config.json of a GPT-J or CodeGen."""
    width, heads = count(config, "n_embd"), count(config, "n_head")
    num_layers = num_layers_of(config, "n_layer")
    if width % heads:
        raise CheckpointError(f"n_embd must be a multiple of n_head {heads}, got {width}")
    dim, positions = width // heads, count(config, "n_positions")
    # An absent field means 64, as in the configuration classes; null means whole heads.
    turned = count_or(config, "rotary_dim", dim if "rotary_dim" in config else 64)
    if turned % 2 or turned > dim:
        raise CheckpointError(
            f"rotary_dim must be even and at most the {dim} channels of a head, got {turned}"
        )
    rope = RopeConfig(turned, max_positions=positions, interleaved=True)
    attention = AttentionConfig(heads, heads, dim, softmax_scale=dim**-0.5, rope=rope)
    block = FeedForwardConfig(
        count_or(config, "n_inner", 4 * width),
        config.get("activation_function", "gelu_new"),
        is_gated=False,
        bias=True,
    )
    layer = LayerConfig(attention, block, PARALLEL, is_parallel=True)
    return {
        "hidden_size": width,
        "max_position_embeddings": positions,
        "layers": (layer,) * num_layers,
        "norm": NormConfig("layer", number(config, "layer_norm_epsilon", 1e-5), has_bias=True),
        "head_bias": True,
        "tie_word_embeddings": flag(config, "tie_word_embeddings", False),
    }


_STARCODER_NAMES = LLAMA_NAMES.but({"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"})
_PHI_NAMES = LLAMA_NAMES.but(
    {
        "attention.o_proj": "self_attn.dense",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
    },
    outer={**LLAMA_NAMES.outer, "norm": "model.final_layernorm"},
)
_NEOX_NAMES = Names(
    prefix="gpt_neox.",
    layer="gpt_neox.layers.{}",
    outer={
        "embed_tokens": "gpt_neox.embed_in",
        "norm": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
    },
    inner={
        "attention_norm": "input_layernorm",
        "attention.qkv_proj": "attention.query_key_value",
        "attention.o_proj": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    # Old files hold causal masks and frequencies.
    ignored=(r".*rotary_emb\.inv_freq", r".*\.attention\.(bias|masked_bias)"),
    orders={"attention.qkv_proj": grouped_rows},
)
GPTJ_NAMES = Names(
    prefix="transformer.",
    layer="transformer.h.{}",
    outer={
        "embed_tokens": "transformer.wte",
        "norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    inner={
        "attention_norm": "ln_1",
        "attention.qkv_proj": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "attention.o_proj": "attn.out_proj",
        "mlp.up_proj": "mlp.fc_in",
        "mlp.down_proj": "mlp.fc_out",
    },
    ignored=(r".*\.attn\.(bias|masked_bias)", r".*embed_positions"),
)

FAMILIES = (
    Family("CohereForCausalLM", "cohere", _cohere, LLAMA_NAMES),
    Family("Cohere2ForCausalLM", "cohere2", _cohere2, LLAMA_NAMES),
    Family(
        "Starcoder2ForCausalLM",
        "starcoder2",
        _starcoder2,
        _STARCODER_NAMES,
        harmless="residual_dropout mlp_type norm_type",
    ),
    Family("GPTNeoXForCausalLM", "gpt_neox", _gpt_neox, _NEOX_NAMES),
    Family("PhiForCausalLM", "phi", _phi, _PHI_NAMES),
    Family("StableLmForCausalLM", "stablelm", _stablelm, LLAMA_NAMES, harmless="rope_pct"),
    Family("NemotronForCausalLM", "nemotron", _nemotron, LLAMA_NAMES),
    Family("OlmoForCausalLM", "olmo", _olmo, LLAMA_NAMES, harmless="rms_norm_eps"),
    Family("GPTJForCausalLM", "gptj", read_gptj, GPTJ_NAMES, harmless="rotary n_ctx"),
)
