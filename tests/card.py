"""One GPU for several processes of tests: who takes much of its memory takes turns.

Tests that stay below four gigabytes run beside one another, and give back what is more than one
when they end. One marked `large` may fill a card of 80 to three fifths, with what the others have,
while all others that are marked so wait. Sixteen processes had 29 GiB at most, an H200's driver's
among them, in a quick run (2026-11-27); 44 ran out of 139.
"""

from __future__ import annotations

import fcntl
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

_KEPT = 1 << 30  # bytes that torch may keep in a process for its next test
# pytest leaves a debugger what failed there, with all tensors of all its frames.
_OF_THE_LAST_FAILURE = ("last_exc", "last_traceback", "last_type", "last_value")


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
            for name in _OF_THE_LAST_FAILURE:
                vars(sys).pop(name, None)
            gc.collect()
            torch.cuda.empty_cache()
