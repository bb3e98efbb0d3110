"""A short convolution between two gates, which remembers a few tokens alone: LFM2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilewise.cache.spec import StateSpec
from tilewise.nn.adapted import StepAdapters
from tilewise.nn.layers import Parts, RankPart, project
from tilewise.nn.states import Memory, StateLayer

__all__ = ["ShortConv", "ShortConvConfig"]


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """The sizes of a short convolution.

    Attributes:
        width: C, the channels of the convolution.
        conv_width: W, the tokens that the convolution reads, at least 2.
        has_bias: whether the convolution and the projections add a bias.
    """

    width: int
    conv_width: int = 3
    has_bias: bool = False

    def __post_init__(self) -> None:
        for name, least in (("width", 1), ("conv_width", 2)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")

    def rows(self, name: str) -> tuple[int, ...] | None:
        """Return None: the tensors that are stacked into a parameter all have as many rows."""
        return None

    def state(self, dtype: torch.dtype) -> StateSpec:
        """Return the spec of the state of one sequence in a layer whose tokens have this dtype."""
        return StateSpec(self.width, self.conv_width, dtype=dtype)


class ShortConv(StateLayer):
    """Project to (b, c, x), convolve b x, multiply by c, project back: y = (c conv(b x)) W_o.

    Source: Liquid AI, 2025, "LFM2 technical report", section 2.

    Args:
        hidden_size: the width E of the layer's input and output.
        config: the sizes of the layer.

    Attributes:
        conv, conv_bias: the weight (C, W) and the bias (C,) of the convolution; conv_bias is None
            without has_bias.
    """

    config: ShortConvConfig
    conv_bias: nn.Parameter | None

    def __init__(self, hidden_size: int, config: ShortConvConfig) -> None:
        super().__init__()
        self.config = config
        width, has_bias = config.width, config.has_bias
        self.in_proj = nn.Linear(hidden_size, 3 * width, bias=has_bias)
        self.conv = nn.Parameter(torch.zeros(width, config.conv_width))
        self.register_parameter("conv_bias", nn.Parameter(torch.zeros(width)) if has_bias else None)
        self.o_proj = nn.Linear(width, hidden_size, bias=has_bias)

    def mix(
        self, x: Tensor, memory: Memory, adapters: StepAdapters | None = None
    ) -> Tensor | Parts | RankPart:
        """Return the layer's output for x (..., E), same shape: each row sees the last W - 1 rows
        before it.

        The slots of `memory`, if it has some, are updated in place.
        """
        b, c, u = project(self.in_proj, x, adapters).chunk(3, -1)
        y = c * memory.convolve(b * u, self.conv, self.conv_bias, None)
        return self.out(y, adapters)
