"""The engine in virtual time: this very scheduler and its tables, and a clock in place of a model.

step = schedule -> submit, and of the oldest unfinished step: wait until it ends -> update

The order is that of `Engine.step`. The clock has two hands, the host's and the device's:
scheduling, launching and taking tokens in move the first, a step's kernels the second, and a step
begins when both have come so far. Requests enter between two steps, as with the real engine. A
drawn token is its sequence's own, so that nothing is shared that a model would not have made equal.
No torch.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tilewise.cost.step import StepSeconds, StepWork
from tilewise.engine.batch import Batch, SampledToken, TokenEvent, first_of
from tilewise.engine.request import FinishReason, Request
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.errors import RequestError

__all__ = ["Arrival", "Steps", "Timing", "VirtualEngine", "take", "work_of"]

# Drawn tokens begin here, above those that a trace may name; ids are below 2^31.
FIRST_DRAWN = 1 << 30
SAMPLED_STEPS = 16  # the memory is looked at once in so many steps


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request with the time at which it comes, in seconds from the start."""

    seconds: float
    request: Request


@dataclass(slots=True)
class Timing:
    """The times of one request, in seconds from the start, and its end.

    Attributes:
        arrival: the time at which the request came.
        admitted: the time at which the first step with any of its tokens was scheduled; -1 before.
        first_token, last_token: the times at which the first and the last token could be read; -1
            before.
        prompt_tokens, output_tokens: the number of tokens of the prompt, and that of all samples
            together.
        cached_tokens: the number of prompt tokens that were found in the prefix cache.
        reason: the reason for which it ended, "length" unless something ended it early; "" while it
            runs.
        refusal: the message with which it was refused, after which no time but the arrival counts;
            "" if it was accepted.
    """

    request_id: str
    arrival: float
    prompt_tokens: int
    samples: int = 1
    admitted: float = -1.0
    first_token: float = -1.0
    last_token: float = -1.0
    output_tokens: int = 0
    cached_tokens: int = 0
    reason: str = ""
    refusal: str = ""

    @classmethod
    def of(cls, arrival: Arrival) -> Timing:
        """Return the timing of a request that has just arrived."""
        request = arrival.request
        prompt = len(request.prompt_token_ids)
        return cls(request.request_id, arrival.seconds, prompt, request.sampling.num_samples)


@dataclass(slots=True)
class Steps:
    """The record of all steps, an entry for each, and of the memory in some of them.

    Attributes:
        ended: the time at which the engine took in the step's tokens.
        tokens, sequences: the numbers of tokens and sequences of the step.
        waiting: the number of sequences that waited when the step had been scheduled.
        device: the seconds of the device for the step.
        computed, again: the numbers of tokens that all steps computed, and of those of them that
            had been computed before.
        copied: the number of copied blocks.
        swapped: tokens in blocks that were moved over the link.
        memory: (time, slots that hold a token, slots that have an owner) of every 16th step.
    """

    ended: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    computed: int = 0
    again: int = 0
    copied: int = 0
    swapped: int = 0
    memory: list[tuple[float, int, int]] = field(default_factory=list)


def work_of(batch: Batch, block_size: int, before: Batch | None = None) -> StepWork:
    """Return the counts of a batch from which the cost model predicts a step's time.

    Args:
        batch: the batch of the step.
        block_size: the tokens of a cache block.
        before: the batch of the step before; None for the first step.
    """
    runs = batch.sequences
    tokens = logits = samples = keys = pairs = prompts = 0
    is_decode = True
    renews = bool(batch.left) or before is None or not _goes_on(batch, before)
    for run in runs:
        n, start, drawn = len(run.token_ids), run.start, run.num_samples
        tokens += n
        keys += start + n
        if drawn:
            logits += 1
            samples += drawn
        if n > 1:
            pairs += n * start + n * (n + 1) // 2
            prompts += n
        if n > 1 or drawn != 1:
            is_decode = False
        elif run.num_generated == 1:
            renews = True
    copied = len(batch.block_copies) * block_size
    # Batches of a scheduler that does not swap have no such fields.
    moved = len(getattr(batch, "swap_out", ())) + len(getattr(batch, "swap_in", ()))
    return StepWork(
        tokens,
        len(runs),
        logits,
        samples,
        keys,
        pairs,
        copied,
        moved * block_size,
        is_decode,
        before is not None and (renews or not is_decode),
        sum(map(len, batch.states)),
        prompts,
    )


