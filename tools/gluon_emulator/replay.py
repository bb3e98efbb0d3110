"""Thousands of schedules of one recorded run: what its warps did, in other orders.

A schedule needs no arithmetic and no threads, and is a loop over numbers (schedule.py), so it takes
a fraction of a millisecond. Every warp is an actor of its own, which may stall anywhere while the
others of its partition go on to the next barrier among them; copies land, and outgoing ones read
shared memory, after any time; a warp that looks at an mbarrier late may find it a phase further,
from which it learns no more than the first phase that lets it go on tells. Vector clocks prove that
all accesses are ordered (see clocks.py). Numbers are not followed: what an ordered access finds
does not depend on the schedule.

What a kernel's path depends on is kept as recorded: an atomic add waits for the number that it
found. Schedules in which other CTAs take a tile are those of another recording.

One schedule can stand for all (`Replay.prove`): where every arrival and every copy of a phase knows
that the phase before has ended, and every wait is over before the phase after ends, each wait finds
the same phase in every schedule. Then which access is ordered after which is the same in all, too.
"""

from __future__ import annotations

import itertools
from typing import Any

from tools.gluon_emulator import schedule
from tools.gluon_emulator.clocks import meet
from tools.gluon_emulator.errors import Deadlock, Protocol, Race
from tools.gluon_emulator.machine import Worker
from tools.gluon_emulator.recording import Recording, Regions, steps_of, without_polls

_VERBS = {
    "load": "loads from", "store": "stores to", "bring": "copies into", "send": "copies from",
    "multiply": "multiplies",
}  # fmt: skip
_KINDS = (
    "init", "arrive", "wait", "bring", "send", "sent", "load", "store", "fence", "multiply",
    "multiplied", "meet", "barrier", "start", "join", "atomic",
)  # fmt: skip


class Replay:
    """A recording, ready to be run in many schedules.

    Attributes:
        kernel: its name.
        steps: how many there are, those of all warps of a partition counted once.
    """

    def __init__(self, recording: Recording, *, barriers: bool = True) -> None:
        """Prepare; without `barriers` nothing keeps the warps of a partition together."""
        self.kernel = recording.kernel
        self._regions = Regions()
        ctas = [
            [(worker, self._steps(worker, barriers)) for worker in cta.workers]
            for cta in recording.ctas
        ]
        self.steps = sum(len(steps) for cta in ctas for _, steps in cta)
        self._barriers: dict[int, tuple[int, str]] = {}
        self._actors: list[str] = []
        encoder = _Encoder(self._regions, self._barriers, self._actors)
        self._memory = schedule.memory(encoder.encode(ctas), recording.resident)

    def _steps(self, worker: Worker, barriers: bool) -> list[Any]:
        steps = without_polls(steps_of(worker, self._regions))
        return [step for step in steps if barriers or step[0] != "barrier"]

    def run(self, seed: int, schedules: int = 1) -> None:
        """Run so many schedules from a seed on; raise what is wrong with the first wrong one."""
        self._run(seed, schedules, False)

    def prove(self) -> None:
        """Prove that no schedule is wrong, or raise what is wrong or keeps from proving it."""
        self._run(0, 1, True)

    def _run(self, seed: int, schedules: int, proof: bool) -> None:
        right = schedule.run_many(self._memory, seed, schedules, int(proof))
        if right < schedules:
            raise self._error(seed + right, proof)

    def _error(self, seed: int, proof: bool) -> AssertionError:
        m = self._memory
        code, actor, step, other, kind, region = m[schedule.ERROR :][:6].tolist()
        when = "the proof" if proof else f"schedule {seed}"
        name = self._actors[actor]
        barrier = dict(self._barriers.values()).get(other, f"barrier {other}")
        if code in (schedule.UNORDERED, schedule.UNFENCED):
            missing = (
                "was not fenced" if code == schedule.UNFENCED else "is not known to be finished"
            )
            other_access = f"{self._actors[other]} {_VERBS[_KINDS[kind]]}"
            return Race(
                f"{name} {self._told(step)} {self._regions.names[region]}, but "
                f"'{other_access}' {missing} ({when})"
            )
        if code == schedule.BOX:
            return Race(
                f"{name} copies a box of global memory that '{self._actors[other]}' may write "
                f"({when})"
            )
        if code == schedule.DEADLOCK:
            stuck = [
                f"  {self._actors[each]} at {self._told(int(m[m[schedule.AT] + each]))}"
                for each in m[m[schedule.BLOCKED] :][: m[schedule.NUM_BLOCKED]]
            ]
            return Deadlock(f"everybody waits ({when}):\n" + "\n".join(stuck))
        words = {
            schedule.PRODUCTS: "ends while its products run",
            schedule.COPIES: "ends before its copies have been read",
            schedule.ARRIVALS: f"finds {barrier} with more arrivals than its phase counts",
            schedule.TWICE: f"arrives twice at named barrier {other}",
            schedule.EARLY_ARRIVAL: f"arrives at {barrier}, not knowing of its last phase's end",
            schedule.EARLY_COPY: f"copies for {barrier}, not knowing of its last phase's end",
            schedule.EARLY_MEETING: f"meets at named barrier {other}, not knowing of the last time",
            schedule.LATE_WAIT: f"may look at {barrier} when the phase after has ended",
        }
        return Protocol(f"{name} {words[code]} ({when})")

    def _told(self, step: int) -> str:
        row = self._memory[self._memory[schedule.STEPS] + schedule.STEP * step :][: schedule.STEP]
        kind, _, *numbers = row.tolist()
        if (name := _KINDS[kind]) in _VERBS:
            return _VERBS[name]
        if name in ("wait", "arrive"):
            return f"{name} {dict(self._barriers.values())[numbers[0]]} {numbers[1:]}"
        return f"{name} {numbers}"


