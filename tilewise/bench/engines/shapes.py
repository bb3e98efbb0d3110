"""The models of the engine's benchmark: their configurations, and the sizes that decide their cost.

A named shape has Hugging Face's public configuration and random weights; "story" is the packaged
model, anything else a checkpoint directory. No torch: peers run in environments without it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tilewise.cost.model import Sizes, read_sizes

__all__ = ["SHAPES", "Sizes", "model_directory", "read_sizes"]

_SHARED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}
_LLAMA: dict[str, Any] = _SHARED | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
}
_LLAMA_3: dict[str, Any] = _LLAMA | {
    "vocab_size": 128_256,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "rope_theta": 500_000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}
_LLAMA_32_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _SHARED
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "max_window_layers": 28,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
    },
    "llama-3-8b": _LLAMA_3
    | {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "llama-3-70b": _LLAMA_3
    | {
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    # Llama 3.2's, of 1.24 B parameters.
    "llama-1b": _LLAMA_3
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "rope_scaling": _LLAMA_32_ROPE | {"rope_theta": 500_000.0},
        "rope_parameters": _LLAMA_32_ROPE | {"rope_theta": 500_000.0},
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "max_position_embeddings": 32_768,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "dtype": "bfloat16",
    },
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        "hidden_act": "silu",
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
        },
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    # For a CPU; no published model's. 0.39 B parameters, all of which a token reads.
    "llama-0.4b": _LLAMA
    | {
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 3840,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "rope_theta": 10_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
"""Name to config.json. Both spellings of the rotary settings are there, for old and new readers."""

_STORY = Path(__file__).parents[2] / "assets" / "story"


def model_directory(name: str, folder: Path) -> tuple[Path, bool]:
    """Return the directory that `name` stands for, and whether its weights are random.

    Args:
        name: one of SHAPES, whose config.json is written below `folder`, "story", or a path.

    Raises:
        ValueError: `name` is none of these.
    """
    if name in SHAPES:
        directory = folder / name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(SHAPES[name], indent=1) + "\n")
        return directory, True
    if name == "story" and not Path(name).is_dir():
        path = _STORY
    else:
        from tilewise.models.hub import checkpoint_folder  # with torch, which simulations lack

        path = checkpoint_folder(name)
    if not (path / "config.json").is_file():
        known = ", ".join((*SHAPES, "story"))
        raise ValueError(f"shape must be {known} or a directory with config.json, got {name!r}")
    return path, False
