"""What a decoder's list of operations for a CPU is to the runner of compiled steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tilewise.cache.spec import CacheLayer
from tilewise.nn.context import AttentionContext

if TYPE_CHECKING:
    from tilewise.kernels.cpu.step.program import Program

__all__ = ["CpuAttention", "CpuProgram"]


class CpuAttention(NamedTuple):
    """The attention of a layer in a program.

    Attributes:
        writes: the index of the operation that writes the layer's keys.
        first, end: the operations that attend from one row of each sequence.
        attend: a function of the context and cache of a step and of its number of rows, which does
            what these operations do for sequences with several rows.
    """

    writes: int
    first: int
    end: int
    attend: Callable[[AttentionContext, CacheLayer, int], None]


class CpuProgram(NamedTuple):
    """A model's program for the runner of compiled steps.

    Attributes:
        program: the list of operations. The last two are the last norm and the head; their buffers
            are final and logits.
        attention: the attention of each layer.
        reserve_angles: a function of a number of positions and a device, which returns the cosines
            and sines of at least that many positions, of all rotary settings side by side.
    """

    program: Program
    attention: list[CpuAttention]
    reserve_angles: Callable[[int, torch.device], tuple[Tensor, Tensor]]
