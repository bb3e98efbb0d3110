"""The engine: requests in, token events out. It sees ids only; text is another layer's.

step = schedule -> submit, and of the oldest unfinished step: result -> update

With overlap the next step is scheduled and submitted before the result of the last one is waited
for: while a device computes, the host schedules, takes results and makes text of them.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch

from tilewise.cache.storage import KVStorage
from tilewise.engine.audit import Auditor, Difference
from tilewise.engine.batch import Batch, PlainDraws, PlainEvents, TokenEvent
from tilewise.engine.canary import Canary
from tilewise.engine.recovery import run_again
from tilewise.engine.request import FinishReason, Request
from tilewise.engine.scheduling.explanation import explain
from tilewise.engine.scheduling.giving_way import GivingWay
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.scheduling.withdrawal import pause_transfers, resume_transfers, withdraw
from tilewise.engine.stats import SchedulerStats
from tilewise.engine.steps.runner import Drawn, Runner, StepHandle, Stoppable
from tilewise.engine.tables.block_files import BlockFiles, GroupFiles
from tilewise.engine.tables.host_cache import HostCache
from tilewise.engine.tables.rates import Rates
from tilewise.engine.versions import unversioned, versioned
from tilewise.errors import DeviceLostError, EngineClosedError, RequestError, StepStoppedError
from tilewise.models.vector_head import VectorHead

__all__ = ["Engine", "EngineStats"]

LOG = logging.getLogger("tilewise.engine")
MOST_DIFFERENCES = 64  # that are kept
MOST_BESIDE = 64  # running requests whose names are noted


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot; counts and seconds since the start.

    Attributes:
        scheduler: blocks, queue, prefix cache and preemptions.
        cache_bytes_per_token: bytes of one token's keys and values in all layers.
        prefill_tokens, prefill_seconds: the tokens and seconds of the steps that computed any token
            of a prompt (or computed one again, after a preemption).
        decode_tokens, decode_seconds: the drawn tokens and the seconds of the steps in which each
            sequence computed only the token that it had just drawn, and drafts behind it.
        num_stopped_steps, stopped_seconds: the number and the seconds of the steps that were
            stopped for users who came beside a flood (see `giving_way`); the tokens and seconds
            above do not include them.
        num_compilations: kernels that were compiled while requests waited for them.
        num_audited, num_audits_different, num_audits_forgotten: requests that were computed again,
            those of which something differed, and noted ones that never were.
        num_blocks_checked, num_blocks_broken: full blocks that were looked at again, and those
            whose bytes had changed.
        why_not_compiled: the reason why steps run op by op on a CPU and not as one compiled list;
            "" where they are compiled, and on a GPU.
    """

    scheduler: SchedulerStats
    cache_bytes_per_token: int
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    num_stopped_steps: int = 0
    stopped_seconds: float = 0.0
    num_compilations: int = 0
    num_audited: int = 0
    num_audits_different: int = 0
    num_audits_forgotten: int = 0
    num_blocks_checked: int = 0
    num_blocks_broken: int = 0
    why_not_compiled: str = ""

    @property
    def prefill_rate(self) -> float:
        """Tokens per second of prefill steps; 0 before the first."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second of decode steps; 0 before the first."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


class _Failed:
    """The handle of a step that `submit` refused."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def result(self) -> Drawn:
        """Raise the error with which `submit` failed."""
        raise self.error


class _Resting:
    """The runner of an engine that sleeps: it has no model and no cache."""

    host: HostCache | None = None
    storage: KVStorage | None = None
    num_compilations = 0

    def submit(self, batch: Batch) -> StepHandle:
        """Refuse a step."""
        raise RuntimeError("the engine must be awake to run a step")

    def reset(self) -> None:
        """Do nothing: there is no state that could be forgotten."""

    def is_lost(self) -> bool:
        """Return False: there is no device."""
        return False


