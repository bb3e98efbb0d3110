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


def on_ranks(size: int, work: Callable[[ShardGroup], T]) -> list[T]:
    """Run `work` on every rank and return what they return, by rank."""
    places, barrier = [None] * size, threading.Barrier(size)

    def run(rank: int) -> T:
        try:
            return work(ThreadGroup(rank, places, barrier))
        except BaseException:
            barrier.abort()  # nobody waits for one that has failed
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
