"""Launchers as plans: what a launcher does for a call follows from its numbers and its layouts.

A launcher is written as a function of a `Maker` and of tensors without memory. It is run once for
calls alike; their tensors are given to the plan that it has written down.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from tilewise.kernels.host.plan import Maker
from tilewise.kernels.plan import Call, LaunchPlan, device_of

__all__ = ["Planned", "PlannedCall", "planned", "rows_of"]

Function = Callable[..., Tensor | tuple[Tensor, ...] | None]


class PlannedCall(NamedTuple):
    """The plan of one call of a launcher, with the call's tensors; it also serves like calls.

    Attributes:
        plan: the plan, which takes tensors in the order of `tensors`.
        is_one: True if the launcher returns a tensor, False if it returns a tuple or nothing.
        tensors: the different tensors of the call, each once.
    """

    plan: LaunchPlan
    is_one: bool
    tensors: list[Tensor]

    def run(self, tensors: Any) -> Any:
        """Run the plan for `tensors`, and return the launcher's result: a tensor, a tuple or None.

        Args:
            tensors: the tensors of a call, in the order of the field `tensors`.
        """
        results = self.plan.run(*tensors)
        return results[0] if self.is_one else results or None


class Planned:
    """A launcher that is written as a planner: a call plans it and runs the plan.

    Callers that repeat calls keep the result of `plan`; calling the launcher itself plans anew.

    Args:
        function: the launcher; it is given a maker, then the arguments of a call with their tensors
            on "meta", and returns tensors of the maker: one, a tuple of them, or None.

    Attributes:
        write: the function itself, for launchers that write it into their own plan.
    """

    def __init__(self, function: Function) -> None:
        self.write: Any = function
        functools.update_wrapper(self, function)

    def plan(self, *arguments: Any, **options: Any) -> PlannedCall:
        """Return the plan of a call; nothing runs.

        Args:
            arguments, options: the arguments of the launcher. Tensors may stand in tuples, lists,
                dicts and dataclasses, all on one device.
        """
        tensors = list({id(x): x for x in _tensors((arguments, options))}.values())
        call = Call.of(None, tensors)
        with device_of(call.device):
            maker = Maker(call, ())
            places = {id(x): y for x, y in zip(tensors, maker.inputs, strict=True)}
            given, more = _placed((arguments, options), places)
            results = self.write(maker, *given, **more)
        is_one = isinstance(results, Tensor)
        found = (results,) if isinstance(results, Tensor) else results or ()
        return PlannedCall(maker.finish(found), is_one, tensors)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Plan a call, run the plan, and return the launcher's result."""
        made = self.plan(*arguments, **options)
        return made.run(made.tensors)


def planned(function: Function) -> Planned:
    """Decorate a function of a maker and of a call's arguments as a launcher, see `Planned`."""
    return Planned(function)


def rows_of(maker: Maker, x: Tensor) -> Tensor:
    """Return x (..., E) as (rows, E): a view, or a copy where no single stride reaches all rows.

    Both are tensors of the plan that `maker` writes; the copy is a step of it.
    """
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:  # its strides need more than one step
        return maker.copy(x).view(-1, x.shape[-1])


def _tensors(argument: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument in order, also from inside of containers and dataclasses."""
    if isinstance(argument, Tensor):
        yield argument
    for part in _parts(argument).values():
        yield from _tensors(part)


def _parts(argument: Any) -> dict[Any, Any]:
    """Return the parts of a container or dataclass by index, key or attribute; {} for other
    types."""
    if isinstance(argument, dict):
        return argument
    if isinstance(argument, tuple | list):
        return dict(enumerate(argument))
    if dataclasses.is_dataclass(argument) and not isinstance(argument, type):
        return {field.name: getattr(argument, field.name) for field in dataclasses.fields(argument)}
    return {}


def _placed(argument: Any, places: dict[int, Any]) -> Any:
    """Return an argument with each tensor replaced, also inside of containers and dataclasses.

    Args:
        places: the replacement of each tensor, by the tensor's id.
    """
    if isinstance(argument, Tensor):
        return places[id(argument)]
    if not any(True for _ in _tensors(argument)):
        return argument
    parts = {name: _placed(part, places) for name, part in _parts(argument).items()}
    if isinstance(argument, dict):
        return parts
    if isinstance(argument, tuple) and hasattr(argument, "_fields"):
        return type(argument)(*parts.values())
    if isinstance(argument, tuple | list):
        return type(argument)(parts.values())
    found = copy.copy(argument)
    for name, part in parts.items():
        object.__setattr__(found, name, part)
    return found
