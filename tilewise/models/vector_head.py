"""The layers on a pooled vector: a classifier, or what sentence-transformers puts behind a pooling.

A checkpoint says them as stages, one small product or norm each; they run in float32 on a step's
vectors, after the hidden states of a text have become one vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.errors import CheckpointError
from tilewise.nn.layers import ACTIVATIONS

__all__ = ["Stage", "VectorHead", "head_activation"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATIONS,
    "identity": lambda x: x,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
# How torch's classes are named in the files of sentence-transformers.
_CLASSES = {
    "Identity": "identity",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}


def head_activation(name: str, field: str) -> str:
    """Return our name of an activation that a file names by torch's class or as transformers does.

    Raises:
        CheckpointError: the name is not known; the message has the field.
    """
    found = _CLASSES.get(name.rsplit(".", 1)[-1], name)
    if found not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise CheckpointError(f"{field} must be one of {known}, got {name!r}")
    return found


@dataclass(frozen=True, slots=True)
class Stage:
    """One layer of a head.

    Attributes:
        kind: "linear", act(W x + b); "norm", a layer norm; "unit", x / |x|.
        weight: the tensor's name in the checkpoint; "" for "unit".
        bias: the name of its bias; None for none.
        size: the channels of the result; None if the tensor says it.
        activation: the name of the function of the result of "linear".
        eps: the epsilon of "norm".
        rows: the rows of the tensor that are read; None for all.
        folder: a folder of the checkpoint whose model.safetensors holds the tensors; "" for the
            checkpoint's own files.
        is_difference: True for one row, the first of `rows` less the second.
    """

    kind: Literal["linear", "norm", "unit"]
    weight: str = ""
    bias: str | None = None
    size: int | None = None
    activation: str = "identity"
    eps: float = 1e-5
    rows: tuple[int, ...] | None = None
    folder: str = ""
    is_difference: bool = False


ReadTensor = Callable[[str, str, tuple[int, ...] | None], Tensor]


class _Unit(nn.Module):
    """Divide a vector by its length."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


class _Activation(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = _ACTIVATIONS[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class VectorHead(nn.Module):
    """Layers that map pooled vectors to other vectors, in float32.

    Args:
        stages: the layers, the first one first.
        size: the channels of a pooled vector, which enters the first layer.
        read: a function of a folder of the checkpoint, a tensor's name, and the indices of the rows
            to read (None for all), which returns this tensor. None draws random weights.

    Attributes:
        size: the channels of a result, which leaves the last layer.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """

    def __init__(self, stages: Sequence[Stage], size: int, read: ReadTensor | None) -> None:
        super().__init__()
        layers = list[nn.Module]()
        generator = torch.Generator().manual_seed(0)
        for stage in stages:
            if stage.kind == "unit":
                layers.append(_Unit())
                continue
            is_norm = stage.kind == "norm"
            weight, bias = _tensors(stage, size, read, generator)
            shape = tuple(weight.shape)
            wanted = (size,) if is_norm else (stage.size or weight.shape[0], size)
            if shape != wanted:
                raise CheckpointError(
                    f"tensor {stage.weight} must have shape {wanted}, got {shape}"
                )
            size = weight.shape[0]
            if is_norm:
                norm = nn.LayerNorm(size, stage.eps, bias=bias is not None)
                norm.weight = nn.Parameter(weight)
                if bias is not None:
                    norm.bias = nn.Parameter(bias)
                layers.append(norm)
                continue
            linear = nn.Linear(weight.shape[1], size, bias=bias is not None, device="meta")
            linear.weight = nn.Parameter(weight)
            if bias is not None:
                linear.bias = nn.Parameter(bias)
            layers += [linear, _Activation(stage.activation)]
        self.stages, self.size = nn.Sequential(*layers), size

    @torch.inference_mode()
    def forward(self, vectors: Tensor) -> Tensor:
        """Map pooled vectors (n, E) of any dtype to (n, size) float32."""
        y: Tensor = self.stages(vectors.float())
        return y


def _tensors(
    stage: Stage, size: int, read: ReadTensor | None, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias, or None, of a stage in float32; random ones without `read`.

    Raises:
        CheckpointError: the bias has another number of rows than the weight, or a tensor is
            missing.
    """
    if read is None:
        read = partial(_random, stage, size, generator)
    weight = read(stage.folder, stage.weight, stage.rows).float()
    if stage.is_difference:
        weight = weight[:1] - weight[1:]
    bias = None if stage.bias is None else read(stage.folder, stage.bias, None).float()
    if bias is not None and bias.shape != weight.shape[:1]:
        raise CheckpointError(
            f"tensor {stage.bias} must have shape {tuple(weight.shape[:1])}, "
            f"got {tuple(bias.shape)}"
        )
    return weight, bias


def _random(
    stage: Stage,
    size: int,
    generator: torch.Generator,
    folder: str,
    name: str,
    rows: tuple[int, ...] | None,
) -> Tensor:
    """Return a random tensor of a stage: zeros for a bias, ones for a norm, else normal numbers.

    Args:
        size: the channels of the stage's input.
        name: the name of the tensor.
        rows: the rows that are kept; None for all.
    """
    num_rows = len(rows) if rows is not None else stage.size or size
    if name == stage.bias:
        return torch.zeros(num_rows)
    if stage.kind == "norm":
        return torch.ones(size)
    return torch.empty(num_rows, size).normal_(0.0, 0.02, generator=generator)
