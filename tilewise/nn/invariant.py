"""Replace the linear layers of a model for batch-invariant inference on a GPU."""

from __future__ import annotations

from torch import nn

from tilewise.nn.attention import Attention
from tilewise.nn.experts import Experts
from tilewise.nn.invariant_linear import InvariantLinear
from tilewise.nn.quantised import QuantisedLinear

__all__ = ["use_invariant_linears"]


def use_invariant_linears(module: nn.Module) -> None:
    """Replace every nn.Linear below `module`, in place, by an `InvariantLinear` of the same weight
    and bias.

    The weights become buffers without gradient, outside of state_dict: for inference only. Mixtures
    of experts and quantised linears are switched to products whose rows do not depend on each
    other, and attention over a dense batch to the computation of an engine, see `nn.dense_cache`.
    """
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, InvariantLinear(child.weight, child.bias))
        else:
            if isinstance(child, Attention):
                child.attends_as_cached = True
            if isinstance(child, Experts | QuantisedLinear):
                child.is_invariant = True
            use_invariant_linears(child)
