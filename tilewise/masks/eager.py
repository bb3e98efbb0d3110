"""Keep torch.compile out of the functions that make masks, which run numpy once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(fn: Callable[P, R]) -> Callable[P, R]:
    """Wrap `fn` so that compiled code calls it eagerly: a graph break, refused under fullgraph.

    torch.compile would trace the numpy inside. `torch.compiler.disable` is applied only when a
    compiler runs, because it imports the whole compiler.
    """

    @wraps(fn)
    def build(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            # On one line, since the compiler shows this line under fullgraph.
            run: Callable[P, R] = torch.compiler.disable(fn, reason="build masks outside of graphs")
            return run(*args, **kwargs)
        return fn(*args, **kwargs)

    return build