def _goes_on(batch: Batch, before: Batch) -> bool:
    """Return whether two batches have the same sequences in the same order."""
    runs, earlier = first_of(batch.sequences)[0], first_of(before.sequences)[0]
    if runs is earlier:
        return True
    return len(runs) == len(earlier) and all(
        a.seq_id == b.seq_id for a, b in zip(runs, earlier, strict=True)
    )


class _Tokens:
    """The tokens of a virtual model: each sequence draws one number of its own again and again."""

    def __init__(self) -> None:
        self._own: dict[int, list[SampledToken]] = {}
        self._numbers = itertools.count(FIRST_DRAWN)

    def draw(self, batch: Batch) -> list[list[SampledToken]]:
        drawn = []
        for run in batch.sequences:
            if run.num_samples == 1:
                token = self._own.get(run.seq_id)
                if token is None:
                    token = self._own[run.seq_id] = [SampledToken(next(self._numbers))]
                drawn.append(token)
            else:
                drawn.append([SampledToken(next(self._numbers)) for _ in range(run.num_samples)])
        return drawn

    def forget(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            self._own.pop(seq_id, None)


class VirtualEngine:
    """Runs a scheduler's steps without a model, and computes when each would have ended.

    Args:
        scheduler: a new scheduler; it may have tables of another kind.
        clock: a function from the work of a step to its seconds; `cost.StepCost` is one.
        overlap: True to submit a step before the result of the one before is known.
        watch: a function that is called with each batch when it has been scheduled.
        slots_taken: a function that returns the number of cache slots that have an owner; None asks
            the tables' allocator.

    Attributes:
        timings: the timing of every request, by its id, in the order of arrival.
        steps: the record of all steps.
        now: the host's time, in seconds from the start.
        tell: a function that is called with the events of a step and the time at which it ended;
            None calls nothing.

    Example:
        >>> engine = VirtualEngine(scheduler, StepCost(sizes, machine("h200")), overlap=True)
        >>> timings = engine.run([Arrival(0.0, request)])
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Callable[[StepWork], StepSeconds],
        *,
        overlap: bool = False,
        watch: Callable[[Batch], None] | None = None,
        slots_taken: Callable[[], int] | None = None,
    ) -> None:
        self.scheduler, self.clock, self.watch = scheduler, clock, watch
        self.slots_taken = slots_taken or self._slots_of_blocks
        scheduler.max_in_flight = 2 if overlap else 1
        self.timings: dict[str, Timing] = {}
        self.steps = Steps()
        self.now = 0.0
        self.tell: Callable[[Sequence[TokenEvent], float], object] | None = None
        self._device_free = 0.0
        self._before: Batch | None = None
        self._tokens = _Tokens()
        self._unfinished: deque[tuple[Batch, list[list[SampledToken]], float, StepSeconds]] = (
            deque()
        )
        self._reached: dict[int, int] = {}  # tokens computed so far, by seq_id

    def run(self, arrivals: Iterable[Arrival]) -> list[Timing]:
        """Serve requests until all have ended.

        Args:
            arrivals: the requests in order of time; each is taken from the iterator when the one
                before has come, so that a long trace need not be in memory.

        Returns:
            The timings of the requests, in order of arrival; that of a refused one has the reason.

        Raises:
            ValueError: arrivals are out of order.
        """
        coming = iter(arrivals)
        following = next(coming, None)
        while following is not None or self.has_work:
            while following is not None and following.seconds <= self.now:
                self.add(following)
                following = self._next(coming, following)
            if not self.step():
                assert following is not None, "who is unfinished runs"
                self.now = max(self.now, following.seconds)
        return list(self.timings.values())

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._unfinished) or self.scheduler.has_unfinished()

    def _next(self, coming: Iterable[Arrival], last: Arrival) -> Arrival | None:
        following = next(iter(coming), None)
        if following is not None and following.seconds < last.seconds:
            raise ValueError(
                f"arrivals must be in order of time, got {following.seconds} after {last.seconds}"
            )
        return following

    def add(self, arrival: Arrival) -> None:
        """Add a request between two steps, and move the host's time on to its arrival if that is
        later.

        A request that the scheduler refuses gets a timing with the reason.
        """
        self.now = max(self.now, arrival.seconds)
        request = arrival.request
        timing = Timing.of(arrival)
        try:
            self.scheduler.add(request)
        except RequestError as error:
            timing.refusal = str(error)
        self.timings[request.request_id] = timing

    def step(self) -> bool:
        """Schedule what may be, finish the oldest unfinished step, and return whether there was
        one.

        The host's time moves on to when the step's tokens are taken in.
        """
        self._submit()
        if not self._unfinished:
            return False
        batch, drawn, end, seconds = self._unfinished.popleft()
        self.now = max(self.now, end) + seconds.after
        events = self.scheduler.update(batch, drawn)
        take(self.timings, events, self.now)
        if self.tell is not None:
            self.tell(events, self.now)
        self.steps.ended.append(self.now)
        while self._unfinished and not self.scheduler.has_unfinished():
            batch, _, end, _ = self._unfinished.popleft()
            self.now = max(self.now, end)
            self.scheduler.discard(batch)
            self.steps.ended.append(self.now)
        return True

    def _submit(self) -> None:
        """Schedule steps until one is unfinished, two with overlap, or none can run; compute their
        ends."""
        scheduler, steps = self.scheduler, self.steps
        while len(self._unfinished) < scheduler.max_in_flight:
            batch = scheduler.schedule()
            if batch is None:
                return
            scheduled = self.now
            work = work_of(batch, scheduler.tables.block_size, self._before)
            self._before = batch
            seconds = self.clock(work)
            self.now += seconds.before
            begin = max(self.now, self._device_free)
            self.now += seconds.launching
            end = self._device_free = max(begin + seconds.device, self.now)
            self._unfinished.append((batch, self._tokens.draw(batch), end, seconds))
            self._count(batch, work, seconds, scheduled)
            if len(steps.tokens) % SAMPLED_STEPS == 1:
                steps.memory.append((scheduled, *self._slots()))
            if self.watch is not None:
                self.watch(batch)

    def _count(self, batch: Batch, work: StepWork, seconds: StepSeconds, when: float) -> None:
        steps, reached = self.steps, self._reached
        steps.tokens.append(work.tokens)
        steps.sequences.append(work.sequences)
        steps.waiting.append(len(self.scheduler.roster.waiting))
        steps.device.append(seconds.device)
        steps.computed += work.tokens
        steps.copied += len(batch.block_copies)
        steps.swapped += work.swapped_slots
        live = self.scheduler.roster.live
        if batch.left:
            gone = [seq_id for seq_id in batch.left if seq_id not in live]
            self._tokens.forget(gone)
            for seq_id in gone:
                reached.pop(seq_id, None)
        for run in batch.sequences:
            seq_id, start = run.seq_id, run.start
            end = start + len(run.token_ids)
            before = reached.get(seq_id)
            if before is None:
                seq = live[seq_id]
                timing = self.timings[seq.request.request_id]
                if timing.admitted < 0:
                    timing.admitted = when
                # A sample that forked has its prompt from the first one.
                before = seq.num_prompt_tokens if seq.index else 0
            if start < before:
                steps.again += min(end, before) - start
                end = max(end, before)
            reached[seq_id] = end

    def _slots(self) -> tuple[int, int]:
        """Return the slots that hold a token once the steps begun have ended, and those that have
        an owner."""
        tables, running = self.scheduler.tables, self.scheduler.roster.running
        held = tables.slots_used({s: s.num_scheduled_tokens for s in running})
        return held, self.slots_taken()

    def _slots_of_blocks(self) -> int:
        tables = self.scheduler.tables
        return tables.allocator.num_used * tables.block_size


def take(timings: Mapping[str, Timing], events: Sequence[TokenEvent], now: float) -> None:
    """Update the timings of requests, by request id, with the tokens of a step that ended at
    `now`."""
    for event in events:
        timing = timings[event.request_id]
        if event.token is not None:
            if not timing.output_tokens:
                timing.first_token = now
                timing.cached_tokens = event.num_cached_tokens
            timing.output_tokens += 1
        timing.last_token = now
        if event.finish_reason is not None and timing.reason in ("", FinishReason.LENGTH.value):
            timing.reason = event.finish_reason.value
