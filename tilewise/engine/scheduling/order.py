"""The order of sequences: by arrival, by priority, or in fair shares. No torch.

Every sequence has a rank, and running and waiting sequences are each kept in the order of their
ranks. A policy assigns the rank of a request, and chooses the waiting sequence to admit next:

    fcfs      rank = arrival, sample. The first that waits is next.
    priority  rank = priority, arrival, sample. The first that waits is next; no running
              sequence gives way to it, but those of lower priority are preempted first.
    fair      the sequence of the user who has been served least is next. From then on the order is
              that of admission: a sequence that has been admitted once comes before all that have
              not, and is never overtaken.

Fair shares are virtual token counters: each user has one, which grows with each token computed of a
prompt, and by DRAWN for each token drawn, divided by the user's weight. The counter of a user that
returns is raised to the least counter of the users that wait, so that no user saves up while away.
An old debt is forgotten as far as the others' counters have passed the user's meanwhile.

Bound: let two users have a request in the queue all the time between two moments. Their services in
between, each divided by the user's weight, differ by at most 2 U,

    U = longest prompt + DRAWN * most tokens of max_num_seqs requests, over the least weight

because a user is admitted only while its counter is the least of those who wait, and the sequences
admitted then are all by which it can run ahead.

Source: Sheng et al. 2023, "Fairness in Serving Large Language Models", algorithm 2 and theorem 4.4;
DRAWN is the paper's w_q, prompt tokens count 1.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping

from tilewise.engine.config import check_policy
from tilewise.engine.request import Request, Sequence

__all__ = ["FairOrder", "Order", "order_of"]

DRAWN = 2  # count of a drawn token, where one of a prompt counts 1
# counters kept of users without requests, before those that are not needed are dropped
MAX_IDLE_USERS = 1024

Rank = tuple[int, int, int]


class Order:
    """The order first come, first served; other policies override its methods.

    Attributes:
        name: the policy, one of `config.POLICIES`.
        counts_tokens: True if charge() must be called with the tokens that are computed.
    """

    name = "fcfs"
    counts_tokens = False

    def rank(self, request: Request, arrival: int) -> Rank:
        """Return the rank (0, arrival, 0) of a request's first sample; lower ranks come first."""
        return (0, arrival, 0)

    def arrive(self, seq: Sequence) -> None:
        """Record that a sequence waits for the first time; first come, first served needs no
        record."""

    def leave(self, seq: Sequence) -> None:
        """Record that a new sequence waits no longer: it is admitted for the first time, or has
        ended. Here nothing is recorded."""

    def admitted_rank(self, seq: Sequence) -> Rank:
        """Return the rank of a sequence from its first admission on; here it stays the same."""
        return seq.rank

    def first(self, waiting: list[Sequence]) -> Sequence:
        """Return the waiting sequence to admit next: here the first of `waiting`, which is not
        empty.

        `waiting` is in the order of ranks.
        """
        return waiting[0]

    def place(self, seq: Sequence, waiting: list[Sequence]) -> int:
        """Return the number of waiting sequences that are admitted before `seq`, which is one of
        them."""
        return waiting.index(seq)

    def line(self, waiting: list[Sequence], most: int) -> list[Sequence]:
        """Return the first waiting sequences, at most `most`, in order of admission."""
        return waiting[:most]

    def charge(self, user: str, num_prompt_tokens: int, num_drawn_tokens: int) -> None:
        """Record the tokens computed for a user; here nothing is recorded."""


class PriorityOrder(Order):
    """The order by the requests' priorities, lower numbers first, and by arrival among equal
    ones."""

    name = "priority"

    def rank(self, request: Request, arrival: int) -> Rank:
        """Return the rank (priority, arrival, 0) of a request's first sample; lower ranks come
        first."""
        return (request.priority, arrival, 0)


