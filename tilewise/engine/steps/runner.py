"""What runs a step: the protocol of all runners, and the plain one that does it op by op.

batch -> submit() -> handle -> result() -> samples

A runner gets plain data and gives plain data back. What `submit` begins may still run when it
returns, and the next batch may be submitted before the result of the last one is asked for: a
runner executes batches in the order in which they came. `ModelRunner` has finished when `submit`
returns; it is what runs on a CPU, and what the others are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tilewise.cache.spec import CacheLayer, LatentSpec
from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import PENDING, Batch, PlainDraws, SampledToken
from tilewise.engine.scheduling.speculative import accepted, with_rows_of_drafts
from tilewise.engine.steps import pooling
from tilewise.engine.steps.adapter_slots import AdapterSlots
from tilewise.engine.steps.adjuster import Adjuster, put_errors
from tilewise.engine.steps.block_copies import copy_in_all_layers
from tilewise.engine.steps.compilations import CpuCompilations
from tilewise.engine.steps.inputs import HostTables, ModelInputs, build_inputs
from tilewise.engine.steps.prompt_scores import PromptScores, finish, hand_over, score
from tilewise.engine.steps.sampler import few_threads, sample
from tilewise.engine.steps.state_moves import begin_states, end_states, layer_states
from tilewise.engine.tables.host_cache import HostCache
from tilewise.nn.context import AttentionContext

__all__ = [
    "CausalModel",
    "Drawn",
    "Finished",
    "ModelRunner",
    "Runner",
    "Samples",
    "StepHandle",
    "Stoppable",
    "head_logits",
    "is_device_lost",
    "largest_weight",
    "threads_for",
]

Samples = list[list[SampledToken]]
Drawn = Samples | PlainDraws  # what a step may give in its place
# Logits, batch and, where the logits were changed, the model's own: those of log-probabilities.
Sampler = Callable[..., Samples]
Watch = Callable[[Batch, Samples, Callable[[Tensor], Tensor]], None]

# Multiplications for which another CPU thread is worth waking, 0.8 ms of bfloat16 on a core of an
# EPYC 9004 (2026-11). Threads meet after each of some forty products in a step; with less to do in
# between they mostly wait, and on a busy machine for one that does not run: then 4 ms become 300.
WORK_PER_THREAD = 2**26
# Bytes of keys and values of one layer that reading shared prefixes once must save. 512 MiB take a
# GPU's attention 90 us or more (374 us for 2.2 GB, partly from L2, on an H200, 2026-11-22), several
# times what the launches of the passes take the host.
SHARING_BYTES = 512 << 20


def threads_for(num_multiplications: int, available: int) -> int:
    """Return how many of the `available` CPU threads a step should use, at least 1."""
    return max(1, min(available, num_multiplications // WORK_PER_THREAD))


def is_device_lost(device: torch.device) -> bool:
    """Return whether a device can compute no more; a CPU always can. Waits for the device.

    An error that CUDA keeps, such as an illegal address, is raised by every later call of the
    process; lack of memory is no such error.
    """
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.ones(1, device=device).sum().item()
    except torch.OutOfMemoryError:
        return False
    except Exception:
        return True
    return False


class StepHandle(Protocol):
    """A step that was submitted to a runner, and may still be running."""

    def result(self) -> Drawn:
        """Wait for the step and return num_samples tokens for each of its sequences; called once.

        A plain step may give them as `PlainDraws`.

        A sequence with drafts has one token more for each draft that is right.

        Tokens of a sequence whose row of logits has NaN or no finite maximum are BROKEN. What a
        later step computes from such a token is not used, and harms no other sequence.
        """
        ...


class Runner(Protocol):
    """Executes batches, in the order in which they are submitted.

    Attributes:
        host: main memory for blocks of the cache; None if batches move no block there.
    """

    host: HostCache | None

    @property
    def storage(self) -> KVStorage | None:
        """The paged cache; None for an encoder, which caches nothing."""
        ...

    @property
    def num_compilations(self) -> int:
        """Kernels that were compiled since the runner was ready."""
        ...

    def submit(self, batch: Batch) -> StepHandle:
        """Begin a step and return its handle; `batch` is read before this returns.

        When this raises, nothing of the step counts, and steps submitted before still finish.
        After reset() the step may come again, whole or in parts.
        """
        ...

    def reset(self) -> None:
        """Forget all sequences: later batches describe each from its beginning.

        It is called only when no step is unfinished.

        The log-probabilities of prompts from earlier steps are kept, as a sequence may continue
        them.
        """
        ...

    def is_lost(self) -> bool:
        """Whether the device can compute no more; asked when a step has failed."""
        ...


@runtime_checkable
class Stoppable(Protocol):
    """A runner whose steps may be stopped before they end.

    `submit` then raises StepStoppedError. The runner keeps the changes of block tables that the
    step brought; what the step wrote to the cache is written again before it is read.
    """

    def begin_step(self, number: int) -> None:
        """Number the step that is submitted next; 0 for one that cannot be stopped."""
        ...

    def stop(self, number: int) -> None:
        """Stop the step of this number; any thread may call.

        A step that has not begun yet is stopped as it begins; nothing happens to one that ended.
        """
        ...


class Finished:
    """The handle of a step that was done when `submit` returned."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def result(self) -> Samples:
        """Return the drawn tokens."""
        return self._samples


