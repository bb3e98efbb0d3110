"""Measured rates: of computing a prompt's tokens again, and of moving blocks. No torch."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from itertools import combinations

__all__ = ["Rates"]

MOST_STEPS = 32  # what is looked at: lengths and neighbours change


@dataclass(slots=True)
class Rates:
    """The speeds of this machine by which a preemption chooses to swap or to recompute; 0 is
    unknown.

    Attributes:
        prefill_tokens: tokens computed a second in steps of prompts.
        link_blocks: blocks moved a second between device and main memory, one way.
        group_shares: the share of each group's block in a block of all groups, where there are
            several; () counts all alike.
        max_step_tokens: the largest number of tokens of one step with prompts.
        steps: (tokens, seconds) of the last steps with prompts.
    """

    prefill_tokens: float = 0.0
    link_blocks: float = 0.0
    group_shares: tuple[float, ...] = ()
    max_step_tokens: int = 2**31
    steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))

    def note(self, tokens: int, seconds: float) -> None:
        """Add a step with prompts, of `tokens` tokens, to the last MOST_STEPS that are kept."""
        self.steps.append((tokens, seconds))

    def recompute_seconds(self, tokens: int) -> float:
        """Return the expected seconds to compute `tokens` tokens again.

        A step has fixed seconds and seconds for each token: both are medians over pairs of steps
        (Theil, 1950; Sen, 1968), so that a step in which a kernel was compiled has no effect. With
        steps of one size only, the rate `prefill_tokens` is used.
        """
        slopes = [
            (late - early) / (more - few)
            for (few, early), (more, late) in combinations(self.steps, 2)
            if few != more
        ]
        if not slopes:
            return tokens / self.prefill_tokens if self.prefill_tokens else 0.0
        each = max(0.0, statistics.median(slopes))
        own = max(0.0, statistics.median(s - each * count for count, s in self.steps))
        return -(-tokens // self.max_step_tokens) * own + tokens * each
