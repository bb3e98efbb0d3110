"""Kimi's delta attention with its projections: a gated delta net whose decay is by channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.cache.spec import StateSpec
from tilewise.nn.adapted import StepAdapters
from tilewise.nn.gated_norm import GatedRMSNorm, unit_length
from tilewise.nn.layers import Parts, RankPart, activate, project
from tilewise.nn.states import Memory, StateLayer

__all__ = ["KimiDeltaAttention", "KimiDeltaConfig"]


@dataclass(frozen=True, slots=True)
class KimiDeltaConfig:
    """The sizes of Kimi's delta attention.

    Attributes:
        num_heads, head_dim: H and D, of queries, keys and values.
        conv_width: W, the tokens that the convolutions read.
        norm_eps: the epsilon of the norm behind the recurrence.
    """

    num_heads: int
    head_dim: int
    conv_width: int = 4
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "conv_width"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")

    def rows(self, name: str) -> tuple[int, ...] | None:
        """Return the number of rows of each tensor that is stacked into parameter `name`; None if
        all are equal."""
        heads, dim = self.num_heads, self.head_dim
        return (heads, dim, dim) if name == "a_proj" else None

    def state(self, dtype: torch.dtype) -> StateSpec:
        """Return the spec of the state of one sequence in a layer whose tokens have this dtype."""
        heads, dim = self.num_heads, self.head_dim
        return StateSpec(3 * heads * dim, self.conv_width, heads, heads, dim, dim, True, dtype)


class KimiDeltaAttention(StateLayer):
    """Project, convolve, run Kimi's delta rule, normalise with a gate, project back.

    (q, k, v) = silu(conv(x W_qkv)), q and k of unit length; (b, f, z) = x W_a, f and z of D
    channels; the decay of a channel is g = -exp(a_log) softplus(f W_f + dt_bias), beta =
    sigmoid(b); y = (norm(o) sigmoid(z W_z)) W_o.
    Source: Kimi Team, 2025, "Kimi Linear", section 3.

    Args:
        hidden_size: the width E of x.
        config: the sizes of the layer.

    Attributes:
        conv: (3 H D, W), the weight of the convolution.
        a_log: (H,) float32.
        dt_bias: (H D,) float32.
        norm: the norm of each head's D channels.
    """

    config: KimiDeltaConfig
    wide = ("a_log", "dt_bias")

    def __init__(self, hidden_size: int, config: KimiDeltaConfig) -> None:
        super().__init__()
        self.config = config
        heads, dim = config.num_heads, config.head_dim
        width = heads * dim
        self.qkv_proj = nn.Linear(hidden_size, 3 * width, bias=False)
        self.a_proj = nn.Linear(hidden_size, heads + 2 * dim, bias=False)
        self.f_proj = nn.Linear(dim, width, bias=False)
        self.z_proj = nn.Linear(dim, width, bias=False)
        self.conv = nn.Parameter(torch.zeros(3 * width, config.conv_width))
        self.a_log = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.ones(width, dtype=torch.float32))
        self.norm = GatedRMSNorm(dim, config.norm_eps, activation="sigmoid", rounds_first=False)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def mix(
        self, x: Tensor, memory: Memory, adapters: StepAdapters | None = None
    ) -> Tensor | Parts | RankPart:
        """Return the layer's output for x (..., E), same shape: each row sees earlier rows of its
        sequence.

        The slots of `memory`, if it has some, are updated in place.
        """
        heads, dim = self.config.num_heads, self.config.head_dim
        qkv = project(self.qkv_proj, x, adapters)
        mixed = memory.convolve(qkv, self.conv, None, "silu")
        q, k, v = mixed.unflatten(-1, (3 * heads, dim)).chunk(3, -2)
        b, f, z = project(self.a_proj, x, adapters).split_with_sizes((heads, dim, dim), -1)
        f, z = (
            project(linear, low, adapters).unflatten(-1, (heads, dim))
            for linear, low in ((self.f_proj, f), (self.z_proj, z))
        )
        shifted = f.to(self.a_log.dtype) + self.dt_bias.view(heads, dim)
        decay = activate(torch.exp, self.a_log, on_cpu=True)
        g = -decay[:, None] * activate(F.softplus, shifted, on_cpu=True)
        beta = activate(torch.sigmoid, b, on_cpu=True)
        o = memory.gated_delta(unit_length(q), unit_length(k), v, g, beta)
        return self.out(self.norm(o, z).flatten(-2), adapters)
