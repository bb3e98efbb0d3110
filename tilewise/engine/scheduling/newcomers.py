"""Who has a step without the others: users that come beside one that floods. No torch.

A flood is a user with more than half of what runs. A short prompt takes a fraction of a step of
such a flood, so those of whom nothing runs begin without it. The step after that is everybody's:
who runs advances in every second step at least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewise.engine.request import Sequence
    from tilewise.engine.scheduling.roster import Roster
    from tilewise.engine.scheduling.scheduler import Scheduler

__all__ = ["admit_apart", "kept_waiting_by"]

FLOOD = 8  # sequences, below which a step is so short that one for newcomers alone gains nothing


def kept_waiting_by(roster: Roster) -> Set[str]:
    """Return the users that run, if whoever is admitted next should begin without them.

    Empty if nobody floods, nobody waits, or who is next has something that runs.
    """
    running = roster.running
    if not roster.waiting or len(running) < FLOOD:
        return frozenset()
    counts = Counter(seq.request.user for seq in running)
    is_flood = 2 * max(counts.values()) > len(running)
    is_new = roster.first_waiting().request.user not in counts
    return counts.keys() if is_flood and is_new else frozenset()


def admit_apart(scheduler: Scheduler) -> list[tuple[Sequence, int]]:
    """Return the runs of a step for newcomers alone; none if this step is everybody's."""
    limits = scheduler.limits
    is_fair = scheduler.order.counts_tokens and limits.fair_prompt_tokens is not None
    but = kept_waiting_by(scheduler.roster) if is_fair and not scheduler.was_apart else ()
    return scheduler.admit_waiting(limits.max_num_batched_tokens, False, but) if but else []
