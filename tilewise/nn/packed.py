"""Linear layers with weights packed for the CPU's matrix product: inference only."""

from __future__ import annotations

from torch import Tensor, nn

from tilewise.nn.layers import GatedMLP
from tilewise.nn.quantised import QuantisedLinear
from tilewise.ops import panels

__all__ = ["PackedEmbedding", "PackedLinear", "can_pack", "pack_linears", "quantisation_error"]


def can_pack(weight: Tensor) -> bool:
    """Return whether `weight` can be packed; `ops.panels.why_not_pack` gives the reason."""
    return panels.why_not_pack(weight) is None


class PackedLinear(nn.Module):
    """Compute x @ weight.T + bias from a weight in panels, see `kernels/cpu/step/panels.py`.

    One row streams the panels from memory, many rows multiply the same panels in tiles; there is
    one layout for all numbers of rows.

    Args:
        weight: (out, in), of a dtype that `can_pack` accepts; not kept.
        bias: (out,) or None.
        is_gated: True if the outputs are two halves, a gate and its factor. They are then stored in
            alternating groups of 16, so that a compiled step computes both of a column at once.
        is_int8: True to store the weight as int8 with a scale for every 64 inputs, see
            `kernels/cpu/step/int8.py`; rows and results stay in the weight's dtype.

    Attributes:
        error: the relative RMS error of the int8 weight; 0 without int8.

    Raises:
        ValueError: `is_int8` with a weight that is not finite.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        is_gated: bool = False,
        is_int8: bool = False,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.is_gated = is_gated
        if is_gated:
            weight, bias = panels.interleave(weight, bias)
        # Not buffers: panels can be neither saved nor cast.
        self.error = 0.0
        if is_int8:
            self.panels, self.error = panels.pack_int8(weight, bias)
        else:
            self.panels = panels.pack(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out), in the dtype of the weight it was made from."""
        y = panels.multiply(x, self.panels)
        if not self.is_gated:
            return y
        halves = y.unflatten(-1, (-1, 2, panels.COLUMNS)).transpose(-2, -3).flatten(-2)
        out: Tensor = halves[..., : self.out_features // 2].flatten(-2)
        return out

    def extra_repr(self) -> str:
        """Show the sizes in `print(model)`."""
        held = f"int8, error {self.error:.2%}" if self.panels.is_int8 else "as stored"
        return f"{self.in_features}, {self.out_features}, {self.dtype}, {held}"


class PackedEmbedding(nn.Module):
    """Look rows up in the panels of an output head that is tied to the embedding.

    A row of int8 panels has the values that the head multiplies by: the two stay tied.
    """

    def __init__(self, head: PackedLinear) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = head.out_features, head.in_features
        self.dtype = head.dtype
        self.panels = head.panels

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (...,) to (..., E)."""
        return panels.rows_of(self.panels, ids)


def pack_linears(module: nn.Module, *, is_int8: bool = False) -> None:
    """Replace every nn.Linear below `module` that can be packed, and thereby its parameters.

    A quantised weight is dequantised: no kernel of a CPU multiplies its codes.
    """
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:  # a subclass computes something else
            if can_pack(child.weight):
                is_gated = isinstance(module, GatedMLP) and name == "gate_up_proj"
                packed = PackedLinear(child.weight, child.bias, is_gated=is_gated, is_int8=is_int8)
                setattr(module, name, packed)
        elif isinstance(child, QuantisedLinear):
            wide = child.dequantised()
            if can_pack(wide):
                is_gated = isinstance(module, GatedMLP) and name == "gate_up_proj"
                setattr(module, name, PackedLinear(wide, child.bias, is_gated=is_gated))
        else:
            pack_linears(child, is_int8=is_int8)


def quantisation_error(model: nn.Module) -> dict[str, float]:
    """Return the relative RMS error of each int8 projection of `model`, by name.

    It is measured when the weights are packed, against the original ones; see `PackedLinear`. A
    model without int8 weights gives an empty dict.
    """
    return {
        name: module.error
        for name, module in model.named_modules()
        if isinstance(module, PackedLinear) and module.panels.is_int8
    }
