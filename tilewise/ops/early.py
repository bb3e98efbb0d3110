"""launching_early(), settle(): kernels that begin before the one before them has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tilewise.kernels import device, early


@contextmanager
def launching_early(where: torch.device, *, largest_weight: int = 0) -> Iterator[None]:
    """Let this thread's kernels begin early on a Hopper GPU; elsewhere nothing changes.

    What they compute has the same bits. See `kernels.early` for what the caller promises: nothing
    in here writes weights, and what a step's kernels share (plan, table, lengths, slots) is written
    before a kernel of torch's that comes before all layers.

    Args:
        largest_weight: elements of the largest weight of a layer, which decides when each kernel
            lets the next one begin.

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
    """Launch a small kernel that does not begin early; later ones may then read earlier results.

    A kernel that begins early may read what was written two kernels before, if the later of the two
    is not launched early. Does nothing where kernels do not begin early.
    """
    if early.mode("attention") != early.OFF:
        torch.empty(1, dtype=torch.int32, device=where).fill_(0)
