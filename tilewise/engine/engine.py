"""The engine: requests in, token events out. It sees ids only; text is another layer's.

step = schedule -> inputs -> forward -> sample -> update
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tilewise.engine.batch import Batch, SampledToken, TokenEvent
from tilewise.engine.inputs import build_inputs
from tilewise.engine.request import FinishReason, Request
from tilewise.engine.runner import ModelRunner
from tilewise.engine.sampler import sample
from tilewise.engine.scheduler import Scheduler
from tilewise.engine.stats import SchedulerStats

__all__ = ["Engine", "EngineStats"]

Sampler = Callable[[Tensor, Batch], list[list[SampledToken]]]


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
    """

    scheduler: SchedulerStats
    cache_bytes_per_token: int
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

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
        sampler: logits to tokens; see `tilewise.engine.sampler.sample`.

    Example:
        >>> engine.add_request(Request("a", [1, 2, 3], SamplingParams(max_tokens=8)))
        >>> while engine.has_unfinished():
        ...     events = engine.step()
    """

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, *, sampler: Sampler = sample
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.sampler = sampler
        self._tokens = {"prefill": 0, "decode": 0}
        self._seconds = {"prefill": 0.0, "decode": 0.0}

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served; nothing has changed.
        """
        self.scheduler.add(request)

    def step(self) -> list[TokenEvent]:
        """Compute one batch and return what it did; empty when no token was drawn.

        When the model or the sampler fails, the requests of the batch are aborted before the error
        goes on; the others are untouched and the next step is theirs.
        """
        started = time.perf_counter()
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        try:
            inputs = build_inputs(
                batch,
                self.runner.block_size,
                self.runner.device,
                sharing_tokens=self.runner.sharing_tokens,
            )
            logits = self.runner.forward(inputs)
            samples = self.sampler(logits, batch)
        except BaseException:
            self.scheduler.discard(batch)
            raise
        events = self.scheduler.update(batch, samples)
        self._record(batch, time.perf_counter() - started)
        return events

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
        return self.scheduler.finish(request_id, index, reason, stop_reason)

    def abort(self, request_id: str) -> bool:
        """End all samples of a request and free their blocks.

        Returns:
            Whether any was unfinished.
        """
        return self.scheduler.abort(request_id)

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
        )

    def _record(self, batch: Batch, seconds: float) -> None:
        decodes = all(len(s.token_ids) == 1 and s.num_generated > 0 for s in batch.sequences)
        kind = "decode" if decodes else "prefill"
        self._tokens[kind] += batch.num_tokens
        self._seconds[kind] += seconds
