"""A model's step on a CPU as one compiled call: a runner beside `ModelRunner`.

At load the model becomes a list of operations over fixed buffers. A step in which every sequence
has one new token is one call of compiled code: no tensor is made and no Python runs between two
operations. So is one with short prompts: each of their rows attends as a sequence of its own, to
the keys that the same step has written before it. In other steps the attention of each layer is an
op of `ops`, and what lies between two of them a compiled call.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import Batch
from tilewise.engine.sizing import widest_batch
from tilewise.engine.steps.decode_arrays import DecodeArrays
from tilewise.engine.steps.inputs import HostTables, ModelInputs, build_inputs
from tilewise.engine.steps.runner import ModelRunner, Samples
from tilewise.engine.steps.sampler import greedy_tokens, is_greedy, sample
from tilewise.engine.steps.state_moves import begin_states, end_states
from tilewise.engine.steps.teams import Teams
from tilewise.models.decoder import Decoder
from tilewise.nn.context import AttentionContext
from tilewise.nn.experts import Experts
from tilewise.nn.packed import PackedLinear
from tilewise.ops import cpu_step as step

__all__ = ["CompiledRunner", "runner_for", "why_not"]

# Multiplications for which another thread is worth trying. Its helpers wait in compiled code, so a
# meeting costs little; whether they pay, `Teams` finds out from the times of steps.
WORK_PER_THREAD = 2**21
# Rows of prompts times keys times channels of all heads for which rows attend one by one. Beyond it
# tiles of rows, which read a key once, make up for the half millisecond of Python and of waking
# threads that they cost in each layer. The story model, two cores of a Xeon with AMX, 2026-11-23:
# a prompt of 30 tokens 6.8 -> 2.5 ms, of 200 (2^23.3) 13.5 -> 9.7, of 300 (2^24.5) 19.5 -> 21.1.
MOST_WORK_BY_ROWS = 2**23


def _most_threads(num_multiplications: int) -> int:
    """Return the number of threads that a program of num_multiplications multiplications may use.

    One for every WORK_PER_THREAD of them, at least 1 and at most torch's number of threads.
    """
    return max(1, min(torch.get_num_threads(), num_multiplications // WORK_PER_THREAD))


def why_not(model: Decoder, storage: KVStorage) -> str | None:
    """Return the reason why `CompiledRunner` cannot run a model, or None when it can."""
    device = storage.device
    if device.type != "cpu":
        return f"device must be cpu, got {device}"
    block_size = storage.spec.block_size
    for attention in model.config.attentions if model.config.is_native else ():
        if attention.is_chunked and attention.window is not None and attention.window % block_size:
            return f"block_size must divide the chunks of {attention.window} keys, got {block_size}"
    return model.why_no_cpu_program() or step.why_not(model.dtype, storage.spec.kv.dtype)


def runner_for(
    model: Decoder,
    storage: KVStorage,
    *,
    num_parameters: int | None = None,
    batch_invariant: bool = False,
) -> ModelRunner:
    """Return a `CompiledRunner` where `why_not` finds no reason against it, else a `ModelRunner`.

    On a CPU, `why_not_compiled` of the `ModelRunner` is that reason.

    Args:
        model, storage, batch_invariant: as of `ModelRunner`; both kinds of runner take them.
        num_parameters: as of `ModelRunner`; a `CompiledRunner` does not need it.
    """
    reason = why_not(model, storage)
    if reason is None:
        return CompiledRunner(model, storage, batch_invariant=batch_invariant)
    runner = ModelRunner(
        model, storage, num_parameters=num_parameters, batch_invariant=batch_invariant
    )
    if storage.device.type == "cpu":
        runner.why_not_compiled = reason
    return runner


class CompiledRunner(ModelRunner):
    """Runs a model over the cache that it writes, by a compiled list of operations.

    The logits that `forward` returns are the runner's own memory until the next call.

    Args:
        model: packed, see `why_not`; its weights are shared, not copied, and those that are not
            packed may be written to or replaced between two steps.
        storage: the paged cache.
        batch_invariant: see `ModelRunner`.

    Attributes:
        program: the list of operations.
        teams: the measured choice of a step's number of threads.

    Raises:
        ValueError: the model cannot be expressed; the message says why.
    """

    def __init__(
        self, model: Decoder, storage: KVStorage, *, batch_invariant: bool = False
    ) -> None:
        reason = why_not(model, storage)
        if reason is not None:
            raise ValueError(f"model must be one that a compiled step can run: {reason}")
        linears = [m for m in model.modules() if isinstance(m, PackedLinear)]
        self._num_weights = sum(linear.panels.num_weights for linear in linears) + sum(
            module.num_active_weights for module in model.modules() if isinstance(module, Experts)
        )
        super().__init__(
            model, storage, num_parameters=self._num_weights, batch_invariant=batch_invariant
        )
        self._config = model.config
        self.program, self._attention, self._reserve_angles = model.cpu_program(
            storage.layers, self._states or {}, batch_invariant=batch_invariant
        )
        self._segments = self._split()
        self.teams = Teams()
        self._num_angles = 0
        self._arrays = DecodeArrays(self.block_size, has_states=self._states is not None)
        # Of the last decode step: the buffer, and its rows as a tensor and as an array.
        self._logits = torch.empty(0), torch.empty(0), np.empty(0, np.float32)

    def _split(self) -> list[tuple[int, int, int]]:
        """Return the parts of the program, each (first operation, end, group of layers).

        A part begins where a layer of another group writes its keys. A program of one group is one
        part.
        """
        if not self._attention:
            return [(0, len(self.program), 0)]
        groups = self._group_of or (0,) * len(self._attention)
        edges = [(0, groups[0])]
        for attention, group in zip(self._attention, groups, strict=True):
            if group != edges[-1][1]:
                edges.append((attention.writes, group))
        ends = [*(first for first, _ in edges[1:]), len(self.program)]
        return [(first, end, group) for (first, group), end in zip(edges, ends, strict=True)]

    def _compute(self, batch: Batch) -> Samples:
        """Compute a step and return its tokens; a step for which `decode_inputs` has arrays makes
        no tensor.

        With a `watch` every step is computed as in `ModelRunner`.
        """
        inputs = None if self.watch is not None else self.decode_inputs(batch)
        if inputs is None:
            return super()._compute(batch)
        if batch.left:
            for each in (self._adjuster, self._scores, self._pools):
                each.follow(batch, False)
        begin_states(self.storage.states, batch)
        logits = self.forward(inputs)
        end_states(self.storage.states, batch)
        if self.sampler is sample and is_greedy(batch.sequences):
            _, own, array = self._logits
            return greedy_tokens(array if logits is own else logits.numpy(), batch.sequences)
        return self.sampler(logits, batch)

    def begin_step(self, number: int) -> None:
        """Number the step that is submitted next; 0 for one that cannot be stopped."""
        self.program.begin_step(number)

    def stop(self, number: int) -> None:
        """Stop the step of this number before its next operation, or as it begins; any thread may
        call.

        `submit` of that step then raises StepStoppedError; nothing happens to one that ended.
        """
        self.program.stop(number)

    def decode_inputs(self, batch: Batch) -> DecodeArrays | None:
        """Return the arrays of a step in which each sequence has one token and draws one.

        They are overwritten by the next step. The result is None where the step copies blocks, a
        run has other counts or an adapter, or a request asks for more than temperature and
        truncation; also where layers form several groups.
        """
        if batch.block_copies or self._other_tables or self.sharing_tokens is not None:
            return None
        for run in batch.sequences:
            if len(run.token_ids) != 1 or run.num_samples != 1 or run.asked is not None:
                return None
            if run.adapter is not None:
                return None
        return self._arrays.fill(batch, self._tables)

    def forward(self, inputs: ModelInputs | DecodeArrays) -> Tensor:
        """Run one step and return the logits (R, V) float32 of `inputs.logits_rows`.

        Blocks are copied before anything is written. With no row to sample the result has no rows.
        The result is overwritten by the next call. A step with adapters runs op by op.
        """
        self.program.follow_weights()
        if isinstance(inputs, DecodeArrays):
            return self._decode(inputs)
        if inputs.ctx.adapters is not None:
            return super().forward(inputs)  # the list has no operation that adds what they do
        return self._run(inputs)

    def _decode(self, inputs: DecodeArrays) -> Tensor:
        program, rows = self.program, inputs.rows
        count = len(rows.ids)
        program.reserve(count, count)
        buffer = program.buffers["logits"]
        known, logits, array = self._logits
        if known is not buffer or len(array) != count:
            with torch.inference_mode():
                logits = buffer[:count, : self._config.vocab_size]
            self._logits = buffer, logits, logits.numpy()
        tables = self._rotations(inputs.max_len)
        kind, most = count.bit_length(), _most_threads(count * self._num_weights)
        num_threads = self.teams.choose(kind, most)
        started = time.perf_counter()
        program.run(rows, tables, num_threads, 0, len(program))
        self.teams.record(kind, most, num_threads, (time.perf_counter() - started) / count)
        return logits

    @torch.inference_mode()
    def _run(self, inputs: ModelInputs) -> Tensor:
        self.copy_all(inputs)
        ctx, program = inputs.ctx, self.program
        batch = step.Batch(
            inputs.ids.numpy(),
            inputs.positions.numpy(),
            ctx.slot_mapping.numpy(),
            ctx.cu_seqlens_q.numpy(),
            ctx.seqlens_k.numpy(),
            ctx.block_table.numpy(),
            inputs.logits_rows.numpy(),
            *self._places(inputs),
        )
        batches = [batch]  # of each group of layers
        for other in ctx.others:
            slots, table = other.slot_mapping.numpy(), other.block_table.numpy()
            batches.append(batch._replace(slots=slots, table=table))
        num_rows, num_sampled = len(batch.ids), len(batch.sampled)
        program.reserve(num_rows, num_sampled)
        tables = self._rotations(int(batch.lengths.max()))
        end = len(program) if num_sampled else len(program) - 2
        is_decode = ctx.max_seqlen_q == 1
        if not is_decode and self._takes_rows(inputs):
            batches, is_decode = [_by_rows(part) for part in batches], True
            batch = batches[0]
        kind = num_rows.bit_length() if is_decode else -num_rows.bit_length()
        most = _most_threads(num_rows * self._num_weights)
        num_threads = self.teams.choose(kind, most)
        started = time.perf_counter()
        if is_decode:
            for first, last, group in self._segments:
                program.run(batches[group], tables, num_threads, first, min(last, end))
        else:
            first = 0
            with self.threads(num_rows):
                for layer, attention in enumerate(self._attention):
                    group = self._group_of[layer] if self._group_of else 0
                    program.run(batches[group], tables, num_threads, first, attention.first)
                    attention.attend(
                        self._context(layer, inputs), self.storage.layers[layer], num_rows
                    )
                    first = attention.end
            program.run(batch, tables, num_threads, first, end)
        self.teams.record(kind, most, num_threads, (time.perf_counter() - started) / num_rows)
        self._last = batch, tables
        return program.buffers["logits"][:num_sampled, : self._config.vocab_size]

    def _places(self, inputs: ModelInputs) -> tuple[np.ndarray, ...]:
        """Return the arrays of a step for layers with a state: slots, starts and edges of rows,
        int64.

        Slots and starts are (B,), a slot of -1 has no state; edges are (B + 1,). The tuple is empty
        for a model without such layers.
        """
        if self._states is None:
            return ()
        states, edges = inputs.ctx.states, inputs.ctx.cu_seqlens_q.numpy().astype(np.int64)
        if states is None:  # of a step that serves nobody
            return np.full(len(edges) - 1, -1), np.zeros(len(edges) - 1, np.int64), edges
        return states.slots.numpy(), states.starts.numpy(), edges

    def _takes_rows(self, inputs: ModelInputs) -> bool:
        """Return whether each row of a step's prompts may attend as a sequence of its own.

        True if the rows are few enough, see MOST_WORK_BY_ROWS, or the model has no attention. False
        if the engine is not batch-invariant, where bits would change, or drafts form a tree, whose
        rows do not see all rows before them.
        """
        if not self._attention:
            return True
        if not self.batch_invariant or inputs.ctx.tree_mask is not None:
            return False
        counts, lengths = np.diff(inputs.ctx.cu_seqlens_q.numpy()), inputs.ctx.seqlens_k.numpy()
        keys = int((counts.astype(np.int64) * lengths)[counts > 1].sum())
        config = self._config
        return keys * config.num_q_heads * config.head_dim <= MOST_WORK_BY_ROWS

    @torch.inference_mode()
    def logits_of(self, rows: Tensor) -> Tensor:
        """Return the logits (n, V) float32 of rows (n,) int64 of the step that `forward` ran last.

        The next call of this method overwrites them.
        """
        if self._hidden is not None:
            return super().logits_of(rows)
        batch, tables = self._last
        program, end = self.program, len(self.program)
        program.reserve(0, len(rows))
        most = _most_threads(len(rows) * self._num_weights)
        sampled = batch._replace(sampled=rows.numpy())
        program.run(sampled, tables, most, end - 2, end)  # the last norm and the head
        return program.buffers["logits"][: len(rows), : self._config.vocab_size]

    @torch.inference_mode()
    def states_of(self, rows: Tensor) -> Tensor:
        """Return the hidden states (n, E) of rows (n,) int64 of the last step, after the last norm.

        The next call of this method overwrites them.
        """
        if self._hidden is not None:
            return super().states_of(rows)
        batch, tables = self._last
        program, end = self.program, len(self.program)
        program.reserve(0, len(rows))
        sampled = batch._replace(sampled=rows.numpy())
        program.run(sampled, tables, 1, end - 2, end - 1)  # the last norm
        return program.buffers["final"][: len(rows), : self._config.hidden_size]

    def warm_up(self) -> None:
        """Run the shortest prompt and the shortest decode, so that no request waits for kernels.

        They write to the first block, which has no owner yet.
        """
        for length in (2, 1):
            batch = widest_batch(1, length, length, self.block_size)
            inputs = build_inputs(
                batch,
                self.block_size,
                self.device,
                group_of=self._group_of,
                other_tables=[HostTables() for _ in self._other_tables],
            )
            sample(self.forward(inputs), batch)

    def _rotations(self, num_positions: int) -> step.Tables:
        """Return the program's constant tables, with cosines and sines of all positions needed.

        They are made anew only when more positions are needed than ever before.
        """
        if num_positions > self._num_angles:
            cos, sin = self._reserve_angles(num_positions, self.device)
            self._num_angles, self._angles = len(cos), self.program.with_angles(cos, sin)
        return self._angles

    def _context(self, layer: int, inputs: ModelInputs) -> AttentionContext:
        """Return a layer's context of a step, for attention computed as an op."""
        ctx = inputs.ctx.of_layer(layer)
        if ctx.batch_invariant != self.batch_invariant:
            ctx = replace(ctx, batch_invariant=self.batch_invariant)
        return ctx


def _by_rows(batch: step.Batch) -> step.Batch:
    """Return the same step with each row as a sequence of its own, which ends at the row's
    position."""
    sequence = np.repeat(np.arange(len(batch.lengths)), np.diff(batch.edges))
    return batch._replace(
        edges=np.arange(len(batch.ids) + 1, dtype=batch.edges.dtype),
        lengths=(batch.positions + 1).astype(batch.lengths.dtype),
        table=batch.table[sequence],
    )
