"""Weights of a profile, fitted to measured steps by least squares. No torch.

Each step's time is a weighted sum of what it reads, multiplies and counts (`cost.StepCost.parts`),
and the weights, none negative, are those with the least squares of relative errors. On a GPU no
weight is less than what the peaks allow: nothing is read faster than memory, nor multiplied faster
than by the largest product. What other kernels for other numbers of rows leave unsaid is said by
factors (`Machine.factors`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewise.cost import Machine, Sizes, StepCost, StepWork
from tilewise.cost.step import kind_of

__all__ = ["MeasuredStep", "errors", "fit", "fit_device", "least_squares"]

# Keys and values that a CPU's caches may hold from one step to the next: the least squares choose.
NEAR_BYTES = (0.0, *(float(mib << 20) for mib in (4, 8, 16, 32, 64)))
MOST_EFFICIENT = 100.0  # what is read from caches has no other limit; a weight of 0 would be none
# Of a GPU no share is above this: peaks are measured, too.
MOST_OF_A_GPU = 1.05
ROUNDS = 6  # of telling which of two overlapping things is the longer one
LIKE = 3  # steps of so many rows at least, so that their factor is one


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of the engine and what it took, in seconds.

    Attributes:
        scheduling, submitting: of the host, before the step.
        device: from the end of the step before, or from its own submission, to its end.
        updating: of the host, after it.
        is_alone: `device` is all that the device took and nothing else, as the whole step had been
            submitted before it began; of the host nothing was measured.
    """

    work: StepWork
    scheduling: float
    submitting: float
    device: float
    updating: float
    is_alone: bool = False


def least_squares(
    columns: Sequence[Sequence[float]],
    seconds: Sequence[float],
    least: Sequence[float] | None = None,
) -> list[float]:
    """Return the weights, none below its least, with the least squares of relative errors.

    Args:
        columns: for each step what the weights multiply.
        seconds: of each step, above 0.
        least: of each weight; None is 0.
    """
    y = np.asarray(seconds, dtype=float)
    a = np.asarray(columns, dtype=float) / y[:, None]
    floor = np.zeros(a.shape[1]) if least is None else np.asarray(least, dtype=float)
    wanted = 1 - a @ floor
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a /= scale
    best, smallest = np.zeros(a.shape[1]), float(wanted @ wanted)
    # The weights above their least solve the problem without the others; nine are 511 problems.
    for count in range(1, a.shape[1] + 1):
        for some in map(list, itertools.combinations(range(a.shape[1]), count)):
            weights, *_ = np.linalg.lstsq(a[:, some], wanted, rcond=None)
            squares = float(((a[:, some] @ weights - wanted) ** 2).sum())
            if weights.min() >= 0 and squares < smallest:
                best, smallest = np.zeros(a.shape[1]), squares
                best[some] = weights
    return [float(weight) for weight in floor + best / scale]


def fit(
    peaks: dict[str, Any], sizes: Sizes, steps: Sequence[MeasuredStep], **options: Any
) -> Machine:
    """Return the profile whose predictions are nearest to measured steps.

    Memory and products either overlap or add up in it, whichever is nearer; so is what a CPU's
    caches hold of keys and values.

    Args:
        peaks: of measure_peaks.
        sizes: of the model that ran.
        steps: of measure_steps.
        options: of StepCost, "dtype" among them; "captures" and "overlaps_steps" of Machine.
    """
    flags = {name: options.pop(name, False) for name in ("captures", "overlaps_steps")}
    start = Machine(**peaks, **flags)
    kernels = StepCost(sizes, start, **options).kernels
    return fit_device(replace(start, **_fit_host(start, kernels, steps)), sizes, steps, **options)


def fit_device(
    start: Machine, sizes: Sizes, steps: Sequence[MeasuredStep], **options: Any
) -> Machine:
    """Return `start` with the efficiencies and times of a device that are nearest; see `fit`.

    Steps that ran alone tell more of a device than others, which are left out beside them.
    """
    steps = [step for step in steps if step.is_alone] or steps
    on_device = start.captures or start.overlaps_steps
    if on_device:
        forms = [(True, False), (True, True), (False, False)]
        starts = [replace(start, overlaps=o, attends_apart=a) for o, a in forms]
    else:
        starts = [
            replace(start, overlaps=overlaps, near_bytes=near)
            for overlaps in (True, False)
            for near in NEAR_BYTES
        ]
    found = [_fit_device(each, sizes, steps, options, bounded=on_device) for each in starts]
    best = min(found, key=lambda m: _squares(m, sizes, steps, options))
    return _with_factors(best, sizes, steps, options) if start.captures else best


