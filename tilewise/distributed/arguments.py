"""What attention over shared sequences takes, checked the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.distributed.exchange import agree, rank_and_size
from tilewise.distributed.layout import LAYOUTS, Bound, num_chunks

__all__ = [
    "Keywords",
    "Problem",
    "Window",
    "accumulator_dtype",
    "max_length",
    "prepare",
    "result_of",
    "window_of",
]

Window = int | tuple[int | None, int | None] | None


class Keywords(TypedDict, total=False):
    """Those of `ring_attention`, but return_lse."""

    group: dist.ProcessGroup | None
    causal: bool
    window: Window
    softmax_scale: float | None
    cu_seqlens: Sequence[int] | Tensor | None
    layout: str
    deterministic: bool
    check: bool
    backend: str | None


class Problem(NamedTuple):
    """A call, checked.

    Attributes:
        rank, size: of the group.
        chunk: tokens of a chunk of the layout.
        layout: see `layout.LAYOUTS`.
        left, right: the window over positions, causal included; None is unlimited.
        softmax_scale: a number.
        edges: where documents begin and end; None is one document.
        is_packed: q was (T / N, H, D).
    """

    rank: int
    size: int
    chunk: int
    layout: str
    left: Bound
    right: Bound
    softmax_scale: float
    edges: tuple[int, ...] | None
    is_packed: bool


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None,
    causal: bool,
    window: Window,
    softmax_scale: float | None,
    cu_seqlens: Sequence[int] | Tensor | None,
    layout: str,
    check: bool,
    method: str,
    rule: Callable[[int, int, int], str | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Problem]:
    """Check a call on all ranks; return q, k and v as (B, S / N, H, D), packed ones with B = 1.

    Args:
        check: exchange shapes and options with the other ranks; without it a rank that differs
            lets all wait.
        method: its name.
        rule: says what is wrong with Hq, Hk and the number of ranks, or None.

    Raises:
        ValueError: something is wrong, on this rank or on another; on every rank.
    """
    rank, size = rank_and_size(group)
    edges = None
    if cu_seqlens is not None:
        listed = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
        edges = tuple(int(edge) for edge in listed)
    problem = _why_not(q, k, v, edges, layout, size, window)
    found = None
    if problem is None:
        left, right = _bounds(causal, window)
        is_packed = q.dim() == 3
        tokens = q.shape[-3]
        found = Problem(
            rank=rank,
            size=size,
            chunk=tokens * size // num_chunks(size, layout),
            layout=layout,
            left=left,
            right=right,
            softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale),
            edges=edges,
            is_packed=is_packed,
        )
        problem = None if rule is None else rule(q.shape[-2], k.shape[-2], size)
    if check:
        options = (method, causal, window, softmax_scale, layout, edges)
        agree(group, {"q": q, "k": k, "v": v}, options, problem)
    elif problem is not None:
        raise ValueError(problem)
    assert found is not None
    if found.is_packed:
        q, k, v = (t.unsqueeze(0) for t in (q, k, v))
    return q, k, v, found


def _why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edges: tuple[int, ...] | None,
    layout: str,
    size: int,
    window: Window,
) -> str | None:
    """Say what is wrong with the arguments of this rank, or return None."""
    if layout not in LAYOUTS:
        return f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}"
    dims = 3 if edges is not None else 4
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != dims:
            form = "(T / N, H, D) with cu_seqlens" if dims == 3 else "(B, S / N, H, D)"
            return f"{name} must be {form}, got shape {tuple(tensor.shape)}"
        if tensor.device != q.device:
            return f"{name} must be on the device of q, {q.device}, got {tensor.device}"
        if not tensor.is_floating_point():
            return f"{name} must be floating point, got {tensor.dtype}"
        if tensor.dtype != q.dtype:
            return f"{name} must have the dtype of q, {q.dtype}, got {tensor.dtype}"
        if tensor.shape[:-2] != q.shape[:-2]:
            return (
                f"{name} must have as many tokens as q, {tuple(q.shape[:-2])}, "
                f"got {tuple(tensor.shape[:-2])}"
            )
    heads, kv_heads, tokens = q.shape[-2], k.shape[-2], q.shape[-3]
    if kv_heads < 1 or heads % kv_heads or v.shape[-2] != kv_heads or q.shape[-1] != k.shape[-1]:
        return (
            "k must have q's channels, v k's heads, and q a multiple of them, got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if tokens % (num_chunks(size, layout) // size):
        return f"a rank's tokens must be even with the zigzag layout, got {tokens}"
    if edges is not None and (
        len(edges) < 2
        or edges[0] != 0
        or edges[-1] != tokens * size
        or any(a > b for a, b in pairwise(edges))
    ):
        return (
            f"cu_seqlens must ascend from 0 to the {tokens * size} tokens of all ranks, "
            f"got {list(edges[:4])} ... {edges[-1] if edges else None}"
        )
    return _why_no_window(window)


def _why_no_window(window: Window) -> str | None:
    values = window if isinstance(window, tuple) else (window,)
    if isinstance(window, int) and window < 1:
        return f"window must be at least 1, got {window}"
    if len(values) > 2 or any(v is not None and (type(v) is not int or v < -1) for v in values):
        return f"window must be None, a count or (left, right), got {window!r}"
    return None


def _bounds(causal: bool, window: Window) -> tuple[Bound, Bound]:
    """Return how far a query sees to the left and to the right."""
    if isinstance(window, int):
        return window - 1, 0
    left, right = (None, None) if window is None else window
    left, right = (None if bound in (None, -1) else bound for bound in (left, right))
    return left, 0 if causal else right


def result_of(problem: Problem, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return o and lse as the caller's tensors lie."""
    return (o.squeeze(0), lse.squeeze(0)) if problem.is_packed else (o, lse)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results are added."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def window_of(left: Bound, right: Bound) -> dict[str, Any]:
    """Return bounds as `attention` takes them."""
    if right == 0:
        return {"causal": True, "window": None if left is None else (left, 0)}
    if left is None and right is None:
        return {"causal": False, "window": None}
    return {"causal": False, "window": (left, right)}


def max_length(edges: Sequence[int]) -> int:
    """Return the tokens of the longest document."""
    return max((b - a for a, b in pairwise(edges)), default=0)
