"""Schedules and the proof judge recordings written by hand: right ones pass, wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from tools.gluon_emulator import Deadlock, EmulationError, Protocol, Race, Recording, Replay
from tools.gluon_emulator.barriers import Barrier
from tools.gluon_emulator.clocks import Clock, History
from tools.gluon_emulator.machine import Cta, Worker

Ops = list[tuple[Any, ...]]
TILE = History("tile"), np.zeros((8, 8), np.float32)
HALF = TILE[0], TILE[1][:4]
BYTES, ADDRESS, COUNTER = 256, 4096, 8192
BOX = (slice(0, 8), slice(0, 8))
LOAD, STORE = ("load", *TILE, False), ("store", *TILE, False)
FENCE = ("fence",)


class Bars:
    """Two barriers, and what a copy between them does."""

    def __init__(self, arrivals: int = 1) -> None:
        self.full, self.empty = Barrier("full"), Barrier("empty")
        self.init: Ops = [("init", self.full, 1), ("init", self.empty, arrivals)]

    def load(self, phase: int) -> Ops:
        return [
            ("wait", self.empty, (phase & 1) ^ 1),
            ("arrive", self.full, 1, BYTES),
            ("bring", *TILE, self.full, BYTES, ADDRESS, BOX),
        ]

    def use(self, phase: int) -> Ops:
        return [("wait", self.full, phase & 1), LOAD, FENCE, ("arrive", self.empty, 1, 0)]


def replay(init: Ops, *partitions: Ops, warps: int = 1) -> Replay:
    """Return a kernel of one CTA: partitions started and awaited by code that does `init` first."""
    cta = Cta(0)
    numbers = list(range(1, len(partitions) + 1))
    default = Worker("default", cta, 4, Clock())
    default.ops = [*init, ("start", numbers), ("join", numbers)]
    for at, ops in enumerate(partitions):
        worker = Worker(f"partition {at}", cta, warps if at else 1, Clock())
        worker.ops = ops
    return Replay(Recording("kernel", 1, [cta]))


def judge(made: Replay, schedules: int = 300) -> None:
    made.prove()
    made.run(0, schedules)


def everywhere(made: Replay, error: type[EmulationError], words: str) -> None:
    """The proof and every schedule see it."""
    with pytest.raises(error, match=words):
        made.prove()
    for seed in range(40):
        with pytest.raises(error, match=words):
            made.run(seed)


def ring(change: Callable[[Ops], Ops] = list, times: int = 5, warps: int = 4) -> Replay:
    """A producer and a consumer of one buffer; `change` spoils what the consumer does."""
    bars = Bars()
    produce = [op for at in range(times) for op in bars.load(at)]
    consume = [op for at in range(times) for op in change(bars.use(at))]
    return replay(bars.init, produce, consume, warps=warps)


@pytest.mark.parametrize("warps", [1, 4])
def test_a_ring_passes(warps: int) -> None:
    judge(ring(warps=warps))


def test_data_used_before_it_has_come_is_a_race() -> None:
    everywhere(ring(lambda ops: ops[1:]), Race, "tile.*not known to be finished")


def test_a_buffer_given_back_before_it_is_read_is_a_race() -> None:
    def early(ops: Ops) -> Ops:
        wait, load, fence, arrive = ops
        return [wait, fence, arrive, load]

    everywhere(ring(early), Race, "tile")


def test_a_missing_fence_is_a_race_where_an_engine_comes_after() -> None:
    everywhere(ring(lambda ops: [op for op in ops if op != FENCE]), Race, "was not fenced")


def test_warps_of_a_partition_may_lag() -> None:
    """One warp arrives for all; only the barrier before it makes the others' loads known."""
    bars = Bars()
    produce = [op for at in range(3) for op in bars.load(at)]
    consume = [op for at in range(3) for op in bars.use(at)]
    recording = replay(bars.init, produce, consume, warps=4)
    judge(recording)
    cta = Cta(0)
    for name, ops, warps in (
        ("default", [*bars.init, ("start", [1, 2]), ("join", [1, 2])], 4),
        ("produce", produce, 1),
        ("consume", consume, 4),
    ):
        Worker(name, cta, warps, Clock()).ops = ops
    with pytest.raises(Race):
        Replay(Recording("kernel", 1, [cta]), barriers=False).run(0, 50)


def test_half_of_a_buffer_is_the_buffer() -> None:
    bars = Bars()
    ops = [("store", *HALF, False), ("arrive", bars.full, 1, 0)]
    reads = [("wait", bars.full, 0), LOAD]
    judge(replay(bars.init, ops, reads))
    everywhere(replay(bars.init, ops, reads[1:]), Race, "tile")


def test_two_partitions_that_store_without_order_race() -> None:
    everywhere(replay([], [STORE], [STORE]), Race, "stores to tile")
    settled = [("store", *TILE, True)]
    judge(replay([], settled, settled))


def sent(*ops: tuple[Any, ...], adds: bool = False) -> Ops:
    return [STORE, FENCE, ("send", *TILE, ADDRESS, BOX, adds), *ops]


def test_a_buffer_is_not_written_while_a_copy_reads_it() -> None:
    done = ("sent", 0, False)
    judge(replay([], sent(done, STORE, LOAD)))
    everywhere(replay([], sent(STORE, done)), Race, "copies from.*not known")
    everywhere(replay([], sent()), Protocol, "ends before its copies have been read")


