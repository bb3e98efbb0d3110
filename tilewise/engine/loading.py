"""Load a model without waking torch's compiler, which would take longer than all the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tilewise.models import load_model
from tilewise.models.decoder import Decoder

__all__ = ["load"]


def load(directory: Path, *, dtype: str | torch.dtype, device: torch.device) -> Decoder:
    """Return `load_model(...)`, sooner.

    A module is built on the meta device, where tensors have no memory, and filled from the
    checkpoint. Two calls on that way have Python implementations that import torch._dynamo and
    sympy: 1.7 of 4.2 seconds until the first word of a story (two cores, torch 2.13, 2026-11).

    Raises:
        CheckpointError: the directory is incomplete or wrong.
    """
    with _PlainMeta():
        return load_model(directory, dtype=dtype, device=device)


class _PlainMeta(TorchFunctionMode):
    """On meta tensors, nn.init does nothing and empty_like asks for memory directly."""

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
