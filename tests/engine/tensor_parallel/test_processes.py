"""What the parent makes of its workers' answers, and of their silence; workers without a model."""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time

import pytest

from tests.engine.tensor_parallel.conftest import assert_nothing_stays
from tilewise.engine.tensor_parallel import processes
from tilewise.engine.tensor_parallel.processes import Workers
from tilewise.errors import WorkerLostError


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(processes, "WORKER", "tests.engine.tensor_parallel.fake_worker")
    monkeypatch.setattr(processes, "AGREEMENT_S", 0.5)
    made = []

    def new(size=3, **settings):
        made.append(Workers(size, settings))
        return made[-1]

    yield new
    for workers in made:
        workers.close()
        assert_nothing_stays(workers)


def _ask(workers, number, *does):
    workers.submit(number, list(does))
    return workers.answer(number)


def test_the_first_rank_answers_when_all_have_done_the_step(start):
    workers = start()
    assert workers.words() == [0, 1, 2]
    assert _ask(workers, 1, "done", "done", "done") == ["done", 1, [[0]], 0]
    workers.submit(2, ["done"] * 3)
    workers.submit(3, ["done"] * 3)  # a step ahead
    assert workers.answer(2)[1] == 2
    assert workers.answer(3)[1] == 3


def test_what_all_fail_with_is_the_steps_error_and_they_go_on(start):
    workers = start()
    workers.words()
    with pytest.raises(MemoryError, match="too large"):
        _ask(workers, 1, "fail", "fail", "fail")
    assert workers.error is None
    assert _ask(workers, 2, "done", "done", "done")[0] == "done"


@pytest.mark.parametrize("others", ["done", "wait"])
def test_one_that_fails_alone_is_lost_with_all(start, others):
    workers, told = start(), []
    workers.on_lost = told.append
    workers.words()
    with pytest.raises(WorkerLostError, match="worker 1 of 3 failed in a step: too large"):
        _ask(workers, 1, others, "fail", others)
    assert [str(error) for error in told] == [str(workers.error)]
    with pytest.raises(WorkerLostError, match="worker 1 of 3 failed"):
        workers.submit(2, ["done"] * 3)


def test_one_that_ends_is_named_with_its_last_words(start):
    workers = start()
    workers.words()
    with pytest.raises(WorkerLostError, match="worker 2 of 3 ended with exit code 3: a last word"):
        _ask(workers, 1, "done", "wait", "exit")


def test_one_that_is_silent_is_named(start, monkeypatch):
    workers = start()
    workers.words()
    monkeypatch.setattr(processes, "SILENCE_S", 2.0)
    started = time.monotonic()
    with pytest.raises(WorkerLostError, match="worker 1 of 3 must say every second that it lives"):
        _ask(workers, 1, "done", "silence", "done")
    assert time.monotonic() - started < 10


def _watches(selector, workers):
    """Whether this is their selector: other tests' workers may live on in this process."""
    data = [key.data for key in selector.get_map().values()]
    return any(member is each for member in workers._members for each in data)


def test_a_pause_of_all_processes_is_no_silence(start, monkeypatch):
    """As of a container that is frozen: nobody could say anything, and nobody listened."""
    workers = start()
    workers.words()
    monkeypatch.setattr(processes, "SILENCE_S", 4.0)  # workers say a word every second
    select, pause, is_over = selectors.DefaultSelector.select, threading.Event(), threading.Event()

    def paused(self, timeout=None):
        if not (pause.is_set() and _watches(self, workers)):
            return select(self, timeout)
        pause.clear()
        for how in (signal.SIGSTOP, signal.SIGCONT):
            for pid in workers.pids:
                os.kill(pid, how)
            if how == signal.SIGSTOP:
                time.sleep(5.0)
        is_over.set()
        return []

    monkeypatch.setattr(selectors.DefaultSelector, "select", paused)
    pause.set()
    assert is_over.wait(30)
    assert _ask(workers, 1, "done", "done", "done")[0] == "done"
    with pytest.raises(WorkerLostError, match="worker 1 of 3 must say every second that it lives"):
        _ask(workers, 2, "done", "silence", "done")


def test_a_parent_that_is_always_late_sees_silence_all_the_same(start, monkeypatch):
    """Each look counts for what it would have taken: nobody is forgiven for ever."""
    workers = start()
    workers.words()
    monkeypatch.setattr(processes, "SILENCE_S", 2.0)
    select = selectors.DefaultSelector.select

    def late(self, timeout=None):
        ready = select(self, timeout)
        if _watches(self, workers):
            time.sleep(2 * processes.WATCH_S + 0.2)
        return ready

    monkeypatch.setattr(selectors.DefaultSelector, "select", late)
    workers.submit(1, ["done", "silence", "done"])
    for _ in range(400):  # not until some time: a pause of the machine would use it up
        if workers.error is not None:
            break
        time.sleep(0.05)
    assert "worker 1 of 3 must say every second that it lives" in str(workers.error)


def test_a_step_in_which_nothing_moves_ends_all(start, monkeypatch):
    workers = start()
    workers.words()
    monkeypatch.setattr(processes, "STANDSTILL_S", 1.0)
    time.sleep(1.5)  # without a step nothing need move
    assert workers.error is None
    with pytest.raises(WorkerLostError, match="must go on with a step, got none that moved"):
        _ask(workers, 1, "wait", "wait", "wait")


def test_one_that_refuses_its_settings_ends_all(start):
    workers = start(refuses=1)
    with pytest.raises(ValueError, match="a setting must be another"):
        workers.words()


def test_a_closed_parent_says_so(start):
    workers = start(1)
    workers.words()
    workers.close()
    workers.close()
    with pytest.raises(WorkerLostError, match="the workers have been ended"):
        workers.submit(1, ["done"])
