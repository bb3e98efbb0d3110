"""Where the rows of one engine step belong: passed down as an argument, never global."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from tilewise.ops import PagedPlan, SharedPrefixes

__all__ = ["Attend", "AttentionContext"]


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """Metadata of one packed step over a paged cache, built once and shared by all layers.

    Attributes:
        cu_seqlens_q: (B + 1,) int32; rows cu_seqlens_q[b]:cu_seqlens_q[b + 1] are sequence b.
        max_seqlen_q: host int, the longest run of rows.
        seqlens_k: (B,) int32, tokens of each sequence with the new ones counted.
        block_table: (B, max_blocks) int32 cache block ids, in order of position.
        slot_mapping: (T,) int64, block * block_size + offset of each row; -1 is not written.
        batch_invariant: a row's bits must not depend on its neighbours, of any sequence.
        shared: leading blocks that layers without a window read once for several sequences.
        tree_mask: (T, at least max_seqlen_q) bool, which new rows of its sequence each row sees, in
            place of causality among them; see `ops.paged_attention`.
        keeps_plans: the plans stay when lengths change: the context's maker updates them
            before the layers run. A CUDA graph needs that: make them in a run before the capture.
        attend: calls a layer's attention in its place, `attend(function, q, v_dim)`: a step whose
            attention stands between CUDA graphs. `function` is an `Attend`.
        group_of: of each layer of the model, the number of its group of layers; empty where all are
            one group.
        others: the contexts of groups 1, 2, ..., whose tables and slots are others; the first
            group's are here.
        plans: what the layers of a step share, made by the first of each kind on a GPU: for the
            shapes and the window of a call, which program reads which keys.
        latest: of each window, and of how often the lengths were written, the plan of the last
            layer whose outputs had a place: `PagedPlan.repeat` runs the next one like it.
    """

    cu_seqlens_q: Tensor
    max_seqlen_q: int
    seqlens_k: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    batch_invariant: bool = False
    shared: SharedPrefixes | None = None
    tree_mask: Tensor | None = None
    keeps_plans: bool = False
    attend: Callable[[Attend, Tensor, int], Tensor] | None = None
    group_of: tuple[int, ...] = ()
    others: tuple[AttentionContext, ...] = ()
    plans: dict[tuple[object, ...], PagedPlan] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    latest: dict[tuple[object, ...], PagedPlan] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def of_layer(self, layer: int) -> AttentionContext:
        """Return the context of a layer of the model: that of its group."""
        group = self.group_of[layer] if self.group_of else 0
        return self.others[group - 1] if group else self


class Attend(Protocol):
    """A layer's attention: queries (T, Hq, D) and where they belong, to o (T, Hq, Dv).

    o is written to `out` and that is returned, or it is another tensor.
    """

    def __call__(self, q: Tensor, ctx: AttentionContext, out: Tensor | None = None, /) -> Tensor:
        """Compute o."""
