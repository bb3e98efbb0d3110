"""Large pages for a CPU's cache and packed weights, which span more memory than a TLB covers.

A page of 4 KiB holds one block of a head or two, so that attention over long contexts waits for a
page-table walk at nearly each. Linux gives pages of 2 MiB on request where
/sys/kernel/mm/transparent_hugepage/enabled says "madvise", and to all where it says "always".
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from typing import Any

from torch import Tensor

__all__ = ["ask_for_huge_pages"]

_SMALLEST = 2 << 20  # bytes of a large page on x86; smaller tensors gain nothing


@functools.cache
def _madvise() -> Any:
    """Return the C library's madvise, or None where it or Python's `mmap.MADV_HUGEPAGE` is
    missing."""
    if os.name != "posix" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)


def ask_for_huge_pages(tensor: Tensor) -> bool:
    """Request large pages for a tensor in main memory; return whether the request was made and
    accepted.

    False for tensors under 2 MiB and on platforms without large pages. Memory that was not written
    yet is still allocated on demand, but in steps of a large page.

    Raises:
        OSError: madvise failed for this memory.
    """
    madvise, page = _madvise(), mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page  # pages that contain no other memory
    size = (tensor.data_ptr() + tensor.nbytes) // page * page - start
    if madvise is None or size < _SMALLEST:
        return False
    if madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE) == 0:
        return True
    number = ctypes.get_errno()
    if number == errno.EINVAL:  # a kernel that was built without them
        return False
    raise OSError(number, f"madvise of {size} bytes: {os.strerror(number)}")
