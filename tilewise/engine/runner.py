"""One model step: copy the blocks that were forked, run the model, keep the rows that sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from tilewise.cache.spec import KVLayer
from tilewise.cache.storage import KVStorage
from tilewise.engine.inputs import ModelInputs
from tilewise.nn.context import AttentionContext
from tilewise.ops import copy_blocks

__all__ = ["CausalModel", "ModelRunner", "threads_for"]

# Multiplications for which another CPU thread is worth waking, 0.8 ms of bfloat16 on a core of an
# EPYC 9004 (2026-11). Threads meet after each of some forty products in a step; with less to do in
# between they mostly wait, and on a busy machine for one that does not run: then 4 ms become 300.
WORK_PER_THREAD = 2**26
# Bytes of keys and values of one layer that reading shared prefixes once must save. 512 MiB take a
# GPU's attention 90 us or more (374 us for 2.2 GB, partly from L2, on an H200, 2026-11-22), several
# times what the launches of the passes take the host.
SHARING_BYTES = 512 << 20


def threads_for(num_multiplications: int, available: int) -> int:
    """Return how many of the `available` CPU threads a step should use, at least 1."""
    return max(1, min(available, num_multiplications // WORK_PER_THREAD))


class CausalModel(Protocol):
    """What the runner needs of a model; every class of `tilewise.models` is one."""

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        *,
        ctx: AttentionContext,
        kv: list[KVLayer],
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
        num_parameters: of the model, from which a step on a CPU chooses its threads; None leaves
            torch's number of threads alone.

    Attributes:
        block_size: tokens per cache block.
        device: of the model and the cache.
        sharing_tokens: what `build_inputs` takes. None on a CPU, where a sequence's bits do not
            depend on its neighbours, as they would on whom it shares a prefix with.
    """

    def __init__(
        self, model: CausalModel, storage: KVStorage, *, num_parameters: int | None = None
    ) -> None:
        self.model = model
        self.num_parameters = num_parameters
        self.storage = storage
        self.block_size = storage.spec.block_size
        self.device = storage.layers[0][0].device
        self.sharing_tokens: int | None = None
        if self.device.type == "cuda":
            layer_bytes = storage.spec.bytes_per_token // storage.spec.num_layers
            self.sharing_tokens = SHARING_BYTES // layer_bytes

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs) -> Tensor:
        """Run one step and return the logits (R, V) float32 of `inputs.logits_rows`.

        Blocks are copied before anything is written. With no row to sample the result has no rows.
        """
        with self.threads(len(inputs.ids)):
            return self._forward(inputs)

    def _forward(self, inputs: ModelInputs) -> Tensor:
        kv = self.storage.layers
        if len(inputs.block_copies) > 0:
            self.copy(inputs.block_copies)
        hidden = self.model(inputs.ids, inputs.positions, ctx=inputs.ctx, kv=kv)  # (T, E)
        if len(inputs.logits_rows) < len(hidden):
            hidden = hidden.index_select(0, inputs.logits_rows)
        return self.model.compute_logits(hidden)

    def copy(self, block_pairs: Tensor) -> None:
        """Copy blocks (C, 2), source and destination, in all layers."""
        k_cache, v_cache, *scales = self.storage.whole
        k_scale, v_scale = scales or (None, None)
        pairs = self.storage.in_all_layers(block_pairs)
        copy_blocks(k_cache, v_cache, pairs, k_scale=k_scale, v_scale=v_scale)

    @contextmanager
    def threads(self, num_tokens: int) -> Iterator[None]:
        """Let torch, and the kernels that follow it, use as many threads as the step is worth."""
        available = torch.get_num_threads()
        chosen = available
        if self.device.type == "cpu" and self.num_parameters is not None:
            chosen = threads_for(num_tokens * self.num_parameters, available)
        if chosen == available:
            yield
            return
        torch.set_num_threads(chosen)
        try:
            yield
        finally:
            torch.set_num_threads(available)
