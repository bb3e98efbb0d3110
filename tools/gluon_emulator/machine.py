"""Partitions as threads of which one runs at a time, and what completes beside them, by chance.

A seed decides everything: who goes on at a synchronisation, and when a copy lands. So a run can be
repeated, nobody waits for a clock on the wall, and a deadlock is known at once: nobody can go on
and nothing is under way.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from tools.gluon_emulator.clocks import Boxes, Clock, History
from tools.gluon_emulator.errors import Deadlock, EmulationError

_SWITCH = 0.25  # chance that another partition goes on at a step
_DELAY, _LONG_DELAY, _LONG = 12, 250, 0.15  # steps that a copy takes; some take much longer
_MOST_POLLS = 20_000  # steps without progress: everybody polls memory that nobody changes
_active: list[Machine] = []
Op = tuple[Any, ...]


class Stopped(BaseException):
    """Unwinds the threads of a machine that has failed."""


def machine() -> Machine:
    """Return the machine that runs now."""
    return _active[-1]


def note(*op: Any) -> None:
    """Record what the running partition does."""
    _active[-1].running.ops.append(op)


def current() -> Worker:
    """Return the partition that runs now."""
    return _active[-1].running


class Cta:
    """What the partitions of one CTA share."""

    def __init__(self, *place: int) -> None:
        self.place = place  # in the grid
        self.workers: list[Worker] = []
        self.histories: list[History] = []
        self.named_barriers: dict[int, Any] = {}


class Worker:
    """One partition (or the code around them), run by a thread."""

    def __init__(self, name: str, cta: Cta, num_warps: int, clock: Clock) -> None:
        self.name, self.cta, self.num_warps = f"CTA {cta.place} {name}", cta, num_warps
        self.number = len(cta.workers)
        cta.workers.append(self)
        self.lane = object()
        self.clock = Clock(clock)
        self.clock[self.lane] = 0
        self.can_go: Callable[[], bool] | None = None
        self.waits_for = ""
        self.gate = threading.Lock()
        self.gate.acquire()
        self.finished = False
        self.products: Any = None  # of wgmma.py
        self.stores: Any = None  # of copies.py
        self.groups: Any = None  # of groups.py
        self.meetings = 0  # barriers that its warps have passed
        self.ops: list[Op] = []  # what it did, in its own order (see recording.py)

    def release(self) -> Clock:
        """Return what others learn from this partition now; what it does later they do not."""
        clock = Clock(self.clock)
        self.clock[self.lane] += 1
        return clock


class Machine:
    """Runs CTAs until all have ended or one has failed."""

    def __init__(self, seed: int, resident: int, idempotent: frozenset[str]) -> None:
        self.random = random.Random(seed)
        self.resident = resident
        self.idempotent = idempotent  # names of functions, see clocks.py
        self.grid: tuple[int, ...] = ()
        self.places: defaultdict[int, Clock] = defaultdict(Clock)  # where atomics meet
        self.boxes: defaultdict[int, Boxes] = defaultdict(Boxes)  # by the address of a tensor
        self.running: Worker = Worker("nobody", Cta(), 0, Clock())
        self.ctas: list[Cta] = []  # in the order in which they began
        self._workers: list[Worker] = []
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0
        self._last_progress = 0
        self._failure: BaseException | None = None
        self._done = threading.Event()

    def run(self, grid: tuple[int, ...], num_warps: int, body: Callable[[Cta], None]) -> None:
        """Run body(cta) for a grid of CTAs, in order, `resident` of them at a time."""
        self.grid = (*grid, 1, 1)[:3]
        x, y, z = (range(int(size)) for size in self.grid)
        waiting = iter([(i, j, k) for k in z for j in y for i in x])

        def start_next() -> None:
            place = next(waiting, None)
            if place is not None:
                cta = Cta(*place)
                self.ctas.append(cta)
                worker = Worker("default", cta, num_warps, Clock())
                self.start(worker, lambda: body(cta), start_next)

        _active.append(self)
        try:
            for _ in range(self.resident):
                start_next()
            if self._workers:
                self._hand_over()
                self._done.wait()
            if self._failure is None:
                self._land_all()
        finally:
            _active.pop()
        if self._failure is not None:
            raise self._failure

    def start(
        self, worker: Worker, body: Callable[[], None], then: Callable[[], None] | None = None
    ) -> None:
        """Let a partition run when its turn comes."""

        def main() -> None:
            worker.gate.acquire()
            try:
                if self._failure is None:
                    with np.errstate(all="ignore"):
                        body()
                    worker.finished = True
                    if then is not None:
                        then()
            except Stopped:
                pass
            except BaseException as error:
                if self._failure is None:
                    self._failure = error
            self._workers.remove(worker)
            self._hand_over()

        self._workers.append(worker)
        threading.Thread(target=main, daemon=True).start()

    def step(self, *, polls: bool = False, reads: bool = False) -> None:
        """Let time pass at a synchronisation: copies may land, others may go on.

        Args:
            polls: an atomic, which may be part of a loop that waits; then others must go on.
            reads: a load, which may be, too, but seldom is.
        """
        self._now += 1
        if not (polls or reads):
            self._last_progress = self._now
        elif self._now - self._last_progress > _MOST_POLLS and not self._events:
            self._fail(Deadlock(f"everybody polls memory in vain:\n{self._picture()}"))
        self._land(self._now)
        if polls or self.random.random() < _SWITCH:
            self._switch()

    def wait(self, can_go: Callable[[], bool], waits_for: str) -> None:
        """Block the running partition until can_go()."""
        self.step()
        worker = self.running
        if not can_go():
            worker.can_go, worker.waits_for = can_go, waits_for
            self._switch()
            worker.can_go = None
        self._last_progress = self._now

    def meet(self, place: int, sem: str) -> None:
        """Hand clocks on at an address of global memory, as an atomic there does."""
        if "acq" in sem:
            self.running.clock.join(self.places[place])
        if "rel" in sem.replace("relaxed", ""):
            self.places[place].join(self.running.release())

    def later(self, event: Callable[[], None]) -> None:
        """Let something happen after a random time."""
        most = _LONG_DELAY if self.random.random() < _LONG else _DELAY
        due = self._now + self.random.randint(0, most)
        heapq.heappush(self._events, (due, next(self._order), event))

    def pieces(self, memory: np.ndarray) -> list[tuple[slice, ...]]:
        """Cut a tile into runs of rows that are copied at times of their own."""
        axis = max(range(memory.ndim - 1), key=lambda i: memory.shape[i], default=0)
        rows = memory.shape[axis]
        count = min(self.random.choice((1, 1, 2, 4)), rows)
        ends = [rows * i // count for i in range(count + 1)]
        before = (slice(None),) * axis
        return [(*before, slice(a, b)) for a, b in itertools.pairwise(ends)]

    def _land(self, until: int) -> None:
        while self._events and self._events[0][0] <= until:
            heapq.heappop(self._events)[2]()
            self._last_progress = self._now

    def _land_all(self) -> None:
        while self._events:
            self._land(self._events[0][0])

    def _ready(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.can_go is None or worker.can_go()]

    def _choose(self) -> Worker | None:
        """Return who goes on; where nobody can, the next event lands first."""
        while self._failure is None:
            ready = self._ready()
            if ready:
                return self.random.choice(ready)
            if not self._events:
                if self._workers:
                    self._failure = Deadlock(f"everybody waits:\n{self._picture()}")
                break
            self._now = max(self._now, self._events[0][0])
            self._land(self._now)
        return self._workers[0] if self._workers else None

    def _hand_over(self) -> None:
        """Wake who goes on, from a thread that does not."""
        chosen = None
        try:
            chosen = self._choose()
        except BaseException as error:
            self._failure = self._failure or error
            chosen = self._workers[0] if self._workers else None
        if chosen is None:
            self._done.set()
        else:
            self.running = chosen
            chosen.gate.release()

    def _switch(self) -> None:
        me = self.running
        chosen = self._choose()
        if chosen is not me and chosen is not None:
            self.running = chosen
            chosen.gate.release()
            me.gate.acquire()
        if self._failure is not None:
            raise Stopped

    def _fail(self, error: EmulationError) -> None:
        self._failure = self._failure or error
        raise Stopped

    def _picture(self) -> str:
        return "\n".join(f"  {w.name} waits for {w.waits_for or 'memory'}" for w in self._workers)
