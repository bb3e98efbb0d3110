"""Weights of a profile, fitted to measured steps by least squares. No torch.

Each step's time is a weighted sum of what it reads, multiplies and counts (`cost.StepCost.parts`),
and the weights, none negative, are those with the least squares of relative errors. On a GPU no
weight is less than what the peaks allow: nothing is read faster than memory, nor multiplied faster
than by the largest product. What other kernels for other numbers of rows leave unsaid is said by
factors (`Machine.factors`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewise.cost import Machine, Sizes, StepCost, StepWork
from tilewise.cost.step import kind_of

__all__ = [
    "MeasuredStep",
    "by_class",
    "errors",
    "fit",
    "fit_device",
    "least_squares",
    "of_device",
    "replayed",
]

# Keys and values that a CPU's caches may hold from one step to the next: the least squares choose.
NEAR_BYTES = (0.0, *(float(mib << 20) for mib in (4, 8, 16, 32, 64)))
MOST_EFFICIENT = 100.0  # what is read from caches has no other limit; a weight of 0 would be none
# Of a GPU no share is above this: peaks are measured, too.
MOST_OF_A_GPU = 1.05
ROUNDS = 6  # of telling which of two overlapping things is the longer one
PAUSED = 10  # times as long as usual: the host did something else
LIKE = 3  # steps of so many rows at least, so that their factor is one


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of the engine, and the seconds that it took.

    Attributes:
        work: the work of the step.
        scheduling, submitting: the host's seconds before the step.
        device: seconds from the end of the step before, or from the step's own submission if that
            is later, to its end.
        updating: the host's seconds after the step.
        is_alone: True if `device` is all that the device took and nothing else, as the whole step
            had been submitted before it began; of the host nothing was measured.
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
    """Return the weights, none below its bound in `least`, whose weighted sums have the least
    squares of relative errors.

    Args:
        columns: the quantities that the weights multiply, for each step one per weight.
        seconds: the seconds of each step, above 0.
        least: the lower bound of each weight; None is 0.
    """
    y = np.asarray(seconds, dtype=float)
    a = np.asarray(columns, dtype=float) / y[:, None]
    floor = np.zeros(a.shape[1]) if least is None else np.asarray(least, dtype=float)
    wanted = 1 - a @ floor
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a /= scale
    best, smallest = np.zeros(a.shape[1]), float(wanted @ wanted)
    known = np.flatnonzero(np.abs(a).sum(axis=0))
    # A row a weight tells as much as one a step: what all weights leave is left by each of them.
    q, r = np.linalg.qr(a)
    a, wanted, left = r, q.T @ wanted, smallest
    left -= float(wanted @ wanted)
    # The weights above their least solve the problem without the others; ten are 1023 problems.
    for count in range(1, len(known) + 1):
        for some in map(list, itertools.combinations(known, count)):
            weights, *_ = np.linalg.lstsq(a[:, some], wanted, rcond=None)
            squares = left + float(((a[:, some] @ weights - wanted) ** 2).sum())
            if weights.min() >= 0 and squares < smallest:
                best, smallest = np.zeros(a.shape[1]), squares
                best[some] = weights
    return [float(weight) for weight in floor + best / scale]


def fit(
    peaks: dict[str, Any], sizes: Sizes, steps: Sequence[MeasuredStep], **options: Any
) -> Machine:
    """Return the profile whose predictions are nearest to measured steps.

    Whether reads of memory and products overlap or add up, and how many keys and values a CPU's
    caches hold, is chosen so that the predictions are nearest.

    Args:
        peaks: the result of measure_peaks.
        sizes: the sizes of the model that ran.
        steps: the results of measure_steps.
        options: the options of StepCost, "dtype" among them; "captures" and "overlaps_steps" of
            Machine.
    """
    flags = {name: options.pop(name, False) for name in ("captures", "overlaps_steps")}
    start = Machine(**peaks, **flags)
    kernels = StepCost(sizes, start, **options).kernels
    return fit_device(replace(start, **_fit_host(start, kernels, steps)), sizes, steps, **options)


def fit_device(
    start: Machine, sizes: Sizes, steps: Sequence[MeasuredStep], **options: Any
) -> Machine:
    """Return `start` with the device's efficiencies and times that fit measured steps best; see
    `fit`.

    If some steps ran alone, which tells most of a device, the others are left out.
    """
    steps, start = of_device(steps), replace(start, factors={})
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


def of_device(steps: Sequence[MeasuredStep]) -> Sequence[MeasuredStep]:
    """Return the steps to which the device's times are fitted: those that ran alone, or all steps
    if none did."""
    return [step for step in steps if step.is_alone] or steps


def _fit_host(start: Machine, kernels: int, steps: Sequence[MeasuredStep]) -> dict[str, Any]:
    """Return the fitted times of the host, by field of `Machine`.

    Where steps do not overlap, the device's time of a step contains its submission.
    """
    steps = [step for step in steps if not step.is_alone]
    works = [step.work for step in steps]
    before = [
        [1.0, w.sequences, w.tokens - w.sequences, w.renews, w.renews * w.sequences] for w in works
    ]
    names = ("step_s", "step_sequence_s", "token_s", "renew_s", "renew_sequence_s")
    found: dict[str, Any] = dict(
        zip(names, _in_sum(before, [s.scheduling for s in steps]), strict=True)
    )
    if start.overlaps_steps:
        captured = [s for s in steps if s.work.is_decode or not start.captures]
        rows = [
            [1.0, s.work.sequences, s.work.renews, s.work.renews * s.work.sequences]
            for s in captured
        ]
        sent = _in_sum(rows, [s.submitting for s in captured])
        for name, seconds in zip((names[0], names[1], *names[3:]), sent, strict=True):
            found[name] += seconds
        found |= _fit_launches(start, kernels, [s for s in steps if not s.work.is_decode], sent)
    after = _in_sum(
        [[1.0, w.samples, w.renews * w.samples] for w in works], [s.updating for s in steps]
    )
    of_after = ("update_s", "update_sequence_s", "renewed_sequence_s")
    return found | dict(zip(of_after, after, strict=True))


def _fit_launches(
    start: Machine, kernels: int, steps: Sequence[MeasuredStep], sent: Sequence[float]
) -> dict[str, float]:
    """Return the launch times of steps that are not captured, fitted to measured steps.

    Args:
        start: the machine so far.
        kernels: the kernels of a step.
        sent: the times that captured steps take to submit as well, which are subtracted.
    """
    if not (start.captures and steps):
        return {}
    beyond = []
    for step in steps:
        work = step.work
        all_take = sent[0] + sent[1] * work.sequences
        all_take += work.renews * (sent[2] + sent[3] * work.sequences)
        beyond.append(max(step.submitting - all_take, step.submitting / 10))
    columns = [[kernels, s.work.sequences, s.work.tokens, s.work.logits > 0] for s in steps]
    names = ("launch_s", "launch_sequence_s", "launch_token_s", "launch_draw_s")
    return dict(zip(names, _in_sum(columns, beyond), strict=True))


def _in_sum(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the weights of `least_squares`, all times one factor that makes the sum of the
    predicted seconds that of the measured ones.

    Least squares of relative errors are nearer to the short ones of steps that scatter, and in a
    service all of the host's time adds up. Steps that took `PAUSED` times the predicted seconds do
    not count for the factor.
    """
    weights = least_squares(columns, seconds)
    told = np.asarray(columns, dtype=float) @ np.asarray(weights)
    taken = np.asarray(seconds, dtype=float)
    usual = taken < PAUSED * told
    if not usual.any():
        return weights
    return [weight * float(taken[usual].sum() / told[usual].sum()) for weight in weights]


