"""The engine's side: an LLM in a process of its own, which ends when the server does.

    python -m tilewise.server.engine_process.host STREAM CALLS      descriptors of two sockets

The first message on the calls' socket contains the arguments of LLM; the answer describes the
engine, or reports why it could not be made. There are four threads. One reads requests, one answers
calls. One sends all changes since its last message as one message, so steps are merged while the
server is busy. The last runs full garbage collections while no request is there.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec

from tilewise.engine.config import RequestTerms
from tilewise.engine.daemons import beside
from tilewise.engine.llm import LLM
from tilewise.engine.outputs import Generation, RequestOutput
from tilewise.engine.usual_steps import warm_up
from tilewise.server import garbage
from tilewise.server.engine_process.wire import (
    Ask,
    Choice,
    Delta,
    Drop,
    End,
    News,
    failure_of,
    frame,
    receive,
    sampling_of,
    wide,
)

__all__ = ["Host", "main"]

LOOK_S = 0.25  # seconds between two checks whether the engine is alive


class _Entry:
    """One request of the server, from its arrival to its last message.

    It knows how much of the request's output was sent, and so which part is new.
    """

    def __init__(self, number: int, tell: Callable[[_Entry], None]) -> None:
        self.number = number
        self.generation: Generation | None = None
        self.refusal: Exception | None = None
        self.is_dropped = False
        self.is_told = False  # True while it is in the outbox
        self._tell = tell
        self._num_seen = 0
        self._has_told_prompt = False
        self._seen: dict[int, tuple[int, int, str | None]] = {}
        self._delta: Delta | None = None

    def changed(self) -> None:
        """Put this entry into the outbox, once; called on the engine's thread."""
        if not self.is_told:
            self.is_told = True
            self._tell(self)

    def message(self) -> Delta | End | None:
        """Return the next message about this request; None if nothing is new.

        It is a Delta with new tokens, or an End with the whole output or the error if the request
        was refused or has ended. What a Delta contains counts as sent.
        """
        generation = self.generation
        if self.refusal is not None or generation is None:
            return End(self.number, None, failure_of(self.refusal or RuntimeError("it was lost")))
        self._delta = None
        self._num_seen = max(self._num_seen, generation.show(self._read, self._num_seen))
        if self._delta is not None:
            return self._delta
        error = generation.error  # read before the tokens, as tokens may still come before an error
        if error is None and not generation.output.finished:
            return None
        output = dataclasses.asdict(generation.snapshot())
        return End(self.number, output, None if error is None else failure_of(error))

    def _read(self, output: RequestOutput) -> bool:
        choices = []
        for place, completion in enumerate(output.outputs):
            chars, tokens, ended = self._seen.get(place, (0, 0, None))
            if ended is not None:
                continue
            text, token_ids = completion.text[chars:], completion.token_ids[tokens:]
            reason, logprobs = completion.finish_reason, completion.logprobs
            if not token_ids and not text and reason is None:
                continue
            choices.append(
                Choice(
                    place,
                    token_ids,
                    text,
                    None if logprobs is None else logprobs[tokens:],
                    completion.cumulative_logprob,
                    reason,
                    completion.stop_reason,
                )
            )
            self._seen[place] = (chars + len(text), tokens + len(token_ids), reason)
        scores = None if self._has_told_prompt else output.prompt_logprobs
        self._has_told_prompt = self._has_told_prompt or scores is not None
        self._delta = Delta(self.number, output.num_cached_tokens, choices, scores)
        return True


