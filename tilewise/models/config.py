"""The contents of a checkpoint's config.json under this package's names; frozen once read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.causal_body import as_causal
from tilewise.models.config_fields import (
    Json,
    UnknownModelError,
    count,
    count_or,
    eos_token_ids,
    flag,
    num_layers_of,
    number,
    object_of,
    positive,
    read_object,
    text_or_none,
    token_id,
)
from tilewise.models.hf_rope import read_gemma_rope, read_rope, write_rope
from tilewise.models.naming import not_a_checkpoint
from tilewise.models.text_part import text_part
from tilewise.models.unread_fields import ReadFields, must_be, tell_unread
from tilewise.nn.experts import ExpertsConfig
from tilewise.nn.layers import ACTIVATIONS
from tilewise.nn.mla import LatentConfig
from tilewise.nn.rope import RopeConfig, temperature

__all__ = ["ARCHITECTURES", "ModelConfig", "read_config"]

ARCHITECTURES = {
    "GPT2LMHeadModel": "gpt2",
    "Gemma3ForCausalLM": "gemma3_text",
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "DeepseekV2ForCausalLM": "deepseek_v2",
}
"""Supported class names and the model_type of each."""

_NOT_BUILT: dict[str, object] = {
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "per_layer_config": {},
    "pruned_heads": {},
    "rope_interleaved": False,
    "use_mrope": False,
}
"""Fields that matter to any decoder and are not built, and the value that asks for nothing."""

_GPT_OSS_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GPT_OSS_PLAIN = [
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
]
"""What openai/gpt-oss-20b says of itself: modules that are not MXFP4."""

_DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape and arithmetic of a decoder.

    Attributes:
        architecture: Hugging Face's class name, e.g. "LlamaForCausalLM".
        hidden_size, intermediate_size: the widths of the residual stream and of the feed-forward.
        head_dim: D, the channels of a head; num_q_heads * head_dim need not be hidden_size.
        max_position_embeddings: the longest sequence that the file names, in tokens; see
            `context_length`.
        windows: the number of keys of each layer that a query sees, its own included; None for no
            window.
        softmax_scales: the factor of q . k in each layer.
        rope: the rotary settings; None when the model learns its positions (GPT-2).
        local_rope: the rotary settings of layers with a window, where they differ (Gemma 3).
        attention_bias, o_bias, mlp_bias: True if the projections of q, k and v, the output
            projection, and the feed-forward have biases.
        qk_norm: True if each head of q and k is normalised before the rotation.
        latent: the sizes of latent attention (DeepSeek-V2), whose head_dim is a query's, Dn + Dr;
            None for ordinary keys and values.
        experts: the sizes of mixtures of experts (gpt-oss); None for one feed-forward block a
            layer.
        attention_sinks: True if every head has a learned logit in its softmax denominator.
        cached_heads: sizes (Hk, D, Dv) of each layer in the cache, key heads and the channels of
            a key and of a value; empty if they are num_kv_heads and head_dim in all layers.
        can_be_captured: False if a step looks at numbers on the host and can be no CUDA graph.
        is_native: False if the layers are modules of transformers; then only what the engine and
            the cache need of a model is here.
        logit_softcap: c of the softcap c tanh(logits / c); None for no softcap.
        eos_token_ids: the tokens each of which ends a text.
        dtype: the name of the torch dtype that the checkpoint was saved in.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    hidden_act: str
    windows: tuple[int | None, ...]
    softmax_scales: tuple[float, ...]
    rope: RopeConfig | None = None
    local_rope: RopeConfig | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None
    attention_sinks: bool = False
    logit_softcap: float | None = None
    cached_heads: tuple[tuple[int, int, int], ...] = ()
    is_native: bool = True
    can_be_captured: bool = True
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_q_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise CheckpointError(f"{name} must be a positive integer, got {value!r}")
        if self.num_q_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_q_heads must be a multiple of num_kv_heads {self.num_kv_heads}, "
                f"got {self.num_q_heads}"
            )
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise CheckpointError(f"hidden_act must be one of {known}, got {self.hidden_act!r}")
        if self.dtype not in _DTYPES:
            raise CheckpointError(f"dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")
        if not 0 <= self.norm_eps < math.inf:
            raise CheckpointError(f"norm_eps must be finite and at least 0, got {self.norm_eps}")
        cap = self.logit_softcap
        if cap is not None and not 0 < cap < math.inf:
            raise CheckpointError(f"logit_softcap must be positive and finite, got {cap}")
        for name in ("windows", "softmax_scales"):
            if len(getattr(self, name)) != self.num_layers:
                raise CheckpointError(
                    f"{name} must have one entry per layer ({self.num_layers}), "
                    f"got {len(getattr(self, name))}"
                )

    @property
    def context_length(self) -> int:
        """Tokens of the longest sequence: the file's positions, or more if rotary scaling extends
        them."""
        stretched = 0 if self.rope is None else self.rope.max_positions
        return max(self.max_position_embeddings, stretched)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Translate the contents of a Hugging Face config.json.

        Both spellings of the rotary settings are read: `rope_parameters` (transformers 5) and
        `rope_theta` with `rope_scaling` (before).

        Raises:
            CheckpointError: the architecture or a setting is not supported, or a field is missing.
        """
        return cls(**_read(config))

    def to_hf(self) -> dict[str, Any]:
        """Return a config.json that transformers, and `from_hf`, read as this model."""
        return _write(self)


