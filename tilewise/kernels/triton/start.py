"""How a launcher starts its kernels: by Triton, unless its caller knows a faster way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Start", "by_triton"]

Start = Callable[..., object]  # (kernel, grid of one axis or of two, *arguments, **constants)


def by_triton(
    kernel: Any, grid: int | tuple[int, int], *arguments: Any, **constants: Any
) -> object:
    """Launch a kernel by Triton's own launcher."""
    return kernel[grid if isinstance(grid, tuple) else (grid,)](*arguments, **constants)
