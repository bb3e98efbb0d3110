"""What the first run after `tilewise precompile --from` says: which kernels it found compiled."""

from __future__ import annotations

import atexit
import functools
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["STAMPS", "FirstRun", "first_run", "listen"]

STAMPS = "tilewise-files"  # beside Triton's folders: the kernels of files that no run has used yet


def listen(told: Callable[..., None]) -> None:
    """Call `told` for every kernel that Triton compiles or loads, besides any earlier listener.

    Args:
        told: a function with the arguments of Triton's `knobs.compilation.listener`.
    """
    try:
        from triton import knobs
    except ImportError:  # without Triton nothing is compiled
        return
    before = knobs.compilation.listener

    def tell(**what: Any) -> None:
        told(**what)
        if before is not None:
            before(**what)

    # Not the hook of JIT functions: with one set, Triton writes what is constant in a kernel as
    # JSON, and a kernel with constants that are no plain values could not be launched.
    knobs.compilation.listener = tell


class FirstRun:
    """A counter of the precompiled kernels that this process uses, which it reports at its end.

    It is made where files of kernels were unpacked since the last run, and registers itself with
    Triton's listener and with atexit.

    Args:
        stamps: the JSON files that list the hashes of the unpacked kernels; `tell` removes them.
    """

    def __init__(self, stamps: list[Path]) -> None:
        self._stamps = stamps
        self._taken = set[str]()
        for stamp in stamps:
            with suppress(OSError, ValueError, TypeError):  # a stamp alone runs nothing
                self._taken.update(json.loads(stamp.read_text()))
        self._num_hits = self._num_others = self._num_misses = 0
        listen(self._count)
        atexit.register(self.tell)

    def _count(self, *, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            self._num_misses += 1
        elif metadata.get("hash") in self._taken:
            self._num_hits += 1
        else:
            self._num_others += 1

    @property
    def line(self) -> str | None:
        """The text that says how many precompiled kernels were used and how many were compiled.

        It is None before a kernel was asked for.
        """
        if not (self._num_hits or self._num_others or self._num_misses):
            return None
        others = f", {self._num_others} were there before" if self._num_others else ""
        return (
            f"tilewise: {self._num_hits} of {len(self._taken)} precompiled kernels were used"
            f"{others}, {self._num_misses} were compiled anew"
        )

    def tell(self) -> None:
        """Write `line` to standard error once, and remove the stamps, so that no later run does.

        Nothing happens as long as no kernel was asked for.
        """
        line = self.line
        if line is None or not self._stamps:
            return
        for stamp in self._stamps:
            with suppress(OSError):
                stamp.unlink()
        self._stamps = []
        if sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)


@functools.cache
def first_run() -> FirstRun | None:
    """Return this process's counter of precompiled kernels, made at the first call.

    It is None if no file of kernels was unpacked since the last run, or without Triton.
    """
    try:
        from triton import knobs
    except ImportError:
        return None
    stamps = sorted(Path(knobs.cache.dir).joinpath(STAMPS).glob("*.json"))
    return FirstRun(stamps) if stamps else None
