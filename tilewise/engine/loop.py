"""One thread owns the engine; all others hand it requests and wait to be told. No torch.

submit(generation) -> inbox -> engine.step(), again and again -> generation.take_all(events)
                                                              -> on_change(), on_end()

Between two steps the thread takes what has come into its inbox: requests, aborts, functions to
call. Without work it sleeps until something comes; nothing polls.

A failure ends one request: an exception of its text, its stop rule or a callback, or a step that
fails because of it (`recovery`). An exception of the scheduler itself, or an interrupt, ends all
requests in the engine, each with the reason; after a pause the engine goes on with a new scheduler.
If that one fails before its first step has ended, the loop ends; so it does when the device is
lost.

The thread holds the engine, not the loop: when the last reference to a loop is gone, its thread
ends. It is a daemon thread that the end of the interpreter waits for. A forked child starts a
thread of its own when it first needs one; requests of the parent stay with the parent.
"""

from __future__ import annotations

import atexit
import copy
import functools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar

from tilewise.engine.batch import PlainEvents, TokenEvent
from tilewise.engine.engine import Engine
from tilewise.engine.outputs import Generation
from tilewise.engine.request import FinishReason
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.errors import DeviceLostError, EngineClosedError

__all__ = ["RUNNING", "EngineLoop"]

T = TypeVar("T")

# Seconds that the end of the interpreter, of a loop without references, or of a request wait for a
# step.
PATIENCE = 5.0
# Before the first step of a new scheduler: a client may repeat the request that broke the last one.
BACKOFF_S = 0.25
HAND_OVER_S = 3e-4  # after a step of newcomers alone, see `scheduling.newcomers`
_request_id = attrgetter("request_id")
RUNNING = ("wait", "abort", "keep")  # what may become of requests, see `EngineLoop.between`


