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
    """A checked and planned call, remembered so that calls with like arguments run its plan.

    Attributes:
        backend: the name of the backend that runs the call.
        plan: the plan of that backend.
        adapter: a function from the tensors of a caller to those of the plan; None where the plan
            takes them as they are.
        num_checks: the number of times that the call became `_Memory.latest`.
    """

    backend: str
    plan: Plan
    adapter: Adapter | None = None
    num_checks: int = 0

    def adapted(self, tensors: Tensors) -> Tensors:
        """Return the tensors that the plan takes, made of a caller's `tensors`."""
        return tensors if self.adapter is None else self.adapter(tensors)

    def run(self, tensors: Tensors) -> Results:
        """Run the plan for a caller's `tensors`, and return the results of the plan."""
        return self.plan.run(*self.adapted(tensors))

    def run_into(self, out: Tensor, tensors: Tensors) -> Results:
        """Run the plan for a caller's `tensors`, with its first result in `out`.

        A plan that is no `LaunchPlan` allocates that result, which is then copied to `out`.

        Returns:
            All results of the plan, of which the first is `out`.
        """
        tensors = self.adapted(tensors)
        if isinstance(self.plan, LaunchPlan):
            return self.plan.run(*tensors, out=out)
        o, *rest = self.plan.run(*tensors)
        assert o is not None
        return out.copy_(o), *rest


class Options(Protocol):
    """The checked arguments of a call, in the order of the registered op's schema."""

    def planned(self) -> Bound:
        """Choose a backend, and return its plan for this call; the plan takes `tensors()`.

        Raises UnsupportedError where no backend can run the call.
        """

    def tensors(self) -> Tensors:
        """Return the tensors in the order in which plans take them."""

    def dispatch(self) -> Results:
        """Call the registered op with these arguments, and return its results."""


class Signature(Protocol):
    """The arguments of one call of an op's public function: a named tuple with a field for each.

    The annotation of a field says which types of numbers are usual, see `_KINDS`: only calls with
    these types are remembered.
    """

    def tensors(self) -> Tensors:
        """Return all tensors, in the order in which plans take them."""

    def numbers(self) -> Key:
        """Return the arguments, no tensors, that decide how the call is checked or computed."""

    def bind(self) -> Options:
        """Return the checked arguments; raise ValueError or TypeError where one breaks a rule."""

    def adapter(self) -> Adapter:
        """Return a function that makes `bind().tensors()` out of `tensors()`, without checks.

        The function serves all calls that differ from this one in their tensors only.
        """


Record = Callable[..., Results]


class _Latest(NamedTuple):
    """A call whose only tensors are its first three arguments q, k and v, to be repeated at once.

    Attributes:
        signature: the type of the call's signature; None if there is no latest call yet.
        rest: the arguments after v. Those of a call like this one are the same objects.
        check: a function of q, k and v that says whether they lie as those of this call.
        odd: the bits that the addresses of q, k and v must not have: 15 on a GPU, 0 on a CPU.
        bound: the planned call, a Bound.
        others: None for each further tensor of the plan.
        learns: whether q, k or v requires a gradient.
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
    """The planned calls of this process that later calls may use again.

    Attributes:
        calls: the values of `remember` by their keys, above all `Bound` calls; at most 4,096.
        latest: the call that `repeat` compares with, one that has come several times in a row.
        missed: the last call that ran through `run` because it was not like `latest`.
        num_missed: the number of times in a row that `missed` came again since then.
    """

    def __init__(self) -> None:
        self.calls: dict[Key, Any] = {}
        self.latest = _NO_CALL
        self.missed: Bound | None = None
        self.num_missed = 0

    def let_be_latest(self, given: Any, tensors: Tensors, bound: Bound) -> None:
        """Count a call that `repeat` did not find, and make it `latest` if it came often enough.

        It must come again, without another missed call between, and once more for each time that
        it became the latest before (at most 8): making its check costs what it saves a call.

        Args:
            given: the signature of the call, with q, k and v first.
            tensors: all tensors of the call, None for absent ones; all but q, k and v are None.
            bound: the planned call.
        """
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
    """Forget all remembered calls of this process: the next call is checked and planned again."""
    _memory.__init__()  # type: ignore[misc]


def repeat(given: Any, record: Record) -> Results | None:
    """Run a call that is like the latest one, past all checks, and return its results.

    Args:
        given: the signature of the call, whose first three fields are tensors.
        record: as in `run`; used where a gradient is wanted.

    Returns:
        The results of the plan; None, and nothing runs, where the call is not like the latest one,
        where a mode, transform, trace or profile of torch watches ops, or where torch's
        deterministic algorithms are on.
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
    """Run a call by its remembered plan, or by the registered op where torch must see the op.

    A call unlike all before is checked and planned first. The registered op runs where a mode,
    transform, trace or profile watches or autocast is on, where a gradient is wanted and `record`
    is None, and for unusual tensors or numbers.

    Args:
        given: the arguments of the call.
        out: a tensor that the caller has checked, to which the first result is written; None
            allocates it.
        last: the memory of a step's last call, which remembers this one if its plan ran into `out`;
            None if nothing repeats the call.
        record: a function of the bound call and the tensors of its plan, which runs the plan and
            records its gradient; it gets only the first three tensors if the call has no others.
            None if only the registered op can record a gradient.

    Returns:
        The results of the op, of which the first is `out` if given.

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
    """Return the remembered or newly planned call, or None if torch's dispatcher must see the call.

    The dispatcher is needed for subclasses of tensors, for other devices than CPUs and CUDA GPUs,
    and for numbers of unusual types. A new call is checked, planned and remembered here, with the
    errors of `Signature.bind` and `Options.planned`.

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
    """Return whether a call of three tensors may become the latest one, which `repeat` runs.

    Its plan must take the tensors as they are, torch's deterministic algorithms must be off, and on
    a GPU all addresses must be multiples of 16 bytes.
    """
    if bound.adapter is not None or _is_deterministic():
        return False
    return tensors[0].is_cpu or not any(x.data_ptr() & 15 for x in tensors)


