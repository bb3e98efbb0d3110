"""Recurrences over sequences that ranks share: a state passes from rank to rank.

forward   a rank waits for the state before its part, runs the op from it, and sends the state
          behind its part to the next rank
backward  the gradient of that state comes back from the next rank, and goes on to the one before

The heads pass in parts, one behind another, so that ranks compute at the same time: a rank runs
part p while the rank before it runs part p + 1. With P parts N ranks take (P + N - 1) / P times as
long as their own parts. The op's arithmetic is that of one device, and so are its bits, where ranks
begin at multiples of 64 tokens of a sequence.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.distributed.exchange import Agreement, goes_through_host, rank_and_size
from tilewise.ops import causal_conv1d, gated_delta

__all__ = ["context_parallel_causal_conv1d", "context_parallel_gated_delta"]


def context_parallel_gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    q_scale: float | None = None,
    check: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Run the gated delta rule over sequences of which each rank holds a part, one after another.

    The result is the rank's part of `gated_delta` over the whole, exact and differentiable once.
    All ranks of the group call it together, and all or none run its backward pass.

    Args:
        q, k: (B, S / N, Hk, K), or (T / N, Hk, K) with cu_seqlens: rank r has the r-th part.
        v: (B, S / N, H, V), or packed likewise.
        g, beta: as `gated_delta` takes them, of these rows.
        group: the N ranks; None is the default group.
        cu_seqlens: the edges of sequences in the whole packed batch, ascending from 0 to T, the
            same on every rank; sequences may cross ranks. Best a list: a tensor on a GPU is waited
            for.
        q_scale: as `gated_delta` takes it.
        check: True to compare shapes and options of all ranks, in a small exchange that the host
            waits for. Without it ranks that differ wait for one another for ever.
        backend: as `gated_delta` takes it.

    Returns:
        o, shaped as v and of its dtype.

    Raises:
        ValueError: a rule above is broken on some rank; on every rank.
        UnsupportedError: see `gated_delta`.

    Example:
        >>> o = context_parallel_gated_delta(q, k, v, g, beta)
    """
    rows = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    share = _share_of(rows, cu_seqlens, group, check, (q_scale, backend))
    heads, key_heads = v.shape[-2], k.shape[-2]
    count = min(key_heads, 2 * share.size)
    while key_heads % count:
        count -= 1
    dims = (-2, -2, -2, -2 if g.dim() == v.dim() else -1, -1)
    sizes = [(key_heads, heads)[place > 1] // count for place in range(5)]

    def cut(part: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [
            x.narrow(dim, part * size, size)
            for x, dim, size in zip(tensors, dims, sizes, strict=True)
        ]

    def run(tensors: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        found = gated_delta(
            *tensors,
            cu_seqlens=share.own_edges(v.device),
            initial_state=state,
            q_scale=q_scale,
            return_state=True,
            backend=backend,
        )
        assert isinstance(found, tuple)
        return found

    wide = torch.promote_types(v.dtype, torch.float32)
    shape = (share.num_sequences, heads // count, k.shape[-1], v.shape[-1])
    call = _Call(share, count, cut, run, shape, wide, dims, -2)
    o: Tensor = _Passed.apply(call, *rows.values())  # type: ignore[no-untyped-call, unused-ignore]
    return o


def context_parallel_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    group: dist.ProcessGroup | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    check: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Convolve the channels of sequences of which each rank holds a part, one after another.

    The result is the rank's part of `causal_conv1d` over the whole; the last tokens of a part are
    sent to the next rank. A rank gets the gradients of `weight` and `bias` of its own part only:
    their sum over the ranks is the gradient of the whole. As for the rest see
    `context_parallel_gated_delta`.

    Args:
        x: (B, S / N, C), or (T / N, C) with cu_seqlens.
        weight, bias, activation, backend: as `causal_conv1d` takes them, the same on every rank.
        group, cu_seqlens, check: see `context_parallel_gated_delta`.

    Returns:
        y, shaped as x and of its dtype.

    Raises:
        ValueError: a rule above is broken on some rank; on every rank.
        UnsupportedError: see `causal_conv1d`.

    Example:
        >>> y = context_parallel_causal_conv1d(x, weight, activation="silu")
    """
    share = _share_of({"x": x, "weight": weight}, cu_seqlens, group, check, (activation, backend))

    def cut(part: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def run(tensors: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        found = causal_conv1d(
            *tensors,
            activation=activation,
            cu_seqlens=share.own_edges(x.device),
            initial_state=state,
            return_state=True,
            backend=backend,
        )
        assert isinstance(found, tuple)
        return found

    shape = (share.num_sequences, weight.shape[1] - 1, x.shape[-1])
    call = _Call(share, 1, cut, run, shape, x.dtype, (), -1)
    given = (x, weight) if bias is None else (x, weight, bias)
    y: Tensor = _Passed.apply(call, *given)  # type: ignore[no-untyped-call, unused-ignore]
    return y


class _Share(NamedTuple):
    """The sequences of which this rank has rows in a call of a context-parallel recurrence.

    Attributes:
        group, rank, size: the process group, this rank, and the number of ranks.
        edges: the edges of the rank's packed rows; None for dense rows.
        num_sequences: the number of sequences of which the rank has rows.
        goes_on: True if the first of these sequences, or all dense ones, began on an earlier rank.
        is_cut: True if the last of these sequences, or all dense ones, continue on the next rank.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    edges: tuple[int, ...] | None
    num_sequences: int
    goes_on: bool
    is_cut: bool

    def own_edges(self, device: torch.device) -> Tensor | None:
        """Return the rank's cu_seqlens, int32; None for dense rows."""
        if self.edges is None:
            return None
        return torch.tensor(self.edges, dtype=torch.int32, device=device)

    def passed(self, states: Tensor, *, is_last: bool) -> Tensor:
        """Return a view of the states (num_sequences, ...) that pass between ranks.

        Of packed sequences these are the last one's (`is_last`, to the next rank) or the first
        one's (from the rank before); of dense rows all.
        """
        if self.edges is None:
            return states
        return states[-1:] if is_last else states[:1]


def _share_of(
    tensors: dict[str, Tensor],
    cu_seqlens: Sequence[int] | Tensor | None,
    group: dist.ProcessGroup | None,
    check: bool,
    options: tuple[object, ...],
) -> _Share:
    """Return this rank's `_Share`, after all ranks have compared shapes and options if `check` is
    set.

    The first of `tensors` gives the number of rows. Raises ValueError if a rule is broken, with
    `check` on every rank.
    """
    rank, size = rank_and_size(group)
    rows = next(iter(tensors.values()))
    edges = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    problem = _why_not(rows, edges, size)
    if check:
        names = "q_scale, activation, cu_seqlens and backend"
        told = (None if edges is None else tuple(edges), *options)
        Agreement(group, tensors, told, problem, names).finish()
    elif problem is not None:
        raise ValueError(problem)
    if edges is None:
        return _Share(group, rank, size, None, rows.shape[0], rank > 0, rank + 1 < size)
    first, end = rank * rows.shape[0], (rank + 1) * rows.shape[0]
    inner = edges[bisect_right(edges, first) : bisect_left(edges, end)]
    own = (0, *(edge - first for edge in inner), end - first)
    starts, ends = first in edges, end in edges
    return _Share(group, rank, size, own, len(own) - 1, not starts, not ends)


def _why_not(rows: Tensor, edges: Sequence[int] | None, size: int) -> str | None:
    if edges is None:
        if rows.dim() < 3 or rows.shape[1] < 1:
            return f"rows must be (B, S / N, ...) without cu_seqlens, got {tuple(rows.shape)}"
        return None
    total = rows.shape[0] * size
    is_rising = all(a < b for a, b in pairwise(edges))
    if rows.shape[0] < 1 or len(edges) < 2 or edges[0] != 0 or edges[-1] != total or not is_rising:
        return f"cu_seqlens must ascend from 0 to T = {total}, got {list(edges)}"
    return None


class _Call(NamedTuple):
    """A call of a recurrence over several ranks, for its forward and its backward pass.

    Attributes:
        share: the rank's part of the sequences.
        num_parts: the number of parts of heads.
        cut: a function of a part's number and the tensors, which returns views of that part of each
            tensor.
        run: a function of a part's tensors and the states before it, which returns the result and
            the states after it.
        shape, dtype: the shape and the dtype of the states of a part.
        dims: the dimension in which each tensor is cut; empty for one part.
        dim: the dimension in which the results of parts are joined.
    """

    share: _Share
    num_parts: int
    cut: Callable[[int, Sequence[Tensor]], list[Tensor]]
    run: Callable[[Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor]]
    shape: tuple[int, ...]
    dtype: torch.dtype
    dims: tuple[int, ...]
    dim: int


class _Line:
    """The messages between this rank and the ranks before and after it during one pass, in
    order."""

    def __init__(self, share: _Share, device: torch.device) -> None:
        self.share, self.device = share, device
        self.is_copied = goes_through_host(share.group, device)
        self._sent: list[tuple[Any, Tensor]] = []

    def send(self, x: Tensor, ahead: int) -> None:
        """Begin to send `x` to the rank `ahead` places after this one (-1: before), without
        waiting."""
        x = x.detach().contiguous()
        x = x.cpu() if self.is_copied else x
        self._sent.append((dist.isend(x, self._place(ahead), group=self.share.group), x))

    def receive(self, like: Tensor, ahead: int) -> Tensor:
        """Wait for the next tensor from the rank `ahead` places after this one (-1: before), and
        return it.

        It has the shape, dtype and device of `like`.
        """
        room = torch.empty_like(like, device="cpu" if self.is_copied else like.device)
        work = dist.irecv(room, self._place(ahead), group=self.share.group)
        assert work is not None
        work.wait()
        return room.to(like.device)

    def finish(self) -> None:
        """Wait until all tensors passed to `send` have been sent."""
        for work, _ in self._sent:
            work.wait()

    def _place(self, ahead: int) -> int:
        rank, group = self.share.rank + ahead, self.share.group
        return rank if group is None else dist.get_global_rank(group, rank)


class _Passed(torch.autograd.Function):
    """A recurrence over parts of a sequence: the state passes from part to part and rank to rank.

    The gradient of the state passes in the other direction.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        share, device = call.share, tensors[0].device
        line, needs = _Line(share, device), ctx.needs_input_grad[1:]
        ctx.call, ctx.kept, results = call, [], []
        for part in range(call.num_parts):
            leaves = [
                x.detach().requires_grad_(wanted)
                for x, wanted in zip(call.cut(part, tensors), needs, strict=True)
            ]
            state = None
            if share.goes_on:
                state = torch.zeros(call.shape, dtype=call.dtype, device=device)
                first = share.passed(state, is_last=False)
                first.copy_(line.receive(first, -1))
                state.requires_grad_(any(needs))
            with torch.set_grad_enabled(any(needs)):
                o, after = call.run(leaves, state)
            if share.is_cut:
                line.send(share.passed(after, is_last=True), 1)
            results.append(o.detach())
            ctx.kept.append((leaves, state, o, after))
        line.finish()
        return results[0] if len(results) == 1 else torch.cat(results, call.dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        share, needs, grads = call.share, ctx.needs_input_grad[1:], []
        line = _Line(share, do.device)
        for part, (leaves, state, o, after) in enumerate(ctx.kept):
            size = o.shape[call.dim]
            outputs, given = [o], [do.narrow(call.dim, part * size, size)]
            if share.is_cut:
                dafter = torch.zeros_like(after)
                last = share.passed(dafter, is_last=True)
                last.copy_(line.receive(last, 1))
                outputs.append(after)
                given.append(dafter)
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            own = wanted if state is None else [*wanted, state]
            found = list(torch.autograd.grad(outputs, own, given))
            if state is not None:
                line.send(share.passed(found.pop(), is_last=False), -1)
            places = iter(found)
            grads.append([next(places) if wants else None for wants in needs])
        line.finish()
        ctx.kept = []
        if call.num_parts == 1:
            return (None, *grads[0])
        joined = [
            None if each[0] is None else torch.cat(each, dim)
            for each, dim in zip(zip(*grads, strict=True), call.dims, strict=True)
        ]
        return (None, *joined)
