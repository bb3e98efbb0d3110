"""Ops of a step: checked, planned and remembered by how their arguments lie.

A call like one before runs its plan at once, past its checks and past the dispatcher, where nothing
watches ops and no gradient is wanted: its numbers and the shape of its first tensor lead to the
calls that may be like it, and a check of all tensors in C++ says which is. Plans are those of
`kernels.host.planned`, and the memory is that of all calls, see `ops.call`. What a CPU or the
reference computes is not planned.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels import early
from tilewise.ops import call as memory
from tilewise.ops import values
from tilewise.ops.derivatives import check_of, lean, unseen, unwatched
from tilewise.ops.library import register

__all__ = ["launched", "register_step", "run", "step"]

_PLAIN = (Tensor, torch.nn.Parameter)
_MOST_ALIKE = 8  # calls whose first tensors have one shape, and whose others differ


def _every_time(first: Tensor) -> bool:
    return False


# Whether calls of this first tensor are checked once: where values are looked at, as on a CPU, each
# call is.
_checked_once: Callable[[Any], bool] = operator.attrgetter("is_cuda")
if values.WAITS:
    _checked_once = _every_time


class _Bound:
    """A call that was planned."""

    __slots__ = ("_is_one", "_pick", "_run")

    def __init__(self, run_plan: Callable[..., Any], places: list[int], is_one: bool) -> None:
        self._run, self._is_one = run_plan, is_one
        pick: Any = operator.itemgetter(*places)
        if len(places) == 1:
            pick = operator.itemgetter(slice(places[0], places[0] + 1))
        self._pick = pick

    def run(self, args: tuple[Any, ...]) -> Any:
        """Run the plan with the arguments of another call whose tensors are like the planned
        one's."""
        results = self._run(*self._pick(args))
        return results[0] if self._is_one else results or None


class _Alike(NamedTuple):
    """Calls that were checked: those whose tensors lie like these.

    Attributes:
        check: the check of a call's tensors, see `derivatives.check_of`.
        learns: whether one of them requires a gradient.
    """

    check: Callable[..., bool]
    learns: bool
    bound: _Bound


def _key(name: object, args: tuple[Any, ...]) -> tuple[object, ...] | None:
    """Return all that decides how a call is computed; None where it has no plan of its own."""
    key: list[object] = [name, early.chosen()]
    odd = 0
    try:
        for x in args:
            kind = type(x)
            if kind not in _PLAIN:
                key += (tuple(x) if kind is list else x, kind)
                continue
            address = x.data_ptr()
            if not address or x.is_neg():  # nothing lies there, as of the zeros of forward mode
                return None
            key += (x.shape, x.stride(), x.dtype, x.device)
            odd |= address
        if odd & 15:  # kernels are made for multiples of 16
            key += [type(x) in _PLAIN and x.data_ptr() & 15 != 0 for x in args]
        return tuple(key)
    except RuntimeError:  # a tensor without an address
        return None


def _planned(choose: Callable[..., partial[Any]], args: tuple[Any, ...]) -> Any:
    """Return the result of a call, and its plan if the launcher that `choose` returns has any."""
    seen = set[int]()
    each = list(args)
    for place, x in enumerate(each):
        if isinstance(x, Tensor):
            if id(x) in seen:  # a tensor that is given twice stands for two
                x = each[place] = x.detach()
            seen.add(id(x))
    found = choose(*each)
    plan = getattr(found.func, "plan", None)
    if plan is None:
        return found(), None
    made = plan(*found.args, **found.keywords)
    where = {id(x): place for place, x in enumerate(each)}
    bound = _Bound(made.plan.run, [where[id(x)] for x in made.tensors], made.is_one)
    return bound.run(args), bound


