"""Steps with prompts, captured in pieces: CUDA graphs between the layers' attention.

Computed op by op, such a step waits for the host: each of some dozen kernels a layer takes it tens
of microseconds to launch, often longer than the device needs. What a layer computes beside its
attention depends on nothing but the number of tokens, so it is captured for some numbers, and a
step is padded to the next of them. Attention depends on every sequence's length: it stays outside,
one call a layer between two graphs.

    piece 0      embedding, norm, qkv product, rotation and write   of layer 0
    attention    of layer 0, by the step's own context
    piece 1      output product, feed-forward block of layer 0; qkv product ... of layer 1
    ...
    piece L      the rest of the last layer, the last norm

The pieces of all numbers share one pool of memory. What one piece leaves for the next is read
before anything else of the pool runs, so nothing of it is held between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilewise.cache.storage import KVStorage
from tilewise.engine.runner import CausalModel
from tilewise.nn.context import Attend, AttentionContext

__all__ = ["PromptSteps", "can_capture", "prompt_sizes"]

# Sizes that are not multiples of 16, and those of products for few rows, take kernels that a larger
# step has not run yet.
_FEW = 64


def prompt_sizes(most: int) -> list[int]:
    """Return the numbers of tokens that steps are captured for, ascending: the last is `most`.

    Powers of 2 from 16 to 256, then eight sizes an octave: at most one token in nine runs for
    nothing.
    """
    sizes = [16, 32, 64, 128, 256]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + (1 << (sizes[-1].bit_length() - 4)))
    return [*(size for size in sizes if size < most), most]


def can_capture(model: CausalModel) -> bool:
    """Whether the model hands its attention to `AttentionContext.attend`, every layer once."""
    return bool(getattr(model, "hands_attention_over", False))


class PromptSteps:
    """Runs steps of up to `most` tokens, each padded to one of `prompt_sizes`.

    Rows of the padding hold tokens of earlier steps; they are written to no slot and attend to
    nothing.

    Args:
        model: see `can_capture`.
        storage: the paged cache.
        most: tokens of a step.

    Attributes:
        sizes: the numbers of tokens that steps are padded to.
    """

    def __init__(self, model: CausalModel, storage: KVStorage, most: int) -> None:
        if not can_capture(model):
            raise ValueError(f"model must hand its attention over, {type(model).__name__} does not")
        self.model, self.storage, self.sizes = model, storage, prompt_sizes(most)
        self.device = storage.layers[0][0].device
        self._ids = torch.zeros(most, dtype=torch.int64, device=self.device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=self.device)
        self._slots = torch.full((most,), -1, dtype=torch.int64, device=self.device)
        self._captured: dict[int, _Pieces] = {}

    def is_captured(self, size: int) -> bool:
        """Whether steps of this size replay graphs."""
        return size in self._captured

    def size_of(self, num_tokens: int) -> int:
        """Return what a step of so many tokens is padded to."""
        return next(size for size in self.sizes if size >= num_tokens)

    def run(self, ids: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        """Compute a step, by its graphs if there are any.

        Args:
            ids, positions: (T,) int64, 1 <= T <= most.
            ctx: where the rows belong.

        Returns:
            (T, E), the last hidden states, normalised; valid until the next step runs.
        """
        count = len(ids)
        size = self.size_of(count)
        self._ids[:count].copy_(ids)
        self._positions[:count].copy_(positions)
        self._slots[:count].copy_(ctx.slot_mapping)
        if count < size:
            self._slots[count:size].fill_(-1)
        pieces = self._captured.get(size)
        if pieces is not None:
            return pieces.run(ctx, count)[:count]

        def attend(function: Attend, q: Tensor, v_dim: int) -> Tensor:
            # Whatever the padding's rows hold stays in them, but zeros keep them finite.
            o = q.new_zeros((*q.shape[:-1], v_dim))
            o[:count] = function(q[:count], ctx)
            return o

        return self._compute(size, replace(ctx, attend=attend))[:count]

    @torch.inference_mode()
    def capture(self, size: int, pool: Any) -> None:
        """Capture the steps of one of `sizes` in a pool of `torch.cuda.graph_pool_handle`.

        Kernels that a size may be the first to need are run once before, over rows of no slot.
        """
        self._slots.fill_(-1)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            if not self._captured or size % 16 or size <= _FEW:
                self._compute(
                    size, self._context(lambda _, q, dim: q.new_zeros((*q.shape[:-1], dim)))
                )
            pieces = _Pieces(stream, pool)
            pieces.begin()
            try:
                hidden = self._compute(size, self._context(pieces.cut))
            finally:
                pieces.end()
            pieces.hidden = _borrowed(hidden)
            del hidden
        torch.cuda.current_stream(self.device).wait_stream(stream)
        if len(pieces.graphs) != len(self.storage.layers) + 1:
            raise RuntimeError(
                f"a model of {len(self.storage.layers)} layers handed over the attention of "
                f"{len(pieces.graphs) - 1}"
            )
        self._captured[size] = pieces

    def _context(self, attend: Callable[[Attend, Tensor, int], Tensor]) -> AttentionContext:
        """Return a context of no sequences, for a run whose attention is not computed."""
        nothing = torch.zeros(1, dtype=torch.int32, device=self.device)
        return AttentionContext(
            cu_seqlens_q=nothing,
            max_seqlen_q=1,
            seqlens_k=nothing[:0],
            block_table=nothing[:0, None],
            slot_mapping=nothing[:0],
            attend=attend,
        )

    def _compute(self, size: int, ctx: AttentionContext) -> Tensor:
        ctx = replace(ctx, slot_mapping=self._slots[:size])
        return self.model(self._ids[:size], self._positions[:size], ctx=ctx, kv=self.storage.layers)


@dataclass(slots=True)
class _Attention:
    """A layer's attention between two graphs: where its queries lie, and where o belongs."""

    function: Attend
    q: Tensor
    o: Tensor


class _Pieces:
    """The graphs of one size, and the attention between them."""

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.attention: list[_Attention] = []
        self.hidden: Tensor | None = None
        self._stream, self._pool = stream, pool

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self.graphs.append(graph)

    def end(self) -> None:
        self.graphs[-1].capture_end()

    def cut(self, function: Attend, q: Tensor, v_dim: int) -> Tensor:
        """End a piece before a layer's attention and begin the next with room for o."""
        q = q.contiguous()
        self.end()
        self.begin()
        o = q.new_empty((*q.shape[:-1], v_dim))
        self.attention.append(_Attention(function, _borrowed(q), _borrowed(o)))
        return o

    def run(self, ctx: AttentionContext, count: int) -> Tensor:
        for graph, at in zip(self.graphs, self.attention, strict=False):
            graph.replay()
            at.o[:count].copy_(at.function(at.q[:count], ctx))
        self.graphs[-1].replay()
        assert self.hidden is not None
        return self.hidden


def _no_attention(_: Attend, q: Tensor, v_dim: int) -> Tensor:
    return q.new_zeros((*q.shape[:-1], v_dim))


class _Memory:
    """Bytes on a GPU as other libraries offer them, owned by whoever allocated them."""

    def __init__(self, x: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (x.numel() * x.element_size(),),
            "typestr": "|u1",
            "data": (x.data_ptr(), False),
            "version": 2,
        }


def _borrowed(x: Tensor) -> Tensor:
    """Return a tensor at the place of contiguous `x` that does not keep its memory.

    The pool may give the memory to later pieces: they run after what reads this one.
    """
    raw = torch.as_tensor(_Memory(x), device=x.device)
    return raw.view(x.dtype).view(x.shape)
