"""Start a Gluon kernel: the one place where the host meets Triton's launcher."""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: int, *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """Run `kernel` on `grid` CTAs, on the current stream of the current device.

    Args:
        num_warps: of the default partition; the workers' warps come on top.
        constants: its constexpr parameters, by name.
    """
    kernel[(grid,)](*arguments, num_warps=num_warps, **constants)
