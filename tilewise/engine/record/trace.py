"""The engine's decisions, event by event, in a ring of bounded size. No torch.

Scheduler and block tables record their actions with one line of code each; a decode step records
one event, and one more for each block that a sequence begins or fills. FIELDS lists the events'
fields. Times are seconds of time.perf_counter, as those of RequestMetrics.

An owner of a block is a table that contains it, or an unfinished step that may still use it. Adding
1 for each block that a sequence gets (admit, fork, extend, copy, hit, and register where it keeps
another) and subtracting 1 for each of free gives the reference counts of the allocator. `replay`
does so, and a test compares them.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tilewise.cache.allocator import BlockAllocator
from tilewise.engine.batch import Batch
from tilewise.engine.record.ages import Ages
from tilewise.engine.request import Request, Sequence

__all__ = ["FIELDS", "Account", "Trace", "read_trace", "write_trace"]

# Largest number of values in the ring, block ids and token counts: 10 MB of Python at worst, the
# last 10,000 steps of a load of short requests.
CAPACITY = 2**18
PER_EVENT = 8  # values that an event counts for, beside its lists of blocks
MAX_ENDED = 1024  # requests that have ended and can still be asked about

FIELDS: dict[str, tuple[str, ...]] = {
    # the pool, the first event of each scheduler: blocks of an earlier one are gone
    "pool": ("num_blocks", "block_size"),
    "arrive": ("request_id", "user", "num_tokens", "num_samples"),
    # its whole table, -1 for blocks that its window has passed. The first num_found blocks came
    # from the prefix cache or main memory: the prefix cache finds them from now on.
    "admit": ("seq_id", "request_id", "index", "blocks", "num_found"),
    # prompts: (seq_id, tokens) of each run of more than one token; all other sequences run one
    "schedule": ("num_sequences", "num_tokens", "prompts"),
    "fork": ("seq_id", "child", "index"),
    "extend": ("seq_id", "blocks"),  # appended to its table
    "copy": ("seq_id", "place", "source", "block"),  # block replaces source in its table
    # blocks that can be found from now on; `kept` is the block used instead if its content was
    # known
    "register": ("seq_id", "place", "blocks", "kept"),
    # found after the admission; they replace the blocks at these places
    "hit": ("seq_id", "place", "blocks"),
    "cut": ("seq_id", "num_kept"),  # only the first blocks stay in its table
    "pass": ("seq_id", "num_passed"),  # its window has passed these first blocks
    "free": ("blocks",),  # one owner less of each
    "evict": ("block",),  # cannot be found any more, as its memory is reused
    "forget": ("blocks",),  # cannot be found any more, as their content is not reliable
    "reset": (),  # no block can be found any more
    "swap_out": ("blocks", "slots"),
    "swap_in": ("slots", "blocks"),
    "preempt": ("seq_id", "num_computed"),
    "finish": ("seq_id", "request_id", "index", "reason"),
}


# For reading a file: fields that are texts, lists of blocks, and blocks or indices into a table.
_TEXTS = frozenset({"kind", "request_id", "user", "reason"})
_BLOCKS = frozenset({"blocks", "kept", "slots"})
_PLACES = frozenset({"num_blocks", "block", "source", "place", "num_kept", "num_passed"})
MOST_BLOCKS = 2**24  # largest pool in a file


class _Event(NamedTuple):
    time: float
    kind: str
    values: tuple[Any, ...]


@dataclass(slots=True)
class Account:
    """The history of one request; times are seconds of the trace's clock.

    Attributes:
        since: the time when it began to wait or run, or ended.
        swapped: the time when it was last swapped out.
        num_cached: the prompt tokens found in the prefix cache; known when a sample has ended.
        num_preemptions: the preemptions of all of its samples.
        num_lost: the computed tokens that were lost with their blocks and not found later.
        reasons: the finish reasons of its samples.
        admitted: the time when a sample first got blocks; None before that.
    """

    arrived: float
    since: float
    num_prompt: int
    num_samples: int
    swapped: float = 0.0
    num_cached: int = 0
    num_preemptions: int = 0
    num_lost: int = 0
    reasons: list[str] = field(default_factory=list)
    admitted: float | None = None


class Trace:
    """Record events; the oldest are dropped when the ring is full.

    Args:
        num_blocks, block_size: the size of the pool and of a block.
        capacity: the largest number of values in the ring, see CAPACITY.
        clock: a function that returns the time in seconds.

    Attributes:
        num_noted: the number of events so far.
        num_lost: the tokens that were computed twice, of all requests; see `Account`.
        ages: the histograms of blocks' ages and steps' sizes.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        capacity: int = CAPACITY,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.capacity, self.clock = capacity, clock
        self.num_noted = self.num_lost = 0
        self.ages = Ages()
        self._events: deque[_Event] = deque()
        self._size = 0
        self._accounts: dict[str, Account] = {}
        self._ended: deque[str] = deque()
        # seq_id -> tokens that were computed when it lost its blocks
        self._lost: dict[int, int] = {}
        self.note("pool", num_blocks, block_size)

    def note(self, kind: str, *values: Any) -> None:
        """Add an event with the present time; drop the oldest events if the ring is too full.

        Args:
            kind: a key of FIELDS.
            values: the values of the fields of this kind, in order; lists of numbers are tuples.
        """
        now = self.clock()
        self._events.append(_Event(now, kind, values))
        self.num_noted += 1
        if (take := self.ages.handlers.get(kind)) is not None:
            take(now, *values)
        self._size += _size(values)
        while self._size > self.capacity:
            self._size -= _size(self._events.popleft().values)

    def since(self, number: int) -> list[dict[str, Any]]:
        """Return the events from `number` on that are still in the ring, oldest first, as dicts of
        JSON's types."""
        first = self.num_noted - len(self._events)
        skip = max(0, number - first)
        # Searched from the end: a follower asks often, for few events of a long ring.
        newest = list(islice(reversed(self._events), max(0, len(self._events) - skip)))
        return [
            {
                "number": first + i,
                "time": event.time,
                "kind": event.kind,
                **dict(zip(FIELDS[event.kind], event.values, strict=True)),
            }
            for i, event in enumerate(reversed(newest), start=skip)
        ]

    def follow(self, before: Trace) -> None:
        """Go on from another trace, whose sequences have all ended: take its events, counts and
        accounts."""
        self._events = deque([*before._events, *self._events])
        self._size += before._size
        self.num_noted += before.num_noted
        self.num_lost += before.num_lost
        self.ages.follow(before.ages)
        self._ended = deque(before._accounts, MAX_ENDED)
        self._accounts = {key: before._accounts[key] for key in self._ended}

    def account(self, request_id: str) -> Account | None:
        """Return the history of a request that is unfinished or has ended recently; None
        otherwise."""
        return self._accounts.get(request_id)

    # ---- called by one line each in scheduler and block tables

    def watch(self, allocator: BlockAllocator) -> None:
        """Let each eviction of an allocator be recorded, before the allocator's listener so far is
        called."""
        tell = allocator.on_evict

        def on_evict(block: int) -> None:
            self.note("evict", block)
            if tell is not None:
                tell(block)

        allocator.on_evict = on_evict

    def arrive(self, request: Request) -> None:
        """Record that a request was accepted, and begin its account."""
        count = request.sampling.num_samples
        num_tokens = len(request.prompt_token_ids)
        self.note("arrive", request.request_id, request.user, num_tokens, count)
        now = self._events[-1].time
        if request.request_id in self._accounts:  # an id is reused after its request has ended
            self._ended.remove(request.request_id)
        self._accounts[request.request_id] = Account(now, now, num_tokens, count)

    def admit(self, seq: Sequence, held: list[int]) -> None:
        """Record that a sequence got blocks, and count its tokens that must be computed again.

        Args:
            seq: the admitted sequence.
            held: the sequence's blocks that its window has not passed.
        """
        request_id, found = seq.request.request_id, seq.num_registered_blocks
        blocks = (*(-1,) * (len(seq.block_ids) - len(held)), *held)
        self.note("admit", seq.seq_id, request_id, seq.index, blocks, found)
        account = self._accounts[request_id]
        account.since = self._events[-1].time
        if account.admitted is None:
            account.admitted = account.since
        lost = max(0, self._lost.pop(seq.seq_id, 0) - seq.num_computed_tokens)
        account.num_lost += lost
        self.num_lost += lost

    def schedule(self, batch: Batch) -> None:
        """Record that a batch was scheduled as a step."""
        runs, total, prompts = batch.sequences, batch.num_tokens, list[int]()
        if total > len(runs):
            for run in runs:
                if (length := len(run.token_ids)) > 1:
                    prompts += [run.seq_id, length]
        self.note("schedule", len(runs), total, tuple(prompts))

    def preempt(self, seq: Sequence) -> None:
        """Record that a sequence loses its blocks, and count that in its request's account.

        It counts as a preemption only if a batch had named the blocks, so that something is lost.
        """
        self.note("preempt", seq.seq_id, seq.num_computed_tokens)
        account = self._accounts[seq.request.request_id]
        account.num_preemptions += seq.num_told_blocks > 0  # otherwise it has lost nothing
        account.since = self._events[-1].time
        if seq.swap_slots:
            account.swapped = account.since
        self._lost[seq.seq_id] = seq.num_computed_tokens

    def finish(self, seq: Sequence, is_last: bool) -> None:
        """Record that a sequence has ended; dropped beams have no reason.

        Args:
            seq: the sequence that has ended.
            is_last: True if its request has no other sequence left. The accounts of the last 1,024
                ended requests are kept.
        """
        reason = "" if seq.finish_reason is None else seq.finish_reason.value
        request_id = seq.request.request_id
        self.note("finish", seq.seq_id, request_id, seq.index, reason)
        self._lost.pop(seq.seq_id, None)
        account = self._accounts[request_id]
        if reason:
            account.reasons.append(reason)
        account.num_cached = max(account.num_cached, seq.num_cached_tokens)
        if is_last:
            account.since = self._events[-1].time
            if len(self._ended) >= MAX_ENDED:
                del self._accounts[self._ended.popleft()]
            self._ended.append(request_id)

    def free(self, blocks: list[int]) -> None:
        """Record that each of some blocks has one owner less; no event is added for an empty
        list."""
        if blocks:
            self.note("free", tuple(blocks))


