"""Every unfinished sequence, in one order that never changes. No torch.

The order is (arrival of the request, sample), and all running sequences are before all waiting
ones. So the newest that runs is the last of `running`, whoever loses its place goes to the front of
`waiting`, and a forked sample stands right behind the samples before it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from itertools import islice, takewhile

from tilewise.engine.request import Request, Sequence

__all__ = ["Roster"]


class Roster:
    """Who runs and who waits.

    Attributes:
        running: sequences that hold blocks, the oldest first.
        waiting: sequences that hold none, the oldest first.
        requests: the samples of each unfinished request, ended ones included, by arrival.
        live: unfinished sequences by seq_id.
    """

    def __init__(self) -> None:
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.requests: dict[str, list[Sequence]] = {}
        self.live: dict[int, Sequence] = {}
        self._num_sequences = 0
        self._num_unfinished: dict[str, int] = {}

    def enqueue(self, request: Request, seed: int, max_len: int) -> Sequence:
        """Put a request's first sample at the end of the queue and return it."""
        seq = self._new(request, 0, seed, max_len)
        self.requests[request.request_id] = [seq]
        self._num_unfinished[request.request_id] = 1
        self.waiting.append(seq)
        return seq

    def admit(self) -> Sequence:
        """Move the first that waits behind the last that runs."""
        seq = self.waiting.popleft()
        self.running.append(seq)
        return seq

    def displace(self) -> Sequence:
        """Move the last that runs before the first that waits."""
        seq = self.running.pop()
        self.waiting.appendleft(seq)
        return seq

    def fork(self, parent: Sequence, seeds: tuple[int, ...]) -> list[Sequence]:
        """Add samples 1, 2, ... of a running first sample, one per seed, right behind it."""
        request, max_len = parent.request, parent.max_len
        children = [self._new(request, i, seed, max_len) for i, seed in enumerate(seeds, start=1)]
        if children:
            after = self.running.index(parent) + 1
            self.running[after:after] = children
            self.requests[request.request_id] += children
            self._num_unfinished[request.request_id] += len(children)
        return children

    def regroup(self, family: list[Sequence]) -> None:
        """Make these the unfinished sequences of a request, in this order; others of it are gone.

        Args:
            family: those that hold blocks first, and new ones only beside old ones: of the old
                ones, too, some hold blocks if new ones do, or wait if they wait.
        """
        request_id = family[0].request.request_id
        members = {*self.requests[request_id], *family}
        waiting = [s for s in family if not s.block_ids]
        for seq in members.difference(family):
            del self.live[seq.seq_id]
        if len(waiting) < len(family) or any(s.block_ids for s in members):
            holders = family[: len(family) - len(waiting)]
            self.running[:] = _replaced(self.running, members, holders)
        if waiting or not all(s.block_ids for s in members):
            queue = _replaced(self.waiting, members, waiting)
            self.waiting.clear()
            self.waiting.extend(queue)
        self.requests[request_id] = family
        self._num_unfinished[request_id] = len(family)

    def branch(self, parent: Sequence, token_ids: list[int], index: int) -> Sequence:
        """Make a sequence that continues another of its request; regroup() gives it its place."""
        seq = self._new(parent.request, index, parent.seed, parent.max_len)
        seq.token_ids = token_ids
        return seq

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence whose finish_reason is set and whose blocks are not yet released."""
        queue = self.running if seq.block_ids else self.waiting
        queue.remove(seq)
        del self.live[seq.seq_id]
        request_id = seq.request.request_id
        self._num_unfinished[request_id] -= 1
        if self._num_unfinished[request_id] == 0:
            del self.requests[request_id], self._num_unfinished[request_id]

    def unfinished(self, request_id: str) -> list[Sequence]:
        """Return the unfinished samples of a request, none if it is unknown."""
        return [s for s in self.requests.get(request_id, ()) if s.finish_reason is None]

    def check_integrity(self) -> None:
        """Verify the order.

        Raises:
            AssertionError: names the invariant that is broken.
        """
        queue = [*self.running, *self.waiting]
        by_age = [s for family in self.requests.values() for s in family if not s.finish_reason]
        rules = [
            (queue == by_age, "running, then waiting, are the unfinished by arrival and sample"),
            (set(self.live.values()) == set(queue), "live sequences run or wait"),
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

    def _new(self, request: Request, index: int, seed: int, max_len: int) -> Sequence:
        prompt = list(request.prompt_token_ids)
        seq = Sequence(self._num_sequences, request, index, prompt, len(prompt), seed, max_len)
        self._num_sequences += 1
        self.live[seq.seq_id] = seq
        return seq


def _replaced(
    queue: Iterable[Sequence], members: set[Sequence], family: list[Sequence]
) -> list[Sequence]:
    """Return a queue with the members of a family replaced by others, where the first one was."""
    before = list(takewhile(lambda s: s not in members, queue))
    behind = [s for s in islice(queue, len(before), None) if s not in members]
    return before + family + behind
