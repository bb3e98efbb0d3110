"""The quantised modules of an open checkpoint: their weights and their tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from tilewise.errors import CheckpointError
from tilewise.models.quantised.format import Format, Stored
from tilewise.models.weight_files import DTYPES
from tilewise.ops import QuantisedWeight

__all__ = ["QuantisedModules"]

_DEEPEST = 3  # parts of a suffix: "weight.quant_state.bitsandbytes__nf4"


class QuantisedModules:
    """The modules of an open checkpoint whose weights a format stores.

    Args:
        format: the format of the checkpoint; None if all of its weights are floats.
        found: the tensors' names, each with its file and the file's reader.

    Attributes:
        format: the format of the checkpoint, or None.
    """

    def __init__(self, format: Format | None, found: Mapping[str, tuple[Any, Any]]) -> None:
        self.format, self._found = format, found
        self._suffixes: dict[str, set[str]] = defaultdict(set)
        if format is None:
            return
        for name in found:
            parts = name.split(".")
            for depth in range(1, min(_DEEPEST, len(parts) - 1) + 1):
                self._suffixes[".".join(parts[:-depth])].add(".".join(parts[-depth:]))

    def has(self, source: str) -> bool:
        """Return whether the weight `source`, as "model.layers.0.mlp.up_proj.weight", is
        quantised."""
        if self.format is None or not source.endswith(".weight"):
            return False
        names = self._suffixes.get(source.removesuffix(".weight"))
        return names is not None and any(mark in names for mark in self.format.marks)

    def weight(self, source: str, *, is_meta: bool = False) -> QuantisedWeight:
        """Return the quantised weight of a name for which `has` is True; with is_meta it is on
        "meta", and only shapes and dtypes are read.

        Raises:
            CheckpointError: a tensor is missing, cannot be read, or breaks the format's rules.
        """
        kind = self.format
        assert kind is not None
        module = source.removesuffix(".weight")
        names = frozenset(self._suffixes[module])

        def get(suffix: str) -> Tensor:
            name = f"{module}.{suffix}"
            file, reader = self._found[name]
            try:
                if is_meta and suffix not in kind.small:
                    part = reader.get_slice(name)
                    dtype = DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise CheckpointError(
                            f"tensor {name} must be of a known dtype, got {part.get_dtype()}"
                        )
                    return torch.empty(part.get_shape(), dtype=dtype, device="meta")
                tensor: Tensor = reader.get_tensor(name)
                return tensor
            except SafetensorError as error:
                raise CheckpointError(
                    f"{file.name} must be readable at {name}, got {error}"
                ) from error

        stored = Stored(module, names, get)
        try:
            weight = kind.read(stored)
            weight.check(module)
            if not is_meta:
                _check_scales(module, weight)
        except (ValueError, TypeError, KeyError, RuntimeError, IndexError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"tensors of {module} must be a weight of {kind.name}, got {error}"
            ) from error
        return weight

    def known(self, sources: Iterable[str]) -> set[str]:
        """Return the names of the tensors that quantised weights are made of: all of the modules'
        but biases.

        Args:
            sources: names of weights for which `has` is True.
        """
        modules = [source.removesuffix(".weight") for source in sources]
        return {
            f"{module}.{suffix}"
            for module in modules
            for suffix in self._suffixes[module]
            if suffix != "bias"
        }

    def is_extra(self, name: str) -> bool:
        """Return whether a tensor is known and not needed, such as a scale of inputs."""
        return self.format is not None and name.endswith(
            tuple(f".{suffix}" for suffix in self.format.extra)
        )


def _check_scales(module: str, weight: QuantisedWeight) -> None:
    for name in ("scales", "outer", "minimums"):
        tensor = getattr(weight, name)
        if tensor is not None and not bool(tensor.float().isfinite().all()):
            raise CheckpointError(f"{name} of {module} must be finite, got infinity or NaN")
