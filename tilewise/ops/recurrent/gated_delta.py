"""gated_delta(): the gated delta rule, and Kimi's with a decay for each channel."""

from __future__ import annotations

from typing import Never

from torch import Tensor

from tilewise.kernels.spec import RecurrentStates
from tilewise.keywords import names, unknown_keyword
from tilewise.ops import checks, dispatch
from tilewise.ops.attention.arguments import autocast
from tilewise.ops.recurrent import op
from tilewise.ops.recurrent.arguments import (
    check_edges,
    check_gate,
    check_lengths,
    check_places,
    check_rows,
    check_state,
    check_states,
    state_dtype,
)


@names
def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    q_scale: float | None = None,
    return_state: bool = False,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the gated delta rule over whole sequences.

    S' = diag(exp(g_t)) S_{t-1};  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T;
    o_t = q_scale S_t^T q_t. Differentiable once, in backward mode, in every tensor.

    A token's bits depend on its sequence alone: not on what is packed beside it, nor on how
    `gated_delta_step` receives the sequence in parts.

    Args:
        q, k: (B, S, Hk, K), or packed (T, Hk, K), any float dtype, last dim contiguous. Where a
            model normalises them, they are given normalised.
        v: (B, S, H, V) or (T, H, V), the dtype of q, H a multiple of Hk: head h reads key head
            h // (H / Hk).
        g: (..., H), the log of the decay, finite, at most 0; or (..., H, K), one for each channel
            of the keys (Kimi's delta attention). Computed in float32 (float64 for float64).
        beta: (..., H), the strength of each write, computed likewise.
        cu_seqlens: int32 (N + 1,), the first row of each packed sequence, and the end of the last;
            None for dense rows.
        initial_state: (N, H, K, V) float32 (float64 for float64), the states before the sequences;
            zeros when None.
        q_scale: a factor of the queries, K ** -0.5 when None.
        return_state: True to also return the states after the sequences.
        backend: "cpu", "triton" or "reference"; None chooses.

    Returns:
        o, shaped as v and of its dtype; with `return_state` also the states, as `initial_state`.
        A later call, or another rank, continues from a state with the bits of one call where a
        multiple of 64 tokens has been read; elsewhere `gated_delta_step` does.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Source: Yang, Kautz and Hatamizadeh, 2024, "Gated delta networks", equation 10; Kimi Team, 2025,
    "Kimi Linear", equation 1.

    Example:
        >>> q, k, v = torch.randn(3, 1, 100, 4, 64).unbind()
        >>> o = gated_delta(q, k, v, -torch.rand(1, 100, 4), torch.rand(1, 100, 4))
    """
    if unknown:
        raise unknown_keyword(gated_delta, unknown)
    q, k, v = autocast(q, k, v)
    check_rows(("q", "k", "v"), q, k, v, is_packed=cu_seqlens is not None)
    per_head = tuple(v.shape[:-1])
    g = check_gate("g", g, (per_head, (*per_head, k.shape[-1])), v)
    beta = check_gate("beta", beta, (per_head,), v)
    sequences = check_lengths(cu_seqlens, v)
    shape = (sequences, v.shape[-2], k.shape[-1], v.shape[-1])
    check_state("initial_state", initial_state, shape, state_dtype(v.dtype), v)
    scale = _scale_of(q_scale, k.shape[-1])
    dispatch.check_backend_name(backend)
    o: Tensor
    o, state = op.run(q, k, v, g, beta, initial_state, cu_seqlens, scale, True, backend)
    return (o, state) if return_state else o


@names
def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: RecurrentStates,
    *,
    slots: Tensor,
    starts: Tensor,
    cu_seqlens: Tensor | None = None,
    q_scale: float | None = None,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor:
    """Run the gated delta rule over the next tokens of sequences whose states are in slots.

    Prompts, parts of prompts and single tokens may be mixed. The results, and the states that the
    slots hold, have the bits that `gated_delta` gives for the whole sequence, however it is cut.
    Nothing is differentiable.

    Args:
        q, k, v, g, beta: packed rows as in `gated_delta`.
        states: the slots, see `recurrent_states`; they are updated in place.
        slots: int32 or int64 (N,), the slot of each sequence, different ones; -1 skips a sequence,
            whose o is 0.
        starts: int32 or int64 (N,), the number of tokens of each sequence before this call. At 0
            the state is zero, whatever the slot holds.
        cu_seqlens: int32 (N + 1,); None where each row is a sequence.
        q_scale, backend: as in `gated_delta`.

    Returns:
        o (T, H, V), a new contiguous tensor of v's dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Source: as `gated_delta`.

    Example:
        >>> states = recurrent_states(8, 4, 64, 64)
        >>> o = gated_delta_step(q, k, v, g, beta, states, slots=slots, starts=starts)
    """
    if unknown:
        raise unknown_keyword(gated_delta_step, unknown)
    checks.check_type("states", states, RecurrentStates)
    check_rows(("q", "k", "v"), q, k, v, is_packed=True)
    per_head = tuple(v.shape[:-1])
    g = check_gate("g", g, (per_head, (*per_head, k.shape[-1])), v)
    beta = check_gate("beta", beta, (per_head,), v)
    edges = check_edges(cu_seqlens, v)
    check_states(states, k, v, g.dim() == 3)
    places = check_places(slots, starts, edges.shape[0] - 1, states.state.shape[0], v.device)
    scale = _scale_of(q_scale, k.shape[-1])
    dispatch.check_backend_name(backend)
    o: Tensor = op.step(q, k, v, g, beta, *states, *places, edges, scale, True, backend)
    return o


def _scale_of(q_scale: float | None, key_dim: int) -> float:
    if q_scale is None:
        return float(max(key_dim, 1) ** -0.5)
    checks.check_number("q_scale", q_scale)
    return float(q_scale)
