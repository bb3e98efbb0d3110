"""From a checkpoint directory to a model on its device, if there is room for it and its cache."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from tilewise.cache.spec import CacheSpec
from tilewise.distributed.shards import shard_config
from tilewise.engine.config import EngineConfig
from tilewise.engine.memory import GIB, check_memory, free_memory
from tilewise.engine.settings import ResolvedConfig, is_invariant, resolve, spec_of
from tilewise.engine.tensor_parallel.runner import check_tensor_parallel
from tilewise.models import load_model
from tilewise.models.config import read_config
from tilewise.models.decoder import Decoder
from tilewise.models.registry import empty_model, read_checkpoint

__all__ = ["Loaded", "load"]


class Loaded(NamedTuple):
    """A model; without memory where other processes hold it.

    Attributes:
        model: the model.
        spec: the kind of its cache, the whole model's.
        config: the engine's config, with what the model and the device decide.
    """

    model: Decoder
    spec: CacheSpec
    config: ResolvedConfig


def load(config: EngineConfig, directory: Path, device: torch.device) -> Loaded:
    """Read a checkpoint; with tensor parallelism its shape alone.

    Args:
        config: what was asked for.
        directory: the checkpoint's.
        device: the device that computes.

    Raises:
        CheckpointError: the directory is incomplete or wrong.
        ValueError: an argument is out of its range, or the device has no room; nothing has been
            allocated then.
    """

    size = config.tensor_parallel_size

    def resolved(model: Decoder) -> ResolvedConfig:
        return resolve(config, device, model.config, model.dtype)

    def fits(model: Decoder, num_processes: int = 1) -> None:
        # With blocks asked for, the share of the memory is not: they take what there is.
        share = config.gpu_memory_utilization if config.num_blocks is None else None
        check_memory(
            model,
            spec_of(model.config, resolved(model)),
            device,
            free_memory(device, share),
            num_blocks=config.num_blocks,
            swap_bytes=int(config.swap_space_gib * GIB) // num_processes,
            num_processes=num_processes,
        )

    if size == 1:
        model = load_model(
            directory,
            dtype=config.dtype,
            device=device,
            random_weights=config.random_weights,
            before=fits,
            model_impl=config.model_impl,
        )
    else:
        if config.model_impl == "transformers":
            raise ValueError(
                "tensor_parallel_size must be 1 for a model that runs through transformers, "
                f"got {size}"
            )
        read = read_config if config.random_weights else read_checkpoint
        shape = read(directory)
        check_tensor_parallel(
            size,
            shape,
            device,
            num_blocks=config.num_blocks,
            batch_invariant=is_invariant(config, device),
        )
        model = empty_model(shape, config.dtype, "meta")
        if device.type == "cpu":  # on GPUs each worker looks at its own
            fits(empty_model(shard_config(shape, size), config.dtype, "meta"), size)
    decided = resolved(model)
    return Loaded(model, spec_of(model.config, decided), decided)
