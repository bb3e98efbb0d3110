"""launching_early(), settle(): kernels that begin before the one before them has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tilewise.kernels import device, early


@contextmanager
def launching_early(where: torch.device, *, largest_weight: int = 0) -> Iterator[None]:
    """Launch this thread's kernels inside the context early on a Hopper GPU (capability 9.0).

    A kernel then begins while the one before it still runs (programmatic dependent launch); results
    have the same bits. On other devices nothing changes. The caller promises, see `kernels.early`,
    that nothing in the context writes weights, and that what a step's kernels share (plan, table,
    lengths, slots) is written before a kernel of torch's that comes before all layers.

    Args:
        where: the device of the kernels.
        largest_weight: elements of the largest weight of a layer, which decides when each kernel
            lets the next one begin: by `early.CHOSEN_LARGE` from `early.LARGE` elements on, by
            `early.CHOSEN` below, and so by default.

    Example:
        >>> with launching_early(x.device):  # of a decode step that is being captured
        ...     y = model(x)
    """
    if where.type == "cuda" and device.arch_of(where) == 90:
        is_large = largest_weight >= early.LARGE
        with early.launching(early.CHOSEN_LARGE if is_large else None):
            yield
    else:
        yield


def settle(where: torch.device) -> None:
    """Launch a small kernel on `where` that does not begin early, as a barrier between kernels.

    It waits for all kernels before it. So a kernel that is launched early right after it may read
    their results before it waits itself. Inside no `launching_early` context nothing is launched.
    """
    if early.mode("attention") != early.OFF:
        torch.empty(1, dtype=torch.int32, device=where).fill_(0)
