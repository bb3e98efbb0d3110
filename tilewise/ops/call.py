"""One way of a call: its arguments are bound and planned once, and its plan runs many times.

    Signature    the arguments of an op's public function, each declared once
    bind()       checks them; returns Options: the arguments of the registered op
    planned()    Options to Bound: the plan of a backend for their Spec and for how tensors lie
    run()        runs the plan for a caller's tensors

Checks, backend and plan of a call follow from its numbers and from how its tensors lie. So where
nothing watches ops, a call like one before is found by these alone, past its checks and past
torch's dispatcher. Where a mode, a transform or a trace watches, or a gradient is wanted, the
registered op is given the options.

There is one memory of calls. It holds plans by what a caller gave, and by what a backend was given,
and the latest call that came again without more tensors than three, which one check of these finds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tilewise.kernels.plan import Again, Call, LaunchPlan, Plan, Results, device_of
from tilewise.ops import dispatch, values
from tilewise.ops.derivatives import (
    are_plain,
    autocasts,
    check_of,
    never,
    records,
    unseen,
    unwatched,
)

__all__ = [
    "Adapter",
    "Bound",
    "Last",
    "Options",
    "Record",
    "Signature",
    "Tensors",
    "forget",
    "key_of",
    "plan_of",
    "recall",
    "remember",
    "repeat",
    "run",
]

Key = tuple[object, ...]
Tensors = Sequence[Tensor | None]
Adapter = Callable[[Tensors], Tensors]

_MAX_CALLS = 4096
_MAX_MISSES = 8  # of a call whose check was made in vain before: a check costs what it saves a call
_is_deterministic = torch.are_deterministic_algorithms_enabled


@dataclass(slots=True)
class Bound:
    """A call whose arguments were checked.

    Attributes:
        backend: the name of the backend that runs it.
        plan: the plan of that backend.
        adapter: a function from the tensors of a caller to those of the plan; None where the plan
            takes them as they are.
        num_checks: the number of times that the call became the latest one.
    """

    backend: str
    plan: Plan
    adapter: Adapter | None = None
    num_checks: int = 0

    def adapted(self, tensors: Tensors) -> Tensors:
        """Return the tensors of the plan."""
        return tensors if self.adapter is None else self.adapter(tensors)

    def run(self, tensors: Tensors) -> Results:
        """Run the plan."""
        return self.plan.run(*self.adapted(tensors))

    def run_into(self, out: Tensor, tensors: Tensors) -> Results:
        """Run the plan; its first result is written to `out`."""
        tensors = self.adapted(tensors)
        if isinstance(self.plan, LaunchPlan):
            return self.plan.run(*tensors, out=out)
        o, *rest = self.plan.run(*tensors)
        assert o is not None
        return out.copy_(o), *rest


class Options(Protocol):
    """The checked arguments of a call, in the order of the registered op's schema."""

    def planned(self) -> Bound:
        """Return the plan of the call, which takes `tensors()`."""

    def tensors(self) -> Tensors:
        """Return the tensors in the order in which plans take them."""

    def dispatch(self) -> Results:
        """Call the registered op."""


class Signature(Protocol):
    """The arguments of an op's public function: a named tuple with a field for each.

    The annotation of a field says which types of numbers are usual, see `_KINDS`.
    """

    def tensors(self) -> Tensors:
        """Return all tensors, in the order in which plans take them."""

    def numbers(self) -> Key:
        """Return all that is no tensor and decides how the call is checked or computed."""

    def bind(self) -> Options:
        """Check the arguments; raise ValueError or TypeError where one breaks a rule."""

    def adapter(self) -> Adapter:
        """Return the function that makes the tensors of the options out of `tensors()`."""


Record = Callable[..., Results]


class _Latest(NamedTuple):
    """A call without more tensors than its first three, found again by one check of these.

    Attributes:
        rest: the other arguments. Those of a call like it are the same objects.
        check: the check of the three tensors.
        odd: the bits that addresses of the three must not have.
        others: None for each further tensor of the plan.
        learns: whether one of the three requires a gradient.
    """

    signature: type[Any] | None
    rest: Sequence[object]
    check: Callable[..., bool]
    odd: int
    bound: Any
    others: tuple[None, ...]
    learns: bool


_NO_CALL = _Latest(None, (), never, 0, None, (), False)


