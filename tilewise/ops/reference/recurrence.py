"""The launchers of gated_delta and ssd for backend="reference": token by token in float64."""

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
    """Compute whole packed sequences in float64.

    Args:
        q, k, v: (T, Hk, K), (T, Hk, K) and (T, H, V).
        g, beta: log decays (T, H) or (T, H, K), and (T, H).
        initial_state: (N, H, K, V), None for zeros.
        edges: (N + 1,), the first row of each sequence and the end.
        q_scale: the factor of q.
        is_delta: True for the delta rule, False for plain gated addition.

    Returns:
        o (T, H, V) in v's dtype, and the final states (N, H, K, V) in float32 or float64.
    """
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
    """Compute o (T, H, V) of new tokens of running sequences, and write the tokens to their slots.

    Args:
        states: the slots: states, and up to CHUNK - 1 tokens that are not yet in them.
        slots, starts: (N,), each sequence's slot (-1 for none) and its tokens before this call.
        edges: (N + 1,), the first row of each sequence and the end.
        q_scale, is_delta: the factor of q, and whether the delta rule applies.
    """
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
                if states.inverses is not None and is_delta:
                    _keep_inverse(states, slot, place)
            start, first, state = start + stop - first, stop, after
            if start % CHUNK == 0:
                states.state[slot] = state.to(states.state.dtype)
    return o


def _state_of(states: RecurrentStates, slot: int, start: int, is_delta: bool) -> Tensor | None:
    """Return a slot's state (H, K, V) after its `start` tokens, in float64; None if there are none.

    The tokens since the last whole chunk, which the slot keeps one by one, are added to its state.
    """
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
    """Return the rows u (T, H, V) for which the tokens of a chunk add k u^T to the state.

    Args:
        k: (T, Hk, K).
        logs: the sums of log decays from the chunk's start.
        left: beta (v - S^T k), see `_left`: without the effect of earlier tokens of the chunk,
            which is subtracted here.
        beta: (T, H).
    """
    k, rows = _per_head(k, left), list[Tensor]()
    for t in range(len(left)):
        row = left[t]
        for s, earlier in enumerate(rows):
            pair = (k[t] * k[s] * (logs[t] - logs[s]).exp()).sum(-1)
            row = row - (beta[t] * pair).unsqueeze(-1) * earlier
        rows.append(row)
    return torch.stack(rows)


def _keep_inverse(states: RecurrentStates, slot: int, place: slice) -> None:
    """Write the rows of new tokens in the inverse of 1 + beta A, for a slot's unfinished chunk.

    A has the products k_t . k_s with the decay between tokens s < t of the chunk.

    Args:
        states: the slots, whose keys, gates and betas hold the new tokens already; written.
        slot: the number of the slot.
        place: the places of the new tokens in the chunk.
    """
    keys, gates, betas = (x[slot, : place.stop].double() for x in (*states[1:3], states.betas))
    size, logs = len(keys), _running(gates)
    eye = torch.eye(size, dtype=torch.float64, device=keys.device).unsqueeze(1)
    rows = _updates(_per_head(keys, betas), logs, eye.expand(-1, betas.shape[1], -1), betas)
    states.inverses[slot, place] = 0
    states.inverses[slot, place, :, :size] = rows[place].to(states.inverses.dtype)


def _per_head(k: Tensor, v: Tensor) -> Tensor:
    return k.repeat_interleave(v.shape[1] // k.shape[1], 1)


def _running(gates: Tensor) -> Tensor:
    """Return the sums of log decays from a chunk's start to each token, (t, H, 1 or K).

    Args:
        gates: the log decay of each token, (t, H) or (t, H, K).
    """
    return (gates.unsqueeze(-1) if gates.dim() == 2 else gates).cumsum(0)


def _runs(edges: Tensor) -> list[tuple[int, int]]:
    ends = edges.tolist()
    return list(itertools.pairwise(ends))
