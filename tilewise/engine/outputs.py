"""What a user gets back, and how token events add up to it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from tilewise.engine.batch import SampledToken, TokenEvent
from tilewise.engine.record.trace import Account
from tilewise.engine.request import FinishReason, Request
from tilewise.engine.text import Detokenizer, StopAutomaton, TextStream
from tilewise.engine.tokenizer import Tokenizer

__all__ = ["CompletionOutput", "Generation", "RequestMetrics", "RequestOutput"]


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a prompt.

    Attributes:
        index: the number of the sample, 0 ... n - 1.
        text: the generated text, complete once the sample has ended (`Generation.snapshot` has it
            before); without special tokens and without the token or stop string that ended it,
            unless they are asked for; "" if the model directory has no tokenizer.
        token_ids: every token drawn, the one that ended it included.
        logprobs: per token, {token id: log-probability} of the token and of the best ones asked
            for, best first; None unless SamplingParams.logprobs is given.
        cumulative_logprob: the sum of the log-probabilities of the tokens drawn; None without
            logprobs, unless samples or beams are ordered by it.
        finish_reason: "stop", "length", "abort", "deadline" or "error"; None while it runs.
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
    """Times of events of a request, in seconds of `time.perf_counter`; None if not yet.

    scheduled_time, at which the request first began to run, is known when the request has ended.
    """

    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its samples.

    Attributes:
        prompt: the text of the prompt; None when token ids were given.
        num_cached_tokens: prompt tokens that the prefix cache had.
        finished: True if every sample has ended.
        prompt_logprobs: per prompt token, as `CompletionOutput.logprobs`; the first one has None.
            Without SamplingParams.prompt_logprobs, and until the first token is drawn, None.
        prompt_state: the pooled hidden states of the prompt, where they were asked for; else None.
        num_preemptions: the number of times that a sample lost its blocks; known when the request
            has ended.
        num_tokens_lost: tokens that were computed twice because blocks were lost; known when the
            request has ended.
        num_tokens_discarded: the number of drawn tokens of samples that are not among the best.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    finished: bool = False
    prompt_logprobs: list[dict[int, float] | None] | None = None
    prompt_state: tuple[float, ...] | None = None
    num_preemptions: int = 0
    num_tokens_lost: int = 0
    num_tokens_discarded: int = 0


class Generation:
    """Adds up the events of one request, on the engine's thread; others read it.

    Args:
        request: the request, as given to the engine.
        prompt: the text of the prompt, if there was one.
        tokenizer: the tokenizer that makes text of the tokens; None leaves the text empty.

    Attributes:
        output: the output, complete up to the last event taken; another thread reads `snapshot()`
            instead until the output has finished.
        samples: all samples that are drawn, by the index of their events; output.outputs has the
            same, until only the n best are kept there.
        error: the exception with which the request failed, for the caller that waits; None if it
            did not.
        on_change: a function that is called on the engine's thread after each step that has changed
            the output, and when it has finished. What it raises ends the request.
        on_end: a function that is called on the engine's thread, once, when the output has
            finished.
    """

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        self.request = request
        sampling = request.sampling
        self.samples = [CompletionOutput(index) for index in range(sampling.num_samples)]
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=list(self.samples),
            metrics=RequestMetrics(arrival_time=time.perf_counter()),
        )
        self.error: BaseException | None = None
        self.on_change: Callable[[], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self._num_running = len(self.samples)
        self._lock = threading.Lock()  # around what take() changes piece by piece
        self._unread: deque[str] = deque()
        self._streams: list[TextStream] | None = None
        # Of the only sample, where no text is made of it.
        self._only: list[int] = []
        if tokenizer is None and len(self.samples) == 1:
            self._only = self.samples[0].token_ids
        if tokenizer is not None:
            stops = StopAutomaton(sampling.stop_strings)
            self._streams = [
                TextStream(
                    self._detokenizer(tokenizer),
                    stops,
                    includes_stop=sampling.include_stop_str_in_output,
                    min_tokens=sampling.min_tokens,
                    reasoning=sampling.reasoning,
                )
                for _ in self.samples
            ]

    def _detokenizer(self, tokenizer: Tokenizer) -> Detokenizer:
        prompt = self.request.prompt_token_ids
        if self.request.sampling.skip_special_tokens:
            return tokenizer.detokenizer(prompt)
        return tokenizer.detokenizer(prompt, skip_special_tokens=False)

    def take(self, event: TokenEvent) -> None:
        """Add one token, or the error that has ended a sample instead.

        When the text has reached a stop string, finish_reason of the sample is "stop" although the
        event's is not: the caller then ends the sample in the engine.
        """
        with self._lock:
            self._take(event, time.perf_counter())

    def adds(self, token_id: int) -> bool:
        """Add a token to the only sample, if nothing else is to be done for its event and no text
        is made.

        So it is for most tokens of most steps; the first token of a request is none of them.

        Returns:
            Whether the token was added; if not, nothing has changed.
        """
        tokens = self._only
        if not tokens or self.output.finished:  # more is told with the first one
            return False
        if self.on_change is None:  # it is read at its end
            tokens.append(token_id)
        else:
            with self._lock:
                tokens.append(token_id)
        return True

    def take_all(self, events: Sequence[TokenEvent]) -> list[TokenEvent]:
        """Add the events of one step for any samples of the request, each as `take` does.

        Returns:
            The events that should end a sample: its text has reached a stop string, while the
                engine would go on with it.
        """
        stopped: list[TokenEvent] = []
        with self._lock:
            now, samples, has_text = time.perf_counter(), self.samples, self._streams is not None
            for event in events:
                token, completion = event.token, samples[event.index]
                if (
                    token is not None
                    and event.finish_reason is None
                    and not has_text
                    and completion.finish_reason is None
                    and token.logprob is None
                    and token.prompt_logprobs is None
                    and token.prompt_state is None
                ):  # the usual case of a sample without text, thousands of times a step
                    completion.token_ids.append(token.token_id)
                    continue
                self._take(event, now)
                if event.finish_reason is None and completion.finish_reason == FinishReason.STOP:
                    stopped.append(event)
                if self.output.finished:
                    break
            if events[0].token is not None:
                metrics = self.output.metrics
                metrics.first_token_time = metrics.first_token_time or now
            self.output.num_cached_tokens = events[0].num_cached_tokens
        return stopped

    def _take(self, event: TokenEvent, now: float) -> None:
        if event.error is not None:
            self.fail(event.error)
            return
        completion = self.samples[event.index]
        if completion.finish_reason is not None:
            return  # of the same step as the token that ended it
        metrics = self.output.metrics
        if event.token is not None:  # else the sample has ended by its deadline
            completion.token_ids.append(event.token.token_id)
            self._add_logprobs(completion, event.token)
            if event.token.prompt_logprobs is not None:
                scores = event.token.prompt_logprobs
                self.output.prompt_logprobs = [None, *({**dict(t), i: p} for i, p, t in scores)]
            if event.token.prompt_state is not None:
                self.output.prompt_state = event.token.prompt_state
            metrics.first_token_time = metrics.first_token_time or now
        if event.finish_reason is not None:
            completion.finish_reason = event.finish_reason.value
            completion.stop_reason = event.stop_reason
        self.output.num_cached_tokens = event.num_cached_tokens
        self._add_text(completion, event)
        if completion.finish_reason is not None:
            self._num_running -= 1
        if self._num_running == 0:
            self._keep_the_best()
            self.output.finished = True
            metrics.finished_time = now

    def unread_text(self) -> str:
        """Return the text that became certain since the last call, of all samples in order of the
        events.

        Another thread may be adding to it.
        """
        unread = []
        while self._unread:
            unread.append(self._unread.popleft())
        return "".join(unread)

    def snapshot(self) -> RequestOutput:
        """Return a copy of the output that no step changes, with each sample's text so far.

        Of best_of samples nothing is shown before it is known which are the best.
        """
        with self._lock:
            if self._chooses and not self.output.finished:
                hidden = [CompletionOutput(index) for index in range(self.request.sampling.n)]
                return replace(self.output, outputs=hidden, metrics=replace(self.output.metrics))
            return self._copied()

    def show(self, reader: Callable[[RequestOutput], bool], num_seen: int) -> int:
        """Call `reader` with the output itself, not a copy, if tokens are new since the last call.

        The engine's thread waits while `reader` runs, and changes the output afterwards. An output
        that has ended is not shown: `snapshot` has it. Nor are samples of best_of, before the end.

        Args:
            reader: a function that returns whether it has read the output.
            num_seen: the number of tokens, of all samples, that were read before.

        Returns:
            The number of tokens, of all samples, that have been read now; -1 if the output has
            ended, or `reader` has not read it.
        """
        with self._lock:
            output = self.output
            if output.finished or self.error is not None:
                return -1
            if self._chooses:
                return num_seen
            num_tokens = 0
            for completion in output.outputs:
                num_tokens += len(completion.token_ids)
                if completion.finish_reason is None and self._streams is not None:
                    completion.text = self._streams[completion.index].text
            if num_tokens <= num_seen:
                return num_seen
            return num_tokens if reader(output) else -1

    def _copied(self) -> RequestOutput:
        # Of each stream after each step: dataclasses.replace would take five times as long.
        output, times = self.output, self.output.metrics
        samples = [
            CompletionOutput(
                c.index,
                self._text(c),
                c.token_ids.copy(),
                None if c.logprobs is None else c.logprobs.copy(),
                c.cumulative_logprob,
                c.finish_reason,
                c.stop_reason,
            )
            for c in output.outputs
        ]
        return RequestOutput(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            samples,
            RequestMetrics(
                times.arrival_time,
                times.scheduled_time,
                times.first_token_time,
                times.finished_time,
            ),
            output.num_cached_tokens,
            output.finished,
            output.prompt_logprobs,
            output.prompt_state,
            output.num_preemptions,
            output.num_tokens_lost,
        )

    def _text(self, completion: CompletionOutput) -> str:
        if completion.finish_reason is not None or self._streams is None:
            return completion.text
        return self._streams[completion.index].text

    def settle(self, account: Account | None) -> None:
        """Copy the preemptions, lost tokens and admission time of an ended request to its output.

        Args:
            account: the request's account; None leaves the output as it is.
        """
        if account is not None:
            self.output.num_preemptions = account.num_preemptions
            self.output.num_tokens_lost = account.num_lost
            self.output.metrics.scheduled_time = account.admitted

    def abort(self) -> None:
        """Mark every sample that still runs as aborted, and so finish the output."""
        self._end(FinishReason.ABORT)

    def fail(self, error: BaseException) -> None:
        """Mark every sample that still runs as failed, and so finish the output; the first error is
        kept."""
        self.error = self.error or error
        self._end(FinishReason.ERROR)

    def _end(self, reason: FinishReason) -> None:
        for completion in self.samples:
            if completion.finish_reason is None:
                completion.finish_reason = reason.value
                if self._streams is not None:
                    completion.text = self._streams[completion.index].text
        self._num_running = 0
        if not self.output.finished:
            self._keep_the_best()
            self.output.finished = True
            self.output.metrics.finished_time = time.perf_counter()

    @property
    def _chooses(self) -> bool:
        sampling = self.request.sampling
        return sampling.best_of not in (None, sampling.n)

    def _keep_the_best(self) -> None:
        """Leave in the output the n of best_of samples with the highest cumulative log-probability.

        They are copies, numbered from the best on. Nothing changes unless best_of is given and not
        n.
        """
        if not self._chooses:
            return

        def loss(sample: CompletionOutput) -> float:  # one without a token comes last
            return inf if sample.cumulative_logprob is None else -sample.cumulative_logprob

        ranked = sorted(self.samples, key=loss)
        best, others = ranked[: self.request.sampling.n], ranked[self.request.sampling.n :]
        self.output.num_tokens_discarded = sum(len(sample.token_ids) for sample in others)
        self.output.outputs = [replace(c, index=i) for i, c in enumerate(best)]

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

    def _add_text(self, completion: CompletionOutput, event: TokenEvent) -> None:
        if self._streams is None:
            return
        stream = self._streams[event.index]
        # A token that ends a text is not text, unless it is asked for.
        keeps = self.request.sampling.include_stop_str_in_output
        if event.token is not None and (event.finish_reason is not FinishReason.STOP or keeps):
            self._unread.append(stream.push(event.token.token_id))
        if event.finish_reason is not None:
            self._unread.append(stream.finish())
        if stream.stop is not None:
            completion.finish_reason = FinishReason.STOP.value
            completion.stop_reason = stream.stop
        if completion.finish_reason is not None:
            completion.text = stream.text
