"""Where the rows of one engine step belong: passed down as an argument, never global."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewise import ops
from tilewise.nn.adapted import StepAdapters
from tilewise.nn.states import LayerStates
from tilewise.ops import PagedPlan, SharedPrefixes

__all__ = ["Attend", "AttentionContext", "StepPlans", "StepStates"]


class StepPlans:
    """The plans of a step's attention: one for each shape, dtype and window, made by the first such
    layer.

    A plan is for the lengths of the step. A step that runs again with other lengths in the same
    tensors, as a captured CUDA graph does, calls `update` before its layers run, and makes its
    plans in a run before the capture.
    """

    def __init__(self) -> None:
        self._plans: dict[tuple[object, ...], PagedPlan] = {}

    @classmethod
    def on(cls, device: torch.device) -> StepPlans | None:
        """Return an empty StepPlans for a CUDA device, and None for other devices, which have no
        use for it."""
        return cls() if device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self._plans)

    def plan(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, window: int | None, **options: Any
    ) -> PagedPlan:
        """Return the plan of a layer's call of `paged_attention` with these arguments.

        The first call with these shapes, dtypes and window makes the plan; later ones get the same.
        """
        kind = (q.shape, q.dtype, k_cache.shape, k_cache.dtype, v_cache.shape, window)
        plan = self._plans.get(kind)
        if plan is None:
            options["window"] = window
            plan = self._plans[kind] = ops.plan_paged_attention(q, k_cache, v_cache, **options)
            ops.settle(q.device)  # attention follows at once
        return plan

    def update(self, seqlens_k: Tensor, cu_seqlens_q: Tensor) -> None:
        """Write all plans anew for other lengths, in place; see `PagedPlan.update`."""
        for plan in self._plans.values():
            plan.update(seqlens_k, cu_seqlens_q)


@dataclass(frozen=True, slots=True)
class StepStates:
    """The places of the recurrent states of a step's B sequences, for layers with states
    (`StateLayer`).

    Attributes:
        slots: (B,) int64, the slot of each sequence; -1 for one without.
        starts: (B,) int64, the number of tokens of each sequence that came before the step.
        layers: the state tensors of each such layer, by the layer's number in the model.
    """

    slots: Tensor
    starts: Tensor
    layers: Mapping[int, LayerStates]


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """Metadata of one packed step over a paged cache, built once and shared by all layers.

    Attributes:
        cu_seqlens_q: (B + 1,) int32; rows cu_seqlens_q[b]:cu_seqlens_q[b + 1] are sequence b.
        max_seqlen_q: host int, the longest run of rows.
        seqlens_k: (B,) int32, tokens of each sequence with the new ones counted.
        block_table: (B, max_blocks) int32 cache block ids, in order of position.
        slot_mapping: (T,) int64, block * block_size + offset of each row; -1 is not written.
        batch_invariant: True if a row's bits must not depend on its neighbours, of any sequence.
        shared: the leading blocks that several sequences have in common; layers without a window
            read them once for all. None for no such reads.
        tree_mask: (T, at least max_seqlen_q) bool, which new rows of its sequence each row sees, in
            place of causality among them; see `ops.paged_attention`.
        plans: the plans of the layers' attention; None lets every call choose its kernel by itself.
        attend: a function that is called in place of a layer's attention, `attend(function, q,
            v_dim)`, and returns o; `function` is the layer's `Attend`. A step whose attention runs
            between CUDA graphs sets it. None calls the layer's attention directly.
        group_of: the number of the group of each layer of the model; empty where all layers are one
            group.
        others: the contexts of groups 1, 2, ..., with their own block tables and slots; this
            context has those of group 0.
        adapters: the adapters of the step's rows; None if no row uses one.
        states: the states of the step's sequences; None in a model without layers that keep one.
    """

    cu_seqlens_q: Tensor
    max_seqlen_q: int
    seqlens_k: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    batch_invariant: bool = False
    shared: SharedPrefixes | None = None
    tree_mask: Tensor | None = None
    plans: StepPlans | None = None
    attend: Callable[[Attend, Tensor, int], Tensor] | None = None
    group_of: tuple[int, ...] = ()
    others: tuple[AttentionContext, ...] = ()
    adapters: StepAdapters | None = None
    states: StepStates | None = None

    def with_adapters(self, adapters: StepAdapters) -> AttentionContext:
        """Return a copy of this context, and of those in `others`, with these adapters."""
        others = tuple(replace(other, adapters=adapters) for other in self.others)
        return replace(self, others=others, adapters=adapters)

    def of_layer(self, layer: int) -> AttentionContext:
        """Return the context with the block tables and slots of the group to which a layer
        belongs."""
        group = self.group_of[layer] if self.group_of else 0
        return self.others[group - 1] if group else self

    def in_chunks(self, size: int, block_size: int) -> AttentionContext:
        """Return the context of attention in chunks: each sequence becomes one sequence for each
        chunk in which it has new rows, and whose keys begin with the chunk.

        Returns self if the block table holds no more than one chunk. The new context has neither
        plans nor shared blocks.

        Nothing waits for a device: there are as many chunks as the longest run may touch, of which
        some are empty.

        Args:
            size: the tokens of a chunk, a multiple of the block size.
            block_size: the tokens of a block.

        Raises:
            ValueError: blocks do not divide a chunk, or the new tokens are a tree.
        """
        if self.block_table.shape[1] * block_size <= size:
            return self  # no sequence outgrows its first chunk
        if size % block_size:
            raise ValueError(f"block_size must divide the chunks of {size} keys, got {block_size}")
        if self.tree_mask is not None:
            raise ValueError("tree_mask must be None with attention in chunks, got a mask")
        device, width = self.seqlens_k.device, size // block_size
        most = (self.max_seqlen_q + size - 2) // size + 1
        ends = self.seqlens_k.long()
        starts = ends - self.cu_seqlens_q.diff()
        chunk = (starts // size).unsqueeze(1) + torch.arange(most, device=device)
        keys = (ends.unsqueeze(1) - chunk * size).clamp(0, size)
        rows = (keys - (starts.unsqueeze(1) - chunk * size).clamp(min=0)).clamp(min=0).flatten()
        edges = torch.nn.functional.pad(rows.cumsum(0), (1, 0)).to(torch.int32)
        places = (chunk * width).unsqueeze(2) + torch.arange(width, device=device)
        # Lengths are any number while a start compiles kernels and none has run yet.
        places = places.clamp(0, self.block_table.shape[1] - 1).flatten(1)
        table = self.block_table.gather(1, places).view(-1, width)
        return replace(
            self,
            cu_seqlens_q=edges,
            max_seqlen_q=min(self.max_seqlen_q, size),
            seqlens_k=torch.where(rows > 0, keys.flatten(), 0).to(torch.int32),
            block_table=table.contiguous(),
            shared=None,
            plans=None,
        )

    def attended(self, attend: Attend, q: Tensor, v_dim: int) -> Tensor:
        """Return o (T, Hq, v_dim): call `attend(q, self)`, or hand it to the step's own `attend` if
        it has one."""
        return attend(q, self) if self.attend is None else self.attend(attend, q, v_dim)


class Attend(Protocol):
    """The type of a function that computes a layer's attention over its cache.

    It maps rotated queries q (T, Hq, D) and their context to o (T, Hq, Dv). It returns o in `out`,
    if one is given and it can write there, or in a new tensor.
    """

    def __call__(self, q: Tensor, ctx: AttentionContext, out: Tensor | None = None, /) -> Tensor:
        """Return o (T, Hq, Dv) of q (T, Hq, D), in `out` or in a new tensor."""
