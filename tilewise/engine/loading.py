"""From a checkpoint directory to a model on its device, if there is room for it and its cache."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from tilewise.cache.spec import CacheSpec
from tilewise.distributed.shards import shard_config
from tilewise.engine.config import EngineConfig, OwnHead
from tilewise.engine.memory import GIB, check_memory, free_memory
from tilewise.engine.purpose import HEAD, Purpose
from tilewise.engine.settings import ResolvedConfig, is_invariant, resolve, spec_of
from tilewise.engine.tensor_parallel.runner import check_tensor_parallel
from tilewise.engine.weights import LiveWeights
from tilewise.models import load_model
from tilewise.models.config import read_config
from tilewise.models.decoder import Decoder
from tilewise.models.encoder import Encoder
from tilewise.models.native import for_device
from tilewise.models.registry import empty_model, load_encoder, read_checkpoint
from tilewise.models.sharing import sharing
from tilewise.models.transformers_encoder import TransformersEncoder
from tilewise.models.vector_head import VectorHead
from tilewise.models.weights import read_tensor
from tilewise.progress import Progress

__all__ = ["Loaded", "load", "load_encoder_of", "read_head"]

# Options of a cache, or of what is built for decoders alone.
_OF_DECODERS = (
    "num_blocks",
    "kv_cache_dtype",
    "weight_dtype",
    "long_prefill_token_threshold",
    "swap_space_gib",
    "offload_dir",
    "speculative",
    "enable_lora",
    "tensor_parallel_size",
    "audit",
    "canary",
)


class Loaded(NamedTuple):
    """A loaded model; its parameters have no memory here if other processes hold them.

    Attributes:
        model: the model, with its weights.
        spec: the cache spec of the whole model.
        config: the engine's config, with all values that depend on model and device.
    """

    model: Decoder
    spec: CacheSpec
    config: ResolvedConfig


def load(
    config: EngineConfig,
    directory: Path,
    device: torch.device,
    live: LiveWeights | None = None,
) -> Loaded:
    """Load the model of a config, check that the device has room, and decide the rest of the
    config.

    With tensor parallelism only the model's shape is read: its parameters are on "meta".

    Args:
        config: the config as the caller gave it.
        directory: the directory of the checkpoint.
        device: the device that computes.
        live: the model of this process that is served, in place of a checkpoint.

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

    if live is not None:
        check_live(config)
        model = sharing(live.model, config.dtype, device, live.held)
        if device.type == "cpu":  # which packs copies; a GPU's engine uses what is there
            fits(model)
    elif size == 1:
        with Progress(config.use_progress) as progress:
            model = load_model(
                directory,
                dtype=config.dtype,
                device=device,
                random_weights=config.random_weights,
                before=fits,
                model_impl=config.model_impl,
                show=progress.show,
            )
    else:
        if config.model_impl == "transformers":
            raise ValueError(
                "tensor_parallel_size must be 1 for a model that runs through transformers, "
                f"got {size}"
            )
        if isinstance(config.speculative, OwnHead):
            raise ValueError(
                f"tensor_parallel_size must be 1 with OwnHead, whose layer is not cut, got {size}"
            )
        read = read_config if config.random_weights else read_checkpoint
        shape = read(directory)
        check_tensor_parallel(
            size,
            shape,
            device,
            num_blocks=config.num_blocks,
            batch_invariant=is_invariant(config, device),
            swap_space_gib=config.swap_space_gib,
        )
        model = empty_model(shape, config.dtype, "meta")
        if device.type == "cpu":  # on GPUs each worker looks at its own
            shard = for_device(shard_config(shape, size), device)
            fits(empty_model(shard, config.dtype, "meta"), size)
    decided = resolved(model)
    return Loaded(model, spec_of(model.config, decided), decided)


def check_live(config: EngineConfig) -> None:
    """Refuse options that say how a checkpoint is read, or that need one.

    Raises:
        ValueError: an option is not what it must be beside a model that lives in this process.
    """
    for name in ("model_impl", "random_weights", "tensor_parallel_size"):
        [default] = [each.default for each in fields(config) if each.name == name]
        if getattr(config, name) != default:
            raise ValueError(
                f"{name} must be {default} with a model that lives in this process, got "
                f"{getattr(config, name)}"
            )
    if isinstance(config.speculative, OwnHead):
        raise ValueError(
            "speculative must need no files with a model that lives in this process, got OwnHead"
        )


def load_encoder_of(
    config: EngineConfig, directory: Path, device: torch.device, purpose: Purpose
) -> tuple[Encoder | TransformersEncoder, ResolvedConfig]:
    """Load an encoder's checkpoint, with the layers behind its pooling, and decide the rest of the
    config.

    Args, Raises: as of `load`.

    Returns:
        The encoder, and the engine's config: a block is a seat, which holds a text of any length.
    """
    for each in fields(config):
        value = getattr(config, each.name)
        if each.name in _OF_DECODERS and value != each.default:
            raise ValueError(
                f"{each.name} must be {each.default} for an encoder, {purpose.name}, got {value}"
            )
    if config.batch_invariant:
        raise ValueError(f"batch_invariant must be False for an encoder, {purpose.name}, got True")
    share = config.gpu_memory_utilization

    def fits(model: nn.Module) -> None:
        check_memory(model, None, device, free_memory(device, share))

    model = load_encoder(
        directory,
        dtype=config.dtype,
        device=device,
        random_weights=config.random_weights,
        before=fits,
        model_impl=config.model_impl,
    )
    if not model.gives_vectors:
        head = read_head(purpose, directory, model, is_random=config.random_weights)
        model.head = None if head is None else head.to(device)
    if config.max_model_len is None and purpose.max_length is not None:
        most = min(purpose.max_length, model.config.context_length)
        config = replace(config, max_model_len=most)
    decided = resolve(config, device, model.config, model.dtype)
    longest, most = decided.max_model_len, decided.max_num_batched_tokens
    if config.max_num_batched_tokens is None:
        most = max(most, longest)
    return model, replace(
        decided,
        block_size=longest,
        enable_prefix_caching=False,
        batch_invariant=False,
        max_num_batched_tokens=most,
    )


def read_head(
    purpose: Purpose,
    directory: Path,
    model: Decoder | Encoder | TransformersEncoder,
    *,
    is_random: bool,
) -> VectorHead | None:
    """Return the layers behind the pooling, on the CPU; None if there are none.

    Args:
        purpose: the stages that follow the decoder.
        directory: the directory of the checkpoint.
        model: the model, whose parameters may be on "meta".
        is_random: True to draw the layers' weights at random instead of reading them.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    if not purpose.stages:
        return None

    def read(folder: str, name: str, rows: tuple[int, ...] | None) -> torch.Tensor:
        names = [name]
        if name == HEAD:
            table, bare = model.embedding_source, model.embedding_source.removeprefix("model.")
            names = [table, bare] if model.lm_head is None else [HEAD]
        return read_tensor(directory / folder, names, rows)

    size = model.config.hidden_size
    return VectorHead(purpose.stages, size, None if is_random else read)
