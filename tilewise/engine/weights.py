"""Where an engine's new weights come from: checked whole, before the first of them is written.

A source is a model that lives in this process, named tensors, or a checkpoint's folder. Each gives
the parameters of the decoder as they were before it was packed; `models.sharing.refill` writes
them where the old ones lie, so that addresses stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from tilewise.errors import CheckpointError, shown
from tilewise.models.config import ModelConfig
from tilewise.models.decoder import Decoder
from tilewise.models.registry import empty_model, load_model
from tilewise.models.trained_adapter import adapted_linears

__all__ = [
    "LiveWeights",
    "NamedWeights",
    "Unpacked",
    "Weights",
    "check_finite",
    "check_shape",
    "folder_weights",
]


class Weights(Protocol):
    """A source of new weights for an engine, which has the whole parameters of its decoder."""

    def check(self, wanted: Mapping[str, Tensor]) -> None:
        """Refuse weights that are not those of the engine's model.

        Args:
            wanted: the parameters of the model before it was packed, on "meta", by name.

        Raises:
            CheckpointError: a name is missing or unknown, or a tensor has another shape or dtype,
                or is not finite; the message names it.
        """
        ...

    def held(self, name: str) -> Tensor:
        """Return the new value of a parameter, by its name in the model before it was packed."""
        ...


class LiveWeights:
    """The weights of a model that lives, and is trained, in this process.

    Args:
        model: the model; it may have parametrisations, which are then computed when asked for.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._versions: tuple[int, ...] = ()
        self.note()

    def held(self, name: str) -> Tensor:
        """Return a parameter as it is now.

        Raises:
            AttributeError: the model has no such parameter.
        """
        place, _, own = name.rpartition(".")
        found = getattr(self.model.get_submodule(place), own)
        if not isinstance(found, Tensor):
            raise AttributeError(name)
        return found

    def check(self, wanted: Mapping[str, Tensor]) -> None:
        """Refuse a model in this process whose parameters differ from the engine's in name or
        shape, or are not finite.

        The dtype may be another than the engine's.

        Args:
            wanted: see `Weights.check`.

        Raises:
            AttributeError: a parameter is missing.
            CheckpointError: a shape is another, or a number is not finite.
        """
        with torch.no_grad():
            found = {name: self.held(name).detach() for name in wanted}
        for name, shape in wanted.items():
            check_shape(name, found[name], shape)
        check_finite(found)

    def note(self) -> None:
        """Remember the versions of the parameters: the engine now has their present values."""
        self._versions = self._now()

    @property
    def has_changed(self) -> bool:
        """Whether an operation has written to a parameter since `note`; writes through .data are
        not seen."""
        return self._now() != self._versions

    @property
    def stays(self) -> bool:
        """Whether only an adapter is trained.

        No other parameter requires a gradient, and none was written since `note`.
        """
        own = self._own()
        return self.has_adapter and not any(p.requires_grad for p in own) and not self.has_changed

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained beside the model, see `models.trained_adapter`."""
        return bool(adapted_linears(self.model))

    def _own(self) -> list[nn.Parameter]:
        """Return the parameters of the model without those of an adapter beside it."""
        linears = adapted_linears(self.model).values()
        beside = {id(p) for linear in linears for p in linear.adapter.parameters()}
        return [p for p in self.model.parameters() if id(p) not in beside]

    def _now(self) -> tuple[int, ...]:
        # A tensor of inference mode cannot be trained, and counts nothing.
        return tuple(p._version for p in self._own() if not p.is_inference())


class Unpacked:
    """A decoder before it was packed, on "meta": what an update of weights fills.

    It takes 20 to 40 ms to make, and is kept from one update to the next.

    Args:
        config: the model's config.
        dtype: the dtype of its parameters.

    Attributes:
        model: the decoder without values, on "meta".
        shapes: the parameters of the decoder by their names.
        table: the checkpoint's tensors for each parameter, by the parameter's name.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.model = empty_model(config, dtype, "meta")
        self.shapes = dict(self.model.named_parameters())
        self.table = {weight.name: weight for weight in self.model.weight_table()}


