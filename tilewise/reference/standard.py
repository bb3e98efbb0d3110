"""Standard attention: softmax(Q K^T) V and its gradient, as defined.

Everything else in the package is compared with this file. It stores the whole (Sq, Sk) matrix of
scores and computes in the dtype of its inputs: float64 makes it the truth, any other dtype makes it
the eager peer. A row never touches a key that it cannot see, so inf and NaN there have no effect.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.keywords import keywords_of

__all__ = ["attention", "attention_backward", "attention_varlen", "resolve_window", "visible_keys"]

Window = int | tuple[int | None, int | None] | None


def resolve_window(causal: bool, window: Window) -> tuple[int, int]:
    """Convert `causal` and `window` to (window_left, window_right), -1 for unlimited.

    Args:
        causal: True to hide all keys right of the query, whatever `window` says.
        window: None, w (the last w keys with the query's own, causal), or (left, right).
    """
    if window is None:
        left, right = -1, -1
    elif isinstance(window, tuple):
        left, right = (-1 if side is None else int(side) for side in window)
    else:
        left, right = int(window) - 1, 0
        assert left >= 0, f"window must be at least 1, got {window}"
    assert min(left, right) >= -1, f"window must be at least -1 on each side, got {window}"
    return left, 0 if causal else right


def _distance(seqlen_q: int, seqlen_k: int, seqlens_k: Tensor | None, like: Tensor) -> Tensor:
    """Return i + Sk - Sq - j, int64 (B or 1, 1, Sq, Sk): the distance of key j to the left of query
    i."""
    i = torch.arange(seqlen_q, device=like.device).view(1, 1, -1, 1)
    j = torch.arange(seqlen_k, device=like.device).view(1, 1, 1, -1)
    length = seqlen_k if seqlens_k is None else seqlens_k.to(like.device).long().view(-1, 1, 1, 1)
    return i + length - seqlen_q - j


def visible_keys(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    mask: Tensor | None = None,
    seqlens_k: Tensor | None = None,
) -> Tensor:
    """Return which keys each query sees, bool (B or 1, Hq or 1, Sq, Sk).

    Query i sees key j of its sequence's Sk when -window_right <= i + Sk - Sq - j <= window_left
    (bottom-right alignment), j < Sk, and `mask` allows it. Arguments are those of `attention`.
    """
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    left, right = resolve_window(causal, window)
    distance = _distance(seqlen_q, seqlen_k, seqlens_k, q)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible = visible & (distance <= left)
    if right >= 0:
        visible = visible & (distance >= -right)
    if seqlens_k is not None:
        j = torch.arange(seqlen_k, device=q.device)
        visible = visible & (j < seqlens_k.to(q.device).view(-1, 1, 1, 1))
    return visible if mask is None else visible & mask


def _row_products(a: Tensor, b: Tensor, visible: Tensor) -> Tensor:
    """Return a_i . b_j (B, H, Sq, Sk) where query i sees key j, and 0 elsewhere.

    Infinities and NaN of an invisible b_j change nothing.

    Args:
        a, b: (B, H, Sq, D) and (B, H, Sk, D).
        visible: bool, broadcastable to the result.
    """
    if bool(b.isfinite().all()):
        return torch.where(visible, a @ b.transpose(-1, -2), 0.0)
    own = torch.where(visible.unsqueeze(-1), b.unsqueeze(-3), 0.0)  # (B, H, Sq, Sk, D)
    return (own @ a.unsqueeze(-1)).squeeze(-1)


def _row_sums(weights: Tensor, b: Tensor, visible: Tensor) -> Tensor:
    """Return sum_j weights_ij b_j over the keys that query i sees; (B, H, Sq, D)."""
    if bool(b.isfinite().all()):
        return weights @ b
    own = torch.where(visible.unsqueeze(-1), b.unsqueeze(-3), 0.0)  # (B, H, Sq, Sk, D)
    return (weights.unsqueeze(-2) @ own).squeeze(-2)


class _Forward(NamedTuple):
    """Intermediate results of the forward pass that a gradient needs; heads first, p before
    dropout."""

    q: Tensor  # (B, Hq, Sq, D)
    k: Tensor  # (B, Hq, Sk, D), repeated for each query head of a group
    v: Tensor  # (B, Hq, Sk, Dv)
    visible: Tensor  # bool, broadcastable to (B, Hq, Sq, Sk)
    scale: float
    slope: Tensor | float  # d capped score / d score
    p: Tensor  # (B, Hq, Sq, Sk)
    p_sink: Tensor  # (B, Hq, Sq, 1), the probability of the sink
    keep: Tensor | float  # factor of p by dropout
    lse: Tensor  # (B, Hq, Sq)
    top: Tensor  # (B, Hq, Sq), the largest logit, without the sink
    o: Tensor  # (B, Hq, Sq, Dv)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    keep_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> _Forward:
    assert q.shape[2] % k.shape[2] == 0, "query heads must be a multiple of key heads"
    assert dropout_p == 0.0 or keep_mask is not None, "dropout needs a keep_mask here"
    visible = visible_keys(q, k, causal=causal, window=window, mask=mask, seqlens_k=seqlens_k)
    distance = _distance(q.shape[1], k.shape[1], seqlens_k, q)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    group_size = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    k, v = k.repeat_interleave(group_size, dim=1), v.repeat_interleave(group_size, dim=1)

    s = _row_products(q, k, visible) * scale
    slope: Tensor | float = 1.0
    if softcap > 0:
        capped = torch.tanh(s / softcap)
        s, slope = softcap * capped, 1 - capped.detach().square()
    s = s.to(wide)
    if bias is not None:
        s = s + bias.to(wide)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(wide).reshape(-1, q.shape[1], 1, 1) * distance.abs()
    s = torch.where(visible, s, -math.inf)

    # Without sinks the extra logit is -inf, which also gives an empty row a maximum.
    sink = s.new_full((q.shape[1],), -math.inf) if sinks is None else sinks.to(wide)
    sink = sink.view(1, -1, 1, 1).expand(*s.shape[:-1], 1)
    least = s.new_full((*s.shape[:-1], 1), -math.inf)
    top = torch.cat([s, least], dim=-1).detach().amax(dim=-1)
    m = torch.cat([s, sink], dim=-1).detach().amax(dim=-1, keepdim=True)
    m = torch.where(m == -math.inf, 0.0, m)
    p, p_sink = torch.exp(s - m), torch.exp(sink - m)
    total = p.sum(dim=-1, keepdim=True) + p_sink
    empty = total == 0
    # replaced before the division, so that no gradient is 0 * inf
    total = torch.where(empty, 1.0, total)
    p, p_sink = p / total, p_sink / total
    lse = torch.where(empty, -math.inf, m + torch.log(total)).squeeze(-1)

    keep: Tensor | float = 1.0
    if keep_mask is not None:
        keep = keep_mask.to(wide) * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)
    o = _row_sums((p * keep).to(dtype), v, visible)
    return _Forward(q, k, v, visible, scale, slope, p, p_sink, keep, lse, top, o)


@keywords_of(_forward)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    return_max: bool = False,
    **options: Any,
) -> Any:
    """Compute softmax attention with the whole score matrix in memory; autograd differentiates it.

    s_ij = softmax_scale * q_i . k_j, capped, biased, -inf where j is not visible to i;
    p_ij = exp(s_ij - lse_i), lse_i = log(sum_j exp(s_ij) + exp(sink)); o_i = sum_j p_ij v_j.
    A row that sees nothing has o = 0, lse = -inf (sink, when there is one) and zero gradients.

    Args:
        q: (B, Sq, Hq, D), any float dtype; the dtype of o and of every matrix product.
        k: (B, Sk, Hk, D); Hq must be a multiple of Hk. Head h reads key head h // (Hq / Hk).
        v: (B, Sk, Hk, Dv).
        causal: True to hide the keys right of i + Sk - Sq from query i.
        window: None, w (the last w keys, causal), or (left, right) with None or -1 unlimited.
        softmax_scale: the factor of q . k, D**-0.5 by default.
        softcap: c of s -> c * tanh(s / c), before bias and mask; 0 is off.
        bias: a tensor added to s, broadcastable to (B, Hq, Sq, Sk).
        alibi_slopes: (Hq,) or (B, Hq); s -= slope * |i + Sk - Sq - j|.
        sinks: (Hq,), one more logit a head, in the denominator only.
        mask: bool, broadcastable to (B, Hq, Sq, Sk), True where visible.
        seqlens_k: (B,) int, the number of keys of each sequence, which takes the place of Sk.
        keep_mask: bool, broadcastable to (B, Hq, Sq, Sk), False where dropout drops.
        dropout_p: the drop probability; kept probabilities are multiplied by 1 / (1 - dropout_p).
        return_lse: True to return the log-sum-exp too.
        return_max: True to return o, lse and the largest s_ij of each row, without the sink.

    Returns:
        o (B, Sq, Hq, Dv) in the dtype of q [, lse (B, Hq, Sq), natural log, float32 or wider
        [, maxima (B, Hq, Sq), -inf in rows that see nothing]].

    Source: Stratos, "Efficient Attention", eq. 4; the first paper's MHA and GQA, eq. 7.
    """
    forward = _forward(q, k, v, **options)
    o = forward.o.transpose(1, 2)
    if return_max:
        return o, forward.lse, forward.top
    return (o, forward.lse) if return_lse else o


@keywords_of(_forward)
def attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dlse: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute the gradient of `attention` by the chain rule as printed, not by autograd.

    dV = P^T dO; dP = dO V^T; dS = P * (dP - rowsum(P * dP) + dlse), with P * dP taken after
    dropout; dQ = softmax_scale * dS K; dK = softmax_scale * dS^T Q.

    Args:
        do: (B, Sq, Hq, Dv), gradient of o.
        dlse: (B, Hq, Sq), gradient of lse; None is zero.
        q, k, v, options: as for `attention`.

    Returns:
        dq, dk, dv in the shapes of q, k, v; dbias in the shape of bias and dsinks (Hq,), None
        where there was none.

    Source: Stratos, "Efficient Attention", eq. 5 and section 2.3.
    """
    f = _forward(q, k, v, **options)
    bias, sinks = options.get("bias"), options.get("sinks")
    do = do.transpose(1, 2)
    dp = _row_products(do, f.v, f.visible) * f.keep
    dv = (f.p * f.keep).to(q.dtype).transpose(-1, -2) @ do
    u = (f.p * dp).sum(dim=-1, keepdim=True)
    if dlse is not None:
        u = u - dlse.unsqueeze(-1)
    ds = f.p * (dp - u)
    dbias = None if bias is None else ds.sum_to_size(bias.shape).to(bias.dtype)
    dsinks = None if sinks is None else -(f.p_sink * u).sum(dim=(0, 2, 3)).to(sinks.dtype)
    ds = (ds * f.slope * f.scale).to(q.dtype)
    dq = _row_sums(ds, f.k, f.visible).transpose(1, 2)
    dk = ds.transpose(-1, -2) @ f.q
    # A group's query heads share one key head, so their gradients add up.
    dk, dv = (x.unflatten(1, (k.shape[2], -1)).sum(dim=2).transpose(1, 2) for x in (dk, dv))
    return dq, dk, dv, dbias, dsinks


_OF_PAIRS = ("bias", "mask", "keep_mask")  # arguments of (query, key) pairs


def _crop(tensor: Tensor | None, row: int, seqlen_q: int, seqlen_k: int) -> Tensor | None:
    """Cut sequence `row`, of seqlen_q rows and seqlen_k keys, out of a tensor broadcastable to (B,
    Hq, max Sq, max Sk). Dims of size 1 stay; None stays None."""
    if tensor is None:
        return None
    tensor = tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))
    tensor = tensor if tensor.shape[0] == 1 else tensor[row : row + 1]
    tensor = tensor if tensor.shape[2] == 1 else tensor[:, :, :seqlen_q]
    return tensor if tensor.shape[3] == 1 else tensor[..., :seqlen_k]


