"""Main memory and files behind a cache: sizes from GiB, and what files must agree in."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import nn

from tilewise.cache.spec import CacheSpec
from tilewise.cache.storage import KVStorage
from tilewise.engine.tables.block_files import BlockFiles, GroupFiles
from tilewise.engine.tables.host_cache import HostCache, HostGroup, HostMemory
from tilewise.nn.quantised import QuantisedLinear
from tilewise.version import __version__

__all__ = ["block_files", "fingerprint", "host_cache"]

GIB = 2**30


def host_cache(storage: KVStorage, swap_space_gib: float) -> HostCache | None:
    """Return main memory for as many blocks as fit in `swap_space_gib`; None for 0 GiB.

    Groups of layers share it as they share the cache on the device.

    Raises:
        ValueError: not even one block fits, or main memory has no room for them.
    """
    if not swap_space_gib:
        return None
    if storage.states is not None:
        return _beside_states(storage, swap_space_gib)
    num_blocks = int(swap_space_gib * GIB) // storage.spec.bytes_per_block
    if num_blocks < 1:
        raise ValueError(
            f"swap_space_gib must hold at least one cache block of "
            f"{storage.spec.bytes_per_block:,} bytes, got {swap_space_gib}"
        )
    if len(storage.parts) == 1:
        return HostCache(storage, num_blocks)
    part = swap_space_gib * GIB / storage.num_bytes
    return HostCache(storage, tuple(max(1, int(part * count)) for count in storage.counts))


def _beside_states(storage: KVStorage, swap_space_gib: float) -> HostCache:
    """Return main memory for blocks and checkpoints, divided as the device divides its memory.

    There is at least one block of each group and one checkpoint.
    """
    assert storage.states is not None
    checkpoints = storage.states.checkpoints
    whole = checkpoints.nbytes + sum(
        storage.spec.group_block_bytes(i) * count for i, count in enumerate(storage.counts)
    )
    part = swap_space_gib * GIB / max(whole, 1)
    counts = tuple(max(1, int(part * count)) for count in storage.counts)
    return HostCache(storage, counts, max(1, int(part * len(checkpoints))))


def block_files(
    offload_dir: str | Path | None, host: HostMemory | None, model: bytes, offload_gib: float
) -> BlockFiles | GroupFiles | None:
    """Return the block files in offload_dir; None without a directory or a cache in main memory.

    Several groups of layers, or one with a window, have a directory each; offload_gib is divided
    among them as the bytes of a block are.
    """
    if offload_dir is None or host is None:
        return None
    directory, most = Path(offload_dir), int(offload_gib * GIB)
    windows = host.storage.spec.windows
    if len(host.group_shares) == 1 and windows == (None,):
        return BlockFiles(directory, host, model, most)
    return GroupFiles(
        BlockFiles(
            directory / f"group-{number}",
            HostGroup(host, number),
            model + f" group {number} of {windows}".encode(),
            max(1, int(share * most)),
        )
        for number, share in enumerate(host.group_shares)
    )


def fingerprint(model: nn.Module, spec: CacheSpec, weight_dtype: str) -> bytes:
    """Return a hash of 32 bytes of all that keys and values depend on, but the tokens.

    Every weight is read; call it before the weights are packed.
    """
    digest = hashlib.blake2b(digest_size=32)
    config = getattr(model, "config", None)
    digest.update(f"{__version__} {spec} {weight_dtype} {config}\n".encode())
    tensors = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            for i, part in enumerate(module.parts):
                digest.update(f"{name} {part.block} {part.outer_block} {part.table}\n".encode())
                tensors |= {f"{name}.{i}.{kind}": t for kind, t in part.tensors().items()}
    for name, weight in sorted(tensors.items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        data = weight.detach().contiguous().cpu().reshape(-1)
        if data.numel():
            digest.update(memoryview(data.view(torch.uint8).numpy().data))
    return digest.digest()