class FairOrder(Order):
    """The order by fair shares: the user who was served least, by a virtual token counter, is next.

    Sequences that were admitted once keep the order of their admissions.

    Args:
        weights: the weights of users, above 0; a user not named has 1. One of weight 2 gets twice
            the tokens of one of weight 1 while both wait.

    Attributes:
        counters: the service of each user in weighted tokens, divided by the user's weight; raised
            when a user returns.

    Raises:
        ValueError: a weight is not finite or not above 0.
    """

    name = "fair"
    counts_tokens = True

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = dict(weights or {})
        for user, weight in self.weights.items():
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"user_weights must be above 0, got {weight} for {user!r}")
        self.counters: dict[str, float] = {}
        self._queues: dict[str, deque[Sequence]] = {}  # sequences never admitted, by user
        self._floor = 0.0  # the counter that the last user in the queue had when leaving it
        self._num_admitted = 0
        # number of the last admission, of users that have a counter
        self._last_admitted: dict[str, int] = {}

    def rank(self, request: Request, arrival: int) -> Rank:
        """Return the rank (1, arrival, 0) of a request's first sample: behind all sequences ever
        admitted."""
        return (1, arrival, 0)

    def arrive(self, seq: Sequence) -> None:
        """Queue a sequence that waits for the first time under its user.

        If the user had none in the queue, the user's counter is raised to the least of the users
        who wait.
        """
        user = seq.request.user
        if user not in self._queues:
            floor = min((self.counters[u] for u in self._queues), default=self._floor)
            self.counters[user] = max(self.counters.get(user, 0.0), floor)
            self._queues[user] = deque()
            if len(self.counters) > 2 * len(self._queues) + MAX_IDLE_USERS:
                self._drop_idle(floor)
        self._queues[user].append(seq)

    def leave(self, seq: Sequence) -> None:
        """Remove a sequence, which is admitted for the first time or has ended, from its user's
        queue."""
        user = seq.request.user
        queue = self._queues[user]
        queue.remove(seq)
        if not queue:
            del self._queues[user]
            self._floor = self.counters[user]

    def admitted_rank(self, seq: Sequence) -> Rank:
        """Return a sequence's rank from now on: after all sequences that were ever admitted before
        it."""
        self._num_admitted += 1
        self._last_admitted[seq.request.user] = self._num_admitted
        return (0, self._num_admitted, 0)

    def first(self, waiting: list[Sequence]) -> Sequence:
        """Return the sequence to admit next: the first preempted one, or else the oldest of the
        user who was served least.

        Of users with equal service it is the one who has waited longest since the last admission: a
        user who has just come stands before one who had all until then.
        """
        if waiting[0].rank[0] == 0:
            return waiting[0]
        heads = (queue[0] for queue in self._queues.values())
        return min(heads, key=self._turn)

    def _turn(self, seq: Sequence) -> tuple[float, int, Rank]:
        user = seq.request.user
        return self.counters[user], self._last_admitted.get(user, 0), seq.rank

    def place(self, seq: Sequence, waiting: list[Sequence]) -> int:
        """Return the number of waiting sequences that come before `seq`, if no counter changes
        until then."""
        mine = self._key(seq)
        return sum(self._key(s) < mine for s in waiting)

    def line(self, waiting: list[Sequence], most: int) -> list[Sequence]:
        """Return the first `most` waiting sequences in order of admission, if no counter changes
        until then."""
        return heapq.nsmallest(most, waiting, key=self._key)

    def _key(self, seq: Sequence) -> tuple[float, int, Rank]:
        return (-math.inf, 0, seq.rank) if seq.rank[0] == 0 else self._turn(seq)

    def charge(self, user: str, num_prompt_tokens: int, num_drawn_tokens: int) -> None:
        """Add the tokens computed for a user to the user's counter, divided by the user's weight.

        A drawn token counts DRAWN, a prompt's token 1.
        """
        tokens = num_prompt_tokens + DRAWN * num_drawn_tokens
        counter = self.counters.get(user, self._floor)
        self.counters[user] = counter + tokens / self.weights.get(user, 1.0)

    def _drop_idle(self, floor: float) -> None:
        """Drop the counters of users without waiting requests that would be raised on return
        anyway."""
        self.counters = {u: c for u, c in self.counters.items() if u in self._queues or c > floor}
        kept = self._last_admitted.items()
        self._last_admitted = {u: n for u, n in kept if u in self.counters}


def order_of(policy: str, user_weights: Mapping[str, float] | None = None) -> Order:
    """Return the order of a policy.

    Raises:
        ValueError: there is no such policy, or users have weights that it does not know.
    """
    check_policy(policy, user_weights)
    if policy == "fair":
        return FairOrder(user_weights)
    return PriorityOrder() if policy == "priority" else Order()
