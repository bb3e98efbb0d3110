"""The tensors behind the block ids: for each group of layers, its keys and values, or latents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.cache.spec import CacheLayer, CacheSpec, LatentLayer, LatentSpec, kv_layer
from tilewise.cache.states import StateStorage
from tilewise.huge_pages import ask_for_huge_pages

__all__ = ["KVStorage", "num_blocks_for"]

Tensors = tuple[Tensor, ...]


def num_blocks_for(spec: CacheSpec, budget_bytes: int) -> int:
    """Return how many blocks of every group fit into memory: floor(budget / bytes_per_block).

    Args:
        spec: the specification of the cache.
        budget_bytes: the memory for the cache in bytes.

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
    """The cache memory of a model; a block id is an index into dim 0 of a layer's tensors.

    The layers of a group lie one after the other, so that they are also one cache of num_layers *
    num_blocks blocks, and operations that move blocks move those of all layers at once. The memory
    is not initialised: only slots that a sequence has written are ever read.

    Args:
        spec: the specification of the cache: shapes and dtype.
        num_blocks: the blocks per layer, at least 1: one number for every group, or one each.
        device: the device of the tensors.
        pinned: True for page-locked main memory, which a GPU reads and writes asynchronously.
        num_slots: the number of sequences that run at once; used only if layers have states.
        num_checkpoints: the number of checkpoints of states that are kept.

    Attributes:
        device: the device of the tensors.
        states: the slots and checkpoints of the layers with states; None without such layers.
        layers: the tensors of each layer of the model: k_cache (N, P, Hk, D) and v_cache (N, P, Hk,
            Dv); with an 8-bit dtype also k_scale and v_scale (N, P, Hk) float32. For a layer of
            latents its latent_cache (N, P, R + Dr), with an 8-bit dtype the pair of it and
            latent_scale (N, P, 2) float32.
        num_blocks: the blocks per layer of the first group.
        parts: the storage of each group, as that of a model of its own; [self] if there is one
            group.
        whole: the tensors of all layers of the first group together, N being its layers times
            num_blocks.

    Raises:
        ValueError: num_blocks is below 1, or not one number for each group.
    """

    def __init__(
        self,
        spec: CacheSpec,
        num_blocks: int | Sequence[int],
        device: torch.device | str = "cpu",
        *,
        pinned: bool = False,
        num_slots: int = 1,
        num_checkpoints: int = 0,
    ) -> None:
        counts = [num_blocks] * len(spec.groups) if isinstance(num_blocks, int) else [*num_blocks]
        if len(counts) != len(spec.groups):
            raise ValueError(
                f"num_blocks must be one number for each of {len(spec.groups)} groups, got {counts}"
            )
        if min(counts) < 1:
            raise ValueError(f"num_blocks must be at least 1, got {min(counts)}")
        # Of "cuda" the GPU that tensors will be on, with its number: what is kept for a device is
        # found by it.
        self.spec, self.device = spec, torch.empty(0, device=device).device
        self.states: StateStorage | None = None
        if spec.states:
            self.states = StateStorage(spec.states, num_slots, num_checkpoints, device)
        self.num_blocks = counts[0]
        self.parts: list[KVStorage] = [self]
        self.layers: list[CacheLayer]
        if len(counts) > 1:
            self.parts = [
                KVStorage(spec.part(i), count, device, pinned=pinned)
                for i, count in enumerate(counts)
            ]
            self.whole: Tensors = self.parts[0].whole
            by_layer = {
                layer: tensors
                for group, part in zip(spec.groups, self.parts, strict=True)
                for layer, tensors in zip(group.layers, part.layers, strict=True)
            }
            self.layers = [by_layer[i] for i in spec.sources or range(spec.num_layers)]
            return
        own = spec.groups[0].layers
        self.whole = tuple(
            torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
            for shape, dtype in spec.tensors(len(own) * self.num_blocks)
        )
        for tensor in self.whole:
            if tensor.device.type == "cpu" and not pinned:
                ask_for_huge_pages(tensor)
        split = (tensor.split(self.num_blocks) for tensor in self.whole if own)
        parts = zip(*split, strict=True)
        is_latent = isinstance(spec.kv, LatentSpec)
        found = [_latent_layer(p) if is_latent else kv_layer(p) for p in parts]
        self.layers = [found[own.index(i)] for i in spec.sources or own]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of blocks per layer of each group."""
        return tuple(part.num_blocks for part in self.parts)

    def in_all_layers(self, block_pairs: Tensor, target: KVStorage | None = None) -> Tensor:
        """Return pairs (source, target) of block ids in `whole`, which copy the given blocks in all
        layers.

        Args:
            block_pairs: int64 (n, 2), the pairs of block ids in one layer of the first group.
            target: the storage of the target blocks, with as many layers; None for this one.

        Returns:
            int64 (num_layers * n, 2).
        """
        steps = (self.num_blocks, (target or self).num_blocks)
        layer = torch.arange(len(self.spec.groups[0].layers), device=block_pairs.device)
        firsts = torch.stack([layer * step for step in steps], dim=1)
        return (block_pairs + firsts.unsqueeze(1)).flatten(0, 1)

    def free(self) -> None:
        """Give the memory of all tensors, states included, back; no reference to them may be read
        afterwards."""
        if self.states is not None:
            self.states.free()
        for part in self.parts:
            for tensor in part.whole:
                tensor.untyped_storage().resize_(0)

    @property
    def num_bytes(self) -> int:
        """The bytes of the blocks of all layers together, and of slots and checkpoints of
        states."""
        sizes = map(self.spec.group_block_bytes, range(len(self.parts)))
        blocks = sum(size * count for size, count in zip(sizes, self.counts, strict=True))
        return blocks + (0 if self.states is None else self.states.num_bytes)


def _latent_layer(tensors: Sequence[Tensor]) -> LatentLayer:
    return tensors[0] if len(tensors) == 1 else (tensors[0], tensors[1])
