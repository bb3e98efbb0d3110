"""Keeping torch.compile out of the functions that make masks: they are numpy, run once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(fn: Callable[P, R]) -> Callable[P, R]:
    """Run `fn` as it is where compiled code calls it: a graph break, refused under fullgraph.

    torch.compile would trace the numpy inside. `torch.compiler.disable` is not asked for before a
    compiler runs, for it imports all of that compiler.
    """

    @wraps(fn)
    def build(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            # On one line, which is what the compiler shows under fullgraph.
            run: Callable[P, R] = torch.compiler.disable(fn, reason="build masks outside of graphs")
            return run(*args, **kwargs)
        return fn(*args, **kwargs)

    return build
