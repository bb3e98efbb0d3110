"""Who knows of which access: vector clocks, and the races that they prove.

Every partition counts in a lane of its own, and so does everything that runs beside it: its
products, its outgoing copies, and the copies that arrive at one barrier. A clock says how far in
each lane an actor knows things to be finished; barriers hand clocks on. Two accesses that overlap
and neither of which is known to the other's actor race, whichever came first this time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tools.gluon_emulator.errors import Race

UNFINISHED = 1 << 62
_judging = [True]


@contextlib.contextmanager
def unjudged() -> Iterator[None]:
    """Let races pass inside the block, so that what a wrong kernel did can be recorded."""
    _judging.append(False)
    try:
        yield
    finally:
        _judging.pop()


class Clock(dict[Hashable, int]):
    """How far in each lane things are known to be finished."""

    def join(self, other: Clock) -> None:
        """Learn all that another clock knows."""
        for lane, epoch in other.items():
            if self.get(lane, -1) < epoch:
                self[lane] = epoch

    def knows(self, lane: Hashable, epoch: int) -> bool:
        """Whether everything up to `epoch` of a lane is known to be finished."""
        return self.get(lane, -1) >= epoch


@dataclass
class Access:
    """One access of a piece of shared memory."""

    memory: np.ndarray
    lane: Hashable
    epoch: int
    writes: bool
    by_engine: bool  # a copy (TMA) or a product, which bypass the path of loads and stores
    what: str
    settles: bool  # made by a function that is declared idempotent
    meetings: int  # barriers that the warps of its partition had passed when it began
    fences: dict[Hashable, int] = field(default_factory=dict)


class History:
    """The last accesses of one allocation of shared memory, and its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._accesses: dict[tuple[Any, ...], Access] = {}

    def add(
        self, actor: Any, memory: np.ndarray, *, writes: bool, what: str,
        lane: Hashable = None, epoch: int = 0, settles: bool = False, is_cp_async: bool = False,
    ) -> Access:  # fmt: skip
        """Record an access of `actor`, or of what runs in `lane`; raise Race if it may collide.

        Args:
            is_cp_async: each warp copies a part, by the path of ordinary stores: no fence is
                needed, but a barrier behind what other warps of the partition do there.
            settles: made by an idempotent function, which several partitions may run at a time:
                they all write the same, and who reads what they write before it is written must
                not care. The numbers of many schedules have to prove that.
        """
        by_engine = lane is not None and not is_cp_async
        clock = actor.clock
        for old in self._accesses.values() if _judging[-1] else ():
            if not (writes or old.writes):
                continue
            known = clock.knows(old.lane, old.epoch)
            crosses = by_engine and not old.by_engine  # from ordinary accesses to the engine's
            fenced = not crosses or any(clock.knows(*fence) for fence in old.fences.items())
            several = is_cp_async and old.lane is actor.lane and actor.num_warps > 1
            apart = not several or old.meetings < actor.meetings
            if (known and fenced and apart) or not np.shares_memory(old.memory, memory):
                continue
            if not known and (
                (settles and not (old.writes and not old.settles)) or (old.settles and not writes)
            ):
                continue  # whether it was settled before or after does not matter
            missing = "is not known to be finished" if not known else "was not fenced"
            if known and fenced:
                missing = "has no barrier behind it: other warps may be at it"
            raise Race(f"{actor.name} {what} {self.name}, but {old.what} {missing}")
        if lane is None:
            lane, epoch = actor.lane, actor.clock[actor.lane]
        access = Access(
            memory, lane, epoch, writes, by_engine, f"'{actor.name} {what} {self.name}'", settles,
            actor.meetings,
        )  # fmt: skip
        place = memory.__array_interface__
        key = (place["data"][0], place["shape"], memory.strides, lane, writes)
        self._accesses[key] = access
        return access

    def fence(self, actor: Any) -> None:
        """Order the ordinary accesses that `actor` knows of before copies and products.

        Reads, too: a load that was issued before a barrier may take its data after it, when a copy
        that the barrier let go has begun to write.
        """
        for old in self._accesses.values():
            if not old.by_engine and actor.clock.knows(old.lane, old.epoch):
                old.fences.setdefault(actor.lane, actor.clock[actor.lane])


@dataclass(frozen=True)
class Box:
    """One outgoing copy to global memory, or one sum that is added to it."""

    place: tuple[slice, ...]
    adds: bool
    lane: Hashable
    epoch: int
    who: str


class Boxes:
    """What copies have written to one tensor: who stores must be alone, who adds need not be."""

    def __init__(self) -> None:
        self._boxes: dict[Any, Box] = {}

    def add(self, actor: Any, box: Box) -> None:
        """Record a copy of `actor`; raise Race if it may collide with an older one."""
        self._check(actor, box.place, box.adds, f"{box.who} to")
        key = (box.lane, box.adds, *((part.start, part.stop) for part in box.place))
        self._boxes[key] = box

    def read(self, actor: Any, place: tuple[slice, ...]) -> None:
        """Raise Race if what `actor` starts to load may still be being written."""
        self._check(actor, place, False, f"{actor.name} loads from")

    def _check(self, actor: Any, place: tuple[slice, ...], adds: bool, who: str) -> None:
        for old in self._boxes.values() if _judging[-1] else ():
            if (old.adds and adds) or actor.clock.knows(old.lane, old.epoch):
                continue
            if meet(old.place, place):
                raise Race(
                    f"{who} a box of global memory, but '{old.who}' to the same is not "
                    "known to be finished"
                )


def meet(a: tuple[slice, ...], b: tuple[slice, ...]) -> bool:
    """Whether two boxes have an element in common."""
    pairs = zip(a, b, strict=True)
    return all(x.start < y.stop and y.start < x.stop for x, y in pairs)
