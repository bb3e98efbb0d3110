"""Steps for newcomers alone: users who arrive while another user floods the engine. No torch.

A user floods if more than half of the running sequences are theirs. A short prompt takes a fraction
of the time of a step of such a flood, so a user without running sequences begins in a step of their
own. The next step runs all sequences again, so each advances in every second step at least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from tilewise.engine.scheduling.roster import Roster
from tilewise.engine.tables.admission import Limits

__all__ = ["Newcomers"]

FLOOD = 8  # sequences; with fewer, a step is so short that one for newcomers alone gains nothing


class Newcomers:
    """The rule that gives newcomers a step of their own.

    Args:
        roster: the sequences that run and wait.
        limits: the limits of a step; without fair_prompt_tokens no step is for newcomers alone.

    Attributes:
        ran_alone: True if the last step was for newcomers alone.
    """

    def __init__(self, roster: Roster, limits: Limits) -> None:
        self.roster, self.limits = roster, limits
        self.ran_alone = False

    def kept_waiting_by(self) -> Set[str]:
        """Return the users with running sequences, if the next user to be admitted begins alone.

        The set is empty if no user floods, nothing waits, the next user has running sequences, too,
        the last step was for newcomers alone, or the policy is not "fair" with fair_prompt_tokens.
        """
        if not (self._may_run_alone and self.roster.waiting):
            return frozenset()
        users = self._users_of_a_flood()
        is_new = bool(users) and self.roster.first_waiting().request.user not in users
        return users if is_new else frozenset()

    def flooded_users(self) -> Set[str]:
        """Return the users with running sequences if a user who arrives now would get a step alone.

        Else the set is empty.
        """
        has_seat = len(self.roster.running) < self.limits.max_num_seqs
        return self._users_of_a_flood() if self._may_run_alone and has_seat else frozenset()

    @property
    def _may_run_alone(self) -> bool:
        is_fair = self.roster.order.counts_tokens and self.limits.fair_prompt_tokens is not None
        return is_fair and not self.ran_alone

    def _users_of_a_flood(self) -> Set[str]:
        """Return the users with running sequences, if one of them floods; else none."""
        running = self.roster.running
        if len(running) < FLOOD:
            return frozenset()
        counts = Counter(seq.request.user for seq in running)
        return counts.keys() if 2 * max(counts.values()) > len(running) else frozenset()
