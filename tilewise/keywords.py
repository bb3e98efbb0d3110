"""keywords_of(): a function that hands its keywords on shows them as if it declared them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def keywords_of(source: Callable[..., Any], *, but: tuple[str, ...] = ()) -> Callable[[_F], _F]:
    """Show the keywords of `source` where a function takes `**options`.

    What they are called, their types and defaults are then declared by `source` alone, and
    `inspect.signature`, `help` and notebooks tell them of every function that hands them on. Those
    that the function declares itself stay its own. The function is returned as it is: a call of it
    costs what it did.

    Args:
        source: a function with keyword-only parameters; an error about a keyword that it does not
            know names it.
        but: those that are no option of the functions that call it.

    Raises:
        ValueError: the function takes no `**options`.

    Example:
        >>> @keywords_of(prepare)
        ... def ring(q, *, return_lse=False, **options): ...
        >>> inspect.signature(ring)
        (q, *, return_lse=False, causal=False, window=None)
    """
    shown = [
        parameter
        for parameter in inspect.signature(source).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in but
    ]

    def show(function: _F) -> _F:
        own = inspect.signature(function)
        parameters = list(own.parameters.values())
        if not parameters or parameters[-1].kind is not inspect.Parameter.VAR_KEYWORD:
            raise ValueError(f"function must take **options, got {own}")
        handed_on = [parameter for parameter in shown if parameter.name not in own.parameters]
        signature = own.replace(parameters=[*parameters[:-1], *handed_on])
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return show
