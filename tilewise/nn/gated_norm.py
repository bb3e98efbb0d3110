"""Norms with a gate, and vectors of unit length: between a recurrence and its projections."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise import ops
from tilewise.nn.layers import activate, fuses
from tilewise.nn.valued import valued

__all__ = ["UNIT_EPS", "GatedRMSNorm", "unit_length"]

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
UNIT_EPS = 1e-6  # of Flash Linear Attention, with which models are trained


def _normalised(x: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) of float32 or float64 rows.

    On a CPU the value is that of `ops.rms_norm`, which does not depend on a row's place, with
    torch's gradient.
    """
    smooth: Tensor
    dim = x.shape[-1]
    is_exact = x.device.type == "cpu" and x.numel() and not torch.compiler.is_compiling()
    if not is_exact:
        smooth = F.rms_norm(x, (dim,), None, eps)
        return smooth
    with torch.no_grad():
        value: Tensor = ops.rms_norm(x.contiguous(), x.new_ones(dim), eps)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return value
    return valued(F.rms_norm(x, (dim,), None, eps), value)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unit_length(x: Tensor) -> Tensor:
    """Return x / sqrt(sum(x^2) + 1e-6) of rows (..., K), rounded once to the dtype of x."""
    dim = x.shape[-1]
    unit: Tensor = _normalised(_widened(x), UNIT_EPS / dim) * dim**-0.5
    return unit.to(x.dtype)


class GatedRMSNorm(nn.Module):
    """Scale rows to unit root mean square, and multiply them by a weight and a function of a gate.

    y = round(x / rms(x)) * weight * f(gate), or, gate first, y = round(z / rms(z)) * weight of z =
    x f(gate). All is float32 (float64 for float64), but for the first rounding. Sources: Dao and
    Gu, 2024 (Mamba-2, the gate first); Yang et al., 2024 (gated delta nets).

    Args:
        dim: the channels of the weight.
        eps: the number that is added to the mean square.
        group_size: the channels over which each mean square is taken, a divisor of dim; None is
            all.
        activation: f, "silu" or "sigmoid".
        gate_first: True to multiply by the gate before the norm.
        rounds_first: False to round only once, after the gate.
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        *,
        group_size: int | None = None,
        activation: str = "silu",
        gate_first: bool = False,
        rounds_first: bool = True,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps, self.group_size = eps, dim if group_size is None else group_size
        self.activation, self.function = activation, _FUNCTIONS[activation]
        self.gate_first, self.rounds_first = gate_first, rounds_first
        if dim % self.group_size:
            raise ValueError(f"group_size must divide {dim} channels, got {group_size}")

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise x (..., dim) with a gate of the same shape; return a tensor of the shape and
        dtype of x."""
        if x.dim() > 1 and x.is_contiguous() and fuses(x, gate, self.weight):
            dims = x.shape[-2:]  # rows of a packed batch, and heads
            lies = x.dim() < 4
            y: Tensor = ops.gated_rms_norm(
                x if lies else x.view(-1, *dims),
                gate if lies else gate.reshape(-1, *dims),
                self.weight,
                self.eps,
                group_size=self.group_size,
                activation=self.activation,
                gate_first=self.gate_first,
                rounds_first=self.rounds_first,
            )
            return y.view(x.shape)
        factor, wide = activate(self.function, _widened(gate), on_cpu=True), _widened(x)
        if self.gate_first:
            wide = wide * factor
        groups = wide.unflatten(-1, (-1, self.group_size))
        y = _normalised(groups, self.eps).flatten(-2)
        y = (y.to(x.dtype) if self.rounds_first else y) * self.weight
        return (y if self.gate_first else y * factor).to(x.dtype)

    def extra_repr(self) -> str:
        """Show the size in `print(model)`."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
