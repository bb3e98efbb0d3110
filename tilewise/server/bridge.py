"""The bridge between HTTP and the engine: one `Job` for each request, from acceptance to end.

The bridge tokenises text beside the event loop, waits in the queue, runs the engine's generator,
and stops it when the client leaves, reads too slowly, or the server shuts down. It knows neither
HTTP nor the format of answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol, TypeVar, Unpack

from tilewise.engine.config import Terms
from tilewise.engine.outputs import RequestMetrics, RequestOutput
from tilewise.engine.request import Request, SamplingParams
from tilewise.engine.steps.embedding import EMBEDDING_PARAMS, EmbeddingOutput
from tilewise.engine.tokenizer import Tokenizer
from tilewise.errors import QueueFullError, RequestError
from tilewise.server.accounts import account
from tilewise.server.errors import ApiError, ClientLeft, invalid
from tilewise.server.fairness import Pace
from tilewise.server.job import Job, Prompt, Sink, name_of, new_id, tells_tokens
from tilewise.server.keys import Caller
from tilewise.server.limits import Queue, RequestLimits, Ticket, refuse_long, refuse_uncountable
from tilewise.server.merged import begun_in_turn, close, merged
from tilewise.server.metrics import Metrics
from tilewise.server.questions import EngineSilent, Questions
from tilewise.server.spans import Spans
from tilewise.server.usage import Ledger

__all__ = ["AsyncEngine", "Bridge", "Job", "Loop", "Prompt"]

T = TypeVar("T")
LOG = logging.getLogger("tilewise.server")
# Characters of a text that the event loop tokenises itself: 0.2 ms of work, less than handing the
# text to a thread and back costs on a busy machine.
SHORT_TEXT = 512
# separates a request id from the number of its prompt; clients may not use it in ids
NEXT_PROMPT = "~"
SWEEP_S = 0.25  # seconds between two checks for slow readers


class AsyncEngine(Protocol):
    """The attributes and methods of `tilewise.engine.async_llm.AsyncLLM` that the server needs.

    `RemoteEngine` has them, too, for an engine in another process.
    """

    tokenizer: Tokenizer | None
    config: Any

    @property
    def limits(self) -> Any:
        """Return the sizes that can be served, see `tilewise.engine.tables.admission.Limits`."""
        ...

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        sink: Callable[[RequestOutput], bool] | None = None,
        **terms: Unpack[Terms],
    ) -> AsyncIterator[RequestOutput]:
        """Yield one prompt's output, with all text so far, each time it has grown.

        Args:
            prompt: the text or token ids.
            sampling_params: the sampling parameters; None for the defaults.
            request_id: a unique name; None makes one.
            sink: a function that is called with each output but the last; while it returns True,
                the output is not yielded. None yields all.
            terms: the fields of `RequestTerms`.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request of any caller with finish_reason "abort"; unknown ids are ignored."""
        ...

    def explain(self, request_id: str) -> dict[str, Any]:
        """Return the state of a request, why it waits and its cost so far, see
        `Engine.explain`."""
        ...

    def stats(self) -> Any:
        """Return the engine's counters, see `EngineStats`."""
        ...

    async def aclose(self) -> None:
        """End the requests that were made through this object, and wait until the engine has
        dropped them; the engine itself goes on."""
        ...


class Loop(Protocol):
    """The methods of `tilewise.engine.loop.EngineLoop`, the thread that runs the engine's steps,
    that the server needs; `RemoteEngine` has them, too."""

    @property
    def is_alive(self) -> bool:
        """Return whether the loop accepts requests."""
        ...

    @property
    def last_step_time(self) -> float | None:
        """Return when the last step ended, in seconds of time.monotonic(); None before the
        first."""
        ...

    def pause(self) -> None:
        """Let no further step begin, and return when none runs; requests are still accepted.

        Raises:
            EngineClosedError: the loop has ended.
        """
        ...

    def resume(self) -> None:
        """Let steps begin again after pause(); nothing changes without one.

        Raises:
            EngineClosedError: the loop has ended.
        """
        ...