def run(name: object, choose: Callable[..., partial[Any]], *args: Any) -> Any:
    """Run a call whose arguments were checked.

    Args:
        name: the name that the call is remembered by, with its arguments.
        choose: a function of the arguments, which returns the launcher of the call and what it
            takes. Its tensors are arguments, in tuples and dataclasses or alone.
    """
    first = args[0]
    key = _key(name, args) if first.is_cuda or args[-1] is not None else None
    bound: _Bound | None = None
    if key is not None:
        bound = memory.recall(key)
    if bound is not None:
        return bound.run(args)
    result, bound = _planned(choose, args)
    if bound is not None and key is not None:
        memory.remember(key, bound)
    return result


def launched(launcher: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Run a launcher for arguments that were checked, where no registered op stands before it.

    Args:
        launcher: a launcher of a backend, whose plans are remembered if it has any.
    """
    plan = getattr(launcher, "plan", None)
    if plan is None:
        return launcher(*arguments, **options)
    args = _flat((*arguments, *options.values()))
    where = {id(x): place for place, x in enumerate(args) if isinstance(x, Tensor)}
    # Of a tensor that is given twice a plan does not tell one place from the other.
    places = tuple(where[id(x)] for x in args if isinstance(x, Tensor))
    key = _key((launcher, places), args)
    bound: _Bound | None = None if key is None else memory.recall(key)
    if bound is None:
        made = plan(*arguments, **options)
        bound = _Bound(made.plan.run, [where[id(x)] for x in made.tensors], made.is_one)
        if key is not None:
            memory.remember(key, bound)
    return bound.run(args)


def _flat(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with the fields of tuples one by one."""
    found: list[Any] = []
    for argument in arguments:
        found += _flat(argument) if isinstance(argument, tuple) else (argument,)
    return tuple(found)


def register_step(
    schema: str, choose: Callable[..., partial[Any]], fake: Callable[..., Any]
) -> Any:
    """Register an op, see `library.register`, whose calls are run by `run`.

    Args:
        choose: as of `run`; the last argument of the op is its backend.
    """
    return register(schema, partial(run, schema.split("(", 1)[0], choose), fake)


def step(name: str, check: Callable[..., None]) -> Callable[..., Any]:
    """Return the registered op `name` as a function that checks its arguments.

    Args:
        check: a function that raises an error unless the arguments of the op are valid.
    """
    dispatched = lean(name)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            check(*args)
            return dispatched(*args)
        key: list[object] = [name, early.chosen()]
        tensors = list[Tensor]()
        for x in args:
            kind = type(x)
            if kind in _PLAIN:
                tensors.append(x)
                key.append(Tensor)
            else:
                key += (tuple(x) if kind is list else x, kind)
        if not tensors or not _checked_once(tensors[0]):
            check(*args)
            return dispatched(*args)
        key.append(tensors[0].shape)
        alike: list[_Alike] = memory.recall(tuple(key)) or []
        for each in alike:
            if each.check(*tensors):
                odd = 0
                for x in tensors:
                    odd |= x.data_ptr()
                # Kernels are made for multiples of 16.
                if not (odd & 15 or (each.learns and torch.is_grad_enabled())) and unseen():
                    return each.bound.run(args)
                break
        check(*args)
        result = dispatched(*args)
        _remember(tuple(key), alike, tensors, _key(name, args))
        return result

    return call


def _remember(
    key: tuple[object, ...],
    alike: list[_Alike],
    tensors: list[Tensor],
    full: tuple[object, ...] | None,
) -> None:
    """Remember a planned call, so that calls with like tensors are found without a full key.

    Args:
        key: the short key, without the tensors.
        alike: the calls that are remembered under it; the oldest is dropped.
        tensors: the tensors of the call.
        full: the key under which its plan is kept; None if it has none.
    """
    bound = None if full is None or not unwatched() else memory.recall(full)
    if bound is None or any(x.data_ptr() & 15 for x in tensors):
        return
    found = _Alike(check_of(*tensors), any(x.requires_grad for x in tensors), bound)
    memory.remember(key, [*alike[1 - _MOST_ALIKE :], found])
