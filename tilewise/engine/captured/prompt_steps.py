"""Steps with prompts, captured in pieces: CUDA graphs between the layers' attention.

Computed op by op, such a step waits for the host: each of some dozen kernels a layer takes it tens
of microseconds to launch, often longer than the device needs. What a layer computes beside its
attention depends on nothing but the number of tokens, so it is captured for some numbers, and a
step is padded to the next of them. Attention depends on every sequence's length: it stays outside,
one call a layer between two graphs, by the context of the layer's group. Attention over latents has
the products by W_uk and W_uv with it: long prompts do without them.

    piece 0      embedding, norm, qkv product, rotation and write   of layer 0
    attention    of layer 0, by the step's own context
    piece 1      output product, feed-forward block of layer 0; qkv product ... of layer 1
    ...
    piece L      the rest of the last layer, the last norm

The pieces of all numbers share one pool of memory, and all layers one buffer of queries and one of
outputs: attention reads and writes them before the next piece does. Queries stay where a piece has
left them: the next one may write there, but attention reads them before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise.cache.spec import CacheSpec, LatentSpec
from tilewise.cache.storage import KVStorage
from tilewise.cost.padding import prompt_sizes
from tilewise.engine.steps.adapter_slots import AdapterSlots, FixedAdapters
from tilewise.engine.steps.runner import CausalModel
from tilewise.nn.context import Attend, AttentionContext

__all__ = ["PromptSteps", "can_capture", "has_run", "prompt_sizes"]

# The context of a layer's group, and what `AttentionContext.attend` is given.
_Attending = Callable[[AttentionContext, Attend, Tensor, int], Tensor]


def can_capture(model: CausalModel) -> bool:
    """Return whether a model hands its attention to `AttentionContext.attend`, once in every layer.

    Only such a model's steps with prompts can be captured.
    """
    return bool(getattr(model, "hands_attention_over", False))


def has_run(spec: CacheSpec) -> bool:
    """Return whether steps with prompts are to be captured over a cache like this one.

    True only for caches over which such steps have run on a GPU.

    `PromptSteps` captures those over latents, too, but in 16 bits no such graph has run yet: until
    one has, prompts of models with latents are computed op by op. So are those of layers with
    states, which a piece between two layers' attention would have to be cut for, too.
    """
    return not isinstance(spec.kv, LatentSpec) and not spec.states


class PromptSteps:
    """Runs steps with prompts of up to `most` tokens, each padded to one of `prompt_sizes`.

    Sizes that `capture` was called for replay CUDA graphs; others run op by op.

    Rows of the padding hold tokens of earlier steps; they are written to no slot and attend to
    nothing.

    Args:
        model: see `can_capture`.
        storage: the paged cache.
        most: the largest number of tokens of a step.
        adapters: the slots of adapters, of whose steps there are graphs, too; None without.

    Attributes:
        sizes: the numbers of tokens that steps are padded to.
    """

    def __init__(
        self,
        model: CausalModel,
        storage: KVStorage,
        most: int,
        adapters: AdapterSlots | None = None,
    ) -> None:
        if not can_capture(model):
            raise ValueError(f"model must hand its attention over, got {type(model).__name__}")
        self.model, self.storage, self.sizes = model, storage, prompt_sizes(most)
        self.device = storage.device
        self._ids = torch.zeros(most, dtype=torch.int64, device=self.device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=self.device)
        shape = (len(storage.parts), most)  # of each group of layers
        self._slots = torch.full(shape, -1, dtype=torch.int64, device=self.device)
        self._buffers: dict[str, Tensor] = {}  # queries, outputs and hidden states of a step
        self._adapters = None if adapters is None else FixedAdapters(adapters, most)
        self._captured: dict[tuple[int, bool], _Pieces] = {}  # by size, and whether with adapters

    def is_captured(self, size: int, *, adapted: bool = False) -> bool:
        """Whether steps of this size replay graphs: those with adapters, or those without."""
        return (size, adapted) in self._captured

    def size_of(self, num_tokens: int) -> int:
        """Return the number of tokens to which a step of num_tokens is padded."""
        return next(size for size in self.sizes if size >= num_tokens)

    def run(
        self,
        ids: Tensor,
        positions: Tensor,
        ctx: AttentionContext,
        adapter_slots: NDArray[np.int32] | None = None,
    ) -> Tensor:
        """Compute a step, by its graphs if there are any.

        Args:
            ids, positions: (T,) int64, 1 <= T <= most.
            ctx: the context that says where in the cache the rows belong.
            adapter_slots: (T,), the slots of the rows, -1 for none; None if no row uses an adapter.

        Returns:
            (T, E), the last hidden states, normalised; valid until the next step runs.
        """
        count = len(ids)
        size = self.size_of(count)
        self._ids[:count].copy_(ids)
        self._positions[:count].copy_(positions)
        for slots, own in zip(self._slots, (ctx, *ctx.others), strict=True):
            slots[:count].copy_(own.slot_mapping)
        if count < size:
            self._slots[:, count:size].fill_(-1)
        adapted = adapter_slots is not None
        if self._adapters is not None and adapter_slots is not None:
            self._adapters.write(adapter_slots, size)
        pieces = self._captured.get((size, adapted))
        if pieces is not None:
            pieces.run(ctx, count)
            return self._buffers["hidden"][:count]

        def attend(own: AttentionContext, function: Attend, q: Tensor, v_dim: int) -> Tensor:
            # Whatever the padding's rows hold stays in them, but zeros keep them finite.
            o = q.new_zeros((*q.shape[:-1], v_dim))
            o[:count] = function(q[:count], own)
            return o

        return self._compute(size, ctx, attend, adapted)[:count]

    @torch.inference_mode()
    def capture(
        self, size: int, pool: Any, stream: torch.cuda.Stream, *, adapted: bool = False
    ) -> None:
        """Capture the steps of one of `sizes` in graphs on `stream`.

        Before, the step is run once: it may need kernels or buffers for the first time.

        Args:
            size: the number of tokens, one of `sizes`.
            pool: the memory pool of the graphs, from `torch.cuda.graph_pool_handle`.
            stream: the stream of the run before and of the capture.
            adapted: True for steps of which some rows use adapters.

        Raises:
            RuntimeError: the model has not handed over the attention of every layer.
        """
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.try_out(size, adapted=adapted)
            context = self._context()
            pieces = _Pieces(pool, self._room)
            pieces.begin()
            try:
                hidden = self._compute(size, context, pieces.cut, adapted)
                self._buffer("hidden", hidden).copy_(hidden)
            finally:
                pieces.end()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        if len(pieces.graphs) != len(self.storage.layers) + 1:
            raise RuntimeError(
                f"a model of {len(self.storage.layers)} layers handed over the attention of "
                f"{len(pieces.graphs) - 1}"
            )
        self._captured[size, adapted] = pieces

    @torch.inference_mode()
    def try_out(self, size: int, *, adapted: bool = False) -> None:
        """Run the layers on `size` rows without attention, as a graph will; drop the results."""
        self._slots.fill_(-1)

        def attend(_own: AttentionContext, _function: Attend, q: Tensor, v_dim: int) -> Tensor:
            return self._room(q, v_dim)[1]

        hidden = self._compute(size, self._context(), attend, adapted)
        self._buffer("hidden", hidden)

    def _context(self) -> AttentionContext:
        """Return a context of no sequences, for a run whose attention is not computed."""
        nothing = torch.zeros(1, dtype=torch.int32, device=self.device)
        ctx = AttentionContext(
            cu_seqlens_q=nothing,
            max_seqlen_q=1,
            seqlens_k=nothing[:0],
            block_table=nothing[:0, None],
            slot_mapping=nothing[:0],
        )
        others = (ctx,) * (len(self.storage.parts) - 1)
        return replace(ctx, group_of=self.storage.spec.group_of, others=others)

    def _compute(
        self, size: int, ctx: AttentionContext, attend: _Attending, adapted: bool
    ) -> Tensor:
        """Return the hidden states (size, E) of the padded step; `attend` computes each layer's
        attention.

        The inputs are read from the buffers. Adapters are those last written, if `adapted`.
        """
        ctx, *others = (
            replace(own, slot_mapping=slots[:size], attend=partial(attend, own))
            for own, slots in zip((ctx, *ctx.others), self._slots, strict=True)
        )
        ctx = replace(ctx, others=tuple(others))
        if self._adapters is not None and adapted:
            ctx = ctx.with_adapters(self._adapters.of(size))
        return self.model(self._ids[:size], self._positions[:size], ctx=ctx, kv=self.storage.layers)

    def _room(self, q: Tensor, v_dim: int) -> tuple[Tensor, Tensor]:
        """Return two buffers that all layers share: for queries of the shape of `q`, and for their
        attention's output of `v_dim` channels a head."""
        at_q = self._buffer(f"q {q.shape[1:]}", q)
        return at_q, self._buffer(f"o {q.shape[1]} {v_dim}", q, v_dim)

    def _buffer(self, name: str, like: Tensor, last: int | None = None) -> Tensor:
        """Return the first T rows of the buffer `name`, for a tensor with the shape of `like`.

        It is made at the first call, of zeros, with rows for the largest step and the dtype of
        `like`. Its last dimension is `last`, or for None that of `like`.
        """
        buffer = self._buffers.get(name)
        if buffer is None:
            shape = (self.sizes[-1], *like.shape[1:-1], last or like.shape[-1])
            # Zeros, so that rows of the padding are finite in whatever reads them first.
            buffer = self._buffers[name] = like.new_zeros(shape)
        return buffer[: len(like)]


