"""How a thread waits for requests that the engine's thread serves."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

from tilewise.engine.outputs import Generation

__all__ = ["Waiter", "progress_text", "raise_first", "share_done"]


class Waiter:
    """Wakes one thread when all of its requests have ended, or one of them has failed.

    It sets their on_end. `is_over` is True once one of the two has happened.
    """

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._num_left = len(generations)
        self._event = threading.Event()
        self.is_over = not generations
        for generation in generations:
            generation.on_end = functools.partial(self._one_ended, generation)

    def notice_changes(self) -> None:
        """Wake the thread also after each step that changes one of the requests."""
        for generation in self._generations:
            generation.on_change = self._event.set

    def wait(self) -> None:
        """Sleep until a request has changed or ended, as asked for, since the last call."""
        self._event.wait()
        self._event.clear()

    def _one_ended(self, generation: Generation) -> None:
        self._num_left -= 1
        if self._num_left == 0 or generation.error is not None:
            self.is_over = True
            self._event.set()


def raise_first(generations: Sequence[Generation]) -> None:
    """Raise the error of the first request in the list that has failed, if one has.

    Where there are several requests, a note on the error tells its place in the list.
    """
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
    """Return the share of the prompts that are finished, 0 ... 1."""
    return sum(g.output.finished for g in generations) / max(1, len(generations))
