"""Differentiable layers whose values are those of batch-invariant inference, to the bit.

An engine packs its weights on a CPU and multiplies them in tiles of one size on a GPU, and its
norms and activations are fused; training uses torch's operations, whose sums have another order.
Here each such layer takes its value from the operation of inference and its gradient from torch's,
at the same inputs. The log-probabilities of a differentiable forward pass are then those that the
engine returned with the tokens.

On a CPU packing reads and writes a weight once more for each forward pass. Norms are computed
twice, and on a GPU attention; gates and products, which take nearly all of the time, once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.nn.adapted_linear import AdaptedLinear
from tilewise.nn.attention import Attention, attend_as_steps
from tilewise.nn.experts import Experts
from tilewise.nn.gated_delta_net import GatedDeltaNet
from tilewise.nn.gated_norm import GatedRMSNorm
from tilewise.nn.layers import (
    FUSED_MODULES,
    Gate,
    LayerNorm,
    Parts,
    RankPart,
    RMSNorm,
    ShiftedRMSNorm,
    UnitRMSNorm,
)
from tilewise.nn.mla import MultiheadLatentAttention
from tilewise.nn.valued import valued
from tilewise.ops import panels

__all__ = ["product", "use_inference_bits"]


class _Product(torch.autograd.Function):
    """The function x @ weight.T + bias by the product of inference, with gradients by torch's
    products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.is_cuda:
            return ops.invariant_linear(x, weight, bias)
        return panels.multiply(x, panels.pack(weight, bias))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = dy.flatten(0, -2)
        return (
            dy @ weight if needs_x else None,
            rows.T @ x.flatten(0, -2) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x (..., in) @ weight (out, in).T + bias (out,) with the bits of a batch-invariant
    engine.

    Gradients of all three are computed by torch's products.
    """
    y: Tensor = _Product.apply(x, weight, bias)  # type: ignore[no-untyped-call, unused-ignore]
    return y


class _Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        """Return input (..., in) @ weight.T + bias, (..., out), with the bits of a batch-invariant
        engine; differentiable, see `product`."""
        return product(input, self.weight, self.bias)


class _AdaptedLinear(AdaptedLinear):
    def multiply(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias with the bits of a batch-invariant engine, without the
        adapter's term; differentiable, see `product`."""
        return product(x, self.weight, self.bias)


class _Valued(nn.Module):
    """A mixin before a layer class: the layer's result is computed twice, with the value of
    inference and the gradient of torch's operations."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's value, computed without gradients, with the gradient of a second,
        differentiable pass."""
        with torch.no_grad():
            value = super().forward(*args, **kwargs)
        return valued(super().forward(*args, **kwargs), value)


class _RMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., dim) normalised over its last dim, with the value of inference and torch's
        gradient."""
        return self._valued(x)

    def add(self, x: Tensor | Parts | RankPart, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and that sum, both (..., dim), by the bits of inference;
        x is a tensor."""
        assert isinstance(x, Tensor)  # products on a CPU leave no parts
        total = residual + x
        return self._valued(total), total

    def _valued(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            value = super().forward(x)
        # With the weight inside, as its gradient is then one kernel on a GPU.
        smooth = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return valued(smooth, value)


class _GatedMul(torch.autograd.Function):
    """The function f(gate) * x of `ops.gated_mul` by the kernel of inference, with torch's
    gradients."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, x: Tensor | None, name: str, function: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(gate, x)
        ctx.name, ctx.function = name, function
        return ops.gated_mul(gate, x, function=name)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        given, x = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives: what is written by `out` has none
            factors = given.chunk(2, dim=-1) if x is None else (given, x)
            y = ctx.function(factors[0]) * factors[1]
            needs = ctx.needs_input_grad[:2]
            wanted = [t for t, is_needed in zip((given, x), needs, strict=True) if is_needed]
            found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
            d_first, d_second = (next(found) if is_needed else None for is_needed in needs)
            return d_first, d_second, None, None
        gate, d_given, d_x = given, torch.empty_like(given), None
        d_gate, d_factor = d_given, None
        if x is None:
            gate, x = given.chunk(2, dim=-1)
            d_gate, d_factor = d_given.chunk(2, dim=-1)
        elif ctx.needs_input_grad[1]:
            d_factor = d_x = torch.empty_like(x)
        value = ctx.function(gate)
        if d_factor is not None:
            torch.mul(dy, value, out=d_factor)
        read = value if ctx.name == "sigmoid" else gate
        _BACKWARD[ctx.name](dy * x, read, grad_input=d_gate)
        return d_given, d_x, None, None


# Functions of the gradient of f(gate), and of the gate or of f(gate), that write the gate's.
_BACKWARD: dict[str, Callable[..., Tensor]] = {
    "silu": torch.ops.aten.silu_backward.grad_input,
    "gelu": partial(torch.ops.aten.gelu_backward.grad_input, approximate="none"),
    "gelu_tanh": partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
    "sigmoid": torch.ops.aten.sigmoid_backward.grad_input,
}


class _Gate(Gate):
    def forward(self, gate: Tensor, x: Tensor | None = None) -> Tensor:
        """Return f(gate) * x with the value of inference and torch's gradients."""
        is_plain = x is None or (x.dtype == gate.dtype and x.stride(-1) == 1)
        if self.name is None or not is_plain or gate.stride(-1) != 1 or not gate.numel():
            return super().forward(gate, x)
        apply: Callable[..., Tensor] = _GatedMul.apply
        return apply(gate, x, self.name, self.function)


class _ShiftedRMSNorm(_Valued, ShiftedRMSNorm):
    def add(self, x: Tensor | Parts | RankPart, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and that sum, both (..., dim), by the bits of inference;
        x is a tensor."""
        assert isinstance(x, Tensor)  # blocks leave parts for other norms
        total = residual + x
        return self(total), total


class _GatedRMSNorm(_Valued, GatedRMSNorm): ...


class _UnitRMSNorm(_Valued, UnitRMSNorm): ...


class _LayerNorm(_Valued, LayerNorm): ...


class _GatedDeltaNet(GatedDeltaNet):
    def inputs(self, mixed: Tensor, ba: Tensor) -> tuple[Tensor, ...]:
        """Return q, k, g and beta with the values of `fused_inputs` and the gradients of
        `GatedDeltaNet.inputs`."""
        with torch.no_grad():
            values = self.fused_inputs(mixed, ba)
        return tuple(map(valued, super().inputs(mixed, ba), values))


_VALUED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _Linear,
    AdaptedLinear: _AdaptedLinear,
    RMSNorm: _RMSNorm,
    ShiftedRMSNorm: _ShiftedRMSNorm,
    Gate: _Gate,
}
# What a GPU's engine computes by a kernel of its own; on a CPU such a layer has these bits anyway.
_VALUED_ON_GPU: dict[type[nn.Module], type[nn.Module]] = {
    GatedRMSNorm: _GatedRMSNorm,
    GatedDeltaNet: _GatedDeltaNet,
}
# What a CPU's engine computes by kernels of its own, and a GPU's by torch's operations.
_VALUED_ON_CPU: dict[type[nn.Module], type[nn.Module]] = {
    UnitRMSNorm: _UnitRMSNorm,
    LayerNorm: _LayerNorm,
}


def use_inference_bits(model: nn.Module, *weights: Tensor) -> None:
    """Make the layers below `model` return the values of a batch-invariant engine on their device.

    The classes of layers are changed in place; all stay trainable. On a GPU a dense batch attends
    as described in `nn.dense_cache`.

    Args:
        model: the model, whose parameters keep their names and identity.
        weights: the weights of products that no layer below computes, to be checked as well.

    Raises:
        UnsupportedError: an engine would not pack one of the weights on a CPU, or not multiply it
            on a GPU, for its dtype or shape; or the model has latent attention. The model is
            unchanged then.
    """
    linears = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    is_on_gpu = all(weight.is_cuda for weight in (*linears, *weights))
    for weight in (*linears, *weights):
        reason = _why_not_on_gpu(weight) if is_on_gpu else panels.why_not_pack(weight)
        if reason is not None:
            who = "a GPU multiplies" if is_on_gpu else "a CPU packs"
            raise UnsupportedError(f"weights must be such that {who} them: {reason}")
    if any(isinstance(m, MultiheadLatentAttention) for m in model.modules()):
        raise UnsupportedError("attention must keep keys and values for these bits, got latents")
    kinds = _VALUED | (_VALUED_ON_GPU if is_on_gpu else _VALUED_ON_CPU)
    for module in list(model.modules()):
        if type(module) in kinds:
            module.__class__ = kinds[type(module)]
        if isinstance(module, FUSED_MODULES):
            module.fuses_on_cpu = not is_on_gpu
        if isinstance(module, Attention):
            module.attends_as_cached = is_on_gpu
        if isinstance(module, Experts):
            module.has_inference_bits, module.fuses_on_cpu = True, not is_on_gpu
            # One tile for any number of rows, as in a batch-invariant engine.
            module.is_invariant = is_on_gpu
    if not is_on_gpu:
        attend_as_steps(model)


def _why_not_on_gpu(weight: Tensor) -> str | None:
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype must be float32, float16 or bfloat16, got {weight.dtype}"
    return None
