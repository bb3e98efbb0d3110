"""The engine: requests in, token events out. It sees ids only; text is another layer's.

step = schedule -> submit, and of the oldest unfinished step: result -> update

With overlap the next step is scheduled and submitted before the result of the last one is waited
for: while a device computes, the host schedules, takes results and makes text of them.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from tilewise.engine.batch import Batch, TokenEvent
from tilewise.engine.request import FinishReason, Request
from tilewise.engine.runner import Runner, Samples, StepHandle
from tilewise.engine.scheduler import Scheduler
from tilewise.engine.stats import SchedulerStats

__all__ = ["Engine", "EngineStats"]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot; counts and seconds since the start.

    Attributes:
        scheduler: blocks, queue, prefix cache and preemptions.
        cache_bytes_per_token: bytes of one token's keys and values in all layers.
        prefill_tokens, prefill_seconds: of the steps that computed any token of a prompt (or one
            again, after a preemption).
        decode_tokens, decode_seconds: of the steps in which each sequence computed only the token
            that it had just drawn.
        num_compilations: kernels that were compiled while requests waited for them.
    """

    scheduler: SchedulerStats
    cache_bytes_per_token: int
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    num_compilations: int = 0

    @property
    def prefill_rate(self) -> float:
        """Tokens per second of prefill steps; 0 before the first."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second of decode steps; 0 before the first."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


class Engine:
    """Runs all live requests together, one step at a time.

    Args:
        scheduler: decides what runs; its blocks must be those of the runner's storage.
        runner: the model over its paged cache.
        overlap: submit a step before the result of the one before is known.

    Example:
        >>> engine.add_request(Request("a", [1, 2, 3], SamplingParams(max_tokens=8)))
        >>> while engine.has_unfinished():
        ...     events = engine.step()
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, *, overlap: bool = False) -> None:
        self.runner = runner
        self.overlap = overlap
        self._use(scheduler)
        self._unfinished: deque[tuple[Batch, StepHandle]] = deque()
        self._tokens = {"prefill": 0, "decode": 0}
        self._seconds = {"prefill": 0.0, "decode": 0.0}

    def _use(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        scheduler.max_in_flight = 2 if self.overlap else 1

    def restart(self, scheduler: Scheduler) -> None:
        """Forget all requests, wherever they are, and go on with a new scheduler."""
        while self._unfinished:
            _, handle = self._unfinished.popleft()
            with suppress(Exception):  # whatever it was, it is for nobody
                handle.result()
        self.runner.reset()
        self._use(scheduler)

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served; nothing has changed.
        """
        self.scheduler.add(request)

    def step(self) -> list[TokenEvent]:
        """Finish one batch and return what it did; empty when no token was drawn.

        A request whose logits are not finite ends by events with finish_reason "error" that carry
        the error; nobody else notices. When the model or the sampler raises, the requests of the
        batch are aborted before the error goes on; the others are untouched and the next step is
        theirs.
        """
        started = time.perf_counter()
        try:
            self._submit()
            if not self._unfinished:
                return []
            batch, handle = self._unfinished.popleft()
            try:
                samples = handle.result()
            except BaseException:
                self.scheduler.discard(batch)
                raise
            events = self.scheduler.update(batch, samples)
        finally:
            self._let_end()
        self._record(batch, samples, time.perf_counter() - started)
        return events

    def _submit(self) -> None:
        """Begin as many steps as may be unfinished."""
        while len(self._unfinished) < self.scheduler.max_in_flight:
            batch = self.scheduler.schedule()
            if batch is None:
                return
            try:
                handle = self.runner.submit(batch)
            except BaseException:
                self.scheduler.discard(batch)
                raise
            self._unfinished.append((batch, handle))

    def _let_end(self) -> None:
        """When no request is left, wait for the steps that nobody needs, and free their blocks."""
        while self._unfinished and not self.scheduler.has_unfinished():
            batch, handle = self._unfinished.popleft()
            with suppress(Exception):  # of requests that have ended
                handle.result()
            self.scheduler.discard(batch)

    def finish(
        self,
        request_id: str,
        index: int,
        reason: FinishReason,
        stop_reason: int | str | None = None,
    ) -> bool:
        """End one sample from outside, as when its text reaches a stop string.

        Returns:
            Whether it was unfinished.
        """
        was_unfinished = self.scheduler.finish(request_id, index, reason, stop_reason)
        self._let_end()
        return was_unfinished

    def abort(self, request_id: str) -> bool:
        """End all samples of a request and free their blocks.

        Returns:
            Whether any was unfinished.
        """
        was_unfinished = self.scheduler.abort(request_id)
        self._let_end()
        return was_unfinished

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_unfinished()

    def stats(self) -> EngineStats:
        """Return a snapshot of counts and times."""
        return EngineStats(
            scheduler=self.scheduler.stats(),
            cache_bytes_per_token=self.runner.storage.spec.bytes_per_token,
            prefill_tokens=self._tokens["prefill"],
            prefill_seconds=self._seconds["prefill"],
            decode_tokens=self._tokens["decode"],
            decode_seconds=self._seconds["decode"],
            num_compilations=self.runner.num_compilations,
        )

    def _record(self, batch: Batch, samples: Samples, seconds: float) -> None:
        runs = batch.sequences
        decodes = all(len(s.token_ids) == 1 + s.num_drafts and s.num_generated > 0 for s in runs)
        kind = "decode" if decodes else "prefill"
        self._tokens[kind] += sum(map(len, samples)) if decodes else batch.num_tokens
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.record(batch, samples, seconds)
        self._seconds[kind] += seconds
