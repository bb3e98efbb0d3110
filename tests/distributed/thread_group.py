"""Ranks as threads of one process: the collectives of a ShardGroup without torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilewise.distributed.shard_group import ShardGroup

T = TypeVar("T")


class ThreadGroup(ShardGroup):
    """One rank of several that share `places`, and meet at `barrier` before and after they read."""

    def __init__(self, rank: int, places: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, len(places), torch.device("cpu"))
        self.places, self.barrier = places, barrier

    def stack(self, x: Tensor) -> Tensor:
        self.places[self.rank] = x
        self.barrier.wait(60)
        parts = torch.stack(self.places)
        self.barrier.wait(60)
        return parts


class DealtGroup(ThreadGroup):
    """A rank with an inbox if ranks may add up shares of the rows: then it has all sums so."""

    def open_inbox(self, dim: int, dtype: torch.dtype, *, deals: bool) -> None:
        if deals:
            self.inbox = _DealtInbox(self)  # type: ignore[assignment]


class _DealtInbox:
    """An inbox by `Inbox`'s rules that takes all rows and deals them: the residual stream of the
    rows of other ranks is NaN."""

    def __init__(self, group: ThreadGroup) -> None:
        self._group, self.dim = group, 0

    def takes(self, rows: int, dim: int, dtype: torch.dtype) -> bool:
        return True

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, parts: int = 0
    ) -> tuple[Tensor, Tensor]:
        assert not parts
        group = self._group
        total = (group.stack(x).sum(0) + residual).flatten(0, -2)
        mine = torch.full_like(total, torch.nan)
        own = slice(group.rank, None, group.size)
        mine[own] = total[own]
        shares = group.stack(mine)
        whole = torch.cat([shares[i % group.size, i : i + 1] for i in range(len(total))])
        y = torch.nn.functional.rms_norm(whole.view_as(x), weight.shape, None, eps) * weight
        return y, mine.view_as(x)

    def embed(self, table: Tensor, ids: Tensor, rows: tuple[int, int]) -> Tensor:
        first, end = rows
        is_own = (ids >= first) & (ids < end)
        found = torch.where(is_own.unsqueeze(-1), table[(ids - first) * is_own], 0)
        return self._group.stack(found).sum(0)


def on_ranks(
    size: int, work: Callable[[ShardGroup], T], kind: type[ThreadGroup] = ThreadGroup
) -> list[T]:
    """Run `work` on every rank, a group of some kind, and return what they return, by rank."""
    places, barrier = [None] * size, threading.Barrier(size)

    def run(rank: int) -> T:
        try:
            return work(kind(rank, places, barrier))
        except BaseException:
            barrier.abort()  # nobody waits for one that has failed
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
