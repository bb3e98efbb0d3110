"""The launchers of causal_conv1d and its step for backend="reference": float64, rounded once."""

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
    """Return y (T, C) of whole packed sequences, computed in float64 and rounded to x's dtype.

    Args:
        x: (T, C).
        weight, bias: (C, width), and (C,) or None.
        initial_state: (N, width - 1, C), the rows before each sequence; None for zeros.
        edges: (N + 1,), the first row of each sequence and the end.
    """
    y = torch.zeros_like(x)
    ends = edges.tolist()
    for index, (first, end) in enumerate(itertools.pairwise(ends)):
        state = None if initial_state is None else initial_state[index]
        y[first:end] = _convolve(x[first:end], weight, bias, state, has_silu)
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
    """Return y (T, C) of new tokens of running sequences, and write the tokens to the states.

    Args:
        x: (T, C), packed.
        weight, bias: (C, width), and (C,) or None.
        states: (slots, rows, C): the last rows of a slot, the token at position p in row p % rows.
        slots, starts: (N,), each sequence's slot (-1 for none) and its tokens before this call.
        edges: (N + 1,), the first row of each sequence and the end.
    """
    y, ends = torch.zeros_like(x), edges.tolist()
    places = zip(slots.tolist(), starts.tolist(), ends[:-1], ends[1:], strict=True)
    for slot, start, first, end in places:
        if slot < 0 or first == end:
            continue
        positions = torch.arange(start - weight.shape[1] + 1, start + end - first, device=x.device)
        before, new = positions.split([weight.shape[1] - 1, end - first])
        kept, num_kept = states[slot], states.shape[1]
        state = x.new_zeros(len(before), x.shape[1])
        state[before >= 0] = kept[before[before >= 0] % max(num_kept, 1)]
        y[first:end] = _convolve(x[first:end], weight, bias, state, has_silu)
        new = new[max(end - first - num_kept, 0) :]
        kept[new % max(num_kept, 1)] = x[end - len(new) : end]
    return y


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, has_silu: bool
) -> Tensor:
    wide = [t if t is None else t.double() for t in (x, weight, bias, state)]
    y, _ = recurrent.causal_conv1d(*wide, silu=has_silu)  # type: ignore[arg-type]
    return y.to(x.dtype)
