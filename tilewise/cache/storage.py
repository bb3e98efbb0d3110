"""The tensors behind the block ids: one k_cache and one v_cache per layer."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.cache.spec import CacheSpec

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
    """Owns the cache memory of a model; a block id is an index into dim 0 of every tensor.

    The memory is not initialised: only slots that a sequence has written are ever read.

    Args:
        spec: shapes and dtype.
        num_blocks: blocks per layer, at least 1.
        device: where the tensors live.

    Attributes:
        layers: per layer (k_cache (N, P, Hk, D), v_cache (N, P, Hk, Dv)).

    Raises:
        ValueError: num_blocks is below 1.
    """

    def __init__(
        self, spec: CacheSpec, num_blocks: int, device: torch.device | str = "cpu"
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.spec = spec
        self.num_blocks = num_blocks
        self.layers: list[tuple[Tensor, Tensor]] = [
            (
                torch.empty(spec.k_shape(num_blocks), dtype=spec.kv.dtype, device=device),
                torch.empty(spec.v_shape(num_blocks), dtype=spec.kv.dtype, device=device),
            )
            for _ in range(spec.num_layers)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers together."""
        return self.num_blocks * self.spec.bytes_per_block