# Configurations that quantisation tools write into files of their own.
_QUANTISED = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


def read_config(directory: str | Path) -> ModelConfig:
    """Read a checkpoint's config.json, and the further end tokens of generation_config.json.

    Raises:
        CheckpointError: the file is missing or no JSON object, or see `ModelConfig.from_hf`.
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise CheckpointError(not_a_checkpoint(directory))
    config = read_object(directory / "config.json")
    generation = directory / "generation_config.json"
    if generation.is_file():
        ends = (eos_token_ids(part) for part in (config, read_object(generation)))
        config["eos_token_id"] = list(dict.fromkeys(itertools.chain(*ends)))
    found = ModelConfig.from_hf(config)
    for name in _QUANTISED:
        if (directory / name).is_file():
            raise CheckpointError(f"checkpoint must be of float weights, got {name} beside them")
    return found


def _read(config: Json) -> dict[str, Any]:
    """Return the keyword arguments of `ModelConfig` for a config.json."""
    fields = ReadFields(text_part(as_causal(config)))
    architecture = _architecture(fields)
    is_packed = _is_packed(fields, architecture)
    for name, allowed in _NOT_BUILT.items():
        must_be(fields, name, allowed)
    others: dict[str, Callable[[Json, str], dict[str, Any]]] = {
        "GPT2LMHeadModel": _read_gpt2,
        "DeepseekV2ForCausalLM": _read_deepseek,
        "Gemma3ForCausalLM": _read_gemma3,
        "GptOssForCausalLM": partial(_read_gpt_oss, is_packed=is_packed),
    }
    reader = others.get(architecture, _read_llama)
    found = {
        "architecture": architecture,
        "vocab_size": count(fields, "vocab_size"),
        "bos_token_id": token_id(fields, "bos_token_id"),
        "eos_token_ids": eos_token_ids(fields),
        "dtype": (
            text_or_none(fields, "dtype") or text_or_none(fields, "torch_dtype") or "float32"
        ),
        **reader(fields, architecture),
    }
    _check_type(fields, architecture)
    tell_unread("config.json", fields.unread("config.json", architecture))
    return found


def _is_packed(config: Json, architecture: str) -> bool:
    """Return whether experts are MXFP4, as in gpt-oss; other quantised formats are refused."""
    fields = ReadFields(object_of(config, "quantization_config"))
    must_be(config, "compression_config")
    if not fields:
        return False
    method = fields.get("quant_method", "unknown")
    if (architecture, method) != ("GptOssForCausalLM", "mxfp4"):
        raise CheckpointError(f"quantization_config must be absent (float weights), got {method!r}")
    tell_unread("quantization_config of config.json", fields.unread("quantization_config"))
    return True


def _write(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a `ModelConfig`, the inverse of `_read`."""
    ends = config.eos_token_ids
    shared: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": ARCHITECTURES[config.architecture],
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(ends) if len(ends) > 1 else next(iter(ends), None),
        "dtype": config.dtype,
    }
    if config.rope is None:
        return shared | _write_gpt2(config)
    if config.latent is not None:
        return shared | _write_deepseek(config, config.rope, config.latent)
    if config.architecture == "Gemma3ForCausalLM":
        return shared | _write_gemma3(config, config.rope)
    if config.experts is not None:
        return shared | _write_gpt_oss(config, config.rope, config.experts)
    return shared | _write_llama(config, config.rope)