class CausalModel(Protocol):
    """The interface that a runner needs of a model: hidden states from tokens, and logits from
    those.

    Every `Decoder` has it; an `Encoder` has not.
    """

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        *,
        ctx: AttentionContext,
        kv: list[CacheLayer],
    ) -> Tensor:
        """Map (T,) ids and positions of packed tokens to (T, E) hidden states, normalised; write
        keys and values to `kv`.

        Args:
            ctx: the context, which says to which sequences the tokens belong, and has the states of
                recurrent layers.
            kv: the cache of each layer with attention; other layers have none.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map (R, E) hidden states to (R, V) float32 logits."""
        ...


def head_logits(model: CausalModel) -> Callable[[Tensor], Tensor]:
    """Return the function that maps hidden states (R, E) to logits (R, V) in the weights' dtype.

    Samplers that convert to float32 themselves use it, to save memory. For a model without
    `head_logits` the function is `compute_logits`, which writes float32: 155 MB for 256 rows of
    151,936.
    """
    found: Callable[[Tensor], Tensor] = getattr(model, "head_logits", model.compute_logits)
    return found


def largest_weight(model: CausalModel) -> int:
    """Return the number of elements of the largest parameter of a model's layers; 0 without
    layers."""
    layers = getattr(model, "layers", [])
    return max((x.numel() for layer in layers for x in layer.parameters()), default=0)


