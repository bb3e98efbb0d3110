"""Ranks of tensor parallelism in one process: the real parent and wire, workers that are objects.

    ParallelRunner -> BatchWriter -> bytes -> BatchReader -> a cache of fingerprints, on each rank

A rank computes a part of each step from its own blocks, waits until all ranks have theirs, as in a
collective, and draws from all parts. So a block, a table or a step that one rank got wrong makes
the tokens of all wrong. Ranks say that they live, and die, fall silent or fail as they are told.
The parent (`processes.Workers`) is the real one but for its thread, its processes and its sockets.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.engine import simulator
from tests.simulation.engine import scored
from tests.simulation.virtual_time import Clock, StillError
from tilewise.engine.batch import PENDING, Batch, SampledToken
from tilewise.engine.tensor_parallel import processes
from tilewise.engine.tensor_parallel.processes import Workers, _Member
from tilewise.engine.tensor_parallel.wire import (
    BatchReader,
    FrameReader,
    encoded,
    named,
    write_samples,
)

BEAT_S = 1.0


def part_of(tokens: list[int], rank: int) -> int:
    """Return what a rank knows of a prefix, when its cache is right."""
    return _part(_chain(tokens, rank), rank)


def _chain(tokens: list[int], rank: int) -> list[int]:
    out, value = [], simulator._digest("rank", rank)
    for token in tokens:
        value = abs(hash((value, token)))
        out.append(value)
    return out


def _part(values: list[int], rank: int) -> int:
    return abs(hash((rank, *values)))


def ranks_draw(size: int) -> Callable[[list[int], str], int]:
    """Return what all ranks together know of a prefix."""
    return lambda tokens, version: abs(hash(tuple(part_of(tokens, r) for r in range(size))))


class Events:
    """What happens at ranks, in the order of time, when somebody lets it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Let something happen."""
        heapq.heappush(self._heap, (when, next(self._numbers), act))

    def run_until_now(self) -> None:
        """Let happen what is due."""
        while self._heap and self._heap[0][0] <= self.clock.now:
            heapq.heappop(self._heap)[2]()

    def advance(self, latest: float) -> None:
        """Let the next thing happen, and the time pass until then, at most until `latest`."""
        if self._heap and self._heap[0][0] <= latest:
            when, _, act = heapq.heappop(self._heap)
            self.clock.now = max(self.clock.now, when)
            act()
        else:
            self.clock.now = max(self.clock.now, latest)


class Rank:
    """A worker: its blocks, and the steps that it was told of."""

    def __init__(self, group: Group, rank: int, sizes: dict[str, int]) -> None:
        self.group, self.rank = group, rank
        self.block_size = sizes["block_size"]
        self.slots = [[None] * self.block_size for _ in range(sizes["num_blocks"])]
        self.host = [[None] * self.block_size for _ in range(sizes["num_swap_blocks"])]
        self.reader = BatchReader(lambda outputs: None)
        self.frames = FrameReader()
        self.steps: deque[tuple[int, Any]] = deque()
        self.drawn: dict[int, int] = {}
        self.calls = 0
        self.state = "alive"  # silent: it does nothing; dead: its socket is closed
        self.fails_at: int | None = None
        self.part: tuple[int, Batch, list[int] | Exception] | None = None

    def take(self, data: bytes) -> None:
        """Take bytes of the parent."""
        if self.state != "alive":
            return
        for what, *rest in self.frames.feed(data):
            if what == "step":
                self.steps.append((rest[0], rest[1]))
            elif what == "reset":
                self.steps.append((-1, None))
        self.group.go_on()

    def compute(self) -> None:
        """Compute this rank's part of the next step, unless it has one that others wait for."""
        while self.part is None and self.steps and self.state == "alive":
            number, message = self.steps.popleft()
            if number < 0:
                self.reader.reset()
                self.drawn.clear()
                continue
            self.calls += 1
            batch = self.reader.read(message)
            error = self.group.why_fails(self.rank, number, batch)
            self.part = number, batch, error or self._parts(batch)

    def _parts(self, batch: Batch) -> list[int]:
        for block, slot in batch.swap_out:
            self.host[slot] = list(self.slots[block])
        for slot, block in batch.swap_in:
            self.slots[block] = list(self.host[slot])
        for source, copy in batch.block_copies:
            self.slots[copy] = list(self.slots[source])
        size, found = self.block_size, []
        for run in batch.sequences:
            for place, token in enumerate(run.token_ids, run.start):
                if token == PENDING:
                    token = self.drawn.get(run.seq_id, 0)
                before = simulator._digest("rank", self.rank)
                if place:
                    before = self.slots[run.block_ids[(place - 1) // size]][(place - 1) % size]
                value = abs(hash((before, token)))
                self.slots[run.block_ids[place // size]][place % size] = value
            end = run.start + len(run.token_ids)
            read = [self.slots[run.block_ids[p // size]][p % size] for p in range(end)]
            found.append(_part(read, self.rank))
        return found

    def finish(self, answer: list[Any]) -> None:
        """Answer the parent."""
        self.group.say(self, answer)


class Group:
    """All ranks, and the collectives between them."""

    def __init__(
        self,
        size: int,
        sizes: dict[str, int],
        events: Events,
        draw: random.Random,
        why_fails: Callable[[int, int, Batch], Exception | None],
    ) -> None:
        self.events, self.draw, self.why_fails = events, draw, why_fails
        self.ranks = [Rank(self, rank, sizes) for rank in range(size)]
        self.workers: VirtualWorkers | None = None
        self._times = [events.clock.now] * size
        self.is_closed = False
        for rank in self.ranks:
            events.at(events.clock.now + BEAT_S, lambda rank=rank: self._beat(rank))

    def _beat(self, rank: Rank) -> None:
        if rank.state == "alive" and not self.is_closed:
            self.say(rank, ["beat", rank.calls])
            self.events.at(self.events.clock.now + BEAT_S, lambda: self._beat(rank))

    def tell(self, rank: Rank, data: bytes) -> None:
        """Let bytes of the parent come to a rank, in pieces, in order."""
        while data:
            size = len(data) if self.draw.random() < 0.8 else self.draw.randint(1, len(data))
            piece, data = data[:size], data[size:]
            when = max(self._times[rank.rank], self.events.clock.now) + self.draw.expovariate(5e3)
            self._times[rank.rank] = when
            self.events.at(when, lambda piece=piece: rank.take(piece))

    def say(self, rank: Rank, message: list[Any]) -> None:
        """Let a word of a rank come to the parent."""
        when = self.events.clock.now + self.draw.expovariate(5e3)
        data = encoded(message)
        self.events.at(when, lambda: self.workers.hear(rank.rank, data))

    def go_on(self) -> None:
        """Compute, meet and draw, as far as ranks have steps."""
        while True:
            for rank in self.ranks:
                rank.compute()
            parts = [rank.part for rank in self.ranks if rank.part is not None]
            failed = [r for r in self.ranks if r.part and isinstance(r.part[2], Exception)]
            if failed and len(failed) < len(self.ranks):
                for rank in failed:  # the others wait in the collective
                    number, _, error = rank.part
                    rank.finish(["failed", number, *named(error)])
                    rank.part = None
                return
            if len(parts) < len(self.ranks):
                return
            if len({number for number, _, _ in parts}) > 1:
                return  # one has failed alone: the others wait for it in another collective
            self._draw(parts)

    def _draw(self, parts: list[Any]) -> None:
        number, batch, _ = parts[0]
        for rank in self.ranks:
            rank.part = None
        if isinstance(parts[0][2], Exception):
            for rank, (_, _, error) in zip(self.ranks, parts, strict=True):
                rank.finish(["failed", number, *named(error)])
            return
        for rank in self.ranks:
            for seq_id in batch.left:
                rank.drawn.pop(seq_id, None)
        samples = []
        for place, run in enumerate(batch.sequences):
            value = abs(hash(tuple(values[place] for _, _, values in parts)))
            tokens = [
                SampledToken(simulator._digest(value, seed, run.num_generated) % simulator.VOCAB)
                for seed in run.seeds[: run.num_samples]
            ]
            samples.append([scored(token, run.sampling) for token in tokens])
            if tokens:
                for rank in self.ranks:
                    rank.drawn[run.seq_id] = tokens[0].token_id
        for rank in self.ranks:
            rank.finish(["done", number, write_samples(samples), 0])


class _Line:
    """The parent's socket to a worker."""

    def __init__(self, group: Group, rank: Rank) -> None:
        self._group, self._rank, self.is_closed = group, rank, False

    def sendall(self, data: bytes) -> None:
        if self.is_closed or self._rank.state == "dead":
            raise BrokenPipeError("the worker has gone")
        self._group.tell(self._rank, data)

    def shutdown(self, how: int) -> None:
        """Let the worker see the end, upon which it ends."""
        if self._rank.state != "dead":
            self._rank.state = "dead"

    def close(self) -> None:
        self.is_closed = True


class _Changed:
    """A condition of one thread: who waits lets ranks go on."""

    def __init__(self, workers: VirtualWorkers) -> None:
        self._workers = workers

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def notify_all(self) -> None:
        return None

    def wait_for(self, holds: Callable[[], bool], timeout: float | None = None) -> bool:
        events, workers = self._workers.group.events, self._workers
        end = None if timeout is None else events.clock.now + timeout
        for _ in range(1_000_000):
            if holds():
                return True
            if end is not None and events.clock.now >= end:
                return False
            latest = workers.next_watch if end is None else min(end, workers.next_watch)
            events.advance(latest)
            workers.watch()
        raise StillError("workers are waited for too long")


class VirtualWorkers(Workers):
    """The parent's side, over ranks that are objects."""

    def __init__(self, group: Group) -> None:
        self.group = group
        group.workers = self
        self.size = len(group.ranks)
        self.error, self.on_lost = None, None
        self._is_closed, self._pid = False, os.getpid()
        self._changed: Any = _Changed(self)
        self._lock = threading.Lock()
        self._unanswered: dict[int, float] = {}
        self._last_progress = group.events.clock.now
        self._folder = Path("/nonexistent/ranks")
        self._num_asked = 0
        self.next_watch = group.events.clock.now + processes.WATCH_S
        self._members = []
        for rank in group.ranks:
            process: Any = SimpleNamespace(
                wait=lambda timeout=None: None, poll=lambda: 0, kill=lambda: None,
                returncode=-9, pid=-1,
            )  # fmt: skip
            member = _Member(rank.rank, process, _Line(group, rank))  # type: ignore[arg-type]
            member.has_spoken = True
            self._members.append(member)

    def hear(self, rank: int, data: bytes) -> None:
        """Take a word of a rank, or with b"" the end of its socket."""
        if self.error is not None or self._is_closed:
            return
        if data:
            self._take(self._members[rank], data)
        else:
            self._lose(self._ended(self._members[rank]))

    def watch(self) -> None:
        """Look whether one is silent, as often as the thread does."""
        now = self.group.events.clock.now
        if now >= self.next_watch and self.error is None and not self._is_closed:
            self.next_watch = now + processes.WATCH_S
            silent = self._why_lost()
            if silent is not None:
                self._lose(silent)

    def lose_rank(self, rank: int, how: str) -> None:
        """Let a rank die, or fall silent."""
        one = self.group.ranks[rank]
        if one.state == "alive":
            one.state = how
            if how == "dead":
                self.group.events.at(self.group.events.clock.now, lambda: self.hear(rank, b""))

    def close(self) -> None:
        """End all ranks."""
        self.group.is_closed = True
        super().close()
