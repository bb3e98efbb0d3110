"""What a user gets back, and how token events add up to it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace

from tilewise.engine.batch import SampledToken, TokenEvent
from tilewise.engine.request import FinishReason, Request
from tilewise.engine.text import TextStream
from tilewise.engine.tokenizer import Tokenizer

__all__ = ["CompletionOutput", "Generation", "RequestMetrics", "RequestOutput"]


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a prompt.

    Attributes:
        index: which of the n samples.
        text: without special tokens, the token that ended it or a stop string; there when the
            sample has ended, empty if the model directory has no tokenizer.
        token_ids: every token drawn, the one that ended it included.
        logprobs: per token, {token id: log-probability} of the token and of the best ones asked
            for, best first; None unless SamplingParams.logprobs is given.
        cumulative_logprob: the sum over the tokens drawn; None likewise, unless samples or beams
            are ordered by it.
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        stop_reason: the stop token id or stop string that ended it; None for the model's end token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, in seconds of `time.perf_counter`; None if not yet."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its samples.

    Attributes:
        prompt: the text, None when token ids were given.
        num_cached_tokens: prompt tokens that the prefix cache had.
        finished: whether every sample has ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    finished: bool = False


class Generation:
    """Adds up the events of one request.

    Args:
        request: as given to the engine.
        prompt: its text, if it had one.
        tokenizer: None leaves the text empty.

    Attributes:
        output: complete up to the last event taken.
        samples: all that are drawn, by the index of their events; those of output.outputs, unless
            only the best of them are returned.
        error: why it failed, for whoever waits for it; None if it did not.
    """

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        self.request = request
        samples, stops = range(request.sampling.num_samples), request.sampling.stop_strings
        self.samples = [CompletionOutput(index) for index in samples]
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=list(self.samples),
            metrics=RequestMetrics(arrival_time=time.perf_counter()),
        )
        self.error: Exception | None = None
        self._unread: deque[str] = deque()
        self._streams: list[TextStream] | None = None
        if tokenizer is not None:
            self._streams = [
                TextStream(tokenizer.detokenizer(request.prompt_token_ids), stops) for _ in samples
            ]

    def take(self, event: TokenEvent) -> None:
        """Add one token, or the error that has ended a sample instead.

        When the text has reached a stop string, finish_reason of the sample is "stop" although the
        event's is not: the caller then ends the sample in the engine.
        """
        if event.token is None:
            assert event.error is not None
            self.fail(event.error)
            return
        completion = self.samples[event.index]
        if completion.finish_reason is not None:
            return  # of the same step as the token that ended it
        completion.token_ids.append(event.token.token_id)
        self._add_logprobs(completion, event.token)
        if event.finish_reason is not None:
            completion.finish_reason = event.finish_reason.value
            completion.stop_reason = event.stop_reason
        self.output.num_cached_tokens = event.num_cached_tokens
        self._add_text(completion, event, event.token.token_id)
        metrics, now = self.output.metrics, time.perf_counter()
        metrics.first_token_time = metrics.first_token_time or now
        if all(c.finish_reason is not None for c in self.samples):
            self._keep_the_best()
            self.output.finished = True
            metrics.finished_time = now

    def unread_text(self) -> str:
        """Return the text that became certain since the last call, of whichever sample.

        Another thread may be adding to it.
        """
        unread = []
        while self._unread:
            unread.append(self._unread.popleft())
        return "".join(unread)

    def abort(self) -> None:
        """Mark every sample that still runs as aborted."""
        self._end(FinishReason.ABORT)

    def fail(self, error: Exception) -> None:
        """Mark every sample that still runs as failed; the first error is the one that is kept."""
        self.error = self.error or error
        self._end(FinishReason.ERROR)

    def _end(self, reason: FinishReason) -> None:
        for completion in self.samples:
            if completion.finish_reason is None:
                completion.finish_reason = reason.value
                if self._streams is not None:
                    completion.text = self._streams[completion.index].text
        self.output.finished = True

    def _keep_the_best(self) -> None:
        """Return n of best_of samples, those with the highest cumulative log-probability."""
        sampling = self.request.sampling
        if sampling.best_of in (None, sampling.n):
            return
        best = sorted(self.samples, key=lambda c: -(c.cumulative_logprob or 0.0))
        self.output.outputs = [replace(c, index=i) for i, c in enumerate(best[: sampling.n])]

    def _add_logprobs(self, completion: CompletionOutput, token: SampledToken) -> None:
        if token.logprob is None:
            return
        if self.request.sampling.logprobs is not None:
            entry = dict(token.top_logprobs)
            entry.setdefault(token.token_id, token.logprob)
            if completion.logprobs is None:
                completion.logprobs = []
            completion.logprobs.append(entry)
        completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + token.logprob

    def _add_text(self, completion: CompletionOutput, event: TokenEvent, token_id: int) -> None:
        if self._streams is None:
            return
        stream = self._streams[event.index]
        if event.finish_reason is not FinishReason.STOP:  # a token that ends a text is not text
            self._unread.append(stream.push(token_id))
        if event.finish_reason is not None:
            self._unread.append(stream.finish())
        if stream.stop is not None:
            completion.finish_reason = FinishReason.STOP.value
            completion.stop_reason = stream.stop
        if completion.finish_reason is not None:
            completion.text = stream.text
