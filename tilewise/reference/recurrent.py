"""Layers whose memory is a state, token by token: gated delta, Mamba-2, causal convolution."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["causal_conv1d", "recurrence"]


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    q_scale: float = 1.0,
    is_delta: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the recurrence of one sequence.

    S_t = diag(exp(g_t)) S_{t-1} + k_t u_t^T and o_t = q_scale S_t^T q_t, with
    u_t = beta_t (v_t - (diag(exp(g_t)) S_{t-1})^T k_t) for the delta rule, else u_t = beta_t v_t.

    Args:
        q, k: (S, Hk, K); head h of v reads head h // (H / Hk).
        v: (S, H, V).
        g: (S, H), or (S, H, K) with a decay for each channel of the keys.
        beta: (S, H).
        state: (H, K, V) before the first token; zeros when None.

    Returns:
        o and u (S, H, V), and the state (H, K, V) after the last token, of the widest dtype given.

    Source: Yang, Kautz and Hatamizadeh, 2024, "Gated delta networks", equation 10; Kimi Team, 2025,
    "Kimi Linear", equation 1; Dao and Gu, 2024, "Transformers are SSMs", equation 16.
    """
    group = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    if state is None:
        state = torch.zeros(*k.shape[1:], v.shape[-1], dtype=v.dtype, device=v.device)
    decay = g.exp() if g.dim() == 3 else g.exp().unsqueeze(-1)
    rows, updates = [], []
    for t in range(len(v)):
        state = decay[t].unsqueeze(-1) * state
        u = v[t]
        if is_delta:
            u = u - torch.einsum("hkv,hk->hv", state, k[t])
        u = beta[t].unsqueeze(-1) * u
        updates.append(u)
        state = state + k[t].unsqueeze(-1) * u.unsqueeze(-2)
        rows.append(q_scale * torch.einsum("hkv,hk->hv", state, q[t]))
    if not rows:
        return torch.zeros_like(v), torch.zeros_like(v), state
    return torch.stack(rows), torch.stack(updates), state


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, *, silu: bool = False
) -> tuple[Tensor, Tensor]:
    """Convolve each channel of one sequence with the tokens before it.

    y_t = f(bias + sum over j of weight[:, j] x_{t - W + 1 + j}), f the identity or silu.

    Args:
        x: (S, C).
        weight: (C, W); its last column multiplies the token itself.
        bias: (C,), zeros when None.
        state: (W - 1, C), the tokens before the first, oldest first; zeros when None.

    Returns:
        y (S, C) and the last W - 1 tokens (W - 1, C).

    Source: Dao and Gu, 2024, "Transformers are SSMs", section 7.
    """
    width = weight.shape[1]
    if state is None:
        state = x.new_zeros(width - 1, x.shape[1])
    extended = torch.cat([state, x])
    y = sum(extended[j : j + len(x)] * weight[:, j] for j in range(width))
    assert isinstance(y, Tensor)
    if bias is not None:
        y = y + bias
    return (y * torch.sigmoid(y) if silu else y), extended[len(x) :]
