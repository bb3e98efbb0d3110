"""Mixtures of transformers whose products are ours: registered as one of its implementations.

A mixture of transformers hands rows, choices and weights to a function that its configuration
names. Its own functions multiply weights that are gathered for each row, or count rows on the host
where torch's grouped product lacks a dtype; ours is `ops.expert_mlp`, which no graph has to wait
for. Rows that learn, that lie on a CPU, or whose experts compute something else go to transformers'
grouped product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilewise import ops
from tilewise.nn.experts import ACTIVATION_OF
from tilewise.ops.expert_mlp import ExpertActivation

__all__ = ["may_count_on_host", "use_our_experts", "use_their_experts"]

_OURS, _OTHER = "tilewise", "grouped_mm"


def use_our_experts(inner: Any) -> None:
    """Let all mixtures of a model of transformers multiply by `ops.expert_mlp`, where they can."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if _mixtures(inner):
        ALL_EXPERTS_FUNCTIONS.register(_OURS, _multiply)
        inner.set_experts_implementation(_OURS)


def use_their_experts(inner: Any) -> None:
    """Let all mixtures of a model of transformers multiply by transformers' own loop over
    experts."""
    if _mixtures(inner):
        inner.set_experts_implementation("eager")


def may_count_on_host(inner: nn.Module) -> bool:
    """Return whether a mixture of the model has experts that `ops.expert_mlp` cannot compute.

    Transformers multiplies those, and it may count rows on the host, which no graph can capture.
    """
    return any(_activation(mixture) is None for mixture in _mixtures(inner))


def _multiply(
    mixture: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the weighted sum of each row's experts, as transformers' implementations do.

    Args:
        mixture: the module with the experts' weights.
        hidden_states: (T, E).
        top_k_index, top_k_weights: (T, k).
    """
    activation = _activation(mixture)
    learns = torch.is_grad_enabled() and (
        hidden_states.requires_grad or mixture.gate_up_proj.requires_grad
    )
    dtype = hidden_states.dtype
    is_ours = activation is not None and _is_on_gpu(hidden_states) and not learns
    if not is_ours or dtype == torch.float64 or mixture.gate_up_proj.dtype != dtype:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        y: Tensor = ALL_EXPERTS_FUNCTIONS[_OTHER](
            mixture, hidden_states, top_k_index, top_k_weights
        )
        return y
    assert activation is not None
    return ops.expert_mlp(
        hidden_states,
        top_k_index.contiguous(),
        top_k_weights.float().contiguous(),
        mixture.gate_up_proj,
        mixture.down_proj,
        up_bias=mixture.gate_up_proj_bias if mixture.has_bias else None,
        down_bias=mixture.down_proj_bias if mixture.has_bias else None,
        activation=activation,
        interleaved=not getattr(mixture, "is_concatenated", True),
    )


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _mixtures(inner: nn.Module) -> list[Any]:
    return [module for module in inner.modules() if hasattr(module, "is_transposed")]


def _activation(mixture: Any) -> ExpertActivation | None:
    """Return the activation of experts that `ops.expert_mlp` computes, or None."""
    from transformers.activations import ACT2FN
    from transformers.integrations import moe

    gate = type(mixture)._apply_gate
    if (
        mixture.is_transposed
        or not getattr(mixture, "has_gate", True)
        or gate.__module__ != moe.__name__
    ):
        return None
    if getattr(mixture, "has_post_expert_norm", False):
        return None
    kind = type(mixture.act_fn)
    return next((ours for name, ours in ACTIVATION_OF.items() if type(ACT2FN[name]) is kind), None)
