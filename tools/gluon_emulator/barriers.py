"""mbarriers and named barriers: arrivals, bytes and phases, and the clocks that they hand on."""

from __future__ import annotations

from typing import Any

from tools.gluon_emulator.clocks import Clock
from tools.gluon_emulator.errors import Protocol
from tools.gluon_emulator.machine import current, machine, note

MOST_PENDING = (1 << 20) - 1  # arrivals of a phase (PTX ISA, mbarrier)
THREADS_PER_WARP = 32


class Barrier:
    """One mbarrier in shared memory."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count: int | None = None
        self.finished = 0  # phases
        self._published, self._collected = Clock(), Clock()

    def init(self, count: int) -> None:
        """Start phase 0, which ends with `count` arrivals."""
        if self.count is not None:
            raise Protocol(f"{self.name} is initialised twice")
        if not 1 <= count <= MOST_PENDING:
            raise Protocol(f"{self.name} cannot count {count} arrivals")
        self.count = self._pending = int(count)
        self._bytes = 0
        note("init", self, self.count)

    def invalidate(self) -> None:
        """End the barrier's life; its memory may be used anew."""
        self._checked()
        self.count = None

    def arrive(self, count: int = 1, expected_bytes: int = 0) -> None:
        """Arrive, and announce bytes that a copy will bring before the phase ends."""
        self._checked()
        note("arrive", self, int(count), expected_bytes)
        machine().step()
        self._bytes += expected_bytes
        self._collected.join(current().release())
        self._pending -= count
        if self._pending < 0:
            raise Protocol(f"{current().name}: {self.name} has more arrivals than its phase counts")
        self._maybe_end()

    def complete(self, count: int) -> int:
        """Count bytes that a copy has brought; return the phase whose end tells of them."""
        self._checked()
        self._bytes -= count
        phase = self.finished + 1
        self._collected[self] = phase
        self._maybe_end()
        return phase

    def copied(self, count: int) -> int:
        """Count arrivals of copies that have landed; return the phase whose end tells of them."""
        self._checked()
        self._pending -= count
        if self._pending < 0:
            raise Protocol(f"{self.name} has more arrivals of copies than its phase counts")
        phase = self.finished + 1
        self._collected[self] = phase
        self._maybe_end()
        return phase

    def wait(self, parity: Any) -> None:
        """Block until the phase of this parity has ended."""
        self._checked()
        parity = int(parity)
        if parity not in (0, 1):
            raise Protocol(f"the parity of a phase is 0 or 1, got {parity}")
        note("wait", self, parity)
        machine().wait(
            lambda: self.finished & 1 != parity,
            f"{self.name}, phase {parity} ({self._pending} arrivals and {self._bytes} bytes short)",
        )
        current().clock.join(self._published)

    def _maybe_end(self) -> None:
        if self._pending == 0 and self._bytes == 0:
            self.finished += 1
            self._pending = self.count
            self._published.join(self._collected)
            self._collected = Clock()

    def _checked(self) -> None:
        if self.count is None:
            raise Protocol(f"{self.name} is not initialised")


class Barriers:
    """An allocation of mbarriers."""

    def __init__(self, name: str, count: int) -> None:
        self._barriers = [Barrier(f"{name}[{index}]") for index in range(count)]

    def index(self, index: Any) -> Barrier:
        """Return one of them."""
        if not 0 <= int(index) < len(self._barriers):
            raise Protocol(f"barrier {int(index)} of {len(self._barriers)}")
        return self._barriers[int(index)]


class NamedBarrier:
    """One of the 16 barriers of a CTA that warps meet at."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._threads = 0
        self._arrived: list[Any] = []
        self._generation = 0
        self._collected, self._published = Clock(), Clock()

    def meet(self, threads: int, blocks: bool) -> None:
        """Arrive with all threads of the running partition, and wait for the others if `blocks`."""
        worker = current()
        note("meet", self._number, threads, blocks)
        machine().step()
        if worker in self._arrived:
            raise Protocol(f"{worker.name} arrives twice at barrier {self._number}")
        if self._arrived and threads != self._threads:
            raise Protocol(f"barrier {self._number} is met by {self._threads} and by {threads}")
        self._threads, mine = threads, self._generation
        self._arrived.append(worker)
        self._collected.join(worker.release())
        arrived = sum(each.num_warps for each in self._arrived) * THREADS_PER_WARP
        if arrived > threads:
            raise Protocol(f"{arrived} threads meet at barrier {self._number} of {threads}")
        if arrived == threads:
            self._generation += 1
            self._arrived = []
            self._published.join(self._collected)
            self._collected = Clock()
        if blocks:
            machine().wait(lambda: self._generation != mine, f"named barrier {self._number}")
            worker.clock.join(self._published)
            worker.meetings += 1


def named_barrier(number: int, threads: int, blocks: bool) -> None:
    """Run `bar.sync` or `bar.arrive`."""
    barriers = current().cta.named_barriers
    barriers.setdefault(number, NamedBarrier(number)).meet(threads, blocks)


def init(mbarrier: Barrier, count: int) -> None:
    mbarrier.init(count)


def invalidate(mbarrier: Barrier) -> None:
    mbarrier.invalidate()


def wait(mbarrier: Barrier, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    if pred:
        mbarrier.wait(phase)


def expect(mbarrier: Barrier, bytes_per_cta: int, pred: Any = True) -> None:
    if pred:
        mbarrier.arrive(expected_bytes=int(bytes_per_cta))


def arrive(mbarrier: Barrier, *, count: int = 1, pred: Any = True) -> None:
    if pred:
        mbarrier.arrive(count)
