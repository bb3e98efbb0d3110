"""TMA: copies that land after a random time, and say so at a barrier or to whoever waits."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tools.gluon_emulator.barriers import Barrier
from tools.gluon_emulator.clocks import UNFINISHED, Box
from tools.gluon_emulator.errors import Protocol
from tools.gluon_emulator.machine import Worker, current, machine, note
from tools.gluon_emulator.memory import Descriptor
from tools.gluon_emulator.shared import SharedMemory, poison


class Stores:
    """The outgoing copies of one partition."""

    def __init__(self) -> None:
        self.issued = 0
        self.reading: set[int] = set()  # those that still read shared memory
        self.writing: set[int] = set()  # those that have not reached global memory


def _stores(worker: Worker) -> Stores:
    if worker.stores is None:
        worker.stores = Stores()
    return worker.stores


def _check(tensor_desc: Descriptor, tile: SharedMemory) -> None:
    if tile.shape != tensor_desc.block_shape or tile.dtype != tensor_desc.dtype:
        raise Protocol(
            f"a box of {tensor_desc.dtype}{tensor_desc.block_shape} and a tile of "
            f"{tile.dtype}{tile.shape}"
        )


def load(
    tensor_desc: Descriptor, coord: Any, barrier: Barrier, result: SharedMemory,
    pred: Any = True, multicast: bool = False,
) -> None:  # fmt: skip
    """Start a copy to shared memory; the barrier's phase ends after its bytes have come."""
    _check(tensor_desc, result)
    if not pred:
        return
    place = [int(x) for x in coord]
    box = tensor_desc.box(place)[0]
    nbytes = tensor_desc.block_type.nbytes
    note("bring", result.history, result.memory, barrier, nbytes, tensor_desc.address, box)
    machine().step()
    machine().boxes[tensor_desc.address].read(current(), box)
    access = result.history.add(
        current(), result.memory, writes=True, what="copies into", lane=barrier, epoch=UNFINISHED
    )
    result.memory[...] = poison(result.dtype)

    pieces = machine().pieces(result.memory)
    landed = []

    def land(piece: tuple[slice, ...]) -> None:
        landed.append(piece)
        result.memory[piece] = tensor_desc.read(place)[piece]
        share = result.memory[piece].size * tensor_desc.block_type.nbytes // result.memory.size
        phase = barrier.complete(share)
        if len(landed) == len(pieces):
            access.epoch = phase

    for piece in pieces:
        machine().later(functools.partial(land, piece))


def _send(tensor_desc: Descriptor, coord: Any, src: SharedMemory, add: bool) -> None:
    _check(tensor_desc, src)
    box = tensor_desc.box([int(x) for x in coord])[0]
    note("send", src.history, src.memory, tensor_desc.address, box, add)
    machine().step()
    worker = current()
    stores = _stores(worker)
    stores.issued += 1
    number, place = stores.issued, [int(x) for x in coord]
    src.history.add(
        worker, src.memory, writes=False, what="copies from", lane=(worker.lane, "copies"),
        epoch=number,
    )  # fmt: skip
    verb = "adds" if add else "stores"
    box = Box(
        tensor_desc.box(place)[0], add, (worker.lane, "written"), number, f"{worker.name} {verb}"
    )
    machine().boxes[tensor_desc.address].add(worker, box)
    stores.reading.add(number)
    stores.writing.add(number)

    pieces = machine().pieces(src.memory)
    values = np.empty_like(src.memory)
    taken = []

    def write() -> None:  # later: that a tile has been read does not say that it is written
        tensor_desc.write(place, values, add)
        stores.writing.discard(number)

    def read(piece: tuple[slice, ...]) -> None:
        taken.append(piece)
        values[piece] = src.memory[piece]
        if len(taken) == len(pieces):
            stores.reading.discard(number)
            machine().later(write)

    for piece in pieces:
        machine().later(functools.partial(read, piece))


def store(tensor_desc: Descriptor, coord: Any, src: SharedMemory) -> None:
    """Start a copy from shared memory."""
    _send(tensor_desc, coord, src, add=False)


def add(tensor_desc: Descriptor, coord: Any, src: SharedMemory) -> None:
    """Start to add a tile of shared memory to global memory, element by element."""
    _send(tensor_desc, coord, src, add=True)


def store_wait(pendings: int) -> None:
    """Wait until all but the last `pendings` outgoing copies have read their tiles."""
    _wait(pendings, written=False)


def wait_group(pendings: int) -> None:
    """Wait until all but the last `pendings` outgoing copies have been written."""
    _wait(pendings, written=True)


def _wait(pendings: int, written: bool) -> None:
    note("sent", int(pendings), written)
    worker = current()
    stores = _stores(worker)
    last = stores.issued - int(pendings)
    machine().wait(
        lambda: all(number > last for number in (stores.writing if written else stores.reading)),
        f"its outgoing copies up to number {last}",
    )
    for lane in ("copies", "written") if written else ("copies",):
        worker.clock[(worker.lane, lane)] = max(worker.clock.get((worker.lane, lane), 0), last)


def finish(worker: Worker) -> None:
    """Check that a partition ends with no copy that still reads its memory."""
    stores = _stores(worker)
    known = worker.clock.get((worker.lane, "copies"), 0)
    if stores.issued > known:
        raise Protocol(f"{worker.name} ends before its copies have read shared memory")
