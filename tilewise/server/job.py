"""One request of a client, while it is in the server, and how its answer is written as it comes."""

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


_NAMES = random.Random()  # of its own: somebody may seed the module's
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_NAMES.seed)  # else parent and child give the same names


def new_id() -> str:
    """Return 32 hexadecimal digits that name a request; they are no secret.

    Those of uuid4 ask the system for each, which takes a twentieth of what a request takes.
    """
    return f"{_NAMES.getrandbits(128):032x}"


def name_of(job_id: str, caller: Caller) -> str:
    """Return what a request is called within: clients name theirs, and two keys may choose alike.

    So no key sees, or takes away, the ids of another. No client may ask for an "@".
    """
    return f"{job_id}@{caller.name}" if caller.name else job_id


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine takes it; text is None when ids were given."""

    text: str | None
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Direct:
    """Writes to a client from wherever the event loop is, without waking the job's task.

    Attributes:
        is_open: whether it may be called now.
        push: writes a part of the answer at once.
        add: writes one together with what else is written in this turn of the event loop.
    """

    is_open: Callable[[], bool]
    push: Callable[[bytes], None]
    add: Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Sink:
    """Takes outputs for a task that would have to be woken for each of them.

    Attributes:
        is_open: whether it takes one now; if not, the task is woken.
        take: takes an output of the prompt of this number; what it raises ends the job.
    """

    is_open: Callable[[], bool]
    take: Callable[[int, RequestOutput], None]


# Of an answer that is told when it is whole.
DISCARD = Sink(lambda: True, lambda _, __: None)


@dataclass(eq=False, slots=True)
class Job:
    """One request of a client.

    Attributes:
        job_id: of its answer. The engine's request id is `name_of`, followed by ~1, ~2 ... where it
            has more prompts.
        caller: for whom.
        task: that runs it.
        arrived: seconds of time.perf_counter.
        stopped: why it was stopped from outside; None if it was not.
        sending_since: when the write began that has not ended; None between writes.
        trace_headers: of the client's trace, where spans are written.
        failure: what the client was told in place of an answer; None if it got one.
        tells_tokens: see the function.
        direct: how a stream may be written to; None before its first part is, and of an answer
            that is no stream.
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
        """Tokens that the engine has drawn for it, those of samples that are not told included."""
        outputs = self.outputs.values()
        told = sum(len(c.token_ids) for output in outputs for c in output.outputs)
        return told + sum(output.num_tokens_discarded for output in outputs)

    def can_push(self) -> bool:
        """Whether `direct` may be written to now: not before a part that waits for its client."""
        if self.direct is None or self.sending_since is not None:
            return False
        return self.direct.is_open()

    def stop(self, error: ApiError) -> None:
        """End it with this error, unless it has ended."""
        if self.stopped is None and not self.is_over:
            self.stopped = error
            self.task.cancel()


def tells_tokens(sampling: SamplingParams) -> bool:
    """Whether tokens are told as they are drawn.

    Of a search by beams, and of samples of which the best are kept, the first one comes with the
    last: such a request has no time to its first token.
    """
    return not isinstance(sampling, BeamSearchParams) and sampling.num_samples == sampling.n


def sink_of(job: Job, events: Callable[[int, RequestOutput], bytes]) -> Sink:
    """Return a sink that pushes what `events` makes of an output to the job's client."""

    def take(place: int, output: RequestOutput) -> None:
        chunk = events(place, output)
        if chunk:
            assert job.direct is not None  # it is open
            job.direct.push(chunk)

    return Sink(job.can_push, take)