def _fit_device(
    start: Machine,
    sizes: Sizes,
    steps: Sequence[MeasuredStep],
    options: dict[str, Any],
    *,
    bounded: bool,
) -> Machine:
    """Return `start` with the device's efficiencies and times whose predictions are nearest to the
    measured steps, for the way of overlapping that `start` says.

    Args:
        start: the machine, whose other fields stay.
        sizes: the sizes of the model that ran.
        steps: the measured steps.
        options: the options of StepCost.
        bounded: True if no efficiency may be above MOST_OF_A_GPU.
    """
    seconds = [step.device for step in steps]
    machine, tried = start, list[Machine]()
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
            found[name] = (
                weight if is_time else min(1 / weight if weight else np.inf, MOST_EFFICIENT)
            )
        nearer = replace(machine, **found)
        if nearer == machine:
            break
        machine = nearer
        tried.append(machine)
    return min(tried, key=lambda m: _squares(m, sizes, steps, options))


def _columns(parts: dict[str, float], machine: Machine) -> dict[str, float]:
    """Return the columns of a step for the fit; of two parts that overlap the shorter one is 0.

    Args:
        parts: the seconds of each part of the step at an efficiency of 1, by field of `Machine`.
        machine: the machine so far, by which the longer part is found.
    """
    if not machine.overlaps:
        return parts
    parts = dict(parts)
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
    """Return `machine` with factors: by how much steps with each number of rows took longer than
    predicted, in the median, for each kind of step.

    Only numbers of rows with at least `LIKE` measured steps get a factor.
    """
    cost = StepCost(sizes, machine, **options)
    off: dict[str, dict[int, list[float]]] = {}
    for step in steps:
        rows, _ = cost.rows(step.work)
        whole, part = cost.device(step.work), cost.by_rows(step.work)
        left = step.device - (whole - part)
        if part > whole / 2 and left > 0:
            off.setdefault(kind_of(step.work), {}).setdefault(rows, []).append(left / part)
    factors = {
        kind: {rows: float(np.median(some)) for rows, some in of_rows.items() if len(some) >= LIKE}
        for kind, of_rows in off.items()
    }
    return replace(machine, factors={kind: told for kind, told in factors.items() if told})


