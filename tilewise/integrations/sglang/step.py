"""What all layers of a step of SGLang need of its batch, eager and in CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_exec, get_parallel
from torch import Tensor

from tilewise.errors import UnsupportedError
from tilewise.nn.context import StepPlans

__all__ = ["Step", "StepBackend"]


@dataclass
class Step:
    """One step of SGLang as the kernels take it; all attention layers of the step share it.

    Attributes:
        num_tokens: the number of rows of the step, without those that pad it.
        max_query_len: the longest run of new tokens.
        edges: int32 (B + 1,), the first row of each sequence, and the end of the last.
        seq_lens: int32 (B,), tokens of each sequence with the new ones.
        block_table: int32 (B, max_blocks), pages of the pool.
        window_table: the block table in the pool of layers with windows; None if these have no pool
            of their own.
        window_slots: int64 (T,), the slots of new tokens in the pool of layers with windows; None
            without such a pool.
        plans: the plans of the layers' attention, which the first layer makes; None on a CPU.
    """

    num_tokens: int
    max_query_len: int
    edges: Tensor
    seq_lens: Tensor
    block_table: Tensor
    window_table: Tensor | None = None
    window_slots: Tensor | None = None
    plans: StepPlans | None = field(default=None, repr=False)


class StepBackend(AttentionBackend):  # type: ignore[misc]
    """The base of both attention backends, which turns SGLang's batches into `Step`s.

    Subclasses compute layers. Raises UnsupportedError for speculative decoding, encoders and
    sequences cut over GPUs.

    A graph of a decode step reads its lengths, tables and plans from buffers that are filled before
    each replay; kernels read them on the device, so nothing waits.
    """

    needs_cpu_seq_lens: ClassVar[bool] = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        if not runner.spec_algorithm.is_none():
            raise UnsupportedError("speculative_algorithm must be None: drafts are not verified")
        if runner.model_config.is_encoder_decoder:
            raise UnsupportedError("a model must be a decoder, got one with an encoder")
        if get_parallel().dcp_enabled:
            raise UnsupportedError("dcp_size must be 1: a sequence is not cut over GPUs here")
        self.device = runner.device
        self.pool = runner.token_to_kv_pool
        self.slots: Any = runner.req_to_token_pool.req_to_token
        self.block_size: int = runner.page_size
        self.max_blocks = -(-runner.model_config.context_len // self.block_size)
        self.has_window_pool = isinstance(self.pool, SWAKVPool)
        self.batch_invariant = bool(get_exec().deterministic.enable_deterministic_inference)
        self.forward_metadata: Step | None = None
        self._graph: Step | None = None
        self._plans: dict[int, StepPlans | None] = {}  # of graphs, by their sequences

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Set `forward_metadata` to the `Step` of a batch whose attention is not in a CUDA graph;
        SGLang calls it.

        An idle batch sets None. Raises UnsupportedError for forward modes other than extend, mixed,
        decode and idle.
        """
        batch = forward_batch
        mode = batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
            return
        if mode.is_decode():
            count = batch.batch_size
            edges = torch.arange(count + 1, dtype=torch.int32, device=self.device)
            tokens, longest = count, 1
        elif _has_prompts(mode):
            lengths = batch.extend_seq_lens_cpu
            edges = torch.nn.functional.pad(batch.extend_seq_lens.cumsum(0), (1, 0)).int()
            tokens, longest = sum(lengths), max(lengths)
        else:
            raise UnsupportedError(
                f"forward_mode must be extend, mixed, decode or idle, got {mode.name}"
            )
        table, window_table = self._tables(batch)
        window_slots = None
        if self.has_window_pool:
            window_slots = self.pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
        self.forward_metadata = Step(
            tokens,
            longest,
            edges,
            batch.seq_lens.int(),
            table,
            window_table,
            window_slots,
            StepPlans.on(edges.device),
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the buffers that CUDA graphs of decode steps read, for max_bs sequences of one new
        token."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        table = zeros(max_bs, self.max_blocks)
        self._graph = Step(
            max_bs,
            1,
            torch.arange(max_bs + 1, dtype=torch.int32, device=self.device),
            zeros(max_bs),
            table,
            torch.zeros_like(table) if self.has_window_pool else None,
            zeros(max_num_tokens, dtype=torch.int64) if self.has_window_pool else None,
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return 1, the length of the sequences that pad a graph: they attend to one key of the
        first page."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the buffers of a decode step's CUDA graph, before it is captured and before each
        replay.

        It also sets `forward_metadata` and updates the plans of graphs of this batch size. Raises
        UnsupportedError for other steps than decode, or without `init_cuda_graph_state`.
        """
        batch, kept = forward_batch, self._graph
        if kept is None or not batch.forward_mode.is_decode_or_idle():
            raise UnsupportedError("a graph must be of decode steps, and its buffers made before")
        count = batch.batch_size
        # Filling may be captured, too: then it is for lengths that the host does not know.
        is_captured = kept.edges.is_cuda and torch.cuda.is_current_stream_capturing()
        table, window_table = self._tables(batch, all_blocks=is_captured)
        kept.seq_lens[:count].copy_(batch.seq_lens[:count])
        kept.block_table[:count, : table.shape[1]].copy_(table)
        step = Step(
            count, 1, kept.edges[: count + 1], kept.seq_lens[:count], kept.block_table[:count]
        )
        if kept.window_table is not None and kept.window_slots is not None:
            assert window_table is not None
            kept.window_table[:count, : table.shape[1]].copy_(window_table)
            slots = self.pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
            kept.window_slots[: slots.shape[0]].copy_(slots)
            step.window_table = kept.window_table[:count]
            step.window_slots = kept.window_slots[: slots.shape[0]]
        if count not in self._plans:
            self._plans[count] = StepPlans.on(kept.edges.device)
        step.plans = self._plans[count]
        if step.plans is not None:
            step.plans.update(step.seq_lens, step.edges)
        self.forward_metadata = step

    def _tables(self, batch: Any, all_blocks: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the block table of a batch, int32 (B, blocks of the longest sequence), and the
        same for the window pool; the second is None without such a pool.

        Where SGLang keeps no lengths on the host, or with `all_blocks`, the tables are as wide as
        the longest context.
        """
        count, blocks = batch.batch_size, self.max_blocks
        if batch.seq_lens_cpu is not None and not all_blocks:
            longest = int(batch.seq_lens_cpu[:count].max())
            blocks = min(blocks, -(-longest // self.block_size))
        first = self.slots[:, : blocks * self.block_size : self.block_size]
        slots = first[batch.req_pool_indices[:count]]
        table = slots.div(self.block_size, rounding_mode="floor").int()
        if not self.has_window_pool:
            return table, None
        windows = self.pool.translate_loc_from_full_to_swa(slots.long())
        return table, windows.div(self.block_size, rounding_mode="floor").int()

    def step_of(self, layer: Any) -> Step:
        """Return the Step of the current batch, after a check that `layer` is supported.

        Raises:
            UnsupportedError: the layer is cross-attention or an encoder's, or scales logits by
                position.
        """
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
            raise UnsupportedError(f"attn_type must be decoder, got {layer.attn_type}")
        if layer.xai_temperature_len > 0:
            raise UnsupportedError("xai_temperature_len must be -1: logits are not scaled by place")
        assert self.forward_metadata is not None
        return self.forward_metadata

    def place(self, forward_batch: Any, step: Step) -> Any:
        """Return SGLang's KVWriteLoc: the slots of the step's new tokens in the pool and in the
        window pool."""
        return KVWriteLoc.for_batch(forward_batch, swa_loc=step.window_slots)

    def paged(self, buffer: Any) -> Any:
        """Return a pool's buffer (slots, ...) as pages (num_blocks, block_size, ...)."""
        return buffer.unflatten(0, (-1, self.block_size))


def _has_prompts(mode: Any) -> bool:
    """Return whether a forward mode of SGLang computes prompts: extend or mixed, without drafts."""
    return bool(mode.is_extend_without_speculative() and not mode.is_dllm_extend())
