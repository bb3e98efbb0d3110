"""The engine of a simulation: the real one, its loop without a thread, and a model of fingerprints.

Engine, scheduler, tables, loop, LLM and AsyncLLM are those of the package. What is put in their
places: the thread of the loop, whose turns are callbacks of the event loop; the runner, which is
the virtual model of `tests.engine.simulator`, and refuses whatever a real one would get wrong.
Tokens depend on all tokens before them and on the version of the weights, not on the namespace of
cached blocks, as those of a real model do not.
"""

from __future__ import annotations

import queue
import random
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from tests.engine import simulator
from tests.engine.simulator import VirtualModel, VirtualStore
from tests.simulation.virtual_time import Clock, StillError, VirtualEventLoop
from tilewise.cache.contents import Content
from tilewise.engine import loop as engine_loop
from tilewise.engine.batch import Batch, SampledToken
from tilewise.engine.llm import LLM
from tilewise.engine.loop import EngineLoop, _Core
from tilewise.engine.options import Options
from tilewise.engine.purpose import Purpose
from tilewise.engine.request import SamplingParams
from tilewise.engine.versions import new_version
from tilewise.errors import UnsupportedError

MOST_TURNS = 20_000  # of the engine, that one wait may take
DRAWN = 300  # tokens that the model draws from; as bytes of a tokenizer many are no whole character


class IdleError(Exception):
    """The engine's loop has nothing to do, and waits.

    Attributes:
        seconds: the most that it waits; None for ever.
    """

    def __init__(self, seconds: float | None) -> None:
        super().__init__()
        self.seconds = seconds


class Inbox:
    """The inbox of a loop without a thread: where a thread would wait, `get` says so."""

    def __init__(self) -> None:
        self._tasks: deque[Any] = deque()
        self.is_late = False  # the time that it was to wait has passed

    def put(self, task: Any) -> None:
        self._tasks.append(task)

    def empty(self) -> bool:
        return not self._tasks

    def get_nowait(self) -> Any:
        if not self._tasks:
            raise queue.Empty
        return self._tasks.popleft()

    def get(self, timeout: float | None = None) -> Any:
        if self._tasks:
            return self._tasks.popleft()
        if self.is_late:
            self.is_late = False
            raise queue.Empty
        raise IdleError(timeout)


class TurnedCore(_Core):
    """What the engine's thread works with, a turn at a time.

    Args:
        on_task: called when something has come into the inbox.
    """

    def __init__(self, on_task: Callable[[], None]) -> None:
        self.on_task = on_task
        self.in_turn = self.is_over = False
        super().__init__(None)
        engine_loop._cores.discard(self)

    def _begin_life(self) -> None:
        super()._begin_life()
        self.inbox = Inbox()

    @property
    def is_own_thread(self) -> bool:
        return self.in_turn

    def _start(self) -> None:
        self._thread = object()

    def put(self, task: Any) -> None:
        super().put(task)
        self.on_task()

    def end_soon(self, error: Any) -> None:
        super().end_soon(error)
        self.on_task()

    def close(self, error: Any, timeout_s: float | None) -> bool:
        self.end_soon(error)
        while not self.is_over and not self.in_turn:
            self.turn()
        return True

    def turn(self) -> float | None:
        """Do what a thread would do until the end of a step.

        Returns:
            Seconds to wait at most where there is nothing to do, -1 for as long as nothing comes;
            None after a step.
        """
        if self.is_over:
            return -1.0
        self.in_turn = True
        try:
            if self._take_tasks():
                self._step(self.engine.step)
                return None
            self._end(self.reason)
        except IdleError as idle:
            return -1.0 if idle.seconds is None else idle.seconds
        except BaseException as error:  # as `_run` does
            self._end(error)
            if isinstance(error, AssertionError):
                raise
        finally:
            self.in_turn = False
        self.is_over = True
        return -1.0


class TurnedLoop(EngineLoop):
    """An EngineLoop whose turns somebody else asks for."""

    def __init__(self, engine: Any, new_scheduler: Any, on_task: Callable[[], None]) -> None:
        self._core = TurnedCore(on_task)
        self._core.new_scheduler = new_scheduler
        self._core.begin_with(engine)
        self._core.start()


