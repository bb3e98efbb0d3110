"""What memory is free, and whether a model fits it: asked before any of it is taken."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from tilewise.cache.spec import CacheSpec
from tilewise.nn.packed import why_not_narrow
from tilewise.nn.quantised import QuantisedLinear

__all__ = ["available_memory", "check_memory", "free_memory"]

GIB = 2**30
_CGROUPS = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Return the bytes of main memory that this process may still use, without swapping.

    The number is the smallest of the kernel's MemAvailable and of the room that the limits of the
    process's control group and of the groups above it leave, where these exist; else the free
    physical pages. Files that the kernel keeps in memory because there is room do not count as
    used.
    """
    candidates = [_meminfo_available(Path("/proc/meminfo")), *_left_in_groups()]
    known = [c for c in candidates if c is not None]
    if known:
        return min(known)
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def free_memory(device: torch.device, gpu_memory_utilization: float | None = None) -> int:
    """Return the bytes that this process may still take on a device, 0 or more.

    Args:
        device: a GPU, of which what torch holds unused counts as free; or the CPU.
        gpu_memory_utilization: share of a GPU's memory that all programs together may use; None is
            all that its driver has.
    """
    if device.type != "cuda":
        return available_memory()
    free, total = torch.cuda.mem_get_info(device)
    # What torch holds and has not given out is free for this process.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if gpu_memory_utilization is not None:
        free -= int(total * (1 - gpu_memory_utilization))
    return max(free, 0)


def check_memory(
    model: nn.Module,
    spec: CacheSpec | None,
    device: torch.device,
    free: int,
    *,
    num_blocks: int | None = None,
    swap_bytes: int = 0,
    num_processes: int = 1,
) -> None:
    """Refuse a model whose weights and cache the device has no room for.

    Args:
        model: the model, whose parameters may be on "meta".
        spec: the spec of the model's cache; None for an encoder, which has none.
        free: bytes, see `free_memory`.
        num_blocks: the number of the cache's blocks; None gives it the memory that is left, at
            least one block.
        swap_bytes: main memory behind the cache.
        num_processes: the number of processes that share this memory, each with such a model and
            cache.

    Raises:
        ValueError: there is less; the message has the sizes.
    """
    tensors = [*model.parameters(), *model.buffers()]
    narrow = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    codes = sum(
        m.out_features * m.in_features * m.dtype.itemsize
        if device.type == "cpu" and why_not_narrow(m.parts, is_gated=False)
        else m.nbytes
        for m in narrow
    )
    parts = {"weights": sum(tensor.nbytes for tensor in tensors) + codes}
    if device.type == "cpu":
        # Weights are packed one by one, the larger ones by way of a copy in another order.
        parts["packing them"] = 2 * max((t.nbytes for t in tensors if t.dim() == 2), default=0)
    _refuse("the model", "", parts, str(device), free, num_processes)
    if spec is None:
        return
    blocks = 1 if num_blocks is None else num_blocks
    parts["cache"] = blocks * spec.bytes_per_block
    if num_blocks is None:
        _refuse("the model", "", parts, str(device), free, num_processes)
    else:
        each = f" at {spec.bytes_per_block:,} bytes each"
        _refuse("num_blocks", each, parts, str(device), free, num_processes, f"{num_blocks:,}: ")
    if swap_bytes and device.type == "cpu":
        parts["swap space"] = swap_bytes
        _refuse("swap_space_gib", "", parts, str(device), free, num_processes)
    elif swap_bytes:
        parts, free = {"swap space": swap_bytes}, available_memory()
        _refuse("swap_space_gib", "", parts, "the host", free, num_processes)


def _refuse(
    name: str,
    each: str,
    parts: dict[str, int],
    where: str,
    free: int,
    num_processes: int,
    got: str = "",
) -> None:
    needed = num_processes * sum(parts.values())
    if needed <= free:
        return
    sizes = ", ".join(f"{size / GIB:.2f} GiB of {what}" for what, size in parts.items() if size)
    times = f"{num_processes} times " if num_processes > 1 else ""
    raise ValueError(
        f"{name} must fit the memory of {where}{each}, got {got}{needed / GIB:.2f} GiB "
        f"({times}{sizes}) where {free / GIB:.2f} GiB are free"
    )


def _left_in_groups() -> Iterator[int | None]:
    """Yield the bytes that each memory limit of this process's control groups leaves.

    The groups above its own count, too; a group without a limit yields nothing. Files in the page
    cache do not count as used.
    """
    own = {"": "/", "memory": "/"}
    for line in _lines(Path("/proc/self/cgroup")):
        _, kinds, path = line.split(":", 2)
        for kind in kinds.split(","):
            if kind in own:
                own[kind] = path
    versions = (
        ("", _CGROUPS, "memory.max", "memory.current", ""),
        (
            "memory",
            _CGROUPS / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_",
        ),
    )
    for kind, root, limit, used, prefix in versions:
        place = root / own[kind].lstrip("/")
        for folder in (place, *place.parents):
            if not folder.is_relative_to(root):
                break
            allowed, taken = _read_int(folder / limit), _read_int(folder / used)
            if allowed is not None and taken is not None:
                files = (f"{prefix}inactive_file", f"{prefix}active_file")
                kept = sum(_fields(folder / "memory.stat", files))
                yield max(allowed - max(taken - kept, 0), 0)


def _fields(path: Path, names: tuple[str, ...]) -> Iterator[int]:
    for line in _lines(path):
        name, _, value = line.partition(" ")
        if name in names:
            yield int(value)


def _meminfo_available(path: Path) -> int | None:
    """Return MemAvailable in bytes; None without such a file or line."""
    for line in _lines(path):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024  # the file says kB and means KiB
    return None


def _read_int(path: Path) -> int | None:
    """Return the number in a file; None without the file, or when it says "max"."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return []
