"""What the partitions of a kernel did, each in its own order, as steps of their warps.

One run of the emulator says what every partition reads, writes, announces and waits for. That is
turned into what its warps do, with the barriers among them that Triton puts in: before an arrival,
after a wait for outgoing copies (test_compile.py looks them up in PTX), and where loads, stores,
products or outgoing copies touch what a load, store or product of the partition touched before and
one of the two writes. Nothing else keeps the warps of a partition together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.gluon_emulator.clocks import History
from tools.gluon_emulator.errors import NotEmulated
from tools.gluon_emulator.machine import Cta, Op, Worker

# Which warp does a step: every one, or the first for all.
EVERY, FIRST = False, True


@dataclass
class Recording:
    """A kernel that has run: its CTAs, in the order in which they began."""

    kernel: str
    resident: int  # CTAs at a time
    ctas: list[Cta]


class Regions:
    """Pieces of shared memory by number, and which of them overlap."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.overlaps: list[list[int]] = []
        self.inside: list[list[int]] = []  # regions that this one covers, itself among them
        self._memories: list[np.ndarray] = []
        self._numbers: dict[Any, int] = {}
        self._of_history: dict[int, list[int]] = {}

    def number(self, history: History, memory: np.ndarray) -> int:
        """Return the number of a view of an allocation."""
        place = memory.__array_interface__["data"][0], memory.shape, memory.strides
        key = (id(history), *place)
        if key not in self._numbers:
            number = self._numbers[key] = len(self.names)
            self.names.append(history.name)
            self._memories.append(memory)
            self.overlaps.append([number])
            self.inside.append([number])
            same = self._of_history.setdefault(id(history), [])
            for other in same:
                if np.shares_memory(self._memories[other], memory):
                    self.overlaps[other].append(number)
                    self.overlaps[number].append(other)
                    if self._covers(memory, self._memories[other]):
                        self.inside[number].append(other)
                    if self._covers(self._memories[other], memory):
                        self.inside[other].append(number)
            same.append(number)
        return self._numbers[key]

    @staticmethod
    def _covers(large: np.ndarray, small: np.ndarray) -> bool:
        """Whether a piece without gaps holds all of another."""
        if large.size * large.itemsize != np.ptp(np.lib.array_utils.byte_bounds(large)):
            return False
        a, b = (np.lib.array_utils.byte_bounds(x) for x in (large, small))
        return bool(a[0] <= b[0] and b[1] <= a[1])


def steps_of(worker: Worker, regions: Regions) -> list[Op]:
    """Return the steps of a partition's warps: (kind, done by the first warp alone, ...)."""
    steps: list[Op] = []
    read: set[int] = set()  # since the last barrier of the warps
    written: set[int] = set()
    several = worker.num_warps > 1
    copies: list[Any] = []  # by cp.async, which the next arrival of copies tells of

    def barrier() -> None:
        if several:
            steps.append(("barrier", EVERY))
        read.clear()
        written.clear()

    def touch(number: int, writes: bool) -> None:
        """Keep the warps together where what they touch was touched before."""
        before = written | read if writes else written
        if any(other in before for other in regions.overlaps[number]):
            barrier()

    for kind, *of_op in worker.ops:
        if kind == "init":
            steps.append((kind, FIRST, *of_op))
        elif kind == "arrive":
            if not of_op[2]:  # who announces bytes does not wait for its warps
                barrier()
            steps.append((kind, FIRST, *of_op))
        elif kind in ("wait", "meet", "fence"):
            steps.append((kind, EVERY, *of_op))
        elif kind in ("load", "store"):
            number = regions.number(*of_op[:2])
            touch(number, kind == "store")
            (written if kind == "store" else read).add(number)
            steps.append((kind, EVERY, number, of_op[2]))
        elif kind == "bring":
            # Triton keeps warps that read what a copy overwrites together, too, as a rule: that is
            # not counted on here.
            number = regions.number(*of_op[:2])
            steps.append((kind, FIRST, number, *of_op[2:]))
        elif kind == "send":
            number = regions.number(*of_op[:2])
            touch(number, False)
            steps.append((kind, FIRST, number, *of_op[2:]))
        elif kind == "sent":
            steps.append((kind, FIRST, *of_op))
            barrier()
        elif kind == "multiply":
            numbers = [regions.number(*view) for view in of_op[0]]
            for number in numbers:
                touch(number, False)
                read.add(number)  # when it is issued: Triton does not ask when it is done
            steps.append((kind, EVERY, numbers))
        elif kind == "multiplied":
            steps.append((kind, EVERY, *of_op))
        elif kind == "atomic":
            steps.append((kind, FIRST, *of_op))
            if of_op[2] == 0:  # all warps learn what the first one has read
                barrier()
        elif kind in ("start", "join"):
            barrier()
            steps.append((kind, EVERY, *of_op))
        elif kind == "copy":
            copies.append(of_op)
        elif kind == "copied":
            # As if the arrival announced the copies' bytes and an engine brought them.
            told, copies = copies, []
            bytes_of = [memory.nbytes for _, memory in told]
            steps.append(("arrive", FIRST, *of_op, sum(bytes_of)))
            for (history, memory), nbytes in zip(told, bytes_of, strict=True):
                number = regions.number(history, memory)
                steps.append(("bring", FIRST, number, of_op[0], nbytes, 0, ()))
        elif kind in ("commit", "committed"):
            raise NotEmulated("groups of cp.async in other schedules than the emulator's own")
        else:
            assert kind == "barrier", kind
            barrier()
    if copies:
        raise NotEmulated("cp.async of which no barrier tells in other schedules")
    return steps


def without_polls(steps: list[Op]) -> list[Op]:
    """Keep of reads of one counter in a row the last, which found what it waited for."""
    kept: list[Op] = []
    for step in steps:
        if step[0] == "atomic" and step[4] == 0:
            at = len(kept)
            while at > 0 and kept[at - 1][0] == "barrier":
                at -= 1
            if at > 0 and kept[at - 1][0] == "atomic" and kept[at - 1][3:5] == step[3:5]:
                del kept[at - 1 :]
        kept.append(step)
    return kept
