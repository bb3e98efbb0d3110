"""A runner that verifies guesses by CUDA graphs: the model's pass over runs of a few tokens.

Which tokens a step runs is known only when the step before has ended, so the host is in the loop:
it guesses, lays the batch out, and draws, as `ModelRunner` does. What lies between, all layers of
the model, is one graph for each number of sequences and each width of a run: 1, and the last token
with all guesses. A step replays the next larger graph. Runs that are shorter have rows in front
that are written nowhere and read by nobody; sequences that are missing have no keys.

A step with prompts, with a tree of guesses, with adapters or with states runs op by op.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise import ops
from tilewise.cache.storage import KVStorage
from tilewise.cost.padding import buckets
from tilewise.engine.batch import Batch
from tilewise.engine.steps.inputs import ModelInputs, send
from tilewise.engine.steps.runner import CausalModel, ModelRunner, Samples, largest_weight
from tilewise.nn.context import AttentionContext, StepPlans
from tilewise.progress import Show, silent

__all__ = ["VerifyingRunner", "padded_places"]


def padded_places(lengths: Sequence[int], width: int) -> NDArray[np.int64]:
    """Return the place (T,) of each row of packed runs once every run is padded to `width` rows.

    Padding stands before a run, so that the last row stays the last of its sequence and every row
    sees the same keys as without.
    """
    own = np.array(lengths, np.int64)
    edges = np.cumsum(own)
    number = np.repeat(np.arange(len(own)), own)
    places: NDArray[np.int64] = np.arange(int(edges[-1])) + (number + 1) * width - edges[number]
    return places


class VerifyingRunner(ModelRunner):
    """A `ModelRunner` whose steps of short runs replay graphs.

    Args:
        model, storage, batch_invariant: see `ModelRunner`.
        max_num_seqs: the largest number of sequences of a batch.
        max_model_len: the largest number of tokens of a sequence.
        num_drafts: the most guesses of a run.
        pads: True if short runs are padded to a width that a graph has.

    Attributes:
        buckets: the numbers of sequences of which there are graphs, ascending.
        widths: the rows of a run in a graph, ascending.
        pads: whether short runs are padded, as graphs need them; else all steps run as they are.
        captures: whether a padded step is captured when it first runs, or computed op by op.
    """

    def __init__(
        self,
        model: CausalModel,
        storage: KVStorage,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_drafts: int,
        batch_invariant: bool = False,
        pads: bool = True,
    ) -> None:
        super().__init__(model, storage, batch_invariant=batch_invariant)
        self.buckets, self.widths = buckets(max_num_seqs), sorted({1, 1 + num_drafts})
        self.pads, self.captures = pads, self.device.type == "cuda"
        rows, device = max_num_seqs * self.widths[-1], self.device
        self._max_blocks = -(-max_model_len // self.block_size)
        self.ids, self.positions = (
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2)
        )
        self._lengths_k = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        groups = len(storage.parts)
        self._slots = torch.full((groups, rows), -1, dtype=torch.int64, device=device)
        shape = (groups, max_num_seqs, self._max_blocks)
        self._step_tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._steps: dict[tuple[int, int], _Step] = {}
        self._capturing: tuple[Any, torch.cuda.Stream] | None = None
        self._lengths: list[int] = []  # of the runs of the step that is computed

    def _compute(self, batch: Batch) -> Samples:
        self._lengths = [len(run.token_ids) for run in batch.sequences]
        return super()._compute(batch)

    def _forward(self, inputs: ModelInputs) -> Tensor:
        if not self._fits(inputs.ctx):
            return super()._forward(inputs)
        self.copy_all(inputs)
        width = next(w for w in self.widths if w >= inputs.ctx.max_seqlen_q)
        count = self.buckets[bisect_left(self.buckets, len(self._lengths))]
        places = self._write(inputs, count, width)
        hidden = self._step_of(count, width).run()
        if places is not None:
            hidden = hidden.index_select(0, places)
        self._hidden = hidden[: len(inputs.ids)]
        rows = self._hidden
        if len(inputs.logits_rows) < len(rows):
            rows = rows.index_select(0, inputs.logits_rows)
        return self.model.compute_logits(rows).float()

    def _fits(self, ctx: AttentionContext) -> bool:
        is_short = ctx.max_seqlen_q <= self.widths[-1]
        return (
            self.pads
            and is_short
            and ctx.tree_mask is None
            and ctx.adapters is None
            and ctx.states is None
        )

    def _write(self, inputs: ModelInputs, count: int, width: int) -> Tensor | None:
        """Write a step's inputs to the buffers that graphs read, padded to `count` runs of `width`
        rows.

        Returns:
            The place (T,) of each row of the step in the buffers; None if the rows stand in order.
        """
        lengths, rows = self._lengths, count * width
        num_seqs, ctx = len(lengths), inputs.ctx
        places = None
        if min(lengths) < width:
            (places,) = send((padded_places(lengths, width),), self.device)
        if places is not None or num_seqs < count:
            self._slots[:, :rows].fill_(-1)
        if num_seqs < count:
            self._lengths_k[num_seqs:count].zero_()
        self._lengths_k[:num_seqs].copy_(ctx.seqlens_k)
        self.put(self.ids, inputs.ids, places)
        self.put(self.positions, inputs.positions, places)
        for slots, table, own in zip(
            self._slots, self._step_tables, (ctx, *ctx.others), strict=True
        ):
            self.put(slots, own.slot_mapping, places)
            table[:num_seqs, : own.block_table.shape[1]].copy_(own.block_table)
        return places

    def put(self, target: Tensor, rows: Tensor, places: Tensor | None) -> None:
        """Write rows of a step to a buffer that graphs read, at `places`; None is from row 0 on."""
        if places is None:
            target[: len(rows)].copy_(rows)
        else:
            target.index_copy_(0, places, rows)

    def _step_of(self, count: int, width: int) -> _Step:
        step = self._steps.get((count, width))
        if step is None:
            step = self._steps[count, width] = self._new_step(count, width)
            if self.captures:
                self._capture(step)
        return step

    def _new_step(self, count: int, width: int) -> _Step:
        rows, device = count * width, self.device
        edges = torch.arange(0, rows + 1, width, dtype=torch.int32, device=device)
        own = [
            AttentionContext(
                cu_seqlens_q=edges,
                max_seqlen_q=width,
                seqlens_k=self._lengths_k[:count],
                block_table=table[:count],
                slot_mapping=slots[:rows],
                batch_invariant=self.batch_invariant,
                plans=StepPlans.on(device),
            )
            for slots, table in zip(self._slots, self._step_tables, strict=True)
        ]
        ctx = own[0]
        if len(own) > 1:
            ctx = replace(ctx, group_of=self.storage.spec.group_of, others=tuple(own[1:]))
        return _Step(self.forward_of(rows, ctx), ctx, largest_weight(self.model))

    def forward_of(self, rows: int, ctx: AttentionContext) -> Callable[[], Tensor]:
        """Return the function that computes the hidden states of the first `rows` rows of the
        buffers."""
        ids, positions = self.ids[:rows], self.positions[:rows]
        return lambda: self.model(ids, positions, ctx=ctx, kv=self.storage.layers)

    def _capture(self, step: _Step) -> None:
        """Capture a step; the contents of the buffers are as before when this returns.

        While the step runs for capture no row has a slot, so no key is written to the cache.
        """
        if self._capturing is None:
            pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
            self._capturing = pool, stream
        kept = (self._slots, self._lengths_k)
        state = [x.clone() for x in kept]
        self._slots.fill_(-1)
        self._lengths_k.zero_()
        step.capture(*self._capturing)
        for x, before in zip(kept, state, strict=True):
            x.copy_(before)

    def prepare(self, show: Show = silent) -> None:
        """Capture every step, the largest first; on a CPU do nothing.

        Args:
            show: a function that takes lines of progress.
        """
        if not (self.pads and self.captures):
            return
        sizes = [(count, width) for count in self.buckets for width in self.widths]
        sizes.sort(key=lambda size: size[0] * size[1], reverse=True)
        with torch.inference_mode():
            for i, (count, width) in enumerate(sizes):
                show(
                    f"capturing steps that verify guesses, {i + 1} of {len(sizes)}", i / len(sizes)
                )
                self._step_of(count, width)
        torch.cuda.synchronize(self.device)


class _Step:
    """The pass of a model over a fixed number of runs of a fixed width.

    Args:
        forward: a function that computes the hidden states.
        ctx: the attention context that `forward` passes to the model.
        largest: the elements of the largest weight of a layer.
    """

    def __init__(self, forward: Callable[[], Tensor], ctx: AttentionContext, largest: int) -> None:
        self._forward, self._ctx, self._largest = forward, ctx, largest
        self._graph: torch.cuda.CUDAGraph | None = None
        self._hidden: Tensor | None = None  # where the graph leaves its states

    def run(self) -> Tensor:
        """Replay the step's graph, or compute op by op without one; return hidden states (rows, E).

        They are valid until another step runs.
        """
        if self._graph is None or self._hidden is None:
            return self._compute()
        self._graph.replay()
        return self._hidden

    def _compute(self) -> Tensor:
        for own in (self._ctx, *self._ctx.others):
            if own.plans is not None:
                own.plans.update(own.seqlens_k, own.cu_seqlens_q)
        # The model begins with kernels of torch's, the embedding's and the angles'.
        with ops.launching_early(self._ctx.seqlens_k.device, largest_weight=self._largest):
            return self._forward()

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Capture the step, which runs once before: it may need kernels or plans."""
        device = self._ctx.seqlens_k.device
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._compute()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._hidden = self._compute()
        self._graph = graph
