"""Thousands of schedules of one recorded run: what its warps did, in other orders.

A schedule needs no arithmetic and no threads, so it takes milliseconds. Every warp is an actor of
its own, which may stall anywhere while the others of its partition go on to the next barrier among
them; copies land, and outgoing ones read shared memory, after any time; a warp that looks at an
mbarrier late may find it a phase further. Vector clocks prove that all accesses are ordered (see
clocks.py). Numbers are not followed: what an ordered access finds does not depend on the schedule.

What a kernel's path depends on is kept as recorded: an atomic add waits for the number that it
found. Schedules in which other CTAs take a tile are those of another recording.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.kernels.gluon.emulator.clocks import meet
from tests.kernels.gluon.emulator.errors import Deadlock, Protocol, Race
from tests.kernels.gluon.emulator.machine import Worker
from tests.kernels.gluon.emulator.recording import Recording, Regions, steps_of, without_polls

_NEVER = 1 << 62
Clock = np.ndarray  # by lane
_later = np.maximum
_NOTHING = np.zeros(0, np.int64)


class _Actor:
    """One warp, or all of a partition that is one warp."""

    def __init__(self, partition: _Partition, lane: int, first: bool) -> None:
        self.partition, self.lane, self.first = partition, lane, first
        self.steps = partition.steps
        self.at = 0
        self.clock: Clock = _NOTHING
        self.issued = 0  # products
        self.products = lane + 1
        self.met: Any = None  # the generation of a barrier that it has arrived at

    @property
    def name(self) -> str:
        return f"warp {self.lane} of {self.partition.name}"


class _Partition:
    def __init__(self, worker: Worker, steps: list[Any], lane: int) -> None:
        self.name, self.steps = worker.name, steps
        self.number = worker.number
        self.warps = worker.num_warps
        self.actors = [_Actor(self, lane + 2 * w, w == 0) for w in range(worker.num_warps)]
        self.mates = frozenset(actor.lane for actor in self.actors)
        self.copies = lane + 2 * worker.num_warps  # the lane of outgoing copies that have read
        self.written = self.copies + 1
        self.lanes = 2 * worker.num_warps + 2
        self.sends = 0
        self.reading: set[int] = set()
        self.writing: set[int] = set()
        self.left = len(self.actors)  # that have not ended
        self.clock: Clock = _NOTHING  # of those that have
        self.started = False
        # The barrier among its warps.
        self.arrived = 0
        self.generation = 0


class _Barrier:
    def __init__(self, name: str, lane: int) -> None:
        self.name, self.lane = name, lane
        self.count = self.pending = self.bytes = self.finished = 0
        self.published: Clock = _NOTHING
        self.collected: Clock = _NOTHING


class _Named:
    def __init__(self, zero: Clock) -> None:
        self.arrived: list[_Actor] = []
        self.generation = 0
        self.collected = self.published = zero


class Replay:
    """A recording, ready to be run in many schedules.

    Attributes:
        kernel: its name.
        steps: how many there are, those of all warps of a partition counted once.
    """

    def __init__(self, recording: Recording, *, barriers: bool = True) -> None:
        """Prepare; without `barriers` nothing keeps the warps of a partition together."""
        self.kernel, self.resident = recording.kernel, recording.resident
        self.regions = Regions()
        self._ctas: list[list[tuple[Worker, list[Any]]]] = []
        numbers: dict[int, int] = {}
        self._barrier_names: list[str] = []
        for cta in recording.ctas:
            parts = []
            for worker in cta.workers:
                steps = without_polls(steps_of(worker, self.regions))
                steps = [step for step in steps if barriers or step[0] != "barrier"]
                parts.append((worker, [self._numbered(step, numbers) for step in steps]))
            self._ctas.append(parts)
        self.kinds = {step[0] for parts in self._ctas for _, steps in parts for step in steps}
        every = [step for parts in self._ctas for _, steps in parts for step in steps]
        self.steps = len(every)
        # What counters in global memory held when the kernel began.
        self.values: dict[int, int] = {}
        for kind, _, *of_step in every:
            if kind == "atomic":
                _, address, _, old, _ = of_step
                self.values[address] = min(old, self.values.get(address, old))

    def _numbered(self, step: Any, numbers: dict[int, int]) -> Any:
        """Name barriers by number."""
        kind = step[0]
        at = 3 if kind == "bring" else 2
        if kind not in ("init", "arrive", "wait", "bring"):
            return step
        barrier = step[at]
        if id(barrier) not in numbers:
            numbers[id(barrier)] = len(self._barrier_names)
            self._barrier_names.append(barrier.name)
        return (*step[:at], numbers[id(barrier)], *step[at + 1 :])

    def run(self, seed: int) -> None:
        """Run one schedule; raise what is wrong with it."""
        _Run(self, seed).run()


class _Run:
    """One schedule of a Replay."""

    def __init__(self, replay: Replay, seed: int) -> None:
        self.replay = replay
        self.do = {kind: getattr(self, "_" + kind) for kind in replay.kinds}
        self.random = random.Random(seed)
        self.now = 0
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.count = 0
        lane = 0
        self.ctas: list[list[_Partition]] = []
        for parts in replay._ctas:
            partitions = []
            for worker, steps in parts:
                partition = _Partition(worker, steps, lane)
                lane += partition.lanes
                partitions.append(partition)
            self.ctas.append(partitions)
        self.barriers = [_Barrier(n, lane + i) for i, n in enumerate(replay._barrier_names)]
        self.zero = np.zeros(lane + len(self.barriers), np.int64)
        for partition in (p for cta in self.ctas for p in cta):
            partition.clock = self.zero
        for barrier in self.barriers:
            barrier.collected = barrier.published = self.zero
        self.named: dict[tuple[int, int], _Named] = {}
        self.values = dict(replay.values)
        self.places: dict[int, Clock] = {}
        size = len(replay.regions.names)
        self.unfenced: list[tuple[int, list[Any]]] = []  # ordinary accesses, by lane
        # Of every region and lane: [epoch, by an engine, fences, settles, whose].
        self.writes: list[dict[int, list[Any]]] = [{} for _ in range(size)]
        self.reads: list[dict[int, list[Any]]] = [{} for _ in range(size)]
        self.boxes: dict[int, dict[Any, Any]] = {}
        self.ready: list[_Actor] = []
        self.blocked: dict[Any, list[_Actor]] = {}
        self.waiting = list(range(len(self.ctas)))
        self.cta_of = {id(p): n for n, cta in enumerate(self.ctas) for p in cta}
        # How this schedule is: long runs or short ones, late copies or early ones, stalls or none.
        self.burst = self.random.choice((1, 2, 8, 40))
        self.delay = self.random.choice((2, 20, 100, 400))
        self.stall = self.random.choice((0.0, 0.002, 0.02))

    def run(self) -> None:
        for _ in range(self.replay.resident):
            self._next_cta()
        choice, chance = self.random.randrange, self.random.random
        while True:
            while self.events and (self.events[0][0] <= self.now or not self.ready):
                self.now = max(self.now, self.events[0][0])
                heapq.heappop(self.events)[2]()
            if not self.ready:
                break
            at = choice(len(self.ready))
            actor = self.ready[at]
            self.ready[at] = self.ready[-1]
            self.ready.pop()
            left = choice(2 * self.burst) + 1
            while left > 0:
                if actor.at == len(actor.steps):
                    self._end(actor)
                    break
                step = actor.steps[actor.at]
                if step[1] and not actor.first:
                    actor.at += 1
                    continue
                self.now += 1
                left -= 1
                key = self.do[step[0]](actor, *step[2:])
                if key is not None:
                    self.blocked.setdefault(key, []).append(actor)
                    break
                actor.at += 1
                if chance() < self.stall:
                    self._later(lambda actor=actor: self.ready.append(actor), 10)
                    break
                while self.events and self.events[0][0] <= self.now:
                    heapq.heappop(self.events)[2]()
            else:
                self.ready.append(actor)
        stuck = [
            f"  {actor.name} at {actor.steps[actor.at]}"
            for actors in self.blocked.values()
            for actor in actors
        ]
        if stuck or self.waiting:
            raise Deadlock("everybody waits:\n" + "\n".join(stuck))

    # Time.

    def _later(self, event: Callable[[], None], times: int = 1) -> None:
        due = self.now + self.random.randrange(times * self.delay + 1)
        self.count += 1
        heapq.heappush(self.events, (due, self.count, event))

    def _wake(self, key: Any) -> None:
        self.ready += self.blocked.pop(key, ())

    def _next_cta(self) -> None:
        if self.waiting:
            self._begin(self.ctas[self.waiting.pop(0)][0], self.zero)

    def _begin(self, partition: _Partition, clock: Clock) -> None:
        if partition.started:
            return
        partition.started = True
        for actor in partition.actors:
            actor.clock = clock.copy()
            actor.clock[actor.lane] += 1
            self.ready.append(actor)

    def _end(self, actor: _Actor) -> None:
        partition = actor.partition
        if actor.issued > actor.clock[actor.products]:
            raise Protocol(f"{actor.name} ends while its products run")
        partition.left -= 1
        partition.clock = _later(partition.clock, actor.clock)
        if partition.left == 0:
            if partition.sends > partition.clock[partition.copies]:
                raise Protocol(f"{partition.name} ends before its copies have been read")
            cta = self.cta_of[id(partition)]
            self._wake(("ended", cta))
            if partition.number == 0:
                self._next_cta()

    @staticmethod
    def _release(actor: _Actor) -> Clock:
        clock = actor.clock
        actor.clock = clock.copy()
        actor.clock[actor.lane] += 1
        return clock

    # Accesses.

    def _access(
        self, actor: _Actor, region: int, writes: bool, lane: int, epoch: int,
        engine: bool, settles: bool, what: str,
    ) -> list[Any]:  # fmt: skip
        clock, mates = actor.clock, actor.partition.mates
        regions = self.replay.regions
        for other in regions.overlaps[region]:
            for tables in (self.writes, self.reads) if writes else (self.writes,):
                for old_lane, old in tables[other].items():
                    known = clock[old_lane] >= old[0]
                    if not known and not engine and old_lane in mates:
                        continue  # of the same partition, whose barriers Triton has seen to
                    old_writes = tables is self.writes
                    if known:
                        fenced = old[1] or not engine
                        if not fenced and not any(clock[x] >= at for x, at in old[2].items()):
                            raise Race(
                                f"{actor.name} {what} {regions.names[region]}, but "
                                f"'{old[4]}' was not fenced"
                            )
                        continue
                    if (settles and not (old_writes and not old[3])) or (old[3] and not writes):
                        continue
                    raise Race(
                        f"{actor.name} {what} {regions.names[region]}, but '{old[4]}' is not "
                        "known to be finished"
                    )
        access = [epoch, engine, {}, settles, f"{actor.name} {what}"]
        if writes and not settles:
            for other in regions.inside[region]:
                for table in (self.writes[other], self.reads[other]):
                    for old_lane in [x for x in table if x not in mates]:
                        del table[old_lane]
        (self.writes if writes else self.reads)[region][lane] = access
        if not engine:
            self.unfenced.append((lane, access))
        return access

    def _load(self, actor: _Actor, region: int, settles: bool) -> None:
        epoch = int(actor.clock[actor.lane])
        self._access(actor, region, False, actor.lane, epoch, False, settles, "loads from")

    def _store(self, actor: _Actor, region: int, settles: bool) -> None:
        epoch = int(actor.clock[actor.lane])
        self._access(actor, region, True, actor.lane, epoch, False, settles, "stores to")

    def _fence(self, actor: _Actor) -> None:
        """Order the ordinary accesses that this warp knows of before copies and products."""
        clock, lane, warps = actor.clock, actor.lane, actor.partition.warps
        at = int(clock[lane])
        left = []
        for old_lane, old in self.unfenced:
            if clock[old_lane] >= old[0]:
                old[2].setdefault(lane, at)
            if len(old[2]) < warps:
                left.append((old_lane, old))
        self.unfenced = left

    def _bring(
        self, actor: _Actor, region: int, number: int, nbytes: int, address: int, place: Any
    ) -> None:  # fmt: skip
        barrier = self.barriers[number]
        self._check_boxes(actor, address, place, False)
        access = self._access(actor, region, True, barrier.lane, _NEVER, True, False, "copies into")

        def land() -> None:
            barrier.bytes -= nbytes
            access[0] = barrier.finished + 1
            if barrier.collected[barrier.lane] < access[0]:
                barrier.collected = barrier.collected.copy()
                barrier.collected[barrier.lane] = access[0]
            self._maybe_end(number)

        self._later(land)

    def _send(self, actor: _Actor, region: int, address: int, place: Any, adds: bool) -> None:
        partition = actor.partition
        partition.sends += 1
        number = partition.sends
        self._access(actor, region, False, partition.copies, number, True, False, "copies from")
        self._check_boxes(actor, address, place, adds)
        boxes = self.boxes.setdefault(address, {})
        key = (partition.written, adds, *((part.start, part.stop) for part in place))
        boxes[key] = (place, adds, partition.written, number, actor.name)
        partition.reading.add(number)
        partition.writing.add(number)

        def read() -> None:
            partition.reading.discard(number)
            self._wake(("sent", id(partition)))

            def write() -> None:
                partition.writing.discard(number)
                self._wake(("sent", id(partition)))

            self._later(write)

        self._later(read)

    def _check_boxes(self, actor: _Actor, address: int, place: Any, adds: bool) -> None:
        """Raise Race if a copy from or to global memory meets one that may be under way."""
        for old_place, old_adds, lane, epoch, who in self.boxes.get(address, {}).values():
            if (old_adds and adds) or actor.clock[lane] >= epoch:
                continue
            if meet(old_place, place):
                raise Race(f"{actor.name} copies a box of global memory that '{who}' may write")

    def _sent(self, actor: _Actor, pendings: int, written: bool) -> Any:
        partition = actor.partition
        last = partition.sends - pendings
        under_way = partition.writing if written else partition.reading
        if any(number <= last for number in under_way):
            return ("sent", id(partition))
        for lane in (partition.copies, partition.written) if written else (partition.copies,):
            actor.clock[lane] = max(actor.clock[lane], last)
        return None

    def _multiply(self, actor: _Actor, regions: list[int]) -> None:
        actor.issued += 1
        for region in regions:
            self._access(
                actor, region, False, actor.products, actor.issued, True, False, "multiplies"
            )

        self._wake(("issued", id(actor.partition)))

    def _multiplied(self, actor: _Actor, left: int) -> Any:
        """Wait for products, which the four warps of a warpgroup make together."""
        done = actor.issued - left
        mates = actor.partition.actors
        if any(mate.issued < done for mate in mates):
            return ("issued", id(actor.partition))
        for mate in mates:
            if actor.clock[mate.products] < done:
                actor.clock[mate.products] = done
        return None

    # Barriers.

    def _init(self, actor: _Actor, number: int, count: int) -> None:
        self.barriers[number].count = self.barriers[number].pending = count

    def _arrive(self, actor: _Actor, number: int, count: int, nbytes: int) -> None:
        barrier = self.barriers[number]
        barrier.bytes += nbytes
        barrier.collected = _later(barrier.collected, self._release(actor))
        barrier.pending -= count
        if barrier.pending < 0:
            raise Protocol(f"{actor.name}: {barrier.name} has more arrivals than its phase counts")
        self._maybe_end(number)

    def _maybe_end(self, number: int) -> None:
        barrier = self.barriers[number]
        if barrier.pending == 0 and barrier.bytes == 0:
            barrier.finished += 1
            barrier.pending = barrier.count
            barrier.published = _later(barrier.published, barrier.collected)
            barrier.collected = self.zero
            self._wake(("phase", number))

    def _wait(self, actor: _Actor, number: int, parity: int) -> Any:
        barrier = self.barriers[number]
        if barrier.finished & 1 == parity:
            return ("phase", number)
        actor.clock = _later(actor.clock, barrier.published)
        return None

    def _meet(self, actor: _Actor, number: int, threads: int, blocks: bool) -> Any:
        key = self.cta_of[id(actor.partition)], number
        named = self.named.setdefault(key, _Named(self.zero))
        if actor.met is None:
            if actor in named.arrived:
                raise Protocol(f"{actor.name} arrives twice at barrier {number}")
            named.arrived.append(actor)
            named.collected = _later(named.collected, self._release(actor))
            mine = named.generation
            if len(named.arrived) * 32 == threads:
                named.generation += 1
                named.arrived = []
                named.published = _later(named.published, named.collected)
                named.collected = self.zero
                self._wake(("named", *key))
            if not blocks:
                return None
            actor.met = mine
        if named.generation == actor.met:
            return ("named", *key)
        actor.met = None
        actor.clock = _later(actor.clock, named.published)
        return None

    def _barrier(self, actor: _Actor) -> Any:
        partition = actor.partition
        if actor.met is None:
            actor.met = partition.generation
            partition.arrived += 1
            if partition.arrived == partition.warps:
                partition.arrived = 0
                partition.generation += 1
                published = actor.clock
                for mate in partition.actors:
                    published = _later(published, mate.clock)
                for mate in partition.actors:
                    mate.clock = published.copy()
                    mate.clock[mate.lane] += 1
                self._wake(("warps", id(partition)))
        if partition.generation == actor.met:
            return ("warps", id(partition))
        actor.met = None
        return None

    # Partitions and memory.

    def _start(self, actor: _Actor, workers: list[int]) -> None:
        clock = self._release(actor)
        for number in workers:
            self._begin(self.ctas[self.cta_of[id(actor.partition)]][number], clock)

    def _join(self, actor: _Actor, workers: list[int]) -> Any:
        cta = self.cta_of[id(actor.partition)]
        partitions = [self.ctas[cta][number] for number in workers]
        if any(partition.left > 0 for partition in partitions):
            return ("ended", cta)
        for partition in partitions:
            actor.clock = _later(actor.clock, partition.clock)
        return None

    def _atomic(
        self, actor: _Actor, name: str, address: int, value: int, old: int, sem: str
    ) -> Any:  # fmt: skip
        found = self.values[address]
        if name == "add":
            if found < old if value == 0 else found != old:
                return ("value", address)
            self.values[address] = found + value
        else:
            self.values[address] = value
        if "acq" in sem:
            actor.clock = _later(actor.clock, self.places.get(address, self.zero))
        if "rel" in sem.replace("relaxed", ""):
            self.places[address] = _later(self.places.get(address, self.zero), self._release(actor))
        if value != 0 or name != "add":
            self._wake(("value", address))
        return None
