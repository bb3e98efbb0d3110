"""backend="reference" of choose_experts: token by token, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.kernels.spec import ElementSpec


def why_not(spec: ElementSpec) -> str | None:
    """Return None, as the oracle computes every call."""
    return None


def launch(
    logits: Tensor,
    correction_bias: Tensor | None,
    expert_scale: Tensor | None,
    num_active: int,
    scores: str,
    normalised: bool,
    norm_eps: float,
    scale: float,
    num_groups: int,
    num_active_groups: int,
    best_in_group: int,
    jitter: float,
    shared_weight: str,
) -> tuple[Tensor, Tensor]:
    """Return the chosen experts and their weights, (T, k) or (T, k + 1) each, computed in float64.

    The arguments are those of `ops.choose_experts`, whose docstring has the rules.
    """
    gates = torch.ones(len(logits), dtype=torch.float64)
    if shared_weight == "sigmoid":
        gates, logits = logits[:, -1].double().sigmoid(), logits[:, :-1]
    bias = [0.0] * logits.shape[1] if correction_bias is None else correction_bias.tolist()
    factors = [1.0] * logits.shape[1] if expert_scale is None else expert_scale.tolist()
    experts, weights = [], []
    for row in logits.double():
        if row.isnan().any():
            found, parts = list(range(num_active)), [math.nan] * num_active
        elif scores == "sparse_mixer":
            found, parts = _mix(row.tolist(), jitter)
        else:
            s = (row.softmax(-1) if scores == "softmax" else row.sigmoid()).tolist()
            for_choice = [value + more for value, more in zip(s, bias, strict=True)]
            groups = (num_groups, num_active_groups, best_in_group)
            found = _largest(_among_groups(for_choice, *groups), num_active)
            parts = [s[e] for e in found]
            if normalised and scores == "softmax":
                parts = row[found].softmax(-1).tolist()
            elif normalised:
                total = sum(parts) + norm_eps
                parts = [part / total if total else math.nan for part in parts]
        experts.append(found)
        weights.append([part * scale * factors[e] for part, e in zip(parts, found, strict=True)])
    if shared_weight != "none":
        experts = [[*found, logits.shape[1]] for found in experts]
        weights = [[*own, gate] for own, gate in zip(weights, gates.tolist(), strict=True)]
    shape = (logits.shape[0], num_active + (shared_weight != "none"))
    chosen = torch.tensor(experts, dtype=torch.int32, device=logits.device).view(shape)
    return chosen, torch.tensor(weights, dtype=torch.float32, device=logits.device).view(shape)


def _largest(values: list[float], count: int) -> list[int]:
    """Return the indices of the largest values in descending order; of equal ones the first."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def _among_groups(values: list[float], groups: int, active: int, best: int) -> list[float]:
    """Return the experts' values, with -inf for experts outside of the best groups.

    Args:
        values: a number of each expert.
        groups: the number of groups of consecutive experts.
        active: the number of best groups.
        best: the number of largest values of a group that are added to its score.
    """
    size = len(values) // groups
    parts = [values[g * size : (g + 1) * size] for g in range(groups)]
    kept = _largest([sum(sorted(part, reverse=True)[:best]) for part in parts], active)
    return [value if i // size in kept else -math.inf for i, value in enumerate(values)]


def _mix(row: list[float], jitter: float) -> tuple[list[int], list[float]]:
    found = _largest(row, 2)
    weights: list[float] = []
    for place, first in enumerate(found):
        others = [e for e in range(len(row)) if e not in found[:place]]
        top = row[first]
        near = [row[e] for e in others if top - row[e] <= 2 * jitter * max(abs(row[e]), top)]
        weights.append(1.0 / sum(math.exp(x - top) for x in near) if near else math.nan)
    return found, weights
