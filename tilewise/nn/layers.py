"""Norms and feed-forward blocks of the decoders."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise import ops
from tilewise.nn.adapted import StepAdapters
from tilewise.nn.invariant_linear import InvariantLinear
from tilewise.nn.valued import valued
from tilewise.ops import (
    cpu_step,
    invariant_linear_leaves_parts,
    linear_leaves_parts,
    linear_pays,
    most_linear_parts_rows,
)
from tilewise.ops.activation import GATES

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "Gate",
    "GatedMLP",
    "LayerNorm",
    "Parts",
    "RMSNorm",
    "RankPart",
    "ShiftedRMSNorm",
    "UnitRMSNorm",
    "activate",
    "fuses",
    "multiply",
    "name_of",
    "project",
    "project_in_parts",
]

_gelu_tanh = functools.partial(F.gelu, approximate="tanh")


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "relu2": _relu_squared,
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
}
# The names in `ops.activate` of functions whose bits in torch depend on an element's position.
_ELEMENTWISE = {
    F.silu: "silu",
    F.gelu: "gelu",
    _gelu_tanh: "gelu_tanh",
    torch.sigmoid: "sigmoid",
    torch.tanh: "tanh",
    F.softplus: "softplus",
    torch.exp: "exp",
}
_NAMES = _ELEMENTWISE | {F.relu: "relu", _relu_squared: "relu_squared"}


# On a CPU torch's operations are faster for few rows, and a Llama's steps are compiled whole
# (`engine.steps.cpu_step`). A module of a packed model rounds as such a step does, see
# `fuse_on_cpu`.
FUSED_ON = ("cuda",)


def fuse_on_cpu(module: nn.Module) -> None:
    """Set `fuses_on_cpu` on all norms, gates and ungated blocks at and below `module`.

    In inference on a CPU they then use the kernels of a compiled step and give its bits.
    """
    for child in module.modules():
        if isinstance(child, FUSED_MODULES):
            child.fuses_on_cpu = True


def name_of(function: Callable[[Tensor], Tensor]) -> str:
    """Return the name by which a compiled CPU step knows an elementwise function, e.g. "silu".

    `function` is one of the values of ACTIVATIONS or of those that `activate` takes; KeyError for
    others.
    """
    return _NAMES[function]


def activate(function: Callable[[Tensor], Tensor], x: Tensor, *, on_cpu: bool) -> Tensor:
    """Return function(x); on a CPU its values do not depend on an element's position.

    Args:
        function: one of ACTIVATIONS, torch.sigmoid, torch.tanh, F.softplus or torch.exp; its
            gradient is torch's.
        x: (..., E), contiguous in the last dim.
        on_cpu: True to return the values of `ops.activate` on a CPU; False for torch's. Other
            devices, float64, compiled code and other functions than those of `ops.activate` always
            get torch's.
    """
    if not on_cpu or x.device.type != "cpu" or torch.compiler.is_compiling():
        return function(x)
    name = _ELEMENTWISE.get(function)
    if name is None or x.dtype == torch.float64:
        return function(x)
    with torch.no_grad():
        value = ops.activate(x, name)
    return valued(function(x), value) if torch.is_grad_enabled() and x.requires_grad else value


def fuses(x: Tensor, *parameters: Tensor, on_cpu: bool = False) -> bool:
    """Return whether a kernel of `tilewise.ops` shall replace torch's operations on x and
    `parameters`.

    True in inference on a GPU, with `on_cpu` also on a CPU, for tensors of one dtype, not float64,
    that are not empty and contiguous in the last dim. The kernels are not differentiable, and
    torch.compile fuses torch's operations itself.
    """
    if torch.compiler.is_compiling() or (x.device.type not in FUSED_ON and not on_cpu):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *parameters)):
        return False
    return x.dtype != torch.float64 and x.numel() > 0 and _is_plain(x, parameters)


def _is_plain(x: Tensor, parameters: tuple[Tensor, ...]) -> bool:
    """Return whether x and `parameters` have one dtype and are all contiguous in the last dim."""
    return all(t.stride(-1) == 1 and t.dtype == x.dtype for t in (x, *parameters))


def project(linear: nn.Module, x: Tensor, adapters: StepAdapters | None = None) -> Tensor:
    """Return linear(x), plus the terms that `adapters` add for this layer.

    In inference on a GPU `ops.linear` computes the product of a few rows where it is faster than
    torch.
    """
    if adapters is None:
        return _product(linear, x)
    y: Tensor
    if hasattr(linear, "leave_sum"):  # of a rank: added before the sum
        y = linear(x, adapters)
        return y
    y = _product(linear, x)
    adapters.add(linear, x, y)
    return y


def _product(linear: nn.Module, x: Tensor) -> Tensor:
    if type(linear) is nn.Linear:
        return multiply(x, linear.weight, linear.bias)
    y: Tensor = linear(x)
    return y


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x (..., K) times weight (N, K) transposed, plus bias (N,): of a few rows by
    `ops.linear` where that is faster than torch."""
    few = x.device.type in FUSED_ON and x.numel() <= ops.MOST_LINEAR_ROWS * x.shape[-1]
    if few and x.numel() > 0 and not torch.is_autocast_enabled():
        parameters = (weight,) if bias is None else (weight, bias)
        if fuses(x, *parameters) and linear_pays(weight):
            return ops.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def project_in_parts(
    linear: nn.Module, x: Tensor, adapters: StepAdapters | None = None
) -> Tensor | Parts | RankPart:
    """Return linear(x) for the `add` of a norm: as partial sums where it is faster that the norm
    adds them.

    The result is `Parts` of a product that several programs compute, a `RankPart` of one that
    several devices share, else a tensor as from `project`. The terms of adapters are added to the
    first part, the other parts are as without adapters.
    """
    leave_sum = getattr(linear, "leave_sum", None)
    if leave_sum is not None:
        part: RankPart | None = leave_sum(x, adapters)
        return project(linear, x, adapters) if part is None else part
    if adapters is not None and isinstance(linear, InvariantLinear):
        return project(linear, x, adapters)  # rounded before they are added, for any number of rows
    y = _product_in_parts(linear, x)
    if adapters is not None:
        adapters.add(linear, x, y.sums[0] if isinstance(y, Parts) else y)
    return y


