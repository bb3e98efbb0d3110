"""Mamba-2 with its projections: Nemotron-H, Granite 4, Falcon-H1, Bamba, Zamba2."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.cache.spec import StateSpec
from tilewise.nn.adapted import StepAdapters
from tilewise.nn.gated_norm import GatedRMSNorm
from tilewise.nn.layers import Parts, RankPart, activate, project
from tilewise.nn.states import Memory, StateLayer

__all__ = ["Mamba2", "Mamba2Config"]


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """The sizes of a Mamba-2 layer.

    Attributes:
        num_heads, head_dim: H and P; the width of the layer is H P.
        num_groups: G, the groups of b and c; H is a multiple of G.
        state_dim: N, the channels of b and c.
        conv_width: W, the tokens that the convolution reads.
        norm_eps: the epsilon of the norm behind the recurrence.
        norm_groups: the number of groups of channels that the norm averages; 0 for no norm
            (Falcon-H1).
        gate_first: True if the gate multiplies before the norm, as in Mamba-2.
        rounds_first: True if the norm's result is rounded before the weight multiplies it.
        has_conv_bias, has_in_bias, has_out_bias: whether the convolution and the projections add a
            bias.
        dt_limits: the least and the largest time step.
        input_scale, output_scale: factors of the layer's input and of its output.
        part_scales: five factors, of the gate, x, b, c and dt, applied to the result of in_proj
            (Falcon-H1).
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_width: int = 4
    norm_eps: float = 1e-5
    norm_groups: int = 1
    gate_first: bool = True
    rounds_first: bool = True
    has_conv_bias: bool = True
    has_in_bias: bool = False
    has_out_bias: bool = False
    dt_limits: tuple[float, float] = (0.0, math.inf)
    input_scale: float = 1.0
    output_scale: float = 1.0
    part_scales: tuple[float, ...] = (1.0,) * 5

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "num_groups", "state_dim", "conv_width"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"num_heads must be a multiple of num_groups {self.num_groups}, "
                f"got {self.num_heads}"
            )
        low, high = self.dt_limits
        if not 0 <= low <= high:
            raise ValueError(f"dt_limits must be two numbers, 0 <= low <= high, got {low}, {high}")
        if len(self.part_scales) != len(self.parts):
            raise ValueError(f"part_scales must be five factors, got {len(self.part_scales)}")

    @property
    def parts(self) -> tuple[int, int, int, int, int]:
        """The numbers of channels of the gate, x, b, c and dt: (H P, H P, G N, G N, H)."""
        width, groups = self.num_heads * self.head_dim, self.num_groups * self.state_dim
        return width, width, groups, groups, self.num_heads

    def rows(self, name: str) -> tuple[int, ...] | None:
        """Return None: no parameter is stacked from tensors with different numbers of rows."""
        return None

    def state(self, dtype: torch.dtype) -> StateSpec:
        """Return the spec of the state of one sequence in a layer whose tokens have this dtype."""
        return StateSpec(
            sum(self.parts[1:4]),
            self.conv_width,
            self.num_heads,
            self.num_groups,
            self.state_dim,
            self.head_dim,
            dtype=dtype,
            is_delta=False,
        )


class Mamba2(StateLayer):
    """Project, convolve, run the state space dual, normalise with a gate, project back.

    (z, x, b, c, dt) = u W_in; (x, b, c) = silu(conv(x, b, c)); dt = softplus(dt + dt_bias), within
    its limits; y of `ops.ssd` with a = -exp(a_log); y = norm(y silu(z)) W_o. Rows of in_proj are
    the five parts, one after another. Source: Dao and Gu, 2024, "Transformers are SSMs", section 7.

    Args:
        hidden_size: the width E of u.
        config: the sizes of the layer.

    Attributes:
        conv, conv_bias: (H P + 2 G N, W) and (H P + 2 G N,), or None.
        a_log, dt_bias, d: (H,) float32.
        norm: the gated norm of the H P channels; None for none: y is then (y silu(z)) W_o.
    """

    config: Mamba2Config
    wide = ("a_log", "dt_bias", "d")
    conv_bias: nn.Parameter | None

    def __init__(self, hidden_size: int, config: Mamba2Config) -> None:
        super().__init__()
        self.config = config
        heads, width = config.num_heads, config.parts[0]
        self.in_proj = nn.Linear(hidden_size, sum(config.parts), bias=config.has_in_bias)
        channels = sum(config.parts[1:4])
        self.conv = nn.Parameter(torch.zeros(channels, config.conv_width))
        bias = nn.Parameter(torch.zeros(channels)) if config.has_conv_bias else None
        self.register_parameter("conv_bias", bias)
        self.a_log = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.ones(heads, dtype=torch.float32))
        self.d = nn.Parameter(torch.ones(heads, dtype=torch.float32))
        self.norm: GatedRMSNorm | None = None
        if config.norm_groups:
            self.norm = GatedRMSNorm(
                width,
                config.norm_eps,
                group_size=width // config.norm_groups,
                gate_first=config.gate_first,
                rounds_first=config.rounds_first,
            )
        self._factors: Tensor | None = None  # of the parts, on the device; no buffer to be saved
        self.o_proj = nn.Linear(width, hidden_size, bias=config.has_out_bias)

    def mix(
        self, x: Tensor, memory: Memory, adapters: StepAdapters | None = None
    ) -> Tensor | Parts | RankPart:
        """Return the layer's output for x (..., E), same shape: each row sees earlier rows of its
        sequence.

        The slots of `memory`, if it has some, are updated in place.
        """
        config, (gate, *channels, steps) = self.config, self.config.parts
        if config.input_scale != 1:
            x = x * config.input_scale
        parts = project(self.in_proj, x, adapters)
        if any(scale != 1 for scale in config.part_scales):
            parts = parts * self.factors_like(parts)
        z, mixed, dt = parts.split_with_sizes((gate, sum(channels), steps), -1)
        mixed = memory.convolve(mixed, self.conv, self.conv_bias, "silu")
        u, b, c = mixed.split_with_sizes(channels, -1)
        u = u.unflatten(-1, (-1, config.head_dim))
        b, c = (part.unflatten(-1, (-1, config.state_dim)) for part in (b, c))
        dt = activate(F.softplus, dt.to(self.a_log.dtype) + self.dt_bias, on_cpu=True)
        if config.dt_limits != (0.0, math.inf):
            dt = dt.clamp(*config.dt_limits)
        decay = activate(torch.exp, self.a_log, on_cpu=True)
        y = memory.ssd(u, dt, -decay, b, c, self.d).flatten(-2)
        if self.norm is None:
            wide = torch.promote_types(y.dtype, torch.float32)
            y = (y * activate(F.silu, z.to(wide), on_cpu=True)).to(y.dtype)
        else:
            y = self.norm(y, z)
        if config.output_scale == 1:
            return self.out(y, adapters)
        return project(self.o_proj, y, adapters) * config.output_scale

    def factors_like(self, parts: Tensor) -> Tensor:
        """Return the factors of the output channels of in_proj, (sum(config.parts),): for each the
        number in config.part_scales of the part that has the channel.

        The dtype and the device are those of `parts`, of which nothing else is read. The tensor is
        kept for later calls with the same ones.
        """
        found = self._factors
        if found is None or found.device != parts.device or found.dtype != parts.dtype:
            with torch.inference_mode(False):
                sizes = torch.tensor(self.config.parts)
                each = torch.tensor(self.config.part_scales).repeat_interleave(sizes)
                self._factors = found = each.to(parts.device, parts.dtype)
        return found
