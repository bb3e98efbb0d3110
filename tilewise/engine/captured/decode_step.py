"""One decode step of the rows on the device: a function of fixed buffers, captured as a graph.

Nothing that the step needs comes from the host, and nothing of it depends on what the host knows:
it reads the rows of the batch, runs the model and the sampler, and leaves the rows as the next step
needs them. So it can be repeated without a word between, and captured in a CUDA graph, it is
replayed in one call. It runs a fixed number of rows, a bucket; those that are not active have no
keys and write to no slot.

Where a row's logits are to be changed before it is drawn from, or read beside, the step runs in two
halves: the model, which has a graph of its own, and head and sampler, op by op. So no graph keeps
its logits. They are by far the largest tensor of a step, 1 GB for 4,096 rows of 128,256: all graphs
find room for theirs in the same part of their pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tilewise import ops
from tilewise.cache.storage import KVStorage
from tilewise.cost.padding import buckets
from tilewise.distributed.shards import VocabularyHead
from tilewise.engine.captured.batch import DeviceBatch
from tilewise.engine.steps.runner import CausalModel, head_logits, largest_weight
from tilewise.engine.steps.state_moves import FixedStates
from tilewise.models.native import NativeDecoder
from tilewise.nn.adapted import StepAdapters
from tilewise.nn.context import AttentionContext, StepPlans
from tilewise.nn.rope import RotaryEmbedding
from tilewise.ops import SharedPrefixes
from tilewise.ops.decode_rows import begin_decode, draw_decode, finish_decode, start_decode

__all__ = [
    "GREEDY_ROWS",
    "RING",
    "DecodeStep",
    "Results",
    "buckets",
    "shared_head",
]

# Places for results. A step writes one while another is copied to the host; steps are read in turn,
# two at most being unfinished.
RING = 4
# Rows from which ranks that share a vocabulary draw a step of greedy rows from the largest logit of
# each rank, by a graph of its own. All logits of 256 rows of 128,256 take 180 us to be gathered by
# four H200s, 84 to be put side by side and 74 to be drawn from; on two a step takes 9.16 ms in
# place of 9.45 (lab/results/shard_engine_h200.json).
GREEDY_ROWS = 256


class Results:
    """The drawn tokens of the last RING steps, on the device.

    Attributes:
        values: (RING, max_num_seqs, 2) int64: token, and 1 if the row of logits was finite.
        place: (1,) int64, the row of `values` of the last step; each step begins by incrementing
            it.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.values = torch.zeros((RING, max_num_seqs, 2), dtype=torch.int64, device=device)
        self.place = torch.full((1,), RING - 1, dtype=torch.int64, device=device)
        self._hidden: Tensor | None = None

    def room_for(self, hidden: Tensor) -> Tensor:
        """Return the memory, of the shape of `hidden` (rows, E), in which graphs leave hidden
        states.

        All graphs that end before the head share it.

        The head reads them before the next graph of a model runs.
        """
        if self._hidden is None:
            self._hidden = hidden.new_empty(self.values.shape[1], *hidden.shape[1:])
        return self._hidden[: len(hidden)]


def _embedding_of(model: CausalModel) -> tuple[NativeDecoder, Tensor] | None:
    """Return a model and its embedding if one kernel can look up embeddings and angles; else
    None."""
    if not isinstance(model, NativeDecoder) or not model.begins_with_look_ups:
        return None
    table: nn.Module = model.embed_tokens
    is_plain = type(table) is nn.Embedding and type(model.rotary) is RotaryEmbedding
    weight = table.weight if is_plain else None
    return (model, weight) if isinstance(weight, Tensor) and weight.is_contiguous() else None


def shared_head(model: CausalModel) -> VocabularyHead | None:
    """Return the head of a model whose ranks share the vocabulary; None if they do not.

    If one rank has such a head all have, whatever part of the vocabulary is theirs: they draw
    together.
    """
    head = getattr(model, "packed_head", None)
    return head if isinstance(head, VocabularyHead) and head.group.size > 1 else None


