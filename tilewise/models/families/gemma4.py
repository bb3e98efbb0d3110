"""Gemma 4 for text: wider heads in full layers, normalised values, caches and inputs by layer.

In full layers keys may be the values; the last layers may read the keys and values of earlier
ones; a layer may add an embedding of the token of its own, and have a mixture beside its block.
Source: the Gemma team, 2026, "Gemma 4".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import Json, count, count_or, flag, number, object_of, whole
from tilewise.models.decoder_config import DecoderConfig
from tilewise.models.families.family import Family, Names
from tilewise.models.families.gemma3 import GEMMA_NAMES
from tilewise.models.families.llama import write_sizes
from tilewise.models.hf_rope import read_gemma_rope, write_rope
from tilewise.models.layer_config import SANDWICH, AttentionConfig, LayerConfig, NormConfig
from tilewise.models.layer_fields import Sizes, layer_types, types_of_windows, windows_of_types
from tilewise.nn.experts import ExpertsConfig

__all__ = ["FAMILIES"]

_EVERY = 6  # th layer sees all keys, unless the file says otherwise
_ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


def _gemma4(config: Json) -> dict[str, Any]:
    return _read(config, positions=131_072, window=512, input_size=256)


def _gemma4_unified(config: Json) -> dict[str, Any]:
    return _read(config, positions=262_144, window=1024, input_size=0)


def _read(config: Json, *, positions: int, window: int, input_size: int) -> dict[str, Any]:
    """Return the arguments of `DecoderConfig` for Gemma 4; absent fields default as in the
    configuration class.

    Args:
        config: the contents of config.json.
        positions, window, input_size: the defaults of max_position_embeddings, sliding_window and
            hidden_size_per_layer_input.
    """
    sizes = Sizes.of(
        config,
        head_dim=256,
        num_kv_heads=4,
        positions=positions,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
    )
    direction = config.get("use_bidirectional_attention")
    if direction not in (None, "vision"):  # pictures alone are seen both ways
        raise CheckpointError(
            f"use_bidirectional_attention must be null or vision, got {direction!r}"
        )
    num_layers, norm = sizes.num_layers, NormConfig("rms", sizes.eps)
    usual = [
        "sliding_attention" if (i + 1) % _EVERY else "full_attention" for i in range(num_layers)
    ]
    types = layer_types(config, num_layers, usual)
    types[-1:] = ["full_attention"]
    windows = windows_of_types(types, count_or(config, "sliding_window", window))
    shared = whole(config, "num_kv_shared_layers", 0)
    first = num_layers - shared  # layer that reads the keys and values of another one
    if shared and not {*types[first:]} <= {*types[: max(first, 0)]}:
        raise CheckpointError(
            f"num_kv_shared_layers must leave a layer of each kind with keys, got {shared}"
        )
    k_is_v, has_bias = (
        flag(config, name, False) for name in ("attention_k_eq_v", "attention_bias")
    )
    heads = _heads_by_layer(config, sizes, types, k_is_v)
    own = {"rope_parameters": object_of(config, "rope_parameters") or _ROPES}
    given = {name: config[name] for name in ("rope_scaling", "rope_theta") if name in config}
    attentions = [
        AttentionConfig(
            sizes.num_q_heads,
            num_kv_heads,
            head_dim,
            softmax_scale=1.0,
            window=windows[i],
            rope=read_gemma_rope(
                {**given, **own}, head_dim, sizes.positions, kind, "rope_theta", 10_000.0
            ),
            qkv_bias=has_bias,
            o_bias=has_bias,
            qk_norm=norm,
            v_norm=True,
            v_is_k=k_is_v and kind == "full_attention",
            kv_layer=None if i < first else first - 1 - types[:first][::-1].index(kind),
        )
        for i, (kind, (num_kv_heads, head_dim)) in enumerate(zip(types, heads, strict=True))
    ]
    is_wide = flag(config, "use_double_wide_mlp", False)
    size = whole(config, "hidden_size_per_layer_input", input_size)
    rows = count_or(config, "vocab_size_per_layer_input", 262_144)
    experts = _experts(config, sizes)
    return {
        **sizes.model,
        "layers": tuple(
            LayerConfig(
                attention,
                sizes.feed_forward()
                if not is_wide or attention.kv_layer is None
                else sizes.wider(2).feed_forward(),
                SANDWICH,
                experts=experts,
                has_scale=True,
                token_input_size=size,
            )
            for attention in attentions
        ),
        "norm": norm,
        "tie_word_embeddings": flag(config, "tie_word_embeddings", True),
        "embedding_scale": sizes.hidden_size**0.5,
        "logit_softcap": number(config, "final_logit_softcapping", 0.0) or None,
        "token_inputs": rows if size else 0,
    }


def _heads_by_layer(
    config: Json, sizes: Sizes, types: list[str], k_is_v: bool
) -> list[tuple[int, int]]:
    """Return (key heads, channels of a head) for each layer.

    Args:
        config, sizes: the contents of config.json, and the sizes that were read from it.
        types: the type of each layer: those with full attention have wider heads.
        k_is_v: True if keys are the values in full layers, which then may have fewer key heads.
    """
    wide = count_or(config, "global_head_dim", 512)
    few = count_or(config, "num_global_key_value_heads", sizes.num_kv_heads)
    full = (few if k_is_v else sizes.num_kv_heads, wide)
    plain = (sizes.num_kv_heads, sizes.head_dim)
    by_layer = config.get("per_layer_config")
    if by_layer is None:
        return [full if kind == "full_attention" else plain for kind in types]
    if not isinstance(by_layer, Mapping):
        raise CheckpointError(f"per_layer_config must be a JSON object, got {by_layer!r}")
    found = []
    for layer in range(len(types)):
        own = object_of(by_layer, str(layer)) or object_of(dict(by_layer), layer)  # type: ignore[arg-type]
        if unknown := {*own} - {"head_dim", "num_key_value_heads"}:
            raise CheckpointError(
                f"per_layer_config must hold head_dim and num_key_value_heads, got {min(unknown)}"
            )
        found.append(
            (count_or(own, "num_key_value_heads", plain[0]), count_or(own, "head_dim", plain[1]))
        )
    return found


def _experts(config: Json, sizes: Sizes) -> ExpertsConfig | None:
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not flag(config, "enable_moe_block", False):
        for name in names:
            config.get(name)
        return None
    num_experts, num_active, inner = (count(config, name) for name in names)
    try:
        return ExpertsConfig(
            num_experts,
            num_active,
            inner,
            router_norm_eps=sizes.eps,
            logit_scale=sizes.hidden_size**-0.5,
            scales_experts=True,
            activation=sizes.activation,
        )
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error


def _write(config: DecoderConfig) -> dict[str, Any]:
    layers, experts = config.layers, config.experts
    windows, attentions = types_of_windows(config.windows), config.attentions
    plain = next((a for a in attentions if a.window is not None), attentions[0])
    ropes = {
        kind: write_rope(attention.rope, attention.head_dim, config.max_position_embeddings)
        for kind, attention in zip(windows["layer_types"], attentions, strict=True)
        if attention.rope is not None
    }
    shared = sum(attention.kv_layer is not None for attention in attentions)
    widths = [block.intermediate_size for block in config.feed_forwards]
    return {
        **write_sizes(config),
        "intermediate_size": widths[0],
        "num_key_value_heads": plain.num_kv_heads,
        "head_dim": plain.head_dim,
        "per_layer_config": {
            str(i): {"head_dim": a.head_dim, "num_key_value_heads": a.num_kv_heads}
            for i, a in enumerate(attentions)
            if (a.head_dim, a.num_kv_heads) != (plain.head_dim, plain.num_kv_heads)
        },
        "hidden_activation": config.feed_forwards[0].activation,
        "attention_bias": plain.qkv_bias,
        "attention_k_eq_v": any(attention.v_is_k for attention in attentions),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "final_logit_softcapping": config.logit_softcap,
        "hidden_size_per_layer_input": layers[0].token_input_size,
        "vocab_size_per_layer_input": config.token_inputs or config.vocab_size,
        "enable_moe_block": experts is not None,
        "num_experts": None if experts is None else experts.num_experts,
        "top_k_experts": None if experts is None else experts.num_active,
        "moe_intermediate_size": None if experts is None else experts.intermediate_size,
        **windows,
        "sliding_window": windows["sliding_window"] or config.max_position_embeddings,
        "rope_parameters": {**_ROPES, **ropes},
    }


_EXPERT_NAMES = {
    "experts.router": "router.proj",
    "experts.router_norm.weight": "router.scale",
    "experts.expert_scale": "router.per_expert_scale",
    "experts.up": "experts.gate_up_proj",
    "experts.down": "experts.down_proj",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_out_norm": "post_feedforward_layernorm_2",
    "dense_out_norm": "post_feedforward_layernorm_1",
}
_NAMES = Names(
    prefix=GEMMA_NAMES.prefix,
    layer=GEMMA_NAMES.layer,
    outer={
        **GEMMA_NAMES.outer,
        "token_table": "model.embed_tokens_per_layer",
        "token_model_proj": "model.per_layer_model_projection",
        "token_model_norm": "model.per_layer_projection_norm",
    },
    inner={
        **GEMMA_NAMES.inner,
        **_EXPERT_NAMES,
        "token_gate": "per_layer_input_gate",
        "token_proj": "per_layer_projection",
        "token_norm": "post_per_layer_input_norm",
        "scale": "layer_scalar",
    },
    ignored=GEMMA_NAMES.ignored,
)


def _names(config: DecoderConfig) -> Names:
    """Return the names of a checkpoint's tensors.

    Projections of keys and values are ignored in layers that read those of another layer.
    """
    unread = tuple(
        rf"model\.layers\.{i}\.self_attn\.(k_proj|v_proj|k_norm)\..*"
        for i, attention in enumerate(config.attentions)
        if attention.kv_layer is not None
    )
    return _NAMES.but(ignored=(*_NAMES.ignored, *unread))


FAMILIES = (
    Family(
        "Gemma4ForCausalLM",
        "gemma4_text",
        _gemma4,
        _names,
        _write,
        own_fields=("per_layer_config",),
    ),
    Family(
        "Gemma4UnifiedForCausalLM",
        "gemma4_unified_text",
        _gemma4_unified,
        _names,
        _write,
        own_fields=("per_layer_config",),
    ),
)
