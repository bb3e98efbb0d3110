"""How long blocks live, lie idle and come back, and how large steps are: counts in buckets.

The trace tells what happens to blocks; here its times become histograms, which take a fixed memory
however long the engine runs. No torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Ages", "Counts", "Histogram"]

# Seconds: a block may be evicted within a step, or after a day of rest. Those of vLLM.
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
    """A histogram as it was at some time.

    Attributes:
        bounds: upper bounds of the buckets, but for the last, which has none.
        counts: values in each bucket, the one without a bound included.
        total: the sum of all values.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0


class Histogram:
    """Counts of values in buckets.

    Args:
        bounds: upper bounds, ascending; a value on a bound is in its bucket.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> Counts:
        """Return what was counted so far."""
        return Counts(self._bounds, tuple(self._counts), self._total)


class Ages:
    """Follows the events of a trace; see `trace.FIELDS` for what they hold.

    Attributes:
        handlers: by kind of event, what takes its time and its values.
        step_tokens: tokens of a step.
        lifetime: seconds from when a block could be found until it was evicted.
        idle: seconds from the last use of a block until it was evicted.
        reuse_gap: seconds from the last use of a block until a prompt found it.
    """

    def __init__(self) -> None:
        self._born: dict[int, float] = {}  # by block, when it could be found
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
        """Go on with the counts of another pool, whose blocks are gone."""
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
