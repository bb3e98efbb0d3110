"""Linear layers with weights packed for the CPU's matrix product: inference only."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tilewise.nn.layers import GatedMLP
from tilewise.nn.quantised import QuantisedLinear
from tilewise.ops import QuantisedWeight, panels

__all__ = [
    "PackedEmbedding",
    "PackedLinear",
    "can_pack",
    "pack_linears",
    "quantisation_error",
    "why_not_narrow",
]


def can_pack(weight: Tensor) -> bool:
    """Return whether `weight` can be packed; `ops.panels.why_not_pack` gives the reason."""
    return panels.why_not_pack(weight) is None


class PackedLinear(nn.Module):
    """Compute x @ weight.T + bias from a weight in panels, see `kernels/cpu/step/panels.py`.

    One row streams the panels from memory, many rows multiply the same panels in tiles; there is
    one layout for all numbers of rows.

    Args:
        weight: (out, in), of a dtype that `can_pack` accepts; or quantised weights one below
            another, for which `ops.panels.why_not_narrow` is None. Not kept.
        bias: (out,) or None.
        is_gated: True if the outputs are two halves, a gate and its factor. They are then stored in
            alternating groups of 16, so that a compiled step computes both of a column at once.
        is_int8: True to store the weight as int8 with a scale for every 64 inputs, see
            `kernels/cpu/step/int8.py`; rows and results stay in the weight's dtype.
        dtype: the dtype of rows and results of quantised weights.

    Attributes:
        error: the relative RMS error of the int8 weight; 0 without int8.

    Raises:
        ValueError: `is_int8` with a weight that is not finite.
    """

    def __init__(
        self,
        weight: Tensor | Sequence[QuantisedWeight],
        bias: Tensor | None = None,
        *,
        is_gated: bool = False,
        is_int8: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.is_gated, self.is_int8 = is_gated, is_int8
        # Not buffers: panels can be neither saved nor cast.
        self.error = 0.0
        if not isinstance(weight, Tensor):
            self.dtype, self.in_features = dtype, weight[0].shape[1]
            self.out_features = sum(part.shape[0] for part in weight)
            order = panels.interleaved(self.out_features) if is_gated else None
            if bias is not None and order is not None:
                bias = torch.where(order < 0, 0, bias.detach()[order.clamp(min=0)])
            self.panels = panels.pack_narrow(weight, bias, dtype, order)
            return
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        if is_gated:
            weight, bias = panels.interleave(weight, bias)
        if is_int8:
            self.panels, self.error = panels.pack_int8(weight, bias)
        else:
            self.panels = panels.pack(weight, bias)

    def refill(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Overwrite the panels with another weight and bias of the shapes and the dtype of the
        first ones.

        Raises:
            ValueError: the first weight was given as quantised weights.
        """
        if self.panels.is_narrow and not self.is_int8:
            raise ValueError("weights must not be quantised to be written anew, got narrow ones")
        if self.is_gated:
            weight, bias = panels.interleave(weight, bias)
        if self.is_int8:
            _, self.error = panels.pack_int8(weight, bias, into=self.panels)
        else:
            panels.pack(weight, bias, into=self.panels)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out), in `dtype`, that of the float weight the layer was made
        from."""
        y = panels.multiply(x, self.panels)
        if not self.is_gated:
            return y
        halves = y.unflatten(-1, (-1, 2, panels.COLUMNS)).transpose(-2, -3).flatten(-2)
        out: Tensor = halves[..., : self.out_features // 2].flatten(-2)
        return out

    def extra_repr(self) -> str:
        """Show the sizes in `print(model)`."""
        bits = 8 * self.panels.num_bytes / self.panels.num_weights
        held = f"int8, error {self.error:.2%}" if self.is_int8 else f"{bits:.2f} bits a weight"
        return f"{self.in_features}, {self.out_features}, {self.dtype}, {held}"


class PackedEmbedding(nn.Module):
    """An embedding that looks its rows up in the panels of a tied output head, without a copy of
    its own.

    Rows of int8 or other narrow panels are dequantised to the values by which the head multiplies.
    """

    def __init__(self, head: PackedLinear) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = head.out_features, head.in_features
        self.dtype = head.dtype
        self.panels = head.panels

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids (...,) to their rows (..., E) of the head's weight."""
        return panels.rows_of(self.panels, ids)


def pack_linears(module: nn.Module, *, is_int8: bool = False) -> None:
    """Replace every linear layer below `module` that can be packed by a `PackedLinear`, in place.

    The parameters of such layers go; the layers are for inference only. `is_int8` stores weights
    that are not quantised yet as int8.

    Quantised weights stay as narrow as they are where the CPU's kernels read them; a warning names
    the first of the others, which are dequantised.
    """
    widened: list[str] = []
    _pack_below(module, is_int8, "", widened)
    if widened:
        others = "" if len(widened) == 1 else f", and {len(widened) - 1} others alike"
        warnings.warn(f"dequantised on this CPU: {widened[0]}{others}", stacklevel=3)


def _pack_below(module: nn.Module, is_int8: bool, path: str, widened: list[str]) -> None:
    for name, child in list(module.named_children()):
        is_gated = isinstance(module, GatedMLP) and name == "gate_up_proj"
        if type(child) is nn.Linear:  # a subclass computes something else
            if can_pack(child.weight):
                packed = PackedLinear(child.weight, child.bias, is_gated=is_gated, is_int8=is_int8)
                setattr(module, name, packed)
        elif isinstance(child, QuantisedLinear):
            if not can_pack(torch.empty((1, 1), dtype=child.dtype, device=child.device)):
                continue
            reason = why_not_narrow(child.parts, is_gated=is_gated)
            if reason is None:
                narrow = PackedLinear(child.parts, child.bias, is_gated=is_gated, dtype=child.dtype)
                setattr(module, name, narrow)
                continue
            widened.append(f"{path}{name}: {reason}")
            packed = PackedLinear(child.dequantised(), child.bias, is_gated=is_gated)
            setattr(module, name, packed)
        else:
            _pack_below(child, is_int8, f"{path}{name}.", widened)


def why_not_narrow(parts: Sequence[QuantisedWeight], *, is_gated: bool) -> str | None:
    """Return why quantised weights, stacked along their rows, cannot stay narrow; None if they can.

    Weights that cannot are dequantised when they are packed.

    Args:
        parts: the weights, the first on top; values of those on "meta" are taken to be finite.
        is_gated: True if they are the gate and the up projection of a gated MLP.
    """
    if is_gated and len(parts) > 1:
        return "a gate and its factor must be quantised alike"
    return next(filter(None, map(panels.why_not_narrow, parts)), None)


def quantisation_error(model: nn.Module) -> dict[str, float]:
    """Return the relative RMS error of each int8 projection of `model`, by name.

    Keys are the names of modules. The error is measured when a weight is packed, against the
    original weight; see `PackedLinear`. A model without int8 weights gives an empty dict.
    """
    return {
        name: module.error
        for name, module in model.named_modules()
        if isinstance(module, PackedLinear) and module.is_int8
    }
