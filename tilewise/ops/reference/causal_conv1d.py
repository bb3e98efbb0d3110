"""backend="reference" of causal_conv1d."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.reference import recurrent


def why_not(spec: ElementSpec) -> str | None:
    """Return None, as the oracle computes every call."""
    return None


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    edges: Tensor,
    *,
    has_silu: bool,
) -> Tensor:
    """Return y (T, C) of whole sequences, computed in float64 and rounded."""
    y = torch.zeros_like(x)
    ends = edges.tolist()
    for index, (first, end) in enumerate(itertools.pairwise(ends)):
        state = None if initial_state is None else initial_state[index]
        y[first:end] = _convolve(x[first:end], weight, bias, state, has_silu)[0]
    return y


def step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    edges: Tensor,
    *,
    has_silu: bool,
) -> Tensor:
    """Return y (T, C) of the next tokens of slots, and take these into the slots."""
    y, ends = torch.zeros_like(x), edges.tolist()
    places = zip(slots.tolist(), starts.tolist(), ends[:-1], ends[1:], strict=True)
    for slot, start, first, end in places:
        if slot < 0 or first == end:
            continue
        state = states[slot] if start > 0 else None
        y[first:end], states[slot] = _convolve(x[first:end], weight, bias, state, has_silu)
    return y


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, has_silu: bool
) -> tuple[Tensor, Tensor]:
    wide = [t if t is None else t.double() for t in (x, weight, bias, state)]
    y, after = recurrent.causal_conv1d(*wide, silu=has_silu)  # type: ignore[arg-type]
    return y.to(x.dtype), after.to(x.dtype)
