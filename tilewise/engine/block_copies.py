"""Copy-on-write of blocks in every layer of a group, whatever the group keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.cache.spec import LatentSpec
from tilewise.cache.storage import KVStorage
from tilewise.ops import copy_blocks

__all__ = ["copy_in_all_layers"]


def copy_in_all_layers(storage: KVStorage, block_pairs: Tensor) -> None:
    """Copy blocks (C, 2) int64, source and destination, in all layers of one group.

    Args:
        storage: of the group, one of `KVStorage.parts`.
        block_pairs: on the storage's device; no block is a source and a destination.
    """
    pairs = storage.in_all_layers(block_pairs)
    if isinstance(storage.spec.kv, LatentSpec):
        source, target = pairs.unbind(1)
        for tensor in storage.whole:
            rows = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
            rows.index_copy_(0, target, rows.index_select(0, source))
        return
    k_cache, v_cache, *scales = storage.whole
    k_scale, v_scale = scales or (None, None)
    copy_blocks(k_cache, v_cache, pairs, k_scale=k_scale, v_scale=v_scale)