def _product_in_parts(linear: nn.Module, x: Tensor) -> Tensor | Parts:
    most = ops.MOST_LINEAR_ROWS
    if isinstance(linear, InvariantLinear):
        most = most_linear_parts_rows()
    few = x.device.type in FUSED_ON and x.numel() <= most * x.shape[-1]
    if few and x.numel() > 0 and not torch.is_autocast_enabled():
        if isinstance(linear, InvariantLinear):
            weight, leaves_parts = linear.get_buffer("weight"), invariant_linear_leaves_parts
        elif type(linear) is nn.Linear:
            weight, leaves_parts = linear.weight, linear_leaves_parts
        else:
            return _product(linear, x)
        if linear.bias is None and fuses(x, weight) and leaves_parts(weight):
            return Parts(ops.linear_parts(x, weight))
    return _product(linear, x)


class Parts(NamedTuple):
    """A product as P partial sums that are not yet added, as the `add` of `RMSNorm` and of
    `ShiftedRMSNorm` takes it.

    Attributes:
        sums: (P, ..., E) float32, the result of `ops.linear_parts`.
    """

    sums: Tensor


class _Adder(Protocol):
    """The interface of `distributed.shard_group.ShardGroup`, which adds up over several devices."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, parts: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Add x over all devices, then the residual; return the RMS norm of that sum, and the sum.

        x is this device's tensor, or `parts` partial sums (parts, ..., E) if parts is not 0. The
        second result may hold valid values only in the rows that this device adds up: use it only
        as the residual of the next call.
        """
        ...


class RankPart(NamedTuple):
    """One device's part of a product that several devices add up.

    Attributes:
        sums: (..., E), or (parts, ..., E) float32.
        parts: the number of partial sums in the first dim of `sums`; 0 if it is one tensor without
            that dim.
        group: the group of devices that adds the parts of all.
    """

    sums: Tensor
    parts: int
    group: _Adder


