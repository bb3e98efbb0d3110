"""One GPU for several processes of tests: who takes much of its memory takes turns.

Tests that stay below two gigabytes run beside one another, and give back what is more than one
when they end. One marked `large` may fill a card of 80 to three fifths, with what the others have,
while all others that are marked so wait.
"""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

_KEPT = 1 << 30  # bytes that torch may keep in a process for its next test


@contextmanager
def turn_of(item: pytest.Item) -> Iterator[None]:
    """Wait for the turn of a large test, and give back what a test leaves to torch's allocator."""
    is_large = item.get_closest_marker("large") is not None
    with _alone() if is_large else _beside():
        try:
            yield
        finally:
            _give_back(0 if is_large else _KEPT)


@contextmanager
def _beside() -> Iterator[None]:
    yield


@contextmanager
def _alone() -> Iterator[None]:
    path = Path(tempfile.gettempdir(), f"tilewise-tests-large-{os.getuid()}")
    with path.open("w") as file:  # of the whole machine: another run of tests may share the card
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _give_back(most: int) -> None:
    if not torch.cuda.is_initialized():
        return
    with suppress(RuntimeError):  # of a device that a test has lost
        if torch.cuda.memory_reserved() > most:
            gc.collect()
            torch.cuda.empty_cache()
