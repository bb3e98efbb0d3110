"""An interrupt between any two lines of a step: who runs ends or is right, and the next is right.

A trace function raises KeyboardInterrupt on the engine's thread as the n-th line of the package
begins within `Engine.step`: as a signal would, were the engine in the main thread, and as memory
that is used up may at any line, too.
"""

from __future__ import annotations

import linecache
import random
import sys
from pathlib import Path

import pytest

import tilewise
from tests.engine.test_engine import build_engine, expected_tokens, prompt_of
from tests.engine.test_loop import Caller, assert_idle, new_scheduler
from tilewise.engine import loop as engine_loop
from tilewise.engine.engine import Engine
from tilewise.engine.loop import EngineLoop
from tilewise.engine.request import SamplingParams

PACKAGE = str(Path(tilewise.__file__).parent)
KINDS = (
    SamplingParams(temperature=0.0, max_tokens=5),
    SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=0.9, n=2, seed=3, max_tokens=4),
    SamplingParams(temperature=0.7, seed=1, max_tokens=6, stop_token_ids=[7, 11, 13]),
)


def is_with(frame):
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return text.lstrip().startswith("with ")


class Interrupt:
    """Raises before the line of a step that has the number; counts them all without one."""

    def __init__(self, number=0):
        self.number, self.seen, self.depth = number, 0, 0
        self.is_raised = False

    def __call__(self, frame, event, arg):
        if frame.f_code is Engine.step.__code__:
            self.depth += 1
        elif not self.depth or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        return self.line

    def line(self, frame, event, arg):
        if event == "return" and frame.f_code is Engine.step.__code__:
            self.depth -= 1
        # Of a with statement there is a line, too, between its body and what it calls at its end,
        # where only a trace function can raise: no instruction there looks for signals.
        if event == "line" and not self.is_raised and not is_with(frame):
            self.seen += 1
            if self.seen == self.number:
                self.is_raised = True
                raise KeyboardInterrupt
        return self.line


def make_loop(overlap):
    engine = build_engine(overlap=overlap)
    engine.restart(new_scheduler())
    return EngineLoop(engine, new_scheduler=new_scheduler)


def run(loop, interrupt):
    """Serve a few requests with the trace function; return how each has ended."""
    mine = [Caller(f"{i}", prompt_of(5 + 3 * i, i), params) for i, params in enumerate(KINDS)]
    loop.call(lambda: sys.settrace(interrupt))
    loop.submit(*(caller.generation for caller in mine))
    ends = []
    for caller in mine:
        try:
            caller.result()
            ends.append([c.token_ids for c in caller.generation.output.outputs])
        except KeyboardInterrupt:
            ends.append(None)
    loop.call(lambda: sys.settrace(None))
    return ends


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "overlap"])
def whole(request):
    """Whether steps overlap, how all ends without an interrupt, and how many lines that takes."""
    for _ in range(2):  # the first imports and compiles, which are lines, too
        loop, interrupt = make_loop(request.param), Interrupt()
        ends = run(loop, interrupt)
        assert_idle(loop)
        assert loop.close(timeout_s=60)
    assert None not in ends
    assert interrupt.seen > 1000
    return request.param, ends, interrupt.seen


@pytest.mark.parametrize("count", [25, pytest.param(700, marks=pytest.mark.slow)])
def test_an_interrupt_before_a_line_of_a_step_hurts_nobody_who_comes_later(
    whole, monkeypatch, count
):
    overlap, wanted, num_lines = whole
    monkeypatch.setattr(engine_loop, "BACKOFF_S", 0.0)
    ended = raised = 0
    for number in sorted(random.Random(count).sample(range(1, num_lines), count)):
        loop, interrupt = make_loop(overlap), Interrupt(number)
        ends = run(loop, interrupt)
        raised, ended = raised + interrupt.is_raised, ended + ends.count(None)
        assert all(found in (None, right) for found, right in zip(ends, wanted, strict=True))
        again = Caller("0", prompt_of(5, 0), KINDS[0])
        loop.submit(again.generation)
        assert again.result() == expected_tokens(prompt_of(5, 0), KINDS[0])
        assert_idle(loop)
        assert loop.num_restarts <= 1
        assert loop.close(timeout_s=60)
    assert raised > 0.9 * count
    assert ended > raised
