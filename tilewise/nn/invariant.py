"""Linear layers of fixed tiles, for batch-invariant inference on a GPU."""

from __future__ import annotations

from torch import Tensor, nn

from tilewise import ops
from tilewise.nn.attention import Attention
from tilewise.nn.experts import Experts

__all__ = ["InvariantLinear", "use_invariant_linears"]


class InvariantLinear(nn.Module):
    """Compute x @ weight.T + bias so that a row's bits depend on no other row: inference only.

    Args:
        weight: (out, in); held, not copied.
        bias: (out,) or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight.detach(), persistent=False)
        held = None if bias is None else bias.detach()
        self.register_buffer("bias", held, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out)."""
        weight, bias = self.get_buffer("weight"), self.bias
        assert bias is None or isinstance(bias, Tensor)
        return ops.invariant_linear(x, weight, bias)


def use_invariant_linears(module: nn.Module) -> None:
    """Replace every nn.Linear below `module`; their parameters are gone then.

    Attention over a dense batch is that of an engine from then on, see `nn.dense_cache`.
    """
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, InvariantLinear(child.weight, child.bias))
        else:
            if isinstance(child, Attention):
                child.attends_as_cached = True
            if isinstance(child, Experts):
                child.is_invariant = True
            use_invariant_linears(child)
