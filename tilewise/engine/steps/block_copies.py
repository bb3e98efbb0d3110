"""Copy-on-write of blocks in every layer of a group, whatever the group keeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tilewise.cache.spec import LatentSpec
from tilewise.cache.storage import KVStorage
from tilewise.ops import copy_blocks

__all__ = ["copy_in_all_layers"]


def copy_in_all_layers(storage: KVStorage, block_pairs: Tensor | Sequence[tuple[int, int]]) -> None:
    """Copy blocks, source and destination, in all layers of one group.

    Args:
        storage: the storage of the group, one of `KVStorage.parts`.
        block_pairs: (C, 2) int64 on the storage's device; or pairs on the host, which are repeated
            for all layers there and sent in one copy. No block is a source and a destination.
    """
    if isinstance(block_pairs, Tensor):
        pairs = storage.in_all_layers(block_pairs)
    else:
        pairs = _sent_for_all_layers(storage, block_pairs)
    if isinstance(storage.spec.kv, LatentSpec):
        source, target = pairs.unbind(1)
        for tensor in storage.whole:
            rows = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
            rows.index_copy_(0, target, rows.index_select(0, source))
        return
    k_cache, v_cache, *scales = storage.whole
    k_scale, v_scale = scales or (None, None)
    copy_blocks(k_cache, v_cache, pairs, k_scale=k_scale, v_scale=v_scale)


def _sent_for_all_layers(storage: KVStorage, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """Return pairs of block ids, repeated for each layer of a group, on the storage's device.

    The result (layers * C, 2) is int64; a layer's ids are raised by layer * num_blocks, as
    `KVStorage.in_all_layers` does it on the device.
    """
    layer = np.arange(len(storage.spec.groups[0].layers), dtype=np.int64)
    firsts = (layer * storage.num_blocks)[:, None, None]
    found = torch.from_numpy((np.array(pairs, np.int64) + firsts).reshape(-1, 2))
    device = storage.device
    if device.type == "cuda":
        found = found.pin_memory().to(device, non_blocking=True)
    return found