class _Memory:
    """The bound calls that later calls may use again.

    Attributes:
        calls: bound calls by their keys.
        latest: the latest call that came again.
        missed: the last call that the check of `latest` did not know.
        num_missed: the number of times it came again before another one was missed or a check was
            made.
    """

    def __init__(self) -> None:
        self.calls: dict[Key, Any] = {}
        self.latest = _NO_CALL
        self.missed: Bound | None = None
        self.num_missed = 0

    def let_be_latest(self, given: Any, tensors: Tensors, bound: Bound) -> None:
        """Let the next call be found at once if this one came before, later each time."""
        if bound is not self.missed:
            self.missed, self.num_missed = bound, 0
            return
        self.num_missed += 1
        if self.num_missed <= min(bound.num_checks, _MAX_MISSES):
            return
        self.num_missed = 0
        bound.num_checks += 1
        q, k, v, *rest = given
        learns, odd = any(x.requires_grad for x in (q, k, v)), 0 if q.is_cpu else 15
        others = (None,) * (len(tensors) - 3)
        check = check_of(q, k, v)
        self.latest = _Latest(type(given), rest, check, odd, bound, others, learns)


_memory = _Memory()


def forget() -> None:
    """Forget all calls."""
    _memory.__init__()  # type: ignore[misc]


def repeat(given: Any, record: Record) -> Results | None:
    """Run a call that is like the latest one; None where it differs, or is watched.

    Args:
        given: a signature whose first three fields are tensors.
        record: as in `run`.
    """
    if torch.compiler.is_compiling():
        return None
    latest = _memory.latest
    q, k, v, *rest = given
    if (
        type(given) is not latest.signature
        or not all(map(is_, rest, latest.rest))
        or not latest.check(q, k, v)
        # A GPU's kernels are made for multiples of 16 bytes.
        or (latest.odd and (q.data_ptr() | k.data_ptr() | v.data_ptr()) & latest.odd)
        or not unseen()
        or _is_deterministic()
    ):
        return None
    if latest.learns and torch.is_grad_enabled():
        return record(latest.bound, q, k, v)
    results: Results = latest.bound.plan.run(q, k, v, *latest.others)
    return results


def run(
    given: Signature,
    out: Tensor | None = None,
    last: Last | None = None,
    record: Record | None = None,
) -> Results:
    """Run a call.

    Args:
        given: the arguments of the call.
        out: a tensor that was checked, to which the first result is written; None makes one.
        last: the last call of a step, which takes note of this one if it was run into `out`.
        record: a function of the bound call and the tensors of its plan, which runs the plan and
            records its gradient; of three tensors, the first fields of the signature, it takes no
            others. None where the registered op has to.

    Raises:
        ValueError, TypeError: an argument breaks a rule of the op.
        UnsupportedError: as `plan_of`.
    """
    if unwatched() and not autocasts():
        tensors = given.tensors()
        present = [x for x in (*tensors, out) if x is not None]
        learns = records(*present)
        bound = None if learns and record is None else _find(given, tensors, present)
        if bound is not None:
            if record is not None:
                if len(present) == 3 and _may_repeat(bound, present):
                    _memory.let_be_latest(given, tensors, bound)
                if learns:
                    some = bound.adapted(tensors)
                    return record(bound, *(some[:3] if len(present) == 3 else some))
            if out is None:
                return bound.run(tensors)
            results = bound.run_into(out, tensors)
            if last is not None:
                last.follow(bound, given, out)
            return results
    results = given.bind().dispatch()
    if out is None:
        return results
    assert results[0] is not None
    return out.copy_(results[0]), *results[1:]


def _find(given: Signature, tensors: Tensors, present: Sequence[Tensor]) -> Bound | None:
    """Return the planned call that can run without torch's dispatcher, or None if that must see it.

    Modes, subclasses, transforms and unusual arguments need the dispatcher.

    Args:
        given: the call's arguments.
        tensors: the tensors of the call, None for absent ones.
        present: the tensors that are not None.
    """
    if not are_plain(*present) or not (present[0].is_cuda or present[0].is_cpu):
        return None
    try:
        key = key_of(type(given), tensors, given.numbers())
        bound: Bound | None = _memory.calls.get(key)
    except (RuntimeError, TypeError):
        # A sparse tensor has no address; of a list or an array as a number Python finds no equal.
        return None
    if bound is None:
        if not _is_usual(given):
            return None
        options = given.bind()
        bound = options.planned()
        if any(x is not y for x, y in zip(options.tensors(), tensors, strict=True)):
            bound = replace(bound, adapter=given.adapter())
        remember(key, bound)
    return bound


def _may_repeat(bound: Bound, tensors: Sequence[Tensor]) -> bool:
    """Whether a check of its three tensors may find a call."""
    if bound.adapter is not None or _is_deterministic():
        return False
    return tensors[0].is_cpu or not any(x.data_ptr() & 15 for x in tensors)


def plan_of(op: str, spec: Any, tensors: Tensors, backend: str | None) -> Bound:
    """Return the plan for calls of this spec whose tensors lie like these.

    Raises:
        UnsupportedError: as `dispatch.choose_plan`.
    """
    key = key_of(op, tensors, (spec, backend))
    bound: Bound | None = _memory.calls.get(key)
    if bound is None:
        first = next(x for x in tensors if x is not None)
        with device_of(first.device):
            bound = Bound(*dispatch.choose_plan(op, Call.of(spec, tensors), backend))
        remember(key, bound)
    return bound