class RMSNorm(nn.Module):
    """Scale each row to unit root mean square: y = round(x / sqrt(mean(x^2) + eps)) * weight.

    The statistics are float32 (float64 for float64 input) and the quotient is rounded to the dtype
    of x before the weight multiplies it, which is the order that Hugging Face's Llama was trained
    with. Source: Zhang and Sennrich, 2019.

    Attributes:
        fuses_on_cpu: True if inference on a CPU uses the kernels, and gives the bits, of a compiled
            step.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.fuses_on_cpu = False

    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., dim) normalised over its last dim, in the same shape."""
        if fuses(x, self.weight, on_cpu=self.fuses_on_cpu):
            if self.fuses_on_cpu and x.dtype == torch.float32:
                # A compiled step rounds the quotient before it is multiplied by the weight, in
                # every dtype; the kernel does so in 16 bits only.
                return ops.rms_norm(x, torch.ones_like(self.weight), self.eps) * self.weight
            return ops.rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, None, self.eps) * self.weight

    def add(self, x: Tensor | Parts | RankPart, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and that sum, both (..., dim).

        x may be the partial sums of a product, which are added first; of a `RankPart` the parts of
        all devices are added, and the returned sum is for the next call only, see
        `_Adder.add_rms_norm`.
        """
        if isinstance(x, RankPart):
            return x.group.add_rms_norm(x.sums, residual, self.weight, self.eps, parts=x.parts)
        if isinstance(x, Parts):
            learns = residual.requires_grad or self.weight.requires_grad
            if not (torch.is_grad_enabled() and learns):
                return ops.add_parts_rms_norm(x.sums, residual, self.weight, self.eps)
            x = x.sums.sum(0).to(residual.dtype)
        if fuses(x, residual, self.weight, on_cpu=self.fuses_on_cpu):
            if self.fuses_on_cpu and x.dtype == torch.float32:
                total = residual + x
                return self(total), total
            return ops.add_rms_norm(x, residual, self.weight, self.eps)
        total = residual + x
        return F.rms_norm(total, self.weight.shape, None, self.eps) * self.weight, total

    def extra_repr(self) -> str:
        """Show the size in `print(model)`."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class UnitRMSNorm(nn.Module):
    """Scale each row to unit root mean square, without a weight: x / sqrt(mean(x^2) + eps)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim, self.eps, self.fuses_on_cpu = dim, eps, False

    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., dim) normalised over its last dim, in the same shape."""
        if self.fuses_on_cpu and fuses(x, on_cpu=True):
            ones = torch.ones(self.dim, dtype=x.dtype)
            return cpu_step.normalise(x, ones, None, self.eps, 0.0, centres=False)
        return F.rms_norm(x, (self.dim,), None, self.eps)

    def add(self, x: Tensor | Parts | RankPart, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and that sum, both (..., dim); x must be a tensor, not
        parts."""
        assert isinstance(x, Tensor)  # blocks leave parts for other norms
        total = residual + x
        return self(total), total

    def extra_repr(self) -> str:
        """Show the size in `print(model)`."""
        return f"{self.dim}, eps={self.eps}"


class ShiftedRMSNorm(nn.Module):
    """The norm of Gemma: y = round(x / sqrt(mean(x^2) + eps) * (1 + weight)).

    Everything before the last rounding is float32 (float64 for float64). `RMSNorm` rounds before
    the multiplication by the weight, and its weight has no added 1.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.eps = eps
        self.fuses_on_cpu = False

    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., dim) normalised over its last dim, in the same shape and dtype."""
        if self.fuses_on_cpu and fuses(x, self.weight, on_cpu=True):
            return cpu_step.normalise(x, self.weight, None, self.eps, 1.0, centres=False)
        if fuses(x, self.weight):
            return ops.shifted_rms_norm(x, self.weight, self.eps)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        weight = 1.0 + self.weight.to(wide)
        return F.rms_norm(x.to(wide), self.weight.shape, weight, self.eps).to(x.dtype)

    def add(self, x: Tensor | Parts | RankPart, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and that sum, both (..., dim).

        x may be the partial sums of a product, which are added first, but not a `RankPart`.
        """
        assert not isinstance(x, RankPart)  # ranks leave their parts for `RMSNorm` alone
        if isinstance(x, Parts):
            learns = residual.requires_grad or self.weight.requires_grad
            if not (torch.is_grad_enabled() and learns):
                return ops.add_parts_shifted_rms_norm(x.sums, residual, self.weight, self.eps)
            x = x.sums.sum(0).to(residual.dtype)
        if fuses(x, residual, self.weight):
            return ops.add_shifted_rms_norm(x, residual, self.weight, self.eps)
        total = residual + x
        return self(total), total

    def extra_repr(self) -> str:
        """Show the size in `print(model)`."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(nn.LayerNorm):
    """torch's layer norm with a method `add` that adds the residual stream first, as the other
    norms have.

    Args:
        dim: the number of channels.
        eps: the number that is added to the variance.
        has_weight, has_bias: whether a learnt weight multiplies the result, and whether a learnt
            bias is added to it.
        is_shifted: True if the factor is 1 + weight; the weight is then 0 at first.
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        *,
        has_weight: bool = True,
        has_bias: bool = True,
        is_shifted: bool = False,
    ) -> None:
        super().__init__(dim, eps, elementwise_affine=has_weight, bias=has_bias)
        self.is_shifted, self.fuses_on_cpu = is_shifted, False
        if is_shifted:
            nn.init.zeros_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """Return input (..., dim) normalised over its last dim, in the same shape."""
        if self.fuses_on_cpu and fuses(input, *self.parameters(), on_cpu=True):
            ones = torch.ones(self.normalized_shape, dtype=input.dtype)
            return cpu_step.normalise(
                input,
                ones if self.weight is None else self.weight,
                self.bias,
                self.eps,
                1.0 if self.is_shifted else 0.0,
                centres=True,
            )
        weight = self.weight + 1 if self.is_shifted else self.weight
        return F.layer_norm(input, self.normalized_shape, weight, self.bias, self.eps)

    def add(self, x: Tensor | Parts | RankPart, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and that sum, both (..., dim); x must be a tensor, not
        parts."""
        assert isinstance(x, Tensor)  # blocks leave parts for other norms
        total = residual + x
        return self(total), total


class Gate(nn.Module):
    """Multiply rows by a function of a gate: y = round(f(gate)) * x.

    Attributes:
        function: f, the value of ACTIVATIONS or torch.sigmoid.
        name: the name of f in `ops.gated_mul`, None for a function that it has not.
        fuses_on_cpu: True if inference on a CPU gives the bits of a compiled step.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], *, fuses_on_cpu: bool = False) -> None:
        super().__init__()
        name = _ELEMENTWISE.get(function)
        self.function, self.name = function, name if name in GATES else None
        self.fuses_on_cpu = fuses_on_cpu

    def forward(self, gate: Tensor, x: Tensor | None = None) -> Tensor:
        """Return f(gate) * x, both (..., I); without x gate holds both, (..., 2 I), the gate
        first."""
        given = (gate,) if x is None else (gate, x)
        if self.name is not None and fuses(*given, on_cpu=self.fuses_on_cpu):
            return ops.gated_mul(gate, x, function=self.name)
        if x is None:
            gate, x = gate.chunk(2, dim=-1)
        return activate(self.function, gate, on_cpu=self.fuses_on_cpu) * x


