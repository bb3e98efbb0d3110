"""Attention of some queries over some of their keys, and its gradient given the whole's lse.

The gradient of a part follows from o, lse and do of the whole: p = exp(s - lse) is the share that
the part's keys have of all, so that no partial result is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.distributed.arguments import max_length, window_of
from tilewise.distributed.layout import Call
from tilewise.ops import attention, attention_varlen
from tilewise.ops.attention.arguments import Lengths, Rule, prepare
from tilewise.ops.attention.op import attention_bwd

__all__ = ["part_backward", "part_forward"]


def part_forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return o (B, rows, Hq, Dv) and lse (B, Hq, rows) of a call.

    Args:
        q, k, v: (B, S / N, H, D), of this rank and of the keys' rank.
        call: which rows of them.
        options: softmax_scale, deterministic and backend of `attention`.
    """
    q, k, v = q[:, slice(*call.rows)], k[:, slice(*call.keys)], v[:, slice(*call.keys)]
    if call.edges is None:
        o, lse = attention(q, k, v, return_lse=True, **window_of(call.left, call.right), **options)
        return o, lse
    o, lse = attention_varlen(
        q[0], k[0], v[0], return_lse=True,
        **_lengths(q, call), **window_of(call.left, call.right), **options,
    )  # fmt: skip
    return o.unsqueeze(0), lse.unsqueeze(0)


def part_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    call: Call,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a call gives to dq (B, rows, Hq, D), and to dk and dv (B, keys, Hk, D).

    Args:
        do, dlse: gradients of the whole's o and lse; o and lse those, all of this rank's queries.
        q, k, v, call, options: as in `part_forward`.
    """
    rows, keys = slice(*call.rows), slice(*call.keys)
    do, q, o = do[:, rows], q[:, rows], o[:, rows]
    lse = lse[:, :, rows].contiguous()
    dlse = None if dlse is None else dlse[:, :, rows].contiguous()
    k, v = k[:, keys], v[:, keys]
    if call.edges is None:
        rule = Rule(**window_of(call.left, call.right), **options)
        q, k, v, prepared = prepare(q, k, v, rule)
        dq, dk, dv, _, _ = attention_bwd(do, dlse, q, k, v, o, lse, False, *prepared)
        return dq, dk, dv
    rule = Rule(**window_of(call.left, call.right), **options)
    q, k, v, prepared = prepare(q[0], k[0], v[0], rule, Lengths(**_lengths(q, call)))
    dq, dk, dv, _, _ = attention_bwd(
        do[0], None if dlse is None else dlse[0], q, k, v, o[0], lse[0], False, *prepared
    )
    return dq.unsqueeze(0), dk.unsqueeze(0), dv.unsqueeze(0)


def _lengths(q: Tensor, call: Call) -> dict[str, Any]:
    assert call.edges is not None
    cu_seqlens = torch.tensor(call.edges, dtype=torch.int32).to(q.device, non_blocking=True)
    longest = max_length(call.edges)
    return {
        "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": longest, "max_seqlen_k": longest,
    }  # fmt: skip