def key_of(op: str | type[Signature], tensors: Tensors, numbers: Key) -> Key:
    """Return the key under which a planned call is kept.

    It holds the op, the numbers with their types, and each tensor's dtype, device, sizes, strides
    and alignment.
    """
    key: list[object] = [op, *numbers, *map(type, numbers)]
    odd = 0
    for x in tensors:
        if x is None:
            key.append(None)
        else:
            key += (x.shape, x.stride(), x.dtype, x.device)
            odd |= x.data_ptr()
    if odd & 15:  # kernels are made for multiples of 16
        key += [x is not None and x.data_ptr() & 15 != 0 for x in tensors]
    return tuple(key)


def recall(key: Key) -> Any:
    """Return the value that `remember` stored under a key in this process, or None.

    Args:
        key: the key of a call, as `key_of` makes it.
    """
    return _memory.calls.get(key)


def remember(key: Key, value: Any) -> None:
    """Store a bound call, or the facts about calls alike, under the key by which `recall` finds
    it."""
    if len(_memory.calls) >= _MAX_CALLS:
        _memory.calls.clear()
    _memory.calls[key] = value


# Types of numbers that the dispatcher would pass on as they are, or as their equals; for others it
# raises, or converts what Python calls equal to something else.
_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "None": (type(None),),
    "Window": (int, tuple, type(None)),
}


def _is_usual(given: Signature) -> bool:
    """Whether all numbers of a call are of the types that its signature names."""
    for name, kinds in _numbers_of(type(given)):
        value = getattr(given, name)
        if type(value) not in kinds:
            return False
        if type(value) is tuple and not {*map(type, value)} <= {int, type(None)}:
            return False
    return True


@functools.cache
def _numbers_of(signature: type[Any]) -> list[tuple[str, tuple[type, ...]]]:
    """Return the names and the usual types of the fields that are numbers."""
    found = []
    for name, annotation in signature.__annotations__.items():
        parts = annotation.__forward_arg__.split(" | ")
        if all(part in _KINDS for part in parts):
            found.append((name, tuple(kind for part in parts for kind in _KINDS[part])))
    return found


class Last:
    """The last call into an output with a step's plan, repeated for layers whose tensors lie alike.

    The layers of a step differ in their tensors and not in how these lie. So the call of the first
    one is checked and planned; for the others torch's own guard says that their tensors lie alike,
    and the launches are started with other addresses, in the buffers of the first.
    """

    def __init__(self) -> None:
        self.forget()

    def __reduce__(self) -> tuple[type[Last], tuple[()]]:
        return Last, ()  # a copy has had no call

    def forget(self) -> None:
        """Forget the last call, and free its buffers; the next call is looked up again."""
        self._check: Callable[..., bool] = never
        self._numbers: Key = ()
        self._types: list[type] = []  # of all tensors and numbers
        self._learns = False  # a gradient is wanted where gradients are recorded
        self._bound: Bound | None = None
        self._again: Again | None = None

    def follow(self, bound: Bound, given: Signature, out: Tensor) -> None:
        """Remember a call that has just run, so that an equal call can repeat its launch.

        Args:
            bound: the planned call.
            given: the call's arguments.
            out: the call's result.
        """
        self.forget()
        tensors, numbers = given.tensors(), given.numbers()
        present = [x for x in (*tensors, out) if x is not None]
        if values.WAITS or not isinstance(bound.plan, LaunchPlan):
            return
        if any(x.data_ptr() & 15 for x in present):
            return
        self._check, self._numbers = check_of(*present), numbers
        self._types = [*map(type, tensors), *map(type, numbers)]
        self._learns = any(x.requires_grad for x in present)
        self._bound = bound

    def run(self, given: Signature, out: Tensor) -> bool:
        """Repeat the remembered call's launch with other arguments; its result goes to `out`.

        Args:
            given: the arguments of this call.
            out: the tensor for the only result.

        Returns:
            True if the launch was repeated. False, and nothing runs, if no call is remembered, if
            the layouts or types of tensors or the numbers differ, if autograd must record a
            gradient, or if a transform, mode, trace or profile of torch observes ops.
        """
        bound = self._bound
        if not unwatched() or bound is None:
            return False
        tensors, numbers = given.tensors(), given.numbers()
        if [*map(type, tensors), *map(type, numbers)] != self._types or numbers != self._numbers:
            return False
        if not self._check(*[x for x in tensors if x is not None], out):
            return False
        if self._learns and torch.is_grad_enabled():
            return False
        if bound.adapter is not None:
            tensors = bound.adapter(tensors)
        if self._again is None:
            assert isinstance(bound.plan, LaunchPlan)
            self._again = bound.plan.again(out, tensors)
            if self._again is None:  # a plan that does more than launch
                self.forget()
                return False
        return self._again.run(out, tensors)
