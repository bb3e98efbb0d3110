"""Which steps end before their time, for users that come beside one that floods. No torch.

`newcomers` gives requests that come beside a flood a step of their own; before it they wait for the
step under way, which may be ten times as long. Where a runner can stop, that step is stopped and
taken back: it has written what it will write again, has drawn no token, and its sequences stay
where they are. The newcomers' step follows, then one of all sequences.

    step of the flood ------x   newcomers   step of the flood, from its beginning ------

What it costs is what the stopped step had taken. The device's time that is lost so is at most
SHARE of that of the steps that ended: each of them earns SHARE of its time, up to some steps'
worth, and one is stopped only while it has not yet taken what is earned. How long it will take does
not matter: steps that a busy machine makes long are those worth stopping. Of the steps of all
sequences no two in a row are stopped, however little of them was lost, and newcomers' own earn
nothing. So steps of all sequences go on ending, however many newcomers there are, and running
sequences advance in every third step at least.

Only steps that can come again as they were are stopped: of a flood, without copies, transfers,
guesses and windows, in which no sequence has its logits changed or its prompt read.
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
MOST_STEPS = 4  # that can be earned and kept, of the length of the longest
FORGOTTEN = 0.05  # of which each step makes the earlier ones count so much less
LEAST_S = 1e-3  # earned, for which it is worth while to stop a step


class GivingWay:
    """Numbers the steps of a scheduler that may be stopped, and counts what that costs.

    `begin` and `end` belong to the engine's thread, `asked_by` to any.

    Args:
        clock: of seconds.

    Attributes:
        num_stopped: steps that were.
        stopped_s: seconds that they had taken.
        earned_s: seconds that stopped steps may cost.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.num_stopped = 0
        self.stopped_s = 0.0
        self.earned_s = self._longest_s = 0.0
        self._number = 0
        self._is_apart = self._is_due = False  # what runs: newcomers' own; one that is not stopped
        # The step that runs, the users who run, and until when it may be stopped.
        self._now: tuple[int, Set[str], float] = (0, frozenset(), 0.0)

    def begin(self, scheduler: Scheduler, batch: Batch) -> int:
        """Return the number of a step that was just scheduled; 0 if it may not be stopped."""
        self._is_apart = scheduler.newcomers.ran_alone
        has_earned = self.earned_s > LEAST_S and not self._is_due
        users = scheduler.newcomers.flooded_users() if has_earned else frozenset()
        if not users or not _can_come_again(scheduler, batch):
            return 0
        self._number += 1
        self._now = self._number, users, self._clock() + self.earned_s
        return self._number

    def asked_by(self, user: str) -> int:
        """Return the number of the step to stop, as a request of a user has come; 0 is none."""
        number, users, until = self._now
        return number if number and user not in users and self._clock() < until else 0

    def end(self, seconds: float) -> None:
        """Note that the step that runs has ended, and what it took."""
        self._now = 0, frozenset(), 0.0
        if self._is_apart:
            return
        self._is_due = False
        self._longest_s = max(seconds, (1 - FORGOTTEN) * self._longest_s)
        self.earned_s = min(self.earned_s + SHARE * seconds, MOST_STEPS * self._longest_s)

    def stop(self, scheduler: Scheduler, seconds: float) -> None:
        """Take the step that runs back, as it was stopped after so many seconds."""
        self._now = 0, frozenset(), 0.0
        self._is_due = True
        self.earned_s -= seconds
        self.num_stopped += 1
        self.stopped_s += seconds
        withdraw(scheduler)


def _can_come_again(scheduler: Scheduler, batch: Batch) -> bool:
    if scheduler.max_in_flight > 1 or scheduler.limits.windows != (None,):
        return False
    if scheduler.speculation is not None or batch.is_moving or batch.block_copies:
        return False
    return batch.is_plain or all(s.asked is None for s in batch.sequences)