@dataclass(slots=True)
class _Attention:
    """The attention of one layer, which is launched between two graphs.

    Attributes:
        function: the function that attends.
        q: the buffer in which the graph before leaves the queries.
        o: the buffer from which the graph after reads the output.
    """

    function: Attend
    q: Tensor
    o: Tensor


class _Pieces:
    """The graphs of the steps of one size, and each layer's attention between two of them.

    Args:
        pool: the memory pool of the graphs.
        room: a function from queries and the channels of a value to the buffers of q and o.
    """

    def __init__(self, pool: Any, room: Callable[[Tensor, int], tuple[Tensor, Tensor]]) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.attention: list[_Attention] = []
        self._lying: dict[tuple[object, ...], Tensor] = {}  # q and o of layers, by where they lie
        self._pool, self._room = pool, room

    def begin(self) -> None:
        """Begin the next piece, on the current stream."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self.graphs.append(graph)

    def end(self) -> None:
        """End the piece that was begun."""
        self.graphs[-1].capture_end()

    def cut(self, _ctx: AttentionContext, function: Attend, q: Tensor, v_dim: int) -> Tensor:
        """End a piece before a layer's attention, and begin the next; return the output's buffer.

        Args:
            function: the function that attends.
            q: the layer's queries.
            v_dim: the channels of the output.
        """
        at = _Attention(function, *self._room(q, v_dim))
        at.o = self.known(at.o)
        # A plan is for queries that begin aligned, in whatever memory they lie.
        if q.is_contiguous() and q.data_ptr() % 16 == 0:
            at.q = self.known(_without_owner(q))
        else:
            at.q.copy_(q)
            at.q = self.known(at.q)
        self.end()
        self.attention.append(at)
        self.begin()
        return at.o

    def known(self, x: Tensor) -> Tensor:
        """Return the tensor of an earlier layer with the same memory, shape and dtype; without one,
        `x`.

        So layers whose queries or outputs lie in one place share one tensor.
        """
        return self._lying.setdefault((x.data_ptr(), x.shape, x.stride(), x.dtype), x)

    def run(self, ctx: AttentionContext, count: int) -> None:
        """Replay the pieces, and compute the attention of the first `count` rows between them by
        `ctx`.

        The last hidden states are left in the buffer that the last graph writes.
        """
        rows = {id(x): x[:count] for x in self._lying.values()}  # of many layers they are the same
        for layer, (graph, at) in enumerate(zip(self.graphs, self.attention, strict=False)):
            graph.replay()
            out = rows[id(at.o)]
            o = at.function(rows[id(at.q)], ctx.of_layer(layer), out)
            if o is not out:
                out.copy_(o)
        self.graphs[-1].replay()


class _Bytes:
    """A view of a tensor's bytes on a GPU, from which `torch.as_tensor` makes a tensor that does
    not keep the memory alive."""

    def __init__(self, x: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (x.nbytes,),
            "typestr": "|u1",
            "data": (x.data_ptr(), False),
            "version": 3,
        }


def _without_owner(x: Tensor) -> Tensor:
    """Return contiguous `x` as a tensor on the same memory that does not keep that memory alive.

    The results of a graph stay valid until a later graph of the pool writes there.
    """
    return torch.as_tensor(_Bytes(x), device=x.device).view(x.dtype).view(x.shape)
