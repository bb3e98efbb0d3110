"""The engine for asyncio: requests as async iterators, many at a time, beside any other caller."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from numbers import Real
from typing import Any, Protocol, Unpack

from tilewise.engine.config import RequestTerms, Terms
from tilewise.engine.daemons import beside
from tilewise.engine.engine import EngineStats
from tilewise.engine.llm import LLM
from tilewise.engine.outputs import Generation, RequestOutput
from tilewise.engine.prompts import Prompt
from tilewise.engine.recipe import Facts
from tilewise.engine.request import SamplingParams
from tilewise.engine.steps.embedding import (
    EMBEDDING_PARAMS,
    EmbeddingOutput,
    embedding_of,
)
from tilewise.engine.tables.admission import Limits
from tilewise.errors import EngineClosedError, shown
from tilewise.keywords import keywords_of

__all__ = ["AsyncLLM", "Mailbox", "Readable", "share_of"]

# Characters of a prompt that is made into tokens on another thread, so that it stops no other task:
# 4,096 take about a millisecond.
LONG_PROMPT = 4096
# While tokens are told, a step that computes on the same cores stands still: on a CPU, this share
# of the time goes to it, in place of what one delivery for each step takes. Elsewhere it only must
# not fall behind.
TELLING_ON_CPU, TELLING = 0.04, 0.5
LEAST_REST_S = 2e-3  # less is no step, and a timer costs more than it saves
MOST_REST_S = 0.1  # that a token waits for it
Sink = Callable[[RequestOutput], bool]


class AsyncLLM:
    """An LLM for coroutines; its own thread computes, the event loop only reads.

    It may be used from several event loops, and beside the LLM itself.

    New tokens of all running requests are delivered to their readers together, once a step. Where
    deliveries take more than a share of the time, as with many streams on few cores, the next
    delivery waits, 0.1 s at most, and brings the tokens of several steps at once. First tokens and
    ends never wait.

    Args:
        llm: the LLM that computes; it stays its owner's: aclose() does not close it.
        share: the share of the time that deliveries may take, above 0 to 1; 1 delivers after each
            step; None is 0.04 where the engine computes on a CPU, and 0.5 elsewhere.

    Raises:
        ValueError: share is no number above 0 and at most 1.

    Attributes:
        tokenizer, config: the model's tokenizer and its config.
        devices: see LLM.

    Example:
        >>> llm = AsyncLLM(LLM("story"))
        >>> async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=64)):
        ...     print(output.outputs[0].text)
    """

    def __init__(self, llm: LLM, *, share: float | None = None) -> None:
        if share is not None and not (isinstance(share, Real) and 0 < share <= 1):
            raise ValueError(f"share must be above 0 and at most 1, got {shown(share)}")
        # What is no LLM of ours says nothing of its devices.
        self.devices = str(getattr(llm, "devices", ""))
        self._share = share_of(self.devices) if share is None else share
        self.llm = llm
        self.tokenizer, self.config = llm.tokenizer, llm.config
        self._live: dict[int, Generation] = {}  # by id(): an id of a request may come again
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._is_closed = False

    @property
    def limits(self) -> Limits:
        """The largest requests that the engine serves, see `admission.Limits`."""
        return self.llm.engine.scheduler.limits

    @keywords_of(RequestTerms)
    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        sink: Sink | None = None,
        **terms: Unpack[Terms],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt and yield its output so far whenever there is more.

        Each output is whole: all tokens and text of each sample since the beginning. A reader that
        is slower than the engine gets the work of several steps in one. The last output has
        `finished` set. Leaving the iterator before, by aclose() or because the task is cancelled,
        aborts the request.

        Args:
            prompt: a text, {"prompt": text} or {"prompt_token_ids": [...]}.
            sampling_params: None is `LLM.default_params`.
            request_id: unique among unfinished requests; None makes one.
            sink: a function that is called on the event loop with each output but the last as it
                comes, in place of a yield, which wakes a task and copies the output: this one goes
                on changing when the sink has returned. Outputs for which it returns False are
                yielded after all, as is the last one. What it raises is raised here.
            terms: user, cache_salt, lora_request, priority, deadline_s and max_queue_s, see
                `RequestTerms`.

        Raises:
            RequestError: the prompt can never be served, or the id is taken; QueueFullError if as
                many requests or tokens wait as may (LLM(max_waiting_requests=)).
            EngineClosedError: the engine, or this object, was closed; DeviceLostError if its device
                is lost.
            Exception: what ended this request alone, as for LLM.generate(), after the tokens that
                came before.
        """
        asked = RequestTerms.given_to(AsyncLLM.generate, terms)
        if sink is not None and not callable(sink):
            raise TypeError(f"sink must be a function or None, got {shown(sink)}")
        sampling = self.llm.default_params if sampling_params is None else sampling_params
        return self._outputs(prompt, sampling, asked, request_id, sink=sink)

    @keywords_of(RequestTerms)
    async def embed(
        self,
        prompt: Prompt,
        *,
        pooling: str | None = None,
        request_id: str | None = None,
        **terms: Unpack[Terms],
    ) -> EmbeddingOutput:
        """Return the embedding of one prompt, computed in the steps of all requests.

        Of a model with a classifier the embedding is the logits; `engine.scoring` makes scores of
        them. Cancelling the task aborts the request. Arguments and errors are those of generate()
        and, for `pooling`, of `LLM.embed`.

        Raises:
            TimeoutError: the deadline of the request has passed.
        """
        pooling = self.llm.purpose.check_pooling(pooling)
        asked = RequestTerms.given_to(AsyncLLM.embed, terms)
        outputs = self._outputs(prompt, EMBEDDING_PARAMS, asked, request_id, pooling)
        async with aclosing(outputs):
            async for output in outputs:
                if output.finished:
                    return embedding_of(output, pooling)
        raise AssertionError("the last output of a request is finished")

    async def _outputs(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        terms: RequestTerms,
        request_id: str | None,
        pooling: str | None = None,
        sink: Sink | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        if self._is_closed:
            raise EngineClosedError("the AsyncLLM was closed")
        generation = await self._prepare(prompt, sampling, terms, request_id, pooling)
        if self._is_closed:  # while it was prepared
            raise EngineClosedError("the AsyncLLM was closed")
        reader = _Reader(self._mailbox(), generation, sink)
        generation.on_change = reader.tell
        self.llm.loop.submit(generation)
        self._live[id(generation)] = generation
        try:
            while True:
                await reader.changed.wait()
                reader.changed.clear()
                if reader.failure is not None:
                    raise reader.failure
                error = generation.error  # before the tokens that came before it are read
                output = generation.snapshot()
                num_tokens = sum(len(c.token_ids) for c in output.outputs)
                if error is not None:
                    if num_tokens > reader.num_seen:
                        yield replace(output, finished=False)
                    raise error
                if num_tokens > reader.num_seen or output.finished:
                    reader.num_seen = num_tokens
                    yield output
                if output.finished:
                    return
        finally:
            reader.sink = None
            generation.on_change = _nobody_reads  # else reader and generation hold one another
            del self._live[id(generation)]
            if not generation.output.finished:
                self.llm.loop.drop_soon(generation)

    async def abort(self, request_id: str) -> None:
        """End a request of any caller with finish_reason "abort", and wait until that is done.

        An unknown id is ignored, as is a closed engine.
        """
        self.llm.loop.abort(request_id)
        await self._caught_up()

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine's counts and times, without waiting for a step."""
        return self.llm.engine.stats()

    def explain(self, request_id: str) -> dict[str, Any]:
        """Return the state of a request: its reason to wait, and its cost so far.

        `Engine.explain` describes the fields.
        """
        return self.llm.engine.explain(request_id)

    def trace(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the scheduler's recent events that are numbered `since` or more.

        `Engine.trace` describes their fields.
        """
        return self.llm.engine.trace(since)

    def picture(self) -> dict[str, Any]:
        """Return which sequence holds which block of the cache now, see `Engine.picture`."""
        return self.llm.engine.picture()

    def line(self, most: int) -> list[str]:
        """Return the ids of the first `most` waiting requests, in the order of their admission."""
        return self.llm.engine.line(most)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks and return True; False, and nothing is forgotten, while requests
        hold some.

        Raises:
            EngineClosedError: the engine was closed; DeviceLostError if its device is lost.
        """
        reset = self.llm.loop.post(lambda: self.llm.engine.reset_prefix_cache())
        return await asyncio.wrap_future(reset)

    async def aclose(self) -> None:
        """Refuse new requests of this object, and end its live ones; wait until they own no cache
        blocks.

        The LLM goes on and serves its other callers.
        """
        self._is_closed = True
        for generation in list(self._live.values()):
            self.llm.loop.drop_soon(generation)
        await self._caught_up()

    async def _prepare(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        terms: RequestTerms,
        request_id: str | None,
        pooling: str | None,
    ) -> Generation:
        prepare = functools.partial(
            self.llm.prepare, prompt, sampling, terms, request_id=request_id, pooling=pooling
        )
        text = prompt if isinstance(prompt, str) else ""
        # What is no SamplingParams is refused by prepare(); a grammar takes long to compile, and an
        # adapter may have to be read.
        compiles = getattr(sampling, "structured", None) is not None
        if compiles or (terms.lora_request and not self.llm.holds_adapter(terms.lora_request)):
            # It may wait for long, as those of others do: the event loop's threads are few.
            future = beside(prepare)
            return await asyncio.wrap_future(future)
        if len(text) > LONG_PROMPT:
            return await asyncio.to_thread(prepare)
        return prepare()

    async def load_lora_adapter(self, name: str, path: str, *, replaces: bool = False) -> None:
        """Load an adapter, see `LLM.load_lora_adapter`; other tasks run meanwhile."""
        load = functools.partial(self.llm.load_lora_adapter, name, path, replaces=replaces)
        await asyncio.wrap_future(beside(load))

    async def update_weights(self, path: str, *, running: str = "wait") -> None:
        """Let requests to come be answered by the weights in a folder, see `LLM.update_weights`.

        Other tasks run meanwhile. `running` says what becomes of running requests.
        """
        update = functools.partial(self.llm.update_weights, path, running=running)
        await asyncio.wrap_future(beside(update))

    async def facts(self) -> Facts:
        """Return the digests and versions on which an answer's bits depend besides the request, see
        `LLM.facts`."""
        return await asyncio.wrap_future(beside(self.llm.facts))

    async def fingerprint_of(self, adapter: str) -> str:
        """Return the digest of a loaded adapter, or "" for none, see `LLM.fingerprint_of`."""
        return await asyncio.wrap_future(beside(lambda: self.llm.fingerprint_of(adapter)))

    async def sleep(self, level: int = 1, *, running: str = "wait") -> None:
        """Free the memory of cache and weights until wake(), see `LLM.sleep`; other tasks run
        meanwhile."""
        await asyncio.wrap_future(beside(functools.partial(self.llm.sleep, level, running=running)))

    async def wake(self) -> None:
        """Take requests again after sleep(), see `LLM.wake`; other tasks run meanwhile."""
        await asyncio.wrap_future(beside(self.llm.wake))

    async def unload_lora_adapter(self, name: str) -> None:
        """Forget an adapter by its name, see `LLM.unload_lora_adapter`."""
        self.llm.unload_lora_adapter(name)

    async def _caught_up(self) -> None:
        """Wait until the engine's thread has run all tasks that were posted before this call."""
        with suppress(EngineClosedError):
            await asyncio.wrap_future(self.llm.loop.post(lambda: None))

    def _mailbox(self) -> Mailbox:
        """Return the mailbox of the running event loop, made at the loop's first request.

        Mailboxes of closed event loops are dropped then.
        """
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            for other in list(self._mailboxes):  # other threads may do the same just now
                if other.is_closed():
                    self._mailboxes.pop(other, None)
            mailbox = self._mailboxes[loop] = Mailbox(loop, self._share)
        return mailbox


def share_of(devices: str) -> float:
    """Return the default share of the time that deliveries to readers may take: 0.04 for a CPU,
    else 0.5.

    `devices` is a text such as "cpu", "cuda:1" or "2 x cpu".
    """
    kind = devices.rpartition(" ")[2].partition(":")[0]
    return TELLING_ON_CPU if kind == "cpu" else TELLING


def _nobody_reads() -> None:
    """Do nothing: the `on_change` of a generation that no reader waits for any more."""


class _Reader:
    """The reader of one request's outputs: it passes outputs to a sink, or wakes the waiting task.

    Attributes:
        sink: a function that takes each new output; None if the task takes all outputs.
        changed: the event by which the task is woken.
        failure: the exception that the sink raised, or None.
        num_seen: the number of tokens in the outputs that were read.
        is_told: True while the reader is in the mailbox's queue, which waits while deliveries rest.
        is_hurried: True while the reader is in the mailbox's other queue, of first tokens and ends,
            which does not wait.
    """

    def __init__(self, mailbox: Mailbox, generation: Generation, sink: Sink | None) -> None:
        self._mailbox, self._generation = mailbox, generation
        self.sink = sink
        self.changed = asyncio.Event()
        self.failure: BaseException | None = None
        self.num_seen = 0
        self.is_told = self.is_hurried = False

    def read(self) -> None:
        """Pass the new output to the sink, or wake the task that reads; called on the event loop.

        The task is woken for the last output, without a sink, while it has not read an earlier
        output, and where the sink returns False or raises. The exception is kept as `failure`.
        """
        # The task reads the end of a request, and what came while it had not read what came before.
        if self.sink is not None and not self.changed.is_set():
            try:
                num_seen = self._generation.show(self.sink, self.num_seen)
            except BaseException as error:  # a cancelled future's is no Exception
                self.failure = error
            else:
                if num_seen >= 0:
                    self.num_seen = num_seen
                    return
        self.changed.set()

    def tell(self) -> None:
        """Put this reader into the mailbox, so that the event loop calls `read`; on the engine's
        thread.

        A request's first tokens and its end do not wait while deliveries rest.

        Raises:
            RuntimeError: the event loop is closed, so that no task reads.
        """
        self._mailbox.check_open()
        # The first tokens, and the end.
        generation = self._generation
        is_last = generation.output.finished or generation.error is not None
        self._mailbox.post(self, waits=bool(self.num_seen) and not is_last)


class Readable(Protocol):
    """An object that a mailbox wakes on the event loop.

    Attributes:
        is_told: True while this object is in the mailbox's queue that waits while deliveries rest.
        is_hurried: True while this object is in the mailbox's queue that does not wait.
    """

    is_told: bool
    is_hurried: bool

    def read(self) -> None:
        """Take the new output from where it lies; a delivery of the mailbox calls this on the event
        loop."""
        ...


class Mailbox:
    """Wakes the readers of one event loop together: at most once a step, not once a request.

    After a delivery that took long the mailbox rests, so that deliveries take no more than their
    share of the time. The engine's thread first appends a reader, then looks whether a delivery is
    due; a delivery first clears that mark, then empties the queues. So no reader is left behind.

    Args:
        loop: the event loop of the readers.
        share: the share of the time that deliveries may take, see AsyncLLM.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, share: float) -> None:
        self._loop = loop
        self._told: deque[Readable] = deque()
        self._hurried: deque[Readable] = deque()
        self._is_due = False
        self._is_resting = False
        self._rest = 1 / share - 1  # seconds after each of a delivery

    def check_open(self) -> None:
        """Raise RuntimeError if the event loop is closed: a delivery that is due would never
        run."""
        if self._loop.is_closed():
            raise RuntimeError("the event loop of the reader is closed")

    def put(self, reader: Readable, waits: bool) -> bool:
        """Queue a reader that is to be woken, and return whether a delivery must be asked for.

        No delivery is needed if one is due already or comes after the rest, or if the reader was
        queued.

        Args:
            reader: the reader to wake.
            waits: True if the reader may wait while deliveries rest.
        """
        if reader.is_told if waits else reader.is_hurried:
            return False  # the delivery that it waits for will read this, too
        if waits:
            reader.is_told = True
            self._told.append(reader)
        else:
            reader.is_hurried = True
            self._hurried.append(reader)
        return not (self._is_due or (waits and self._is_resting))

    def post(self, reader: Readable, waits: bool) -> None:
        """Queue a reader, and ask the event loop for a delivery if none is due; on the engine's
        thread.

        Args:
            reader: the reader to wake.
            waits: True if the reader may wait while deliveries rest.

        Raises:
            RuntimeError: the event loop is closed.
        """
        if not self.put(reader, waits):
            return
        self._is_due = True  # before the event loop can say that it is not
        try:
            self._loop.call_soon_threadsafe(self.deliver)
        except RuntimeError:
            self._is_due = False
            raise

    def deliver(self) -> None:
        """Call `read` of the hurried readers and, unless deliveries rest, of all others; on the
        event loop.

        Afterwards deliveries rest in proportion to the time that this one took, 0.1 s at most.
        """
        self._is_due = False
        while self._hurried:
            reader = self._hurried.popleft()
            reader.is_hurried = False
            reader.read()
        if self._is_resting or not self._told:
            return
        begun = time.thread_time()
        while self._told:
            reader = self._told.popleft()
            reader.is_told = False
            reader.read()
        rest = min(MOST_REST_S, self._rest * (time.thread_time() - begun))
        if rest >= LEAST_REST_S:
            self._is_resting = True
            self._loop.call_later(rest, self._rested)

    def _rested(self) -> None:
        self._is_resting = False
        self.deliver()
