"""Every unfinished sequence: the running and the waiting ones, each in order. No torch.

Both are in the order of ranks, which `order` assigns. So the last of `running` arrived last, or has
the lowest priority, and a forked sample stands directly after the samples before it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter

from tilewise.engine.request import Request, Sequence
from tilewise.engine.scheduling.order import Order

__all__ = ["Roster", "seats"]


def seats(seq: Sequence) -> int:
    """Return the number of seats to keep for a sequence: 1 once it has its first new token.

    Before, the prompt's sequence keeps a seat for each sample of its request that has not ended.
    """
    if seq.num_tokens > seq.num_prompt_tokens:
        return 1
    return seq.request.sampling.num_samples - len(seq.ended)


class Roster:
    """The running and the waiting sequences.

    Args:
        order: the policy, which assigns ranks and chooses the next sequence to admit.

    Attributes:
        running: the sequences that hold blocks, by rank.
        waiting: the sequences that hold none, by rank.
        num_queued, num_queued_tokens: the number of requests that were never admitted, and of the
            tokens of their prompts.
        requests: the samples of each unfinished request, ended ones included, by arrival; for a
            beam search its live beams.
        first_ids: the seq_id of the sample with which each request began.
        live: the unfinished sequences by seq_id.
        num_changes: a counter that grows with every change of `running`.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.num_queued = self.num_queued_tokens = 0
        self.requests: dict[str, list[Sequence]] = {}
        self.first_ids: dict[str, int] = {}
        self.live: dict[int, Sequence] = {}
        self.num_changes = 0
        self._num_sequences = 0
        self._num_arrivals = 0
        self._num_unfinished: dict[str, int] = {}

    def enqueue(self, request: Request, seed: int, max_len: int, now: float = 0.0) -> Sequence:
        """Add a request's first sample to the waiting sequences; return this new sequence.

        Args:
            request: the request, whose id no unfinished request has.
            seed: the seed of the sample's random numbers.
            max_len: the number of tokens, prompt included, at which the sample ends.
            now: the time of its arrival in seconds.
        """
        self._num_arrivals += 1
        rank = self.order.rank(request, self._num_arrivals)
        seq = self._new(request, 0, seed, max_len, rank)
        seq.arrival_time = now
        self.requests[request.request_id] = [seq]
        self.first_ids[request.request_id] = seq.seq_id
        self._num_unfinished[request.request_id] = 1
        insort(self.waiting, seq, key=_rank)
        self.order.arrive(seq)
        self.num_queued += 1
        self.num_queued_tokens += seq.num_prompt_tokens
        return seq

    def adapters(self) -> set[int]:
        """Return the numbers of the adapters that running sequences use."""
        return {seq.request.adapter.number for seq in self.running if seq.request.adapter}

    def first_waiting(self) -> Sequence:
        """Return the sequence that is admitted next; at least one must wait."""
        return self.order.first(self.waiting)

    def admit(self, seq: Sequence) -> None:
        """Move a waiting sequence, which has got blocks, to the running ones.

        At its first admission it gets the rank of an admitted sequence.
        """
        self.num_changes += 1
        del self.waiting[bisect_left(self.waiting, seq.rank, key=_rank)]
        if not seq.was_admitted:
            self._dequeue(seq)
            seq.was_admitted = True
            seq.rank = self.order.admitted_rank(seq)
        insort(self.running, seq, key=_rank)

    def displace(self, seq: Sequence) -> None:
        """Move a running sequence to the waiting ones, at its rank."""
        self.num_changes += 1
        del self.running[bisect_left(self.running, seq.rank, key=_rank)]
        insort(self.waiting, seq, key=_rank)

    def fork(self, parent: Sequence, seeds: tuple[int, ...]) -> list[Sequence]:
        """Add samples 1, 2, ... of a request, one per seed, directly after its running sample 0,
        `parent`.

        Returns:
            The new sequences. They hold no blocks yet and start with the prompt's tokens.
        """
        self.num_changes += 1
        request, max_len = parent.request, parent.max_len
        kind, place, _ = parent.rank
        children = [
            self._new(request, i, seed, max_len, (kind, place, i))
            for i, seed in enumerate(seeds, start=1)
        ]
        for child in children:
            child.was_admitted, child.arrival_time = True, parent.arrival_time
        if children:
            after = self.running.index(parent) + 1
            self.running[after:after] = children
            self.requests[request.request_id] += children
            self._num_unfinished[request.request_id] += len(children)
        return children

    def regroup(self, family: list[Sequence]) -> None:
        """Make `family` the unfinished sequences of a request, in this order; drop its others.

        They were admitted before. Ranks give the order; only this request's part of each list
        changes.

        Args:
            family: the sequences, those with blocks first. New ones must stand beside old ones:
                some old ones hold blocks if new ones do, and some old ones wait if new ones wait.
        """
        self.num_changes += 1
        request_id = family[0].request.request_id
        members = {*self.requests[request_id], *family}
        for seq in members.difference(family):
            del self.live[seq.seq_id]
        kind, place, _ = family[0].rank
        for queue, is_holder in ((self.running, True), (self.waiting, False)):
            low = bisect_left(queue, (kind, place, -1), key=_rank)
            high = low
            while high < len(queue) and queue[high] in members:
                high += 1
            queue[low:high] = [s for s in family if bool(s.block_ids) == is_holder]
        for i, seq in enumerate(family):
            seq.rank = kind, place, i
        self.requests[request_id] = family
        self._num_unfinished[request_id] = len(family)

    def branch(self, parent: Sequence, token_ids: list[int], index: int) -> Sequence:
        """Return a new sequence of a request that continues `parent`; `regroup` assigns its rank.

        Args:
            token_ids: all tokens of the new sequence, the prompt included.
            index: the number of the new sequence within the request.
        """
        seq = self._new(parent.request, index, parent.seed, parent.max_len, parent.rank, token_ids)
        seq.was_admitted, seq.arrival_time = True, parent.arrival_time
        return seq

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that has ended, and its request with its last one.

        Its finish_reason is set and its blocks are not yet released.
        """
        self.num_changes += 1
        queue = self.running if seq.block_ids else self.waiting
        queue.remove(seq)
        if not seq.was_admitted:
            self._dequeue(seq)
        del self.live[seq.seq_id]
        request_id = seq.request.request_id
        self._num_unfinished[request_id] -= 1
        if self._num_unfinished[request_id] == 0:
            del self.requests[request_id], self._num_unfinished[request_id]
            del self.first_ids[request_id]

    def unfinished(self, request_id: str) -> list[Sequence]:
        """Return the unfinished samples of a request, none if it is unknown."""
        return [s for s in self.requests.get(request_id, ()) if s.finish_reason is None]

    def check_integrity(self) -> None:
        """Verify the order of the lists and the counts of sequences; meant for tests.

        Raises:
            AssertionError: an invariant is broken, and the message names it.
        """
        queue = [*self.running, *self.waiting]
        unfinished = {s for family in self.requests.values() for s in family if not s.finish_reason}
        queued = [s for s in self.waiting if not s.was_admitted]
        running, waiting = [s.rank for s in self.running], [s.rank for s in self.waiting]
        ranks = running + waiting
        rules = [
            (set(queue) == unfinished, "running and waiting are the unfinished"),
            (len(set(ranks)) == len(ranks), "no two have one rank"),
            (sorted(running) == running, "running ones are in order"),
            (sorted(waiting) == waiting, "waiting ones are in order"),
            (
                (self.num_queued, self.num_queued_tokens)
                == (len(queued), sum(s.num_prompt_tokens for s in queued)),
                "who was never admitted is counted",
            ),
            (set(self.live.values()) == unfinished, "live sequences run or wait"),
            (
                Counter(s.request.request_id for s in queue) == self._num_unfinished,
                "unfinished samples are counted",
            ),
            (all(s.seq_id == key for key, s in self.live.items()), "seq_ids are keys"),
            (all(s.block_ids for s in self.running), "a running sequence holds blocks"),
            (
                not any(
                    s.block_ids or s.num_computed_tokens or s.num_scheduled_tokens or s.num_pending
                    for s in self.waiting
                ),
                "a waiting sequence holds nothing",
            ),
        ]
        for holds, rule in rules:
            if not holds:
                raise AssertionError(f"broken invariant: {rule}")

    def _dequeue(self, seq: Sequence) -> None:
        """Record that a sequence that was never admitted leaves the queue: it is admitted, or has
        ended."""
        self.order.leave(seq)
        self.num_queued -= 1
        self.num_queued_tokens -= seq.num_prompt_tokens

    def _new(
        self,
        request: Request,
        index: int,
        seed: int,
        max_len: int,
        rank: tuple[int, int, int],
        token_ids: list[int] | None = None,
    ) -> Sequence:
        length = len(request.prompt_token_ids)
        if token_ids is None:
            token_ids = list(request.prompt_token_ids)
        seq = Sequence(self._num_sequences, request, index, token_ids, length, seed, max_len)
        seq.rank = rank
        self._num_sequences += 1
        self.live[seq.seq_id] = seq
        return seq


def _rank(seq: Sequence) -> tuple[int, int, int]:
    return seq.rank
