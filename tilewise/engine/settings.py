"""The settings of an engine: a user's values ("auto", a name, none) made a folder, device or
length."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tilewise.cache.spec import FOUR_BITS, CacheSpec, KVSpec, LatentSpec
from tilewise.engine.config import LEAST_MAX_RANK, EngineConfig
from tilewise.engine.tokenizer import Tokenizer
from tilewise.models.config import ModelConfig
from tilewise.models.encoder import EncoderShape
from tilewise.models.hub import checkpoint_folder
from tilewise.models.naming import PACKAGED

__all__ = [
    "DEFAULT_BATCHED_TOKENS",
    "FAIR_PROMPT_TOKENS",
    "ResolvedConfig",
    "cache_dtype",
    "cache_spec",
    "check_groups",
    "check_weights",
    "compute_device",
    "context_length",
    "device_of",
    "end_tokens",
    "is_invariant",
    "model_directory",
    "of_plain",
    "packaged_model",
    "plain",
    "resolve",
    "runs_graphs",
    "spec_of",
]

# Tokens of one step when nothing is said: enough to fill the device's matrix products with a
# prompt, and few enough that running sequences do not wait long for their next token.
DEFAULT_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
# Tokens of prompts that a step admits under the policy "fair" before it admits no other request. On
# a CPU prompts take time in proportion to their tokens, so a flood of them loses little by it, and
# a newcomer waits for 12 ms in place of 150. On a GPU steps are short.
FAIR_PROMPT_TOKENS = {"cpu": 64, "cuda": None}
_TOLD_BY_NAME = (torch.device, torch.dtype, Path)
_CACHE_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int4": FOUR_BITS,
}


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """An `EngineConfig` in which a device and a model have decided what was left to them.

    Attributes:
        device: the device that computes.
        graphs: a mode of `config.GRAPHS`; "off" on a CPU.
        dtype: the dtype of the parameters.
        kv_cache_dtype: the dtype of the cache.
        max_num_batched_tokens: tokens of one step.
        max_model_len: tokens of a sequence, prompt and generated text together.
        max_lora_rank: the largest rank of an adapter.
        batch_invariant: True where a request's bits depend on no other request.

    The others are those of `EngineConfig`.
    """

    device: torch.device
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    max_num_batched_tokens: int
    max_model_len: int
    max_lora_rank: int
    batch_invariant: bool

    @property
    def has_graphs(self) -> bool:
        """Whether steps are CUDA graphs whose inputs stay on the device: graphs are on, without
        speculation."""
        return self.graphs != "off" and self.speculative is None

    @property
    def has_verifying_graphs(self) -> bool:
        """Whether guesses are verified by CUDA graphs: graphs are on, with speculation."""
        return self.graphs != "off" and self.speculative is not None

    @property
    def is_int8(self) -> bool:
        """Whether weights are held in 8 bits: weight_dtype is "int8"."""
        return self.weight_dtype == "int8"

    @property
    def max_prompt_run(self) -> int:
        """The largest number of tokens of one prompt in one step."""
        most = self.max_num_batched_tokens
        return min(self.long_prefill_token_threshold or most, most, self.max_model_len)


def runs_graphs(config: EngineConfig, device: torch.device) -> bool:
    """Whether steps are CUDA graphs: the device is a GPU, and the config's graphs are not "off"."""
    return device.type == "cuda" and config.graphs != "off"


def is_invariant(config: EngineConfig, device: torch.device) -> bool:
    """Return whether a request's bits must not depend on other requests: as configured, or by
    default only on a CPU."""
    return device.type == "cpu" if config.batch_invariant is None else config.batch_invariant


def plain(config: ResolvedConfig) -> dict[str, Any]:
    """Return the fields of a config for another process, with devices, dtypes and paths as texts.

    `of_plain` makes the config again.
    """
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    return {
        name: str(value).removeprefix("torch.") if isinstance(value, _TOLD_BY_NAME) else value
        for name, value in given.items()
    }