class ModelRunner:
    """A runner of a model over the cache that it writes; it knows tensors, not requests.

    Args:
        model: see CausalModel.
        storage: the paged cache on the device of the model.
        num_parameters: the number of the model's parameters, from which a step on a CPU chooses its
            threads; None leaves torch's number of threads alone.
        sampler: the function that draws tokens from logits, see
            `tilewise.engine.steps.sampler.sample`.
        batch_invariant: True if a token's bits depend on the tokens before it alone: neither on
            what shares its steps nor on how many of its sequence's tokens come at once.

    Attributes:
        block_size: tokens per cache block.
        device: the device of the model and the cache.
        host: main memory for blocks; may be set before the first step.
        adapters: the slots of adapters; None for an engine without. May be set before the first
            step.
        watch: a function that is called after each step with its batch, the drawn tokens and
            `states_of`; or None.
        why_not_compiled: the reason why steps on a CPU are not one compiled list; empty where they
            are, or on another device.
        sharing_tokens: the argument of that name of `build_inputs`. None on a CPU and with
            `batch_invariant`: the bits of a sequence would depend on the sequences with which it
            shares a prefix.
    """

    def __init__(
        self,
        model: CausalModel,
        storage: KVStorage,
        *,
        num_parameters: int | None = None,
        sampler: Sampler = sample,
        batch_invariant: bool = False,
    ) -> None:
        self.model = model
        self.batch_invariant = batch_invariant
        self.num_parameters = num_parameters
        self.sampler = sampler
        self._drawn: dict[int, int] = {}  # by seq_id, in the last step
        self._tables = HostTables()
        self._group_of = storage.spec.group_of
        self._other_tables = [HostTables() for _ in storage.parts[1:]]
        self._states = None if storage.states is None else layer_states(storage.states)
        self._scores = PromptScores()
        self._pools = pooling.Pools()
        self._hidden: Tensor | None = None  # of the step that runs, (T, E)
        self.host: HostCache | None = None
        self.adapters: AdapterSlots | None = None
        self.watch: Watch | None = None
        self.why_not_compiled = ""
        self.storage = storage
        self.block_size = storage.spec.block_size
        self.device = storage.device
        self._adjuster = Adjuster(self.device)
        self._compilations: CpuCompilations | None = None
        self.sharing_tokens: int | None = None
        is_latent = isinstance(storage.spec.kv, LatentSpec)
        if self.device.type == "cuda" and not batch_invariant and not is_latent:
            layer_bytes = storage.spec.bytes_per_token // max(storage.spec.num_layers, 1)
            self.sharing_tokens = SHARING_BYTES // layer_bytes

    @property
    def num_compilations(self) -> int:
        """Kernels that were compiled since `count_compilations`, on a CPU; else 0."""
        return 0 if self._compilations is None else self._compilations.count

    def count_compilations(self) -> None:
        """Begin to count compiled kernels at 0, as the runner is ready; only a CPU's are
        counted."""
        if self.device.type == "cpu":
            self._compilations = CpuCompilations()

    def submit(self, batch: Batch) -> Finished:
        """Move the batch's swapped blocks, compute its step, and return a handle that has
        finished."""
        if self.host is not None:
            self.host.move(batch)
        batch = self._known(batch)
        try:
            samples = self._compute(batch)
        finally:
            self._hidden = None
        self._drawn = {  # of a row that is not finite any token will do
            s.seq_id: max(drawn[-1 if s.num_drafts else 0].token_id, 0)
            for s, drawn in zip(batch.sequences, samples, strict=True)
            if drawn
        }
        return Finished(samples)

    def _compute(self, batch: Batch) -> Samples:
        asks = batch.asks
        adjusts = self._adjuster.follow(batch, asks)
        chunks, whole = self._scores.follow(batch, asks)
        parts, pooled = self._pools.follow(batch, asks)
        inputs = build_inputs(
            batch,
            self.block_size,
            self.device,
            tables=self._tables,
            group_of=self._group_of,
            other_tables=self._other_tables,
            sharing_tokens=self.sharing_tokens,
            batch_invariant=self.batch_invariant,
            states=self._states,
        )
        adapters = None if self.adapters is None else self.adapters.step(batch)
        if adapters is not None:
            inputs = replace(inputs, ctx=inputs.ctx.with_adapters(adapters))
        begin_states(self.storage.states, batch)
        logits = self.forward(inputs)
        end_states(self.storage.states, batch)
        draw = self._adjust_and_sample if adjusts else self.sampler
        samples: Samples = accepted(batch, draw(logits, with_rows_of_drafts(batch)))
        if self.watch is not None:
            self.watch(batch, samples, self.states_of)
        if chunks:
            finish(chunks, score(chunks, self.logits_of, logits.shape[1], self.device))
        if parts:
            sums = pooling.Pooled(parts, self.states_of, self.device)
            sums.host = [x.cpu() for x in sums.tensors]
            sums.finish()
        hand_over(samples, whole)
        pooling.hand_over(samples, pooled)
        return samples

    @torch.inference_mode()
    def _adjust_and_sample(self, logits: Tensor, batch: Batch) -> Samples:
        """Change logits in place as requests ask (penalties, masks, biases), and draw tokens from
        them. Log-probabilities are those of the logits before the change. A sequence whose logits
        could not be changed gets the error in place of its tokens."""
        draws = [s.num_samples > 0 for s in batch.sequences]
        rows = [sum(draws[:i]) for i in range(len(draws))]
        has_logprobs = any(s.sampling.logprobs is not None for s in batch.sequences)
        untouched = logits.clone() if has_logprobs else None
        with few_threads(logits):
            errors = self._adjuster.adjust(logits, batch.sequences, rows)
        samples = self.sampler(logits, batch, untouched)
        put_errors(samples, errors)
        return samples

    def reset(self) -> None:
        """Forget the block tables, the drawn tokens and the adjuster's state of all sequences.

        Scores and pooled states of prompts are kept, as a sequence may continue them.
        """
        self._drawn, self._tables = {}, HostTables()
        self._other_tables = [HostTables() for _ in self._other_tables]
        self._adjuster.reset()

    def is_lost(self) -> bool:
        """Return whether the device has failed, so that it can compute no more."""
        return is_device_lost(self.device)

    def _known(self, batch: Batch) -> Batch:
        """Return the batch with the tokens that the last step has drawn in place of PENDING."""
        if all(s.token_ids[-1] != PENDING for s in batch.sequences):
            return batch
        drawn = self._drawn
        return replace(
            batch,
            sequences=tuple(
                s._replace(token_ids=(drawn[s.seq_id],)) if s.token_ids[-1] == PENDING else s
                for s in batch.sequences
            ),
        )

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs) -> Tensor:
        """Run one step and return the logits (R, V) float32 of `inputs.logits_rows`.

        Blocks are copied before anything is written. With no row to sample the result has no rows.
        """
        with self.threads(len(inputs.ids)):
            return self._forward(inputs)

    def _forward(self, inputs: ModelInputs) -> Tensor:
        kv = self.storage.layers
        self.copy_all(inputs)
        hidden = self.model(inputs.ids, inputs.positions, ctx=inputs.ctx, kv=kv)  # (T, E)
        self._hidden = hidden
        if len(inputs.logits_rows) < len(hidden):
            hidden = hidden.index_select(0, inputs.logits_rows)
        return self.model.compute_logits(hidden).float()

    @torch.inference_mode()
    def logits_of(self, rows: Tensor) -> Tensor:
        """Return the logits (n, V) float32 of rows (n,) int64 of the step that `forward` ran last.

        The next call may overwrite them.
        """
        assert self._hidden is not None
        return self.model.compute_logits(self._hidden.index_select(0, rows)).float()

    @torch.inference_mode()
    def states_of(self, rows: Tensor) -> Tensor:
        """Return the hidden states (n, E), after the model's last norm, of rows (n,) int64 of the
        step that `forward` ran last."""
        assert self._hidden is not None
        return self._hidden.index_select(0, rows)

    @torch.inference_mode()
    def copy(self, block_pairs: Tensor) -> None:
        """Copy blocks (C, 2), source and destination, in all layers of the first group."""
        copy_in_all_layers(self.storage.parts[0], block_pairs)

    def copy_all(self, inputs: ModelInputs) -> None:
        """Copy the blocks that a step's inputs name, in all layers of each group."""
        for part, pairs in zip(
            self.storage.parts, (inputs.block_copies, *inputs.other_copies), strict=True
        ):
            if len(pairs) > 0:
                copy_in_all_layers(part, pairs)

    @contextmanager
    def threads(self, num_tokens: int) -> Iterator[None]:
        """Let torch use only as many threads as a step of `num_tokens` rows is worth, during the
        block.

        Only on a CPU, for a runner that was told the number of parameters.
        """
        available = torch.get_num_threads()
        chosen = available
        if self.device.type == "cpu" and self.num_parameters is not None:
            chosen = threads_for(num_tokens * self.num_parameters, available)
        if chosen == available:
            yield
            return
        torch.set_num_threads(chosen)
        try:
            yield
        finally:
            torch.set_num_threads(available)
