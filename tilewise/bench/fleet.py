"""Several engines in virtual time behind one router: the clock of all of them, and who gets what.

An engine goes on by itself until a request comes for it; so between two arrivals each runs the
steps that begin before the second. The router is the gateway's own (`cluster.router`) and knows
what a gateway would: what it has sent, whose first token has come and who has ended.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.bench.trace import HASHED_TOKENS, TraceRequest
from tilewise.cluster.router import Asked, PrefixRouter, RoundRobin, Router
from tilewise.engine.batch import TokenEvent
from tilewise.engine.virtual import Arrival, VirtualEngine

__all__ = ["ROUTERS", "Fleet", "Place", "asked_of", "places_of"]

ROUTERS: dict[str, Callable[[], Router]] = {"prefix": PrefixRouter, "round-robin": RoundRobin}
# Events of the engine: what a gateway sees of a request.
_FIRST, _LAST = 0, 1


@dataclass(frozen=True, slots=True)
class Place:
    """A way to spread a model over GPUs.

    Attributes:
        replicas: servers of the whole model.
        tensor_parallel: GPUs of each replica.
        routing: the way that requests are spread over replicas, a key of `ROUTERS`.
    """

    replicas: int = 1
    tensor_parallel: int = 1
    routing: str = "prefix"

    @property
    def gpus(self) -> int:
        """The number of GPUs of all replicas together."""
        return self.replicas * self.tensor_parallel

    def as_row(self) -> dict[str, Any]:
        """Return the columns of this place in a row of results; routing is None for one
        replica."""
        routing = self.routing if self.replicas > 1 else None
        return {
            "gpus": self.gpus,
            "parallel": self.tensor_parallel,
            "replicas": self.replicas,
            "routing": routing,
        }

    def __str__(self) -> str:
        if self.gpus == 1:
            return ""
        return f"{self.replicas} x {self.tensor_parallel} GPUs, {self.routing}, "


def places_of(options: argparse.Namespace) -> list[Place]:
    """Return every combination of tensor parallelism, replicas and routing that the command line
    lists; one replica is listed once, whatever the routing.

    Raises:
        ValueError: both --replicas and --gpus are given, or GPUs are fewer than a replica's.
    """
    if options.replicas and options.gpus:
        raise ValueError(f"--replicas must not be given with --gpus, got {options.replicas}")
    places = []
    for parallel in options.tensor_parallel or [1]:
        for gpus in options.gpus or [parallel * n for n in options.replicas or [1]]:
            if not 1 <= parallel <= gpus:
                raise ValueError(
                    f"--gpus must be at least the {parallel} of a replica, and that at least 1, "
                    f"got {gpus}"
                )
            places += [Place(gpus // parallel, parallel, routing) for routing in options.routing]
    return [p for p in places if p.replicas > 1 or p.routing == options.routing[0]]


def asked_of(request: TraceRequest) -> Asked:
    """Return the properties of a trace's request by which it is routed, such as its shared
    prefixes."""
    pieces, before = [], 0
    for shared, _ in request.shared:
        before = hash((before, shared))
        pieces.append(before)
    tokens = HASHED_TOKENS
    if len(pieces) == 1:
        tokens = request.shared[0][1]
    return Asked(tuple(pieces), tokens, request.prompt, request.output)


class Fleet:
    """Virtual engines behind one router, which gives each request to one of them.

    Args:
        new_engine: a function that makes one engine.
        replicas: the number of engines.
        router: a router that has no replicas yet.
        capacity: tokens that the cache of a replica holds.

    Attributes:
        engines: the engines by number.
        sent: the number of requests that each engine got.
    """

    def __init__(
        self,
        new_engine: Callable[[], VirtualEngine],
        replicas: int,
        router: Router,
        capacity: int,
    ) -> None:
        self.engines = [new_engine() for _ in range(replicas)]
        self.sent = [0] * replicas
        self.router = router
        self._news: list[tuple[float, int, int, str]] = []  # when, order, what, whose request
        self._order = itertools.count()
        self._busy: list[tuple[float, int]] = []  # a heap of (the engine's time, its number)
        self._outputs: dict[str, int] = {}
        for number, engine in enumerate(self.engines):
            router.join(str(number), capacity)
            engine.tell = self._note

    def run(self, arrivals: Iterable[tuple[Arrival, Asked]]) -> None:
        """Serve requests until all have ended.

        Args:
            arrivals: the requests in the order of their times, each with the properties by which it
                is routed.
        """
        for arrival, asked in arrivals:
            self._advance(arrival.seconds)
            self._hear(arrival.seconds)
            name = self.router.choose(asked)
            assert name is not None
            request_id = arrival.request.request_id
            self.router.sent(request_id, asked, name)
            self._outputs[request_id] = 0
            number = int(name)
            self.sent[number] += 1
            engine = self.engines[number]
            had_work = engine.has_work
            engine.add(arrival)
            if engine.timings[request_id].refusal:
                self._news.append((arrival.seconds, next(self._order), _LAST, request_id))
            if not had_work and engine.has_work:
                heapq.heappush(self._busy, (engine.now, number))
        self._advance(float("inf"))

    def _advance(self, until: float) -> None:
        """Let every engine run the steps that it begins before `until`."""
        busy = self._busy
        while busy and busy[0][0] < until:
            _, number = busy[0]
            engine = self.engines[number]
            while engine.has_work and engine.now < until:
                if not engine.step():
                    break
            if engine.has_work:
                heapq.heapreplace(busy, (engine.now, number))
            else:
                heapq.heappop(busy)

    def _note(self, events: Sequence[TokenEvent], now: float) -> None:
        for event in events:
            count = self._outputs[event.request_id] + 1
            self._outputs[event.request_id] = count
            for what, holds in ((_FIRST, count == 1), (_LAST, event.finish_reason is not None)):
                if holds:
                    heapq.heappush(self._news, (now, next(self._order), what, event.request_id))

    def _hear(self, now: float) -> None:
        """Tell the router of all first tokens and ends of requests up to the time `now`, as a
        gateway would."""
        while self._news and self._news[0][0] <= now:
            _, _, what, request_id = heapq.heappop(self._news)
            if what == _FIRST:
                self.router.answers(request_id)
            else:
                self.router.ended(request_id, self._outputs.pop(request_id, None))