class DecodeStep:
    """The decode step of the first `bucket` rows of a batch on the device.

    It computes the logits of each row's last token, draws the next token, writes it to `results`
    and advances the rows: op by op until it is captured, then as a CUDA graph.

    Args:
        model: the model that computes the step.
        storage: the paged cache.
        batch: the rows of the sequences that decode.
        results: the buffer to which tokens are written.
        bucket: rows of the step.
        batch_invariant: True if a row's bits must not depend on other rows, see `AttentionContext`.
        shared: leading blocks that layers without a window read once for several rows.
        keeps_logits: True if `logits` must still be there after `run`, in memory of this step's
            own.
        greedy: head whose ranks draw from the largest logit of each, as all rows are greedy; such
            a step runs whole.
        adapters: adapters of the rows; None for steps in which no row uses one.
        states: the slots of the rows; None for a model without layers that keep states.

    Attributes:
        logits: (bucket, V) between `run_model` and `sample`, or after `run` with `keeps_logits`;
            else None.
    """

    def __init__(
        self,
        model: CausalModel,
        storage: KVStorage,
        batch: DeviceBatch,
        results: Results,
        bucket: int,
        *,
        batch_invariant: bool = False,
        shared: SharedPrefixes | None = None,
        keeps_logits: bool = False,
        greedy: VocabularyHead | None = None,
        adapters: StepAdapters | None = None,
        states: FixedStates | None = None,
    ) -> None:
        self.model, self.storage, self.batch, self.results = model, storage, batch, results
        self.bucket, self.keeps_logits, self._greedy = bucket, keeps_logits, greedy
        self.logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graph_logits: Tensor | None = None
        self._model_graph: torch.cuda.CUDAGraph | None = None
        self._hidden: Tensor | None = None  # where the graph of the model leaves its states
        device = batch.device
        self._largest = largest_weight(model)
        self._looks_up = _embedding_of(model)
        self._positions = torch.zeros(bucket, dtype=torch.int64, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)  # moved, and not read
        ctx = AttentionContext(
            cu_seqlens_q=torch.arange(bucket + 1, dtype=torch.int32, device=device),
            max_seqlen_q=1,
            seqlens_k=torch.zeros(bucket, dtype=torch.int32, device=device),
            block_table=batch.table[:bucket],
            slot_mapping=torch.full((bucket,), -1, dtype=torch.int64, device=device),
            batch_invariant=batch_invariant,
            shared=shared,
            plans=StepPlans.on(device),
        )
        others = tuple(
            replace(
                ctx,
                block_table=other.table[:bucket],
                slot_mapping=torch.full((bucket,), -1, dtype=torch.int64, device=device),
                shared=None,
                plans=StepPlans.on(device),
            )
            for other in batch.others
        )
        self.ctx = replace(ctx, group_of=storage.spec.group_of, others=others)
        if adapters is not None:
            self.ctx = self.ctx.with_adapters(adapters)
        if states is not None:  # a row's position is the number of tokens before its own
            self.ctx = replace(self.ctx, states=states.of_rows(self._positions))

    @property
    def is_captured(self) -> bool:
        """Whether `run` replays a graph of the whole step."""
        return self._graph is not None

    @property
    def is_model_captured(self) -> bool:
        """Whether `run_model` replays a graph."""
        return self._model_graph is not None

    def run(self) -> None:
        """Compute the whole step, by its graph if there is one: results are written, the rows
        advanced."""
        if self._graph is None:
            with torch.inference_mode():
                self._compute()
        else:
            self._graph.replay()
            self.logits = self._graph_logits

    @torch.inference_mode()
    def run_model(self, *, widens: bool = True) -> Tensor:
        """Compute the step up to its logits (bucket, V), which may then be read; `sample` must
        follow.

        Args:
            widens: True to return float32 logits, which may be changed before tokens are drawn;
                False to return logits in the dtype of the head.
        """
        if self._model_graph is None:
            hidden = self._compute_hidden()
        else:
            self._model_graph.replay()
            assert self._hidden is not None
            hidden = self._hidden
        head = self.model.compute_logits if widens else head_logits(self.model)
        self.logits = head(hidden)
        return self.logits

    @torch.inference_mode()
    def sample(self) -> None:
        """Draw a token for each row from the logits that `run_model` left, and advance the rows."""
        assert self.logits is not None
        self._sample(self.logits)
        self.logits = None

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Run the step once, then capture it as a CUDA graph.

        The run before does what a step does only the first time: it compiles kernels and makes
        plans, tables of angles, and cuBLAS's workspace for the stream.

        Args:
            pool: the memory pool of the graph, from `torch.cuda.graph_pool_handle`.
            stream: the stream of the run and of the capture. No row of the batch may be active.
        """
        self._graph = self._captured(self._compute, pool, stream)
        self._graph_logits = self.logits

    def capture_model(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Capture the part of the step before the head as a graph of its own, for `run_model`.

        The part is run once before. Head and sampler, which follow op by op, are run once, too, so
        that their kernels are compiled. No row of the batch may be active.
        """

        def compute() -> None:
            hidden = self._compute_hidden()
            self._hidden = self.results.room_for(hidden)
            self._hidden.copy_(hidden)

        self._model_graph = self._captured(compute, pool, stream)
        self._after_model()

    @torch.inference_mode()
    def _after_model(self) -> None:
        assert self._hidden is not None
        self._hidden.zero_()
        self._sample(self.model.compute_logits(self._hidden))

    @torch.inference_mode()
    def _captured(
        self, compute: Callable[[], None], pool: Any, stream: torch.cuda.Stream
    ) -> torch.cuda.CUDAGraph:
        stream.wait_stream(torch.cuda.current_stream(self.batch.device))
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream(self.batch.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may wait for an event meanwhile: of results, or of NCCL's watchdog.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
            compute()
        return graph

    def _compute(self) -> None:
        hidden = self._compute_hidden()
        if self._greedy is not None:
            drawn = self._greedy.greedy(hidden)
            finish_decode(*drawn, **self._moved(), results=self.results.values)
            return
        logits = head_logits(self.model)(hidden)
        self._sample(logits)
        self.logits = logits if self.keeps_logits else None

    def _compute_hidden(self) -> Tensor:
        rows, ctx, results = self.batch, self.ctx, self.results
        # The first group's move the count of results on; the others' move one that is not read.
        for group, own in zip(rows.others, ctx.others, strict=True):
            begin_decode(**self._beginning(group.fresh, own, self._place))
        beginning = self._beginning(rows.fresh, ctx, results.place)
        token = rows.token[: self.bucket]
        launching_early = ops.launching_early(rows.device, largest_weight=self._largest)
        if self._looks_up is None:
            begin_decode(**beginning)
            self._update_plans()
            # The model begins with kernels of torch's, the embedding's and the angles': those that
            # begin early may read what was written above, and weights written before the step.
            with launching_early:
                return self.model(token, self._positions, ctx=ctx, kv=self.storage.layers)
        model, embedding = self._looks_up
        looked_up = {
            "token": token,
            "embedding": embedding,
            "angles": model.rotary.table(rows.device),
        }
        x, angles = start_decode(**beginning, **looked_up)
        has_plans = self._update_plans()
        with launching_early:
            if not has_plans:
                ops.settle(rows.device)
            kv = self.storage.layers
            return model.through_layers(x, [model.rotary.halves(angles)], ctx=ctx, kv=kv)

    def _beginning(self, fresh: Tensor, own: AttentionContext, place: Tensor) -> dict[str, Any]:
        """Return the arguments of `begin_decode` for a group of layers.

        Args:
            fresh: the new block of each row, -1 for none.
            own: the group's block table and slots.
            place: the place in the ring of results, on the device.
        """
        rows, size = self.batch, self.bucket
        return {
            "position": rows.position[:size],
            "active": rows.active[:size],
            "fresh": fresh[:size],
            "table": own.block_table,
            "place": place,
            "block_size": rows.block_size,
            "ring": RING,
            "positions": self._positions,
            "slot_mapping": own.slot_mapping,
            "seqlens_k": own.seqlens_k,
        }

    def _update_plans(self) -> bool:
        """Plan anew which keys each program of attention reads in this step; return whether there
        are plans."""
        has_plans = False
        for own in (self.ctx, *self.ctx.others):
            if own.plans is not None:
                own.plans.update(own.seqlens_k, own.cu_seqlens_q)
                has_plans = has_plans or len(own.plans) > 0
        return has_plans

    def _sample(self, logits: Tensor) -> None:
        rows, results, size = self.batch, self.results, self.bucket
        with ops.launching_early(rows.device, largest_weight=self._largest):
            draw_decode(
                logits,
                temperature=rows.temperature[:size],
                top_k=rows.top_k[:size],
                top_p=rows.top_p[:size],
                min_p=rows.min_p[:size],
                seeds=rows.seed[:size],
                **self._moved(),
                results=results.values,
            )

    def _moved(self) -> dict[str, Any]:
        """Return the arguments by which the end of a step advances its rows."""
        rows, size = self.batch, self.bucket
        return {
            "token": rows.token[:size],
            "position": rows.position[:size],
            "counter": rows.counter[:size],
            "active": rows.active[:size],
            "place": self.results.place,
        }
