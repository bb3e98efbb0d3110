"""What tests of benches share: they run in this process, and measure for a moment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tilewise.bench import timing


@pytest.fixture(autouse=True)
def _environment_of_before() -> Iterator[None]:
    """Put the environment back: scripts set that of their process for ranks that they start."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time each call once on a CPU, or as often as it must: 5 to 200 runs are most of a test."""
    time_cpu = timing._time_cpu

    def once(call: Callable[[], object], budget: float, fewest: int | None) -> timing.Timing:
        return time_cpu(call, 0.0, fewest or 1)

    monkeypatch.setattr(timing, "_time_cpu", once)
