"""A runner that keeps its batch on the device, so that a decode step needs little or no data from
the host.

what decodes   every sequence runs one token and draws one: a `DecodeStep` of the bucket that holds
               the rows, captured as a CUDA graph or computed op by op
everything else  prompts, chunks and mixed steps: packed inputs, sent in one copy together with what
               changes in the rows; tokens that the host does not know yet are taken from the rows;
               `PromptSteps` pads them and replays graphs between the layers' attention
results        are copied to pinned memory on a stream of their own; `result` waits for that copy
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise import ops
from tilewise.cache.spec import LatentSpec
from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import (
    BROKEN,
    PENDING,
    Batch,
    PlainDraws,
    SampledToken,
    ScheduledSequence,
    ScoredToken,
    first_of,
)
from tilewise.engine.captured import decode_step
from tilewise.engine.captured.batch import Changes, Columns, DeviceBatch
from tilewise.engine.captured.decode_step import RING, DecodeStep, Results, buckets, shared_head
from tilewise.engine.captured.prompt_steps import PromptSteps, can_capture
from tilewise.engine.captured.shared_groups import SharedGroups
from tilewise.engine.steps import pooling
from tilewise.engine.steps.adapter_slots import AdapterSlots, FixedAdapters
from tilewise.engine.steps.adjuster import Adjuster, put_errors
from tilewise.engine.steps.block_copies import copy_in_all_layers
from tilewise.engine.steps.compilations import Compilations
from tilewise.engine.steps.prompt_scores import Chunk, PromptScores, finish, hand_over, score
from tilewise.engine.steps.runner import (
    SHARING_BYTES,
    CausalModel,
    Drawn,
    head_logits,
    is_device_lost,
)
from tilewise.engine.steps.state_moves import FixedStates, begin_states, end_states
from tilewise.engine.steps.step_logprobs import FoundLogprobs, Logprobs, StepLogprobs
from tilewise.engine.tables.host_cache import HostCache
from tilewise.nn.context import AttentionContext, StepPlans
from tilewise.ops import shared_prefixes

__all__ = ["DeviceRunner"]

# Logits that are drawn from at a time in a step of prompts: 256 MiB of float32.
MAX_SAMPLED = 2**26


class DeviceRunner:
    """A runner that keeps the batch on the device and replays steps as CUDA graphs.

    Args:
        model: see CausalModel.
        storage: the paged cache on the device of the model.
        max_num_seqs: the largest number of sequences of a batch.
        max_model_len: the largest number of tokens of a sequence.
        max_num_batched_tokens: the largest number of tokens of a step: steps with prompts are
            padded to `PromptSteps.sizes` and can be captured; None computes them as they are, op by
            op.
        batch_invariant: see `ModelRunner`; the model's products must be invariant, too.
        adapters: the slots of adapters; None for an engine without.

    Attributes:
        steps: the decode steps by their number of rows.
        shared_steps: the decode steps of rows that share prefixes; they are captured when they
            first run.
        greedy_steps: the decode steps of ranks with many rows that are all greedy.
        adapted_steps: the decode steps of which some rows use adapters; they share no prefixes.
        groups: the groups of sequences that share leading blocks in a decode step.
        host: main memory for blocks; None if no block is moved there. May be set before the first
            step.
        prompts: the padded steps with prompts; None where such steps run as they are, op by op.
        captures: True if a step is captured as a CUDA graph when it first runs.
        compilations: the counter of kernels that were compiled since the runner was ready.
        start_seconds: the seconds that each part of `graphs.prepare` took.
    """

    def __init__(
        self,
        model: CausalModel,
        storage: KVStorage,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int | None = None,
        batch_invariant: bool = False,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.model = model
        self.batch_invariant = batch_invariant
        self.storage = storage
        self.host: HostCache | None = None
        self.block_size = storage.spec.block_size
        self.device = storage.device
        self.compilations = Compilations()
        layer_bytes = storage.spec.bytes_per_token // max(storage.spec.num_layers, 1)
        self.sharing_tokens: int | None = None
        # The first group's tables say what is shared, and layers with a window do not share.
        shares = not isinstance(storage.spec.kv, LatentSpec) and storage.spec.windows[0] is None
        if self.device.type == "cuda" and not batch_invariant and shares and layer_bytes:
            self.sharing_tokens = SHARING_BYTES // layer_bytes
        max_blocks = math.ceil(max_model_len / self.block_size)
        self.rows = DeviceBatch(
            max_num_seqs, max_blocks, self.block_size, self.device, len(storage.parts)
        )
        self.results = Results(max_num_seqs, self.device)
        self.adjuster = Adjuster(self.device)
        self.scores = PromptScores()
        self.pools = pooling.Pools()
        self.buckets = buckets(max_num_seqs)
        self.steps: dict[int, DecodeStep] = {}
        self.shared_steps: dict[int, DecodeStep] = {}
        self.greedy_steps: dict[int, DecodeStep] = {}
        self.adapted_steps: dict[int, DecodeStep] = {}
        self.states = None if storage.states is None else FixedStates(storage.states, max_num_seqs)
        self.adapters = adapters
        self._adapted = None if adapters is None else FixedAdapters(adapters, max_num_seqs)
        self._known_slots: tuple[Sequence[ScheduledSequence], bool] = (), False  # of these runs
        self._greedy_head = shared_head(model)
        self._greedy: tuple[Sequence[ScheduledSequence], bool] = (), False  # runs, and their answer
        self.groups = SharedGroups(max_num_seqs, max_blocks, self.block_size, self.device)
        self.prompts: PromptSteps | None = None
        is_captured = can_capture(model) and storage.states is None
        if max_num_batched_tokens is not None and is_captured:
            self.prompts = PromptSteps(model, storage, max_num_batched_tokens, adapters)
        self.captures = False
        self.start_seconds: dict[str, float] = {}
        self._capturing: tuple[Any, torch.cuda.Stream] | None = None
        self._place = 0  # of the next results, as the device counts
        is_cuda = self.device.type == "cuda"
        self._pinned = [
            torch.zeros((max_num_seqs, 2), dtype=torch.int64, pin_memory=is_cuda)
            for _ in range(RING)
        ]
        self.logprobs = StepLogprobs(max_num_seqs, self.device)
        self._reading = torch.cuda.Stream(self.device) if is_cuda else None
        # Of steps that decode, in turn: that of a place was waited for before it comes again.
        self._computed = torch.cuda.Event() if is_cuda else None
        self._events = [torch.cuda.Event() if is_cuda else None for _ in range(RING)]

    @property
    def num_compilations(self) -> int:
        """Return how many kernels were compiled since warm-up ended; each has delayed a step."""
        return self.compilations.count

    def step_of(
        self,
        bucket: int,
        *,
        shares: bool = False,
        is_greedy: bool = False,
        adapted: bool = False,
    ) -> DecodeStep:
        """Return the decode step for `bucket` rows; it is made on first use and kept.

        Args:
            bucket: the number of rows, one of `buckets`.
            shares: True for a step that reads shared prefixes once.
            is_greedy: True for a step that draws the most likely tokens itself; ignored with
                shares.
            adapted: True for a step with adapters of low rank; `shares` and `is_greedy` are ignored
                then.
        """
        steps = self.shared_steps if shares else self.greedy_steps if is_greedy else self.steps
        if adapted:
            steps = self.adapted_steps
        step = steps.get(bucket)
        if step is None:
            step = steps[bucket] = DecodeStep(
                self.model,
                self.storage,
                self.rows,
                self.results,
                bucket,
                batch_invariant=self.batch_invariant,
                shared=self.groups.prefixes(bucket) if shares else None,
                greedy=self._greedy_head if is_greedy else None,
                adapters=self._adapted.of(bucket) if self._adapted and adapted else None,
                states=self.states,
            )
        return step

    def reset(self) -> None:
        """Forget the rows of all sequences; each is sent whole when it next runs.

        Scores and pooled states of prompts are kept, as a sequence may continue them.
        """
        self._forget_rows()

    def _forget_rows(self) -> None:
        """Forget the rows that the device has; each sequence sends its row again when it next
        runs."""
        self.rows.reset()
        self._known_slots = (), False
        self.groups.is_stale = True
        self.adjuster.reset()
        # A step that failed midway may have moved the device's count on.
        self.results.place.fill_((self._place - 1) % RING)

    def is_lost(self) -> bool:
        """Whether the device can compute no more."""
        return is_device_lost(self.device)

    @torch.inference_mode()
    def submit(self, batch: Batch) -> _Handle:
        """Begin a step and return its handle, without waiting for the device.

        When it raises, the rows on the device are forgotten, and sent again when they next run.
        """
        try:
            if self.host is not None:
                self.host.move(batch)
            asks = batch.asks
            adjusts = self.adjuster.follow(batch, asks)
            chunks, whole = self.scores.follow(batch, asks)
            parts, pooled = self.pools.follow(batch, asks)
            if batch.decodes and not parts:  # a graph keeps no hidden states
                handle = self._decode(batch, adjusts)
            else:
                handle = self._run(batch, adjusts, chunks, parts)
            handle.whole, handle.pooled = whole, pooled
            return handle
        except BaseException:
            self._forget_rows()  # they may have been told what did not happen
            raise

    def _decode(self, batch: Batch, adjusts: bool) -> _Handle:
        changes = self.rows.take(batch, decodes=True)
        bucket = self.buckets[bisect_left(self.buckets, self.rows.num_rows)]
        asking = None if batch.is_plain else self.logprobs.asking(batch.sequences, changes.rows)
        in_halves = adjusts or asking is not None  # a graph of the whole keeps no logits
        adapted = self._finds_adapters(batch, changes, bucket)
        shares = not adapted and self._finds_groups(batch, changes, bucket)
        is_greedy = not (in_halves or shares or adapted) and self._is_greedy(batch, bucket)
        step = self._prepared(bucket, in_halves, shares, is_greedy, adapted)
        self._copy_blocks(batch)
        if self.states is not None:
            self.states.write(batch, changes.rows, bucket)
            begin_states(self.storage.states, batch)
        self.rows.send(changes)
        errors: dict[int, Exception] = {}
        raw = None
        if in_halves:
            logits = step.run_model(widens=adjusts)
            raw = None if asking is None else logits.index_select(0, asking.rows)
            if adjusts:
                errors = self.adjuster.adjust(
                    logits,
                    batch.sequences,
                    changes.rows,
                    tokens=self.rows.token,
                    token_rows=changes.rows,
                )
            step.sample()
        else:
            step.run()
        end_states(self.storage.states, batch)
        place, self._place = self._place, (self._place + 1) % RING
        logprobs = None
        if asking is not None and raw is not None:
            tokens = self.rows.token.index_select(0, asking.rows)
            logprobs = asking.found_in(raw, tokens)
            logprobs.host = self.logprobs.room_of(logprobs.tensors, place)
        end = self.rows.num_rows
        target = self._pinned[place][:end]
        copies = [(target, self.results.values[place, :end])]
        event = self._read(copies, logprobs, None, None, self._events[place])
        return _Handle(batch, changes.index, target, logprobs, event, errors)

    def _finds_adapters(self, batch: Batch, changes: Changes, bucket: int) -> bool:
        """Return whether a row of a decode step uses an adapter; send changed slots to the device.

        Args:
            batch: the step to run.
            changes: the changes of rows since the step before.
            bucket: the number of rows of the captured step.
        """
        if self.adapters is None or self._adapted is None:
            return False
        runs, _ = first_of(batch.sequences)
        if (
            batch.is_plain and runs is self._known_slots[0]
        ):  # the rows, and their slots, are the same
            return self._known_slots[1]
        slots = self.adapters.place(batch.sequences)
        self._known_slots = runs if batch.is_plain else (), slots is not None
        if slots is None:
            return False
        of_rows = np.full(self.rows.num_rows, -1, np.int32)
        of_rows[changes.rows] = slots
        self._adapted.write(of_rows, bucket)
        return True

    def _finds_groups(self, batch: Batch, changes: Changes, bucket: int) -> bool:
        """Return whether enough rows of a decode step share blocks to read these once.

        If the batch has changed, groups are searched for again and sent to the device.
        """
        if self.sharing_tokens is None:
            return False
        groups, rows = self.groups, self.rows
        if groups.is_stale or batch.left or not changes.is_empty:
            lengths = np.zeros(rows.num_rows, np.int64)
            lengths[changes.rows] = [run.start + 1 for run in batch.sequences]
            groups.find(rows.host_table[: rows.num_rows], lengths, bucket, self.sharing_tokens)
        return groups.is_active

    @property
    def greedy_buckets(self) -> list[int]:
        """The numbers of rows, ascending, of steps with a graph that serves greedy rows alone."""
        if self._greedy_head is None:
            return []
        return [bucket for bucket in self.buckets if bucket >= decode_step.GREEDY_ROWS]

    def _is_greedy(self, batch: Batch, bucket: int) -> bool:
        """Return whether a step draws from each rank's largest logit: its rows are many and all
        greedy.

        False if ranks do not share the vocabulary.
        """
        if self._greedy_head is None or bucket < decode_step.GREEDY_ROWS or not batch.is_plain:
            return False
        runs, _ = first_of(batch.sequences)
        if runs is not self._greedy[0]:
            self._greedy = runs, all(run.sampling.greedy for run in runs)
        return self._greedy[1]

    def _prepared(
        self, bucket: int, in_halves: bool, shares: bool, is_greedy: bool, adapted: bool
    ) -> DecodeStep:
        kind = {"shares": shares, "is_greedy": is_greedy, "adapted": adapted}
        step = self.step_of(bucket, **kind)
        if self.captures and not (step.is_model_captured if in_halves else step.is_captured):
            self.capture(bucket, of_model=in_halves, **kind)
        return step

    def capture(
        self,
        bucket: int,
        *,
        of_model: bool = False,
        shares: bool = False,
        is_greedy: bool = False,
        adapted: bool = False,
    ) -> None:
        """Capture the decode step of `bucket` rows in a CUDA graph; rows and results stay as they
        were.

        Args:
            of_model: True for a graph that ends before the head, so that logits can be changed.
            shares: True for a step that reads shared prefixes once.
            is_greedy: True for a step that draws the most likely tokens itself.
            adapted: True for a step with adapters of low rank; see `step_of`.
        """
        rows, place = self.rows, self.results.place
        with torch.inference_mode():
            if self.states is not None:
                self.states.slots.fill_(-1)
            kept = (rows.active, place, rows.fresh, *(other.fresh for other in rows.others))
            state = [x.clone() for x in kept]
            rows.active.zero_()
            for fresh in kept[2:]:
                fresh.fill_(-1)
            step = self.step_of(bucket, shares=shares, is_greedy=is_greedy, adapted=adapted)
            (step.capture_model if of_model else step.capture)(*self._captured_in())
            for x, value in zip(kept, state, strict=True):
                x.copy_(value)

    def capture_prompts(self, size: int, *, adapted: bool = False) -> None:
        """Capture the steps with prompts of `size` tokens, one of `PromptSteps.sizes`.

        `adapted` is True for steps of which some rows use adapters.
        """
        assert self.prompts is not None
        self.prompts.capture(size, *self._captured_in(), adapted=adapted)

    def _captured_in(self) -> tuple[Any, torch.cuda.Stream]:
        """Return the pool of all graphs and the stream that they are captured on.

        One stream, since torch keeps memory, and cuBLAS 32 MiB, for each that anything ran on.
        """
        if self._capturing is None:
            pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
            self._capturing = pool, stream
        return self._capturing

    def _run(
        self, batch: Batch, adjusts: bool, chunks: list[Chunk], parts: list[pooling.Part]
    ) -> _Handle:
        """Compute a step that is not a decode step, or whose hidden states are pooled.

        Args:
            batch: the step: some sequences run several tokens, or draw no token or several.
            adjusts: True if requests of the batch change logits, see `Adjuster.follow`.
            chunks: the parts of prompts whose log-probabilities are asked for.
            parts: the parts of prompts whose hidden states are pooled.

        Returns:
            The handle by which the results are waited for.
        """
        rows, sequences = self.rows, batch.sequences
        columns = Columns(sequences)
        changes = rows.take(batch, decodes=False, columns=columns)
        assert changes.set_whole is not None
        self.groups.is_stale = True
        starts, lengths, ends = columns.starts, columns.lengths, columns.ends
        edges = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=edges[1:])
        row_of, num_tokens = changes.index, int(edges[-1])
        ids = np.fromiter(chain.from_iterable(columns.token_ids), np.int64, num_tokens)
        owner = np.repeat(np.arange(len(sequences)), lengths)
        positions = np.arange(num_tokens) + (starts - edges[:-1])[owner]
        own_rows, blocks_of = row_of[owner], positions // self.block_size
        offsets = positions - blocks_of * self.block_size
        slots = rows.host_table[own_rows, blocks_of].astype(np.int64) * self.block_size + offsets
        pending = np.flatnonzero(ids == PENDING)
        ids[pending] = 0
        drawing = np.flatnonzero(columns.num_samples)
        counts = columns.num_samples[drawing]
        firsts = np.cumsum(counts) - counts  # of each, its first sample
        sampling, sampled = changes.set_whole[1].take(drawing, axis=1), np.arange(len(drawing))
        seeds, counters = changes.set_whole[0][2, drawing], columns.num_generated[drawing]
        is_single = bool((counts == 1).all())
        if not is_single:
            sampling, sampled = np.repeat(sampling, counts, axis=1), np.repeat(sampled, counts)
            each = [seed for i in drawing.tolist() for seed in columns.seeds[i]]
            seeds, counters = np.array(each, np.int64), np.repeat(counters, counts)
        more = [
            ids,
            positions,
            slots,
            pending,
            own_rows[pending],
            edges[1:][drawing] - 1,
            sampled,
            firsts,
            row_of[drawing],
            seeds,
            counters,
            row_of,
            edges.astype(np.int32),
            ends.astype(np.int32),
            *sampling,
        ]
        more += [
            other.host_table[own_rows, blocks_of].astype(np.int64) * self.block_size + offsets
            for other in rows.others
        ]
        sent = rows.send(changes, more)
        self._copy_blocks(batch)
        (
            ids_,
            positions_,
            slots_,
            pending_,
            pending_rows,
            logits_rows,
            repeats,
            firsts_,
            drawing_,
            seeds_,
            counters_,
            rows_,
            cu,
            seqlens,
            *rest,
        ) = sent
        words, other_slots = rest[:4], rest[4:]
        if len(pending):
            ids_.index_copy_(0, pending_, rows.token.index_select(0, pending_rows))
        width = int(ends.max() - 1) // self.block_size + 1
        shared = None
        if self.sharing_tokens is not None and len(sequences) > 1:
            shared = shared_prefixes(
                rows.host_table[row_of, :width],
                ends,
                edges,
                block_size=self.block_size,
                device=self.device,
            )
            if shared is not None and shared.saved_tokens < self.sharing_tokens:
                shared = None
        ctx = AttentionContext(
            cu_seqlens_q=cu,
            max_seqlen_q=int(lengths.max()),
            seqlens_k=seqlens,
            block_table=rows.table.index_select(0, rows_)[:, :width],
            slot_mapping=slots_,
            batch_invariant=self.batch_invariant,
            shared=shared,
            plans=StepPlans.on(self.device),
        )
        if rows.others:
            others = tuple(
                replace(
                    ctx,
                    block_table=other.table.index_select(0, rows_)[:, :width],
                    slot_mapping=slots,
                    shared=None,
                    plans=StepPlans.on(self.device),
                )
                for other, slots in zip(rows.others, other_slots, strict=True)
            )
            ctx = replace(ctx, group_of=self.storage.spec.group_of, others=others)
        if self.states is not None:
            ctx = replace(ctx, states=self.states.of_step(batch))
            begin_states(self.storage.states, batch)
        placed = None if self.adapters is None else self.adapters.place(sequences)
        self._known_slots = (), False
        hidden = self._hidden(ids_, positions_, ctx, None if placed is None else placed[owner])
        end_states(self.storage.states, batch)
        scored = None
        if chunks:
            scored = _Scored(chunks, self._scored(chunks, hidden))
        sums = None
        if parts:
            states = hidden  # `hidden` is narrowed to the rows that draw
            sums = pooling.Pooled(parts, lambda some: states.index_select(0, some), self.device)
        if len(drawing) == 0:
            nothing = torch.empty((0, 2), dtype=torch.int64)
            event = self._read([], None, scored, sums)
            return _Handle(batch, None, nothing, None, event, scored=scored, sums=sums)
        if len(logits_rows) < len(hidden):
            hidden = hidden.index_select(0, logits_rows)
        logits = (self.model.compute_logits if adjusts else head_logits(self.model))(hidden)
        asking, raw = None, None
        if [each for each in columns.samplings if each.logprobs is not None]:
            samplers = [s for s in sequences for _ in range(s.num_samples)]
            repeated = np.repeat(np.arange(len(drawing)), counts).tolist()
            asking = self.logprobs.asking(samplers, repeated)
        if asking is not None:
            raw = logits.index_select(0, asking.rows)
        errors: dict[int, Exception] = {}
        if adjusts:
            place_of = {i: row for row, i in enumerate(drawing.tolist())}
            errors = self.adjuster.adjust(
                logits,
                sequences,
                [place_of.get(i, -1) for i in range(len(sequences))],
                tokens=rows.token,
                token_rows=changes.rows,
            )
        pairs = self._sample(logits, words, seeds_, counters_, repeats, counts)
        drawn = pairs[:, 0]
        rows.store_tokens(drawing_, drawn if is_single else drawn.index_select(0, firsts_))
        logprobs = None
        if asking is not None and raw is not None:
            logprobs = asking.found_in(
                raw, pairs[:, 0].index_select(0, self.logprobs.sent(tuple(asking.places)))
            )
        is_cuda = self.device.type == "cuda"
        target = torch.empty(pairs.shape, dtype=torch.int64, pin_memory=is_cuda)
        event = self._read([(target, pairs)], logprobs, scored, sums)
        return _Handle(batch, None, target, logprobs, event, errors, scored, sums)

    def _hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        ctx: AttentionContext,
        adapter_slots: NDArray[np.int32] | None,
    ) -> Tensor:
        if self.prompts is None:
            if self.adapters is not None and adapter_slots is not None:
                ctx = ctx.with_adapters(self.adapters.of_rows(adapter_slots))
            return self.model(ids, positions, ctx=ctx, kv=self.storage.layers)
        size, adapted = self.prompts.size_of(len(ids)), adapter_slots is not None
        if self.captures and not self.prompts.is_captured(size, adapted=adapted):
            self.capture_prompts(size, adapted=adapted)
        return self.prompts.run(ids, positions, ctx, adapter_slots)

    def _scored(self, chunks: list[Chunk], hidden: Tensor) -> list[Logprobs]:
        def logits_of(rows: Tensor) -> Tensor:
            return self.model.compute_logits(hidden.index_select(0, rows))

        vocab = self.model.compute_logits(hidden[:1]).shape[1]
        return score(chunks, logits_of, vocab, self.device)

    def _sample(
        self,
        logits: Tensor,
        words: Sequence[Tensor],
        seeds: Tensor,
        counters: Tensor,
        repeats: Tensor,
        counts: NDArray[np.int64],
    ) -> Tensor:
        """Draw tokens; return (samples, 2) int64: each token, and 1 if its row of logits is finite.

        Args:
            logits: (R, V), a row for each sequence that draws.
            words: temperature, top_p, min_p (bits of float32) and top_k of each sample.
            seeds, counters: the key and the counter of each sample's random number.
            repeats: the row of logits of each sample; not read if each row has one sample.
            counts: the number of samples of each row, on the host.
        """
        temperature, top_p, min_p = (part.view(torch.float32) for part in words[:3])
        # A multiple of eight rows, so that all parts begin aligned.
        total, step, parts = len(seeds), max(MAX_SAMPLED // logits.shape[1] // 8, 1) * 8, []
        is_single = int(counts.max()) == 1
        for first in range(0, total, step):
            some = slice(first, first + step)
            tokens, is_finite = ops.sample_tokens(
                logits[some] if is_single else logits.index_select(0, repeats[some]),
                temperature=temperature[some],
                top_p=top_p[some],
                min_p=min_p[some],
                top_k=words[3][some],
                seeds=seeds[some],
                counters=counters[some],
            )
            parts.append(torch.stack((tokens, is_finite.to(torch.int64)), dim=1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(
        self,
        copies: list[tuple[Tensor, Tensor]],
        logprobs: FoundLogprobs | None,
        scored: _Scored | None = None,
        sums: pooling.Pooled | None = None,
        own: torch.cuda.Event | None = None,
    ) -> torch.cuda.Event | None:
        """Copy results to the host while the device goes on; return the event to wait for.

        Args:
            copies: pairs (target on the host, source on the device).
            logprobs, scored, sums: further results that are copied; None for none.
            own: an event to use again, for which nobody waits any more; the sources of `copies`
                then live as long as the runner.
        """
        is_cuda, kept = self.device.type == "cuda", 0 if own is None else len(copies)
        for more in (logprobs, scored, sums):
            if more is not None:
                found = more.tensors
                if not more.host:
                    more.host = [
                        torch.empty(x.shape, dtype=x.dtype, pin_memory=is_cuda) for x in found
                    ]
                copies = [*copies, *zip(more.host, found, strict=True)]
        if self._reading is None or self._computed is None:
            for target, source in copies:
                target.copy_(source)
            return None
        current = torch.cuda.current_stream(self.device)
        if not copies and own is not None:
            own.record(current)
            return own
        self._computed.record(current)
        self._reading.wait_event(self._computed)
        with torch.cuda.stream(self._reading):
            for place, (target, source) in enumerate(copies):
                target.copy_(source, non_blocking=True)
                if place >= kept:
                    source.record_stream(self._reading)
            event = torch.cuda.Event() if own is None else own
            event.record(self._reading)
        return event

    def _copy_blocks(self, batch: Batch) -> None:
        if not (batch.block_copies or any(batch.other_copies)):
            return
        for group, part in enumerate(self.storage.parts):
            copies = batch.of_group(group).block_copies
            if copies:
                copy_in_all_layers(part, copies)


class _Scored:
    """The log-probabilities of prompts that one step computed: `tensors` on the device, and in
    `host` their copies, valid after the step's event; `finish` hands these over."""

    def __init__(self, chunks: list[Chunk], parts: list[Logprobs]) -> None:
        self.chunks, self.tensors = chunks, [x for part in parts for x in part]
        self.host: list[Tensor] = []

    def finish(self) -> None:
        """Add the log-probabilities that have reached the host to the scores of their sequences."""
        columns = iter(self.host)
        finish(self.chunks, list(zip(columns, columns, columns, strict=True)))


