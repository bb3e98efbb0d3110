"""ring_attention(): keys and values travel around the ranks, queries stay.

step s   a rank has the keys of the rank s before it; while its queries attend to them, the keys
         travel on. Partial results are merged by their log-sum-exp, always in the same order.
backward the keys travel once more, and their gradients one step behind them, until they are back
check    the ranks' messages about their arguments arrive while a rank attends to its own keys

Memory is that of a rank's own part, twice the keys and values, and in the backward pass twice their
gradients in float32. Source: Liu et al. 2023 (Ring Attention); Brandon et al. 2023 (Striped
Attention) for the balanced layout of causal parts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.distributed.arguments import (
    Keywords,
    Problem,
    accumulator_dtype,
    prepare,
    shared_attention,
)
from tilewise.distributed.exchange import Agreement, Exchange
from tilewise.distributed.layout import calls_of
from tilewise.distributed.partial import Part, attend, differentiate, parts_of, taken
from tilewise.ops import merge_states

__all__ = ["num_steps", "ring_attention"]


@shared_attention
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[Keywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend over a sequence of which each rank holds a part; exact, and differentiable once.

    The result is the rank's part of `attention(q, k, v)` over the whole sequence, or of
    `attention_varlen` where cu_seqlens is given. All ranks of the group call it together, and all
    or none run its backward pass.

    Args:
        q: (B, S / N, Hq, D), or (T / N, Hq, D) with cu_seqlens, as `shard_sequence` returns it.
        k, v: (B, S / N, Hk, D) and (B, S / N, Hk, Dv), or packed likewise.
        group: the N ranks; None is the default group.
        causal, window, softmax_scale: as `attention` takes them, over positions of the whole.
        cu_seqlens: the edges of documents in the whole packed sequence, ascending from 0 to T, the
            same on every rank; documents may cross ranks. Best a list: a tensor on a GPU is waited
            for.
        layout: the layout of the sequence on the ranks: "zigzag", "contiguous" or, with cu_seqlens,
            "documents", see `shard_sequence`; `choose_layout` compares them.
        deterministic: True if the backward pass must be bitwise reproducible, see `attention`.
        check: True to compare shapes and options of all ranks, in a small exchange that the host
            waits for. Without it ranks that differ wait for one another for ever.
        return_lse: True to return the log-sum-exp, too.
        backend: the backend of `attention`.

    Returns:
        o (B, S / N, Hq, Dv) or (T / N, Hq, Dv) in q's dtype; with return_lse also lse
        (B, Hq, S / N) or (Hq, T / N), float32, differentiable too.

    Raises:
        ValueError: a rule above is broken on some rank; on every rank.
        UnsupportedError: see `attention`.

    Example:
        >>> q, k, v = (shard_sequence(t, rank, size) for t in (q, k, v))
        >>> o = ring_attention(q, k, v, causal=True)
    """
    call = prepare(q, k, v, method="ring", **options)
    o, lse = _Ring.apply(*call)  # type: ignore[no-untyped-call, unused-ignore]
    return call.results(o, lse if return_lse else None)


@lru_cache(maxsize=16)
def num_steps(problem: Problem) -> int:
    """Return the number of ring steps, 1 to N, after which no rank's queries see further keys.

    The first step is attention to the rank's own keys.
    """
    size = problem.size
    for step in range(size - 1, 0, -1):
        for rank in range(size):
            if calls_of(
                rank,
                (rank - step) % size,
                size,
                problem.chunk,
                layout=problem.layout,
                left=problem.left,
                right=problem.right,
                edges=problem.edges,
            ):
                return step + 1
    return 1


@lru_cache(maxsize=16)
def _is_merged_once(problem: Problem) -> bool:
    """Return whether each query of this rank is in at most two calls, so that its results are
    merged once.

    So it is with two ranks, or a short window.
    """
    spans = [
        call.rows
        for source in range(problem.size)
        for call in calls_of(
            problem.rank,
            source,
            problem.size,
            problem.chunk,
            layout=problem.layout,
            left=problem.left,
            right=problem.right,
            edges=problem.edges,
        )
    ]
    return all(sum(a <= first < b for a, b in spans) <= 2 for first, _ in spans)