class NamedWeights:
    """Tensors by a checkpoint's names, all of a model's; they are referred to, not copied, but for
    those in the memory of the model, which an update overwrites in an order of its own.

    Args:
        tensors: names and tensors, in any order; each has memory of its own until the update is
            done.
        unpacked: the decoder of the engine before it was packed.
        model: the decoder of the engine.

    Raises:
        CheckpointError: a name comes twice.
        TypeError: something is no tensor.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        unpacked: Unpacked,
        model: Decoder,
    ) -> None:
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        self._given: dict[str, Tensor] = {}
        own = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
        for pair in pairs:
            name, tensor = _pair(pair)
            if name in self._given:
                raise CheckpointError(f"tensor {name} must come once, got it twice")
            tensor = tensor.detach()
            self._given[name] = tensor.clone() if _memory(tensor) in own else tensor
        self._meta = unpacked.model
        self._shapes, self._table = unpacked.shapes, unpacked.table

    def check(self, wanted: Mapping[str, Tensor]) -> None:
        """Refuse tensors that are not just those of the engine's model.

        Args:
            wanted: see `Weights.check`.

        Raises:
            CheckpointError: a name is missing or unknown, or a tensor has another shape or dtype,
                is not finite, or shares its memory with another; the message names it.
        """
        model, known = self._meta, set[str]()
        for weight in self._table.values():
            for source, part in weight.parts(wanted[weight.name]):
                name = self._name_of(source)
                if name not in self._given:
                    raise CheckpointError(f"weights must hold tensor {source}, got none")
                known.add(name)
                check_shape(name, self._given[name], part, either=weight.either)
                if self._given[name].dtype != part.dtype:
                    raise CheckpointError(
                        f"tensor {name} must be {part.dtype}, got {self._given[name].dtype}"
                    )
        if model.lm_head is None:
            known.add("lm_head.weight")  # a tied head may come nevertheless
        extra = sorted(self._given.keys() - known)
        if extra:
            raise CheckpointError(
                f"weights must hold only tensors of {model.config.architecture}, got "
                f"{shown(extra[0])}" + (f" and {len(extra) - 1} more" if len(extra) > 1 else "")
            )
        seen: dict[tuple[int, int], str] = {}
        for name in sorted(known & self._given.keys()):
            tensor = self._given[name]
            place = (tensor.data_ptr(), tensor.numel())
            other = seen.setdefault(place, name)
            if other != name and tensor.numel() and name != "lm_head.weight" != other:
                raise CheckpointError(
                    f"tensors must have memory of their own, got one for {other} and {name}"
                )
        check_finite({name: self._given[name] for name in known & self._given.keys()})

    def held(self, name: str) -> Tensor:
        """Return a parameter, put together from the checkpoint's tensors that it is made of: a new
        tensor, or the given one where that is the parameter as it stands."""
        weight, shape = self._table[name], self._shapes[name]
        sources = [self._given[self._name_of(source)] for source in weight.sources]
        is_as_given = len(sources) == 1 and weight.order is None and not weight.transposed
        if is_as_given and sources[0].shape == shape.shape:
            return sources[0]
        whole = torch.empty_like(shape, device=sources[0].device)
        for place, (_, part) in enumerate(weight.parts(whole)):
            tensor = sources[place]
            if tensor.shape != part.shape:
                tensor = tensor.mT  # `either`
            if weight.order is not None and place == 0:
                spans = weight.rows_in_order(self._meta.config.layers[weight.layer])
                tensor = torch.cat([tensor[first:end] for first, end in spans])
            part.copy_(tensor)
        return whole

    def _name_of(self, source: str) -> str:
        """Return the name by which a checkpoint's tensor was given.

        It may lack the model's prefix, and a tied embedding may come as "lm_head.weight". A tensor
        that was not given keeps its name.
        """
        if source in self._given:
            return source
        bare = source.removeprefix(self._meta.weight_prefix)
        if bare in self._given:
            return bare
        if source == self._meta.embedding_source and self._meta.lm_head is None:
            return "lm_head.weight"  # a tied head under its own name only
        return source


def folder_weights(folder: Path, config: ModelConfig, dtype: torch.dtype) -> LiveWeights:
    """Return the weights of a checkpoint's folder, read into main memory.

    Raises:
        CheckpointError: a file is missing or wrong, or the folder is another model's.
    """
    model = load_model(folder, dtype=dtype, model_impl="tilewise")
    if replace(model.config, dtype=config.dtype) != config:
        raise CheckpointError(
            f"config.json of {folder} must be that of the engine's model, got another "
            f"{model.config.architecture}"
        )
    return LiveWeights(model)


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for a tensor with NaN or an infinity; wait once for each device and
    dtype."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(name)
    for names in by_kind.values():
        # The greatest magnitude is NaN or infinite if a number is, and takes one kernel a tensor.
        greatest = torch.stack([vector_norm(tensors[name], math.inf) for name in names])
        for name, is_finite in zip(names, greatest.isfinite().tolist(), strict=True):
            if not is_finite:
                raise CheckpointError(f"tensor {name} must be finite, got NaN or infinity")


def check_shape(name: str, found: Tensor, wanted: Tensor, *, either: bool = False) -> None:
    """Raise CheckpointError unless the tensor `found` has the shape of `wanted`.

    Args:
        name: the name of the tensor, for the error.
        either: True if the shape of the transpose of `wanted` is right, too.
    """
    shape, right = tuple(found.shape), tuple(wanted.shape)
    if shape != right and not (either and shape == tuple(wanted.mT.shape)):
        raise CheckpointError(f"tensor {name} must have shape {right}, got {shape}")


def _memory(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor is a part of."""
    return tensor.untyped_storage().data_ptr()


def _pair(pair: object) -> tuple[str, Tensor]:
    if isinstance(pair, tuple) and len(pair) == 2:
        name, tensor = pair
        if isinstance(name, str) and isinstance(tensor, Tensor):
            return name, tensor
    raise TypeError(f"weights must be pairs of a name and a tensor, got {shown(pair)}")