class _Handle:
    """A step that was submitted to a `DeviceRunner`, and may still be running.

    Args:
        batch: the batch that was submitted.
        rows: the place in `pairs` of each sequence's token; None if they lie in order.
        pairs: (n, 2) on the host, valid after the event: each token, and 1 if its logits were
            finite.
        logprobs: the log-probabilities of samples that ask for them; None if none does.
        event: the event after which results are on the host; None on a CPU.
        errors: the exceptions that take the place of drawn tokens, by place in the batch.
        scored: prompts of which a chunk was scored.
        sums: hidden states of prompts, added up.

    Attributes:
        whole: the scores of prompts that go with a first token, by place in the batch.
        pooled: the pooled hidden states of prompts that go with a first token, by place in the
            batch.
    """

    def __init__(
        self,
        batch: Batch,
        rows: NDArray[np.int64] | None,
        pairs: Tensor,
        logprobs: FoundLogprobs | None,
        event: torch.cuda.Event | None,
        errors: dict[int, Exception] | None = None,
        scored: _Scored | None = None,
        sums: pooling.Pooled | None = None,
    ) -> None:
        self._batch, self._rows, self._pairs = batch, rows, pairs
        self._logprobs, self._event = logprobs, event
        self._errors, self._scored, self._sums = errors, scored, sums
        self.whole: dict[int, list[ScoredToken]] = {}
        self.pooled: dict[int, pooling.Pooling] = {}

    def result(self) -> Drawn:
        """Wait for the step and return its tokens; called once.

        They are a `PlainDraws` for a plain batch without log-probabilities and with finite logits,
        else a list for each sequence. Scores and pooled states of prompts are finished first, and
        put into the first tokens.
        """
        if self._event is not None:
            self._event.synchronize()
        if self._scored is not None:
            self._scored.finish()
        if self._sums is not None:
            self._sums.finish()
        draws, is_finite = self._draws()
        if self._batch.is_plain and self._logprobs is None and is_finite.all():
            return draws
        samples = self._tokens(draws.tokens, is_finite)
        if self._errors:
            put_errors(samples, self._errors)
        if self.whole:
            hand_over(samples, self.whole)
        if self.pooled:
            pooling.hand_over(samples, self.pooled)
        return samples

    def _draws(self) -> tuple[PlainDraws, NDArray[np.int64]]:
        """Return the token of each sample, in the order of the batch, and 1 or 0 for finite logits
        or not."""
        pairs = self._pairs.numpy()
        if self._rows is not None:
            pairs = pairs[self._rows]
        return PlainDraws(pairs[:, 0].tolist()), pairs[:, 1]

    def _tokens(
        self, tokens: list[SampledToken], is_finite: NDArray[np.int64]
    ) -> list[list[SampledToken]]:
        """Return a list of tokens for each sequence, with log-probabilities where they are asked
        for.

        Tokens of rows that are not finite become BROKEN.

        Args:
            tokens: the token of each sample, in the order of the batch; changed in place.
            is_finite: 1 for each sample with finite logits, else 0.
        """
        sequences = self._batch.sequences
        if self._logprobs is not None:
            samplers = [s for s in sequences for _ in range(s.num_samples)]
            self._logprobs.attach(samplers, tokens)
        if not is_finite.all():
            tokens = [t if ok else BROKEN for t, ok in zip(tokens, is_finite, strict=True)]
        if self._rows is not None:
            return [[token] for token in tokens]
        drawn = iter(tokens)
        return [[next(drawn) for _ in range(s.num_samples)] for s in sequences]
