"""cp.async: copies by all threads of a partition, in groups that it waits for, or for a barrier.

A copy takes its elements and lands, piece by piece, at any time between its issue and the wait for
its group, or the arrival that its threads leave at an mbarrier for when it has landed. Triton puts
a barrier of the partition's warps behind each wait (its membar pass), which is counted on: who has
waited knows what all its warps have copied. No other barrier is: a copy over what the partition has
read or written since the last one raises, although Triton would put one in.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from triton.experimental.gluon import language as gl

from tools.gluon_emulator.barriers import THREADS_PER_WARP, Barrier
from tools.gluon_emulator.clocks import UNFINISHED, Access
from tools.gluon_emulator.errors import NotEmulated, Protocol
from tools.gluon_emulator.machine import Worker, current, machine, note
from tools.gluon_emulator.memory import Pointer
from tools.gluon_emulator.registers import Register, values_of
from tools.gluon_emulator.shared import SharedMemory, poison


class Groups:
    """The groups of one partition."""

    def __init__(self) -> None:
        self.committed = 0
        self.last = 0  # group that has a copy
        self.landing: dict[object, int] = {}  # the group of each piece under way
        self.untold: list[Access] = []  # copies that no group and no barrier waits for yet


def _groups(worker: Worker) -> Groups:
    if worker.groups is None:
        worker.groups = Groups()
    return worker.groups


def copy(smem: SharedMemory, pointer: Pointer, mask: Any = None, **_: Any) -> None:
    """Start to copy elements to shared memory, zeros where the mask is not set."""
    if smem.shape != pointer.shape or smem.dtype != pointer.dtype.scalar:
        raise Protocol(
            f"{pointer.dtype.scalar}{pointer.shape} copied to {smem.history.name}, which is "
            f"{smem.dtype}{smem.shape}"
        )
    wanted = np.broadcast_to(True if mask is None else values_of(mask), smem.shape)
    pointer.places(Register(wanted, gl.int1))  # raises where one is out of bounds
    note("copy", smem.history, smem.memory)
    machine().step()
    worker = current()
    groups = _groups(worker)
    groups.last = groups.committed + 1
    access = smem.history.add(
        worker, smem.memory, writes=True, what="copies into", lane=(worker.lane, "groups"),
        epoch=groups.last, is_cp_async=True,
    )  # fmt: skip
    groups.untold.append(access)
    smem.memory[...] = poison(smem.dtype)

    def land(piece: tuple[slice, ...], ticket: object) -> None:
        values = pointer[piece].read(Register(wanted[piece], gl.int1), 0)
        smem.memory[piece] = values_of(values)
        del groups.landing[ticket]

    for piece in machine().pieces(smem.memory):
        ticket = object()
        groups.landing[ticket] = groups.last
        machine().later(functools.partial(land, piece, ticket))


def commit() -> None:
    """Close the group of the copies since the last one; it may be empty."""
    note("commit")
    machine().step()
    groups = _groups(current())
    groups.committed += 1
    groups.untold.clear()


def wait(num_outstanding: int = 0) -> None:
    """Wait for all groups but the last `num_outstanding`, and for the warps of the partition."""
    note("committed", int(num_outstanding))
    worker = current()
    groups = _groups(worker)
    last = groups.committed - int(num_outstanding)
    machine().wait(
        lambda: all(group > last for group in groups.landing.values()),
        f"its copies up to group {last}",
    )
    lane = (worker.lane, "groups")
    worker.clock[lane] = max(worker.clock.get(lane, 0), last)
    worker.meetings += 1


def arrive(mbarrier: Barrier, increment_count: bool = True) -> None:
    """Arrive at a barrier, once for each thread, when all copies up to here have landed.

    The copies since the last group count as waited for where the barrier's phase is.
    """
    if increment_count:
        raise NotEmulated("arrivals of copies that the barrier does not count beforehand")
    worker = current()
    count = THREADS_PER_WARP * worker.num_warps
    note("copied", mbarrier, count)
    machine().step()
    groups = _groups(worker)
    waited, groups.untold, groups.last = groups.untold, [], groups.committed
    for access in waited:
        access.lane, access.epoch = mbarrier, UNFINISHED
    before = set(groups.landing)

    def check() -> None:
        if before & set(groups.landing):
            machine().later(check)
            return
        phase = mbarrier.copied(count)
        for access in waited:
            access.epoch = phase

    machine().later(check)


def finish(worker: Worker) -> None:
    """Check that a partition ends with all copies waited for."""
    if _groups(worker).untold or _groups(worker).last > worker.clock.get(
        (worker.lane, "groups"), 0
    ):
        raise Protocol(f"{worker.name} ends before it has waited for its copies")
