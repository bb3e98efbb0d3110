"""Large pages for a cache on the CPU, whose blocks lie scattered in more memory than a TLB spans.

Pages of 4 KiB hold one block of a head or two, so that attention over long contexts waits for a
walk of the page table at nearly each. Linux gives pages of 2 MiB on request where
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

_SMALLEST = 2 << 20  # bytes of a large page on x86; less than one is not worth asking for


@functools.cache
def _madvise() -> Any:
    """The C library's madvise, or None on a platform without it or without large pages."""
    if os.name != "posix" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)


def ask_for_huge_pages(tensor: Tensor) -> bool:
    """Ask for large pages under a tensor in main memory; return whether the platform knows them.

    What is not written yet takes no memory, as before, but comes in steps of a large page.

    Raises:
        OSError: the memory cannot be advised on.
    """
    madvise, page = _madvise(), mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page  # pages that are the tensor's alone
    size = (tensor.data_ptr() + tensor.nbytes) // page * page - start
    if madvise is None or size < _SMALLEST:
        return False
    if madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE) == 0:
        return True
    number = ctypes.get_errno()
    if number == errno.EINVAL:  # a kernel that was built without them
        return False
    raise OSError(number, f"madvise of {size} bytes: {os.strerror(number)}")