class Bridge:
    """Carry the jobs of all HTTP requests to the engine and its outputs back; a server has one.

    It holds what the routes share: the queue, the limits, the metrics, the ledger of the keys and
    the jobs that have not ended.

    Args:
        llm: the asynchronous engine.
        loop: the thread that runs the engine's steps.
        queue: the queue, which bounds the requests and tokens that wait.
        limits: the largest sizes of one request.
        metrics: the metrics to update.
        slow_reader_s: seconds that one write may wait for its client before the client is dropped.
        stall_s: seconds without a step, while there is work, after which the engine is unhealthy.
        num_threads: number of threads that tokenise long texts and render templates.
        max_pending: number of tasks that may wait for these threads; more are refused with 503.
        spans: the writer of the requests' trace spans; None writes none.
    """

    def __init__(
        self,
        llm: AsyncEngine,
        loop: Loop,
        *,
        queue: Queue,
        limits: RequestLimits,
        metrics: Metrics,
        slow_reader_s: float = 10.0,
        stall_s: float = 30.0,
        num_threads: int = 2,
        max_pending: int = 256,
        spans: Spans | None = None,
    ) -> None:
        self.llm = llm
        self.loop = loop
        self.queue = queue
        self.limits = limits
        self.metrics = metrics
        self.ledger = Ledger()
        self.spans = spans
        self.questions = Questions()
        self.jobs: dict[str, Job] = {}
        self.is_draining = False
        self.is_paused = False
        self.slow_reader_s = slow_reader_s
        self._stall_s = stall_s
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tilewise-text")
        self._pending = 0
        self._max_pending = max_pending
        self._sweeper: asyncio.Task[None] | None = None
        self._last_output = time.monotonic()

    @property
    def max_model_len(self) -> int:
        """The largest number of tokens of a sequence, prompt and answer together."""
        return int(self.llm.limits.max_model_len)

    @property
    def max_prompt_len(self) -> int:
        """The largest number of tokens of a prompt that the engine takes; the server or a key may
        allow fewer."""
        return int(self.llm.limits.max_prompt_len)

    def trouble(self) -> str | None:
        """Return a sentence that says why the engine is unhealthy, or None if it is healthy.

        It is unhealthy if its thread has ended, or if it has work, is not paused, and no step has
        ended for `stall_s` seconds.
        """
        if not self.loop.is_alive:
            return "the engine's thread has ended"
        if self.is_paused or not any(job.engine_ids for job in self.jobs.values()):
            return None
        told = self.loop.last_step_time
        last = self._last_output if told is None else max(told, self._last_output)
        # Work that has just arrived has had no step yet: its waiting time counts from its arrival.
        oldest = min(job.arrived for job in self.jobs.values() if job.engine_ids)
        silent = min(time.monotonic() - last, time.perf_counter() - oldest)
        if silent > self._stall_s:
            return f"requests are there and no step has ended for {silent:.0f} s"
        return None

    async def pause(self) -> None:
        """Let no further step of the engine begin, and return when none runs; `trouble` expects no
        steps from now on.

        Raises:
            EngineSilent: the engine has not answered in time; it does not count as paused.
            EngineClosedError: the engine's loop has ended.
        """
        self.is_paused = True
        try:
            await self.questions.ask(self.loop.pause)
        except BaseException:
            self.is_paused = False
            raise

    async def resume(self) -> None:
        """Let steps begin again after pause(); `trouble` expects steps from now on.

        Raises:
            EngineSilent: the engine has not answered in time; steps are expected all the same.
            EngineClosedError: the engine's loop has ended.
        """
        self.is_paused = False
        self._last_output = time.monotonic()
        await self.questions.ask(self.loop.resume)

    @contextlib.asynccontextmanager
    async def job(
        self,
        kind: str,
        caller: Caller,
        asked_id: str | None,
        receive: Callable[[], Awaitable[Any]],
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[Job]:
        """Make a job for the block of an `async with`; the job ends with the block.

        The block runs in the current task, which is cancelled when the client leaves or the job is
        stopped. At the end the job is recorded by `account`.

        Args:
            kind: the prefix of the job's id, such as "chatcmpl".
            caller: the owner of the key that came with the request.
            asked_id: the rest of the job's id; None draws one at random.
            receive: the request's ASGI function `receive`, after the body has been read.
            trace_headers: the client's trace headers, see `Job`.

        Raises:
            ApiError: 503 while draining, 400 for an id that is in use, or the error that stopped
                the job.
        """
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", retry_after_s=30)
        job_id = f"{kind}-{asked_id or new_id()}"
        name = name_of(job_id, caller)
        if name in self.jobs:
            raise invalid(
                f"request_id must be of no request that runs, got {asked_id}", "request_id"
            )
        task = asyncio.current_task()
        assert task is not None
        job = Job(job_id, caller, task, time.perf_counter(), trace_headers=trace_headers or {})
        self.jobs[name] = job
        self.metrics.http.inc()
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        listener = asyncio.get_running_loop().create_task(_listen(receive, job))
        failure: BaseException | None = None
        try:
            yield job
        except asyncio.CancelledError as error:
            failure = job.stopped or error
            if job.stopped is None:
                raise
            task.uncancel()
            raise job.stopped from None
        except BaseException as error:
            failure = error
            raise
        finally:
            job.is_over = True
            listener.cancel()
            del self.jobs[name]
            self.metrics.http.dec()
            account(job, failure, metrics=self.metrics, ledger=self.ledger, spans=self.spans)

    async def encode(
        self,
        text: str,
        *,
        adds_special_tokens: bool = True,
        most: int | None = None,
        kept: int | None = None,
    ) -> list[int]:
        """Return the token ids of a text, computed on a thread if the text is long.

        Args:
            text: the text to tokenise.
            adds_special_tokens: True adds the tokenizer's special tokens; with `kept` they are
                always added.
            most: the number of tokens, roughly, from which on the text is refused before it is
                tokenised; None if the text is only counted or truncated, for a far larger bound.
            kept: the number of ids to which the text is cut, special tokens included: its
                beginning is kept. None cuts nothing.

        Raises:
            ApiError: 400, the model has no tokenizer, or the text is not Unicode or far too long;
                503, too many texts are waiting for the threads.
        """
        tokenizer = self.llm.tokenizer
        if tokenizer is None:
            raise ApiError(400, "prompt must be token ids for a model without tokenizer.json")

        def encoded() -> list[int]:
            if kept is not None:
                return tokenizer.encode_cut(text, kept)
            return tokenizer.encode(text, adds_special_tokens=adds_special_tokens)

        return await self.tokenised([text], encoded, most)

    async def tokenised(
        self, texts: Sequence[str], encoded: Callable[[], T], most: int | None = None
    ) -> T:
        """Return `encoded()`, computed on a thread beside the event loop if the texts are long.

        Args:
            texts: the texts that `encoded` tokenises.
            encoded: a function of no arguments.
            most: the number of tokens, roughly, from which on a text is refused before it is
                tokenised; None if the texts are only counted or truncated, for the larger bound of
                `RequestLimits.longest_count`.

        Raises:
            ApiError: 400, the model has no tokenizer, a text is not Unicode or far too long, or
                `encoded` raised RequestError; 503, too many texts are waiting for the threads.
        """
        tokenizer = self.llm.tokenizer
        if tokenizer is None:
            raise ApiError(400, "texts must be of a model with tokenizer.json")
        has_left = False

        def count(part: str) -> int:
            if has_left:
                raise ClientLeft
            return len(tokenizer.encode_plain(part))

        def checked() -> T:
            bound = self.limits.longest_count(self.max_model_len) if most is None else most
            refuse = refuse_uncountable if most is None else refuse_long
            for text in texts:
                refuse(text, bound, count)
            return encoded()

        is_short = sum(map(len, texts)) <= SHORT_TEXT
        try:
            return checked() if is_short else await self.in_thread(checked)
        except RequestError as error:
            raise invalid(str(error), "prompt") from None
        except asyncio.CancelledError:
            has_left = True  # the thread stops after its current piece of a long text
            raise

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Return the result of `work()`, run on one of the bridge's threads beside the event loop.

        Raises:
            ApiError: 503, too many tasks are waiting for the threads.
        """
        if self._pending >= self._max_pending:
            raise ApiError(
                503,
                f"texts that wait to be tokenised must be at most {self._max_pending}, got "
                f"{self._pending + 1}",
                code="queue_full",
                retry_after_s=1,
            )
        self._pending += 1
        running = asyncio.get_running_loop()
        future = self._pool.submit(work)

        def one_less() -> None:
            self._pending -= 1

        def ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended before the thread
                running.call_soon_threadsafe(one_less)

        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def check_prompt(self, caller: Caller, ids: Sequence[int], sampling: SamplingParams) -> None:
        """Refuse a prompt that is empty, has an id outside the vocabulary, or is too long for the
        model, the server or the key.

        Args:
            caller: the key's owner, with its limits.
            ids: the prompt's tokens.
            sampling: the sampling parameters, for max_tokens.

        Raises:
            ApiError: 400, with the limit and the value.
        """
        bounds = [
            (self.max_prompt_len, self.llm.limits.why_prompt_len),
            (self.limits.max_prompt_tokens, "as this server takes"),
            (caller.max_prompt_tokens, "as this key may ask"),
        ]
        for bound, why in bounds:
            if bound is not None and len(ids) > bound:
                raise invalid(
                    f"prompt must be at most {bound:,} tokens, {why}, got {len(ids):,}",
                    "prompt",
                    code="context_length_exceeded",
                )
        if not ids:
            raise invalid("prompt must hold at least 1 token, got 0", "prompt")
        vocab_size = self.llm.config.vocab_size
        if max(ids) >= vocab_size:
            raise invalid(f"prompt token ids must be below vocab_size {vocab_size}, got {max(ids)}")
        try:
            self.llm.limits.check(Request("", list(ids), _length_alone(sampling.max_tokens)))
        except RequestError as error:
            raise invalid(str(error)) from None

    async def _check_prompts(
        self, job: Job, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> None:
        pace = Pace()
        for prompt in prompts:
            self.check_prompt(job.caller, prompt.ids, sampling)
            await pace.rest()

    async def run(
        self,
        job: Job,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        user: str = "",
        cache_salt: str | None = None,
        adapter: str = "",
        priority: int = 0,
        timeout: float | None = None,
        most: int | None = None,
        sink: Sink | None = None,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Generate answers to the prompts of a job; yield (index of a prompt, its output so far)
        until all prompts have finished.

        The prompts are checked and get places in the queue first. `job.outputs` has the newest
        output of each prompt, those that `sink` takes included.

        Args:
            job: the HTTP request.
            prompts: the prompts, which run at the same time.
            sampling: the sampling parameters of all prompts.
            user: the client's name of its user, for fair shares if no keys are set.
            cache_salt: the client's part of the namespace of the prefix cache.
            adapter: name of the adapter that the engine uses; "" for none.
            priority: the request's priority, lower runs earlier; a key's own priority is added.
            timeout: seconds that the request may take; None takes the server's limit.
            most: number of samples of each prompt that are kept, the first ones; None keeps all.
            sink: the receiver of all but the last output of each prompt, while it is open; None
                yields all.

        Raises:
            ApiError: the reason why the job was refused or ended.
        """
        await self._check_prompts(job, prompts, sampling)
        asked = (user, cache_salt, adapter, priority, timeout)
        with self._entered(job, prompts, sampling, *asked) as (ticket, keywords):
            job.tells_tokens = tells_tokens(sampling)
            self.metrics.params_n.observe(sampling.n)
            if sampling.max_tokens is not None:
                self.metrics.params_max_tokens.observe(sampling.max_tokens)
            outputs = [
                self.llm.generate(
                    _as_given(prompt),
                    sampling,
                    request_id=request_id,
                    sink=None if sink is None else self._sink(job, ticket, place, most, sink),
                    **keywords,
                )
                for place, (prompt, request_id) in enumerate(
                    zip(prompts, job.engine_ids, strict=True)
                )
            ]
            # the usual case: merging generators would add a cost to each token
            if len(outputs) == 1:
                try:
                    async for output in outputs[0]:
                        yield 0, self._observe(job, ticket, 0, output, most)
                finally:
                    await close(outputs[0])
                return
            async with contextlib.aclosing(merged(outputs)) as news:
                async for place, output in news:
                    yield place, self._observe(job, ticket, place, output, most)

    async def embed(
        self,
        job: Job,
        prompts: Sequence[Prompt],
        pooling: str,
        *,
        user: str = "",
        cache_salt: str | None = None,
        adapter: str = "",
        priority: int = 0,
        timeout: float | None = None,
    ) -> list[EmbeddingOutput]:
        """Return the embeddings of the prompts, in the order of the prompts.

        Args:
            job: the HTTP request; its outputs become the prompts without generated tokens.
            prompts: the prompts to embed.
            pooling: the name of the pooling, one of `embedding.POOLINGS`.
            user, cache_salt, adapter, priority, timeout: as of `run`.

        Raises:
            ApiError: the reason why the job was refused or ended; 504 at its deadline.
        """
        embed: Any = self.llm.embed  # type: ignore[attr-defined]
        await self._check_prompts(job, prompts, EMBEDDING_PARAMS)
        asked = (user, cache_salt, adapter, priority, timeout)
        with self._entered(job, prompts, EMBEDDING_PARAMS, *asked) as (ticket, keywords):
            work = (
                embed(_as_given(prompt), pooling=pooling, request_id=request_id, **keywords)
                for prompt, request_id in zip(prompts, job.engine_ids, strict=True)
            )
            tasks: list[asyncio.Task[EmbeddingOutput]] = []
            try:
                await begun_in_turn(work, tasks)
                found = await asyncio.gather(*tasks)
            except TimeoutError:
                message = "the deadline has passed before the prompts were computed"
                raise ApiError(504, message) from None
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            self._last_output = time.monotonic()
            self.queue.begin(ticket)
            for place, output in enumerate(found):
                job.outputs[place] = RequestOutput(
                    output.request_id,
                    None,
                    output.prompt_token_ids,
                    [],
                    RequestMetrics(job.arrived),
                    output.num_cached_tokens,
                    finished=True,
                )
            return found

    @contextlib.contextmanager
    def _entered(
        self,
        job: Job,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        user: str,
        cache_salt: str | None,
        adapter: str,
        priority: int,
        timeout: float | None,
    ) -> Iterator[tuple[Ticket, Terms]]:
        """Keep a place in the queue for the block of a `with`; yield its ticket and the terms with
        which the engine is asked.

        `job.engine_ids` is set to one id per prompt. Errors of the engine in the block become
        ApiError: 503 for a full queue, 400 for RequestError, 500 for others. At the end the drawn
        tokens are counted against the key's tokens a minute.

        Args:
            job: the HTTP request.
            prompts, sampling: the engine's prompts and their sampling parameters.
            user, cache_salt, adapter, priority, timeout: as of `run`.
        """
        caller = job.caller
        tokens = sum(len(prompt.ids) for prompt in prompts)
        self.limits.check_told(sampling, tokens)
        ticket = self.queue.enter(caller, tokens, len(prompts))
        name = name_of(job.job_id, caller)
        job.engine_ids = [f"{name}{NEXT_PROMPT}{i}" if i else name for i in range(len(prompts))]
        keywords: Terms = {
            "user": caller.name or user,
            "cache_salt": caller.salt(cache_salt),
            # Requests of one key may yield to each other, but may not push other keys' requests
            # back.
            "priority": priority if not caller.name else caller.priority + max(0, priority),
            "deadline_s": self.limits.deadline_s(timeout),
        }
        if adapter:
            keywords["lora_request"] = adapter
        try:
            yield ticket, keywords
        except QueueFullError as error:  # A full queue of the engine is no fault of the engine.
            raise ApiError(503, str(error), code="queue_full", retry_after_s=1) from None
        except RequestError as error:
            raise invalid(str(error)) from None
        except (ApiError, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            LOG.error("request %s failed: %s: %s", job.job_id, type(error).__name__, error)
            message = f"the request failed in the engine: {error}"
            raise ApiError(500, message, code="engine_error") from error
        finally:
            self.queue.spend(caller, job.num_drawn)
            self.queue.end(ticket)

    async def abort(self, job: Job) -> None:
        """End a job at any stage.

        The requests that the engine knows end with finish_reason "abort". A job that has not
        reached the engine, or whose engine hangs, fails with an error 400 of code "aborted".
        """
        try:
            asked = [functools.partial(self.llm.explain, i) for i in job.engine_ids]
            told = [await self.questions.ask(question) for question in asked]
        except (KeyError, EngineSilent):
            told = []
        if not told or any(one.get("state") == "unknown" for one in told):
            # The job is still preparing its text or grammar, or the engine hangs: it cannot end the
            # job.
            message = "the request was aborted by an administrator before it began"
            job.stop(ApiError(400, message, code="aborted", kind="aborted_error"))
            return
        for engine_id in job.engine_ids:
            await self.questions.within(self.llm.abort(engine_id))

    async def send(self, job: Job, write: Callable[[Any], Awaitable[None]], message: Any) -> None:
        """Send one ASGI message to the client with `write`, and note in the job how long the write
        waits.

        `_sweep` stops the job if the client reads so slowly that the write waits `slow_reader_s`.
        """
        job.sending_since = time.monotonic()
        await write(message)
        job.sending_since = None

    async def drain(self, timeout_s: float) -> None:
        """Accept no new job, wait at most `timeout_s` seconds for the running ones, then stop the
        rest with an error 503; wait at most a second for these to end."""
        self.is_draining = True
        end = time.monotonic() + timeout_s
        while self.jobs and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for job in list(self.jobs.values()):
            job.stop(ApiError(503, "the server is shutting down", retry_after_s=30))
        for _ in range(100):
            if not self.jobs:
                break
            await asyncio.sleep(0.01)

    async def aclose(self) -> None:
        """Stop the bridge's threads and its sweep for slow readers, and close the writer of spans;
        the engine stays open."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.spans is not None:
            await asyncio.to_thread(self.spans.close)

    def _sink(
        self, job: Job, ticket: Ticket, place: int, most: int | None, sink: Sink
    ) -> Callable[[RequestOutput], bool]:
        """Return the function to which the engine gives the outputs of one prompt.

        It records an output, passes it to `sink` and returns True; it returns False and does
        nothing if `sink` is not open.

        Args:
            job, ticket: the HTTP request and its place in the queue.
            place: the index of the prompt.
            most: the largest number of samples to pass on; None for all.
            sink: the receiver of the outputs.
        """

        def take(output: RequestOutput) -> bool:
            if not sink.is_open():
                return False
            sink.take(place, self._observe(job, ticket, place, output, most))
            return True

        return take

    def _observe(
        self, job: Job, ticket: Ticket, place: int, output: RequestOutput, most: int | None
    ) -> RequestOutput:
        """Record a new output of the prompt with index `place`; return it with its first `most`
        samples, or with all if `most` is None.

        It becomes the entry in `job.outputs`. Its arrival updates the latency metrics, the times of
        the job's first and last token, and, at the first token, the place in the queue.
        """
        if most is not None and len(output.outputs) > most:
            others = sum(len(c.token_ids) for c in output.outputs[most:])
            output = replace(
                output,
                outputs=output.outputs[:most],
                num_tokens_discarded=output.num_tokens_discarded + others,
            )
        self._last_output = time.monotonic()
        now = time.perf_counter()
        if job.first_token is not None:
            self.metrics.next.add(now - job.last_token)
        elif any(c.token_ids for c in output.outputs):
            if job.tells_tokens:
                job.first_token = now
                self.metrics.first.observe(now - job.arrived)
            self.queue.begin(ticket)
        job.last_token = now
        job.outputs[place] = output
        return output

    async def _sweep(self) -> None:
        """Stop, every `SWEEP_S` seconds and until cancelled, the jobs with a write that has waited
        for its client more than `slow_reader_s` seconds."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for job in list(self.jobs.values()):
                since = job.sending_since
                if since is not None and now - since > self.slow_reader_s:
                    LOG.warning(
                        "request %s dropped: its client has read nothing for %.1f s",
                        job.job_id,
                        now - since,
                    )
                    self.metrics.count(self.metrics.dropped, "slow_reader")
                    job.stop(ApiError(408, "the client reads too slowly", code="slow_reader"))


@functools.lru_cache(maxsize=256)
def _length_alone(max_tokens: int | None) -> SamplingParams:
    """Return sampling parameters that set `max_tokens` alone, for the check of a request's size.

    They are cached, as SamplingParams checks its values slowly.
    """
    return SamplingParams(max_tokens=max_tokens)


def _as_given(prompt: Prompt) -> dict[str, Any]:
    given: dict[str, Any] = {"prompt_token_ids": prompt.ids}
    if prompt.text is not None:
        given["prompt"] = prompt.text
    if prompt.types:
        given["token_type_ids"] = prompt.types
    return given


async def _listen(receive: Callable[[], Awaitable[Any]], job: Job) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            job.stop(ClientLeft())
            return
