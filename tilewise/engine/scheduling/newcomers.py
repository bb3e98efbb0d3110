"""Steps for newcomers alone: users who arrive while another user floods the engine. No torch.

A user floods if more than half of the running sequences are theirs. A short prompt takes a fraction
of the time of a step of such a flood, so a user without running sequences begins in a step of their
own. The next step runs all sequences again, so each advances in every second step at least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewise.engine.request import Sequence
    from tilewise.engine.scheduling.roster import Roster
    from tilewise.engine.scheduling.scheduler import Scheduler

__all__ = ["admit_apart", "flooded_users", "kept_waiting_by"]

FLOOD = 8  # sequences, below which a step is so short that one for newcomers alone gains nothing


def kept_waiting_by(roster: Roster) -> Set[str]:
    """Return the users with running sequences, if the next one to be admitted begins without them.

    Empty if no user floods, nothing waits, or the next user has running sequences, too.
    """
    if not roster.waiting:
        return frozenset()
    users = _users_of_a_flood(roster)
    return users if users and roster.first_waiting().request.user not in users else frozenset()


def _users_of_a_flood(roster: Roster) -> Set[str]:
    """Return the users with running sequences, if one of them floods; else none."""
    running = roster.running
    if len(running) < FLOOD:
        return frozenset()
    counts = Counter(seq.request.user for seq in running)
    return counts.keys() if 2 * max(counts.values()) > len(running) else frozenset()


def flooded_users(scheduler: Scheduler) -> Set[str]:
    """Return the users with running sequences, if a newcomer would get a step alone; else none."""
    has_seat = len(scheduler.roster.running) < scheduler.limits.max_num_seqs
    return _users_of_a_flood(scheduler.roster) if _is_on(scheduler) and has_seat else frozenset()


def admit_apart(scheduler: Scheduler) -> list[tuple[Sequence, int]]:
    """Return the runs of a step for newcomers alone; none if this step is for all."""
    but = kept_waiting_by(scheduler.roster) if _is_on(scheduler) else ()
    most = scheduler.limits.max_num_batched_tokens
    return scheduler.admit_waiting(most, False, but) if but else []


def _is_on(scheduler: Scheduler) -> bool:
    is_fair = scheduler.order.counts_tokens and scheduler.limits.fair_prompt_tokens is not None
    return is_fair and not scheduler.was_apart
