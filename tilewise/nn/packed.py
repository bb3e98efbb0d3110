"""Linear layers whose weights lie as the CPU's matrix product reads them: inference only."""

from __future__ import annotations

from torch import Tensor, nn

from tilewise.nn.layers import GatedMLP
from tilewise.ops import panels

__all__ = ["PackedEmbedding", "PackedLinear", "can_pack", "pack_linears", "quantisation_error"]


def can_pack(weight: Tensor) -> bool:
    """Whether `weight` can be packed; `ops.panels.why_not_pack` says why not."""
    return panels.why_not_pack(weight) is None


class PackedLinear(nn.Module):
    """Compute x @ weight.T + bias from a weight in panels, see `kernels/cpu/step/panels.py`.

    One row streams the panels from memory, many rows multiply the same panels in tiles; nothing is
    kept for a number of rows.

    Args:
        weight: (out, in), of a dtype that `can_pack` accepts; not kept.
        bias: (out,) or None.
        is_gated: the outputs are two halves, of a gate and of what it multiplies, and lie in turns
            of 16, so that a compiled step computes both of a column at once.
        is_int8: hold the weight as int8 with a scale for every 64 inputs, see
            `kernels/cpu/step/int8.py`; rows and results stay in the weight's dtype.

    Attributes:
        error: with int8, the root of the mean square of what rounding took from the weight, over
            that of the weight; else 0.

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
        # Not buffers: what lies in panels can be neither saved nor cast.
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

    Of int8 panels a row is what the head multiplies by: the two stay tied.
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
    """Replace every nn.Linear below `module` that can be packed; its parameters are gone then."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:  # a subclass computes something else
            if can_pack(child.weight):
                is_gated = isinstance(module, GatedMLP) and name == "gate_up_proj"
                packed = PackedLinear(child.weight, child.bias, is_gated=is_gated, is_int8=is_int8)
                setattr(module, name, packed)
        else:
            pack_linears(child, is_int8=is_int8)


def quantisation_error(model: nn.Module) -> dict[str, float]:
    """Return the relative RMS error of each projection of `model` that is held as int8, by name.

    It is measured when the weights are packed, against those that were given; see `PackedLinear`.
    A model without int8 weights gives an empty dict.
    """
    return {
        name: module.error
        for name, module in model.named_modules()
        if isinstance(module, PackedLinear) and module.panels.is_int8
    }
