"""Attention of some queries over some of their keys, and its gradient given the whole's lse.

The gradient of a part follows from o, lse and do of the whole: p = exp(s - lse) is the probability
of a key among all keys, so that no partial result is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tilewise.distributed.arguments import Problem, window_of
from tilewise.distributed.layout import Call, Run, calls_of
from tilewise.ops import attention, attention_varlen
from tilewise.ops.attention.arguments import AttentionSignature
from tilewise.ops.attention.op import attention_bwd

__all__ = ["Part", "attend", "differentiate", "lengths_of", "parts_of", "rows_of", "taken"]

Rows = slice | Tensor  # a slice of consecutive rows, otherwise int64 indices


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One call of attention of a ring step, with its indices as slices or tensors on a device.

    Attributes:
        rows, keys: the rows of the queries in this rank's tensors, and of the keys in the tensors
            of the rank that has them; no row twice.
        touched: the range (first, last + 1) of rows that contains all queries of the call.
        window: the arguments causal and window of `attention`, by name.
        lengths: the cumulative and largest lengths of packed sequences, as named arguments; empty
            for a dense call.
    """

    rows: Rows
    keys: Rows
    touched: tuple[int, int]
    window: dict[str, Any]
    lengths: dict[str, Any]


# All layers make the same calls. The cached indices are at most of S / N rows.
@lru_cache(maxsize=64)
def parts_of(problem: Problem, source: int, device: torch.device) -> tuple[Part, ...]:
    """Return the calls by which this rank's queries attend to the keys of the rank `source`, with
    their indices on `device`; none if nothing is visible."""
    calls = calls_of(
        problem.rank,
        source,
        problem.size,
        problem.chunk,
        layout=problem.layout,
        left=problem.left,
        right=problem.right,
        edges=problem.edges,
    )
    return tuple(_part(call, device) for call in calls)


def _part(call: Call, device: torch.device) -> Part:
    window = window_of(call.left, call.right)
    if call.runs is None:
        return Part(slice(*call.rows), slice(*call.keys), call.rows, window, {})
    return Part(
        rows_of([(run.q_first, run.q_last) for run in call.runs], device),
        rows_of([(run.k_first, run.k_last) for run in call.runs], device),
        call.rows,
        window,
        lengths_of(call.runs, device),
    )


def rows_of(runs: Sequence[tuple[int, int]], device: torch.device) -> Rows:
    """Return the rows of runs (first, last), one run after another; `last` is not included.

    A slice if the runs are consecutive, else int64 indices on `device`.
    """
    if all(a[1] == b[0] for a, b in pairwise(runs)):
        return slice(runs[0][0], runs[-1][1])
    with torch.inference_mode(False):  # the tensors are reused by calls that differentiate
        return torch.cat([torch.arange(first, last) for first, last in runs]).to(device)


def lengths_of(runs: Sequence[Run], device: torch.device) -> dict[str, Any]:
    """Return cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k of a packed call's runs, by
    name.

    They count the rows that are taken for the call, run after run.
    """
    edges = torch.zeros((2, len(runs) + 1), dtype=torch.int32)
    sizes = [[run.q_last - run.q_first for run in runs], [run.k_last - run.k_first for run in runs]]
    edges[:, 1:] = torch.tensor(sizes).cumsum(1)
    with torch.inference_mode(False):
        cu_seqlens_q, cu_seqlens_k = (row.clone().to(device) for row in edges)
    return {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max(sizes[0]),
        "max_seqlen_k": max(sizes[1]),
    }


def taken(x: Tensor, rows: Rows, dim: int = 1) -> Tensor:
    """Return `rows` of dim `dim` of x: a view of a slice, or a copy of rows given by indices."""
    if isinstance(rows, Tensor):
        return x.index_select(dim, rows)
    return x.narrow(dim, rows.start, rows.stop - rows.start)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: dict[str, Any],
    lengths: dict[str, Any],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return o (B, rows, Hq, Dv) and lse (B, Hq, rows) of a call.

    Args:
        q, k, v: (B, rows, H, D); B is 1 if lengths are given, for packed sequences.
        window: causal and window of `attention`.
        lengths: the arguments of `attention_varlen` from `lengths_of`; empty for a dense call.
        options: the options softmax_scale, deterministic and backend of `attention`.
    """
    if not lengths:
        return attention(q, k, v, return_lse=True, **window, **options)
    o, lse = attention_varlen(q[0], k[0], v[0], return_lse=True, **lengths, **window, **options)
    return o.unsqueeze(0), lse.unsqueeze(0)


def differentiate(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    window: dict[str, Any],
    lengths: dict[str, Any],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a call's contribution to dq (B, rows, Hq, D), and to dk and dv (B, keys, Hk, D).

    Args:
        do, dlse, o, lse: gradients and results of the call's queries over all of their keys, also
            those of other calls; dlse may be None.
        q, k, v, window, lengths, options: as in `attend`.
    """
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    if not lengths:
        q, k, v, prepared = AttentionSignature(q, k, v, **window, **options).bind()
        dq, dk, dv, _, _ = attention_bwd(do, dlse, q, k, v, o, lse, False, *prepared)
        return dq, dk, dv
    given = AttentionSignature(q[0], k[0], v[0], **lengths, **window, **options)
    q, k, v, prepared = given.bind()
    dlse = None if dlse is None else dlse[0]
    dq, dk, dv, _, _ = attention_bwd(do[0], dlse, q, k, v, o[0], lse[0], False, *prepared)
    return dq.unsqueeze(0), dk.unsqueeze(0), dv.unsqueeze(0)
