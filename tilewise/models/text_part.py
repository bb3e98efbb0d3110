"""The text part of a checkpoint that reads pictures or sound: a decoder that is known here."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from tilewise.models.config_fields import Json, object_of

__all__ = ["renamed", "text_architecture", "text_part"]

# The model_type of a text part, and the class of a model that is such a part alone.
_TEXT_PARTS = {
    "deepseek_v3": "DeepseekV3ForCausalLM",  # Kimi K2.5 and 2.6
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",  # whose older files hold the fields of the text at the top
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3VLMoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
# What a file says of the whole model, and its text part may leave out.
_SHARED = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
# Where the tensors of the text part lie, and where those of a model that is the part alone.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
# Older files name the text part's tensors as a model of its own does; so are those of heads named.
_PLAIN = ("lm_head.", "model.", "mtp.")
_BESIDE = (
    "model.vision",
    "model.visual",
    "model.multi_modal",
    "model.mm_",
    "model.audio",
    "model.embed_vision",
    "model.embed_audio",
)
_OTHERS = ("audio_config", "vision_config")


def text_architecture(config: Json) -> str | None:
    """Return the class that runs the text part of a checkpoint with other inputs.

    None for a checkpoint of text alone, or with a text part that is not known.
    """
    names = config.get("architectures")
    whole = names[0] if isinstance(names, list) and names else None
    if not isinstance(whole, str) or not whole.endswith("ForConditionalGeneration"):
        return None
    kind = _text_of(config).get("model_type", config.get("model_type"))
    return _TEXT_PARTS.get(kind) if isinstance(kind, str) else None


def _text_of(config: Json) -> Json:
    return object_of(config, "text_config") if "text_config" in config else config


def text_part(config: Json) -> Json:
    """Return the config.json of a checkpoint's text part, and warn that the rest is left out.

    A checkpoint of text alone gives its own config.json. Fields that place a picture's rows are
    dropped: rows of text have one position in all of the sections of such rotary embeddings, which
    is the ordinary rotation.
    """
    architecture = text_architecture(config)
    if architecture is None:
        return config
    whole, text = config["architectures"][0], _text_of(config)
    part: dict[str, Any] = {name: config[name] for name in _SHARED if config.get(name) is not None}
    part |= {name: value for name, value in text.items() if name not in _OTHERS}
    if config.get("tie_word_embeddings") is True:  # a head of its own is found by its tensor
        part["tie_word_embeddings"] = True
    if config.get("eos_token_id") is not None:  # with those that generation_config.json adds
        part["eos_token_id"] = config["eos_token_id"]
    part["architectures"] = [architecture]
    part.pop("model_type", None)
    for name in [name for name in part if name.startswith(("image_", "video_", "vision_"))]:
        del part[name]
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(part.get(name), Mapping):
            part[name] = _in_one_section(part[name])
    left_out = ", ".join(name for name in _OTHERS if name in config) or "other inputs"
    warnings.warn(
        f"{whole} runs as {architecture}, its text part: requests hold text alone, and what "
        f"{left_out} describes is left out",
        stacklevel=4,
    )
    return part


def _in_one_section(rope: Json) -> Json:
    kept = {
        name: x for name, x in rope.items() if name not in ("mrope_section", "mrope_interleaved")
    }
    for name in ("type", "rope_type"):
        if kept.get(name) == "mrope":
            kept[name] = "default"
    return kept


def renamed(names: Iterable[str]) -> dict[str, str]:
    """Return a dict from names in a model of text alone to the names of a file's tensors.

    Names of tensors of other parts, such as those for images, are left out.
    """
    found = {}
    for name in names:
        for old, new in _PREFIXES:
            if name.startswith(old):
                found[new + name.removeprefix(old)] = name
                break
        else:
            if name.startswith(_PLAIN) and not name.startswith(_BESIDE):
                found[name] = name
    return found