def _architecture(config: Json) -> str:
    names = config.get("architectures")
    names = [] if names is None else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"architectures must be a list of names, got {names!r}")
    if not names:
        by_type = {model_type: name for name, model_type in ARCHITECTURES.items()}
        model_type = text_or_none(config, "model_type")
        names = [by_type.get(model_type or "", model_type)]
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    known = ", ".join(ARCHITECTURES)
    raise UnknownModelError(f"architecture must be one of {known}, got {names[0]!r}")


def _check_type(config: Json, architecture: str) -> None:
    """Refuse a file whose `architectures` and `model_type` name different models."""
    model_type = text_or_none(config, "model_type")
    if model_type not in (None, ARCHITECTURES[architecture]):
        if model_type in ARCHITECTURES.values():
            raise CheckpointError(
                f"model_type must be {ARCHITECTURES[architecture]!r} for {architecture}, "
                f"got {model_type!r}"
            )
        tell_unread("config.json", [f"model_type {model_type}"])


def _read_llama(config: Json, architecture: str) -> dict[str, Any]:
    """Return the fields of Llama 2 and 3, Mistral, Qwen2 or Qwen3, which share one layout."""
    num_layers = num_layers_of(config, "num_hidden_layers")
    num_q_heads = count(config, "num_attention_heads")
    # Qwen3's configuration class defaults to 128; the others divide the width by the heads.
    is_qwen3 = architecture == "Qwen3ForCausalLM"
    head_dim = 128 if is_qwen3 else count(config, "hidden_size") // num_q_heads
    head_dim = count_or(config, "head_dim", head_dim)
    if head_dim < 1:
        raise CheckpointError(f"num_attention_heads must be at most hidden_size, got {num_q_heads}")
    positions = count(config, "max_position_embeddings")
    has_bias = flag(config, "attention_bias", False)
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    return {
        "hidden_size": count(config, "hidden_size"),
        "intermediate_size": count(config, "intermediate_size"),
        "num_layers": num_layers,
        "num_q_heads": num_q_heads,
        "num_kv_heads": count_or(config, "num_key_value_heads", num_q_heads),
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "norm_eps": number(config, "rms_norm_eps", 1e-6),
        "hidden_act": config.get("hidden_act", "silu"),
        "windows": _windows(config, architecture, num_layers),
        "softmax_scales": (head_dim**-0.5,) * num_layers,
        "rope": read_rope(config, head_dim, positions),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", False),
        "attention_bias": is_qwen2 or has_bias,
        "o_bias": has_bias and not is_qwen2,
        "mlp_bias": flag(config, "mlp_bias", False),
        "qk_norm": is_qwen3,
    }


