"""One decode step of the rows on the device: a function of fixed buffers, captured as a graph.

Nothing that the step needs comes from the host, and nothing of it depends on what the host knows:
it reads the rows of the batch, runs the model and the sampler, and leaves the rows as the next step
needs them. So it can be repeated without a word between, and captured in a CUDA graph, it is
replayed in one call. It runs a fixed number of rows, a bucket; those that are not active have no
keys and write to no slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.cache.storage import KVStorage
from tilewise.engine import device_sampling
from tilewise.engine.device_batch import DeviceBatch
from tilewise.engine.runner import CausalModel
from tilewise.nn.context import AttentionContext

__all__ = ["RING", "DecodeStep", "Results", "buckets"]

# Places for results. A step writes one while another is copied to the host; steps are read in turn,
# two at most being unfinished.
RING = 4


def buckets(max_num_seqs: int) -> list[int]:
    """Return the numbers of rows that steps are made for, ascending: the last is max_num_seqs.

    1, 2, 4, 8, then every 8 to 64, every 16 to 256, every 32 from there: at most 8 rows in 9, and
    later one in eight, run for nothing.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class Results:
    """Where steps leave what they drew, in turn.

    Attributes:
        values: (RING, max_num_seqs, 2) int64: token, and 1 if the row of logits was finite.
        place: (1,) int64, of the next step; the step itself moves it on.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.values = torch.zeros((RING, max_num_seqs, 2), dtype=torch.int64, device=device)
        self.place = torch.zeros((1,), dtype=torch.int64, device=device)


class DecodeStep:
    """The decode step of the first `bucket` rows.

    Args:
        model: computes the step.
        storage: the paged cache.
        batch: the rows.
        results: where the tokens go.
        bucket: rows of the step.

    Attributes:
        logits: (bucket, V) float32 of the last run.
    """

    def __init__(
        self,
        model: CausalModel,
        storage: KVStorage,
        batch: DeviceBatch,
        results: Results,
        bucket: int,
    ) -> None:
        self.model, self.storage, self.batch, self.results = model, storage, batch, results
        self.bucket = bucket
        self.logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        device = batch.device
        self.ctx = AttentionContext(
            cu_seqlens_q=torch.arange(bucket + 1, dtype=torch.int32, device=device),
            max_seqlen_q=1,
            seqlens_k=torch.zeros(bucket, dtype=torch.int32, device=device),
            block_table=batch.table[:bucket],
            slot_mapping=torch.full((bucket,), -1, dtype=torch.int64, device=device),
            keeps_plans=True,
        )

    @property
    def is_captured(self) -> bool:
        """Whether a graph is replayed."""
        return self._graph is not None

    @torch.inference_mode()
    def run(self) -> None:
        """Do the step, by its graph if there is one."""
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()

    @torch.inference_mode()
    def capture(self, pool: tuple[int, int]) -> None:
        """Capture the graph; no row may be active.

        What the step does for the first time (kernels that are compiled, plans, tables of angles,
        workspaces of cuBLAS) it does before, twice.
        """
        stream = torch.cuda.Stream(self.batch.device)
        stream.wait_stream(torch.cuda.current_stream(self.batch.device))
        with torch.cuda.stream(stream):
            self._compute()
            self._compute()
        torch.cuda.current_stream(self.batch.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            self._compute()
        self._graph = graph

    def _compute(self) -> None:
        rows, ctx, results, size = self.batch, self.ctx, self.results, self.bucket
        block_size = rows.block_size
        token, position, active = rows.token[:size], rows.position[:size], rows.active[:size]
        is_active = active != 0
        positions = position * active  # of rows without one, a position that is there
        column = (positions // block_size).unsqueeze(1)
        fresh = rows.fresh[:size].unsqueeze(1)
        block = ctx.block_table.gather(1, column)
        block = torch.where(fresh >= 0, fresh, block)
        ctx.block_table.scatter_(1, column, block)
        fresh.fill_(-1)
        slots = block[:, 0].to(torch.int64) * block_size + positions % block_size
        ctx.slot_mapping.copy_(torch.where(is_active, slots, -1))
        ctx.seqlens_k.copy_(positions + active)
        for plan in ctx.plans.values():
            plan.update(ctx.seqlens_k, ctx.cu_seqlens_q)
        hidden = self.model(token, positions, ctx=ctx, kv=self.storage.layers)
        self.logits = self.model.compute_logits(hidden)
        drawn, is_finite = device_sampling.sample_tokens(
            self.logits,
            temperature=rows.temperature[:size],
            top_k=rows.top_k[:size],
            top_p=rows.top_p[:size],
            min_p=rows.min_p[:size],
            seeds=rows.seed[:size],
            counters=rows.counter[:size],
        )
        token.copy_(torch.where(is_active, drawn, token))
        position += active
        rows.counter[:size] += active
        pairs = torch.stack((drawn, is_finite.to(torch.int64)), dim=1)
        results.values[:, :size].index_copy_(0, results.place, pairs.unsqueeze(0))
        results.place.add_(1).remainder_(RING)
