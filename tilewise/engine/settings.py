"""From what a user says (a name, "auto", nothing) to a directory, a device, a dtype, a length."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tilewise.cache.spec import CacheSpec, KVSpec, LatentSpec
from tilewise.engine.tokenizer import Tokenizer
from tilewise.errors import is_integer, is_number, shown
from tilewise.models.config import ModelConfig
from tilewise.models.naming import PACKAGED

__all__ = [
    "DEFAULT_BATCHED_TOKENS",
    "FAIR_PROMPT_TOKENS",
    "cache_dtype",
    "cache_spec",
    "check_groups",
    "check_settings",
    "compute_device",
    "context_length",
    "end_tokens",
    "model_directory",
    "packaged_model",
    "weights_are_int8",
]

# Tokens of one step when nothing is said: enough to fill the device's matrix products with a
# prompt, and few enough that running sequences do not wait long for their next token.
DEFAULT_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
# Tokens of prompts that a step admits under the policy "fair" before it admits no other request. On
# a CPU prompts take time in proportion to their tokens, so a flood of them loses little by it, and
# a newcomer waits for 12 ms in place of 150. On a GPU steps are short.
FAIR_PROMPT_TOKENS = {"cpu": 64, "cuda": None}
_CACHE_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
}

# name: (the least, whether it may be None)
_INTEGERS: dict[str, tuple[int | None, bool]] = {
    "block_size": (1, False),
    "max_num_seqs": (1, False),
    "seed": (None, False),
    "tensor_parallel_size": (None, False),
    "num_blocks": (1, True),
    "max_model_len": (None, True),
    "max_num_batched_tokens": (1, True),
    "long_prefill_token_threshold": (1, True),
    "max_waiting_requests": (None, True),
    "max_waiting_tokens": (None, True),
}
# name: whether it may be None
_FLAGS = {
    "enable_prefix_caching": False,
    "random_weights": False,
    "batch_invariant": True,
    "use_progress": True,
}


def packaged_model() -> Path:
    """Return the directory of the small story model that comes with the package."""
    return Path(__file__).parents[1] / "assets" / PACKAGED


def model_directory(model: str | Path) -> Path:
    """Return the checkpoint directory that a user means: a path, or "story".

    Raises:
        TypeError: it is neither a str nor a Path.
        ValueError: it is empty, which would be the current directory.
    """
    if not isinstance(model, str | Path):
        raise TypeError(f"model must be a directory or {PACKAGED!r}, got {model!r}")
    if not str(model):
        raise ValueError(f"model must be a directory or {PACKAGED!r}, got ''")
    path, home = Path(model), Path(os.path.expanduser(model))
    if home.is_dir() and not path.exists():
        return home  # of a file of options, or after a "=": there no shell reads ~
    return packaged_model() if str(model) == PACKAGED and not path.is_dir() else path


def cache_spec(
    config: ModelConfig, block_size: int, dtype: torch.dtype, max_model_len: int | None = None
) -> CacheSpec:
    """Return the cache that a model needs: a group of layers for each window.

    Args:
        max_model_len: tokens of a sequence; a window that none outgrows is none. None is the
            model's own limit.
    """
    kind: KVSpec | LatentSpec
    if config.latent is not None:
        kind = LatentSpec(config.latent.kv_rank, config.latent.rope_dim, dtype)
    else:
        kind = KVSpec(config.num_kv_heads, config.head_dim, config.head_dim, dtype)
    longest = max_model_len or config.context_length
    windows = [None if w is None or w >= longest else w for w in config.windows]
    if config.cached_heads:
        kinds = [KVSpec(*heads, dtype) for heads in config.cached_heads]
        return CacheSpec.of_layers(block_size, kinds, windows)
    return CacheSpec.of_windows(block_size, kind, windows)


def check_groups(config: ModelConfig, speculative: object) -> None:
    """Refuse what is not built for layers with windows, or for latents.

    Raises:
        ValueError: guesses are trees, whose mask attention with a window or over latents does not
            take.
    """
    kind = "latents" if config.latent is not None else "windows"
    if getattr(speculative, "num_branches", 1) > 1 and (kind == "latents" or any(config.windows)):
        raise ValueError(f"num_branches must be 1 for a model with {kind}, got {speculative}")


def check_settings(given: Mapping[str, Any]) -> None:
    """Refuse what can be no value of an argument of `LLM`, before a model is read.

    Raises:
        TypeError: one is of another type.
        ValueError: a count is below 1, or a number is not finite.
    """
    for name, (least, may_be_none) in _INTEGERS.items():
        value = given[name]
        if value is None and may_be_none:
            continue
        if not is_integer(value):
            kind = "an integer or None" if may_be_none else "an integer"
            raise TypeError(f"{name} must be {kind}, got {shown(value)}")
        if least is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {shown(value)}")
    for name, may_be_none in _FLAGS.items():
        value = given[name]
        if not isinstance(value, bool) and not (value is None and may_be_none):
            kind = "True, False or None" if may_be_none else "True or False"
            raise TypeError(f"{name} must be {kind}, got {shown(value)}")
    for name in ("gpu_memory_utilization", "swap_space_gib", "offload_gib"):
        value = given[name]
        if not is_number(value):
            raise TypeError(f"{name} must be a number, got {shown(value)}")
        if not -sys.float_info.max <= value <= sys.float_info.max:
            raise ValueError(f"{name} must be finite, got {shown(value)}")
    share = given["gpu_memory_utilization"]
    if not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {shown(share)}")
    for name in ("scheduling_policy", "preemption", "victim", "graphs", "weight_dtype"):
        if not isinstance(given[name], str):
            raise TypeError(f"{name} must be a str, got {shown(given[name])}")
    if not isinstance(given["offload_dir"], str | Path | None):
        raise TypeError(
            f"offload_dir must be a directory or None, got {shown(given['offload_dir'])}"
        )
    _check_weights(given["user_weights"])


def _check_weights(weights: object) -> None:
    if weights is None:
        return
    if not isinstance(weights, Mapping):
        raise TypeError(f"user_weights must be a dict or None, got {shown(weights)}")
    for user, weight in weights.items():
        if not isinstance(user, str):
            raise TypeError(f"user_weights must have users' names as keys, got {shown(user)}")
        if not is_number(weight):
            raise TypeError(f"user_weights must have numbers as values, got {shown(weight)}")
        if not 0 < weight <= sys.float_info.max:
            raise ValueError(
                f"user_weights must be above 0 and finite, got {shown(weight)} for {shown(user)}"
            )


def compute_device(device: str | torch.device) -> torch.device:
    """Return the device that a user means: a name, or "auto" for a GPU if there is one.

    Raises:
        ValueError: it is neither a CPU nor a CUDA device, or torch sees no such GPU.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be cpu or cuda, got {device!r}") from None
    if found.type not in DEFAULT_BATCHED_TOKENS:
        raise ValueError(f"device must be cpu or cuda, got {str(device)!r}")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device must be one of the {torch.cuda.device_count()} GPUs that torch sees, "
            f"got {str(device)!r}"
        )
    return found


