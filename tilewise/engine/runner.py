"""One model step: copy the blocks that were forked, run the model, keep the rows that sample."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tilewise.cache.storage import KVStorage
from tilewise.engine.inputs import ModelInputs
from tilewise.nn.context import AttentionContext
from tilewise.ops import copy_blocks

__all__ = ["CausalModel", "ModelRunner"]


class CausalModel(Protocol):
    """What the runner needs of a model; every class of `tilewise.models` is one."""

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        *,
        ctx: AttentionContext,
        kv: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Map (T,) ids and positions to (T, E) hidden states; write keys and values to `kv`."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map (R, E) hidden states to (R, V) float32 logits."""
        ...


class ModelRunner:
    """Runs a model over the cache that it writes; knows tensors, not requests.

    Args:
        model: see CausalModel.
        storage: the paged cache on the device of the model.

    Attributes:
        block_size: tokens per cache block.
        device: of the model and the cache.
    """

    def __init__(self, model: CausalModel, storage: KVStorage) -> None:
        self.model = model
        self.storage = storage
        self.block_size = storage.spec.block_size
        self.device = storage.layers[0][0].device

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs) -> Tensor:
        """Run one step and return the logits (R, V) float32 of `inputs.logits_rows`.

        Blocks are copied before anything is written. With no row to sample the result has no rows.
        """
        kv = self.storage.layers
        if len(inputs.block_copies) > 0:
            for k_cache, v_cache in kv:
                copy_blocks(k_cache, v_cache, inputs.block_copies)
        hidden = self.model(inputs.ids, inputs.positions, ctx=inputs.ctx, kv=kv)  # (T, E)
        if len(inputs.logits_rows) < len(hidden):
            hidden = hidden.index_select(0, inputs.logits_rows)
        return self.model.compute_logits(hidden)