def of_plain(told: Mapping[str, Any]) -> ResolvedConfig:
    """Return the config whose fields `plain` has returned in another process."""
    dtypes = {name: getattr(torch, told[name]) for name in ("dtype", "kv_cache_dtype")}
    return ResolvedConfig(**{**told, **dtypes, "device": torch.device(told["device"])})


def resolve(
    config: EngineConfig,
    device: torch.device,
    model: ModelConfig | EncoderShape,
    dtype: torch.dtype,
) -> ResolvedConfig:
    """Return a config in which nothing is left to decide but the number of blocks.

    Args:
        config: the config as the caller gave it.
        device: the device that computes.
        model: the configuration of the model.
        dtype: the dtype of its parameters.

    Raises:
        ValueError: the model has fewer positions or not this cache, or an option does not go with a
            model of transformers, bits that depend on the batch, or several processes.
    """
    if config.batch_invariant and not model.is_native:
        raise ValueError(
            "batch_invariant must be False for a model that runs through transformers, got True"
        )
    if config.audit and not (is_invariant(config, device) and model.is_native):
        raise ValueError(
            "audit must be 0 where bits depend on other requests (batch_invariant), got "
            f"{config.audit}"
        )
    if config.canary and config.tensor_parallel_size > 1:
        raise ValueError(
            "canary must be 0 with tensor_parallel_size above 1, as others hold the blocks, got "
            f"{config.canary}"
        )
    most = config.max_num_batched_tokens
    if most is None:
        most = max(DEFAULT_BATCHED_TOKENS[device.type], config.max_num_seqs)
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    decided = {
        "device": device,
        "dtype": dtype,
        "graphs": config.graphs if model.can_be_captured and runs_graphs(config, device) else "off",
        "kv_cache_dtype": cache_dtype(config.kv_cache_dtype, dtype),
        "max_num_batched_tokens": most,
        "max_model_len": context_length(config.max_model_len, model),
        "max_lora_rank": config.max_lora_rank or LEAST_MAX_RANK,
        "batch_invariant": is_invariant(config, device) and model.is_native,
    }
    return ResolvedConfig(**given | decided)


def packaged_model() -> Path:
    """Return the directory of the small story model that comes with the package."""
    return Path(__file__).parents[1] / "assets" / PACKAGED


def model_directory(model: object) -> Path:
    """Return the checkpoint directory that a user means: a path, a name on the hub, or "story".

    Raises:
        TypeError: the model is neither a str nor a Path.
        ValueError: the model is empty, which would be the current directory.
        CheckpointError: a name on the hub has no folder here and could not be downloaded.
    """
    if not isinstance(model, str | Path):
        raise TypeError(f"model must be a directory, a hub name or {PACKAGED!r}, got {model!r}")
    if not str(model):
        raise ValueError(f"model must be a directory, a hub name or {PACKAGED!r}, got ''")
    path, home = Path(model), Path(os.path.expanduser(model))
    if home.is_dir() and not path.exists():
        return home  # of a file of options, or after a "=": there no shell reads ~
    if str(model) == PACKAGED and not path.is_dir():
        return packaged_model()
    return checkpoint_folder(model)


def cache_spec(
    config: ModelConfig,
    block_size: int,
    dtype: torch.dtype,
    max_model_len: int | None = None,
    *,
    token_dtype: torch.dtype | None = None,
) -> CacheSpec:
    """Return the spec of the cache that a model needs: a group of layers for each window, and
    states.

    Args:
        config: the configuration of the model.
        block_size: the tokens of a block.
        dtype: the dtype of keys and values.
        max_model_len: tokens of a sequence; a window at least as large counts as no window. None is
            the model's own limit.
        token_dtype: the dtype of the parameters, and so of what states keep of tokens; None for
            `dtype`.

    Raises:
        ValueError: the cache has 4 bits and the model latents.
    """
    longest = max_model_len or config.context_length
    windows = [None if w is None or w >= longest else w for w in config.windows]
    states = config.states(token_dtype or dtype)
    kinds: list[KVSpec | LatentSpec]
    if config.latent is not None:
        if dtype == FOUR_BITS:
            raise ValueError(
                "kv_cache_dtype must be auto, a float dtype, int8 or fp8_e4m3 for a model with "
                "latents, got int4"
            )
        kind = LatentSpec(config.latent.kv_rank, config.latent.rope_dim, dtype)
        kinds = [kind] * len(windows)
    else:
        kinds = [KVSpec(*heads, dtype) for heads in config.cached_heads]
    return CacheSpec.of_layers(block_size, kinds, windows, config.kv_sources, states)


