"""Sums of the rows of all ranks' GPUs, with the norm that follows; `kernels/triton` has the
kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.kernels import device
from tilewise.ops.step import launched

__all__ = ["add_up", "add_up_flagged", "flagged_words", "why_not"]


def why_not(row_words: int) -> str | None:
    """Return why no kernel can add rows of `row_words` words over ranks, or None if one can."""
    if not device.has_triton():
        return "triton is not installed"
    from tilewise.kernels.triton.step import shared_sum

    if row_words <= shared_sum.MOST_WORDS:
        return None
    return f"a row of all ranks has {row_words} words of at most {shared_sum.MOST_WORDS}"


def add_up(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    y: Tensor,
    total: Tensor,
    **options: Any,
) -> None:
    """Write the sum of all ranks' x plus the residual to `total`, and its RMS norm to y, (rows, E).

    Args:
        x: this rank's rows.
        residual, weight: None for a plain sum.
        options: the further arguments of `kernels.triton.step.shared_sum.launch`.
    """
    from tilewise.kernels.triton.step import shared_sum

    # On a CPU Triton's interpreter stores words without the required order.
    is_strong = x.device.type == "cuda"
    given = (x, residual, weight, eps, y, total)
    launched(shared_sum.launch, *given, is_strong=is_strong, **options)


def add_up_flagged(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    y: Tensor,
    total: Tensor,
    **options: Any,
) -> None:
    """Compute `add_up` by the kernel for more rows.

    The options are those of `kernels.triton.step.flagged_sum.launch`.
    """
    from tilewise.kernels.triton.step import flagged_sum

    is_strong = x.device.type == "cuda"
    given = (x, residual, weight, eps, y, total)
    launched(flagged_sum.launch, *given, is_strong=is_strong, **options)


def flagged_words(dim: int, itemsize: int, most_rows: int) -> int:
    """Return the 8-byte words of memory for rows of all ranks with flags."""
    return most_rows * dim * itemsize // 2 + most_rows
