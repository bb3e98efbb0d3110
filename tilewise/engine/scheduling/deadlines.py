"""The times by which requests must have begun or ended. No torch."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from tilewise.engine.request import Sequence
from tilewise.engine.scheduling.roster import Roster

__all__ = ["Deadlines"]

SPARE = 1024  # entries of ended requests that are kept until they are due


class _Entry(NamedTuple):
    time: float
    seq_id: int  # the request's first sample: ids of requests are reused
    request_id: str
    may_run: bool  # True if the time concerns only a request that was never admitted


class Deadlines:
    """The times of all unfinished requests that have one, the earliest first.

    Args:
        roster: the unfinished sequences.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._heap: list[_Entry] = []

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def next_time(self) -> float | None:
        """The earliest time at which a request may be due; None if there is none."""
        return self._heap[0].time if self._heap else None

    def add(self, seq: Sequence) -> None:
        """Record the deadline, and the longest time in the queue, of a request that has just
        arrived.

        Args:
            seq: the request's first sample.
        """
        request = seq.request
        for seconds, may_run in ((request.deadline_s, False), (request.max_queue_s, True)):
            if seconds is not None:
                time = seq.arrival_time + seconds
                entry = _Entry(time, seq.seq_id, request.request_id, may_run)
                heapq.heappush(self._heap, entry)
        if len(self._heap) > 4 * len(self._roster.requests) + SPARE:
            self._heap = [entry for entry in self._heap if self._concerns(entry)]
            heapq.heapify(self._heap)

    def due(self, now: float) -> list[str]:
        """Return the ids of the unfinished requests whose time is over at `now`, and forget these
        times."""
        over: dict[str, None] = {}
        while self._heap and self._heap[0].time <= now:
            entry = heapq.heappop(self._heap)
            if self._concerns(entry):
                over[entry.request_id] = None
        return list(over)

    def _concerns(self, entry: _Entry) -> bool:
        """Return whether an entry still counts: its request is unfinished and, if the entry is a
        deadline for its start, has not been admitted."""
        family = self._roster.requests.get(entry.request_id)
        if family is None or self._roster.first_ids[entry.request_id] != entry.seq_id:
            return False
        return not (entry.may_run and family[0].was_admitted)
