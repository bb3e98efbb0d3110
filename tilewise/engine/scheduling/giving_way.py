"""Stop steps before their end, for users who arrive while another user floods the engine. No torch.

`newcomers` gives requests that arrive beside a flood a step of their own; before it they wait for
the step that runs, which may be ten times as long. If a runner can stop, that step is stopped and
taken back: everything that it has written will be written again, it has sampled no token, and its
sequences stay where they are. The newcomers' step follows, then one of all sequences.

    step of the flood ------x   newcomers   step of the flood, from its beginning ------

The cost is the time that the stopped step had taken. The device's time lost in this way is at most
SHARE of that of the steps that ended: each of them earns SHARE of its time, up to a few steps'
worth, and a step is stopped only while it has not yet taken longer than the earned time. Its
remaining time does not matter: steps that a busy machine makes long are those worth stopping. No
two steps of all sequences in a row are stopped, however little was lost, and newcomers' own steps
earn nothing. So steps of all sequences continue to end, however many newcomers there are, and
running sequences advance in every third step at least.

Only steps that can be repeated unchanged are stopped: steps of a flood, without copies, transfers,
drafts and windows, in which no sequence has its logits adjusted or its prompt scored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from typing import TYPE_CHECKING

from tilewise.engine.scheduling.withdrawal import withdraw

if TYPE_CHECKING:
    from tilewise.engine.batch import Batch
    from tilewise.engine.scheduling.scheduler import Scheduler

__all__ = ["GivingWay"]

SHARE = 1 / 16  # of the device's time that may be lost
MOST_STEPS = 4  # largest earned time, in multiples of the longest step
FORGOTTEN = 0.05  # weight that each step takes from the earlier ones
LEAST_S = 1e-3  # earned time from which stopping a step is worthwhile


class GivingWay:
    """Number the steps of a scheduler that may be stopped, and account for the lost time.

    `begin` and `end` belong to the engine's thread, `asked_by` to any.

    Args:
        clock: a function that returns the time in seconds.

    Attributes:
        num_stopped: the number of stopped steps.
        stopped_s: the seconds that they had taken.
        earned_s: the seconds that may still be lost.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.num_stopped = 0
        self.stopped_s = 0.0
        self.earned_s = self._longest_s = 0.0
        self._number = 0
        # whether the running step is newcomers' own, and whether it must not be stopped
        self._is_apart = self._is_due = False
        # The running step, the running users, and the time until which it may be stopped.
        self._now: tuple[int, Set[str], float] = (0, frozenset(), 0.0)

    def begin(self, scheduler: Scheduler, batch: Batch) -> int:
        """Return the number of a step that was just scheduled, at least 1; 0 if it may not be
        stopped.

        It may be if a user floods the engine, enough time is earned, and the step can be repeated.
        """
        self._is_apart = scheduler.newcomers.ran_alone
        has_earned = self.earned_s > LEAST_S and not self._is_due
        users = scheduler.newcomers.flooded_users() if has_earned else frozenset()
        if not users or not _can_come_again(scheduler, batch):
            return 0
        self._number += 1
        self._now = self._number, users, self._clock() + self.earned_s
        return self._number

    def asked_by(self, user: str) -> int:
        """Return the number of the step to stop because a user's request has arrived; 0 for none.

        A step is stopped only for a user without running sequences, and only before it has taken
        the earned time.
        """
        number, users, until = self._now
        return number if number and user not in users and self._clock() < until else 0

    def end(self, seconds: float) -> None:
        """Record that the running step has ended after `seconds`; it earns a share of them.

        A step of newcomers alone earns nothing.
        """
        self._now = 0, frozenset(), 0.0
        if self._is_apart:
            return
        self._is_due = False
        self._longest_s = max(seconds, (1 - FORGOTTEN) * self._longest_s)
        self.earned_s = min(self.earned_s + SHARE * seconds, MOST_STEPS * self._longest_s)

    def stop(self, scheduler: Scheduler, seconds: float) -> None:
        """Take back the running step, which was stopped after `seconds`, and count them as lost.

        Its sequences are scheduled again, and the next step of all sequences may not be stopped.
        """
        self._now = 0, frozenset(), 0.0
        self._is_due = True
        self.earned_s -= seconds
        self.num_stopped += 1
        self.stopped_s += seconds
        withdraw(scheduler)


def _can_come_again(scheduler: Scheduler, batch: Batch) -> bool:
    if scheduler.max_in_flight > 1 or not scheduler.tables.is_one_group:
        return False
    if scheduler.speculation is not None or batch.is_moving or batch.block_copies:
        return False
    return batch.is_plain or all(s.asked is None for s in batch.sequences)
