"""A decoder as a list of operations over fixed buffers, which a CPU runs in one compiled call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from tilewise.nn.packed import PackedLinear
from tilewise.ops.panels import Panels

if TYPE_CHECKING:
    from tilewise.kernels.cpu.step.program import Program

__all__ = ["CpuProgram", "panels_of", "weight_of"]


class CpuProgram(NamedTuple):
    """A model's program for the runner of compiled steps.

    Attributes:
        program: the list of operations. Its buffers are x, h, qkv, o and act, of every row, and
            final and logits, of the rows that sample a token: the last two operations are the last
            norm and the head.
        attention: the index in the list of each layer's attention; the operation before it writes
            the layer's keys.
        reserve_angles: a function of a number of positions and a device, which returns the cosines
            and sines of at least so many positions.
    """

    program: Program
    attention: list[int]
    reserve_angles: Callable[[int, torch.device], tuple[Tensor, Tensor]]


def panels_of(linear: nn.Module | None) -> Panels:
    """Return the weights of a packed linear."""
    assert isinstance(linear, PackedLinear)
    return linear.panels


def weight_of(module: nn.Module | None) -> Callable[[], Tensor]:
    """Return a function that returns a module's current weight."""
    assert module is not None
    parameters = module._parameters

    def find() -> Tensor:
        weight = parameters.get("weight")  # a tenth of the time of an attribute access
        return cast(Tensor, module.weight) if weight is None else weight

    return find
