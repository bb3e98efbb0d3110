"""Histograms of the lifetimes and idle times of blocks, and of the sizes of steps.

They are computed from the trace's events and take a fixed memory however long the engine runs. No
torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Ages", "Counts", "Histogram"]

# Seconds: a block may be evicted within a step, or after a day without use. The bounds are vLLM's.
_SECONDS = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    20.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1200.0,
    1800.0,
)
_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


@dataclass(frozen=True, slots=True)
class Counts:
    """A snapshot of a histogram.

    Attributes:
        bounds: the upper bounds of the buckets, without the last bucket's, which has none.
        counts: the number of values in each bucket, the unbounded one included.
        total: the sum of all values.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0


class Histogram:
    """Counts of values in buckets.

    Args:
        bounds: the upper bounds, ascending; a value equal to a bound is in its bucket.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count one value in its bucket, and add it to the total."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> Counts:
        """Return a snapshot of the counts."""
        return Counts(self._bounds, tuple(self._counts), self._total)


class Ages:
    """Histograms that follow the events of a trace; see `trace.FIELDS` for the events.

    Attributes:
        handlers: the function of each kind of event, called with the event's time and values.
        step_tokens: the tokens of a step.
        lifetime: the seconds from a block's registration until its eviction.
        idle: the seconds from the last use of a block until its eviction.
        reuse_gap: the seconds from the last use of a block until a prompt found it.
    """

    def __init__(self) -> None:
        self._born: dict[int, float] = {}  # block -> time of its registration
        self._used: dict[int, float] = {}
        self.step_tokens = Histogram(_TOKENS)
        self.lifetime, self.idle, self.reuse_gap = (Histogram(_SECONDS) for _ in range(3))
        self.handlers: dict[str, Callable[..., None]] = {
            "admit": self._admit,
            "hit": self._hit,
            "register": self._register,
            "free": self._free,
            "evict": self._evict,
            "forget": self._forget,
            "reset": self._reset,
            "schedule": self._schedule,
        }

    def follow(self, before: Ages) -> None:
        """Continue the counts of an earlier pool, whose blocks are gone."""
        self.step_tokens = before.step_tokens
        self.lifetime, self.idle, self.reuse_gap = before.lifetime, before.idle, before.reuse_gap

    def _schedule(self, _: float, __: int, num_tokens: int, ___: Any) -> None:
        self.step_tokens.add(num_tokens)

    def _admit(
        self, now: float, _: int, __: str, ___: int, blocks: tuple[int, ...], found: int
    ) -> None:
        self._find(now, tuple(block for block in blocks[:found] if block >= 0))

    def _hit(self, now: float, _: int, __: int, blocks: tuple[int, ...]) -> None:
        self._find(now, blocks)

    def _find(self, now: float, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            if block in self._born:
                self.reuse_gap.add(now - self._used[block])
            else:  # it came back from main memory
                self._born[block] = now
            self._used[block] = now

    def _register(
        self, now: float, _: int, __: int, ___: tuple[int, ...], kept: tuple[int, ...]
    ) -> None:
        for block in kept:
            self._born.setdefault(block, now)
            self._used[block] = now

    def _free(self, now: float, blocks: tuple[int, ...]) -> None:
        self._used.update(dict.fromkeys(blocks, now))

    def _evict(self, now: float, block: int) -> None:
        born = self._born.pop(block, None)
        if born is not None:
            self.lifetime.add(now - born)
            self.idle.add(now - self._used[block])

    def _forget(self, _: float, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self._born.pop(block, None)

    def _reset(self, _: float) -> None:
        self._born.clear()