class _Encoder:
    """Makes the tables of what is recorded."""

    def __init__(
        self, regions: Regions, barriers: dict[int, tuple[int, str]], names: list[str]
    ) -> None:
        self.regions, self.barriers, self.names = regions, barriers, names
        self.named: dict[tuple[int, int], int] = {}
        self.counters: dict[int, int] = {}
        self.first_values: list[int] = []
        self.updates: list[int] = []
        self.lists: list[int] = []
        # Copies from and to global memory: of one address, place and kind, by one partition.
        self.slots: dict[Any, int] = {}
        self.meetings: dict[Any, tuple[int, int]] = {}

    def encode(self, ctas: list[list[tuple[Worker, list[Any]]]]) -> dict[int, Any]:
        """Number all that the steps name."""
        rows: list[list[int]] = []
        partitions: list[list[int]] = []
        actors: list[list[int]] = []
        mates: list[int] = []
        begins, sends = [], 0
        for cta, parts in enumerate(ctas):
            begins.append(len(partitions))
            for worker, steps in parts:
                number, warps = len(partitions), worker.num_warps
                first = len(actors)
                for warp in range(warps):
                    actors.append([number, len(mates), warp == 0])
                    mates += [number, -1]
                    self.names.append(f"warp {warp} of {worker.name}")
                copies = len(mates)
                mates += [-1, -1]
                for step in steps:
                    if step[0] == "send":
                        _, _, _, address, place, adds = step
                        key = (number, address, _corners(place), adds)
                        self.slots.setdefault(key, len(self.slots))
                partitions.append(
                    [len(rows), len(rows) + len(steps), first, warps, copies, copies + 1, cta,
                     worker.number, sends]
                )  # fmt: skip
                sends += sum(step[0] == "send" for step in steps)
                rows += [[0] * 7 for _ in steps]
        at = 0
        for number, (cta, _, steps) in enumerate(
            (cta, worker, steps) for cta, parts in enumerate(ctas) for worker, steps in parts
        ):
            for step in steps:
                rows[at] = self._row(step, cta, number)
                at += 1
        barrier_lanes = self._lanes(mates, len(self.barriers))
        named_lanes = self._lanes(mates, len(self.named))
        columns = zip(*partitions, strict=True)
        first_column = schedule.P_BEGIN
        return {
            schedule.STEPS: list(itertools.chain.from_iterable(rows)),
            schedule.LISTS: self.lists,
            **{first_column + at: column for at, column in enumerate(columns)},
            schedule.A_PARTITION: [actor[0] for actor in actors],
            schedule.A_LANE: [actor[1] for actor in actors],
            schedule.A_FIRST: [actor[2] for actor in actors],
            schedule.CTAS: begins,
            schedule.MATES: mates,
            **_rows(schedule.OVERLAPS_AT, schedule.OVERLAPS, self.regions.overlaps),
            **_rows(schedule.INSIDE_AT, schedule.INSIDE, self.regions.inside),
            schedule.BARRIER_LANES: barrier_lanes,
            schedule.NAMED_LANES: named_lanes,
            schedule.SLOT_LANES: [partitions[key[0]][5] for key in self.slots],
            schedule.VALUES_FIRST: self.first_values,
            schedule.UPDATES_AT: list(
                itertools.accumulate((n + 1 for n in self.updates), initial=0)
            ),
        }

    @staticmethod
    def _lanes(mates: list[int], count: int) -> list[int]:
        begin = len(mates)
        mates += [-1] * count
        return list(range(begin, begin + count))

    def _listed(self, numbers: list[int]) -> tuple[int, int]:
        begin = len(self.lists)
        self.lists += numbers
        return begin, len(self.lists)

    def _barrier(self, barrier: Any) -> int:
        return self.barriers.setdefault(id(barrier), (len(self.barriers), barrier.name))[0]

    def _meetings(self, address: int, place: Any, adds: bool) -> tuple[int, int]:
        """Return which kinds of outgoing copies have an element in common with a box."""
        key = (address, _corners(place), adds)
        if key not in self.meetings:
            found = [
                slot
                for (_, other, corners, other_adds), slot in self.slots.items()
                if other == address and not (adds and other_adds)
                and meet(tuple(slice(*ends) for ends in corners), place)
            ]  # fmt: skip
            self.meetings[key] = self._listed(found)
        return self.meetings[key]

    def _row(self, step: Any, cta: int, partition: int) -> list[int]:
        kind, first, *of_step = step
        if kind == "init":
            numbers = [self._barrier(of_step[0]), of_step[1]]
        elif kind in ("arrive", "wait"):
            numbers = [self._barrier(of_step[0]), *of_step[1:]]
        elif kind == "bring":
            region, barrier, nbytes, address, place = of_step
            meetings = self._meetings(address, place, False)
            numbers = [region, self._barrier(barrier), nbytes, *meetings]
        elif kind == "send":
            region, address, place, adds = of_step
            slot = self.slots[partition, address, _corners(place), adds]
            numbers = [region, slot, 0, *self._meetings(address, place, adds)]
        elif kind in ("multiply", "start", "join"):
            numbers = list(self._listed(of_step[0]))
        elif kind == "meet":
            number, threads, blocks = of_step
            named = self.named.setdefault((cta, number), len(self.named))
            numbers = [named, threads // 32, blocks]
        elif kind == "atomic":
            name, address, value, old, sem = of_step
            place = self._counter(address, old)
            self.updates[place] += value != 0 or name != "add"
            acquires, releases = "acq" in sem, "rel" in sem.replace("relaxed", "")
            numbers = [place, value, old, (name == "add") + 2 * acquires + 4 * releases]
        else:
            assert kind in ("sent", "load", "store", "fence", "multiplied", "barrier"), kind
            numbers = of_step
        row = [_KINDS.index(kind), bool(first), *(int(number) for number in numbers)]
        return row + [0] * (7 - len(row))

    def _counter(self, address: int, old: int) -> int:
        """Return the number of a counter, which held at first the least that was found."""
        if address not in self.counters:
            self.counters[address] = len(self.counters)
            self.first_values.append(old)
            self.updates.append(0)
        place = self.counters[address]
        self.first_values[place] = min(self.first_values[place], old)
        return place


def _corners(place: Any) -> tuple[tuple[int, int], ...]:
    return tuple((int(part.start), int(part.stop)) for part in place)


def _rows(ends: int, numbers: int, lists: list[list[int]]) -> dict[int, list[int]]:
    """Return two tables: where each list begins, and all numbers."""
    return {
        ends: list(itertools.accumulate((len(each) for each in lists), initial=0)),
        numbers: list(itertools.chain.from_iterable(lists)),
    }
