"""How a thread waits for requests that the engine's thread serves."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

from tilewise.engine.outputs import Generation

__all__ = ["Waiter", "progress_text", "raise_first", "share_done"]


class Waiter:
    """Wakes one thread when all of its requests have ended, or one of them has failed."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._num_left = len(generations)
        self._event = threading.Event()
        self.is_over = not generations
        for generation in generations:
            generation.on_end = functools.partial(self._one_ended, generation)

    def notice_changes(self) -> None:
        """Wake the thread after each step that changes one of the requests, too."""
        for generation in self._generations:
            generation.on_change = self._event.set

    def wait(self) -> None:
        """Sleep until something has happened since the last call."""
        self._event.wait()
        self._event.clear()

    def _one_ended(self, generation: Generation) -> None:
        self._num_left -= 1
        if self._num_left == 0 or generation.error is not None:
            self.is_over = True
            self._event.set()


def raise_first(generations: Sequence[Generation]) -> None:
    """Raise the error of the first that has failed, if one has."""
    for place, generation in enumerate(generations):
        if generation.error is not None:
            if len(generations) > 1:
                generation.error.add_note(f"This ended prompts[{place}].")
            raise generation.error


def progress_text(generations: Sequence[Generation]) -> str:
    """Return the text of a progress line: prompts done and tokens so far."""
    done = sum(g.output.finished for g in generations)
    tokens = sum(len(c.token_ids) for g in generations for c in g.output.outputs)
    return f"{done}/{len(generations)} prompts, {tokens:,} tokens"


def share_done(generations: Sequence[Generation]) -> float:
    """Return the part of the prompts that are finished, 0 ... 1."""
    return sum(g.output.finished for g in generations) / max(1, len(generations))
