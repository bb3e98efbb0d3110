"""Plans of earlier calls, found by all that decides how a call is checked and computed.

Checks, options, backend and plan of a call follow from its numbers and from how its tensors lie.
Where nothing watches ops, a call like one before goes straight to its plan, past its checks and
torch's dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tilewise.kernels.plan import Call, LaunchPlan, Results, device_of
from tilewise.kernels.spec import Fp8Spec, PagedSpec
from tilewise.ops import dispatch
from tilewise.ops.derivatives import are_plain, records

__all__ = ["Reading", "Run", "are_odd", "find_directly", "key_of", "plan_once", "run_into"]

Key = tuple[object, ...]
Run = Callable[..., Results]

_MAX_KNOWN = 1024
_known: dict[Key, Run] = {}  # by what a user gives
_plans: dict[Key, tuple[str, Run]] = {}  # by what a backend is given


def key_of(op: str, tensors: Sequence[Tensor | None], numbers: Sequence[object]) -> Key:
    """Return the op, numbers and their types, and how each tensor lies in memory."""
    key: list[object] = [op, *numbers, *map(type, numbers)]
    odd = 0
    for x in tensors:
        if x is None:
            key.append(None)
        else:
            key += (x.shape, x.stride(), x.dtype, x.device)
            odd |= x.data_ptr()
    if odd & 15:
        key.append(are_odd(tensors))
    return tuple(key)


def are_odd(tensors: Sequence[Tensor | None]) -> tuple[bool, ...]:
    """Say of each tensor whether its address is no multiple of 16, which kernels are made for."""
    return tuple([x is not None and x.data_ptr() & 15 != 0 for x in tensors])


def find_directly(
    op: str,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[object],
    usual: Sequence[tuple[type, ...]],
    make: Callable[[], tuple[Run, Sequence[Tensor | None]]],
    as_kernels_read: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]],
    out: Tensor | None = None,
) -> Callable[..., Any] | None:
    """Return what runs a call that nothing watches; None where the dispatcher must see it.

    Args:
        tensors, numbers: all that a user gave, the tensors one by one.
        usual: types of the numbers that the dispatcher would pass on as they are.
        make: checks the call; returns what runs it, and the tensors that this takes.
        as_kernels_read: returns these tensors of a call that was checked.
        out: what the first result is written to; it was checked.
    """
    given = [x for x in (*tensors, out) if x is not None]
    if not are_plain(*given) or records(*given):
        return None
    if not (given[0].is_cuda or given[0].is_cpu):
        return None
    try:
        key = key_of(op, tensors, numbers)
        run = _known.get(key)
    except (RuntimeError, TypeError):
        # A sparse tensor has no address; of a list or an array as a number Python finds no equal.
        return None
    if run is None:
        if not all(type(x) in kinds for x, kinds in zip(numbers, usual, strict=True)):
            return None
        run = _runner(*make(), tensors, as_kernels_read)
        _keep(_known, key, run)
    return run


def run_into(run: Run, tensors: Sequence[Tensor | None], out: Tensor) -> Results:
    """Run what was found for a call; the first result is written to `out`."""
    if isinstance(run, Reading):
        return run_into(run.run, run.as_kernels_read(tensors), out)
    plan = getattr(run, "__self__", None)
    if isinstance(plan, LaunchPlan):
        return plan.run_into(out, *tensors)
    o, *rest = run(*tensors)
    assert o is not None
    return out.copy_(o), *rest


class Reading:
    """Runs calls of which a plan takes some tensors in another dtype or layout."""

    def __init__(
        self,
        run: Run,
        as_kernels_read: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]],
    ) -> None:
        self.run, self.as_kernels_read = run, as_kernels_read

    def __call__(self, *tensors: Tensor | None) -> Results:
        return self.run(*self.as_kernels_read(tensors))


def _runner(
    run: Run,
    read: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
    as_kernels_read: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]],
) -> Run:
    if all(x is y for x, y in zip(read, tensors, strict=True)):
        return run
    return Reading(run, as_kernels_read)


def plan_once(
    op: str, spec: PagedSpec | Fp8Spec, tensors: Sequence[Tensor | None], backend: str | None
) -> tuple[str, Run]:
    """Return whose kernels run calls of this spec whose tensors lie so, and what runs them.

    Raises:
        UnsupportedError: as `dispatch.choose_plan`.
    """
    key = key_of(op, tensors, (spec, backend))
    found = _plans.get(key)
    if found is None:
        first = next(x for x in tensors if x is not None)
        with device_of(first.device):
            name, plan = dispatch.choose_plan(op, Call.of(spec, tensors), backend)
        found = name, plan.run
        _keep(_plans, key, found)
    return found


def _keep(memory: dict[Key, Any], key: Key, value: Any) -> None:
    if len(memory) >= _MAX_KNOWN:
        memory.clear()
    memory[key] = value
