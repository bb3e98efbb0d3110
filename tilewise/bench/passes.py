"""The numbers of one peer: each pass is checked against the truth, then timed.

The call that is checked is the first one, which also compiles and loads kernels: it is never timed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilewise.bench import second_order
from tilewise.bench.case import Case
from tilewise.bench.peers import Run
from tilewise.bench.problem import OPS
from tilewise.bench.timing import Timing, peak_memory, time_call
from tilewise.bench.truth import Truth, sampled_weights, wrong_gradient, wrong_output

Numbers = dict[str, Any]
_Result = TypeVar("_Result")
LONG = 0.5  # seconds: a CPU call that takes so long after its first one is timed once


class Budget:
    """The wall time that the remaining measurements of a run share.

    Args:
        seconds: the seconds of the run, from now on.
        measurements: the number of measurements.

    Attributes:
        first_calls, first_seconds: the number of first calls, which do not count, and their
            seconds.
    """

    def __init__(self, seconds: float, measurements: int) -> None:
        self.seconds = seconds
        self._start = time.monotonic()
        self._end = self._start + seconds
        self._left = measurements
        self.first_calls, self.first_seconds = 0, 0.0

    def first(self, call: Callable[[], _Result]) -> _Result:
        """Run a call for the first time, count it and its seconds among the first calls, which are
        never timed, and return its result."""
        start = time.perf_counter()
        result = call()
        self.first_calls += 1
        self.first_seconds += time.perf_counter() - start
        return result

    @property
    def elapsed(self) -> float:
        """Seconds since this budget was made, at the start of the run."""
        return time.monotonic() - self._start

    @property
    def is_spent(self) -> bool:
        """Whether the seconds of the run have passed."""
        return time.monotonic() >= self._end

    def finish(self, measurements: int) -> None:
        """Count this many measurements as done, measured or not."""
        self._left -= measurements

    def share(self) -> float:
        """Return the seconds of timing for the next measurement, 0.02 to 0.5: 30 % of its equal
        share of the time that is left, as checks and compilations take the rest."""
        share = 0.3 * (self._end - time.monotonic()) / max(self._left, 1)
        return min(max(share, 0.02), 0.5)


class WrongResult(Exception):
    """A call ran, and its result differs from the truth."""


def numbers_of(case: Case, truth: Truth, run: Run, budget: Budget) -> Iterator[tuple[str, Numbers]]:
    """Yield (op, numbers) for each op of the problem, checked against the truth and timed.

    `run` is the peer's function and tensors.

    Raises:
        WrongResult: the result of an op differs from the truth.
        Exception: the peer's own, where it cannot run an op.
    """
    ops, device = case.problem.ops, case.device.type
    for op in second_order.OPS:
        if op in ops:
            call, wrong = budget.first(functools.partial(second_order.call_of, op, case, run))
            _raise(wrong)
            yield op, _timed(call, device, budget)
    if not set(ops) & set(OPS):
        return
    forward = _forward(run, truth, "forward" in ops, device, budget)
    if forward is not None:
        yield "forward", forward
    if "backward" not in ops and "forward+backward" not in ops:
        return
    if run.no_backward is not None:
        raise NotImplementedError(run.no_backward)
    backward = _backward(run, truth, "backward" in ops, device, budget)
    if backward is not None:
        yield "backward", backward
    if "forward+backward" in ops:
        yield (
            "forward+backward",
            _timed(lambda: _gradients(run, run.forward(), _weights(run)), device, budget),
        )


def _forward(run: Run, truth: Truth, is_timed: bool, device: str, budget: Budget) -> Numbers | None:
    outputs = budget.first(run.forward)
    _raise(wrong_output(outputs, truth, run))
    del outputs  # the memory of a pass is what it needs beyond its inputs
    return _timed(run.forward, device, budget) if is_timed else None


def _backward(
    run: Run, truth: Truth, is_timed: bool, device: str, budget: Budget
) -> Numbers | None:
    outputs = run.forward()
    sampled = sampled_weights(run, truth.rows)

    def backward(weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return _gradients(run, outputs, weights, retain_graph=True)

    grads = budget.first(lambda: backward(sampled))
    _raise(wrong_gradient(grads, truth, run))
    del grads
    weights = _weights(run)
    return _timed(lambda: backward(weights), device, budget) if is_timed else None


def _weights(run: Run) -> tuple[Tensor, ...]:
    return (run.do,) if run.dlse is None else (run.do, run.dlse)


def _gradients(
    run: Run, outputs: Any, weights: Sequence[Tensor], *, retain_graph: bool = False
) -> tuple[Tensor, ...]:
    leaves = list(run.leaves.values())
    return torch.autograd.grad(outputs, leaves, weights, retain_graph=retain_graph)


def compile_passes(case: Case, run: Run) -> None:
    """Run each pass that `numbers_of` would compile once, so that it is compiled; check nothing."""
    for op in second_order.OPS:
        if op in case.problem.ops:
            second_order.call_of(op, case, run)
    if set(case.problem.ops) & set(OPS):
        _gradients(run, run.forward(), _weights(run))


def _raise(wrong: str | None) -> None:
    if wrong is not None:
        raise WrongResult(wrong)


def _timed(call: Callable[[], object], device: str, budget: Budget) -> Numbers:
    """Return the time and the peak memory of a call that has run before: ms, spread, repeats and
    peak_MB.

    On a CPU a call of `LONG` seconds or more is timed once.
    """
    share = budget.share()
    start = time.perf_counter()
    peak = peak_memory(call, device)
    seconds = time.perf_counter() - start
    if device == "cpu" and seconds >= LONG:
        timing = Timing(seconds, seconds, seconds, 1)
    else:
        timing = time_call(call, device, budget=share, fewest=3)
    return {
        "ms": timing.median * 1e3,
        "spread": timing.spread,
        "repeats": timing.repeats,
        "peak_MB": peak / 2**20,
    }