class Host:
    """Serve an LLM to the server's process over two sockets, with the threads of this module.

    Args:
        llm: the LLM to serve.
        stream: the socket for requests and their outputs.
        calls: the socket for the server's calls, which are answered one at a time.
    """

    def __init__(self, llm: LLM, stream: socket.socket, calls: socket.socket) -> None:
        self._llm, self._stream, self._calls = llm, stream, calls
        self._entries: dict[int, _Entry] = {}
        self._outbox: deque[_Entry] = deque()
        self._is_due = threading.Event()
        self._is_over = False
        self._step_told: float | None = None
        self._works: dict[int, Future[Any]] = {}
        self._work_numbers = itertools.count()

    def run(self) -> None:
        """Serve until the server closes the stream or dies, then close the LLM."""
        for work in (self._send_all, self._answer_all, self._collect_all):
            threading.Thread(target=work, daemon=True).start()
        decode = msgspec.msgpack.Decoder(Ask | Drop, ext_hook=wide).decode
        with suppress(EOFError, OSError):
            while True:
                message = decode(receive(self._stream))
                if isinstance(message, Drop):
                    self._drop(message.number)
                else:
                    self._ask(message)
        self._is_over = True
        self._llm.close(0.0)

    def _ask(self, message: Ask) -> None:
        entry = self._entries[message.number] = _Entry(message.number, self._post)
        adapter = message.terms.get("lora_request", "")
        reads = bool(adapter) and not self._llm.holds_adapter(adapter)
        if reads or "structured" in message.sampling:  # a grammar takes long to compile
            # `engine.trials` bounds how many compile at once
            beside(lambda: self._submit(entry, message))
        else:
            self._submit(entry, message)

    def _submit(self, entry: _Entry, message: Ask) -> None:
        prompt: dict[str, Any] = {"prompt_token_ids": message.prompt_token_ids}
        if message.prompt is not None:
            prompt["prompt"] = message.prompt
        if message.token_type_ids is not None:
            prompt["token_type_ids"] = message.token_type_ids
        try:
            sampling = sampling_of(message.sampling)
            generation = self._llm.prepare(
                prompt,
                sampling,
                RequestTerms(**message.terms),
                request_id=message.request_id,
                pooling=message.pooling,
            )
            generation.on_change = entry.changed
            entry.generation = generation
            if not entry.is_dropped:
                self._llm.loop.submit(generation)
        except Exception as error:
            entry.refusal = error
            entry.changed()

    def _drop(self, number: int) -> None:
        entry = self._entries.pop(number, None)
        if entry is not None:
            entry.is_dropped = True
            if entry.generation is not None:
                self._llm.loop.drop_soon(entry.generation)

    def _post(self, entry: _Entry) -> None:
        self._outbox.append(entry)
        self._is_due.set()

    def _send_all(self) -> None:
        with suppress(OSError):  # the server has gone, which run() sees, too
            while not self._is_over:
                is_due = self._is_due.wait(LOOK_S)
                # read before sending, so that the last messages are sent
                is_alive = self._llm.loop.is_alive
                # A long prompt takes many steps before it has a token to report.
                if is_due or self._llm.loop.last_step_time != self._step_told:
                    self._is_due.clear()
                    self._send()
                if not is_alive and not self._is_over:
                    os._exit(1)  # the server ends, too, so that a supervisor restarts both

    def _send(self) -> None:
        deltas: list[Delta] = []
        ends: list[End] = []
        while self._outbox:
            entry = self._outbox.popleft()
            entry.is_told = False
            if entry.is_dropped:
                continue
            message = entry.message()
            if isinstance(message, End):
                self._entries.pop(entry.number, None)
                entry.is_dropped = True  # no further message will be sent
                ends.append(message)
            elif message is not None:
                deltas.append(message)
        loop = self._llm.loop
        self._step_told = loop.last_step_time
        parts = [frame(News(self._step_told, loop.num_restarts, deltas))]
        self._stream.sendall(b"".join([*parts, *map(frame, ends)]))

    def _answer_all(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                name, arguments = msgspec.msgpack.decode(receive(self._calls), ext_hook=wide)
                try:
                    answer = [True, msgspec.to_builtins(self._call(name, arguments))]
                except Exception as error:
                    answer = [False, failure_of(error)]
                self._calls.sendall(frame(answer))

    def _collect_all(self) -> None:
        collections = garbage.Collections(time.monotonic())
        while not self._is_over:
            time.sleep(garbage.LOOK_S)
            collections.look(is_idle=not self._entries)

    def _call(self, name: str, arguments: list[Any]) -> Any:
        llm, engine = self._llm, self._llm.engine
        calls: dict[str, Callable[..., Any]] = {
            "stats": engine.stats,
            "explain": engine.explain,
            "trace": engine.trace,
            "picture": engine.picture,
            "line": engine.line,
            "pause": llm.loop.pause,
            "resume": llm.loop.resume,
            "abort": self._abort,
            "caught_up": lambda: llm.loop.call(lambda: None),
            "reset_prefix_cache": llm.reset_prefix_cache,
            "load_lora_adapter": self._load,
            "update_weights": lambda path, running: self._begin(
                lambda: llm.update_weights(path, running=running)
            ),
            "sleep": lambda level, running: self._begin(lambda: llm.sleep(level, running=running)),
            "wake": lambda: self._begin(llm.wake),
            "read_weights": lambda: self._begin(llm.facts),
            "facts": llm.facts,
            "fingerprint_of": llm.fingerprint_of,
            "has_ended": self._has_ended,
            "unload_lora_adapter": llm.unload_lora_adapter,
            "is_alive": lambda: llm.loop.is_alive,
            "close": self._close,
        }
        return calls[name](*arguments)

    def _load(self, name: str, path: str, replaces: bool) -> int:
        """Begin to load an adapter on a thread; return the task's number for `_has_ended`."""
        return self._begin(lambda: self._llm.load_lora_adapter(name, path, replaces=replaces))

    def _begin(self, work: Callable[[], object]) -> int:
        """Begin work that may take minutes, on a thread; return its number for `_has_ended`."""
        number = next(self._work_numbers)
        self._works[number] = beside(work)
        return number

    def _has_ended(self, number: int) -> bool:
        """Return whether a long task has ended; one that has is forgotten, and its error raised.

        Args:
            number: the number of the task, as of `_begin`.
        """
        if not self._works[number].done():
            return False
        self._works.pop(number).result()
        return True

    def _close(self, timeout_s: float | None) -> bool:
        self._is_over = True
        return self._llm.close(timeout_s)

    def _abort(self, request_id: str) -> None:
        self._llm.loop.abort(request_id)
        self._llm.loop.call(lambda: None)


def _end_with(stream: socket.socket, is_made: threading.Event) -> None:
    """Wait on a thread until the socket's other end is closed or sends; end this process if
    `is_made` is not set by then, as the server died while the model was loaded."""
    with suppress(OSError):
        stream.recv(1, socket.MSG_PEEK)
    if not is_made.is_set():
        os._exit(1)


def main(stream_number: int, calls_number: int) -> None:
    """Run the engine's process: make the engine that the server asks for, serve until the server
    has gone, and end the process.

    If the engine cannot be made, the server is sent the error as the answer to its first call, and
    the function returns.

    Args:
        stream_number, calls_number: the file descriptors of two sockets: outputs, and calls.
    """
    # Ctrl-C and a supervisor's signals are for the server, which lets requests end first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    stream, calls = (socket.socket(fileno=n) for n in (stream_number, calls_number))
    # Loading the model may take minutes, in which no other thread would notice that the server is
    # gone; the server sends nothing until it is answered.
    is_made = threading.Event()
    threading.Thread(target=_end_with, args=(stream, is_made), daemon=True).start()
    model, settings = msgspec.msgpack.decode(receive(calls))
    try:
        llm = LLM(model, **settings)
        warm_up(llm)
    except Exception as error:
        failure = failure_of(error)
        failure.where = traceback.format_exc()
        calls.sendall(frame([False, failure]))
        return
    is_made.set()
    limits = dataclasses.asdict(llm.engine.scheduler.limits)
    sizes = {"vocab_size": llm.config.vocab_size, "hidden_size": llm.config.hidden_size}
    made = {
        "limits": limits,
        "devices": llm.devices,
        "config": sizes,
        "start_seconds": dict(llm.start_seconds),
    }
    calls.sendall(frame([True, made]))
    with garbage.leaving_large_ones():
        Host(llm, stream, calls).run()
    os._exit(0)  # threads of the engine may be in a step whose results are not needed


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
