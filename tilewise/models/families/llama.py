"""Llama 2 and 3, Mistral, Qwen2, Qwen3: RMS norms, rotary positions, gated feed-forward blocks."""

from __future__ import annotations

from typing import Any

from tilewise.models.config_fields import Json, count_or, flag, num_layers_of, number
from tilewise.models.decoder_config import DecoderConfig
from tilewise.models.families.family import LLAMA_NAMES, Family
from tilewise.models.hf_rope import read_rope, write_rope
from tilewise.models.layer_config import FeedForwardConfig, LayerConfig, NormConfig
from tilewise.models.layer_fields import Sizes, layer_types, types_of_windows, windows_of_types

__all__ = ["FAMILIES", "write_llama_like", "write_sizes"]


def _read(
    config: Json,
    windows: tuple[int | None, ...] | None = None,
    *,
    head_dim: int | None = None,
    num_kv_heads: int | None = None,
    has_qk_norm: bool = False,
    qkv_bias: bool | None = None,
) -> dict[str, Any]:
    """Return the arguments of `DecoderConfig` for the families of this file.

    Args:
        config: the object of config.json.
        windows: each layer's window; None for none.
        head_dim, num_kv_heads: values for keys that the config lacks.
        has_qk_norm: True if queries and keys are normalised by head.
        qkv_bias: True if the projections of queries, keys and values alone have biases; None reads
            attention_bias, which counts for the output, too.
    """
    sizes = Sizes.of(config, head_dim=head_dim, num_kv_heads=num_kv_heads)
    norm = NormConfig("rms", sizes.eps)
    has_bias = flag(config, "attention_bias", False)
    rope = read_rope(config, sizes.head_dim, sizes.positions)
    feed_forward = sizes.feed_forward(bias=flag(config, "mlp_bias", False))
    layers = (
        LayerConfig(
            sizes.attention(
                window=window,
                rope=rope,
                qkv_bias=has_bias if qkv_bias is None else qkv_bias,
                o_bias=has_bias and qkv_bias is None,
                qk_norm=norm if has_qk_norm else None,
            ),
            feed_forward,
        )
        for window in windows or (None,) * sizes.num_layers
    )
    return {
        **sizes.model,
        "layers": tuple(layers),
        "norm": norm,
        "tie_word_embeddings": flag(config, "tie_word_embeddings", False),
    }


def _mistral(config: Json) -> dict[str, Any]:
    num_layers, window = num_layers_of(config, "num_hidden_layers"), _window(config)
    # Its configuration class has 8 key heads unless it is told others; null means all heads.
    num_kv_heads = None if "num_key_value_heads" in config else 8
    windows: tuple[int | None, ...] = (window,) * num_layers
    if config.get("layer_types") is not None:
        windows = windows_of_types(layer_types(config, num_layers), window)
    return _read(config, windows, num_kv_heads=num_kv_heads)


def _qwen2(config: Json) -> dict[str, Any]:
    return _read(config, _qwen_windows(config), qkv_bias=True)


def _qwen3(config: Json) -> dict[str, Any]:
    # Its configuration class has heads of 128 channels unless it is told others.
    return _read(config, _qwen_windows(config), head_dim=128, has_qk_norm=True)


def _window(config: Json) -> int | None:
    # An absent field means 4,096, as in the configuration classes; null means no window.
    is_null = config.get("sliding_window", 4096) is None
    return None if is_null else count_or(config, "sliding_window", 4096)


def _qwen_windows(config: Json) -> tuple[int | None, ...]:
    num_layers, window = num_layers_of(config, "num_hidden_layers"), _window(config)
    first = number(config, "max_window_layers", 28)  # the default of the configuration class
    window = window if flag(config, "use_sliding_window", False) else None
    if config.get("layer_types") is None:
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return windows_of_types(layer_types(config, num_layers), window)


def write_sizes(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of config.json for sizes and eps that all models with RMS norms share.

    The numbers of heads are those of the first layer with attention.
    """
    attention = config.attentions[0]
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_q_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm.eps,
    }


def write_llama_like(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of `write_sizes`, the head dim, the activation and the rotary settings."""
    attention = config.attentions[0]
    assert attention.rope is not None
    return {
        **write_sizes(config),
        "head_dim": attention.head_dim,
        "hidden_act": config.feed_forwards[0].activation,
        "rope_parameters": write_rope(
            attention.rope, attention.head_dim, config.max_position_embeddings
        ),
    }


def _write_llama(config: DecoderConfig) -> dict[str, Any]:
    attention, block = config.attentions[0], config.feed_forwards[0]
    assert isinstance(block, FeedForwardConfig)
    return write_llama_like(config) | {
        "attention_bias": attention.qkv_bias,
        "mlp_bias": block.bias,
    }


def _write_mistral(config: DecoderConfig) -> dict[str, Any]:
    return write_llama_like(config) | {"sliding_window": config.windows[0]}


def _write_qwen2(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_llama_like(config),
        "use_sliding_window": any(config.windows),
        **types_of_windows(config.windows),
    }


def _write_qwen3(config: DecoderConfig) -> dict[str, Any]:
    return _write_qwen2(config) | {"attention_bias": config.attentions[0].qkv_bias}


FAMILIES = (
    Family("LlamaForCausalLM", "llama", _read, LLAMA_NAMES, _write_llama),
    Family("MistralForCausalLM", "mistral", _mistral, LLAMA_NAMES, _write_mistral),
    Family("Qwen2ForCausalLM", "qwen2", _qwen2, LLAMA_NAMES, _write_qwen2),
    Family("Qwen3ForCausalLM", "qwen3", _qwen3, LLAMA_NAMES, _write_qwen3),
)
