"""backend="reference" of gated_delta and ssd."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tilewise.kernels.spec import CHUNK, RecurrentSpec, RecurrentStates
from tilewise.reference.recurrent import recurrence


def why_not(spec: RecurrentSpec) -> str | None:
    """Return None, as the oracle computes every call."""
    return None


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    edges: Tensor,
    *,
    q_scale: float,
    is_delta: bool,
) -> tuple[Tensor, Tensor]:
    """Return o (T, H, V) and the states (N, H, K, V) after whole sequences, in float64, rounded."""
    o = torch.zeros_like(v)
    shape = (edges.shape[0] - 1, v.shape[1], k.shape[-1], v.shape[-1])
    states = torch.zeros(shape, dtype=torch.promote_types(v.dtype, torch.float32), device=v.device)
    for index, (first, end) in enumerate(_runs(edges)):
        state = None if initial_state is None else initial_state[index].double()
        q_, k_, v_, g_, beta_ = (x[first:end].double() for x in (q, k, v, g, beta))
        o[first:end], _, states[index] = recurrence(
            q_, k_, v_, g_, beta_, state, q_scale=q_scale, is_delta=is_delta
        )
    return o, states


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: RecurrentStates,
    slots: Tensor,
    starts: Tensor,
    edges: Tensor,
    *,
    q_scale: float,
    is_delta: bool,
) -> Tensor:
    """Return o (T, H, V) of the next tokens of slots, and take these into the slots."""
    o = torch.zeros_like(v)
    for slot, start, (first, end) in zip(
        slots.tolist(), starts.tolist(), _runs(edges), strict=True
    ):
        if slot < 0 or first == end:
            continue
        state = _state_of(states, slot, start, is_delta)
        while first < end:
            held = start % CHUNK
            stop = min(end, first + CHUNK - held)
            q_, k_, v_, g_, beta_ = (x[first:stop].double() for x in (q, k, v, g, beta))
            o[first:stop], updates, after = recurrence(
                q_, k_, v_, g_, beta_, state, q_scale=q_scale, is_delta=is_delta
            )
            place = slice(held, held + stop - first)
            states.keys[slot, place] = k[first:stop]
            states.gates[slot, place] = g[first:stop].to(states.gates.dtype)
            if states.betas is None:
                states.values[slot, place] = updates.to(states.values.dtype)
            else:
                before = states.state[slot].double() if start >= CHUNK else torch.zeros_like(after)
                logs = _running(states.gates[slot, : place.stop].double())[held:]
                left = _left(before, k_, v_, logs, beta_, is_delta)
                states.values[slot, place] = left.to(states.values.dtype)
                states.betas[slot, place] = beta[first:stop].to(states.betas.dtype)
            start, first, state = start + stop - first, stop, after
            if start % CHUNK == 0:
                states.state[slot] = state.to(states.state.dtype)
    return o


def _state_of(states: RecurrentStates, slot: int, start: int, is_delta: bool) -> Tensor | None:
    """Return the state (H, K, V) after the `start` tokens that a slot holds, in float64."""
    before = states.state[slot].double() if start >= CHUNK else None
    held = start % CHUNK
    if held == 0:
        return before
    keys, gates, values = (x[slot, :held].double() for x in states[1:4])
    if states.betas is not None and is_delta:
        values = _updates(keys, _running(gates), values, states.betas[slot, :held].double())
    # What an update adds is no error to be corrected again.
    ones = torch.ones_like(values[..., 0])
    return recurrence(keys, keys, values, gates, ones, before, is_delta=False)[2]


def _left(
    before: Tensor, k: Tensor, v: Tensor, logs: Tensor, beta: Tensor, is_delta: bool
) -> Tensor:
    """Return beta (v - S^T k) for each token of a chunk, (T, H, V); without is_delta beta v.

    S is `before`, the state (H, K, V) before the chunk, times exp(logs).

    Args:
        k, v: (T, Hk, K) and (T, H, V).
        logs: the sum of log decays from the chunk's start to each token.
        beta: (T, H).
    """
    if is_delta:
        v = v - torch.einsum("hkv,thk->thv", before, _per_head(k, v) * logs.exp())
    return beta.unsqueeze(-1) * v


def _updates(k: Tensor, logs: Tensor, left: Tensor, beta: Tensor) -> Tensor:
    """Return what tokens of a chunk add to the state, of what is left of their values."""
    k, rows = _per_head(k, left), list[Tensor]()
    for t in range(len(left)):
        row = left[t]
        for s, earlier in enumerate(rows):
            pair = (k[t] * k[s] * (logs[t] - logs[s]).exp()).sum(-1)
            row = row - (beta[t] * pair).unsqueeze(-1) * earlier
        rows.append(row)
    return torch.stack(rows)


def _per_head(k: Tensor, v: Tensor) -> Tensor:
    return k.repeat_interleave(v.shape[1] // k.shape[1], 1)


def _running(gates: Tensor) -> Tensor:
    """Return the logs of decays since a chunk's start (t, H, 1 or K)."""
    return (gates.unsqueeze(-1) if gates.dim() == 2 else gates).cumsum(0)


def _runs(edges: Tensor) -> list[tuple[int, int]]:
    ends = edges.tolist()
    return list(itertools.pairwise(ends))
