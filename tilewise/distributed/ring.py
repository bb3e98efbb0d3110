"""ring_attention(): keys and values travel around the ranks, queries stay.

step s   a rank has the keys of the rank s before it; while its queries attend to them, the keys
         travel on. Partial results are merged by their log-sum-exp, always in the same order.
backward the keys travel once more, and their gradients one step behind them, until they are home

Memory is that of a rank's own part, twice the keys and values, and in the backward pass twice their
gradients in float32. Source: Liu et al. 2023 (Ring Attention); Brandon et al. 2023 (Striped
Attention) for why causal parts are dealt out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.distributed.arguments import (
    Keywords,
    Problem,
    Window,
    accumulator_dtype,
    prepare,
    result_of,
)
from tilewise.distributed.exchange import Exchange
from tilewise.distributed.layout import Call, calls_of
from tilewise.distributed.partial import part_backward, part_forward
from tilewise.ops import merge_states

__all__ = ["num_steps", "ring_attention"]


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[Keywords],
) -> Tensor: ...


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Keywords]
) -> tuple[Tensor, Tensor]: ...


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    layout: str = "zigzag",
    deterministic: bool = False,
    check: bool = True,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend over a sequence of which each rank holds a part; exact, and differentiable once.

    The result is the rank's part of `attention(q, k, v)` over the whole sequence, or of
    `attention_varlen` where cu_seqlens is given. All ranks of the group call it together, and all
    or none run its backward pass.

    Args:
        q: (B, S / N, Hq, D), or (T / N, Hq, D) with cu_seqlens: what `shard_sequence` gives.
        k, v: (B, S / N, Hk, D) and (B, S / N, Hk, Dv), or packed likewise.
        group: the N ranks; None is the default group.
        causal, window, softmax_scale: as `attention` takes them, over positions of the whole.
        cu_seqlens: where documents begin and end in the whole packed sequence, ascending from 0 to
            T, on every rank the same; they may cross ranks. Best a list: a tensor on a GPU is
            waited for.
        layout: "zigzag" or "contiguous": how the sequence lies on the ranks.
        deterministic: the backward pass must be bitwise reproducible, see `attention`.
        check: compare shapes and options of all ranks first, a small exchange that the host waits
            for. Without it ranks that differ wait for one another for ever.
        return_lse: also return the log-sum-exp.
        backend: of `attention`.

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
    q, k, v, problem = prepare(
        q, k, v, group=group, causal=causal, window=window, softmax_scale=softmax_scale,
        cu_seqlens=cu_seqlens, layout=layout, check=check, method="ring",
    )  # fmt: skip
    options = {
        "softmax_scale": problem.softmax_scale, "deterministic": deterministic, "backend": backend,
    }  # fmt: skip
    o, lse = _Ring.apply(q, k, v, problem, group, options)  # type: ignore[no-untyped-call]
    o, lse = result_of(problem, o, lse)
    return (o, lse) if return_lse else o


def _calls(problem: Problem, rank: int, step: int) -> list[Call]:
    """Return what a rank computes in a step."""
    source = (rank - step) % problem.size
    return calls_of(
        rank, source, problem.size, problem.chunk, layout=problem.layout, left=problem.left,
        right=problem.right, edges=problem.edges,
    )  # fmt: skip


def num_steps(problem: Problem) -> int:
    """Return after how many steps no rank's queries see further keys."""
    size = problem.size
    for step in range(size - 1, 0, -1):
        if any(_calls(problem, rank, step) for rank in range(size)):
            return step + 1
    return 1


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
    ) -> tuple[Tensor, Tensor]:
        exchange, steps = Exchange(group), num_steps(problem)
        dtype = accumulator_dtype(q.dtype)
        batch, length, heads, _ = q.shape
        o = q.new_zeros((batch, length, heads, v.shape[-1]), dtype=dtype)
        lse = q.new_full((batch, heads, length), -torch.inf, dtype=dtype)
        seen: list[tuple[int, int]] = []  # rows of o that are no longer 0
        keys = [k, v]
        for step in range(steps):
            pending = exchange.shift(keys) if step + 1 < steps else None
            for call in _calls(problem, problem.rank, step):
                part, part_lse = part_forward(q, keys[0], keys[1], call, options)
                rows = slice(*call.rows)
                if any(a < call.rows[1] and call.rows[0] < b for a, b in seen):
                    part, part_lse = merge_states(
                        o[:, rows], lse[:, :, rows], part.to(dtype), part_lse
                    )
                o[:, rows], lse[:, :, rows] = part, part_lse
                seen.append(call.rows)
            if pending is not None:
                keys = pending.wait()
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.call = problem, exchange, options, steps
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 6
        # Every rank must send what the others wait for, though its own results were not used.
        q, k, v, o, lse = ctx.saved_tensors
        problem, exchange, options, steps = ctx.call
        do = torch.zeros_like(o) if do is None else do.to(o.dtype).contiguous()
        dtype = accumulator_dtype(q.dtype)
        dq = torch.zeros_like(q, dtype=dtype)
        keys, behind, grads = [k, v], None, [torch.zeros_like(t, dtype=dtype) for t in (k, v)]
        for step in range(steps):
            pending = exchange.shift(keys) if step + 1 < steps else None
            own = [torch.zeros_like(t) for t in grads] if behind is not None else grads
            for call in _calls(problem, problem.rank, step):
                part = part_backward(do, dlse, q, keys[0], keys[1], o, lse, call, options)
                dq[:, slice(*call.rows)] += part[0]
                for total, more in zip(own, part[1:], strict=True):
                    total[:, slice(*call.keys)] += more
            if behind is not None:  # what the ranks before this one have found for these keys
                grads = [a.add_(b) for a, b in zip(behind.wait(), own, strict=True)]
            if pending is not None:
                behind, keys = exchange.shift(grads), pending.wait()
        dk, dv = exchange.shift(grads, -(steps - 1)).wait()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *nothing[:3]
