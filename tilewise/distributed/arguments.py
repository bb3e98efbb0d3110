"""Arguments of attention over shared sequences, checked identically on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.distributed.exchange import Agreement, rank_and_size
from tilewise.distributed.layout import (
    Bound,
    bounds,
    edges_of,
    edges_rule,
    layout_rule,
    num_chunks,
)
from tilewise.keywords import keywords_of
from tilewise.ops import dispatch
from tilewise.ops.attention.arguments import Window

__all__ = [
    "Keywords",
    "Prepared",
    "Problem",
    "SharedAttention",
    "Window",
    "accumulator_dtype",
    "max_length",
    "prepare",
    "shared_attention",
    "window_of",
]


class Keywords(TypedDict, total=False):
    """The keyword arguments that `ring_attention` and its like share, for type checkers.

    `prepare` has the same ones, with their defaults.
    """

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
    """A checked call of attention over a shared sequence, without its tensors; hashable, as caches
    need.

    Attributes:
        rank, size: this rank and the number of ranks of the group.
        chunk: the number of tokens of a chunk of the layout.
        layout: the layout of the sequence on the ranks, see `layout.LAYOUTS`.
        left, right: the numbers of keys that a query sees before and after its position; None is
            unlimited. A causal call has right 0.
        softmax_scale: the factor of q . k.
        edges: the positions at which documents begin and end; None for one document.
        is_packed: True if q was (T / N, H, D).
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


