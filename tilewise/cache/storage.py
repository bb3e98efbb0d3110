"""The tensors behind the block ids: k_cache and v_cache of each layer, and their scales."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.cache.spec import CacheSpec, KVLayer, kv_layer

__all__ = ["KVStorage", "num_blocks_for"]


def num_blocks_for(spec: CacheSpec, budget_bytes: int) -> int:
    """Return how many blocks fit into a memory budget: floor(budget_bytes / bytes_per_block).

    Args:
        spec: what a block is.
        budget_bytes: memory for the cache, bytes.

    Raises:
        ValueError: not even one block fits.
    """
    num_blocks = budget_bytes // spec.bytes_per_block
    if num_blocks < 1:
        raise ValueError(
            f"budget_bytes must hold at least one cache block of {spec.bytes_per_block} bytes "
            f"({spec.block_size} tokens x {spec.num_layers} layers), got {budget_bytes}"
        )
    return num_blocks


class KVStorage:
    """Owns the cache memory of a model; a block id is an index into dim 0 of every layer's tensors.

    The layers lie one after the other, so that all of them are also one cache of
    num_layers * num_blocks blocks, and what moves blocks moves those of all layers at once. The
    memory is not initialised: only slots that a sequence has written are ever read.

    Args:
        spec: shapes and dtype.
        num_blocks: blocks per layer, at least 1.
        device: where the tensors live.
        pinned: page-locked main memory, which a GPU reads and writes while the host goes on.

    Attributes:
        layers: per layer k_cache (N, P, Hk, D) and v_cache (N, P, Hk, Dv); with an 8-bit dtype also
            k_scale and v_scale (N, P, Hk) float32.
        whole: the same of all layers together, N being num_layers * num_blocks.

    Raises:
        ValueError: num_blocks is below 1.
    """

    def __init__(
        self,
        spec: CacheSpec,
        num_blocks: int,
        device: torch.device | str = "cpu",
        *,
        pinned: bool = False,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.spec = spec
        self.num_blocks = num_blocks
        total = spec.num_layers * num_blocks
        shapes: list[tuple[tuple[int, ...], torch.dtype]]
        shapes = [(spec.k_shape(total), spec.kv.dtype), (spec.v_shape(total), spec.kv.dtype)]
        if spec.kv.is_quantised:
            shapes += [(spec.scale_shape(total), torch.float32)] * 2
        tensors = [
            torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
            for shape, dtype in shapes
        ]
        self.whole = kv_layer(tensors)
        parts = [tensor.split(num_blocks) for tensor in self.whole]
        self.layers: list[KVLayer] = [kv_layer(layer) for layer in zip(*parts, strict=True)]

    def in_all_layers(self, block_pairs: Tensor, target: KVStorage | None = None) -> Tensor:
        """Turn pairs of blocks of one layer (n, 2) into those of `whole` (num_layers * n, 2).

        Args:
            block_pairs: int64, rows (source, target).
            target: the storage of the second blocks, of as many layers; None is this one.
        """
        steps = (self.num_blocks, (target or self).num_blocks)
        layer = torch.arange(self.spec.num_layers, device=block_pairs.device)
        firsts = torch.stack([layer * step for step in steps], dim=1)
        return (block_pairs + firsts.unsqueeze(1)).flatten(0, 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers together."""
        return self.num_blocks * self.spec.bytes_per_block