def waiting_future(core: Callable[[], TurnedCore], clock: Clock) -> type[Future[Any]]:
    """Return a kind of future whose result lets the engine go on until it is there."""

    class WaitingFuture(Future):
        def result(self, timeout: float | None = None) -> Any:
            for _ in range(MOST_TURNS):
                if self.done():
                    return super().result(0)
                assert not core().in_turn, "the engine's thread must not wait for itself"
                clock.sleep(1e-4)
                if core().turn() is not None and not self.done():
                    if timeout is not None:
                        raise TimeoutError
                    raise StillError("a future is waited for that nobody will set")
            raise StillError("a future is waited for too long")

    return WaitingFuture


class EngineDriver:
    """Gives an engine's loop its turns: after each step the time that it took.

    Args:
        seconds: returns how long the next step takes.
    """

    def __init__(self, loop: VirtualEventLoop, seconds: Callable[[], float]) -> None:
        self._loop, self._seconds = loop, seconds
        self.core: TurnedCore | None = None
        self.on_turn: Callable[[], None] = lambda: None
        self._handle: Any = None
        self._is_busy = False
        self.error: BaseException | None = None

    def wake(self) -> None:
        """Take a turn soon, unless a step runs: then after it."""
        if self.core is not None and not self._is_busy and not self.core.in_turn:
            self._at(self._loop.draw.expovariate(20_000.0))

    def _at(self, seconds: float, is_late: bool = False) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(seconds, self._turn, is_late)

    def _turn(self, is_late: bool) -> None:
        self._handle, self._is_busy = None, False
        assert self.core is not None
        if is_late and self.core.inbox.empty():
            self.core.inbox.is_late = True
        try:
            waits = self.core.turn()
            self.on_turn()
        except BaseException as error:
            self.error = self.error or error
            return
        if waits is None:
            self._is_busy = True
            self._at(self._seconds())
        elif self.core.is_over:  # what came too late waits for nobody
            return
        elif not self.core.inbox.empty():
            self._at(0.0)
        elif waits >= 0:
            self._at(waits, is_late=True)


class WeightedModel(VirtualModel):
    """The virtual model with weights that have a version, whatever the namespace of blocks.

    Args:
        version: returns that of the weights.
    """

    def __init__(self, scheduler: Any, damages: Any, version: Callable[[], str]) -> None:
        super().__init__(scheduler, damages)
        self.version = version
        self.is_again = False  # parts of a step run again, in any order

    def forget(self) -> None:
        """Forget what sequences hold: from now on one that is unknown is told whole."""
        self.unfinished.clear()
        self.tables.clear()
        self.drawn.clear()
        self.is_again = self.has_lost_steps = True

    def submit(self, batch: Batch) -> None:
        for run in batch.sequences:
            if self.is_again and run.seq_id not in self.tables:
                self.tables[run.seq_id] = list(run.block_ids[: run.first_new_block])
        super().submit(batch)
        step = self.unfinished[-1]
        step.salts = dict.fromkeys(step.salts, self.version())

    def _check_limits(self, batch: Batch) -> None:
        if not self.is_again:
            super()._check_limits(batch)


class WeightedStore(VirtualStore):
    """Files of such blocks: their namespace says which weights computed them."""

    def save(self, content: Content, slot: int) -> None:
        """Keep a slot, which must hold just this."""
        version = content.salt[2:].partition("\0")[0] if content.salt.startswith("\0\0") else ""
        tokens = array("i")
        tokens.frombytes(content.tokens)
        held = self.model.hosts[self.group][slot]
        right = simulator.fingerprints(list(tokens), version)[-self.model.block_size :]
        if version != "audit":  # which does not say whose weights these were
            pairs = zip(held, right, strict=True)
            whole = all(a == b or (a is not None and a < 0) for a, b in pairs)
            assert whole, "a cold slot is whole"
        if self.chance() < 0.9:
            self.files[content.digest] = content, list(held)


class _Handle:
    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work

    def result(self) -> Any:
        return self._work()