def _windows(config: Json, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Return the windows of the layers: Mistral and Qwen may have them, Llama never."""
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    # An absent field means 4,096, as in the configuration classes; null means no window.
    is_null = config.get("sliding_window", 4096) is None
    window = None if is_null else count_or(config, "sliding_window", 4096)
    types = config.get("layer_types")
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers if types is None else _windows_of_types(types, window)
    first = number(config, "max_window_layers", 28)  # the default of the configuration class
    window = window if flag(config, "use_sliding_window", False) else None
    if types is None:
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return _windows_of_types(types, window)


def _windows_of_types(types: Any, window: int | None) -> tuple[int | None, ...]:
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list):
        raise CheckpointError(f"layer_types must be a list of names, got {types!r}")
    unknown = [name for name in types if not isinstance(name, str) or name not in known]
    if unknown:
        raise CheckpointError(f"layer_types must be among {', '.join(known)}, got {unknown[0]!r}")
    if window is None and "sliding_attention" in types:
        raise CheckpointError(
            "sliding_window must be given (and use_sliding_window be true) where layer_types has "
            "sliding_attention, got none"
        )
    return tuple(known[name] for name in types)


def _read_deepseek(config: Json, architecture: str) -> dict[str, Any]:
    """Return the fields of DeepSeek-V2 without mixtures of experts."""
    num_layers = num_layers_of(config, "num_hidden_layers")
    num_heads = count(config, "num_attention_heads")
    num_experts = config.get("n_routed_experts", 64)  # the default of the configuration class
    first = config.get("first_k_dense_replace", 0)
    if num_experts is not None and not (type(first) is int and first >= num_layers):
        raise UnknownModelError(
            f"first_k_dense_replace must be at least the {num_layers} layers (or n_routed_experts "
            f"null), as mixtures of experts are not supported, got {first!r} with "
            f"{num_experts} experts"
        )
    if count_or(config, "num_key_value_heads", num_heads) != num_heads:
        raise CheckpointError(
            f"num_key_value_heads must be num_attention_heads {num_heads} with latent attention, "
            f"got {config['num_key_value_heads']}"
        )
    # null means no query latent, an absent field the default
    q_rank = config.get("q_lora_rank", 1536)
    latent = LatentConfig(
        kv_rank=count(config, "kv_lora_rank"),
        nope_dim=count(config, "qk_nope_head_dim"),
        rope_dim=count(config, "qk_rope_head_dim"),
        v_head_dim=count(config, "v_head_dim"),
        q_rank=None if q_rank is None else count({"q_lora_rank": q_rank}, "q_lora_rank"),
    )
    head_dim = latent.nope_dim + latent.rope_dim
    positions = count(config, "max_position_embeddings")
    rope = read_rope(config, latent.rope_dim, positions)
    scale = head_dim**-0.5
    if rope.rope_type != "default" and rope.mscale_all_dim:
        # The scaling of cos and sin does not reach the channels that are not rotated.
        scale *= temperature(rope.factor, rope.mscale_all_dim) ** 2
    has_bias = flag(config, "attention_bias", False)
    return {
        "hidden_size": count(config, "hidden_size"),
        "intermediate_size": count(config, "intermediate_size"),
        "num_layers": num_layers,
        "num_q_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "norm_eps": number(config, "rms_norm_eps", 1e-6),
        "hidden_act": config.get("hidden_act", "silu"),
        "windows": (None,) * num_layers,
        "softmax_scales": (scale,) * num_layers,
        "rope": rope,
        "tie_word_embeddings": flag(config, "tie_word_embeddings", False),
        "attention_bias": has_bias,
        "o_bias": has_bias,
        "mlp_bias": flag(config, "mlp_bias", False),
        "latent": latent,
    }


def _read_gemma3(config: Json, architecture: str) -> dict[str, Any]:
    """Return the fields of Gemma 3 for text; absent ones default as in its configuration class."""
    num_layers = num_layers_of(config, "num_hidden_layers")
    head_dim = count_or(config, "head_dim", 256)
    if flag(config, "use_bidirectional_attention", False):
        raise CheckpointError("use_bidirectional_attention must be false, got true")
    types = config.get("layer_types")
    if types is None:
        every = count_or(config, "sliding_window_pattern", 6)
        types = [
            "full_attention" if (layer + 1) % every == 0 else "sliding_attention"
            for layer in range(num_layers)
        ]
    cap = number(config, "final_logit_softcapping", 0.0)
    has_bias = flag(config, "attention_bias", False)
    scale = positive(config, "query_pre_attn_scalar", 256) ** -0.5
    positions = count_or(config, "max_position_embeddings", 131_072)
    must_be(config, "attn_logit_softcapping")
    return {
        "hidden_size": count(config, "hidden_size"),
        "intermediate_size": count(config, "intermediate_size"),
        "num_layers": num_layers,
        "num_q_heads": count(config, "num_attention_heads"),
        "num_kv_heads": count_or(config, "num_key_value_heads", 4),
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "norm_eps": number(config, "rms_norm_eps", 1e-6),
        "hidden_act": text_or_none(config, "hidden_activation") or "gelu_pytorch_tanh",
        "windows": _windows_of_types(types, count_or(config, "sliding_window", 4096)),
        "softmax_scales": (scale,) * num_layers,
        "rope": read_gemma_rope(
            config, head_dim, positions, "full_attention", "rope_theta", 1_000_000.0
        ),
        "local_rope": read_gemma_rope(
            config, head_dim, positions, "sliding_attention", "rope_local_base_freq", 10_000.0
        ),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", True),
        "attention_bias": has_bias,
        "o_bias": has_bias,
        "logit_softcap": cap or None,
    }


def _read_gpt_oss(config: Json, architecture: str, *, is_packed: bool) -> dict[str, Any]:
    """Return the fields of gpt-oss; absent ones default as in its configuration class."""
    num_layers = num_layers_of(config, "num_hidden_layers")
    head_dim = count_or(config, "head_dim", 64)
    types = config.get("layer_types")
    if types is None:
        types = [
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)
        ]
    positions = count_or(config, "max_position_embeddings", 131_072)
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act must be silu, got {config['hidden_act']!r}")
    num_experts = count_or(config, "num_local_experts", 128)
    num_active = count_or(config, "num_experts_per_tok", 4)
    if num_active > num_experts:
        raise CheckpointError(
            f"num_experts_per_tok must be at most the {num_experts} experts, got {num_active}"
        )
    has_bias = flag(config, "attention_bias", True)
    return {
        "hidden_size": count(config, "hidden_size"),
        "intermediate_size": count(config, "intermediate_size"),
        "num_layers": num_layers,
        "num_q_heads": count(config, "num_attention_heads"),
        "num_kv_heads": count_or(config, "num_key_value_heads", 8),
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "norm_eps": number(config, "rms_norm_eps", 1e-5),
        "hidden_act": "silu",
        "windows": _windows_of_types(types, count_or(config, "sliding_window", 128)),
        "softmax_scales": (head_dim**-0.5,) * num_layers,
        "rope": read_rope(config, head_dim, positions, theta=150_000.0, absent=_GPT_OSS_ROPE),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", False),
        "attention_bias": has_bias,
        "o_bias": has_bias,
        "experts": ExpertsConfig(
            num_experts=num_experts,
            num_active=num_active,
            intermediate_size=count(config, "intermediate_size"),
            router_bias=True,
            activation="clamped",
            has_bias=True,
            is_interleaved=True,
            is_packed=is_packed,
            limit=float(number(config, "swiglu_limit", 7.0)),
        ),
        "attention_sinks": True,
    }


def _read_gpt2(config: Json, architecture: str) -> dict[str, Any]:
    width, num_heads = count(config, "n_embd"), count(config, "n_head")
    num_layers = num_layers_of(config, "n_layer")
    if width % num_heads:
        raise CheckpointError(f"n_embd must be a multiple of n_head {num_heads}, got {width}")
    head_dim = width // num_heads
    scale = head_dim**-0.5 if flag(config, "scale_attn_weights", True) else 1.0
    by_layer = flag(config, "scale_attn_by_inverse_layer_idx", False)
    return {
        "hidden_size": width,
        "intermediate_size": count_or(config, "n_inner", 4 * width),
        "num_layers": num_layers,
        "num_q_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": count(config, "n_positions"),
        "norm_eps": number(config, "layer_norm_epsilon", 1e-5),
        "hidden_act": config.get("activation_function", "gelu_new"),
        "windows": (None,) * num_layers,
        "softmax_scales": tuple(
            scale / (layer + 1) if by_layer else scale for layer in range(num_layers)
        ),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", True),
        "attention_bias": True,
        "o_bias": True,
        "mlp_bias": True,
    }


def _write_sizes(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that all decoders with RMS norms have."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
    }


def _write_rope(config: ModelConfig, rope: RopeConfig) -> dict[str, Any]:
    head_dim = config.head_dim if config.latent is None else config.latent.rope_dim
    return write_rope(rope, head_dim, config.max_position_embeddings)


def _write_llama(config: ModelConfig, rope: RopeConfig) -> dict[str, Any]:
    windows = [window for window in config.windows if window is not None]
    fields: dict[str, Any] = {
        **_write_sizes(config),
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rope_parameters": _write_rope(config, rope),
    }
    if config.architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        fields["attention_bias"] = config.attention_bias
    if config.architecture == "LlamaForCausalLM":
        fields["mlp_bias"] = config.mlp_bias
    if config.architecture == "MistralForCausalLM":
        fields["sliding_window"] = windows[0] if windows else None
    if config.architecture.startswith("Qwen"):
        fields["use_sliding_window"] = bool(windows)
        fields["sliding_window"] = windows[0] if windows else None
        fields["layer_types"] = [
            "full_attention" if window is None else "sliding_attention" for window in config.windows
        ]
    return fields


def _write_deepseek(config: ModelConfig, rope: RopeConfig, latent: LatentConfig) -> dict[str, Any]:
    return {
        **_write_sizes(config),
        "hidden_act": config.hidden_act,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "first_k_dense_replace": config.num_layers,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.v_head_dim,
        "rope_parameters": _write_rope(config, rope),
    }


def _write_gemma3(config: ModelConfig, rope: RopeConfig) -> dict[str, Any]:
    windows = [window for window in config.windows if window is not None]
    return {
        **_write_sizes(config),
        "head_dim": config.head_dim,
        "hidden_activation": config.hidden_act,
        "attention_bias": config.attention_bias,
        "query_pre_attn_scalar": round(config.softmax_scales[0] ** -2),
        "final_logit_softcapping": config.logit_softcap,
        "sliding_window": windows[0] if windows else config.max_position_embeddings,
        "layer_types": [
            "full_attention" if window is None else "sliding_attention" for window in config.windows
        ],
        "rope_parameters": {
            "full_attention": _write_rope(config, rope),
            "sliding_attention": _write_rope(config, config.local_rope or rope),
        },
    }


def _write_gpt_oss(config: ModelConfig, rope: RopeConfig, experts: ExpertsConfig) -> dict[str, Any]:
    windows = [window for window in config.windows if window is not None]
    fields: dict[str, Any] = {
        **_write_sizes(config),
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "attention_bias": config.attention_bias,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_active,
        "swiglu_limit": experts.limit,
        "sliding_window": windows[0] if windows else config.max_position_embeddings,
        "layer_types": [
            "full_attention" if window is None else "sliding_attention" for window in config.windows
        ],
        "rope_parameters": _write_rope(config, rope),
    }
    if experts.is_packed:
        fields["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": _GPT_OSS_PLAIN,
        }
    return fields


def _write_gpt2(config: ModelConfig) -> dict[str, Any]:
    scales = config.softmax_scales
    return {
        "n_embd": config.hidden_size,
        "n_inner": config.intermediate_size,
        "n_layer": config.num_layers,
        "n_head": config.num_q_heads,
        "n_positions": config.max_position_embeddings,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": config.hidden_act,
        "scale_attn_weights": scales[0] == config.head_dim**-0.5,
        "scale_attn_by_inverse_layer_idx": scales[-1] != scales[0],
    }
