"""From a checkpoint directory to a model on its device, if there is room for it and its cache."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from tilewise.cache.spec import CacheSpec
from tilewise.distributed.shards import shard_config
from tilewise.engine.memory import GIB, check_memory, free_memory
from tilewise.engine.settings import cache_dtype, cache_spec, context_length
from tilewise.engine.tensor_parallel.runner import check_tensor_parallel
from tilewise.models import load_model
from tilewise.models.config import ModelConfig, read_config
from tilewise.models.decoder import Decoder
from tilewise.models.registry import empty_model, read_checkpoint

__all__ = ["Loaded", "load"]


class Loaded(NamedTuple):
    """A model; without memory where other processes hold it.

    Attributes:
        spec: of its cache, the whole model's.
        max_model_len: tokens of a sequence.
    """

    model: Decoder
    spec: CacheSpec
    max_model_len: int


def load(
    directory: Path,
    device: torch.device,
    *,
    dtype: str | torch.dtype,
    random_weights: bool,
    block_size: int,
    num_blocks: int | None,
    kv_cache_dtype: str | torch.dtype,
    max_model_len: int | None,
    swap_space_gib: float,
    gpu_memory_utilization: float,
    batch_invariant: bool,
    tensor_parallel_size: int,
) -> Loaded:
    """Read a checkpoint, see `LLM` for the arguments; with tensor parallelism its shape alone.

    Raises:
        CheckpointError: the directory is incomplete or wrong.
        ValueError: an argument is out of its range, or the device has no room; nothing has been
            allocated then.
    """

    def spec_of(config: ModelConfig, own: torch.dtype) -> CacheSpec:
        length = context_length(max_model_len, config)
        return cache_spec(config, block_size, cache_dtype(kv_cache_dtype, own), length)

    def fits(model: Decoder, num_processes: int = 1) -> None:
        # With blocks asked for, the share of the memory is not: they take what there is.
        share = gpu_memory_utilization if num_blocks is None else None
        check_memory(
            model,
            spec_of(model.config, model.dtype),
            device,
            free_memory(device, share),
            num_blocks=num_blocks,
            swap_bytes=int(swap_space_gib * GIB) // num_processes,
            num_processes=num_processes,
        )

    if tensor_parallel_size == 1:
        model = load_model(
            directory, dtype=dtype, device=device, random_weights=random_weights, before=fits
        )
    else:
        config = read_config(directory) if random_weights else read_checkpoint(directory)
        check_tensor_parallel(
            tensor_parallel_size,
            config,
            device,
            num_blocks=num_blocks,
            batch_invariant=batch_invariant,
        )
        model = empty_model(config, dtype, "meta")
        if device.type == "cpu":  # on GPUs each worker looks at its own
            shard = empty_model(shard_config(config, tensor_parallel_size), dtype, "meta")
            fits(shard, tensor_parallel_size)
    spec = spec_of(model.config, model.dtype)
    return Loaded(model, spec, context_length(max_model_len, model.config))