class VirtualRunner:
    """Runs steps on the virtual model, and lets some fail.

    Args:
        new_model: makes a model of a scheduler.
        why_fails: returns the exception of a step, by its batch and whether it is asked for while
            the step is submitted; None for none.
    """

    storage: Any = None
    host: Any = None
    num_compilations = 0

    def __init__(
        self,
        new_model: Callable[[Any], WeightedModel],
        why_fails: Callable[[Batch, bool], Exception | None],
    ) -> None:
        self._new_model, self._why_fails = new_model, why_fails
        self.engine: Any = None
        self.model: Any = None
        self._scheduler: Any = None
        self.is_lost_for_good = False

    def _current(self) -> WeightedModel:
        if self._scheduler is not self.engine.scheduler:
            self._scheduler = self.engine.scheduler
            self.model = self._new_model(self._scheduler)
        return self.model

    def submit(self, batch: Batch) -> _Handle:
        model = self._current()
        error = self._why_fails(batch, True)
        if error is not None:
            model.has_lost_steps = True
            raise error
        model.submit(batch)

        def compute() -> Any:
            late = self._why_fails(batch, False)
            if late is not None:
                model.has_lost_steps = True
                model.drop(batch)
                raise late
            drawn = model.result(batch)
            return [
                [scored(token, run.sampling) for token in tokens]
                for run, tokens in zip(batch.sequences, drawn, strict=True)
            ]

        return _Handle(compute)

    def reset(self) -> None:
        """Forget all sequences."""
        self._current().forget()

    def is_lost(self) -> bool:
        """Whether the device is lost."""
        return self.is_lost_for_good


def scored(token: SampledToken, sampling: SamplingParams) -> SampledToken:
    """Return a token with a log-probability, where one was asked for."""
    if sampling.logprobs is None or token.error is not None or token.token_id < 0:
        return token
    return token._replace(logprob=-1.0 - (token.token_id % 97) / 128)


class VirtualLLM(LLM):
    """An LLM over such an engine: its own methods, and none of what it is made of.

    Args:
        tokenizer: that of the packaged model.
        num_ranks: of the engine.
    """

    def __init__(self, loop: TurnedLoop, tokenizer: Any, num_ranks: int) -> None:
        self.loop, self.tokenizer = loop, tokenizer
        self.config = SimpleNamespace(vocab_size=4096, hidden_size=8)
        self.default_params, self.purpose = SamplingParams(), Purpose()
        self.devices, self.tensor_parallel_size = "cpu", num_ranks
        self.start_seconds: Any = {}
        self._request_numbers = iter(range(1 << 30))
        self._end_ids = (3,)
        self._options = Options(tokenizer, 4096, self._end_ids)
        self._live = self._live_adapter = self._adapters = self._store = None
        self.versions = [""]

    def update_weights(self, weights: Any = None, *, running: str = "wait") -> None:
        """Take other weights: a new version, by the means of the real one."""
        if self.tensor_parallel_size > 1:
            raise UnsupportedError("tensor_parallel_size must be 1 to change weights")
        engine = self.engine

        def write() -> None:
            engine.use_version(new_version())
            self.versions.append(engine.version)

        self.loop.between(write, running)

    def close(self, timeout_s: float | None = None) -> bool:
        """End the loop."""
        return self.loop.close(timeout_s)


def tokens_alone(
    prompt: list[int],
    sampling: SamplingParams,
    version: str,
    end_ids: frozenset[int],
    max_len: int,
    draw_of: Callable[[list[int], str], int],
) -> list[tuple[list[int], str]]:
    """Return what a request draws alone, by the definition: tokens and reason of each sample.

    Args:
        draw_of: returns a number for a prefix of tokens and a version of the weights.
    """
    first = simulator.derive_seed("request", sampling.seed)
    found = []
    for index in range(sampling.n):
        seed = simulator.derive_seed("sample", first, index) if index else first
        tokens, drawn, reason = list(prompt), list[int](), ""
        while not reason:
            value = draw_of(tokens, version)
            token = simulator._digest(value, seed, len(drawn)) % simulator.VOCAB
            drawn.append(token)
            tokens.append(token)
            if token in end_ids:
                reason = "stop"
            elif len(tokens) >= max_len:
                reason = "length"
        found.append((drawn, reason))
    return found


def whole_draw(tokens: list[int], version: str) -> int:
    """Return what the model in one process knows of a prefix."""
    return simulator.fingerprints(tokens, version)[-1]


def random_of(*parts: object) -> random.Random:
    """Return random numbers that belong to these parts alone."""
    return random.Random("/".join(map(str, parts)))
