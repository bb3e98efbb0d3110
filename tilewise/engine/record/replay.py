"""Reconstruct the cache's contents at each moment from the events of a trace. No torch.

Blocks have owners, tables and a prefix cache as in the engine that recorded the events. Whatever
happened before the first recorded event is missing, and blocks from then count as free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Pool", "Timeline", "replay"]

# special values instead of a request's number, see Timeline
NOBODY, SEVERAL, PENDING, KNOWN = -1, -2, -3, -4
MOST_COLUMNS = 1200  # moments that are kept, as many as a picture has columns
MOST_CELLS = 2**24  # blocks times moments: with more blocks, fewer moments are kept


class Pool:
    """The blocks of an engine's cache as they are after the events that were taken so far.

    Attributes:
        counts: the number of owners of each block.
        tables: the blocks of each sequence, by seq_id; -1 where its window has passed.
        known: the blocks that the prefix cache finds.
        request_of: the number of each sequence's request, in order of arrival, by seq_id.
        names: the id of each request, by number.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._clear(0)

    def _clear(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.counts = [0] * num_blocks
        self.tables: dict[int, list[int]] = {}
        self.known: set[int] = set()
        self.request_of: dict[int, int] = {}

    def take(self, event: dict[str, Any]) -> None:
        """Apply one event; events that do not concern blocks are ignored."""
        method = getattr(self, f"_{event['kind']}", None)
        if method is not None:
            method(event)

    def _pool(self, event: dict[str, Any]) -> None:
        self._clear(event["num_blocks"])

    def _arrive(self, event: dict[str, Any]) -> None:
        self._number(event["request_id"], is_new=True)

    def _number(self, request_id: str, *, is_new: bool = False) -> int:
        if is_new or request_id not in self._numbers:
            self._numbers[request_id] = len(self.names)
            self.names.append(request_id)
        return self._numbers[request_id]

    def _own(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block >= 0:
                self._grow(block)
                self.counts[block] += 1

    def _grow(self, block: int) -> None:
        # the event with the number of blocks has been dropped from the ring
        if block >= self.num_blocks:
            self.counts += [0] * (block + 1 - self.num_blocks)
            self.num_blocks = block + 1

    def _table(self, event: dict[str, Any]) -> list[int]:
        return self.tables.setdefault(event["seq_id"], [])

    def _put(self, event: dict[str, Any], blocks: list[int]) -> None:
        table, place = self._table(event), event["place"]
        table += [-1] * (place + len(blocks) - len(table))
        table[place : place + len(blocks)] = blocks

    def _admit(self, event: dict[str, Any]) -> None:
        self.request_of[event["seq_id"]] = self._number(event["request_id"])
        self.tables[event["seq_id"]] = list(event["blocks"])
        self._own(event["blocks"])
        # Blocks that came back from main memory can be found from now on, too.
        self.known.update(b for b in event["blocks"][: event["num_found"]] if b >= 0)

    def _fork(self, event: dict[str, Any]) -> None:
        table = self.tables.get(event["seq_id"], [])
        self.tables[event["child"]] = list(table)
        self.request_of[event["child"]] = self.request_of.get(event["seq_id"], NOBODY)
        self._own(block for block in table if block >= 0)

    def _extend(self, event: dict[str, Any]) -> None:
        self._table(event).extend(event["blocks"])
        self._own(event["blocks"])

    def _copy(self, event: dict[str, Any]) -> None:
        self._put(event, [event["block"]])
        self._own([event["block"]])

    def _cut(self, event: dict[str, Any]) -> None:
        del self._table(event)[event["num_kept"] :]

    def _pass(self, event: dict[str, Any]) -> None:
        table, end = self._table(event), event["num_passed"]
        table[:end] = [-1] * end

    def _hit(self, event: dict[str, Any]) -> None:
        self._put(event, list(event["blocks"]))
        self._own(event["blocks"])

    def _register(self, event: dict[str, Any]) -> None:
        kept = event["kept"]
        self._own(b for a, b in zip(event["blocks"], kept, strict=True) if a != b)
        self._put(event, list(kept))
        for block in kept:  # its owner may have got it before the first recorded event
            self._grow(block)
        self.known.update(kept)

    def _free(self, event: dict[str, Any]) -> None:
        for block in event["blocks"]:
            self._grow(block)
            self.counts[block] = max(0, self.counts[block] - 1)

    def _evict(self, event: dict[str, Any]) -> None:
        self.known.discard(event["block"])

    def _forget(self, event: dict[str, Any]) -> None:
        self.known.difference_update(event["blocks"])

    def _reset(self, event: dict[str, Any]) -> None:
        self.known.clear()

    def _preempt(self, event: dict[str, Any]) -> None:
        self.tables.pop(event["seq_id"], None)

    def _finish(self, event: dict[str, Any]) -> None:
        self.tables.pop(event["seq_id"], None)

    def owners(self) -> NDArray[np.int32]:
        """Return the state of each block, (num_blocks,) int32: one column of `Timeline.owners`."""
        found = [PENDING if count else NOBODY for count in self.counts]
        for block in self.known:
            self._grow(block)
            if not self.counts[block]:
                found[block] = KNOWN
        for seq_id, table in self.tables.items():
            request = self.request_of.get(seq_id, NOBODY)
            for block in table:
                if block >= 0:
                    found[block] = request if found[block] == PENDING else SEVERAL
        return np.array(found, np.int32)


@dataclass
class Timeline:
    """A trace as arrays.

    Attributes:
        times: (C,) seconds since the first event.
        owners: (num_blocks, C) int32: the number of the request that holds a block alone, SEVERAL
            where sequences share it, PENDING where only an unfinished step may use it, KNOWN where
            it is free and the prefix cache finds it, NOBODY where it is free.
        waiting: (C,), the number of samples that have arrived, not ended, and hold no block.
        num_tokens: (C,), the tokens of the steps since the moment before.
        happened: (C,) counts of blocks or events since the moment before, by kind: "copy", "hit"
            (blocks found in the prefix cache), "evict", "preempt", "swap_out", "swap_in".
        names: the id of each request, by number.
    """

    times: NDArray[np.float64]
    owners: NDArray[np.int32]
    waiting: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    happened: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


HAPPENINGS = ("copy", "hit", "evict", "preempt", "swap_out", "swap_in")


def replay(events: Iterable[dict[str, Any]], *, num_columns: int = MOST_COLUMNS) -> Timeline:
    """Replay a trace and record the cache's state at up to `num_columns` moments.

    Args:
        events: the events of `Engine.trace()`, or of `read_trace`.

    Raises:
        ValueError: there is no event.
    """
    kept = list(events)
    if not kept:
        raise ValueError("events must be at least one, got none")
    start, end = kept[0]["time"], kept[-1]["time"]
    num_blocks = max((e["num_blocks"] for e in kept if e["kind"] == "pool"), default=1)
    steps = max(1, min(num_columns, len(kept), MOST_CELLS // num_blocks))
    edges = np.linspace(start, end, steps + 1)[1:]
    edges[-1] = end  # exact, without rounding
    pool, column = Pool(), 0
    counts = {kind: np.zeros(steps, np.int64) for kind in (*HAPPENINGS, "tokens", "waiting")}
    shots: list[NDArray[np.int32]] = []
    waiting: set[tuple[str, int]] = set()
    sample_of: dict[int, tuple[str, int]] = {}
    for event in kept:
        while column < steps - 1 and event["time"] > edges[column]:
            shots.append(pool.owners())
            counts["waiting"][column] = len(waiting)
            column += 1
        pool.take(event)
        kind = event["kind"]
        if kind == "arrive":
            waiting.add((event["request_id"], 0))
        elif kind == "admit":
            sample = sample_of[event["seq_id"]] = event["request_id"], event["index"]
            waiting.discard(sample)
            counts["hit"][column] += event["num_found"]
        elif kind == "fork" and event["seq_id"] in sample_of:
            name, _ = sample_of[event["seq_id"]]
            sample_of[event["child"]] = name, event["index"]
        elif kind == "finish":
            waiting.discard((event["request_id"], event["index"]))
        elif kind == "schedule":
            counts["tokens"][column] += event["num_tokens"]
        elif kind in ("hit", "swap_out", "swap_in"):
            counts[kind][column] += len(event["blocks"])
        elif kind in HAPPENINGS:
            counts[kind][column] += 1
        if kind == "preempt" and event["seq_id"] in sample_of:
            waiting.add(sample_of[event["seq_id"]])
    while len(shots) < steps:
        shots.append(pool.owners())
        counts["waiting"][len(shots) - 1] = len(waiting)
    owners = np.full((pool.num_blocks, steps), NOBODY, np.int32)
    for i, shot in enumerate(shots):
        owners[: len(shot), i] = shot
    return Timeline(
        times=edges - start,
        owners=owners,
        waiting=counts.pop("waiting"),
        num_tokens=counts.pop("tokens"),
        happened=counts,
        names=pool.names,
    )
