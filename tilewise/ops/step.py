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
    """A planned call, remembered by `run`, `launched` and `step`.

    Args:
        run_plan: the plan's `run`, a function of its tensors.
        places: the places of these tensors among the arguments of the call, tuples unpacked.
        is_one: True if the call returns one tensor, False for a tuple or nothing.
    """

    __slots__ = ("_is_one", "_pick", "_run")

    def __init__(self, run_plan: Callable[..., Any], places: list[int], is_one: bool) -> None:
        self._run, self._is_one = run_plan, is_one
        pick: Any = operator.itemgetter(*places)
        if len(places) == 1:
            pick = operator.itemgetter(slice(places[0], places[0] + 1))
        self._pick = pick

    def run(self, args: tuple[Any, ...]) -> Any:
        """Run the plan for the arguments of a call like the planned one, and return its results.

        The result is a tensor, a tuple of tensors, or None.
        """
        results = self._run(*self._pick(args))
        return results[0] if self._is_one else results or None


class _Alike(NamedTuple):
    """The memory of a checked and planned call, by which `step` finds calls with like tensors.

    Attributes:
        check: a function that says whether a call's tensors lie like those of the remembered one,
            see `derivatives.check_of`.
        learns: whether one of the tensors requires a gradient.
        bound: the planned call.
    """

    check: Callable[..., bool]
    learns: bool
    bound: _Bound


def _key(name: object, args: tuple[Any, ...]) -> tuple[object, ...] | None:
    """Return the key of a call's plan: all that decides how the call is computed, but addresses.

    It holds `name`, which kernels begin early, the arguments that are no tensors with their types,
    and each tensor's shape, strides, dtype, device and alignment to 16 bytes.

    Returns:
        The key; None for a call that is never remembered, because a tensor has no memory or is
        marked as negated.
    """
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
    """Run a call for the first time.

    Args:
        choose: as of `run`.
        args: the checked arguments of the call.

    Returns:
        The result of the call, and its plan for later calls; None for a launcher without plans,
        such as those of the CPU and the reference.
    """
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
    """Run a call of an op whose arguments were checked, by its remembered plan if there is one.

    On a CPU with no backend named, no plan is looked for.

    Args:
        name: the name that the call is remembered by, with its arguments.
        choose: a function of the arguments that chooses a backend and returns its launcher with the
            launcher's arguments bound. The tensors among these are tensors of `args`, alone or in
            tuples and dataclasses.
        args: the arguments of the op, a tensor first and the backend last.

    Returns:
        The result of the launcher.
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
    """Call a backend's launcher for checked arguments, without a registered op before it.

    A launcher that plans its calls is planned once for calls alike, and the plan is remembered.

    Args:
        launcher: a launcher of a backend.
        arguments, options: the arguments of the launcher; tensors may stand in tuples.

    Returns:
        The result of the launcher.
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
    """Return the arguments as one flat tuple, with the fields of nested tuples one by one."""
    found: list[Any] = []
    for argument in arguments:
        found += _flat(argument) if isinstance(argument, tuple) else (argument,)
    return tuple(found)


def register_step(
    schema: str, choose: Callable[..., partial[Any]], fake: Callable[..., Any]
) -> Any:
    """Register an op whose calls are run by `run`, and return the callable torch op.

    Args:
        schema: as of `library.register`; the last argument of the op is its backend.
        choose: as of `run`.
        fake: as of `library.register`.
    """
    return register(schema, partial(run, schema.split("(", 1)[0], choose), fake)


def step(name: str, check: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that checks its arguments and runs the registered op `name` for them.

    On a GPU a call whose tensors lie like those of an earlier one, with equal numbers, runs the
    plan of that one without a check, unless a mode of torch watches or a gradient is wanted.

    Args:
        name: the name of the op, which `register_step` has registered.
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

    Nothing is remembered if the call has no plan, if an address is no multiple of 16 bytes, or if
    a mode of torch watches.

    Args:
        key: the short key, with only the shape of the first tensor.
        alike: the calls that are remembered under the short key; of eight the oldest is dropped.
        tensors: the tensors of the call.
        full: the key under which the call's plan is kept, from `_key`; None if it has none.
    """
    bound = None if full is None or not unwatched() else memory.recall(full)
    if bound is None or any(x.data_ptr() & 15 for x in tensors):
        return
    found = _Alike(check_of(*tensors), any(x.requires_grad for x in tensors), bound)
    memory.remember(key, [*alike[1 - _MOST_ALIKE :], found])
