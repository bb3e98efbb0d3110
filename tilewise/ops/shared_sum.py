"""Sums of the rows of all ranks' GPUs, with the norm that follows; `kernels/triton` has the
kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.kernels import device
from tilewise.ops.step import launched

__all__ = ["add_up", "add_up_flagged", "flagged_words", "why_not"]


def why_not(row_words: int) -> str | None:
    """Return why no kernel can add rows over the ranks, or None if one can.

    Args:
        row_words: the 8-byte words of one row, of 4 bytes of numbers each, times the ranks.
    """
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

    Every rank calls this with rows of the same shape, and gets the same sum.

    Args:
        x: this rank's rows (rows, E).
        residual: the rows to add once, (rows, E); None for nothing.
        weight: (E,), the weight of the norm; None for a plain sum, for which y is not written.
        eps: the number that is added to the mean square.
        y, total: the results, (rows, E), written. Where ranks share the rows among them
            (`is_dealt`) and there is a norm, `total` is written only for this rank's rows.
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
    """Write the same results as `add_up` by the kernel for more rows, which sends rows and flags.

    Args:
        x, residual, weight, eps, y, total: as of `add_up`.
        options: the further arguments of `kernels.triton.step.flagged_sum.launch`.
    """
    from tilewise.kernels.triton.step import flagged_sum

    is_strong = x.device.type == "cuda"
    given = (x, residual, weight, eps, y, total)
    launched(flagged_sum.launch, *given, is_strong=is_strong, **options)


def flagged_words(dim: int, itemsize: int, most_rows: int) -> int:
    """Return the number of 8-byte words of a buffer for `add_up_flagged`: rows, then their flags.

    Args:
        dim: the channels of a row.
        itemsize: the bytes of a channel.
        most_rows: the largest number of rows of a call.
    """
    return most_rows * dim * itemsize // 2 + most_rows
