"""Decide what runs in each step: a token budget handed out to sequences. No torch.

There is no prefill or decode phase. A sequence has num_tokens, of which num_computed_tokens are in
the cache; a step computes some of the rest, and the step that computes the last one samples.

One step:
  1. Running sequences first, the oldest first: each gets what it lacks, up to the budget left. One
     that needs a block when none is free takes those of the newest running sequence, which goes
     back to the front of the queue and is recomputed later, largely from the prefix cache. If it is
     itself the newest, it goes.
  2. If nobody lost blocks, waiting sequences in order of arrival, until a seat, the budget or the
     blocks for the whole of the first one are missing. Nobody overtakes.

Why every accepted request ends: sequences keep one order, (arrival, sample), with all running ones
before all waiting ones. The first of them is never preempted while another runs, alone it fits the
cache (admission has checked), and so it advances in every step until it ends.

Source: the unified scheduler of vLLM V1 for the loop; Kwon et al. 2023, "Efficient Memory
Management for LLM Serving with PagedAttention", section 4.4 for fork and copy-on-write, 4.5 for
preemption by recomputation.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence as Seq

from tilewise.engine.admission import Limits
from tilewise.engine.batch import Batch, SampledToken, ScheduledSequence, TokenEvent
from tilewise.engine.block_tables import BlockTables
from tilewise.engine.request import FinishReason, Request, Sequence
from tilewise.engine.stats import SchedulerStats
from tilewise.errors import RequestError

__all__ = ["Scheduler"]


class Scheduler:
    """Admit requests, build steps, take their results.

    Args:
        num_blocks: cache blocks, all usable.
        block_size: tokens per block.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step.
        max_model_len: tokens of a sequence, prompt and generated.
        max_chunk_tokens: tokens of one sequence in one step; None leaves the whole budget.
        enable_prefix_caching: reuse the blocks of equal prompt beginnings.
        seed: from which requests without a seed draw theirs, by order of arrival.

    Raises:
        ValueError: a limit is out of its range.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_chunk_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        seed: int = 0,
    ) -> None:
        self.limits = Limits(
            num_blocks,
            block_size,
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            max_chunk_tokens,
        )
        self.tables = BlockTables(num_blocks, block_size, enable_prefix_caching)
        self.seed = seed
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._requests: dict[str, list[Sequence]] = {}  # of unfinished requests, by arrival
        self._live: dict[int, Sequence] = {}  # unfinished sequences by seq_id
        self._in_flight: Batch | None = None
        self._num_arrivals = 0
        self._num_sequences = 0
        self._num_preemptions = 0
        self._blocks_peak = 0
        self._slots_peak = 0

    def add(self, request: Request) -> None:
        """Accept a request into the queue, or refuse it and change nothing.

        Raises:
            RequestError: it can never be served, or its id is that of an unfinished request.
        """
        if request.request_id in self._requests:
            raise RequestError(
                f"request_id must be unique among unfinished requests, got {request.request_id!r}"
            )
        self.limits.check(request)
        given = request.sampling.seed
        seed = (
            _derive_seed("arrival", self.seed, self._num_arrivals)
            if given is None
            else _derive_seed("request", given)
        )
        self._num_arrivals += 1
        seq = self._new_sequence(request, 0, seed)
        self._requests[request.request_id] = [seq]
        self._waiting.append(seq)

    def schedule(self) -> Batch | None:
        """Build the next step; its results go to update().

        Returns:
            At least one run of tokens, or None if nothing is unfinished.

        Raises:
            RuntimeError: the results of the previous step have not been given.
        """
        if self._in_flight is not None:
            raise RuntimeError("update() or discard() must follow schedule() before the next one")
        runs, budget, lacked_blocks = self._schedule_running()
        if not lacked_blocks:
            runs |= self._admit_waiting(budget)
        copies = self.tables.take_copies()
        if not runs:
            assert not self._requests, "an unfinished request runs in every step"
            return None
        self._note_peak(runs)
        batch = Batch(tuple(self._describe(s, n) for s, n in runs.items()), copies)
        self._in_flight = batch
        return batch

    def update(self, batch: Batch, samples: Seq[Seq[SampledToken]]) -> list[TokenEvent]:
        """Take the tokens that a step has drawn.

        A sequence that was aborted since is skipped. The step that completes the prompt of a
        request for n samples forks it.

        Args:
            batch: what schedule() returned last.
            samples: for each of its sequences num_samples tokens.

        Returns:
            One event per token, in the order of the batch.

        Raises:
            ValueError: batch is not the last one, or samples do not have its shape.
        """
        self._check_in_flight(batch)
        expected = [s.num_samples for s in batch.sequences]
        if expected != [len(drawn) for drawn in samples]:
            raise ValueError(
                f"samples must be {expected} tokens per sequence, got {[len(d) for d in samples]}"
            )
        self._in_flight = None
        events: list[TokenEvent] = []
        for run, drawn in zip(batch.sequences, samples, strict=True):
            seq = self._live.get(run.seq_id)
            if seq is None:
                continue
            seq.num_computed_tokens += len(run.token_ids)
            self.tables.register(seq)
            family = self._fork(seq, run.seeds[1:])
            events += [self._append(s, t) for s, t in zip(family, drawn, strict=False)]
        # Only a request of more samples than there are seats can have forked beyond them.
        while len(self._running) > self.limits.max_num_seqs:
            self._preempt_newest()
        return events

    def discard(self, batch: Batch) -> list[str]:
        """Abort all requests of a step that failed and return their ids.

        Nothing of the step is kept: blocks become findable only after their step has succeeded.

        Raises:
            ValueError: batch is not the last one.
        """
        self._check_in_flight(batch)
        self._in_flight = None
        failed = {
            self._live[s.seq_id].request.request_id: None
            for s in batch.sequences
            if s.seq_id in self._live
        }
        for request_id in failed:
            self.abort(request_id)
        return list(failed)

    def finish(
        self,
        request_id: str,
        index: int,
        reason: FinishReason,
        stop_reason: int | str | None = None,
    ) -> bool:
        """End one sample from outside, as when its text holds a stop string.

        Returns:
            Whether it was unfinished.
        """
        for seq in self._requests.get(request_id, ()):
            if seq.index == index and seq.finish_reason is None:
                self._finish(seq, reason, stop_reason)
                return True
        return False

    def abort(self, request_id: str) -> bool:
        """End all samples of a request; allowed while a step is in flight.

        Returns:
            Whether any was unfinished.
        """
        unfinished = [s for s in self.sequences(request_id) if s.finish_reason is None]
        for seq in unfinished:
            self._finish(seq, FinishReason.ABORT, None)
        return bool(unfinished)

    def has_unfinished(self) -> bool:
        """Return whether schedule() has something to do."""
        return bool(self._requests)

    def sequences(self, request_id: str) -> list[Sequence]:
        """Return the samples of an unfinished request, ended ones included; else an empty list."""
        return list(self._requests.get(request_id, ()))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks, as after a change of weights.

        Returns:
            False if a sequence holds blocks; nothing is forgotten then.
        """
        if self._running:
            return False
        if self.tables.prefix is not None:
            self.tables.prefix.reset()
        return True

    def stats(self) -> SchedulerStats:
        """Return a snapshot."""
        allocator, prefix = self.tables.allocator, self.tables.prefix
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_blocks=self.limits.num_blocks,
            block_size=self.limits.block_size,
            blocks_used=allocator.num_used,
            blocks_peak=self._blocks_peak,
            slots_used=self._slots_used({s: s.num_computed_tokens for s in self._running}),
            slots_peak=self._slots_peak,
            prefix_query_tokens=prefix.num_query_tokens if prefix else 0,
            prefix_hit_tokens=prefix.num_hit_tokens if prefix else 0,
            num_preemptions=self._num_preemptions,
        )

    def explain(self, request_id: str) -> str:
        """Say in one line what a request is doing or what it waits for."""
        unfinished = [s for s in self.sequences(request_id) if s.finish_reason is None]
        if not unfinished:
            return "unknown or finished"
        seq = unfinished[0]
        if seq.block_ids:
            return f"running: {seq.num_computed_tokens} of {seq.num_tokens} tokens are computed"
        place = self._waiting.index(seq)
        if place > 0:
            return f"waiting: {place} sequences are before it"
        seats = self._seats(seq) + sum(map(self._seats, self._running))
        if seats > self.limits.max_num_seqs:
            return f"waiting: {seats - self.limits.max_num_seqs} of its seats are taken"
        missing = self.tables.missing_blocks(seq)
        if missing:
            return f"waiting: {missing} more cache blocks must become free"
        return "waiting: next in line for the token budget"

    def check_integrity(self) -> None:
        """Verify the invariants between steps; meant for tests and debugging.

        Raises:
            AssertionError: names the invariant that is broken.
        """
        self.tables.check_integrity(self._running)
        queue = [*self._running, *self._waiting]
        by_age = [s for family in self._requests.values() for s in family if not s.finish_reason]
        rules = [
            (queue == by_age, "running, then waiting, are the unfinished by arrival and sample"),
            (list(self._live) == sorted(self._live), "seq_ids grow"),
            (set(self._live.values()) == set(queue), "live sequences run or wait"),
            (len(self._running) <= self.limits.max_num_seqs, "sequences have seats"),
            (
                all(s.num_computed_tokens < s.num_tokens for s in self._running),
                "a running sequence has a token to compute",
            ),
            (
                not any(s.block_ids or s.num_computed_tokens for s in self._waiting),
                "a waiting sequence holds nothing",
            ),
            (
                bool(self._running) or self.tables.allocator.num_used == 0,
                "nothing running means nothing used",
            ),
        ]
        for holds, rule in rules:
            if not holds:
                raise AssertionError(f"broken invariant: {rule}")

    def _schedule_running(self) -> tuple[dict[Sequence, int], int, bool]:
        """Return the runs of those that hold blocks, the budget left, whether blocks ran out."""
        runs: dict[Sequence, int] = {}
        budget = self.limits.max_num_batched_tokens
        lacked_blocks = False
        i = 0
        while i < len(self._running) and budget > 0:
            seq = self._running[i]
            n = self._chunk(seq, budget)
            if not self.tables.extend(seq, seq.num_computed_tokens + n):
                lacked_blocks = True
                self._preempt_newest()  # seq itself, if it is the newest: the loop ends then
                continue
            runs[seq] = n
            budget -= n
            i += 1
        return runs, budget, lacked_blocks

    def _admit_waiting(self, budget: int) -> dict[Sequence, int]:
        """Move waiting sequences to the running ones and return their runs."""
        runs: dict[Sequence, int] = {}
        if not self._waiting:
            return runs
        seats = sum(map(self._seats, self._running))
        while self._waiting and budget > 0:
            seq = self._waiting[0]
            seats += self._seats(seq)
            if seats > self.limits.max_num_seqs or not self.tables.reserve(seq):
                break
            if seq.num_tokens == seq.num_prompt_tokens and seq.num_preemptions == 0:
                seq.num_cached_tokens = seq.num_computed_tokens
            self._running.append(self._waiting.popleft())
            runs[seq] = self._chunk(seq, budget)
            budget -= runs[seq]
        return runs

    def _chunk(self, seq: Sequence, budget: int) -> int:
        limit = self.limits.max_chunk_tokens
        lacking = seq.num_tokens - seq.num_computed_tokens
        return min(lacking, budget, lacking if limit is None else limit)

    def _seats(self, seq: Sequence) -> int:
        """Seats to keep for a sequence: those of all its samples until it has forked."""
        if seq.num_tokens > seq.num_prompt_tokens:
            return 1
        return min(seq.request.sampling.n, self.limits.max_num_seqs)

    def _describe(self, seq: Sequence, n: int) -> ScheduledSequence:
        start = seq.num_computed_tokens
        end = start + n
        num_generated = seq.num_tokens - seq.num_prompt_tokens
        seeds: tuple[int, ...] = ()
        if end == seq.num_tokens:
            seeds = (seq.seed,)
            if num_generated == 0:
                samples = range(1, seq.request.sampling.n)
                seeds += tuple(_derive_seed("sample", seq.seed, i) for i in samples)
        return ScheduledSequence(
            seq_id=seq.seq_id,
            token_ids=tuple(seq.token_ids[start:end]),
            start=start,
            block_ids=tuple(seq.block_ids[: self.tables.blocks_for(end)]),
            num_samples=len(seeds),
            sampling=seq.request.sampling,
            seeds=seeds,
            num_generated=num_generated,
        )

    def _new_sequence(self, request: Request, index: int, seed: int) -> Sequence:
        prompt = list(request.prompt_token_ids)
        seq = Sequence(self._num_sequences, request, index, prompt, len(prompt), seed)
        self._num_sequences += 1
        self._live[seq.seq_id] = seq
        return seq

    def _fork(self, parent: Sequence, seeds: tuple[int, ...]) -> list[Sequence]:
        """Return the parent and one new sequence per seed that shares all its blocks."""
        children = []
        for index, seed in enumerate(seeds, start=1):
            child = self._new_sequence(parent.request, index, seed)
            child.num_cached_tokens = parent.num_cached_tokens
            child.num_preemptions = parent.num_preemptions
            self.tables.fork(parent, child)
            children.append(child)
        if children:
            after = self._running.index(parent) + 1
            self._running[after:after] = children
            self._requests[parent.request.request_id] += children
        return [parent, *children]

    def _append(self, seq: Sequence, token: SampledToken) -> TokenEvent:
        seq.token_ids.append(token.token_id)
        reason, stop_reason = self._why_finished(seq, token.token_id)
        if reason is not None:
            self._finish(seq, reason, stop_reason)
        return TokenEvent(
            seq.request.request_id, seq.index, token, reason, stop_reason, seq.num_cached_tokens
        )

    def _why_finished(self, seq: Sequence, token_id: int) -> tuple[FinishReason | None, int | None]:
        sampling = seq.request.sampling
        if token_id in (sampling.stop_token_ids or ()):
            return FinishReason.STOP, token_id
        if token_id in seq.request.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP, None
        if seq.num_tokens >= self.limits.max_len(seq.request):
            return FinishReason.LENGTH, None
        return None, None

    def _finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        if seq.block_ids:
            self._running.remove(seq)
        else:
            self._waiting.remove(seq)
        self.tables.release(seq)
        seq.finish_reason = reason
        seq.stop_reason = stop_reason
        del self._live[seq.seq_id]
        family = self._requests[seq.request.request_id]
        if all(s.finish_reason is not None for s in family):
            del self._requests[seq.request.request_id]

    def _preempt_newest(self) -> None:
        seq = self._running.pop()
        self.tables.release(seq)
        seq.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting.appendleft(seq)

    def _check_in_flight(self, batch: Batch) -> None:
        if batch is not self._in_flight:
            raise ValueError("batch must be the one that schedule() returned last, got another")

    def _note_peak(self, runs: dict[Sequence, int]) -> None:
        used = self.tables.allocator.num_used
        if used > self._blocks_peak:
            self._blocks_peak = used
            computed = {s: s.num_computed_tokens + runs.get(s, 0) for s in self._running}
            self._slots_peak = self._slots_used(computed)

    def _slots_used(self, computed: dict[Sequence, int]) -> int:
        slots = self.tables.allocator.num_used * self.limits.block_size
        return slots - self.tables.num_wasted_slots(computed)


def _derive_seed(*parts: object) -> int:
    """Return 63 bits that depend on all parts and on nothing else."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
