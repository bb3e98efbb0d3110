"""Helpers that stay in compiled code: they help, sleep, leave, and change nothing."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.engine.test_cpu_step import build, inputs_of, storage_of, texts_of
from tilewise.engine.steps.cpu_step import CompiledRunner
from tilewise.kernels.cpu.step import crew
from tilewise.ops.panels import why_not_pack

pytestmark = [
    pytest.mark.skipif(why_not_pack(torch.empty(2, 2)) is not None, reason="needs an x86 CPU"),
    pytest.mark.skipif(crew.SYSCALL == 0, reason="needs Linux"),
]
LENGTH = 8


def runner_of(monkeypatch, num_threads=2):
    """A runner whose steps all have so many threads, and one of them that decodes."""
    model = build("qwen3", torch.bfloat16)
    model.pack_for_inference()
    runner = CompiledRunner(model, storage_of(model, num_blocks=400))
    monkeypatch.setattr(runner.teams, "choose", lambda kind, most: num_threads)
    texts = texts_of((LENGTH,) * 20, more=1)
    for i in range(20):
        runner.forward(inputs_of({i: (0, LENGTH)}, texts))
    return runner, inputs_of(dict.fromkeys(range(20), (LENGTH, LENGTH + 1)), texts)


def cpu_seconds(thread):
    """Processor time of a thread."""
    text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
    return int(text.split()[0]) / 1e9


def test_helpers_take_part_and_change_no_bit(monkeypatch):
    runner, step = runner_of(monkeypatch)
    [helper] = runner.program._crew._threads
    expected, begun = runner.forward(step).clone(), cpu_seconds(helper)
    deadline = time.monotonic() + 30
    number = 0
    # On a machine that others use it may get no core for a while.
    while cpu_seconds(helper) - begun < 0.02 and time.monotonic() < deadline:
        for _ in range(50):
            assert torch.equal(runner.forward(step), expected)
            number += 1
            time.sleep(0.0003 * (number % 7))  # it spins in some of them, and sleeps in others
    assert cpu_seconds(helper) - begun >= 0.02
    assert runner.program._crew.mailbox[crew.INSIDE * crew.LINE // 8] == 0


def test_a_helper_that_has_nothing_to_do_takes_no_time(monkeypatch):
    runner, step = runner_of(monkeypatch, 3)
    helpers = runner.program._crew._threads
    assert len(helpers) == 2
    runner.forward(step)
    sleepers = runner.program._crew.mailbox[crew.SLEEPERS * crew.LINE // 8 :]
    deadline = time.monotonic() + 30
    while sleepers[0] < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sleepers[0] == 2
    before = [cpu_seconds(each) for each in helpers]
    time.sleep(0.5)
    for each, seconds in zip(helpers, before, strict=True):
        assert cpu_seconds(each) - seconds < 0.002  # what it takes to fall asleep


def test_a_step_waits_for_nobody_who_has_not_come(monkeypatch):
    alone, step = runner_of(monkeypatch, 1)
    expected = alone.forward(step).clone()
    runner, step = runner_of(monkeypatch, 1)
    monkeypatch.setattr(crew.Crew, "grow", lambda *args: None)
    monkeypatch.setattr(runner.teams, "choose", lambda kind, most: 4)
    assert torch.equal(runner.forward(step), expected)


def test_helpers_leave_with_their_program(monkeypatch):
    runner, step = runner_of(monkeypatch)
    runner.forward(step)
    helpers = list(runner.program._crew._threads)
    assert all(each.is_alive() for each in helpers)
    monkeypatch.undo()  # what it has replaced refers to the runner
    del runner
    gc.collect()
    assert not any(each.is_alive() for each in helpers)


def test_who_holds_what_helpers_need_to_end_waits_a_bounded_time(monkeypatch):
    runner, step = runner_of(monkeypatch)
    runner.forward(step)
    crew_of_it = runner.program._crew
    [helper] = crew_of_it._threads
    with threading._active_limbo_lock:  # as where garbage is collected inside of it
        crew_of_it.leave(timeout_s=0.2)
        assert helper.is_alive()
    helper.join(30)
    assert not helper.is_alive()


def test_a_step_runs_alone_where_no_thread_may_begin(monkeypatch):
    alone, step = runner_of(monkeypatch, 1)
    expected = alone.forward(step).clone()
    runner, step = runner_of(monkeypatch, 1)
    monkeypatch.setattr(runner.teams, "choose", lambda kind, most: 3)

    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert torch.equal(runner.forward(step), expected)
    assert runner.program._crew._threads == []


def test_a_step_runs_alone_when_they_have_left(monkeypatch):
    runner, step = runner_of(monkeypatch)
    expected = runner.forward(step).clone()
    runner.program._crew.leave()
    assert torch.equal(runner.forward(step), expected)


def test_a_forked_child_has_helpers_of_its_own(monkeypatch):
    runner, step = runner_of(monkeypatch)
    expected = runner.forward(step).clone()
    child = os.fork()
    if child == 0:
        is_same = torch.equal(runner.forward(step), expected)
        os._exit(0 if is_same and runner.program._crew._threads[0].is_alive() else 1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("a forked child must run a step, and hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(runner.forward(step), expected)
