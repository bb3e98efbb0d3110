"""Copies of blocks in all layers of a group, from pairs on the host and on the device."""

from __future__ import annotations

import pytest
import torch

from tilewise.cache.spec import CacheSpec, KVSpec, LatentSpec
from tilewise.cache.storage import KVStorage
from tilewise.engine.steps.block_copies import copy_in_all_layers

PAIRS = ((1, 4), (1, 2), (5, 0))


@pytest.mark.parametrize(
    "kept",
    [
        KVSpec(2, 8, 8, torch.float32),
        KVSpec(2, 8, 8, torch.int8),
        LatentSpec(16, 8, torch.float32),
    ],
    ids=["float32", "int8", "latents"],
)
def test_pairs_of_the_host_and_of_the_device_move_the_same(kept):
    torch.manual_seed(0)
    made = []
    for _ in range(2):
        storage = KVStorage(CacheSpec(3, 4, kept), 6, torch.device("cpu"))
        for i, whole in enumerate(storage.whole):
            drawn = torch.randint(
                -100, 100, whole.shape, generator=torch.Generator().manual_seed(i)
            )
            whole.copy_(drawn)
        made.append(storage)
    host, device = made
    before = [whole.clone().unflatten(0, (3, 6)) for whole in host.whole]
    copy_in_all_layers(host, PAIRS)
    copy_in_all_layers(device, torch.tensor(PAIRS))
    for ours, theirs, old in zip(host.whole, device.whole, before, strict=True):
        assert torch.equal(ours, theirs)
        wanted = old.clone()
        for source, target in PAIRS:
            wanted[:, target] = old[:, source]
        assert torch.equal(ours.unflatten(0, (3, 6)), wanted)