class Prepared(NamedTuple):
    """A checked call of attention over a shared sequence with its tensors; `prepare` makes one.

    Attributes:
        q, k, v: (B, S / N, H, D), packed ones with B = 1.
        problem, group: the checked call and its ranks.
        options: the options of `attention` that all parts of the call share.
        agreement: the check with the other ranks, to be finished before anything else is exchanged;
            None without a check.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    problem: Problem
    group: dist.ProcessGroup | None
    options: dict[str, Any]
    agreement: Agreement | None

    def results(self, o: Tensor, lse: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        """Return o, or (o, lse) if lse is not None, without the batch dim of 1 if the caller's
        tensors were packed."""
        if self.problem.is_packed:
            o, lse = o.squeeze(0), None if lse is None else lse.squeeze(0)
        return o if lse is None else (o, lse)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    method: str,
    rule: Callable[[int, int, int], str | None] | None = None,
    group: dist.ProcessGroup | None = None,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    layout: str = "zigzag",
    deterministic: bool = False,
    check: bool = True,
    backend: str | None = None,
) -> Prepared:
    """Check a call on this rank, begin the check with the other ranks, and return the call.

    Args:
        method: the name of the method, "ring", "ulysses" or "gather"; ranks must agree on it.
        rule: a function that returns what is wrong with Hq, Hk and the number of ranks, or None.
        check: True to exchange shapes and options with the other ranks; without it a rank that
            differs lets all ranks hang.

    Raises:
        ValueError: something is wrong on this rank. The other ranks are told.
    """
    rank, size = rank_and_size(group)
    tensors = {"q": q, "k": k, "v": v}
    edges, problem = _edges_of(cu_seqlens)
    problem = problem or _why_no_options(window, softmax_scale, backend)
    problem = problem or _why_not(tensors, edges, layout, size)
    if problem is None and rule is not None:
        problem = rule(q.shape[-2], k.shape[-2], size)
    agreement = None
    if check:
        said = (method, causal, window, softmax_scale, layout, edges, deterministic, backend)
        agreement = Agreement(group, tensors, said, problem)
    if problem is not None:
        if agreement is not None:
            agreement.finish()
        raise ValueError(problem)
    left, right = bounds(causal, window)
    found = Problem(
        rank=rank,
        size=size,
        chunk=q.shape[-3] * size // num_chunks(size, layout),
        layout=layout,
        left=left,
        right=right,
        softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale),
        edges=edges,
        is_packed=q.dim() == 3,
    )
    if found.is_packed:
        q, k, v = (t.unsqueeze(0) for t in (q, k, v))
    options = {
        "softmax_scale": found.softmax_scale,
        "deterministic": deterministic,
        "backend": backend,
    }
    return Prepared(q, k, v, found, group, options, agreement)


class SharedAttention(Protocol):
    """The type, for type checkers, of functions such as `ring_attention`, which attend over a
    sequence that is split over ranks. They return o, with return_lse (o, lse)."""

    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_lse: Literal[False] = ...,
        **options: Unpack[Keywords],
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_lse: Literal[True],
        **options: Unpack[Keywords],
    ) -> tuple[Tensor, Tensor]: ...


def shared_attention(function: Callable[..., Tensor | tuple[Tensor, Tensor]]) -> SharedAttention:
    """Return `function`, which passes its options on to `prepare`, with the keywords of `prepare`
    in its signature; `method` and `rule` are left out. A decorator."""
    typed: Any = keywords_of(prepare, but=("method", "rule"))(function)
    shown: SharedAttention = typed
    return shown


def _edges_of(
    cu_seqlens: Sequence[int] | Tensor | None,
) -> tuple[tuple[int, ...] | None, str | None]:
    """Return (edges of the documents or None, the fault of cu_seqlens or None)."""
    if cu_seqlens is None:
        return None, None
    try:
        return edges_of(cu_seqlens), None
    except (ArithmeticError, RuntimeError, TypeError, ValueError):
        # Reported like any other mistake: raising here would leave the other ranks waiting.
        return (), f"cu_seqlens must be whole numbers, got {cu_seqlens!r}"


def _why_not(
    tensors: dict[str, Tensor], edges: tuple[int, ...] | None, layout: str, size: int
) -> str | None:
    """Return the fault of this rank's tensors, as the text of an error; None if there is none."""
    dims = 3 if edges is not None else 4
    q, k, v = tensors.values()
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            return f"{name} must be a tensor, got {type(tensor).__name__}"
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
    if q.shape[-1] < 1:
        return f"q must have at least one channel, got shape {tuple(q.shape)}"
    heads, kv_heads, tokens = q.shape[-2], k.shape[-2], q.shape[-3]
    if kv_heads < 1 or heads % kv_heads or v.shape[-2] != kv_heads or q.shape[-1] != k.shape[-1]:
        return (
            "k must have q's channels, v k's heads, and q a multiple of them, got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    refusal = layout_rule(layout, edges)
    if refusal is None and tokens % (num_chunks(size, layout) // size):
        refusal = f"a rank's tokens must be even with the zigzag layout, got {tokens}"
    if refusal is None and edges is not None:
        refusal = edges_rule(edges, tokens * size)
    return refusal


def _why_no_options(window: Window, softmax_scale: object, backend: str | None) -> str | None:
    if softmax_scale is not None and not isinstance(softmax_scale, Real):
        return f"softmax_scale must be a number, got {softmax_scale!r}"
    try:
        dispatch.check_backend_name(backend)
    except ValueError as error:
        return str(error)
    return _why_no_window(window)


def _why_no_window(window: Window) -> str | None:
    values = window if isinstance(window, tuple) else (window,)
    if isinstance(window, int) and window < 1:
        return f"window must be at least 1, got {window}"
    is_pair = isinstance(window, tuple) and len(values) == 2
    if not (is_pair or window is None or type(window) is int) or any(
        v is not None and (type(v) is not int or v < -1) for v in values
    ):
        return f"window must be None, a count or (left, right), got {window!r}"
    return None


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results of `dtype` are added: float64 for float64, else
    float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def window_of(left: Bound, right: Bound) -> dict[str, Any]:
    """Return the arguments `causal` and `window` of `attention` for bounds in keys; None is
    unlimited."""
    if right == 0:
        return {"causal": True, "window": None if left is None else (left, 0)}
    if left is None and right is None:
        return {"causal": False, "window": None}
    return {"causal": False, "window": (left, right)}


def max_length(edges: Sequence[int]) -> int:
    """Return the number of tokens of the longest document, 0 if there is none."""
    return max((b - a for a, b in pairwise(edges)), default=0)
