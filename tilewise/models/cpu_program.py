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
    """What a model gives to the runner of compiled steps.

    Attributes:
        program: the list of operations. Its buffers are x, h, qkv, o and act, of every row, and
            final and logits, of the rows that are drawn from: the last two operations are the last
            norm and the head.
        attention: the place in the list of each layer's attention; its keys are written by the
            operation before.
        reserve_angles: takes a number of positions and a device, and returns the cosines and sines
            of at least so many.
    """

    program: Program
    attention: list[int]
    reserve_angles: Callable[[int, torch.device], tuple[Tensor, Tensor]]


def panels_of(linear: nn.Module | None) -> Panels:
    """Return the weights of a packed linear."""
    assert isinstance(linear, PackedLinear)
    return linear.panels


def weight_of(module: nn.Module | None) -> Callable[[], Tensor]:
    """Return a function that finds the weight which a module has by then."""
    assert module is not None
    parameters = module._parameters

    def find() -> Tensor:
        weight = parameters.get("weight")  # a tenth of the time of asking the module
        return cast(Tensor, module.weight) if weight is None else weight

    return find