@keywords_of(_forward)
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    return_lse: bool = False,
    return_max: bool = False,
    **options: Any,
) -> Any:
    """Compute `attention` of each sequence of a packed batch, one after the other.

    Args:
        q: (Tq, Hq, D); rows cu_seqlens_q[b] ... cu_seqlens_q[b + 1] - 1 are sequence b.
        k: (Tk, Hk, D), likewise by cu_seqlens_k.
        v: (Tk, Hk, Dv).
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int, ascending from 0.
        bias, mask, keep_mask: broadcastable to (B, Hq, max Sq, max Sk); a sequence reads its
            upper left corner.
        the rest: as for `attention`.

    Returns:
        o (Tq, Hq, Dv) [, lse (Hq, Tq) [, maxima (Hq, Tq)]]; rows past the last sequence have
        o = 0, lse = -inf.
    """
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outputs, lses, tops = [], [], []
    slopes, seqlens_k = options.get("alibi_slopes"), options.get("seqlens_k")
    for row in range(len(starts_q) - 1):
        rows_q = slice(starts_q[row], starts_q[row + 1])
        rows_k = slice(starts_k[row], starts_k[row + 1])
        sizes = (rows_q.stop - rows_q.start, rows_k.stop - rows_k.start)
        own = {name: _crop(options.get(name), row, *sizes) for name in _OF_PAIRS}
        if slopes is not None and slopes.dim() == 2:
            own["alibi_slopes"] = slopes[row]
        if seqlens_k is not None:
            own["seqlens_k"] = seqlens_k[row : row + 1]
        q_own, k_own, v_own = (
            x[rows].unsqueeze(0) for x, rows in ((q, rows_q), (k, rows_k), (v, rows_k))
        )
        result = attention(q_own, k_own, v_own, return_max=True, **(options | own))
        outputs.append(result[0].squeeze(0))
        lses.append(result[1].squeeze(0))
        tops.append(result[2].squeeze(0))
    rest, wide = q.shape[0] - starts_q[-1], torch.promote_types(q.dtype, torch.float32)
    outputs.append(q.new_zeros(rest, q.shape[1], v.shape[2]))
    lses.append(q.new_full((q.shape[1], rest), -math.inf, dtype=wide))
    tops.append(lses[-1])
    o, lse = torch.cat(outputs), torch.cat(lses, dim=1)
    if return_max:
        return o, lse, torch.cat(tops, dim=1)
    return (o, lse) if return_lse else o