class EngineLoop:
    """Runs an engine on a thread of its own, for many callers.

    Args:
        engine: no other thread may change it from now on; or a function that makes it, called on
            the new thread, so that what libraries keep for each thread is warm there. What it
            raises is raised here.
        new_scheduler: a function that returns an empty scheduler when the old one cannot be
            trusted; None is that of the engine, and without one the loop ends in that case. Like
            `engine` it should not hold the owner of the loop, or the thread keeps that alive.

    Example:
        >>> loop = EngineLoop(engine)
        >>> done = threading.Event()
        >>> generation.on_end = done.set
        >>> loop.submit(generation)
        >>> done.wait()
    """

    def __init__(
        self,
        engine: Engine | Callable[[], Engine],
        *,
        new_scheduler: Callable[[], Scheduler] | None = None,
    ) -> None:
        self._core = _Core(new_scheduler)
        self._finalizer = weakref.finalize(self, _Core.leave, self._core)
        self._finalizer.atexit = False  # `_leave_all` does it
        if isinstance(engine, Engine):
            self._core.begin_with(engine)
            self._core.start()
        else:
            try:
                self.call(functools.partial(self._core.make, engine))
            except BaseException:
                self._finalizer.detach()
                self._core.inbox.put(None)  # without waiting: it may have been an interrupt
                raise

    @property
    def engine(self) -> Engine:
        """The engine; to be changed on its own thread only, see `call`."""
        return self._core.engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self.call(functools.partial(self._core.adopt, engine))

    @property
    def new_scheduler(self) -> Callable[[], Scheduler] | None:
        """The function that makes an empty scheduler when the old one cannot be trusted.

        None if there is no such function: the loop then ends in that case.
        """
        return self._core.new_scheduler

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken: the loop has not ended and is not about to end."""
        return self._core.reason is None

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is the engine's thread, which must not wait for itself."""
        return self._core.is_own_thread

    @property
    def last_step_time(self) -> float | None:
        """The time at which the last step ended, in seconds of time.monotonic(); None before the
        first.

        While requests are unfinished, the time since then is that of the present step so far.
        """
        return self._core.last_step_time

    @property
    def num_restarts(self) -> int:
        """The number of times that a scheduler that broke was replaced."""
        return self._core.num_restarts

    @property
    def num_live(self) -> int:
        """The number of unfinished requests in the engine."""
        return len(self._core.live)

    def submit(self, *generations: Generation) -> None:
        """Queue requests; those of one call enter the same step.

        An error that refuses or ends one of them is stored as its `error`, not raised here.

        Raises:
            EngineClosedError: the loop has ended, or ends; nothing was queued.
        """
        self._core.put(_Arrival(self._core, generations))

    def abort(self, request_id: str) -> None:
        """End a request with finish_reason "abort", between this step and the next.

        It returns at once; unknown requests are ignored.
        """
        self._soon(functools.partial(self._core.abort, request_id))

    def drop_soon(self, generation: Generation) -> None:
        """Ask the engine's thread to abort a request after the current step; do not wait for it.

        A request that has finished by then stays as it is.
        """
        self._soon(functools.partial(self._core.drop, [generation]))

    def drop(self, generations: Sequence[Generation]) -> None:
        """End those of these requests that are unfinished, and wait until they own no cache blocks.

        The wait is at most PATIENCE seconds. On the engine's own thread, where the garbage
        collection of an iterator may call this at any moment, the requests are dropped later,
        without a wait.
        """
        if self._core.is_own_thread:
            self._soon(functools.partial(self._core.drop, generations))
            return
        with suppress(EngineClosedError, TimeoutError):
            self.post(functools.partial(self._core.drop, generations)).result(PATIENCE)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread between two steps, wait for it, and return its
        value.

        Raises:
            EngineClosedError: the loop has ended.
            BaseException: what the function raised.
        """
        if self._core.is_own_thread:
            return function()
        return self.post(function).result()

    def _soon(self, function: Callable[[], None]) -> None:
        with suppress(EngineClosedError):  # which has ended all
            self._core.put(_Task(function, None))

    def post(self, function: Callable[[], T]) -> Future[T]:
        """Queue a function for the engine's thread, between two steps; return its future at once.

        Raises:
            EngineClosedError: the loop has ended.
        """
        future: Future[T] = Future()
        self._core.put(_Task(function, future))
        return future

    def between(self, function: Callable[[], T], running: str = "wait") -> T:
        """Run a function on the engine's thread, wait for it, and return its value.

        Args:
            function: the function; requests that come before it has returned are taken afterwards.
            running: the fate of the engine's requests. "wait" lets them run to their ends first;
                "abort" ends them first, with finish_reason "abort"; "keep" lets them go on
                afterwards, and requests that have not begun to run are added anew.

        Returns:
            The function's value.

        Raises:
            EngineClosedError: the loop has ended.
            ValueError: running is none of these.
            RuntimeError: the caller is the engine's thread.
            BaseException: what the function raised.
        """
        if running not in RUNNING:
            raise ValueError(f"running must be one of {', '.join(RUNNING)}, got {running!r}")
        if self._core.is_own_thread:
            raise RuntimeError("the engine's thread must not wait for requests of its own")
        future: Future[T] = Future()
        core, task = self._core, _Task(function, future)
        act = {"wait": core.when_idle, "abort": core.when_ended, "keep": core.among}[running]
        core.put(_Task(functools.partial(act, task), None))
        return future.result()

    def replace(self, make: Callable[[], Engine], version: str) -> None:
        """Make a new engine on the engine's thread, in the place of one that has no requests.

        Args:
            make: a function that returns the engine.
            version: the name of its weights, see `Engine.version`.

        Raises:
            EngineClosedError: the loop has ended.
            Exception: what `make` raised; the old engine stays then.
        """
        self.call(functools.partial(self._core.replace, make, version))

    def pause(self) -> None:
        """Let no further step begin; returns when none runs.

        Requests are still taken, and still end when their time is over.

        Raises:
            EngineClosedError: the loop has ended.
        """
        self.call(functools.partial(self._core.set_paused, True))

    def resume(self) -> None:
        """Let steps begin again after pause(); nothing changes without one.

        Raises:
            EngineClosedError: the loop has ended.
        """
        self.call(functools.partial(self._core.set_paused, False))

    def end(self, error: EngineClosedError) -> None:
        """End unfinished requests with `error`, and the thread; do not wait for that."""
        self._core.end_soon(error)

    def close(self, timeout_s: float | None = None) -> bool:
        """End unfinished requests with EngineClosedError, and the thread.

        Args:
            timeout_s: seconds to wait for the step that runs; None waits for its end.

        Returns:
            Whether the thread has ended. After False it ends when the step has ended; on the
            loop's own thread the result is always False.
        """
        return self._core.close(EngineClosedError("the engine was closed"), timeout_s)


class _Task:
    """A function to run on the engine's thread between two steps.

    The future, if there is one, receives its result or its exception; otherwise both are dropped.
    """

    def __init__(self, function: Callable[[], object], future: Future[Any] | None) -> None:
        self.function, self.future = function, future

    def run(self) -> None:
        try:
            value = self.function()
        except BaseException as error:
            self.refuse(error)
        else:
            if self.future is not None and self.future.set_running_or_notify_cancel():
                self.future.set_result(value)

    def refuse(self, error: BaseException) -> None:
        if self.future is not None and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
        self.future = None


class _Arrival:
    """The requests of one `submit` on their way to the engine's thread, which adds them between two
    steps.

    Each may be refused alone; all fail if the loop ends first.
    """

    def __init__(self, core: _Core, generations: Sequence[Generation]) -> None:
        self.core, self.generations = core, generations

    def run(self) -> None:
        for generation in self.generations:
            self.core.add(generation)

    def refuse(self, error: BaseException) -> None:
        for generation in self.generations:
            generation.fail(_own(error))
            self.core.tell(generation)


class _Core:
    """The state of the loop's thread, without a reference to the loop.

    Attributes:
        inbox: tasks for the thread; None ends the thread.
        live: the unfinished requests in the engine, by name.
        reason: the exception because of which no request is taken any more; None while they are.
        idle_tasks: tasks that run when no request is left in the engine; until then none is taken.
        held: the requests that came while idle_tasks waited; they are added afterwards.
    """

    engine: Engine

    def __init__(self, new_scheduler: Callable[[], Scheduler] | None) -> None:
        self.new_scheduler = new_scheduler
        self.live: dict[str, Generation] = {}
        self.is_paused = False
        self.reason: BaseException | None = None
        self.last_step_time: float | None = None
        self.num_restarts = 0
        self._is_new = False  # the scheduler has replaced one that broke, and finished no step
        self._is_torn = False
        self._is_exiting = False
        self._begin_life()
        _cores.add(self)

    def _begin_life(self) -> None:
        self.inbox: queue.SimpleQueue[_Task | _Arrival | None] = queue.SimpleQueue()
        # Around the decision whether a task is still taken; a collection may come inside.
        self._gate = threading.RLock()
        self._thread: threading.Thread | None = None
        self.idle_tasks: list[_Task] = []
        self.held: list[Generation] = []

    # ---- called on any thread

    @property
    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def start(self) -> None:
        with self._gate:
            self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="tilewise-engine", daemon=True)
        self._thread.start()

    def put(self, task: _Task | _Arrival) -> None:
        with self._gate:
            if self.reason is not None:
                raise _own(self.reason)
            if self._thread is None:
                self._start()
            self.inbox.put(task)
        if isinstance(task, _Arrival) and hasattr(self, "engine"):  # when it can be found
            for user in {generation.request.user for generation in task.generations}:
                self.engine.give_way(user)

    def end_soon(self, error: EngineClosedError) -> None:
        with self._gate:
            if self.reason is None:
                self.reason = error
                self.inbox.put(None)

    def close(self, error: EngineClosedError, timeout_s: float | None) -> bool:
        self.end_soon(error)
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return thread is None
        thread.join(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
        return not thread.is_alive()

    def leave(self) -> None:
        """End the thread of a loop that has no references left, and wait for it at most PATIENCE
        seconds.

        The thread may have dropped the last reference itself; then there is no wait.
        """
        self.inbox.put(
            None
        )  # without the gate: a collection may have come while this thread has it
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(PATIENCE)

    def exit(self) -> None:
        """End the thread because the interpreter ends, and wait for it at most PATIENCE seconds.

        Callers that still wait are not told.
        """
        self._is_exiting = True
        self.close(EngineClosedError("the interpreter is ending"), PATIENCE)

    def become_child(self) -> None:
        """Reset this object in a forked process, which lacks the parent's thread and its requests.

        A new thread starts when a task comes; it begins with a new scheduler.
        """
        self._begin_life()
        self.live = {}
        self.is_paused = False
        self._is_torn = True
        if hasattr(self, "engine"):
            self.engine.lock = threading.RLock()  # the parent's thread may have had it

    # ---- called on the engine's thread

    def _run(self) -> None:
        try:
            if self._is_torn:
                self._is_torn = False
                self._restart()
            while self._take_tasks():
                self._step(self.engine.step)
        except BaseException as error:  # of our own: no caller may wait for ever
            self._end(error)
        else:
            self._end(self.reason)

    def _has_work(self) -> bool:
        return not self.is_paused and hasattr(self, "engine") and self.engine.has_unfinished()

    def _seconds_to_deadline(self) -> float | None:
        """Return for how many seconds at most a paused loop waits for a task: to the next deadline.

        None waits without a limit: no request is live, or the loop is not paused, so that steps
        look at deadlines.
        """
        if not (self.is_paused and self.live):
            return None
        seconds = self.engine.seconds_to_deadline()
        return None if seconds is None else min(seconds, threading.TIMEOUT_MAX)

    def _take_tasks(self) -> bool:
        """Run the posted tasks; if the engine has no step to run, audit or wait for a task.

        While paused, requests whose time is over still end.

        Returns:
            True if a step is to be run now; False if the thread shall end.
        """
        while self.reason is None:
            if self.idle_tasks and not self.live:
                self._do_idle_tasks()
            if not self.live and not self.is_paused and self.inbox.empty():
                self._audit()
                if self.reason is not None:
                    break
            if self._has_work() and self.inbox.empty():
                return True
            try:
                task = self.inbox.get(timeout=self._seconds_to_deadline())
            except queue.Empty:
                self._step(self.engine.expire)
                continue
            if task is None:
                return False
            task.run()
            del task  # what it holds must not live until the next one comes
        return False

    def _step(self, step: Callable[[], Sequence[TokenEvent]]) -> None:
        """Call `step`, give its events to their requests, and end samples that have reached a stop
        string.

        If `step` raises, all live requests fail with its error, and a new scheduler replaces the
        old one. The loop ends instead if the device is lost, if no scheduler can be made, or if a
        new one fails before its first step is done. An error of a request's tokenizer ends that
        request alone.

        Args:
            step: a step of the engine, or a function that ends requests without one.
        """
        try:
            events = step()
        except DeviceLostError as error:
            self._stop(error)
            return
        except BaseException as error:
            # The scheduler may have been stopped between any two of its instructions.
            failed = self._take_live()
            if self._is_new:
                self._stop(error)
            else:
                self._restart()
            self._fail(failed, error)
            if self.reason is None:
                self._is_new = True
                self.num_restarts += 1
                time.sleep(BACKOFF_S)
            return
        finally:
            self.last_step_time = time.monotonic()
        if step == self.engine.step:  # what only ends requests shows nothing of a new scheduler
            self._is_new = False
        changed: dict[Generation, None] = {}
        live = self.live
        if isinstance(events, PlainEvents):
            events, changed = self._add(events)
        for request_id, some in groupby(events, key=_request_id):
            generation = live.get(request_id)
            if generation is None:
                continue  # another's, given to the engine directly
            own = list(some)
            for event in own:
                if event.finish_reason is not None:  # before a reader can see that it has finished
                    self._settle(generation)
                    break
            try:
                stopped = generation.take_all(own)
            except BaseException as error:  # of its tokenizer: no other text is worse for it
                generation.fail(error)
                self.engine.abort(request_id)
                stopped = []
            for event in stopped:
                self._settle(generation)
                reason = generation.samples[event.index].stop_reason
                self.engine.finish(request_id, event.index, FinishReason.STOP, reason)
            if generation.output.finished:
                live.pop(request_id, None)
                changed[generation] = None
            elif generation.on_change is not None:
                changed[generation] = None
        for generation in changed:  # when all that their ends free is free
            self.tell(generation)
        if changed and self.engine.scheduler.newcomers.ran_alone:
            # Else the next step, which is ten times as long, takes interpreter and cores before who
            # reads the newcomers' first tokens has woken up.
            time.sleep(HAND_OVER_S)

    def _add(self, events: PlainEvents) -> tuple[Sequence[TokenEvent], dict[Generation, None]]:
        """Add the tokens of a plain step to requests that need nothing else done.

        Returns:
            The events of all other requests, and the requests whose readers must be told, in order.
        """
        live, others, changed = self.live, list[int](), dict[Generation, None]()
        for place, request_id in enumerate(events.request_ids):
            generation = live.get(request_id)
            if generation is None or not generation.adds(events.draws.ids[place]):
                others.append(place)
            elif generation.on_change is not None:
                changed[generation] = None
        if len(others) == len(events):
            return events, changed
        return [events[place] for place in others], changed

    def adopt(self, engine: Engine) -> None:
        self.engine = engine

    def begin_with(self, engine: Engine) -> None:
        self.engine = engine
        self.new_scheduler = self.new_scheduler or engine.new_scheduler

    def make(self, engine: Callable[[], Engine]) -> None:
        self.begin_with(engine())

    def replace(self, make: Callable[[], Engine], version: str) -> None:
        engine, old = make(), self.engine
        engine.version, engine.head, engine.auditor = version, old.head, old.auditor
        engine.differences = old.differences
        engine.scheduler.trace.follow(old.scheduler.trace)
        self.engine, self.new_scheduler = engine, engine.new_scheduler

    def set_paused(self, is_paused: bool) -> None:
        self.is_paused = is_paused

    def when_idle(self, task: _Task) -> None:
        """Let a task run as soon as no request is left in the engine, and return at once.

        Requests that come before the task has run are held back, and added after it. A loop that
        ends first refuses the task.
        """
        self.idle_tasks.append(task)

    def when_ended(self, task: _Task) -> None:
        """Abort all requests, then run a task as `when_idle` does."""
        self.drop(list(self.live.values()))
        self.when_idle(task)

    def among(self, task: _Task) -> None:
        """Run a task now, between two steps, without ending the requests.

        Requests that were never admitted are taken out of the engine before, and added again
        afterwards. The auditor's notes are dropped.
        """
        fresh = [each for each in self.live.values() if self.engine.take_back(each.request)]
        for generation in fresh:
            del self.live[generation.request.request_id]
        self.engine.stop_audits()
        task.run()
        for generation in fresh:
            self.add(generation)

    def _audit(self) -> None:
        """Let the idle engine begin to compute an audited request again; stop the loop at a
        difference if the engine is so configured."""
        if not hasattr(self, "engine"):
            return
        self.engine.audit_next()
        if self.engine.differences and self.engine.stops_at_difference:
            self._stop(EngineClosedError(self.engine.asleep))

    def _do_idle_tasks(self) -> None:
        self.engine.stop_audits()
        tasks, self.idle_tasks = self.idle_tasks, []
        for task in tasks:
            task.run()
        held, self.held = self.held, []
        for generation in held:
            self.add(generation)

    def add(self, generation: Generation) -> None:
        """Give a request to the engine, or hold it back while tasks wait for an idle engine.

        A request that ended before it came here, or that the engine refuses, is not added; its
        callback is called.
        """
        if generation.output.finished:
            self.tell(generation)
            return
        if self.idle_tasks:
            self.held.append(generation)
            return
        request = generation.request
        try:
            self.engine.add_request(request)
        except Exception as error:
            generation.fail(error)
            self.tell(generation)
        else:
            self.live[request.request_id] = generation

    def abort(self, request_id: str) -> None:
        generation = self.live.get(request_id)
        if generation is not None:
            self.drop([generation])

    def drop(self, generations: Sequence[Generation]) -> None:
        """End unfinished requests with finish_reason "abort", also those that are not in the engine
        yet."""
        for generation in generations:
            request_id = generation.request.request_id
            if self.live.get(request_id) is generation:
                del self.live[request_id]
                self.engine.abort(request_id)
            if not generation.output.finished:
                generation.abort()
                self._settle(generation)
                self.tell(generation)

    def _settle(self, generation: Generation) -> None:
        generation.settle(self.engine.scheduler.trace.account(generation.request.request_id))

    def tell(self, generation: Generation) -> None:
        """Call a request's on_change and, once it has finished, its on_end for the only time.

        A request whose on_change raises ends with that exception; exceptions of on_end are dropped.
        """
        if generation.on_change is not None:
            try:
                generation.on_change()
            except BaseException as error:  # no interrupt comes to this thread
                if not generation.output.finished:
                    generation.fail(error)
                    self.live.pop(generation.request.request_id, None)
                    self.engine.abort(generation.request.request_id)
        if generation.output.finished and generation.on_end is not None:
            on_end, generation.on_end = generation.on_end, None
            with suppress(BaseException):  # the request has ended, and not by this
                on_end()

    def _restart(self) -> None:
        """Put a new scheduler in the place of the broken one; end the loop if none can be made."""
        if self.new_scheduler is None:
            self._stop(EngineClosedError("the engine's scheduler is broken"))
            return
        try:
            self.engine.restart(self.new_scheduler())
        except BaseException as error:
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        if not isinstance(error, EngineClosedError):
            closed = EngineClosedError(f"the engine has failed: {str(error) or repr(error)}")
            closed.__cause__ = error
            error = closed
        with self._gate:
            self.reason = self.reason or error

    def _take_live(self) -> list[Generation]:
        failed, self.live = list(self.live.values()), {}
        return failed

    def _fail(self, generations: list[Generation], error: BaseException) -> None:
        """Fail requests that the engine has forgotten, each with an exception of its own."""
        for generation in generations:
            generation.fail(_own(error))
        for generation in generations:
            self.tell(generation)

    def _end(self, error: BaseException | None) -> None:
        """End the loop for good: fail all requests and queued tasks, and refuse later ones.

        Args:
            error: the reason, if `reason` is not set yet; None if nothing holds the loop any more.
        """
        if self._is_exiting:
            return
        self._stop(error or EngineClosedError("the engine was let go of"))
        reason = self.reason
        assert reason is not None
        for request_id in list(self.live):
            with suppress(Exception):  # of a device that is lost, or a scheduler that is broken
                self.engine.abort(request_id)
        self._fail(self._take_live(), reason)
        with suppress(queue.Empty):
            while True:
                task = self.inbox.get_nowait()
                if task is not None:
                    task.refuse(_own(reason))
        tasks, self.idle_tasks = self.idle_tasks, []
        for left in tasks:
            left.refuse(_own(reason))
        held, self.held = self.held, []
        self._fail([each for each in held if not each.output.finished], reason)


def _own(error: BaseException) -> BaseException:
    """Return a copy of an exception, for one of several callers that raise it.

    The copy has its own notes, and the cause, context and traceback. An exception that cannot be
    copied is returned itself.
    """
    try:
        own = copy.copy(error)
        if type(own) is not type(error) or own.args != error.args:
            return error
    except Exception:
        return error
    if hasattr(error, "__notes__"):
        own.__notes__ = list(error.__notes__)
    own.__cause__, own.__context__ = error.__cause__, error.__context__
    own.__suppress_context__ = error.__suppress_context__
    return own.with_traceback(error.__traceback__)


_cores: weakref.WeakSet[_Core] = weakref.WeakSet()


def _leave_all() -> None:
    for core in list(_cores):
        core.exit()


def _become_child() -> None:
    for core in list(_cores):
        core.become_child()


atexit.register(_leave_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_become_child)