def plan_of(op: str, spec: Any, tensors: Tensors, backend: str | None) -> Bound:
    """Return the planned call of `op` for this spec and tensors that lie like these.

    It is taken from the memory of calls, or planned and remembered. Nothing runs.

    Args:
        op: the name of the op, as `dispatch` knows it.
        spec: the hashable description of the call.
        tensors: the tensors in the order of the plan, None for absent ones.
        backend: the name of the only backend to ask; None for the first that can.

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
    """Store a value, such as a planned call, under the key by which `recall` finds it.

    If 4,096 values are stored already, all are forgotten first.
    """
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
    """Return whether the arguments that are no tensors have exactly the types of `_numbers_of`.

    Subclasses do not count, and a tuple may hold only ints and None. Other calls are never
    remembered.
    """
    for name, kinds in _numbers_of(type(given)):
        value = getattr(given, name)
        if type(value) not in kinds:
            return False
        if type(value) is tuple and not {*map(type, value)} <= {int, type(None)}:
            return False
    return True


@functools.cache
def _numbers_of(signature: type[Any]) -> list[tuple[str, tuple[type, ...]]]:
    """Return the name and the usual types of each field of a signature that is no tensor.

    These are the fields that are annotated with names of `_KINDS` alone.
    """
    found = []
    for name, annotation in signature.__annotations__.items():
        parts = annotation.__forward_arg__.split(" | ")
        if all(part in _KINDS for part in parts):
            found.append((name, tuple(kind for part in parts for kind in _KINDS[part])))
    return found


class Last:
    """The memory of the last call that ran with a step's plan and `out`, to be repeated by `run`.

    A PagedPlan has one. The layers of a step call attention with different tensors that lie alike.
    So the call of the first layer is checked and planned, and `follow` remembers it; for the others
    torch's own guards say that their tensors lie alike, and `run` starts the same launches with
    other addresses, in the buffers of the first. A copy or pickle of it remembers nothing.
    """

    def __init__(self) -> None:
        self.forget()

    def __reduce__(self) -> tuple[type[Last], tuple[()]]:
        return Last, ()  # a copy has had no call

    def forget(self) -> None:
        """Forget the last call, and free its buffers; `run` then returns False until `follow`."""
        self._check: Callable[..., bool] = never
        self._numbers: Key = ()
        self._types: list[type] = []  # of all tensors and numbers
        self._learns = False  # a gradient is wanted where gradients are recorded
        self._bound: Bound | None = None
        self._again: Again | None = None

    def follow(self, bound: Bound, given: Signature, out: Tensor) -> None:
        """Remember a call that has just run into `out`, so that `run` can repeat its launches.

        The call before is forgotten. This one is not remembered if its plan is no `LaunchPlan`, if
        an address is no multiple of 16 bytes, or if TILEWISE_CHECK=1 has every call checked.

        Args:
            bound: the planned call.
            given: the call's arguments.
            out: the call's first result.
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
        """Repeat the launches of the remembered call for other tensors; the result goes to `out`.

        Args:
            given: the arguments of this call.
            out: the tensor for the only result.

        Returns:
            True if the launches were repeated. False, and nothing runs, if no call is remembered,
            if its plan does more than launch, if the layouts or types of tensors or the numbers
            differ, if autograd must record a gradient, if the stream is another or is being
            captured, or if a transform, mode, trace or profile of torch observes ops.
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
