"""ssd(): Mamba-2's recurrence, the state space dual."""

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
def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    d: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run Mamba-2's recurrence over whole sequences.

    S_t = exp(dt_t a) S_{t-1} + b_t (dt_t x_t)^T;  y_t = S_t^T c_t + d x_t.
    Differentiable once, in backward mode, in every tensor. A token's bits depend on its sequence
    alone, as in `gated_delta`.

    Args:
        x: (B, S, H, P), or packed (T, H, P), any float dtype, last dim contiguous.
        dt: (..., H), the time steps, at least 0, with their bias and softplus applied; computed in
            float32 (float64 for float64).
        a: (H,), at most 0, computed likewise.
        b, c: (..., G, N), the dtype of x, H a multiple of G: head h reads group h // (H / G).
        d: (H,), or (H, P), what of x is passed on; nothing when None. The sum is rounded once more.
        cu_seqlens: as in `gated_delta`.
        initial_state: (sequences, H, N, P) float32 (float64 for float64); zeros when None.
        return_state: True to also return the states after the sequences.
        backend: "cpu", "triton" or "reference"; None chooses.

    Returns:
        y, shaped as x and of its dtype; with `return_state` also the states, as `initial_state`.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Source: Dao and Gu, 2024, "Transformers are SSMs", equation 16 and listing 1.

    Example:
        >>> x, b, c = torch.randn(1, 100, 8, 64), *torch.randn(2, 1, 100, 1, 128).unbind()
        >>> y = ssd(x, torch.rand(1, 100, 8), -torch.rand(8), b, c)
    """
    if unknown:
        raise unknown_keyword(ssd, unknown)
    x, b, c = autocast(x, b, c)
    check_rows(("c", "b", "x"), c, b, x, is_packed=cu_seqlens is not None)
    dt, g, d = _gates(x, dt, a, d)
    sequences = check_lengths(cu_seqlens, x)
    shape = (sequences, x.shape[-2], b.shape[-1], x.shape[-1])
    check_state("initial_state", initial_state, shape, state_dtype(x.dtype), x)
    dispatch.check_backend_name(backend)
    y, state = op.run(c, b, x, g, dt, initial_state, cu_seqlens, 1.0, False, backend)
    y = _with_skip(y, x, d)
    return (y, state) if return_state else y


@names
def ssd_step(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    states: RecurrentStates,
    *,
    slots: Tensor,
    starts: Tensor,
    d: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor:
    """Run Mamba-2's recurrence over the next tokens of sequences whose states are in slots.

    Results and states have the bits that `ssd` gives for the whole sequence, however it is cut.
    Nothing is differentiable.

    Args:
        x, dt, a, b, c, d: packed rows as in `ssd`.
        states: the slots, see `recurrent_states` (key_dim is N, value_dim P, num_key_heads G); they
            are updated in place.
        slots, starts, cu_seqlens: as in `gated_delta_step`.
        backend: as in `ssd`.

    Returns:
        y (T, H, P), a new contiguous tensor of x's dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Source: as `ssd`.

    Example:
        >>> states = recurrent_states(8, 24, 128, 64, num_key_heads=1, is_delta=False)
        >>> y = ssd_step(x, dt, a, b, c, states, slots=slots, starts=starts)
    """
    if unknown:
        raise unknown_keyword(ssd_step, unknown)
    checks.check_type("states", states, RecurrentStates)
    check_rows(("c", "b", "x"), c, b, x, is_packed=True)
    dt, g, d = _gates(x, dt, a, d)
    edges = check_edges(cu_seqlens, x)
    check_states(states, b, x, False, False)
    places = check_places(slots, starts, edges.shape[0] - 1, states.state.shape[0], x.device)
    dispatch.check_backend_name(backend)
    y: Tensor = op.step(c, b, x, g, dt, *states, *places, edges, 1.0, False, backend)
    return _with_skip(y, x, d)


def _gates(
    x: Tensor, dt: Tensor, a: Tensor, d: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return dt (..., H), the logs of decays dt * a (..., H), and d, (H,) or (H, P) or None.

    All are checked and in the dtype of states.
    """
    num_heads = x.shape[-2]
    dt = check_gate("dt", dt, (tuple(x.shape[:-1]),), x)
    a = check_gate("a", a, ((num_heads,),), x)
    if d is not None:
        d = check_gate("d", d, ((num_heads,), (num_heads, x.shape[-1])), x)
    return dt, dt * a, d


def _with_skip(y: Tensor, x: Tensor, d: Tensor | None) -> Tensor:
    """Return y + d x, added in the dtype of states and rounded to y's dtype; y itself without d."""
    if d is None:
        return y
    per_channel = d if d.dim() == 2 else d.unsqueeze(-1)
    return (y + per_channel * x).to(y.dtype)
