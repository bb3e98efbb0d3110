"""In which order sequences come: as they arrive, by priority, or in fair shares. No torch.

Every sequence has a rank, and running and waiting sequences are each kept in the order of their
ranks. A policy says what rank a request gets, and who of those that wait is admitted next:

    fcfs      rank = arrival, sample. The first that waits is next.
    priority  rank = priority, arrival, sample. The first that waits is next; no running
              sequence gives way to it, but those of lower priority are preempted first.
    fair      whose user has been served least is next. From then on the order is that of admission:
              who has been admitted once comes before all who have not, and is never overtaken.

Fair shares are virtual token counters: each user has one, which grows with each token computed of a
prompt, and by DRAWN for each token drawn, divided by the user's weight. A user that returns is
lifted to the least counter of those who wait, so that no user saves up while away; nor does it keep
an old debt, in so far as the others' counters have passed its own meanwhile.

Bound: let two users have a request in the queue all the time between two moments. What they are
served in between, each divided by its weight, differs by at most 2 U,

    U = longest prompt + DRAWN * most tokens of max_num_seqs requests, over the least weight

because a user is admitted only while its counter is the least of those who wait, and what it has
admitted then is all by which it can run ahead.

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

DRAWN = 2  # what a drawn token counts, where one of a prompt counts 1
MAX_IDLE_USERS = 1024  # counters kept of users who ask for nothing, until a few can be dropped

Rank = tuple[int, int, int]


class Order:
    """First come, first served; the order that the others change.

    Attributes:
        name: one of `config.POLICIES`.
        counts_tokens: whether charge() is to be told what is computed.
    """

    name = "fcfs"
    counts_tokens = False

    def rank(self, request: Request, arrival: int) -> Rank:
        """Return the rank of a request's first sample."""
        return (0, arrival, 0)

    def arrive(self, seq: Sequence) -> None:
        """Note that a sequence waits for the first time."""

    def leave(self, seq: Sequence) -> None:
        """Note that it does no longer: it is admitted, or has ended."""

    def admitted_rank(self, seq: Sequence) -> Rank:
        """Return the rank that a sequence has from its first admission on."""
        return seq.rank

    def first(self, waiting: list[Sequence]) -> Sequence:
        """Return who of at least one is admitted next; they are in the order of their ranks."""
        return waiting[0]

    def place(self, seq: Sequence, waiting: list[Sequence]) -> int:
        """Return how many of those who wait come before one of them."""
        return waiting.index(seq)

    def line(self, waiting: list[Sequence], most: int) -> list[Sequence]:
        """Return the first that wait, at most so many, the next to be admitted first."""
        return waiting[:most]

    def charge(self, user: str, num_prompt_tokens: int, num_drawn_tokens: int) -> None:
        """Note what has been computed for a user."""


class PriorityOrder(Order):
    """Lower priorities first, equal ones by arrival."""

    name = "priority"

    def rank(self, request: Request, arrival: int) -> Rank:
        """Return the rank of a request's first sample."""
        return (request.priority, arrival, 0)


class FairOrder(Order):
    """Virtual token counters; see the head of this file.

    Args:
        weights: of users, above 0; a user not named has 1. One of weight 2 gets twice the tokens of
            one of weight 1 while both wait.

    Attributes:
        counters: what each user has been served, over its weight.

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
        self._floor = 0.0  # the counter of the user that left the queue last, then
        self._num_admitted = 0
        self._last_admitted: dict[str, int] = {}  # of users that have a counter

    def rank(self, request: Request, arrival: int) -> Rank:
        """Return a rank behind all who have been admitted."""
        return (1, arrival, 0)

    def arrive(self, seq: Sequence) -> None:
        """Queue a sequence; lift the counter of a user that had none in the queue."""
        user = seq.request.user
        if user not in self._queues:
            floor = min((self.counters[u] for u in self._queues), default=self._floor)
            self.counters[user] = max(self.counters.get(user, 0.0), floor)
            self._queues[user] = deque()
            if len(self.counters) > 2 * len(self._queues) + MAX_IDLE_USERS:
                self._drop_idle(floor)
        self._queues[user].append(seq)

    def leave(self, seq: Sequence) -> None:
        """Take a sequence out of its user's queue."""
        user = seq.request.user
        queue = self._queues[user]
        queue.remove(seq)
        if not queue:
            del self._queues[user]
            self._floor = self.counters[user]

    def admitted_rank(self, seq: Sequence) -> Rank:
        """Return the rank behind all who have been admitted before."""
        self._num_admitted += 1
        self._last_admitted[seq.request.user] = self._num_admitted
        return (0, self._num_admitted, 0)

    def first(self, waiting: list[Sequence]) -> Sequence:
        """Return the first that lost its place, or that of the user who was served least.

        Of users who were served alike it is the one who has waited longest for an admission: one
        that has just come stands before one that had all until then.
        """
        if waiting[0].rank[0] == 0:
            return waiting[0]
        heads = (queue[0] for queue in self._queues.values())
        return min(heads, key=self._turn)

    def _turn(self, seq: Sequence) -> tuple[float, int, Rank]:
        user = seq.request.user
        return self.counters[user], self._last_admitted.get(user, 0), seq.rank

    def place(self, seq: Sequence, waiting: list[Sequence]) -> int:
        """Return how many come before, if no counter changed until then."""
        mine = self._key(seq)
        return sum(self._key(s) < mine for s in waiting)

    def line(self, waiting: list[Sequence], most: int) -> list[Sequence]:
        """Return the first ones, if no counter changed until then."""
        return heapq.nsmallest(most, waiting, key=self._key)

    def _key(self, seq: Sequence) -> tuple[float, int, Rank]:
        return (-math.inf, 0, seq.rank) if seq.rank[0] == 0 else self._turn(seq)

    def charge(self, user: str, num_prompt_tokens: int, num_drawn_tokens: int) -> None:
        """Note what has been computed for a user."""
        tokens = num_prompt_tokens + DRAWN * num_drawn_tokens
        counter = self.counters.get(user, self._floor)
        self.counters[user] = counter + tokens / self.weights.get(user, 1.0)

    def _drop_idle(self, floor: float) -> None:
        """Forget users without requests in the queue whom returning would lift anyway."""
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
