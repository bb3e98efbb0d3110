"""A description is compiled in a process that can be ended, in turns of whose it is."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tilewise.engine import trials
from tilewise.engine.sampling_options import StructuredOutputs
from tilewise.engine.structured import Grammars
from tilewise.engine.tokenizer import load_tokenizer
from tilewise.engine.trials import Trials
from tilewise.errors import QueueFullError, RequestError

pytest.importorskip("llguidance")

STORY = Path(__file__).parents[2] / "tilewise" / "assets" / "story"
ENDLESS = '{"multipleOf": 999999937}'


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(STORY)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer.to_json(), 4096, [tokenizer.eos_token_id])


@pytest.fixture
def made(tokenizer):
    return Trials(tokenizer.to_json(), 4096, [tokenizer.eos_token_id])


@pytest.fixture
def scripted(made, monkeypatch):
    """Trials of which each takes until it is let go, by its description."""
    made.gates = {}
    made.begun = []

    def tried(asked, user):
        _, description, _ = asked
        gate = made.gates.setdefault(description, threading.Event())
        made.begun.append(description)
        assert gate.wait(60)
        return {"seconds": 0.0}

    monkeypatch.setattr(made, "_tried", tried)
    return made


def ask(made, user, description):
    def work():
        try:
            with made.passed("json", description, user):
                pass
        except Exception as error:
            thread.error = error

    thread = threading.Thread(target=work, daemon=True)
    thread.error = None
    thread.start()
    return thread


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_description_without_an_end_is_ended_and_known_from_then_on(grammars, monkeypatch):
    monkeypatch.setattr(trials, "CPU_SECONDS", 0)
    start = trials.START.replace("trials.work()", "trials.CPU_SECONDS = 0; trials.work()")
    monkeypatch.setattr(trials, "START", start)
    endless = StructuredOutputs(json=ENDLESS)
    with pytest.raises(RequestError, match="^json must compile within 0 s of a processor, got one"):
        grammars.compile(endless)
    monkeypatch.setattr(Trials, "_tried", None)
    with pytest.raises(RequestError, match="^json must compile within 0 s of a processor, got one"):
        grammars.compile(endless)


def test_a_process_that_somebody_ends_is_started_again(made):
    with made.passed("regex", "a", ""):
        [first] = made._processes
    first.send_signal(signal.SIGKILL)
    with made.passed("regex", "b", ""):
        [second] = made._processes
    assert second.pid != first.pid
    # In the midst of a trial, too.
    thread = ask(made, "", ENDLESS)
    wait_for(lambda: not made._idle)
    os.kill(second.pid, signal.SIGSTOP)
    os.kill(second.pid, signal.SIGTERM)
    os.kill(second.pid, signal.SIGCONT)
    wait_for(lambda: made._processes and made._processes[0] is not second)
    made._processes[0].kill()
    thread.join(60)
    assert isinstance(thread.error, RuntimeError)
    assert str(thread.error).startswith("the process that compiles grammars")


def test_a_description_that_is_known_to_fail_waits_for_no_turn(scripted, monkeypatch):
    monkeypatch.setattr(trials, "WAIT_SECONDS", 0.0)
    scripted._failed["json", "bad", None] = "json must compile, got one that does not"
    running = [ask(scripted, "", d) for d in "12"]
    wait_for(lambda: len(scripted.begun) == 2)
    with pytest.raises(RequestError, match="got one that"), scripted.passed("json", "bad", ""):
        pass
    for gate in scripted.gates.values():
        gate.set()
    for thread in running:
        thread.join(60)


def test_one_process_is_left_for_others(scripted):
    first, second = ask(scripted, "a", "1"), ask(scripted, "a", "2")
    wait_for(lambda: len(scripted.begun) == 1 and len(scripted._waiting) == 1)
    other = ask(scripted, "b", "3")
    wait_for(lambda: scripted.begun[1:] == ["3"])
    for description in "321":
        scripted.gates.setdefault(description, threading.Event()).set()
    for thread in (first, second, other):
        thread.join(60)
        assert thread.error is None
    assert not scripted._waiting
    assert not scripted._running


def test_without_keys_both_processes_are_everybodys(scripted):
    threads = [ask(scripted, "", d) for d in "12"]
    wait_for(lambda: len(scripted.begun) == 2)
    for gate in scripted.gates.values():
        gate.set()
    for thread in threads:
        thread.join(60)


def test_who_has_the_fewest_is_next(scripted):
    begun = [ask(scripted, "a", "1")]
    wait_for(lambda: scripted.begun == ["1"])
    begun.append(ask(scripted, "b", "2"))
    wait_for(lambda: scripted.begun == ["1", "2"])
    for place, (user, description) in enumerate((("a", "3"), ("b", "4"), ("c", "5")), 1):
        begun.append(ask(scripted, user, description))
        wait_for(lambda place=place: len(scripted._waiting) == place)
    scripted.gates["2"].set()
    wait_for(lambda: len(scripted.begun) == 3)
    assert scripted.begun[2] == "4"  # of b, who has none; it came before that of c
    for description in "12345":
        scripted.gates.setdefault(description, threading.Event()).set()
    for thread in begun:
        thread.join(60)


def test_who_has_had_a_minutes_time_waits_and_others_do_not(made, monkeypatch):
    spent = iter([15.0, 15.0, 0.1])
    monkeypatch.setattr(
        trials, "ask", lambda worker, *_: {"seconds": next(spent)} if worker == "it" else {}
    )
    monkeypatch.setattr(made, "_taken", lambda: "it")
    for _ in range(2):
        with made.passed("regex", "a", "alice"):
            pass
    with (
        pytest.raises(QueueFullError, match="at most 20 s of a processor in a minute, got 30 s"),
        made.passed("regex", "b", "alice"),
    ):
        pass
    with made.passed("regex", "b", "bob"):
        pass
    now = time.monotonic()
    monkeypatch.setattr(trials.time, "monotonic", lambda: now + 61)
    made._check_spent("alice")
    assert "alice" not in made._spent


def test_a_turn_that_does_not_come_is_waited_for_so_long(scripted, monkeypatch):
    monkeypatch.setattr(trials, "WAIT_SECONDS", 0.0)
    running = [ask(scripted, "", d) for d in "12"]
    wait_for(lambda: len(scripted.begun) == 2)
    with pytest.raises(QueueFullError, match="their turn"), scripted.passed("json", "3", ""):
        pass
    assert not scripted._waiting
    for gate in scripted.gates.values():
        gate.set()
    for thread in running:
        thread.join(60)


def test_not_more_wait_than_may(scripted, monkeypatch):
    monkeypatch.setattr(trials, "MOST_OF_A_USER", 1)
    begun = [ask(scripted, "a", "1")]
    wait_for(lambda: scripted.begun == ["1"])
    begun.append(ask(scripted, "a", "2"))
    wait_for(lambda: len(scripted._waiting) == 1)
    with pytest.raises(QueueFullError, match="at most 1, got 2"), scripted.passed("json", "3", "a"):
        pass
    for description in "12":
        scripted.gates.setdefault(description, threading.Event()).set()
    for thread in begun:
        thread.join(60)


def test_the_processes_end_with_who_started_them(tokenizer):
    made = Trials(tokenizer.to_json(), 4096, [tokenizer.eos_token_id])
    with made.passed("regex", "a", ""):
        [worker] = made._processes
    del made
    wait_for(lambda: worker.poll() is not None)


@pytest.mark.slow
def test_two_descriptions_without_an_end_keep_nobody_else_waiting_for_long(grammars):
    def refused(number):
        with pytest.raises(RequestError, match="within 2 s"):
            grammars.compile(StructuredOutputs(json={"multipleOf": number}))

    endless = [
        threading.Thread(target=refused, args=(number,), daemon=True)
        for number in (999999937, 999999893)
    ]
    for thread in endless:
        thread.start()
    grammars.compile(StructuredOutputs(regex="abc"))
    for thread in endless:
        thread.join(120)
        assert not thread.is_alive()


def test_a_trial_that_a_busy_machine_cuts_short_is_not_held_against_a_description(
    made, monkeypatch
):
    with made.passed("regex", "a", ""):
        pass

    def too_late(*_):
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(trials, "ask", too_late)
        with (
            pytest.raises(RequestError, match="regex must compile within 30 s"),
            made.passed("regex", "b", ""),
        ):
            pass
    with made.passed("regex", "b", ""):
        pass