def _size(values: tuple[Any, ...]) -> int:
    size = PER_EVENT
    for value in values:
        if type(value) is tuple:
            size += len(value)
    return size


def write_trace(path: str | Path, events: Iterable[dict[str, Any]]) -> None:
    """Write the engine's events (see FIELDS) to a file, one JSON object a line; overwrite it."""
    with open(path, "w", encoding="utf-8") as file:
        for event in events:
            file.write(json.dumps(event) + "\n")


def read_trace(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a file that write_trace has written, one by one, each checked.

    Raises:
        ValueError: a line is no event (the message has its number), or there is no line.
    """
    number = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                event = json.loads(line.decode())
                kind = event["kind"]
                known = {key: event[key] for key in ("number", "time", "kind", *FIELDS[kind])}
                _check(known)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"{path} must hold one event a line, line {number} is none"
                ) from error
            yield known
    if not number:
        raise ValueError(f"{path} must hold one event a line, got an empty file")


def _check(event: dict[str, Any]) -> None:
    """Refuse an event with an impossible value, which would break a replay or let it grow
    endlessly.

    Raises:
        ValueError: the message names the field; the caller adds the line.
    """
    for name, value in event.items():
        if name in _TEXTS:
            is_right = isinstance(value, str)
        elif name == "time":
            is_right = isinstance(value, int | float) and math.isfinite(value)
        elif name == "prompts":
            is_right = isinstance(value, list)
        else:
            lists = isinstance(value, list) and name in _BLOCKS
            most = MOST_BLOCKS if name in (*_BLOCKS, *_PLACES) else 2**63
            numbers = value if lists else [value]
            is_right = all(type(one) is int and -1 <= one < most for one in numbers)
            is_right = is_right and lists == (name in _BLOCKS)
        if not is_right:
            raise ValueError(name)
    if event["kind"] == "pool" and event["num_blocks"] < 1:
        raise ValueError("num_blocks")
    if event["kind"] == "register" and len(event["blocks"]) != len(event["kept"]):
        raise ValueError("kept")
