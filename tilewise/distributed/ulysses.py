"""ulysses_attention(): ranks exchange parts of the sequence for parts of the heads.

all-to-all   (B, S / N, H, D) -> (B, S, H / N, D), of q, k and v
attention    of the rank's heads over the whole sequence, on one device's kernels
all-to-all   o back to (B, S / N, H, Dv)

If there are fewer key heads than ranks, each is sent to every rank whose query heads read it.
Source: Jacobs et al. 2023 (DeepSpeed Ulysses).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.distributed.arguments import (
    Keywords,
    Problem,
    max_length,
    prepare,
    shared_attention,
    window_of,
)
from tilewise.distributed.exchange import Exchange
from tilewise.distributed.layout import order_of
from tilewise.ops import attention, attention_varlen

__all__ = ["repeats", "ulysses_attention", "why_not_ulysses"]


def repeats(num_q_heads: int, num_kv_heads: int, size: int) -> int | None:
    """Return the least number of copies of each key head by which all ranks get equally many heads.

    None if num_q_heads is no multiple of the ranks. A rank's query heads must read the key heads
    that it gets, so the number is a divisor of Hq / Hk.
    """
    group = num_q_heads // num_kv_heads
    if num_q_heads % size:
        return None
    return next(r for r in range(1, group + 1) if group % r == 0 and num_kv_heads * r % size == 0)


def why_not_ulysses(num_q_heads: int, num_kv_heads: int, size: int) -> str | None:
    """Return why query heads cannot be divided among `size` ranks, as the text of an error; None if
    they can."""
    if repeats(num_q_heads, num_kv_heads, size) is None:
        return f"q must have a multiple of {size} heads for {size} ranks, got {num_q_heads}"
    return None


@shared_attention
def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[Keywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend over a sequence of which each rank holds a part; exact, differentiable as `attention`.

    The result is that of `ring_attention`, but a rank computes Hq / N heads over all tokens.

    Args:
        q, k, v, group, causal, window, softmax_scale, cu_seqlens, layout, check, return_lse: as
            `ring_attention` takes them. Hq must be a multiple of the N ranks.
        deterministic, backend: as in `attention`.

    Returns:
        o and, with return_lse, lse, as `ring_attention` returns them.

    Raises:
        ValueError: a rule is broken on some rank; on every rank.
        UnsupportedError: see `attention`.

    Example:
        >>> q, k, v = (shard_sequence(t, rank, size) for t in (q, k, v))
        >>> o = ulysses_attention(q, k, v, causal=True)
    """
    call = prepare(q, k, v, method="ulysses", rule=why_not_ulysses, **options)
    if call.agreement is not None:
        call.agreement.finish()
    q, k, v, problem, group = call[:5]
    size = problem.size
    count = repeats(q.shape[2], k.shape[2], size)
    assert count is not None
    many = [q]
    for t in (k, v):
        many.append(t.repeat_interleave(count, 2) if count > 1 else t)
    whole = [_dealt(t, problem, group, to_heads=True) for t in many]
    rule = {**call.options, **window_of(problem.left, problem.right)}
    if problem.edges is None:
        o, lse = attention(*whole, return_lse=True, **rule)
    else:
        edges = torch.tensor(problem.edges, dtype=torch.int32).to(q.device, non_blocking=True)
        longest = max_length(problem.edges)
        o, lse = attention_varlen(
            *(t[0] for t in whole),
            cu_seqlens_q=edges,
            cu_seqlens_k=edges,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            return_lse=True,
            **rule,
        )
        o, lse = o.unsqueeze(0), lse.unsqueeze(0)
    o = _dealt(o, problem, group, to_heads=False)
    if return_lse:
        lse = _dealt(lse.transpose(1, 2).unsqueeze(-1), problem, group, to_heads=False)
        lse = lse.squeeze(-1).transpose(1, 2)
    return call.results(o, lse if return_lse else None)


@lru_cache(maxsize=8)
def _order(problem: Problem, tokens: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Return `order_of` the ranks' concatenated parts, which maps places to positions, and its
    inverse.

    Both are int64 (tokens,) on `device`. None for the contiguous layout, whose positions are in
    order.
    """
    if problem.layout == "contiguous":
        return None
    with torch.inference_mode(False):  # the tensors are reused by calls that differentiate
        order = order_of(tokens, problem.size, problem.layout, problem.edges)
        return order.to(device), order.argsort().to(device)


class _Dealt(torch.autograd.Function):
    """The exchange of (B, S / N, H, D) for (B, S, H / N, D) with `to_heads`, or back without; the
    gradient takes the opposite exchange."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, problem: Problem, group: dist.ProcessGroup | None, to_heads: bool
    ) -> Tensor:
        ctx.call = problem, group, to_heads
        return (_whole_of_heads if to_heads else _part_of_tokens)(x, problem, Exchange(group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        problem, group, to_heads = ctx.call
        return _dealt(grads[0], problem, group, to_heads=not to_heads), None, None, None


def _dealt(
    x: Tensor, problem: Problem, group: dist.ProcessGroup | None, *, to_heads: bool
) -> Tensor:
    if problem.size == 1:
        return x
    y: Tensor = _Dealt.apply(x, problem, group, to_heads)  # type: ignore[no-untyped-call, unused-ignore]
    return y


def _whole_of_heads(x: Tensor, problem: Problem, exchange: Exchange) -> Tensor:
    """Exchange (B, S / N, H, D) for (B, S, H / N, D), tokens in their order."""
    sent = _packed(x.unflatten(2, (problem.size, -1)).movedim(2, 0))  # (N, B, S / N, H / N, D)
    (parts,) = exchange.trade([sent]).wait()
    x = parts.movedim(0, 1).flatten(1, 2)
    order = _order(problem, x.shape[1], x.device)
    return x if order is None else x.index_select(1, order[1])


def _part_of_tokens(x: Tensor, problem: Problem, exchange: Exchange) -> Tensor:
    """Exchange (B, S, H / N, D) for (B, S / N, H, D), tokens in the order of the layout."""
    order = _order(problem, x.shape[1], x.device)
    if order is not None:
        x = x.index_select(1, order[0])
    sent = _packed(x.unflatten(1, (problem.size, -1)).movedim(1, 0))  # (N, B, S / N, H / N, D)
    (parts,) = exchange.trade([sent]).wait()
    return _packed(parts.movedim(0, 2)).flatten(2, 3)


def _packed(x: Tensor) -> Tensor:
    """Return x contiguous, copied in words of 8 bytes if its strides allow.

    torch copies strided tensors element by element: 16-bit elements took 0.4 of a call's 7.2 ms
    (8,192 tokens a rank of four, 64 heads on 8 of 128 channels, H200, 2026-11-23).
    """
    words = 8 // x.element_size()
    fits = words > 1 and x.dim() > 0 and x.stride(-1) == 1 and x.numel() > 0
    if not fits or any(n % words for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])):
        return x.contiguous()
    return x.view(torch.int64).contiguous().view(x.dtype)