def spec_of(model: ModelConfig, config: ResolvedConfig) -> CacheSpec:
    """Return the spec of the cache of a model, or of a shard of it, in an engine with this
    config."""
    return cache_spec(
        model,
        config.block_size,
        config.kv_cache_dtype,
        config.max_model_len,
        token_dtype=config.dtype,
    )


def check_groups(config: ModelConfig, speculative: object) -> None:
    """Refuse trees of guesses for models with windows, latents or states.

    Raises:
        ValueError: guesses are trees, whose mask these layers do not take.
    """
    kind = "latents" if config.latent is not None else "windows"
    if config.has_states:
        kind = "layers that keep a state"
    is_chain = kind == "windows" and not any(config.windows)
    if getattr(speculative, "num_branches", 1) > 1 and not is_chain:
        raise ValueError(f"num_branches must be 1 for a model with {kind}, got {speculative}")


def compute_device(device: str | torch.device) -> torch.device:
    """Return the device that a user means: a name, or "auto" for a GPU if there is one, else the
    CPU.

    Raises:
        ValueError: the device is neither a CPU nor a CUDA device, or torch sees no such GPU.
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


def device_of(model: nn.Module, device: str | torch.device) -> torch.device:
    """Return the device of a model that lives in this process, which all of its parameters must be
    on.

    Raises:
        ValueError: the parameters lie on several devices, or `device` is of another kind and not
            "auto".
    """
    found = {parameter.device for parameter in model.parameters()}
    if len(found) != 1:
        places = ", ".join(sorted(map(str, found))) or "none"
        raise ValueError(f"model must have its parameters on one device, got {places}")
    (own,) = found
    if device != "auto" and compute_device(device).type != own.type:
        raise ValueError(f"device must be that of the model, {own}, got {str(device)!r}")
    return compute_device(own)


def cache_dtype(name: str | torch.dtype, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the cache: a name, or "auto" for that of the parameters.

    Raises:
        ValueError: the dtype is none of those offered.
    """
    if name == "auto" or name == model_dtype:
        return model_dtype
    for offered, dtype in _CACHE_DTYPES.items():
        if name in (offered, dtype):
            return dtype
    raise ValueError(f"kv_cache_dtype must be auto, {', '.join(_CACHE_DTYPES)}, got {name!r}")


def check_weights(config: EngineConfig, device: torch.device) -> None:
    """Refuse weight_dtype "int8" on a GPU, where no kernel multiplies such weights.

    Raises:
        ValueError: this is the case.
    """
    if config.weight_dtype == "int8" and device.type != "cpu":
        raise ValueError(
            "weight_dtype must be auto on a GPU: products with int8 weights are built for a CPU "
            f"only, got {config.weight_dtype!r} on {device}"
        )


def end_tokens(config: ModelConfig | EncoderShape, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the ids of the tokens that end a text: the model's, then those that its tokenizer
    names.

    Ids beyond the vocabulary, which a tokenizer's files may declare, are left out.
    """
    named = () if tokenizer is None else tokenizer.end_ids
    ends = dict.fromkeys((*config.eos_token_ids, *named))
    return tuple(i for i in ends if 0 <= i < config.vocab_size)


def context_length(wanted: int | None, config: ModelConfig | EncoderShape) -> int:
    """Return max_model_len: `wanted`, or by default the number of positions of the model.

    Raises:
        ValueError: the model has fewer positions, or wanted is below 2.
    """
    longest = config.context_length
    if wanted is None:
        return longest
    if not 2 <= wanted <= longest:
        raise ValueError(
            f"max_model_len must be in 2 ... {longest} (the model's positions), got {wanted}"
        )
    return wanted
