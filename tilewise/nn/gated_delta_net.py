"""The gated delta net with its projections: Qwen3-Next, Qwen3.5, OLMo Hybrid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise import ops
from tilewise.cache.spec import StateSpec
from tilewise.nn.adapted import StepAdapters
from tilewise.nn.gated_norm import UNIT_EPS, GatedRMSNorm, unit_length
from tilewise.nn.layers import Parts, RankPart, activate, fuses, project
from tilewise.nn.states import Memory, StateLayer

__all__ = ["GatedDeltaConfig", "GatedDeltaNet"]


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """The sizes of a gated delta net.

    Attributes:
        num_key_heads, num_value_heads: Hk and H; H is a multiple of Hk.
        key_dim, value_dim: K and V, the channels of a head's key and value.
        conv_width: W, the tokens that the convolution reads.
        norm_eps: the epsilon of the norm behind the recurrence.
        beta_scale: the largest strength of a write: 2 lets a state change its sign (OLMo Hybrid).
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    norm_eps: float = 1e-6
    beta_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("num_key_heads", "num_value_heads", "key_dim", "value_dim", "conv_width"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads must be a multiple of num_key_heads {self.num_key_heads}, "
                f"got {self.num_value_heads}"
            )

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """The numbers of channels of q, k, v and the gate, all heads together: (Hk K, Hk K, H V, H
        V)."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        return keys, keys, values, values

    @property
    def heads(self) -> tuple[range, range]:
        """The indices of the key heads and of the value heads, as two ranges from 0."""
        return range(self.num_key_heads), range(self.num_value_heads)

    def rows(self, name: str) -> tuple[int, ...] | None:
        """Return the number of rows of each tensor that is stacked into parameter `name`; None if
        all are equal."""
        return {"qkvz_proj": self.parts, "conv": self.parts[:3]}.get(name)

    def state(self, dtype: torch.dtype) -> StateSpec:
        """Return the spec of the state of one sequence in a layer whose tokens have this dtype."""
        return StateSpec(
            sum(self.parts[:3]),
            self.conv_width,
            self.num_value_heads,
            self.num_key_heads,
            self.key_dim,
            self.value_dim,
            dtype=dtype,
        )


class GatedDeltaNet(StateLayer):
    """Project, convolve, run the gated delta rule, normalise with a gate, project back.

    (q, k, v, z) = x W_qkvz, (b, a) = x W_ba; (q, k, v) = silu(conv(q, k, v)); q and k have unit
    length; g = -exp(a_log) softplus(a + dt_bias), beta = beta_scale sigmoid(b); o of
    `ops.gated_delta`; y = (norm(o) silu(z)) W_o. Rows of qkvz_proj are q and k of the Hk key
    heads, then v and z of the H value heads; those of ba_proj b, then a, of the H heads.
    Source: Yang, Kautz and Hatamizadeh, 2024, "Gated delta networks", section 3.3.

    Args:
        hidden_size: the width E of x.
        config: the sizes of the layer.

    Attributes:
        conv: (2 Hk K + H V, W), the weight of the convolution.
        a_log, dt_bias: (H,) float32.
        norm: the norm of each head's V channels.
    """

    config: GatedDeltaConfig
    wide = ("a_log", "dt_bias")

    def __init__(self, hidden_size: int, config: GatedDeltaConfig) -> None:
        super().__init__()
        self.config = config
        heads = config.num_value_heads
        self.qkvz_proj = nn.Linear(hidden_size, sum(config.parts), bias=False)
        self.ba_proj = nn.Linear(hidden_size, 2 * heads, bias=False)
        self.conv = nn.Parameter(torch.zeros(sum(config.parts[:3]), config.conv_width))
        self.a_log = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.ones(heads, dtype=torch.float32))
        self.norm = GatedRMSNorm(config.value_dim, config.norm_eps)
        self.o_proj = nn.Linear(config.parts[2], hidden_size, bias=False)

    def mix(
        self, x: Tensor, memory: Memory, adapters: StepAdapters | None = None
    ) -> Tensor | Parts | RankPart:
        """Return the layer's output for x (..., E), same shape: each row sees earlier rows of its
        sequence.

        The slots of `memory`, if it has some, are updated in place.
        """
        config, (*channels, gate) = self.config, self.config.parts
        qkvz = project(self.qkvz_proj, x, adapters)
        mixed, z = qkvz.split_with_sizes((sum(channels), gate), -1)
        mixed = memory.convolve(mixed, self.conv, None, "silu")
        ba = project(self.ba_proj, x, adapters)
        v = mixed[..., -channels[2] :]
        v, z = (part.unflatten(-1, (-1, config.value_dim)) for part in (v, z))
        learns = torch.is_grad_enabled() and self.a_log.requires_grad
        if not learns and self.a_log.dtype == torch.float32 and fuses(mixed, ba):
            q, k, g, beta = self.fused_inputs(mixed, ba)
        else:
            q, k, g, beta = self.inputs(mixed, ba)
        o = memory.gated_delta(q, k, v, g, beta)
        return self.out(self.norm(o, z).flatten(-2), adapters)

    def fused_inputs(self, mixed: Tensor, ba: Tensor) -> tuple[Tensor, ...]:
        """Return q and k (..., Hk, K) of unit length, g and beta (..., H), by one kernel for
        inference.

        `mixed` is the output of the convolution, `ba` the projection to b and a.
        """
        config, rows = self.config, mixed.shape[:-1]
        found = ops.delta_inputs(
            mixed.reshape(-1, mixed.shape[-1]),
            ba.reshape(-1, ba.shape[-1]),
            self.a_log,
            self.dt_bias,
            num_key_heads=config.num_key_heads,
            key_dim=config.key_dim,
            beta_scale=config.beta_scale,
            eps=UNIT_EPS,
        )
        return tuple(x.view(*rows, *x.shape[1:]) for x in found)

    def inputs(self, mixed: Tensor, ba: Tensor) -> tuple[Tensor, ...]:
        """Return q and k (..., Hk, K) of unit length, g and beta (..., H), by differentiable
        operations.

        Arguments and values are those of `fused_inputs`.
        """
        config, channels = self.config, self.config.parts[:2]
        q, k = mixed[..., : sum(channels)].split_with_sizes(channels, -1)
        q, k = (unit_length(part.unflatten(-1, (-1, config.key_dim))) for part in (q, k))
        b, a = ba.chunk(2, -1)
        beta = activate(torch.sigmoid, b, on_cpu=True)
        if config.beta_scale != 1:
            beta = beta * config.beta_scale
        shifted = activate(F.softplus, a.to(self.a_log.dtype) + self.dt_bias, on_cpu=True)
        decay = activate(torch.exp, self.a_log, on_cpu=True)
        return q, k, -decay * shifted, beta
