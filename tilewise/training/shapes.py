"""Named shapes: configurations of the models that papers and peers train."""

from __future__ import annotations

from typing import Any

from tilewise.models import ModelConfig
from tilewise.training.encoder import BertShape

__all__ = ["BERT_SHAPES", "DECODER_SHAPES", "decoder_config"]

Json = dict[str, Any]


def _gpt2(layers: int, heads: int, size: int) -> Json:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 50_257,
        "n_positions": 1024,
        "n_embd": size,
        "n_layer": layers,
        "n_head": heads,
    }


def _llama(
    layers: int, heads: int, kv_heads: int, size: int, intermediate: int, context: int
) -> Json:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 50_257,
        "hidden_size": size,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    }


DECODER_SHAPES: dict[str, Json] = {
    # Radford et al., 2019; "tiny" is for a CPU and for tests.
    "gpt2-tiny": _gpt2(2, 2, 64) | {"vocab_size": 512},
    "gpt2-small": _gpt2(12, 12, 768),
    "gpt2-medium": _gpt2(24, 16, 1024),
    "gpt2-large": _gpt2(36, 20, 1280),
    "llama-tiny": _llama(2, 2, 1, 64, 128, 1024) | {"vocab_size": 512},
    "llama-124m": _llama(12, 12, 4, 768, 2048, 1024),
    # Llama 3.2 1B (Meta, 2024)
    "llama-1b": _llama(16, 32, 8, 2048, 8192, 8192)
    | {"vocab_size": 128_256, "head_dim": 64, "rope_theta": 500_000.0},
}

BERT_SHAPES: dict[str, BertShape] = {
    # Devlin et al., 2019
    "bert-tiny": BertShape(512, 64, 2, 2, 128),
    "bert-base": BertShape(),
    "bert-large": BertShape(30_522, 1024, 24, 16, 4096),
}


def decoder_config(
    shape: str, *, words: int | None = None, context: int | None = None, end: int | None = None
) -> ModelConfig:
    """Return the configuration of a decoder of `DECODER_SHAPES`.

    Args:
        words: the size of the vocabulary; None is the shape's own.
        context: the tokens of the longest document; None is the shape's own.
        end: the id of the token that ends a text and also begins one; None for none.

    Raises:
        ValueError: there is no such shape.
    """
    if shape not in DECODER_SHAPES:
        raise ValueError(f"shape must be one of {', '.join(DECODER_SHAPES)}, got {shape!r}")
    config = DECODER_SHAPES[shape] | {"bos_token_id": end, "eos_token_id": end}
    if words is not None:
        config["vocab_size"] = words
    if context is not None:
        is_gpt2 = "n_positions" in config
        config["n_positions" if is_gpt2 else "max_position_embeddings"] = context
    return ModelConfig.from_hf(config)