class Engine:
    """Runs all live requests together, one step at a time.

    One thread at a time may change it. `stats`, `explain` and `trace` may be asked by any other
    meanwhile: what the scheduler knows changes under a lock, which is not held while a step
    computes.

    Args:
        scheduler: decides what runs; its blocks must be those of the runner's storage.
        runner: the model over its paged cache.
        overlap: True to submit a step before the result of the one before is known.
        new_scheduler: a function that returns an empty scheduler like `scheduler`; None where none
            can replace it.
        store: the files of blocks that main memory has no room for; None without any.

    Attributes:
        head: the layers on the vectors that prompts were pooled to, where the runner has not run
            them; None for none.
        version: the name of the weights, "" for those of the start: blocks of one are found by
            requests of no other.
        auditor, canary: the objects that compute requests again, and look at blocks again; None
            without.
        stops_at_difference: True if no request is taken after the first difference.
        differences: the last differences that auditor and canary have found.
        asleep: the sentence that says why requests are refused now; "" while they are taken.

    Example:
        >>> engine.add_request(Request("a", [1, 2, 3], SamplingParams(max_tokens=8)))
        >>> while engine.has_unfinished():
        ...     events = engine.step()
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        overlap: bool = False,
        new_scheduler: Callable[[], Scheduler] | None = None,
        store: BlockFiles | GroupFiles | None = None,
    ) -> None:
        self.runner = runner
        self.head: VectorHead | None = None
        self.version = self.asleep = ""
        self.auditor: Auditor | None = None
        self.canary: Canary | None = None
        self.stops_at_difference = False
        self.differences: deque[Difference] = deque(maxlen=MOST_DIFFERENCES)
        self._num_steps = 0
        self.new_scheduler = new_scheduler
        self.store = store
        self.overlap = overlap
        self.lock = threading.RLock()  # around whatever reads or changes the scheduler
        self._link_blocks = 0.0  # moved a second, once it is measured
        self.rates = Rates()
        self._use(scheduler)
        self._unfinished: deque[tuple[Batch, StepHandle]] = deque()
        self._tokens = {"prefill": 0, "decode": 0}
        self._seconds = {"prefill": 0.0, "decode": 0.0}
        self._expired: list[TokenEvent] = []  # until a step returns them
        self._num_withdrawn = 0  # since a step last succeeded
        self.giving_way = GivingWay()
        self._stoppable = runner if isinstance(runner, Stoppable) else None

    def _use(self, scheduler: Scheduler) -> None:
        if self.runner.host is not None:
            if not self._link_blocks:
                self._link_blocks = self.runner.host.measure()
            self.rates.link_blocks = self._link_blocks
            self.rates.group_shares = self.runner.host.group_shares
            self.rates.max_step_tokens = scheduler.limits.max_num_batched_tokens
            scheduler.preemption.rates = self.rates
        self.scheduler = scheduler
        if self.auditor is not None:
            self.auditor.forget_all()
        if self.canary is not None:
            self.canary.forget_all()
            scheduler.tables.on_full = self.canary.note
        scheduler.max_in_flight = 2 if self.overlap else 1

    def restart(self, scheduler: Scheduler) -> None:
        """Forget all requests, waiting and running, and go on with a new, empty scheduler.

        Unfinished steps are waited for and dropped; no request gets an event.
        """
        self._drop_unfinished()
        self._expired.clear()  # an id may come again
        self._num_withdrawn = 0
        self.runner.reset()
        with self.lock:
            scheduler.trace.follow(self.scheduler.trace)
            self._use(scheduler)

    def _drop_unfinished(self) -> None:
        while self._unfinished:
            self._drop_oldest()

    def _drop_oldest(self) -> Batch:
        """Wait until the oldest unfinished step has ended or failed; remove it, and return its
        batch."""
        batch, handle = self._unfinished.popleft()
        with suppress(Exception):
            handle.result()
        return batch

    def add_request(self, request: Request) -> None:
        """Queue a request; its `salt` is changed to name the version of the weights, too.

        A second computation of the auditor that runs is given up, and begins anew later.

        Raises:
            RequestError: the request can never be served, or the engine sleeps; the request is as
                it was.
            QueueFullError: as many requests or tokens wait as may.
            EngineClosedError: a check has found a difference, after which no request is taken.
        """
        if self.asleep:
            is_broken = self.stops_at_difference and self.differences
            raise EngineClosedError(self.asleep) if is_broken else RequestError(self.asleep)
        replay = None if self.auditor is None else self.auditor.put_back()
        if replay is not None:  # no live request shares a step with a second computation
            self.abort(replay)
        with self.lock:
            salt, request.salt = request.salt, versioned(request.salt, self.version)
            try:
                self.scheduler.add(request)
            except BaseException:
                request.salt = salt
                raise
            if self.auditor is not None:
                [sample] = self.scheduler.roster.requests[request.request_id]
                self.auditor.note(request, sample.seed)

    def watch(self, auditor_share: float, canary_share: float, *, seed: int, stops: bool) -> None:
        """Begin to compute a share of new requests again, and to check a share of newly filled
        blocks.

        Args:
            auditor_share, canary_share: the shares, in [0, 1]; 0 is none.
            seed: the seed of the choices.
            stops: True if no request is taken after the first difference.
        """
        self.stops_at_difference = stops
        if auditor_share:
            self.auditor = Auditor(auditor_share, self.tell_difference, seed=seed)
        if canary_share:
            storage = self.runner.storage
            assert storage is not None
            self.canary = Canary(storage, canary_share, self.tell_difference, seed=seed)
            self.scheduler.tables.on_full = self.canary.note

    def tell_difference(self, difference: Difference) -> None:
        """Keep and log a difference, and refuse requests from now on if `stops_at_difference`."""
        self.differences.append(difference)
        LOG.error("audit: %s", json.dumps(asdict(difference)))
        if self.stops_at_difference:
            self.asleep = (
                "the engine must have found no difference to take requests, got one: "
                f"{difference.text}"
            )

    def audit_next(self) -> None:
        """Begin to compute a noted request again, unless any request is unfinished, or none is
        noted."""
        auditor = self.auditor
        if auditor is None or self.asleep or self.has_unfinished():
            return
        self._sweep(auditor)
        request = auditor.next_request()
        if request is not None:
            with self.lock:
                self.scheduler.add(request)

    def stop_audits(self) -> None:
        """Forget the noted answers, because the weights change; end the second computation that
        runs."""
        auditor = self.auditor
        if auditor is None:
            return
        running = auditor.replay_id
        auditor.forget_all()
        if running is not None:
            self.abort(running)

    def _sweep(self, auditor: Auditor) -> None:
        """Tell the auditor which watched requests have ended, and whether its second computation
        has."""
        known = self.scheduler.roster.requests
        for request_id in auditor.watched:
            if request_id not in known:
                auditor.end(request_id)
        if auditor.replay_id is not None and auditor.replay_id not in known:
            auditor.finish_replay()

    def _look(self, events: Sequence[TokenEvent]) -> None:
        """Pass the events of a step to the auditor, and tell the canary that a step has ended."""
        self._num_steps += 1
        auditor, canary = self.auditor, self.canary
        if auditor is not None and auditor.is_watching:
            if not isinstance(events, PlainEvents):
                for request_id, some in groupby(events, key=attrgetter("request_id")):
                    auditor.take(request_id, some)
            roster = self.scheduler.roster
            beside = [seq.request.request_id for seq in roster.running[:MOST_BESIDE]]
            for request_id in auditor.watched:
                if samples := roster.requests.get(request_id):
                    auditor.see(request_id, list(samples[0].block_ids), beside, self._num_steps)
            self._sweep(auditor)
        if canary is not None:
            canary.after_step(self._num_steps)

    def take_back(self, request: Request) -> bool:
        """Forget a request that was never admitted to run, so that it may be added again.

        Its `salt` is again as it was before add_request().

        Returns:
            Whether the request was forgotten; False if it was admitted, or is unknown.
        """
        with self.lock:
            samples = self.scheduler.roster.requests.get(request.request_id, [])
            if not samples or any(sample.was_admitted for sample in samples):
                return False
            self.scheduler.abort(request.request_id)
            request.salt = unversioned(request.salt, self.version)
            return True

    def rest(self) -> None:
        """Put an engine without requests to sleep: free the cache and let go of the runner.

        It waits for unfinished steps and drops them. Requests are refused while it sleeps.
        """
        self._drop_unfinished()
        self._expired.clear()
        self.asleep = (
            "the engine must be awake to take requests, got one while it sleeps: call wake()"
        )
        storage = self.runner.storage
        if storage is not None:
            storage.free()
        with self.lock:
            self.runner, self._stoppable, self.canary = _Resting(), None, None
            self.new_scheduler = self.store = None

    def use_version(self, version: str) -> None:
        """Set the version of the weights: later requests do not find blocks that earlier ones
        cached."""
        self.version = version

    def give_way(self, user: str) -> None:
        """Stop the running step if a new request of this user should not have to wait for its end.

        It may be called from any thread; see `giving_way` for the rule. A runner that cannot stop a
        step goes on.
        """
        if number := self.giving_way.asked_by(user):
            assert self._stoppable is not None, "who cannot be stopped has no number"
            self._stoppable.stop(number)

    def step(self) -> Sequence[TokenEvent]:
        """Finish one batch and return what it did; empty when no token was drawn, or it gave way.

        Requests whose time is over end first, by events with finish_reason "deadline".

        A request whose logits are not finite ends by events with finish_reason "error" that carry
        the error; no other request notices. When the model or the sampler raises, the step is run
        again in halves, see `recovery`: the requests that break it end in the same way, with what
        they raised, and the others go on.

        Raises:
            DeviceLostError: the runner can compute no more, nor can the engine.
            BaseException: what is no Exception, such as KeyboardInterrupt; the requests of the
                step are aborted.
        """
        started = time.perf_counter()
        try:
            try:
                self._submit()
            except StepStoppedError:
                with self.lock:
                    self.giving_way.stop(self.scheduler, time.perf_counter() - started)
            if not self._unfinished:
                return self._take_expired()
            batch, handle = self._unfinished.popleft()
            samples: Drawn | None
            events: Sequence[TokenEvent]
            try:
                samples = self._headed(handle.result())
            except Exception as error:
                samples = None
                events = self._recover(batch, error)
            except BaseException:
                self._discard(batch)
                raise
            else:
                with self.lock:
                    events = self.scheduler.update(batch, samples)
                    if self._num_withdrawn:
                        self._num_withdrawn = 0
                        resume_transfers(self.scheduler)
                        self.scheduler.runs_one = False
            if self.auditor is not None or self.canary is not None:
                self._look(events)
        finally:
            self._let_end()
        seconds = time.perf_counter() - started
        self.giving_way.end(seconds)
        self._record(batch, samples, seconds)
        return [*self._take_expired(), *events] if self._expired else events

    def expire(self) -> list[TokenEvent]:
        """End the requests whose time is over, without a step, and return their events."""
        with self.lock:
            self._expired += self.scheduler.expire()
        self._let_end()
        return self._take_expired()

    def seconds_to_deadline(self) -> float | None:
        """Return the seconds until the next deadline of a request, 0 or more; None if none
        has one."""
        with self.lock:
            at = self.scheduler.deadlines.next_time
            return None if at is None else max(0.0, at - self.scheduler.clock())

    def _take_expired(self) -> list[TokenEvent]:
        expired, self._expired = self._expired, []
        return expired

    def _submit(self) -> None:
        """Schedule and submit steps until one is unfinished, two with overlap, or none can run.

        Requests whose time is over end before each step. A step that `runner.submit` refuses counts
        as unfinished: its handle raises the error once the steps before it are finished.

        Raises:
            StepStoppedError: the step was stopped for another user, see `give_way`.
        """
        while len(self._unfinished) < self.scheduler.max_in_flight:
            if self._unfinished and isinstance(self._unfinished[-1][1], _Failed):
                return
            with self.lock:
                self._expired += self.scheduler.expire()
                batch = self.scheduler.schedule()
            if batch is None:
                return
            handle: StepHandle
            if self._stoppable is not None:
                self._stoppable.begin_step(self.giving_way.begin(self.scheduler, batch))
            try:
                handle = self.runner.submit(batch)
            except StepStoppedError:
                raise  # none is unfinished beside it
            except Exception as error:
                handle = _Failed(error)  # the steps before it are finished first
            except BaseException:
                self._discard(batch)
                raise
            self._unfinished.append((batch, handle))

    def _recover(self, failed: Batch, error: Exception) -> list[TokenEvent]:
        """Handle the failure of a step: run it and all later unfinished steps again; return their
        events.

        Steps that move blocks to main memory or back, or that have moved a recurrent state on to
        its next chunk, cannot be run again. Then all unfinished steps are withdrawn, and other
        steps are built. If that happens twice in a row, the next step moves no blocks and, with
        states, has one sequence: so it can be run again in halves, or its one request ends.
        """
        if self._stoppable is not None:
            self._stoppable.begin_step(0)  # of what runs again, nothing may be stopped
        newer = [batch for batch, _ in self._unfinished]
        self._drop_unfinished()  # they were computed from what the failed one did not give
        events: list[TokenEvent] = []
        if not self.scheduler.can_run_again((failed, *newer)):
            self._withdraw(error)
        else:
            for batch in (failed, *newer):
                events += self._rerun(batch, error if batch is failed else None)
        with self.lock:  # a step that failed may not have told the runner who left
            left = {i for batch in (failed, *newer) for i in batch.left}
            self.scheduler.preemption.left += left.difference(self.scheduler.roster.live)
        return events

    def _withdraw(self, error: Exception) -> None:
        """Undo all unfinished steps after an error; their tokens are computed again.

        Raises:
            DeviceLostError: the runner can compute no more.
        """
        if self.runner.is_lost():
            raise DeviceLostError(f"the engine's device is lost: {error}") from error
        self.runner.reset()  # it may have been told what did not happen
        self._num_withdrawn += 1
        with self.lock:
            withdraw(self.scheduler)
            if self._num_withdrawn > 1:
                pause_transfers(self.scheduler)
                self.scheduler.runs_one = self.scheduler.tables.states is not None

    def _rerun(self, batch: Batch, error: Exception | None) -> list[TokenEvent]:
        """Run the oldest unfinished step again, end the requests that break it, and return all
        events.

        Args:
            batch: the batch of the step.
            error: the exception with which it failed; None if it was dropped because an older one
                failed.
        """
        rerun = run_again(self.runner, self.scheduler, batch, error)
        events: list[TokenEvent] = []
        with self.lock:
            for request_id, reason in rerun.errors.items():
                events += self.scheduler.fail(request_id, reason)
            events += self.scheduler.update(batch, self._headed(rerun.samples))
        return events

    def _headed(self, drawn: Drawn) -> Drawn:
        """Run the head on the pooled vectors of prompts in `drawn`, in place, and return `drawn`.

        Nothing is changed without a head or without such vectors.
        """
        if self.head is None or isinstance(drawn, PlainDraws):
            return drawn
        places = [i for i, tokens in enumerate(drawn) if tokens and tokens[0].prompt_state]
        if places:
            states = torch.tensor([drawn[i][0].prompt_state for i in places])
            for place, vector in zip(places, self.head(states).tolist(), strict=True):
                drawn[place][0] = drawn[place][0]._replace(prompt_state=tuple(vector))
        return drawn

    def _discard(self, batch: Batch) -> None:
        with self.lock:
            self.scheduler.discard(batch)

    def _let_end(self) -> None:
        """If no request is left, wait for unfinished steps, drop their results and free their
        blocks."""
        while self._unfinished and not self.scheduler.has_unfinished():
            self._discard(self._drop_oldest())

    def finish(
        self,
        request_id: str,
        index: int,
        reason: FinishReason,
        stop_reason: int | str | None = None,
    ) -> bool:
        """End one sample from outside, as when its text reaches a stop string.

        Returns:
            Whether the sample was unfinished.
        """
        with self.lock:
            was_unfinished = self.scheduler.finish(request_id, index, reason, stop_reason)
        self._let_end()
        return was_unfinished

    def abort(self, request_id: str) -> bool:
        """End all samples of a request and free their blocks.

        Returns:
            Whether any sample was unfinished.
        """
        with self.lock:
            was_unfinished = self.scheduler.abort(request_id)
        self._let_end()
        return was_unfinished

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks, see `Scheduler.reset_prefix_cache`.

        Returns:
            False, and nothing is forgotten, while a sequence or an unfinished step holds some.
        """
        with self.lock:
            return self.scheduler.reset_prefix_cache()

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_unfinished()

    def stats(self) -> EngineStats:
        """Return a snapshot of counts and times; any thread may ask."""
        with self.lock:
            scheduler = self.scheduler.stats()
        storage = self.runner.storage
        auditor, canary = self.auditor, self.canary
        return EngineStats(
            num_audited=0 if auditor is None else auditor.num_audited,
            num_audits_different=0 if auditor is None else auditor.num_different,
            num_audits_forgotten=0 if auditor is None else auditor.num_forgotten,
            num_blocks_checked=0 if canary is None else canary.num_checked,
            num_blocks_broken=0 if canary is None else canary.num_broken,
            scheduler=scheduler,
            cache_bytes_per_token=0 if storage is None else storage.spec.bytes_per_token,
            prefill_tokens=self._tokens["prefill"],
            prefill_seconds=self._seconds["prefill"],
            decode_tokens=self._tokens["decode"],
            decode_seconds=self._seconds["decode"],
            num_stopped_steps=self.giving_way.num_stopped,
            stopped_seconds=self.giving_way.stopped_s,
            num_compilations=self.runner.num_compilations,
            why_not_compiled=getattr(self.runner, "why_not_compiled", ""),
        )

    def explain(self, request_id: str) -> dict[str, Any]:
        """Return the state and the cost of a request, see `explanation`; any thread may call
        this."""
        with self.lock:
            return explain(self.scheduler, request_id)

    def trace(self, since: int = 0) -> list[dict[str, Any]]:
        """Return recent events of the scheduler (admissions, preemptions, steps ...), oldest first.

        `tilewise.engine.record.trace` describes their fields. Any thread may call this.

        Args:
            since: the number of the first event to return; the last number seen plus 1 returns only
                new events. Old events may have been dropped from the ring.
        """
        with self.lock:
            return self.scheduler.trace.since(since)

    def picture(self) -> dict[str, Any]:
        """Return which sequence holds which block now, see `Insight.picture`; any thread may
        ask."""
        with self.lock:
            return self.scheduler.insight.picture()

    def line(self, most: int) -> list[str]:
        """Return the ids of the first `most` waiting requests, the next one first; any thread may
        ask."""
        with self.lock:
            return self.scheduler.insight.line(most)

    def _record(self, batch: Batch, samples: Drawn | None, seconds: float) -> None:
        """Add a step's tokens and seconds to the engine's statistics, and to the measured rates.

        Steps in which each sequence ran only its last drawn token and drafts count as decode steps.

        Args:
            batch: the batch of the step.
            samples: the drawn tokens; None for a step that was run again in parts.
            seconds: the time of the step.
        """
        runs = batch.sequences
        decodes = batch.is_plain or all(
            len(s.token_ids) == 1 + s.num_drafts and s.num_generated > 0 for s in runs
        )
        kind = "decode" if decodes else "prefill"
        num_drawn = len(runs) if samples is None or batch.is_plain else sum(map(len, samples))
        self._tokens[kind] += num_drawn if decodes else batch.num_tokens
        if self.scheduler.speculation is not None and samples is not None:
            self.scheduler.speculation.record(batch, samples, seconds)
        self._seconds[kind] += seconds
        if kind == "prefill" and self.runner.host is not None:
            rate = self._tokens[kind] / self._seconds[kind] if self._seconds[kind] else 0.0
            self.rates.prefill_tokens = rate
            self.rates.note(batch.num_tokens, seconds)
