"""Decide what runs in each step: a token budget handed out to sequences. No torch.

There is no prefill or decode phase. A sequence has num_tokens, of which num_computed_tokens are in
the cache; a step computes some of the rest, and the step that computes the last one samples.

One step:
  1. Running sequences in their order. Each gets what it lacks, up to the budget left and, of a
     prompt, up to long_prefill_token_threshold. If a sequence needs a block and none is free, a
     victim (`preemption`) loses its blocks, waits, and is computed again or swapped in; a sequence
     can be its own victim. If an older sequence writes the next block of a prompt in this step, the
     prompt waits and then shares that block: equal prompts that arrive together are computed once.
  2. If no sequence lost blocks: waiting sequences in the order of the policy (`order`), until
     seats, budget or blocks do not suffice for the whole next one. None overtakes another. A
     request for n samples is admitted with one seat; once its prompt is computed, samples without a
     seat wait, and until then the seats of all n are kept from requests behind it. A sequence that
     is swapped in runs from the next step on, if others run in this one meanwhile.
With fair_prompt_tokens a step may run newcomers alone (`newcomers`); the next step is as above. A
step that runs may be stopped and taken back for newcomers, for a share of the time (`giving_way`).
Plain steps of the same sequences go on without all this where it would decide nothing (`Steady`).

Beams (`beams`) are sequences like others. A beam whose log-probabilities are known rests until all
beams of its search have theirs. If a beam that has yet to run lacks a seat or blocks, the last
resting beam of its search loses its own and is computed again later; so do resting beams of later
searches when a sequence is admitted. Drafts (`speculative`) make a sequence compute more tokens in
a step and preempt nothing.

Overlap: with max_in_flight = 2 a step is scheduled while the one before runs, as if the tokens that
it samples were known. Lengths are known: a sequence that reaches its length in the running step is
not scheduled again, and one that is to fork waits for its token. End tokens are not known: if one
is found, what the next step computes for that sequence is dropped. So are results of a sequence
that was preempted meanwhile; it is computed again, and since its random numbers are counted, it
draws the same ones. A sequence whose next logits depend on tokens that the host must see
(`Request.needs_tokens`) waits for each token; others do not wait with it. Released blocks become
free when all steps that were unfinished at their release have finished (`BlockTables`); a sequence
that lacks a block waits for that first, and preempts only if too few became free.

Why every accepted request ends, whatever the order and the choice of victims:
  1. The first running sequence is never a victim. It fits the cache alone (admission has checked),
     and no sequence before it writes blocks that it could share. So it advances in every step that
     is scheduled while no other is unfinished, unless a sequence before it in the order was just
     admitted, or newcomers run alone, which they do not in the step after. If another step is
     unfinished, it also runs, or it waits for a token of that step or for blocks; then no other
     sequence runs before it, that step finishes, and the next is scheduled with none unfinished.
  2. Let m be the first in order of all admitted sequences or, if there are none, of the waiting
     ones. While m waits it is the next to be admitted, so no other is admitted. The running ones
     end one by one by 1, or lose their blocks to one that does. When none is left m has room:
     alone, or with the samples that were swapped out with it, which had room together. Once m runs
     it is the first running sequence until it ends, because ranks do not change, and by 1 it
     advances. Then the argument holds for the next m.
  3. So each request ends before which only finitely many others come. With `fcfs` these are the
     earlier ones. With `fair` they are finite, too: while a user's request waits, the user's
     counter stands still and each admission raises another user's. With `priority` an endless
     stream of more important requests keeps a less important one waiting, as documented.
For a search, 1 is about its first beam that does not rest: resting beams that run before it give
way to it, until it runs alone. When it has its row it rests and the next beam is the first; when
all rest, each surviving beam has one token more: a search takes at most max_tokens such rounds.
If no sequence runs because all have lost their blocks, they wait and the first is admitted at once.
A sequence that waits for another's block waits for a sequence before it that writes that block in
this step or in an unfinished one; if that one ends or is preempted, the wait ends.

Source: the unified scheduler of vLLM V1 for the loop; Kwon et al. 2023, "Efficient Memory
Management for LLM Serving with PagedAttention", 4.4 (fork, copy-on-write), 4.5 (preemption).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple

from tilewise.engine.batch import PENDING, Asked, Batch, SampledToken, ScheduledSequence, TokenEvent
from tilewise.engine.config import DraftModel, OwnHead, PromptLookup
from tilewise.engine.request import FinishReason, Request, Sequence
from tilewise.engine.scheduling.beams import Beams, BeamSearchParams
from tilewise.engine.scheduling.deadlines import Deadlines
from tilewise.engine.scheduling.insight import Insight
from tilewise.engine.scheduling.newcomers import Newcomers
from tilewise.engine.scheduling.order import order_of
from tilewise.engine.scheduling.plain_steps import Steady, check_samples
from tilewise.engine.scheduling.preemption import Preemption
from tilewise.engine.scheduling.results import Results
from tilewise.engine.scheduling.roster import Roster, seats
from tilewise.engine.scheduling.speculative import NO_DRAFTS, Speculation
from tilewise.engine.seeds import derive_seed
from tilewise.engine.stats import SchedulerStats
from tilewise.engine.tables.admission import Limits
from tilewise.engine.tables.block_tables import Content
from tilewise.engine.tables.state_tables import StateLimits
from tilewise.engine.tables.swap_space import BlockStore
from tilewise.engine.tables.tables_of import tables_of
from tilewise.errors import RequestError

__all__ = ["Scheduler"]

Runs = list[tuple[Sequence, int]]  # sequences and the number of tokens of each


class _Step(NamedTuple):
    """An unfinished step: its batch, and for each of its sequences the number of preemptions when
    it was scheduled."""

    batch: Batch
    preemptions: list[int]


class Scheduler:
    """Admit requests, build steps, process their results.

    Args:
        num_blocks: the cache blocks, all usable; of every group of layers, or one number for each.
        block_size: the tokens of a block.
        windows: the window of each group of layers, None for all keys, see `CacheSpec.groups`.
        max_num_seqs: the largest number of sequences that run at once.
        max_num_batched_tokens: the largest number of tokens of one step.
        max_model_len: the largest number of tokens of a sequence, prompt and generated.
        long_prefill_token_threshold: the largest number of tokens of one sequence in one step; None
            for the whole budget. Below the budget, requests behind a long prompt start with it.
        enable_prefix_caching: True to reuse the blocks of equal prompt beginnings.
        seed: the seed from which requests without one draw theirs, by order of arrival.
        max_in_flight: the number of steps that may be unfinished at a time, 1 or 2; may be set
            later.
        scheduling_policy, user_weights: the order of sequences, see `order`.
        preemption, victim: the choice of victims and their treatment, see `preemption`.
        num_swap_blocks: the blocks of main memory for swapped-out sequences and cold prefixes; of
            every group of layers, or one number for each.
        store: the file store of cold prefixes; a sequence with one for each group of layers, if
            there are several or one with a window.
        speculative: the parameters of drafts, see `speculative`; None for none.
        max_waiting_requests: the number of requests that may wait without having run; None for no
            bound.
        max_waiting_tokens: the tokens of their prompts together; None for no bound.
        fair_prompt_tokens: with the policy "fair", the number of prompt tokens after whose
            admission a step admits no other request, so that the next user does not wait for a
            whole flood of prompts; None for no bound.
        is_encoder: True if each prompt runs whole, in one step, and nothing follows it.
        max_loras: the number of different adapters of running sequences; None for no bound.
        states: the sizes of the states of layers that keep one, see `state_tables`; None for a
            model without. Checkpoints are one more group of num_swap_blocks and store.
        clock: a function that returns seconds, for deadlines.

    Raises:
        ValueError: a limit is out of its range, or there is not one store for each group of layers.
    """

    def __init__(
        self,
        num_blocks: int | Seq[int],
        block_size: int,
        *,
        windows: Seq[int | None] = (None,),
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        long_prefill_token_threshold: int | None = None,
        enable_prefix_caching: bool = True,
        seed: int = 0,
        max_in_flight: int = 1,
        scheduling_policy: str = "fcfs",
        user_weights: Mapping[str, float] | None = None,
        preemption: str = "auto",
        victim: str = "newest",
        num_swap_blocks: int | Seq[int] = 0,
        store: BlockStore | Seq[BlockStore] | None = None,
        speculative: PromptLookup | DraftModel | OwnHead | None = None,
        max_waiting_requests: int | None = None,
        max_waiting_tokens: int | None = None,
        fair_prompt_tokens: int | None = None,
        is_encoder: bool = False,
        max_loras: int | None = None,
        states: StateLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        counts = [num_blocks] * len(windows) if isinstance(num_blocks, int) else [*num_blocks]
        self.limits = Limits(
            counts[0],
            block_size,
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            long_prefill_token_threshold,
            max_waiting_requests,
            max_waiting_tokens,
            tuple(windows),
            tuple(counts[1:]),
            fair_prompt_tokens,
            is_encoder,
            max_loras,
        )
        self.tables = tables_of(self.limits, enable_prefix_caching, num_swap_blocks, store, states)
        self.trace = self.tables.trace
        self.seed = seed
        self.order = order_of(scheduling_policy, user_weights)
        self.roster = Roster(self.order)
        self.beams = Beams(self.roster, self.tables)
        self.preemption = Preemption(self.roster, self.tables, self.beams, preemption, victim)
        self.results = Results(self.roster, self.tables, self.beams, self.preemption)
        self.steady = Steady(self.roster, self.tables, self.limits, self.results)
        self.speculation = None if speculative is None else Speculation(speculative)
        self.newcomers = Newcomers(self.roster, self.limits)
        self.insight = Insight(self.roster, self.tables, self.limits, self.beams, self.preemption)
        self.deadlines = Deadlines(self.roster)
        self.clock, self.max_in_flight = clock, max_in_flight
        self._steps: deque[_Step] = deque()  # unfinished ones, the oldest first
        # the sequences that write blocks in this step
        self._writer_of: dict[Content | None, Sequence] = {}
        self._num_arrivals = 0
        # A step has one run: steps failed that could not come again in parts.
        self.runs_one = False

    def add(self, request: Request) -> None:
        """Accept a request into the queue, or refuse it and change nothing.

        Raises:
            RequestError: the request can never be served, or its id is that of an unfinished
                request.
            QueueFullError: the limit of waiting requests or tokens is reached.
        """
        if request.request_id in self.roster.requests:
            raise RequestError(
                f"request_id must be unique among unfinished requests, got {request.request_id!r}"
            )
        self.limits.check(request)
        self.limits.check_queue(request, self.roster.num_queued, self.roster.num_queued_tokens)
        given, seed = request.sampling.seed, request.drawn_seed
        if seed is None:
            seed = (
                derive_seed("arrival", self.seed, self._num_arrivals)
                if given is None
                else derive_seed("request", given)
            )
            self._num_arrivals += 1
        seq = self.roster.enqueue(request, seed, self.limits.max_len(request), self.clock())
        if isinstance(request.sampling, BeamSearchParams):
            self.beams.start(seq)
        elif self.speculation is not None:
            seq.is_stepwise = self.speculation.suits(request)
        self.deadlines.add(seq)
        self.trace.arrive(request)

    def expire(self) -> list[TokenEvent]:
        """End the requests whose deadline_s or max_queue_s is over, in any state.

        It must be called before schedule(), so that nothing more is computed for them.

        Returns:
            One event without a token for each unfinished sample, those not forked yet included.
        """
        if not self.deadlines:
            return []
        return [
            event
            for request_id in self.deadlines.due(self.clock())
            for event in self.results.end_all(request_id, FinishReason.DEADLINE, None)
        ]

    def schedule(self) -> Batch | None:
        """Build the next step and count it as unfinished; its results are passed to update().

        Returns:
            A batch with at least one run, or None if nothing is unfinished, or nothing can run
            before the unfinished step has finished.

        Raises:
            RuntimeError: max_in_flight steps are unfinished.
        """
        if len(self._steps) >= self.max_in_flight:
            raise RuntimeError("update() or discard() must follow schedule() before the next one")
        is_steady = self.steady.goes_on()
        runs = Runs() if is_steady else self._choose()
        if not (is_steady or runs):
            return None
        is_short = self.speculation is None and self.tables.is_one_group
        described = self.steady.describe(runs, self._describe, is_short)
        sequences, is_plain, preemptions = described
        moved = self.tables.begin_step()  # after all that may evict: states are saved in runs
        copies = self.tables.take_copies()
        batch = Batch(
            sequences,
            copies,
            self.preemption.take_left(),
            *moved,
            self.tables.take_other_copies(),
            self.tables.take_other_moves(),
            is_plain,
        )
        if self.tables.states is not None:
            batch = replace(batch, states=self.tables.states.begin_step())
        self._steps.append(_Step(batch, preemptions))
        for kind, pairs in zip(("swap_out", "swap_in"), moved, strict=True):
            if pairs:
                self.trace.note(kind, *map(tuple, zip(*pairs, strict=True)))
        self.trace.schedule(batch)
        return batch

    def update(self, batch: Batch, samples: Seq[Seq[SampledToken]]) -> Seq[TokenEvent]:
        """Process the tokens that the oldest unfinished step has sampled.

        A sequence that has ended or was preempted since is skipped. The step that completes the
        prompt of a request for n samples forks it. A BROKEN token fails its request, see fail().

        Args:
            batch: the batch that schedule() returned.
            samples: num_samples tokens of each of its sequences, and one for each right draft.

        Returns:
            One event per token, in the order of the batch, and one per sample that has failed.

        Raises:
            ValueError: batch is not that of the oldest unfinished step, or samples do not have its
                shape.
        """
        if not self._steps or self._steps[0].batch is not batch:
            raise ValueError(
                "batch must be the one that schedule() returned first of those unfinished, "
                "got another"
            )
        check_samples(batch, samples)
        step = self._steps.popleft()
        self.tables.end_step(0)
        if batch.is_plain:
            taken = self.steady.take(batch, step.preemptions, samples)
            self.beams.settle()
            return taken
        live, results, events = self.roster.live, self.results, list[TokenEvent]()
        for run, preemptions, drawn in zip(batch.sequences, step.preemptions, samples, strict=True):
            seq = live.get(run.seq_id)
            if seq is None or seq.num_preemptions != preemptions:
                continue
            if self.order.counts_tokens:
                self.order.charge(seq.request.user, 0, len(drawn))
            if run.num_drafts:
                assert self.speculation is not None
                self.speculation.take(seq, run, drawn, self.tables)
                self.tables.register_states(seq)
                results.append_all(seq, drawn, events)
                continue
            seq.num_computed_tokens += len(run.token_ids)
            if seq.num_computed_tokens >= (seq.num_registered_blocks + 1) * self.tables.block_size:
                self.tables.register(seq)
            self.tables.register_states(seq)
            if run.num_samples == 0:
                continue
            seq.num_pending -= 1
            if seq.request.request_id in self.beams.searches:
                results.take_row(seq, drawn[0], events)
            elif run.num_samples == 1:
                results.append(seq, drawn[0], events)
            else:
                results.fork(seq, run.seeds[1:], drawn, events)
        self.beams.settle()
        # A request admitted to the last seat may fork beyond it.
        while len(self.roster.running) > self.limits.max_num_seqs:
            self.preemption.recompute(self.roster.running[-1])
        if self.tables.states is not None:
            self.tables.states.end_update()
            self.tables.states.settle()
        return events

    def requests_of(self, batch: Batch) -> list[str]:
        """Return the ids of the requests that a step runs and that have not ended, in its order."""
        live = self.roster.live
        found = (live[s.seq_id].request.request_id for s in batch.sequences if s.seq_id in live)
        return list(dict.fromkeys(found))

    def discard(self, batch: Batch) -> list[str]:
        """Abort all requests of an unfinished step that failed and return their ids.

        Nothing of the step is kept: blocks are registered only after their step has succeeded.
        Blocks that it was to swap out or in are recomputed.

        Raises:
            ValueError: batch is not that of an unfinished step.
        """
        places = [i for i, step in enumerate(self._steps) if step.batch is batch]
        if not places:
            raise ValueError("batch must be one that schedule() returned, unfinished, got another")
        del self._steps[places[0]]
        self.tables.end_step(places[0])
        failed = self.requests_of(batch)
        for request_id in failed:
            self.abort(request_id)
        later = [step.batch for i, step in enumerate(self._steps) if i >= places[0]]
        if self.tables.states is not None:
            self.tables.states.end_update()
        self.preemption.revoke(batch, later)
        return failed

    def can_run_again(self, batches: Seq[Batch]) -> bool:
        """Return whether failed steps would give the same results if they were run again in parts.

        A step that moves blocks to main memory or back would not, since later steps may have
        overwritten the blocks that it read. Nor would a step that takes a recurrent state past the
        chunk of tokens in which the state stood. One step of one sequence returns True in spite of
        its state: if it fails again, its request ends.
        """
        states = self.tables.states
        if any(batch.is_moving for batch in batches):
            return False
        if states is None or (len(batches) == 1 and len(batches[0].sequences) == 1):
            return True
        return all(map(states.can_run_again, batches))

    def finish(
        self,
        request_id: str,
        index: int,
        reason: FinishReason,
        stop_reason: int | str | None = None,
    ) -> bool:
        """End one sample from outside, for example when its text contains a stop string.

        The other samples go on, even if they have not forked yet.

        Returns:
            Whether it was unfinished.
        """
        return self.results.finish(request_id, index, reason, stop_reason)

    def abort(self, request_id: str) -> bool:
        """End all samples of a request; allowed while steps are unfinished.

        Returns:
            Whether any was unfinished.
        """
        return self.results.end(request_id, FinishReason.ABORT, None)

    def fail(
        self, request_id: str, error: Exception, *, is_damaged: bool = True
    ) -> list[TokenEvent]:
        """End all samples of a request whose numbers cannot be trusted, and no other request.

        The blocks that it has computed leave the prefix cache, so that no other request finds them.
        So do the blocks that it had found there, and all that follow them: it is not known in which
        block the damage began, and a chunk that samples nothing does not show it. With `is_damaged`
        False, as when a grammar has failed, all stays in the cache.

        Returns:
            One event without a token for each unfinished sample, those not forked yet included.
        """
        return self.results.fail(request_id, error, is_damaged=is_damaged)

    def has_unfinished(self) -> bool:
        """Return whether a request is unfinished, so that schedule() has something to do."""
        return bool(self.roster.requests)

    def sequences(self, request_id: str) -> list[Sequence]:
        """Return the samples of an unfinished request, ended ones included; else an empty list."""
        return list(self.roster.requests.get(request_id, ()))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks and swapped-out sequences, as after a change of weights.

        Returns:
            False if a sequence or an unfinished step holds blocks; nothing is forgotten then.
        """
        if self.roster.running or self._steps:
            return False
        for seq in self.roster.waiting:
            self.tables.drop_swapped(seq)
        self.tables.reset_prefix_cache()
        self.trace.note("reset")
        return True

    def stats(self) -> SchedulerStats:
        """Return a snapshot of the present queues and blocks, and of the totals since the start."""
        return self.insight.stats(self.speculation)

    def explain(self, request_id: str) -> str:
        """Return the state of a request in one line: how far it is computed, or why it waits.

        The line says "unknown or finished" for any other request.
        """
        return self.insight.explain(request_id)

    def check_integrity(self) -> None:
        """Verify the invariants, between steps or beside unfinished ones; meant for tests.

        Raises:
            AssertionError: an invariant is broken, and the message names it.
        """
        self.insight.check_integrity(has_steps=bool(self._steps))

    def _choose(self) -> Runs:
        """Return the runs of the next step; none if nothing can run now."""
        self._writer_of.clear()
        if self.runs_one and self._steps:
            return []
        runs, users = Runs(), self.newcomers.kept_waiting_by()
        if users:
            runs = self.admit_waiting(self.limits.max_num_batched_tokens, False, users)
        is_apart = bool(runs)
        if not runs:
            runs, budget, lacked_blocks = self._schedule_running()
            if not lacked_blocks or not (runs or self._steps):
                runs += self.admit_waiting(budget, bool(runs))
        if not runs and self.roster.running and not self._steps:
            # a sequence that was swapped in may need others' blocks
            runs, _, _ = self._schedule_running()
        assert runs or self._steps or not self.roster.requests, "an unfinished request runs"
        if runs:
            self.newcomers.ran_alone = is_apart
        return runs

    def _schedule_running(self) -> tuple[Runs, int, bool]:
        """Return the runs of sequences with blocks, the budget that is left, and whether blocks ran
        out.

        Sequences that need a block may make others lose theirs.
        """
        runs: Runs = []
        self._writer_of.clear()
        running, extend = self.roster.running, self.tables.extend
        budget, block_size = self.limits.max_num_batched_tokens, self.tables.block_size
        lacked_blocks = False
        if self.speculation is not None:
            self.speculation.begin(len(running), self.limits.long_prefill_token_threshold)
        i = 0
        while i < len(running) and budget > 0:
            seq = running[i]
            start, known = seq.num_scheduled_tokens, len(seq.token_ids)
            is_decoding = known - start == 1 - seq.num_pending and known > seq.num_prompt_tokens
            if is_decoding and not seq.is_stepwise:  # the usual case, without a call
                n = 1 if known + seq.num_pending < seq.max_len else 0
                if n and seq.num_pending and seq.request.needs_tokens:
                    n = 0
            else:
                n = self._chunk_unless_written(seq, budget)
                start = seq.num_scheduled_tokens
                if n == 1 and seq.is_stepwise and self.speculation is not None:
                    room = budget - (len(running) - i)  # one token for each sequence after this one
                    n += self.speculation.draft(seq, room, self.tables, len(running))
            # it waits for a token of an unfinished step, or for a block that is being written
            if n == 0:
                i += 1
            # A token in the same block as the one before it needs nothing.
            elif (n == 1 and start % block_size and not seq.shares_tail) or extend(seq, start + n):
                runs.append((seq, n))
                budget = 0 if self.runs_one else budget - n
                i += 1
            else:
                lacked_blocks = True
                if self.speculation is not None:
                    self.speculation.take_drafts(seq)  # the sequence does not run in this step
                if self.tables.has_fenced:
                    break
                # the victim may be seq itself: then the next one is at i
                self.preemption.preempt(i)
        return runs, budget, lacked_blocks

    def admit_waiting(self, budget: int, others_run: bool, but: Collection[str] = ()) -> Runs:
        """Admit waiting sequences, up to the first one of a user in `but`; return their runs.

        A sequence that is swapped in gets no run in this step if others run: its blocks arrive
        meanwhile.

        Admission ends where seats, adapters, blocks or budget do not suffice. One block per running
        sequence stays free: each needs its next within block_size steps, and would take it from the
        one just admitted. For 300 requests of 100 ... 1023 tokens in and out over 3000 blocks of
        16, simulated, this reduces the tokens computed twice from 25% to 9% of all, for 0.4% more
        steps; two blocks each reduce them to 5%, for 1.6% more.
        """
        runs: Runs = []
        running, waiting, tables = self.roster.running, self.roster.waiting, self.tables
        if not waiting or (
            len(running) >= self.limits.max_num_seqs
            and self.beams.who_makes_way(self.roster.first_waiting(), True) is None
        ):
            return runs
        num_seats = sum(map(seats, running))
        most = self.limits.fair_prompt_tokens if self.order.counts_tokens else None
        least_budget = 0 if most is None else budget - most
        adapters: set[int] | None = None  # of running sequences, when the first one is asked for
        while waiting and budget > 0 and (budget > least_budget or not runs):
            seq = self.roster.first_waiting()
            if self.beams.is_resting(seq) or seq.request.user in but:
                break
            if self.limits.is_encoder and seq.num_tokens > budget:
                break
            adapter = seq.request.adapter
            if adapter is not None:
                if adapters is None:
                    adapters = self.roster.adapters()
                if adapter.number not in adapters and len(adapters) == self.limits.max_loras:
                    break  # until the last request of one of them has ended
            group = self.preemption.group(seq)
            lacks_seat = num_seats + len(group) > self.limits.max_num_seqs
            if lacks_seat or not (
                tables.swap_in(group, len(running))
                if seq.swap_slots
                else tables.reserve(seq, len(running))
            ):
                resting = self.beams.who_makes_way(seq, lacks_seat)
                if resting is None:
                    break
                self.preemption.recompute(resting)
                num_seats -= 1
                adapters = None
                continue
            num_seats += sum(map(seats, group))
            if not seq.was_admitted:
                seq.num_cached_tokens = seq.num_computed_tokens
                if self.order.counts_tokens:
                    lacking = seq.num_tokens - seq.num_computed_tokens
                    self.order.charge(seq.request.user, lacking, 0)
            for sample in group:
                self.roster.admit(sample)
                self.trace.admit(sample, tables.held(sample, 0))
                self.beams.regroup(sample)
            if adapters is not None and adapter is not None:
                adapters.add(adapter.number)
            if (others_run or runs) and any(map(tables.is_coming, group)):
                continue
            for sample in group:
                n = self._chunk_unless_written(sample, budget) if budget else 0
                if n and tables.extend(sample, sample.num_scheduled_tokens + n):
                    runs.append((sample, n))
                    budget = 0 if self.runs_one else budget - n
        return runs

    def _chunk_unless_written(self, seq: Sequence, budget: int) -> int:
        """Return the number of next tokens of a sequence to run; 0 while another writes its next
        block.

        Before, blocks of the prompt that other sequences have written meanwhile are shared. A
        sequence that will write a block itself is noted as its writer.
        """
        tables = self.tables
        is_still = seq.num_scheduled_tokens == seq.num_computed_tokens
        if is_still:
            gained = tables.adopt(seq)
            if seq.num_tokens == seq.num_prompt_tokens and seq.num_preemptions == 0:
                seq.num_cached_tokens += gained
        content = tables.next_content(seq)
        writer = self._writer_of.get(content, seq)
        if is_still and writer is not seq and not seq.scores_prompt and tables.shares(seq, writer):
            return 0
        n = tables.cut(seq, self._chunk(seq, budget))
        end = seq.num_scheduled_tokens + n
        if content is not None and end >= (seq.num_registered_blocks + 1) * tables.block_size:
            self._writer_of.setdefault(content, seq)
        return n

    def _chunk(self, seq: Sequence, budget: int) -> int:
        """Return how many tokens of a sequence the next step runs; 0 if a token of it must be drawn
        first.

        Args:
            budget: the number of tokens that the step may still take.
        """
        known = len(seq.token_ids)
        if seq.num_pending:
            forks = known == seq.num_prompt_tokens and seq.request.sampling.num_samples > 1
            known += seq.num_pending
            is_last = known >= seq.max_len
            if forks or is_last or seq.is_stepwise or seq.request.needs_tokens:
                return 0
        lacking = known - seq.num_scheduled_tokens
        if lacking == 1:
            return 1
        return min(lacking, budget, self.limits.long_prefill_token_threshold or lacking)

    def _describe(self, seq: Sequence, n: int) -> ScheduledSequence:
        """Return the run of the next n tokens of a sequence; count them as scheduled, and draws as
        pending.

        Drafts that were chosen for the sequence are at the run's end.
        """
        start, known, drawn = seq.num_scheduled_tokens, len(seq.token_ids), seq.num_pending
        end = seq.num_scheduled_tokens = start + n
        num_generated = known + drawn - seq.num_prompt_tokens
        if end > known:
            token_ids: tuple[int, ...] = (PENDING,)
        else:
            token_ids = (seq.token_ids[start],) if n == 1 else tuple(seq.token_ids[start:end])
        seeds: tuple[int, ...] = ()
        if end == known + drawn:
            seeds = (seq.seed,)
            seq.num_pending = drawn + 1
            is_forking = num_generated == 0 and seq.request.sampling.num_samples > 1
            if is_forking and self.beams.search_of(seq) is None:
                samples = range(1, seq.request.sampling.num_samples)
                seeds += tuple(derive_seed("sample", seq.seed, i) for i in samples)
        drafts, parents = self.speculation.take_drafts(seq) if self.speculation else NO_DRAFTS
        if drafts:
            token_ids, seeds = (seq.token_ids[start], *drafts), (seq.seed,)
            seq.num_pending = n
        slot = -1
        if self.tables.states is not None:
            slot = self.tables.states.schedule(seq, start, start + n)
        blocks, told = seq.block_ids, seq.num_told_blocks
        seq.num_told_blocks = len(blocks)
        request = seq.request
        asked = Asked.of(request, seq.token_ids, seq.num_prompt_tokens)
        return ScheduledSequence(
            seq.seq_id,
            token_ids,
            start,
            blocks,
            len(seeds),
            request.row_sampling,
            seeds,
            num_generated,
            told,
            asked,
            seq.is_stepwise,
            len(drafts),
            seq.token_ids if drafts else (),
            parents,
            self.tables.tell(seq),
            request.adapter,
            slot,
        )
