"""The server's side of an engine in another process: the methods of AsyncLLM and EngineLoop it
needs.

Messages are applied to one RequestOutput per request. The reader gets this very object, so it
changes after the reader's next await.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Unpack

import msgspec

from tilewise.children import environment
from tilewise.engine.async_llm import Mailbox, share_of
from tilewise.engine.config import RequestTerms, Terms
from tilewise.engine.daemons import beside
from tilewise.engine.engine import EngineStats
from tilewise.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tilewise.engine.recipe import Facts
from tilewise.engine.request import SamplingParams
from tilewise.engine.settings import model_directory
from tilewise.engine.steps.embedding import (
    EMBEDDING_PARAMS,
    EmbeddingOutput,
    embedding_of,
)
from tilewise.engine.tables.admission import Limits
from tilewise.engine.tokenizer import load_tokenizer
from tilewise.errors import EngineClosedError
from tilewise.server.engine_process.wire import (
    Ask,
    Delta,
    Drop,
    End,
    Failure,
    News,
    error_of,
    frame,
    frames,
    plain,
    receive,
    told_sampling,
)
from tilewise.server.questions import within

__all__ = ["RemoteEngine"]

Sink = Callable[[RequestOutput], bool]
ANSWER_S = 1.0  # seconds to answer that it has ended in time
LOAD_POLL_S = 0.05  # seconds between two questions whether an adapter is loaded
# Seconds until a question about long work must be answered: the engine's process answers questions
# in turn, and another one may wait for work of minutes, such as the capture of graphs.
SILENCE_S = 300.0
PATIENCE_S = 5.0  # seconds before a process that was told to end is killed


class _Pending:
    """A request that was sent to the engine's process and has not ended, with its output so far.

    `Mailbox` calls `read` of it when its reader, a task or a sink, shall see the output.
    """

    def __init__(self, output: RequestOutput, sink: Sink | None) -> None:
        self.output, self.sink = output, sink
        self.changed = asyncio.Event()
        self.failure: BaseException | None = None
        self.error: Exception | None = None
        self.num_tokens = self.num_seen = 0
        self.is_told = self.is_hurried = False

    def take(self, delta: Delta) -> None:
        """Append the new tokens, text and log-probabilities of a delta to the output, and take over
        its other numbers and reasons to finish.

        It wakes no one: `Mailbox` calls `read`, which shows the reader the output.
        """
        output = self.output
        output.num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = delta.prompt_logprobs
        for new in delta.choices:
            completion = output.outputs[new.place]
            completion.token_ids += new.token_ids
            completion.text += new.text
            if new.logprobs is not None:
                if completion.logprobs is None:
                    completion.logprobs = []
                completion.logprobs += new.logprobs
            completion.cumulative_logprob = new.cumulative_logprob
            completion.finish_reason = new.finish_reason
            completion.stop_reason = new.stop_reason
            self.num_tokens += len(new.token_ids)

    def read(self) -> None:
        """Give the output to the sink; wake the reader's task if there is no sink, it returns
        False, or the task is being woken already.

        An exception of the sink is kept in `failure`, which the task raises.
        """
        if self.sink is not None and not self.changed.is_set():
            try:
                if self.sink(self.output):
                    self.num_seen = self.num_tokens
                    return
            except BaseException as error:  # CancelledError is no Exception
                self.failure = error
        self.changed.set()

    def end(self, output: RequestOutput | None, error: Exception | None) -> None:
        """Take the whole output, if there is one, and the error that has ended the request, None
        for none; wake the reader's task."""
        if output is not None:
            self.output = output
            self.num_tokens = sum(len(c.token_ids) for c in output.outputs)
        self.error = error
        self.changed.set()


