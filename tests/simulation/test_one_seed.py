"""One seed for everything: HTTP clients, server, engine, its process, swap, files, ranks, failures.

Every answer is that of its request alone, or an error that names its cause; nothing is left behind.
`python -m tests.simulation SEED` plays a seed again, and makes small what fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.simulation import world as simulated
from tests.simulation.minimise import minimised, report, why_fails
from tests.simulation.plan import BEHAVIOURS, Client, plan_of
from tests.simulation.world import digest, play
from tilewise.cache.prefix import PrefixCache
from tilewise.engine import engine as engine_module
from tilewise.engine.async_llm import Mailbox
from tilewise.engine.audit import Auditor
from tilewise.engine.loop import _Core
from tilewise.engine.outputs import Generation
from tilewise.engine.tables import block_tables
from tilewise.engine.tables.block_tables import BlockTables
from tilewise.engine.tensor_parallel import wire as rank_wire
from tilewise.server.answers import Deltas
from tilewise.server.engine_process import host as process_host
from tilewise.server.engine_process import remote as process_remote
from tilewise.server.engine_process import wire as process_wire
from tilewise.server.joined import Joined
from tilewise.server.limits import Queue

ROOT = Path(__file__).parents[2]
EVERY_DAY, SLOW = 200, 10_000


def play_all(first: int, last: int) -> None:
    for seed in range(first, last):
        if (why := why_fails(plan_of(seed))) is not None:
            again = why_fails(plan_of(seed))
            assert again is not None, f"seed {seed} fails once, and not again: {why}"
            pytest.fail(report(plan_of(seed)))


@pytest.mark.parametrize("part", range(4))
def test_every_answer_is_that_of_its_request_alone_or_an_error_with_a_cause(part: int) -> None:
    play_all(part * EVERY_DAY // 4, (part + 1) * EVERY_DAY // 4)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(50))
def test_ten_thousand_seeds_give_the_answers_of_requests_alone(part: int) -> None:
    play_all(EVERY_DAY + part * SLOW // 50, EVERY_DAY + (part + 1) * SLOW // 50)


@pytest.mark.parametrize("seed", [4612, 7000])
def test_an_engine_ends_when_its_new_scheduler_breaks_at_once_and_is_owed_that(seed: int) -> None:
    """Two breaks, and between them no step, since nobody asked."""
    plan = plan_of(seed)
    world = play(plan)
    assert world.broke_again
    assert world.core.is_over
    assert world.core.num_restarts == 1
    never = property(lambda core: False, lambda core, value: None)
    with mock.patch.object(_Core, "_is_new", never, create=True):
        assert "the engine goes on" in str(why_fails(plan))


def test_two_runs_are_equal_in_other_processes_too() -> None:
    """Nothing hangs on the time, on addresses, or on the seed of Python's hashes."""
    seeds = [3, 13, 22, 34]
    here = [digest(play(plan_of(seed))) for seed in seeds]
    assert here == [digest(play(plan_of(seed))) for seed in seeds]
    code = (
        "from tests.simulation.plan import plan_of\n"
        "from tests.simulation.world import digest, play\n"
        f"print(*[digest(play(plan_of(seed))) for seed in {seeds}])\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == here


def test_a_thread_that_sleeps_beside_a_simulation_moves_no_clock() -> None:
    ends = threading.Event()

    def sleep() -> None:
        while not ends.is_set():
            time.sleep(1e-3)  # looked up each time, as threads of other tests do

    alone = digest(play(plan_of(13)))
    thread = threading.Thread(target=sleep)
    thread.start()
    try:
        assert digest(play(plan_of(13))) == alone
    finally:
        ends.set()
        thread.join()


def test_the_seeds_reach_what_they_are_meant_to_test() -> None:
    plans = [plan_of(seed) for seed in range(EVERY_DAY)]
    kinds = Counter(kind for plan in plans for kind in plan.kinds())
    assert len(kinds) >= 15
    assert all(count >= 2 for count in kinds.values()), kinds
    behaviours = Counter(client.does for plan in plans for client in plan.clients)
    assert set(behaviours) == set(BEHAVIOURS)
    assert sum(plan.process for plan in plans) > 20
    assert sum(plan.num_ranks > 1 for plan in plans) > 40
    seen: Counter[str] = Counter()
    for plan in plans[:60]:
        world = play(plan)
        stats = world.engine.stats()
        seen["swapped"] += stats.scheduler.num_swapped
        seen["preempted"] += stats.scheduler.num_preemptions
        seen["found"] += stats.scheduler.prefix_hit_tokens
        seen["audited"] += stats.num_audited
        seen["restarts"] += world.core.num_restarts
        seen["lost"] += world.core.is_over and bool(plan.events)
        for outcome in world.outcomes:
            seen[outcome.end] += 1
            seen[str(outcome.status)] += 1
    wanted = ("swapped", "preempted", "found", "audited", "restarts", "lost", "complete", "cut",
              "left", "200", "400", "500", "503")  # fmt: skip
    assert all(seen[name] for name in wanted), seen


# Planted mistakes: each is one that a server has had, or that is easily made here.

FRAMES, TAKE, FIND = process_wire.frames, block_tables.take, PrefixCache.find
ROW, READ = rank_wire.BatchWriter._row, process_host._Entry._read
PUT, OF, TAKE_ALL = Mailbox.put, Deltas.of, Generation.take_all
NEXT = Auditor.next_request


def lose_begun_frames(buffer: bytearray) -> list[bytes]:
    found = FRAMES(buffer)
    buffer.clear()
    return found


def tell_tokens_again(entry: Any, output: Any) -> bool:
    entry._seen = {place: (c, max(0, t - 1), e) for place, (c, t, e) in entry._seen.items()}
    return READ(entry, output)


def lose_a_wake_up(mailbox: Mailbox, reader: Any, waits: bool) -> bool:
    return (waits or not reader.num_seen) and PUT(mailbox, reader, waits)


def write_before_what_waits(joined: Joined, data: bytes) -> None:
    joined._transport.write(data)


def tell_one_block_less(writer: Any, run: Any) -> list[Any]:
    row = ROW(writer, run)
    if run.start and len(row[4]) == 1:
        row[4] = []
    return row


def find_one_block_too_many(prefix: Any, token_ids: Any, *args: Any, **settings: Any) -> Any:
    return FIND(prefix, [*token_ids, 0], *args, **settings)


def take_another_seed(auditor: Auditor) -> Any:
    request = NEXT(auditor)
    if request is not None and request.drawn_seed is not None:
        request.drawn_seed ^= 1
    return request


def skip_a_delta(deltas: Any, prompt: int, output: Any) -> Any:
    found = list(OF(deltas, prompt, output))
    return found[:-1] if len(found) > 1 else found


def take_a_token_twice(generation: Generation, events: Any) -> Any:
    if len(events) == 3:
        events = [events[0], *events]
    return TAKE_ALL(generation, events)


# (owner, name, what is done instead, seeds within which it is found)
MISTAKES: dict[str, tuple[Any, str, Callable[..., Any], int]] = {
    "bytes of a begun frame are lost between two processes": (
        process_wire, "frames", lose_begun_frames, 60,
    ),
    "a process tells its last token again": (process_host._Entry, "_read", tell_tokens_again, 10),
    "a reader is not woken for the end": (Mailbox, "put", lose_a_wake_up, 10),
    "an event overtakes the one before": (Joined, "write_now", write_before_what_waits, 10),
    "new weights are waited for without end": (_Core, "_do_idle_tasks", lambda core: None, 60),
    "nobody is told that the scheduler broke": (_Core, "_fail", lambda *_: None, 60),
    "blocks of other weights are found": (
        engine_module, "versioned", lambda salt, version: salt, 200,
    ),
    "ranks are told of one block less": (
        rank_wire.BatchWriter, "_row", tell_one_block_less, 10,
    ),
    "a hit reaches the last token": (PrefixCache, "find", find_one_block_too_many, 60),
    "transfers of a failed step are trusted": (
        BlockTables, "revoke", lambda tables, *_: ([], []), 400,
    ),
    "a second computation has another seed": (
        Auditor, "next_request", take_another_seed, 10,
    ),
    "a second computation runs beside requests": (Auditor, "put_back", lambda auditor: None, 60),
    "of two samples' news one is dropped": (Deltas, "of", skip_a_delta, 10),
    "a token of a step is taken twice": (Generation, "take_all", take_a_token_twice, 10),
    "a place in the queue is never given back": (Queue, "end", lambda queue, ticket: None, 10),
}  # fmt: skip


def first_found(name: str) -> int | None:
    """Return the first seed that finds a mistake, None if none within its bound does."""
    owner, attribute, mistake, seeds = MISTAKES[name]
    owners = [owner]
    if owner is process_wire:  # whose function others have imported
        owners += [process_remote, simulated.wire]
    with ExitStack() as stack:
        for one in owners:
            stack.enter_context(mock.patch.object(one, attribute, mistake))
        return next((s for s in range(seeds) if why_fails(plan_of(s)) is not None), None)


# What takes more than a few seeds is slow.
ROWS = [
    pytest.param(name, marks=[pytest.mark.slow] if seeds > 10 else [])
    for name, (*_, seeds) in MISTAKES.items()
]


@pytest.mark.parametrize("name", ROWS)
def test_a_planted_mistake_is_found(name: str) -> None:
    assert first_found(name) is not None


def test_what_fails_is_made_small() -> None:
    with mock.patch.object(Deltas, "of", skip_a_delta):
        plan = next(p for p in map(plan_of, range(60)) if why_fails(p) is not None)
        small, why = minimised(plan)
        assert "request" in why
        assert not small.events
        assert len(small.clients) == 1
        assert len(small.clients[0].bodies) == 1
        told = report(plan)
    assert f"python -m tests.simulation {plan.seed}" in told
    assert isinstance(small.clients[0], Client)
