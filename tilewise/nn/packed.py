"""Linear layers whose weights lie as the CPU's matrix product reads them: inference only."""

from __future__ import annotations

import platform

import torch
from torch import Tensor, nn

__all__ = ["PackedLinear", "can_pack", "pack_linears"]


def can_pack(weight: Tensor) -> bool:
    """Whether `weight` can be packed: a float matrix on an x86 CPU, and torch built with oneDNN.

    (On other CPUs oneDNN has other layouts, and nobody has measured them.)
    """
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and weight.dim() == 2
        and weight.numel() > 0
        and platform.machine().lower() in ("x86_64", "amd64")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to multiply in: `dtype`, or float32 where the CPU cannot multiply it.

    Without instructions for it torch multiplies two half-precision matrices element by element:
    256 x 512 by 64 rows of float16 takes 1,100 us, widened to float32 it takes 190 (EPYC 9004, one
    core, 2026-11).
    """
    is_native = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype if dtype not in is_native or is_native[dtype]() else torch.float32


class PackedLinear(nn.Module):
    """Compute x @ weight.T + bias from a weight in oneDNN's own layout.

    One row through 7.7 M bfloat16 parameters takes 2.4 ms with nn.Linear and 1.0 ms packed, 8 rows
    3.2 and 1.7 ms, 64 rows 7.7 and 5.9 ms; from 256 rows on they are alike (EPYC 9004, one core,
    2026-11).

    Args:
        weight: (out, in), of a dtype that `can_pack` accepts; not kept.
        bias: (out,) or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.compute_dtype = compute_dtype(weight.dtype)
        wide = weight.detach().to(self.compute_dtype)
        # Not buffers: what lies in oneDNN's layout can be neither saved nor cast.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(wide)
        self._bias = None if bias is None else bias.detach().to(self.compute_dtype)
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out), in the dtype of the weight it was made from."""
        if x.numel() == 0:
            return x.new_empty((*x.shape[:-1], self.out_features))
        if self.compute_dtype == self.dtype:
            y: Tensor = self._product(x, self._packed, self._bias, "none", [], "")
            return y
        wide: Tensor = self._product(
            x.to(self.compute_dtype), self._packed, self._bias, "none", [], ""
        )
        return wide.to(self.dtype)

    def extra_repr(self) -> str:
        """Show the sizes in `print(model)`."""
        return f"{self.in_features}, {self.out_features}, {self.dtype}"


def pack_linears(module: nn.Module) -> None:
    """Replace every nn.Linear below `module` that can be packed; its parameters are gone then."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            if can_pack(child.weight):
                setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            pack_linears(child)
