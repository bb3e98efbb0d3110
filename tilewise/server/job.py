"""A client's request while it is in the server, and the ways to write its answer."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewise.engine.outputs import RequestOutput
from tilewise.engine.request import SamplingParams
from tilewise.engine.scheduling.beams import BeamSearchParams
from tilewise.server.errors import ApiError
from tilewise.server.keys import Caller

__all__ = [
    "DISCARD",
    "Direct",
    "Job",
    "Prompt",
    "Sink",
    "name_of",
    "new_id",
    "sink_of",
    "tells_tokens",
]


_NAMES = random.Random()  # own generator: an application may seed the module's
if hasattr(os, "register_at_fork"):
    # otherwise a forked child would draw the same names as its parent
    os.register_at_fork(after_in_child=_NAMES.seed)


def new_id() -> str:
    """Return 32 random hexadecimal digits that name a request; they are no secret.

    uuid4 makes a system call for each id, which takes a twentieth of a request's time.
    """
    return f"{_NAMES.getrandbits(128):032x}"


def name_of(job_id: str, caller: Caller) -> str:
    """Return the engine's id of a request: the client's id and its key's name.

    Two keys may choose the same id, so the name keeps them apart: no key can see or abort another's
    requests. Clients may not use "@" in an id.
    """
    return f"{job_id}@{caller.name}" if caller.name else job_id


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for the engine.

    Attributes:
        text: the text; None where the client sent token ids.
        ids: the token ids.
        types: the types of the tokens; empty if all are 0.
    """

    text: str | None
    ids: list[int]
    types: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Direct:
    """A way to write to a client from any callback of the event loop, without waking the job's
    task.

    Attributes:
        is_open: a function that returns whether `push` and `add` may be called now.
        push: a function that writes a part of the answer at once.
        add: a function that writes a part together with other writes of this turn of the event
            loop.
    """

    is_open: Callable[[], bool]
    push: Callable[[bytes], None]
    add: Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Sink:
    """A receiver of outputs that saves waking the job's task for each of them.

    Attributes:
        is_open: a function that returns whether `take` may be called now; if not, the task is
            woken.
        take: a function of a prompt's index and its output; an exception in it ends the job.
    """

    is_open: Callable[[], bool]
    take: Callable[[int, RequestOutput], None]


# The sink of an answer that is sent once it is complete: it discards intermediate outputs.
DISCARD = Sink(lambda: True, lambda _, __: None)


@dataclass(eq=False, slots=True)
class Job:
    """One HTTP request that the engine serves, from its acceptance until its answer has ended.

    `Bridge.job` makes it.

    Attributes:
        job_id: the id of the answer. The engine's request id is `name_of` it; with several prompts,
            the further ones have ~1, ~2 ... appended.
        caller: the HTTP client whose request this is, as identified by its key.
        task: the asyncio task that serves the request.
        arrived: the arrival time, in seconds of time.perf_counter.
        stopped: the error with which the job was stopped from outside; None if it was not stopped.
        is_over: True once the job has ended.
        sending_since: the start time of the write in progress; None between writes.
        engine_ids: the engine's request ids, one for each prompt.
        outputs: the latest output of each prompt, by the prompt's index.
        first_token, last_token: the arrival times of the first and the newest token, in seconds of
            time.perf_counter; None and 0 before them.
        trace_headers: the trace headers of the client's request; empty if no spans are written.
        failure: the code of the error that ended the job, or its class's name; None if the client
            got its answer.
        tells_tokens: True if tokens are sent as they are drawn, see the function `tells_tokens`.
        direct: the direct way to write a stream; None before its first part is written, and for an
            answer that is no stream.
    """

    job_id: str
    caller: Caller
    task: asyncio.Task[Any]
    arrived: float
    stopped: ApiError | None = None
    is_over: bool = False
    sending_since: float | None = None
    engine_ids: list[str] = field(default_factory=list)
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    first_token: float | None = None
    last_token: float = 0.0
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    failure: str | None = None
    tells_tokens: bool = True
    direct: Direct | None = None

    @property
    def num_drawn(self) -> int:
        """Number of tokens that the engine has drawn, those of discarded samples included."""
        outputs = self.outputs.values()
        told = sum(len(c.token_ids) for output in outputs for c in output.outputs)
        return told + sum(output.num_tokens_discarded for output in outputs)

    def can_push(self) -> bool:
        """Return whether `direct` may be used now: it is there and open, and no earlier write
        waits."""
        if self.direct is None or self.sending_since is not None:
            return False
        return self.direct.is_open()

    def stop(self, error: ApiError) -> None:
        """End the job with this error by cancelling its task, unless it has ended or was
        stopped."""
        if self.stopped is None and not self.is_over:
            self.stopped = error
            self.task.cancel()


def tells_tokens(sampling: SamplingParams) -> bool:
    """Return whether tokens are sent as they are drawn.

    The results of a beam search, and the best of several samples, are known only at the end: such a
    request has no time to its first token.
    """
    return not isinstance(sampling, BeamSearchParams) and sampling.num_samples == sampling.n


def sink_of(job: Job, events: Callable[[int, RequestOutput], bytes]) -> Sink:
    """Return a sink that writes outputs to a job's client at once, by `job.direct`.

    Args:
        events: a function of a prompt's index and its output that returns the bytes to write; b""
            for none.
    """

    def take(place: int, output: RequestOutput) -> None:
        chunk = events(place, output)
        if chunk:
            assert job.direct is not None  # the sink is called only while it is open
            job.direct.push(chunk)

    return Sink(job.can_push, take)
