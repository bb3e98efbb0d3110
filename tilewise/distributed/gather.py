"""gather_attention(): every rank gets all keys and values, and its queries attend in one call.

forward   keys and values of all ranks at once; those that the rank's queries see are put in order,
          keys while values are in transfer; one packed call: a run of queries for each piece of a
          document, its keys from the document's beginning (or the window's) to the piece's end
backward  the keys are gathered again, so that they need not be kept; one call; each rank's part of
          the gradients is sent to it, and added there in the order of the ranks, in float32

There are few, large messages and one kernel, with no partial results to merge; but nothing is
computed during the transfer. The method suits pieces so short that a ring's steps cost more than
they hide. Memory is twice the keys and values of the whole sequence; backward, their gradients
twice in float32, too. Source: Llama Team 2024 (The Llama 3 Herd of Models), section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
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
    window_of,
)
from tilewise.distributed.exchange import Exchange, ordered_sum
from tilewise.distributed.layout import Call, Run, order_of, whole_calls_of
from tilewise.distributed.partial import (
    Rows,
    attend,
    differentiate,
    lengths_of,
    rows_of,
    taken,
)

__all__ = ["gather_attention"]


@shared_attention
def gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[Keywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend over a sequence of which each rank holds a part; exact, and differentiable once.

    The result is that of `ring_attention`, but a rank temporarily holds all keys and values.

    Args:
        q, k, v, group, causal, window, softmax_scale, cu_seqlens, layout, deterministic, check,
            return_lse, backend: as `ring_attention` takes them.

    Returns:
        o and, with return_lse, lse, as `ring_attention` returns them.

    Raises:
        ValueError: a rule is broken on some rank; on every rank.
        UnsupportedError: see `attention`.

    Example:
        >>> q, k, v = (shard_sequence(t, rank, size) for t in (q, k, v))
        >>> o = gather_attention(q, k, v, causal=True)
    """
    call = prepare(q, k, v, method="gather", **options)
    if call.agreement is not None:
        call.agreement.finish()
    o, lse = _Gather.apply(*call[:-1])  # type: ignore[no-untyped-call, unused-ignore]
    return call.results(o, lse if return_lse else None)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One call of attention over the keys gathered from all ranks, with its indices on a device.

    Attributes:
        rows: the indices of the call's queries among this rank's B S / N rows.
        keys: the indices of the call's keys among the N B S / N gathered ones, run by run; a key
            may be in two runs.
        returns: pairs of indices by which gradients are added in a fixed order: some of the taken
            keys (None for all), no gathered key twice, and their indices among the gathered keys.
        window: causal and window of `attention`.
        lengths: the cumulative and largest lengths of the runs, as arguments of `attention_varlen`.
    """

    rows: Rows
    keys: Tensor
    returns: tuple[tuple[Tensor | None, Tensor], ...]
    window: dict[str, Any]
    lengths: dict[str, Any]


# All layers make the same calls; some have an index for every key.
@lru_cache(maxsize=8)
def _parts(problem: Problem, batch: int, length: int, device: torch.device) -> tuple[_Part, ...]:
    """Return the calls by which this rank's queries attend to the gathered keys of `batch`
    sequences.

    `length` is the number of rows of a rank in each sequence. No batch gives no call.
    """
    tokens = length * problem.size
    if batch == 0:
        return ()
    with torch.inference_mode(False):  # the tensors are reused by calls that differentiate
        order = order_of(tokens, problem.size, problem.layout, problem.edges)
        places = torch.empty_like(order)
        places[order] = torch.arange(tokens)
        rank, row = places // max(length, 1), places % max(length, 1)
        gathered = [(rank * batch + b) * length + row for b in range(batch)]
        calls = whole_calls_of(
            problem.rank,
            problem.size,
            layout=problem.layout,
            left=problem.left,
            right=problem.right,
            edges=problem.edges or (0, tokens),
        )
        return tuple(_part(call, gathered, length, device) for call in calls)


def _part(call: Call, gathered: Sequence[Tensor], length: int, device: torch.device) -> _Part:
    """Return the `_Part` in which one packed call computes the same part of all sequences of a
    batch.

    Args:
        call: the part, with its rows and keys counted within a sequence.
        gathered: indices for each sequence: the places of the sequence's keys, in order of
            position, among the gathered keys.
        length: the queries of this rank in a sequence.
        device: the device of the index tensors.
    """
    own = call.runs or (Run(*call.rows, *call.keys),)
    runs = [
        run._replace(q_first=run.q_first + b * length, q_last=run.q_last + b * length)
        for b in range(len(gathered))
        for run in own
    ]
    keys = [places[run.k_first : run.k_last] for places in gathered for run in own]
    ends = list(accumulate(len(places) for places in keys))
    # The runs of a document may share keys, whose gradients are added one run after the other:
    # adding several at once would not have a fixed order.
    turns: list[list[int]] = []
    turn = 0
    for i, run in enumerate(runs):
        before = own[i % len(own) - 1]
        is_shared = i % len(own) > 0 and before.k_first <= run.k_first < before.k_last
        turn = turn + 1 if is_shared else 0
        if turn == len(turns):
            turns.append([])
        turns[turn].append(i)
    returns: list[tuple[Tensor | None, Tensor]] = []
    for chosen in turns:
        some = [torch.arange(ends[i] - len(keys[i]), ends[i]) for i in chosen]
        which = None if len(turns) == 1 else torch.cat(some).to(device)
        returns.append((which, torch.cat([keys[i] for i in chosen]).to(device)))
    return _Part(
        rows_of([(run.q_first, run.q_last) for run in runs], device),
        torch.cat(keys).to(device),
        tuple(returns),
        window_of(call.left, call.right),
        lengths_of(runs, device),
    )


class _Gathered:
    """Keys and values gathered from all ranks: each (B, S / N, H, D) becomes (1, N B S / N, H, D).

    The keys that a call needs are put in order while the values are in transfer.
    """

    def __init__(self, exchange: Exchange, tensors: Sequence[Tensor]) -> None:
        self._coming = exchange.gather(tensors).in_turn()
        self._come: list[Tensor] = []

    def take(self, places: Tensor) -> list[Tensor]:
        """Return the rows `places` of the gathered keys and of the gathered values, as a list of
        two copies.

        The first call waits for the transfer, first of the keys, then of the values.
        """
        if not self._come:
            found = []
            for tensor in self._coming:
                self._come.append(tensor.flatten(0, 2).unsqueeze(0))
                found.append(taken(self._come[-1], places))
            return found
        return [taken(tensor, places) for tensor in self._come]

    def all(self) -> list[Tensor]:
        """Wait until all keys and values have arrived, and return them as a list of two."""
        self._come += [tensor.flatten(0, 2).unsqueeze(0) for tensor in self._coming]
        return self._come


def _rows(x: Tensor) -> Tensor:
    """Reshape (B, S / N, H, D) to (1, B S / N, H, D)."""
    return x.reshape(1, -1, *x.shape[2:])


def _lse_rows(lse: Tensor) -> Tensor:
    """Reshape (B, H, S / N) to (1, H, B S / N)."""
    return lse.transpose(0, 1).flatten(1).unsqueeze(0)


class _Gather(torch.autograd.Function):
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
        exchange = Exchange(group)
        batch, length, heads, _ = q.shape
        keys = _Gathered(exchange, (k, v))
        rows = _rows(q)
        o = lse = None
        for part in _parts(problem, batch, length, q.device):
            some_k, some_v = keys.take(part.keys)
            found, found_lse = attend(
                taken(rows, part.rows), some_k, some_v, part.window, part.lengths, options
            )
            if found.shape[1] == rows.shape[1]:  # one call has all queries, in their order
                o, lse = found, found_lse
                continue
            if o is None or lse is None:
                o = found.new_zeros((1, rows.shape[1], heads, v.shape[-1]))
                lse = found_lse.new_full((1, heads, rows.shape[1]), -torch.inf)
            o[:, part.rows], lse[:, :, part.rows] = found, found_lse
        if o is None or lse is None:  # there is no token
            keys.all()  # the other ranks wait for these messages, too
            o = q.new_zeros((1, 0, heads, v.shape[-1]))
            lse = q.new_zeros((1, heads, 0), dtype=accumulator_dtype(q.dtype))
        o = o.view(batch, length, heads, v.shape[-1])
        lse = lse[0].unflatten(1, (batch, length)).transpose(0, 1).contiguous()
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.call = problem, exchange, options
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        # Every rank must send what the others wait for, even if its own results were not used.
        q, k, v, o, lse = ctx.saved_tensors
        problem, exchange, options = ctx.call
        batch, length, _, _ = q.shape
        do = _rows(torch.zeros_like(o) if do is None else do.to(o.dtype))
        dlse = None if dlse is None else _lse_rows(dlse)
        rows, o, lse = _rows(q), _rows(o), _lse_rows(lse)
        keys = _Gathered(exchange, (k, v))
        dtype = accumulator_dtype(q.dtype)
        dq = torch.zeros_like(rows)
        totals = [
            t.new_zeros((problem.size * batch * length, *t.shape[2:]), dtype=dtype) for t in (k, v)
        ]
        for part in _parts(problem, batch, length, q.device):
            own, (some_k, some_v) = part.rows, keys.take(part.keys)
            grads = differentiate(
                taken(do, own).contiguous(),
                None if dlse is None else taken(dlse, own, 2),
                taken(rows, own),
                some_k,
                some_v,
                taken(o, own),
                taken(lse, own, 2),
                part.window,
                part.lengths,
                options,
            )
            dq[:, own] = grads[0]
            for total, grad in zip(totals, grads[1:], strict=True):
                for which, places in part.returns:
                    some = grad[0] if which is None else grad[0].index_select(0, which)
                    total.index_add_(0, places, some.to(dtype))  # indices are distinct
        keys.all()
        del keys
        sent = [t.unflatten(0, (problem.size, batch, length)) for t in totals]
        dk, dv = (ordered_sum(t) for t in exchange.trade(sent).wait())
        return dq.view_as(q), dk.to(k.dtype), dv.to(v.dtype), None, None, None
