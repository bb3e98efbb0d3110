"""Make a decoder from a checkpoint directory or a configuration."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tilewise.errors import CheckpointError
from tilewise.models.causal_body import as_causal
from tilewise.models.config import ModelConfig, read_config
from tilewise.models.config_fields import UnknownModelError, read_object
from tilewise.models.decoder import Decoder
from tilewise.models.encoder import Encoder
from tilewise.models.encoder_families import build_encoder, encoder_family, read_encoder
from tilewise.models.families import FAMILIES
from tilewise.models.hub import checkpoint_folder
from tilewise.models.native import NativeDecoder, for_device
from tilewise.models.transformers_decoder import can_run, load_through_transformers
from tilewise.models.transformers_encoder import (
    TransformersEncoder,
    load_transformers_encoder,
    why_no_encoder,
)
from tilewise.models.weights import check_weights, has_own_head, load_weights, narrow
from tilewise.progress import Show, silent

__all__ = [
    "allocated",
    "build_model",
    "empty_model",
    "load_encoder",
    "load_model",
    "read_checkpoint",
]

_IMPLS = ("auto", "tilewise", "transformers")


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    random_weights: bool = False,
    before: Callable[[Decoder], None] | None = None,
    model_impl: str = "auto",
    show: Show = silent,
) -> Decoder:
    """Load a Hugging Face checkpoint directory, ready for inference.

    Args:
        path: the directory with config.json and model.safetensors, or its shards and index; or the
            name of a model on the hub, as "owner/model" or "owner/model@revision", of which files
            that this machine lacks are downloaded.
        dtype: the dtype of the parameters, as "bfloat16" or torch.bfloat16; "auto" takes the
            checkpoint's.
        device: the device of the parameters.
        random_weights: True to draw the weights on the device instead of reading them, with the
            same seed each time; config.json is then enough.
        before: a function called with the model, its parameters on "meta", before memory is
            allocated; it may raise to refuse the model.
        model_impl: "tilewise" for a decoder of this package, "transformers" for the modules of
            transformers over the paged cache; "auto" takes the first that knows the checkpoint.
        show: a function that takes lines of progress.

    Returns:
        The decoder in eval mode; its parameters do require gradients.

    Raises:
        CheckpointError: the directory is incomplete or wrong, in which case the message names the
            file; the download fails; or no decoder of `model_impl` knows the checkpoint.
        ValueError: model_impl is none of the three.

    Example:
        >>> model = load_model("path/to/checkpoint", dtype="bfloat16")
        >>> logits = model.compute_logits(model(torch.tensor([[1, 2, 3]])))
    """
    if model_impl not in _IMPLS:
        raise ValueError(f"model_impl must be one of {', '.join(_IMPLS)}, got {model_impl!r}")
    path = checkpoint_folder(path)
    try:
        if model_impl == "transformers":
            return _through_transformers(path, dtype, device, random_weights, before)
        config = read_config(path) if random_weights else read_checkpoint(path)
    except CheckpointError as error:
        if model_impl != "auto" or not isinstance(error, UnknownModelError):
            raise
        return _through_transformers(path, dtype, device, random_weights, before, error)
    model = empty_model(for_device(config, torch.device(device)), dtype, "meta")
    if not random_weights:
        is_cpu = torch.device(device).type == "cpu"
        narrow(model, path, holds_tables=is_cpu, holds_experts=not is_cpu)
    if before is not None:
        before(model)
    model = allocated(model, device)
    if random_weights:
        model.init_weights(generator=torch.Generator(device).manual_seed(0))
    else:
        load_weights(model, path, show=show)
    return model.eval()


def load_encoder(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    random_weights: bool = False,
    before: Callable[[nn.Module], None] | None = None,
    model_impl: str = "auto",
) -> Encoder | TransformersEncoder:
    """Load the encoder of a checkpoint directory, without a head unless transformers runs it.

    The arguments and errors are those of `load_model`.

    Returns:
        The encoder in eval mode.
    """
    told = read_object(Path(path) / "config.json")
    is_other = encoder_family(told) is None and why_no_encoder(told) is None
    if model_impl == "transformers" or (model_impl == "auto" and is_other):
        if is_other:
            names = told.get("architectures") or [None]
            warnings.warn(
                f"{names[0]} runs through transformers, texts of like lengths at a time, as no "
                "encoder here is made of it",
                stacklevel=3,
            )
        return load_transformers_encoder(
            path,
            dtype=None if dtype == "auto" else _torch_dtype(dtype),
            device=torch.device(device),
            random_weights=random_weights,
            before=before,
        )
    config = read_encoder(told)
    with _PlainMeta():
        with torch.device("meta"):
            model = build_encoder(config)
        model = model.to(_torch_dtype(config.dtype if dtype == "auto" else dtype))
        if not random_weights:
            check_weights(model, path)
        if before is not None:
            before(model)
        model = model.to_empty(device=device)
    if random_weights:
        model.init_weights(generator=torch.Generator(device).manual_seed(0))
    else:
        load_weights(model, path)
    return model.eval()


def _through_transformers(
    path: str | Path,
    dtype: str | torch.dtype,
    device: str | torch.device,
    random_weights: bool,
    before: Callable[[Decoder], None] | None,
    error: CheckpointError | None = None,
) -> Decoder:
    """Load a checkpoint whose layers transformers runs, with a warning if that was not asked for.

    Args:
        path, dtype, device, random_weights, before: see `load_model`.
        error: the error by which no decoder of this package could be made of the checkpoint; None
            if transformers was asked for.

    Raises:
        CheckpointError: transformers cannot run it, either.
    """
    config = as_causal(read_object(Path(path) / "config.json"))
    names = config.get("architectures") or [None]
    reason = can_run(str(names[0]))
    if reason is not None:
        told = "" if error is None else f"{error}; "
        raise CheckpointError(f"{told}{reason}") from error
    if error is not None:
        warnings.warn(
            f"{names[0]} runs through transformers, as no decoder here is made of it: {error}",
            stacklevel=3,
        )
    return load_through_transformers(
        Path(path),
        str(names[0]),
        dtype=None if dtype == "auto" else _torch_dtype(dtype),
        device=torch.device(device),
        random_weights=random_weights,
        before=before,
    )


def read_checkpoint(path: str | Path) -> ModelConfig:
    """Return the configuration in config.json; the output head is tied only if the weight files
    agree.

    Raises:
        CheckpointError: see `read_config`; or files of weights are missing.
    """
    config = read_config(path)
    if config.tie_word_embeddings:
        own = has_own_head(path, FAMILIES[config.architecture].names_of(config))
        return replace(config, tie_word_embeddings=not own)
    return config


def build_model(
    config: ModelConfig,
    *,
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    generator: torch.Generator | None = None,
) -> Decoder:
    """Build a decoder with random weights, ready for training; see `Decoder.init_weights`.

    Args:
        config: the configuration, e.g. `ModelConfig.from_hf({...})`.
        generator: a generator of `device`; None draws from torch's global one.

    Example:
        >>> model = build_model(ModelConfig.from_hf(json.load(open("config.json"))))
        >>> hidden = model(torch.zeros(1, 8, dtype=torch.int64))
    """
    model = empty_model(config, dtype, device)
    model.init_weights(generator=generator)
    return model


def empty_model(
    config: ModelConfig, dtype: str | torch.dtype, device: str | torch.device
) -> Decoder:
    """Construct a decoder on "meta", then allocate each parameter once, uninitialised.

    Args:
        config: the configuration of the model.
        dtype: the dtype of the parameters; "auto" takes the configuration's.
        device: the device of the parameters; "meta" allocates nothing.
    """
    dtype = config.dtype if dtype == "auto" else dtype
    with _PlainMeta():
        with torch.device("meta"):
            model = NativeDecoder(config)
        return model.to(_torch_dtype(dtype)).to_empty(device=device)


def allocated(model: Decoder, device: str | torch.device) -> Decoder:
    """Give the parameters of a model on "meta" uninitialised memory on a device, in place; return
    the model."""
    with _PlainMeta():
        return model.to_empty(device=device)


class _PlainMeta(TorchFunctionMode):
    """A mode for meta tensors in which nn.init does nothing and empty_like allocates directly.

    torch's own versions import torch._dynamo and sympy: 1.7 of 4.2 seconds until the first word of
    a story (two cores, torch 2.13, 2026-11).
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args else kwargs.get("tensor")
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            if getattr(func, "__module__", None) == "torch.nn.init":
                return tensor
            if func is torch.empty_like and set(kwargs) == {"device"}:
                return torch.empty(tensor.shape, dtype=tensor.dtype, device=kwargs["device"])
        return func(*args, **kwargs)


def _torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise TypeError(
            f"dtype must be 'auto' or a floating point dtype of 16 bits or more, got {dtype!r}"
        )
    return found
