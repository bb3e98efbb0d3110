"""Large pages: asked for where the platform knows them, of whole pages only."""

from __future__ import annotations

import ctypes
import errno
import mmap
import re
from pathlib import Path

import pytest
import torch

from tilewise import huge_pages
from tilewise.cache.spec import CacheSpec, KVSpec
from tilewise.cache.storage import KVStorage
from tilewise.huge_pages import ask_for_huge_pages

SPEC = CacheSpec(
    num_layers=2,
    block_size=16,
    kv=KVSpec(num_kv_heads=4, head_dim=64, v_head_dim=64, dtype=torch.bfloat16),
)
SMAPS = Path("/proc/self/smaps")
KNOWS = hasattr(mmap, "MADV_HUGEPAGE") and Path("/sys/kernel/mm/transparent_hugepage").exists()


def flags_at(address: int) -> list[str]:
    """What the kernel notes of the mapping that holds an address."""
    found = False
    for line in SMAPS.read_text().splitlines():
        edges = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if edges:
            found = int(edges[1], 16) <= address < int(edges[2], 16)
        elif found and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.skipif(not KNOWS or not SMAPS.exists(), reason="needs Linux with large pages")
def test_the_caches_of_a_cpu_ask_for_large_pages() -> None:
    storage = KVStorage(SPEC, num_blocks=600)  # 9.4 MiB of keys, and of values
    if not flags_at(storage.whole[0].data_ptr()):
        pytest.skip("the kernel tells no flags of mappings")
    for tensor in storage.whole:
        assert "hg" in flags_at(tensor.data_ptr() + tensor.nbytes // 2)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="needs Linux")
def test_nothing_is_asked_for_less_than_a_page_or_where_none_are_known(monkeypatch) -> None:
    calls = []

    def madvise(start: ctypes.c_void_p, size: ctypes.c_size_t, advice: int) -> int:
        calls.append((start.value, size.value, advice))
        return 0

    monkeypatch.setattr(huge_pages, "_madvise", lambda: madvise)
    assert not ask_for_huge_pages(torch.empty(100))
    assert not calls
    memory = torch.empty((5 << 20) + 100, dtype=torch.uint8)[33:]
    assert ask_for_huge_pages(memory)
    ((start, size, advice),) = calls
    assert start % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
    assert memory.data_ptr() <= start
    assert start + size <= memory.data_ptr() + memory.nbytes
    assert size >= memory.nbytes - 2 * mmap.PAGESIZE
    assert advice == mmap.MADV_HUGEPAGE
    monkeypatch.setattr(huge_pages, "_madvise", lambda: None)
    assert not ask_for_huge_pages(memory)
    assert len(KVStorage(SPEC, num_blocks=600).layers) == 2


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="needs Linux")
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM])
def test_only_a_kernel_without_large_pages_is_no_error(number: int, monkeypatch) -> None:
    def fail(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(huge_pages, "_madvise", lambda: fail)
    memory = torch.empty(5 << 20, dtype=torch.uint8)
    if number == errno.EINVAL:
        assert not ask_for_huge_pages(memory)
    else:
        with pytest.raises(OSError, match="madvise of"):
            ask_for_huge_pages(memory)