def _fit_host(start: Machine, kernels: int, steps: Sequence[MeasuredStep]) -> dict[str, Any]:
    """Return the host's times; submitting is the device's time where nothing overlaps."""
    steps = [step for step in steps if not step.is_alone]
    works = [step.work for step in steps]
    before = [
        [1.0, w.sequences, w.tokens - w.sequences, w.renews, w.renews * w.sequences] for w in works
    ]
    names = ("step_s", "step_sequence_s", "token_s", "renew_s", "renew_sequence_s")
    found: dict[str, Any] = dict(
        zip(names, least_squares(before, [s.scheduling for s in steps]), strict=True)
    )
    if start.overlaps_steps:
        captured = [s for s in steps if s.work.is_decode or not start.captures]
        rows = [
            [1.0, s.work.sequences, s.work.renews, s.work.renews * s.work.sequences]
            for s in captured
        ]
        sent = least_squares(rows, [s.submitting for s in captured])
        for name, seconds in zip((names[0], names[1], *names[3:]), sent, strict=True):
            found[name] += seconds
        found |= _fit_launches(
            start, kernels, [s for s in steps if not s.work.is_decode], sent
        )
    after = least_squares(
        [[1.0, w.samples, w.renews * w.samples] for w in works], [s.updating for s in steps]
    )
    names = ("update_s", "update_sequence_s", "renewed_sequence_s")
    return found | dict(zip(names, after, strict=True))


def _fit_launches(
    start: Machine, kernels: int, steps: Sequence[MeasuredStep], sent: Sequence[float]
) -> dict[str, float]:
    """Return what steps that are not captured take to submit beyond what all take, `sent`."""
    if not (start.captures and steps):
        return {}
    beyond = []
    for step in steps:
        work = step.work
        all_take = sent[0] + sent[1] * work.sequences
        all_take += work.renews * (sent[2] + sent[3] * work.sequences)
        beyond.append(max(step.submitting - all_take, step.submitting / 10))
    columns = [[kernels, s.work.sequences, s.work.tokens] for s in steps]
    names = ("launch_s", "launch_sequence_s", "launch_token_s")
    return dict(zip(names, least_squares(columns, beyond), strict=True))


def _fit_device(
    start: Machine,
    sizes: Sizes,
    steps: Sequence[MeasuredStep],
    options: dict[str, Any],
    *,
    bounded: bool,
) -> Machine:
    """Return `start` with the weights that are nearest.

    Args:
        bounded: no share is above MOST_OF_A_GPU.
    """
    seconds = [step.device for step in steps]
    machine = start
    # Where two things overlap the longer one counts, which depends on the weights.
    for _ in range(ROUNDS if start.overlaps else 1):
        cost = StepCost(sizes, machine, **options)
        rows = [_columns(cost.parts(step.work), machine) for step in steps]
        names = list(rows[0])
        least = [1 / MOST_OF_A_GPU * (bounded and not name.endswith("_s")) for name in names]
        weights = least_squares([list(row.values()) for row in rows], seconds, least)
        found: dict[str, Any] = {}
        for name, weight in zip(names, weights, strict=True):
            is_time = name.endswith("_s")
            found[name] = weight if is_time else min(1 / weight if weight else np.inf, MOST_EFFICIENT)
        machine = replace(machine, **found)
    return machine


def _columns(parts: dict[str, float], machine: Machine) -> dict[str, float]:
    """Return what the weights multiply; where two things overlap the longer one stays."""
    if not machine.overlaps:
        return parts
    pairs = [("stream_efficiency", "product_efficiency")]
    if parts["attention_efficiency"] and not machine.attends_apart:
        pairs.append(("key_efficiency", "attention_efficiency"))
    for one, other in pairs:
        is_one = parts[one] / getattr(machine, one) >= parts[other] / getattr(machine, other)
        parts[other if is_one else one] = 0.0
        if not is_one and one == "key_efficiency":
            parts["far_efficiency"] = 0.0
    return parts


def _with_factors(
    machine: Machine, sizes: Sizes, steps: Sequence[MeasuredStep], options: dict[str, Any]
) -> Machine:
    """Return `machine` with what it is off by in the median, for each number of rows."""
    cost = StepCost(sizes, machine, **options)
    off: dict[str, dict[int, list[float]]] = {}
    for step in steps:
        rows, _ = cost.rows(step.work)
        of_rows = off.setdefault(kind_of(step.work), {}).setdefault(rows, [])
        of_rows.append(step.device / cost.device(step.work))
    factors = {
        kind: {rows: float(np.median(some)) for rows, some in of_rows.items() if len(some) >= LIKE}
        for kind, of_rows in off.items()
    }
    return replace(machine, factors={kind: told for kind, told in factors.items() if told})


def errors(
    machine: Machine, sizes: Sizes, steps: Sequence[MeasuredStep], options: dict[str, Any]
) -> list[float]:
    """Return predicted over measured device time, less 1, of each step."""
    cost = StepCost(sizes, machine, **options)
    return [cost.device(step.work) / step.device - 1 for step in steps]


def _squares(
    machine: Machine, sizes: Sizes, steps: Sequence[MeasuredStep], options: dict[str, Any]
) -> float:
    return sum(error**2 for error in errors(machine, sizes, steps, options))
