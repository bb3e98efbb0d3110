"""Time that only the simulation moves, for asyncio, for `time`, and for what runs on threads.

An event loop whose selector never waits: where it would, the clock is moved on. Functions that the
server or the engine would run on a thread run as callbacks of this loop, some time later, and a
future that such a function waits for lets the engine go on until it is done. So everything runs on
one thread, in an order that the random numbers of delays decide, and they alone.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import tilewise.engine.async_llm as async_llm
import tilewise.engine.loop as engine_loop
import tilewise.engine.versions as versions
from tilewise.server import questions
from tilewise.server.engine_process import host, remote

START = 1000.0  # seconds; not 0, which stands for nothing in places


class StillError(RuntimeError):
    """Somebody waits, and nothing is left that could happen."""


class Clock:
    """The time of a simulation, in seconds."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        """Return now."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass for all, as a thread does that holds what others need."""
        self.now += max(0.0, seconds)


class _Selector(selectors.BaseSelector):
    """Nothing comes from outside: where there is nothing to do, the clock moves on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, 0, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise StillError("nothing is left that could happen")
        self._clock.now += max(0.0, timeout)
        return []


class VirtualEventLoop(asyncio.SelectorEventLoop):
    """asyncio in virtual time, with functions of threads as callbacks.

    Args:
        clock: the time.
        draw: the random numbers of delays.
    """

    def __init__(self, clock: Clock, draw: random.Random) -> None:
        self.clock, self.draw = clock, draw
        super().__init__(_Selector(clock))

    def time(self) -> float:
        """Return now."""
        return self.clock.now

    def beside(self, work: Callable[[], Any]) -> Future[Any]:
        """Run a function a little later, as a thread would; return its future."""
        future: Future[Any] = engine_loop.Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                found = work()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(found)

        self.call_later(self.draw.expovariate(1000.0), run)
        return future

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """Run a function beside all others."""
        return asyncio.wrap_future(self.beside(lambda: func(*args)), loop=self)


class Pool:
    """A pool of threads, in place of the server's."""

    def __init__(self, loop: VirtualEventLoop) -> None:
        self._loop = loop

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Run a function beside all others."""
        return self._loop.beside(work)

    def shutdown(self, **_: Any) -> None:
        """Let nothing end: nothing has begun."""


def _in_this_thread(simulated: Callable[..., Any], real: Callable[..., Any]) -> Any:
    """Return a function that is simulated in this thread alone.

    Threads that other tests have left would let the time pass whenever they sleep.
    """
    here = threading.get_ident()
    return lambda *args: (simulated if threading.get_ident() == here else real)(*args)


@contextmanager
def virtual(clock: Clock, loop: VirtualEventLoop, future: type[Future[Any]]) -> Iterator[None]:
    """Let the modules of engine and server live in this time during the block.

    Args:
        future: the futures of the engine's loop; see `world`.
    """
    number = range(1 << 30)
    with ExitStack() as stack:
        put = stack.enter_context
        for name in ("monotonic", "perf_counter", "thread_time", "time"):
            put(mock.patch.object(time, name, _in_this_thread(clock, getattr(time, name))))
        put(mock.patch.object(time, "sleep", _in_this_thread(clock.sleep, time.sleep)))
        put(mock.patch.object(engine_loop, "Future", future))
        names = map("{:x}".format, number)
        put(mock.patch.object(versions.secrets, "token_hex", side_effect=names))
        for module in (async_llm, questions, host, remote):
            put(mock.patch.object(module, "beside", loop.beside))
        yield