class _Sums:
    """o and lse of this rank's queries over the keys of the ring steps so far.

    Parts are merged in the accumulator's dtype. If a query is merged only once, its parts stay in
    their own dtype: the merge computes in float32 and rounds once, so the bits are the same, and no
    copy in float32 is written and read. At 8,192 tokens a rank of two, 64 heads of 128 channels,
    such copies took 0.5 ms beside 3.3 of attention (H200, 2026-11-23).
    """

    def __init__(self, q: Tensor, v: Tensor, *, is_merged_once: bool) -> None:
        self._like, self._dim = q, v.shape[-1]
        self._dtype = q.dtype if is_merged_once else accumulator_dtype(q.dtype)
        self._o: Tensor | None = None
        self._lse: Tensor | None = None
        self._seen: list[tuple[int, int]] = []  # ranges of rows of o that have been written

    def add(self, part: Part, o: Tensor, lse: Tensor) -> None:
        """Merge o and lse of the call `part` into the sums of its queries, in place."""
        rows, (first, last) = part.rows, part.touched
        is_all = isinstance(rows, slice) and last - first == self._like.shape[1]
        if self._o is None and is_all:
            self._o, self._lse = o.to(self._dtype), lse.to(accumulator_dtype(o.dtype))
        else:
            so_far, so_far_lse = self._made()
            if any(a < last and first < b for a, b in self._seen):
                o, lse = merge_states(
                    taken(so_far, rows), taken(so_far_lse, rows, 2), o.to(self._dtype), lse
                )
            # Rows that are not consecutive are written by an index, which does not convert.
            so_far[:, rows] = o.to(so_far.dtype)
            so_far_lse[:, :, rows] = lse.to(so_far_lse.dtype)
        self._seen.append((first, last))

    def result(self) -> tuple[Tensor, Tensor]:
        """Return o (B, S / N, Hq, Dv) in q's dtype, and lse (B, Hq, S / N); queries without keys
        have 0 and -inf."""
        o, lse = self._made()
        return o.to(self._like.dtype), lse

    def _made(self) -> tuple[Tensor, Tensor]:
        if self._o is None or self._lse is None:
            q = self._like
            batch, length, heads, _ = q.shape
            self._o = q.new_zeros((batch, length, heads, self._dim), dtype=self._dtype)
            lse_dtype = accumulator_dtype(q.dtype)
            self._lse = q.new_full((batch, heads, length), -torch.inf, dtype=lse_dtype)
        return self._o, self._lse


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        problem: Problem,
        group: dist.ProcessGroup | None,
        options: dict[str, Any],
        agreement: Agreement | None,
    ) -> tuple[Tensor, Tensor]:
        exchange, steps = Exchange(group), num_steps(problem)
        sums, keys = _Sums(q, v, is_merged_once=_is_merged_once(problem)), [k, v]
        for step in range(steps):
            pending = None
            if step + 1 < steps and agreement is None:
                pending = exchange.shift(keys)
            for part in parts_of(problem, (problem.rank - step) % problem.size, q.device):
                some_k, some_v = (taken(t, part.keys) for t in keys)
                found = attend(
                    taken(q, part.rows), some_k, some_v, part.window, part.lengths, options
                )
                sums.add(part, *found)
            if agreement is not None:
                agreement.finish()
                agreement = None
                pending = exchange.shift(keys) if step + 1 < steps else None
            if pending is not None:
                keys = pending.wait()
        o, lse = sums.result()
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.call = problem, exchange, options, steps
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 4
        # Every rank must send what the others wait for, even if its own results were not used.
        q, k, v, o, lse = ctx.saved_tensors
        problem, exchange, options, steps = ctx.call
        do = torch.zeros_like(o) if do is None else do.to(o.dtype).contiguous()
        dtype = accumulator_dtype(q.dtype)
        dq = torch.zeros_like(q, dtype=dtype)
        keys, behind, grads = [k, v], None, [torch.zeros_like(t, dtype=dtype) for t in (k, v)]
        for step in range(steps):
            pending = exchange.shift(keys) if step + 1 < steps else None
            own = [torch.zeros_like(t) for t in grads] if behind is not None else grads
            for part in parts_of(problem, (problem.rank - step) % problem.size, q.device):
                rows, (some_k, some_v) = part.rows, (taken(t, part.keys) for t in keys)
                grads_of = differentiate(
                    taken(do, rows),
                    None if dlse is None else taken(dlse, rows, 2),
                    taken(q, rows),
                    some_k,
                    some_v,
                    taken(o, rows),
                    taken(lse, rows, 2),
                    part.window,
                    part.lengths,
                    options,
                )
                dq[:, rows] += grads_of[0]
                for total, more in zip(own, grads_of[1:], strict=True):
                    total[:, part.keys] += more
            if behind is not None:  # gradients of these keys from the ranks before this one
                grads = [a.add_(b) for a, b in zip(behind.wait(), own, strict=True)]
            if pending is not None:
                behind, keys = exchange.shift(grads), pending.wait()
        dk, dv = exchange.shift(grads, -(steps - 1)).wait()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *nothing