class GatedMLP(nn.Module):
    """Compute down(act(gate(x)) * up(x)); gate and up are one matrix product.

    Rows 0 ... I - 1 of gate_up_proj are the gate's, the other I are up's. Source: Shazeer, 2020.

    Attributes:
        gate_scale: the factor of the gate, before its activation.
        leaves_parts: True if `forward` may return partial sums for the next norm's `add`, see
            `project_in_parts`.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.gate = Gate(ACTIVATIONS[activation])
        self.leaves_parts = False
        self.gate_scale = 1.0

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        """The function of the gate, a value of ACTIVATIONS."""
        return self.gate.function

    def forward(
        self, x: Tensor, adapters: StepAdapters | None = None, added: Tensor | None = None
    ) -> Tensor | Parts | RankPart:
        """Map x (..., E) to (..., E); with `leaves_parts` perhaps as partial sums.

        Args:
            x: the rows of the batch.
            adapters: the adapters of the step's rows, whose terms are added to both products; None
                for none.
            added: (..., 2 I), a term that is added to the projection to gate and up; None for none.
        """
        gate_up = project(self.gate_up_proj, x, adapters)
        if added is not None:
            gate_up = gate_up + added
        if self.gate_scale == 1:
            y = self.gate(gate_up)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            y = self.gate(gate * self.gate_scale, up)
        down = project_in_parts if self.leaves_parts else project
        return down(self.down_proj, y, adapters)


class MLP(nn.Module):
    """Compute down(act(up(x))), the feed-forward block of GPT-2."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.fuses_on_cpu = False

    def forward(self, x: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """Map x (..., E) to (..., E); `adapters` add their terms to both products."""
        up = project(self.up_proj, x, adapters)
        y = activate(self.activation, up, on_cpu=self.fuses_on_cpu)
        return project(self.down_proj, y, adapters)


FUSED_MODULES = (RMSNorm, UnitRMSNorm, ShiftedRMSNorm, LayerNorm, Gate, MLP)
"""The modules with a `fuses_on_cpu`, see `fuse_on_cpu`."""