def cache_dtype(name: str | torch.dtype, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the cache: a name, or "auto" for that of the parameters.

    Raises:
        ValueError: it is none of those offered.
    """
    if name == "auto" or name == model_dtype:
        return model_dtype
    for offered, dtype in _CACHE_DTYPES.items():
        if name in (offered, dtype):
            return dtype
    raise ValueError(f"kv_cache_dtype must be auto, {', '.join(_CACHE_DTYPES)}, got {name!r}")


def weights_are_int8(name: str, device: torch.device) -> bool:
    """Whether weights are held as int8: what LLM's weight_dtype says.

    Raises:
        ValueError: it is neither "auto" nor "int8", or int8 on a GPU.
    """
    if name not in ("auto", "int8"):
        raise ValueError(f"weight_dtype must be auto or int8, got {name!r}")
    if name == "int8" and device.type != "cpu":
        raise ValueError(
            "weight_dtype must be auto on a GPU: products with int8 weights are built for a CPU "
            f"only, got {name!r} on {device}"
        )
    return name == "int8"


def end_tokens(config: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the tokens that end a text: the model's, and those that its tokenizer names.

    A tokenizer's files may declare tokens beyond the vocabulary, which no model draws.
    """
    named = () if tokenizer is None else tokenizer.end_ids
    ends = dict.fromkeys((*config.eos_token_ids, *named))
    return tuple(i for i in ends if 0 <= i < config.vocab_size)


def context_length(wanted: int | None, config: ModelConfig) -> int:
    """Return max_model_len: what is wanted, or all positions that the model has.

    Raises:
        ValueError: the model has fewer, or it is below 2.
    """
    longest = config.context_length
    if wanted is None:
        return longest
    if not 2 <= wanted <= longest:
        raise ValueError(
            f"max_model_len must be in 2 ... {longest} (the model's positions), got {wanted}"
        )
    return wanted