def replayed(
    cost: StepCost, steps: Sequence[MeasuredStep], *, overlap: bool
) -> list[tuple[MeasuredStep, float]]:
    """Return each step of a batch with the seconds that `cost` predicts for its `device`.

    `MeasuredStep.device` also has the time in which a device that is short of work waits for the
    host, so the batch is served in virtual time, as in `engine.virtual`.

    Args:
        cost: the cost model.
        steps: the steps of one batch, in order.
        overlap: True if a step is submitted while one runs.
    """
    now = free = ended = 0.0
    unfinished: deque[tuple[MeasuredStep, float, float, float]] = deque()
    found, coming = list[tuple[MeasuredStep, float]](), deque(steps)
    while coming or unfinished:
        while coming and len(unfinished) < 1 + overlap:
            step = coming.popleft()
            seconds, began = cost(step.work), now
            now += seconds.before
            begin = max(now, free)
            # What is submitted where nothing overlaps is part of the step, as it was measured.
            now += seconds.launching
            free = max(begin + seconds.device, now)
            unfinished.append((step, began + seconds.before, free, seconds.after))
        step, began, end, after = unfinished.popleft()
        now = max(now, end)
        found.append((step, now - max(began, ended)))
        ended = now
        now += after
    return found


def class_of(work: StepWork) -> str:
    """Return the class under which the table of `by_class` counts a step: its kind, and a range of
    its rows or tokens."""
    if not work.pairs:
        return "decode, " + _range(work.sequences, (2, 8, 16, 32, 64, 128, 192)) + " rows"
    kind = "prompts beside others" if work.tokens > work.sequences > 1 else "a prompt alone"
    return f"{kind}, " + _range(work.tokens, (256, 1024)) + " tokens"


def _range(number: int, edges: Sequence[int]) -> str:
    for place, edge in enumerate(edges):
        if number <= edge:
            return f"{edges[place - 1] + 1 if place else 1:,} to {edge:,}"
    return f"over {edges[-1]:,}"


def by_class(found: Sequence[tuple[MeasuredStep, float]]) -> list[dict[str, Any]]:
    """Return a row for each class of steps: how many, how long, and how far off predictions are.

    Args:
        found: pairs of a step and the predicted seconds of its `device`.
    """
    classes: dict[str, list[tuple[float, float]]] = {}
    for step, seconds in found:
        classes.setdefault(class_of(step.work), []).append((step.device, seconds))
    rows = []
    for name, some in sorted(classes.items()):
        off = sorted(abs(b / a - 1) for a, b in some)
        measured, predicted = (sum(pair[i] for pair in some) for i in (0, 1))
        rows.append(
            {
                "steps": name,
                "count": len(some),
                "measured ms": 1e3 * measured / len(some),
                "error of the sum %": 100 * (predicted / measured - 1),
                "median error %": 100 * off[len(off) // 2],
                "p90 error %": 100 * off[len(off) * 9 // 10],
            }
        )
    return rows


def errors(
    machine: Machine, sizes: Sizes, steps: Sequence[MeasuredStep], options: dict[str, Any]
) -> list[float]:
    """Return the relative error of each step's predicted device time: predicted over measured,
    less 1."""
    cost = StepCost(sizes, machine, **options)
    return [cost.device(step.work) / step.device - 1 for step in steps]


def _squares(
    machine: Machine, sizes: Sizes, steps: Sequence[MeasuredStep], options: dict[str, Any]
) -> float:
    return sum(error**2 for error in errors(machine, sizes, steps, options))