def test_outgoing_copies_of_two_partitions_must_not_meet_but_sums_may() -> None:
    other = History("other"), np.zeros((8, 8), np.float32)
    done = ("sent", 0, True)

    def second(place: Any, adds: bool) -> Ops:
        return [("store", *other, False), FENCE, ("send", *other, ADDRESS, place, adds), done]

    apart = (slice(8, 16), slice(0, 8))
    judge(replay([], sent(done), second(apart, False)))
    judge(replay([], sent(done, adds=True), second(BOX, True)))
    everywhere(replay([], sent(done), second(BOX, False)), Race, "a box of global memory")
    everywhere(replay([], sent(done, adds=True), second(BOX, False)), Race, "a box of global")


def test_products_read_until_they_are_waited_for() -> None:
    product, wait = ("multiply", [TILE]), ("multiplied", 0)
    judge(replay([], [STORE], []))
    judge(replay([], [STORE, FENCE, product, wait, STORE]))
    everywhere(replay([], [STORE, FENCE, product, STORE, wait]), Race, "multiplies")
    everywhere(replay([], [STORE, FENCE, product]), Protocol, "ends while its products run")


def test_a_barrier_with_too_many_arrivals() -> None:
    bars = Bars()
    wrong = replay(bars.init, [("arrive", bars.full, 2, 0)])
    everywhere(wrong, Protocol, "full with more arrivals")


def test_who_waits_for_ever_is_named() -> None:
    bars = Bars()
    everywhere(replay(bars.init, [("wait", bars.full, 0)]), Deadlock, "partition 0 at wait full")


def test_a_warp_meets_once_at_a_time() -> None:
    meet = ("meet", 3, 64, False)
    everywhere(replay([], [meet, meet]), Protocol, "arrives twice at named barrier")
    both = ("meet", 3, 64, True)
    judge(replay([], [STORE, both, both], [both, both, LOAD]))
    everywhere(replay([], [both, STORE], [both, LOAD]), Race, "tile")


def test_the_proof_refuses_what_depends_on_the_schedule() -> None:
    """Nothing keeps the first partition from ending two phases before the second one looks."""
    bars = Bars()
    runs_ahead = [
        ("arrive", bars.full, 1, 0), ("wait", bars.full, 0),
        ("arrive", bars.full, 1, 0), ("wait", bars.full, 1),
    ]  # fmt: skip
    made = replay(bars.init, runs_ahead, [("wait", bars.full, 0)])
    with pytest.raises(EmulationError):
        made.prove()
    with pytest.raises(Deadlock):
        made.run(0, 300)


@pytest.mark.parametrize("kind", ["arrive", "bring"])
def test_the_proof_refuses_a_phase_that_begins_before_the_last_is_known_to_end(kind: str) -> None:
    bars = Bars(arrivals=2)
    twice = [("arrive", bars.empty, 1, 0), ("arrive", bars.empty, 1, 0)]
    if kind == "bring":
        twice = [
            ("arrive", bars.full, 1, 0), ("bring", *TILE, bars.full, BYTES, ADDRESS, BOX),
            ("arrive", bars.full, 1, BYTES), ("wait", bars.full, 1),
        ]  # fmt: skip
        made = replay(bars.init, twice)
    else:
        made = replay(bars.init, twice, [*twice, ("wait", bars.empty, 0)])
    with pytest.raises(Protocol, match="not knowing of its last phase's end"):
        made.prove()


def counted(how: str) -> Replay:
    """One partition stores and adds to a counter; another polls it and loads."""
    add = ("atomic", "add", COUNTER, 1, 0, how)
    poll = ("atomic", "add", COUNTER, 0, 1, how)
    return replay([], [STORE, add], [poll, LOAD])


def test_a_counter_in_global_memory_hands_on_what_its_order_says() -> None:
    judge(counted("acq_rel"))
    everywhere(counted("relaxed"), Race, "tile")


def test_a_poll_learns_of_the_first_number_that_ends_it_only() -> None:
    adds = [("atomic", "add", COUNTER, 1, at, "release") for at in range(2)]
    first = replay(
        [], [adds[0], STORE, adds[1]], [("atomic", "add", COUNTER, 0, 1, "acquire"), LOAD]
    )
    everywhere(first, Race, "tile")
    second = replay(
        [], [adds[0], STORE, adds[1]], [("atomic", "add", COUNTER, 0, 2, "acquire"), LOAD]
    )
    judge(second)


def test_a_wait_learns_of_the_first_phase_that_ends_it_only() -> None:
    """In schedules that look late, too: whatever came after was luck."""
    bars = Bars()
    produce = [
        ("arrive", bars.full, 1, 0), ("wait", bars.empty, 0), STORE, ("arrive", bars.full, 1, 0),
    ]  # fmt: skip
    consume = [("wait", bars.full, 0), ("arrive", bars.empty, 1, 0), LOAD]
    everywhere(replay(bars.init, produce, consume), Race, "tile")
    judge(replay(bars.init, produce, [*consume[:2], ("wait", bars.full, 1), LOAD]))


def test_a_schedule_can_be_repeated_and_schedules_differ() -> None:
    wrong = ring(lambda ops: ops[1:])
    said = []
    for seed in (*range(20), *range(20)):
        with pytest.raises(Race) as error:
            wrong.run(seed)
        said.append(str(error.value).replace(f"schedule {seed}", ""))
    assert said[:20] == said[20:]
    assert len(set(said)) > 1