class RemoteEngine(asyncio.Protocol):
    """An engine in a process of its own, which this object starts and ends.

    It is used by one event loop. If the process dies, all requests fail with EngineClosedError, as
    do later calls that ask the engine, and `is_alive` is False. The process ends when this one
    does.

    Args:
        model: the model, see LLM.
        settings: arguments of LLM, of numbers, texts and tables only.
        share: the largest share of the time for reporting tokens, see AsyncLLM.

    Raises:
        Exception: the exception that LLM raised in the process.
        RuntimeError: the process ended before it answered.

    Attributes:
        tokenizer, limits: the model's tokenizer and the engine's limits.
        config: the parts of the model's configuration that the server needs, vocab_size and
            hidden_size.
        devices, start_seconds: the attributes of LLM.
        last_step_time, num_restarts: the attributes of EngineLoop, at most a quarter of a second
            late.
    """

    def __init__(self, model: str, settings: dict[str, Any], *, share: float | None = None) -> None:
        ours, theirs = socket.socketpair()
        calls, their_calls = socket.socketpair()
        numbers = (theirs.fileno(), their_calls.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tilewise.server.engine_process.host", *map(str, numbers)],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            env=environment(),
            start_new_session=True,  # Ctrl-C in the terminal is handled by the server
        )
        theirs.close()
        their_calls.close()
        self._stream, self._calls = ours, calls
        self._lock = threading.Lock()  # held around a call and its answer
        self._transport: asyncio.Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mailbox: Mailbox | None = None
        self._connecting: asyncio.Lock | None = None
        self._buffer = bytearray()
        self._decode = msgspec.msgpack.Decoder(News | End).decode
        self._numbers = itertools.count()
        self._names = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._ended: str | None = None
        self._is_closed = False
        self.last_step_time: float | None = None
        self.num_restarts = 0
        try:
            calls.sendall(frame([model, settings]))
            told = self._answer()
        except BaseException as error:
            if not isinstance(error, EOFError):
                self._process.kill()
            code = self._process.wait()
            ours.close()
            calls.close()
            if isinstance(error, EOFError | ConnectionError):
                message = f"the engine's process must start, it ended with {code}"
                raise RuntimeError(message) from None
            raise
        self.devices: str = told["devices"]
        self.start_seconds: dict[str, float] = told["start_seconds"]
        self._share = share_of(self.devices) if share is None else share
        self.limits = msgspec.convert(told["limits"], Limits)
        self.config = SimpleNamespace(**told["config"])
        self.tokenizer = load_tokenizer(model_directory(model))

    @property
    def pid(self) -> int:
        """The process id of the engine's process."""
        return self._process.pid

    # ---- the methods of `bridge.Loop`

    @property
    def is_alive(self) -> bool:
        """Return whether the engine accepts requests; if its process has just been found dead, all
        requests fail."""
        if self._ended is None and self._process.poll() is not None:
            self._die(f"the engine's process has ended with {self._process.returncode}")
        return self._ended is None

    def pause(self) -> None:
        """Let no further step begin, and return when none runs; requests are still accepted.

        Raises:
            EngineClosedError: the engine was closed, or its process has ended.
        """
        self._call("pause")

    def resume(self) -> None:
        """Let steps begin again after pause(); nothing changes without one.

        Raises:
            EngineClosedError: the engine was closed, or its process has ended.
        """
        self._call("resume")

    # ---- the methods of `bridge.AsyncEngine`, see AsyncLLM

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        sink: Sink | None = None,
        **terms: Unpack[Terms],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output of one prompt, with all text so far, each time it has grown.

        Until the last one a yielded output is the same object each time, and changes with the next
        await. A reader that stops early drops the request in the engine. The arguments are those of
        `AsyncLLM.generate`.
        """
        asked = RequestTerms.given_to(RemoteEngine.generate, terms)
        sampling = sampling_params or SamplingParams()
        return self._outputs(prompt, sampling, asked, request_id, sink=sink)

    async def embed(
        self,
        prompt: Any,
        *,
        pooling: str = "mean",
        request_id: str | None = None,
        **terms: Unpack[Terms],
    ) -> EmbeddingOutput:
        """Return the embedding of one prompt, see `AsyncLLM.embed`."""
        asked = RequestTerms.given_to(RemoteEngine.embed, terms)
        outputs = self._outputs(prompt, EMBEDDING_PARAMS, asked, request_id, pooling)
        async with aclosing(outputs):
            async for output in outputs:
                if output.finished:
                    return embedding_of(output, pooling)
        raise AssertionError("the last output of a request is finished")

    async def _outputs(
        self,
        prompt: Any,
        sampling: SamplingParams,
        terms: RequestTerms,
        request_id: str | None,
        pooling: str | None = None,
        sink: Sink | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        self._check_open()
        transport = await self._connected()
        self._check_open()  # it may have been closed meanwhile
        number, ids, text = next(self._numbers), prompt["prompt_token_ids"], prompt.get("prompt")
        if request_id is None:
            request_id = f"remote-{next(self._names)}"
        told = plain(told_sampling(sampling)), plain(asdict(terms))
        types = prompt.get("token_type_ids")
        message = frame(Ask(number, list(ids), text, *told, request_id, pooling, types))
        output = RequestOutput(
            request_id,
            text,
            list(ids),
            [CompletionOutput(index) for index in range(sampling.n)],
            RequestMetrics(time.perf_counter()),
        )
        pending = self._pending[number] = _Pending(output, sink)
        transport.write(message)
        try:
            while True:
                await pending.changed.wait()
                pending.changed.clear()
                if pending.failure is not None:
                    raise pending.failure
                output, error = pending.output, pending.error
                if error is not None:
                    if pending.num_tokens > pending.num_seen:
                        yield replace(output, finished=False)
                    raise error
                if pending.num_tokens > pending.num_seen or output.finished:
                    pending.num_seen = pending.num_tokens
                    yield output
                if output.finished:
                    return
        finally:
            pending.sink = None
            was_there = self._pending.pop(number, None) is not None
            if was_there and not pending.output.finished and self._ended is None:
                transport.write(frame(Drop(number)))

    async def abort(self, request_id: str) -> None:
        """End a request of any caller with finish_reason "abort"; unknown ids are ignored."""
        with suppress(EngineClosedError):
            await self._asked("abort", request_id)

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine's counters and times."""
        return msgspec.convert(self._call("stats"), EngineStats)

    def explain(self, request_id: str) -> dict[str, Any]:
        """Return the state of a request, why it waits and its cost so far, see
        `Engine.explain`."""
        told: dict[str, Any] = self._call("explain", request_id)
        return told

    def trace(self, since: int = 0) -> list[dict[str, Any]]:
        """Return recent events of the scheduler, from number `since` on, see `Engine.trace`."""
        told: list[dict[str, Any]] = self._call("trace", since)
        return told

    def picture(self) -> dict[str, Any]:
        """Return which request holds which block now, see `Engine.picture`."""
        told: dict[str, Any] = self._call("picture")
        return told

    def line(self, most: int) -> list[str]:
        """Return the ids of the first `most` requests that wait, the next one to run first."""
        told: list[str] = self._call("line", most)
        return told

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks and return True; return False if requests hold some."""
        return bool(await self._asked("reset_prefix_cache"))

    async def load_lora_adapter(self, name: str, path: str, *, replaces: bool = False) -> None:
        """Load an adapter, see `LLM.load_lora_adapter`; other calls are answered meanwhile."""
        await self._until_ended("load_lora_adapter", name, path, replaces)

    async def update_weights(self, path: str, *, running: str = "wait") -> None:
        """Replace the model's weights by those of a folder or hub name, and return when it is done,
        see `LLM.update_weights`."""
        await self._until_ended("update_weights", path, running)

    async def sleep(self, level: int = 1, *, running: str = "wait") -> None:
        """Free the memory of the cache and of the weights until `wake`, see `LLM.sleep`."""
        await self._until_ended("sleep", level, running)

    async def wake(self) -> None:
        """Take requests again after `sleep`, see `LLM.wake`."""
        await self._until_ended("wake")

    async def facts(self) -> Facts:
        """Return the facts, besides the request, on which the bits of an answer depend; see
        `LLM.facts`."""
        await self._until_ended("read_weights")  # the first time
        told = await self._asked("facts")
        return Facts(**told)

    async def fingerprint_of(self, adapter: str) -> str:
        """Return the digest of an adapter by its name, see `LLM.fingerprint_of`."""
        return str(await self._asked("fingerprint_of", adapter))

    async def _until_ended(self, name: str, *arguments: Any) -> None:
        """Start a long task in the engine's process, and wait for its end; other calls go on.

        The task's result is dropped, and its error raised.

        Args:
            name: the name of a call that returns a task's number, see `Host`.
            arguments: the task's arguments.
        """
        number = await self._asked(name, *arguments)
        while not await self._asked("has_ended", number):
            await asyncio.sleep(LOAD_POLL_S)

    async def _asked(self, name: str, *arguments: Any) -> Any:
        """Return the answer of a call, see `_call`.

        Raises:
            EngineSilent: the process has answered nothing for `SILENCE_S` seconds.
        """
        answer = asyncio.wrap_future(beside(partial(self._call, name, *arguments)))
        return await within(answer, SILENCE_S)

    async def unload_lora_adapter(self, name: str) -> None:
        """Forget an adapter by its name, see `LLM.unload_lora_adapter`."""
        await self._asked("unload_lora_adapter", name)

    async def aclose(self) -> None:
        """Refuse new requests, end those that have not ended with EngineClosedError, and wait until
        the engine has handled all calls before this one; its process goes on."""
        self._is_closed = True
        for pending in list(self._pending.values()):
            pending.end(None, EngineClosedError("the engine was closed"))
        with suppress(EngineClosedError):
            await self._asked("caught_up")

    def close(self, timeout_s: float | None = None) -> bool:
        """End the engine's process; return whether it ended by itself, with everything written.

        Args:
            timeout_s: seconds that the engine may take to close; a process that has not answered a
                second later hangs, and is killed. None waits for it.
        """
        has_ended = False
        with suppress(EngineClosedError, TimeoutError):
            closed = beside(lambda: self._call("close", timeout_s))
            has_ended = bool(closed.result(None if timeout_s is None else timeout_s + ANSWER_S))
        if not has_ended and timeout_s is not None:
            self._process.kill()
        self._ended = self._ended or "the engine was closed"
        self._stream.close()
        self._calls.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            has_ended = False
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        return has_ended

    # ---- the sockets

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("the engine was closed")

    async def _connected(self) -> asyncio.Transport:
        if self._ended is not None:
            raise EngineClosedError(self._ended)
        if self._connecting is None:
            self._connecting = asyncio.Lock()
        async with self._connecting:
            if self._transport is None:
                self._loop = asyncio.get_running_loop()
                self._mailbox = Mailbox(self._loop, self._share)
                self._stream.setblocking(False)
                self._transport, _ = await self._loop.create_unix_connection(
                    lambda: self, sock=self._stream
                )
        return self._transport

    def data_received(self, data: bytes) -> None:
        """Apply the messages that are complete with `data`, as asyncio calls it, to the outputs of
        their requests, and have `Mailbox` wake the readers."""
        assert self._mailbox is not None, "it is made before the connection"
        self._buffer += data
        is_due = False
        for body in frames(self._buffer):
            message = self._decode(body)
            if isinstance(message, End):
                pending = self._pending.get(message.number)
                if pending is not None:
                    failure = message.failure
                    output = None if message.output is None else _output_of(message.output)
                    pending.end(output, None if failure is None else error_of(failure))
                continue
            self.last_step_time, self.num_restarts = message.last_step_time, message.num_restarts
            for delta in message.deltas:
                pending = self._pending.get(delta.number)
                if pending is not None:
                    pending.take(delta)
                    is_due |= self._mailbox.put(pending, waits=pending.num_seen > 0)
        if is_due:
            self._mailbox.deliver()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all unfinished requests: asyncio calls this when the engine's process is gone."""
        self._die("the engine's process has ended")

    def _die(self, why: str) -> None:
        self._ended = self._ended or why
        for pending in list(self._pending.values()):
            pending.end(None, EngineClosedError(self._ended))

    def _call(self, name: str, *arguments: Any) -> Any:
        if self._ended is not None:
            raise EngineClosedError(self._ended)
        with self._lock:
            try:
                self._calls.sendall(frame([name, plain(arguments)]))
                return self._answer()
            except (EOFError, OSError) as error:
                raise EngineClosedError(f"the engine's process has ended: {error}") from None

    def _answer(self) -> Any:
        is_well, value = msgspec.msgpack.decode(receive(self._calls), strict=False)
        if not is_well:
            raise error_of(msgspec.convert(value, Failure))
        return value


def _output_of(sent: Mapping[str, Any]) -> RequestOutput:
    """Return the output that `End.output` describes, a table by the fields of RequestOutput."""
    state = sent["prompt_state"]
    typed = {
        "outputs": [CompletionOutput(**one) for one in sent["outputs"]],
        "metrics": RequestMetrics(**sent["metrics"]),
        "prompt_state": None if state is None else tuple(state),
    }
    return RequestOutput(**{**sent, **typed})
