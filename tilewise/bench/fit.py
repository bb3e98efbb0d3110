"""Weights of a profile, fitted to measured steps by least squares. No torch.

Each step's time is a weighted sum of what it reads, multiplies and counts (`cost.StepCost.parts`),
and the weights, none negative, are those with the least squares of relative errors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewise.cost import Machine, Sizes, StepCost, StepWork

__all__ = ["MeasuredStep", "errors", "fit", "fit_device", "least_squares"]

# Keys and values that a CPU's caches may hold from one step to the next: the least squares choose.
NEAR_BYTES = (0.0, *(float(mib << 20) for mib in (4, 8, 16, 32, 64)))
MOST_EFFICIENT = 100.0  # what is read from caches has no other limit; a weight of 0 would be none


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of the engine and what it took, in seconds.

    Attributes:
        scheduling, submitting: of the host, before the step.
        device: from the end of the step before, or from its own submission, to its end.
        updating: of the host, after it.
    """

    work: StepWork
    scheduling: float
    submitting: float
    device: float
    updating: float


def least_squares(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the weights, none negative, with the least squares of relative errors.

    Args:
        columns: for each step what the weights multiply.
        seconds: of each step, above 0.
    """
    y = np.asarray(seconds, dtype=float)
    a = np.asarray(columns, dtype=float) / y[:, None]
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a /= scale
    best, least = np.zeros(a.shape[1]), float(len(y))
    # The weights that are not 0 solve the problem without the others; eight are 255 problems.
    for count in range(1, a.shape[1] + 1):
        for some in map(list, itertools.combinations(range(a.shape[1]), count)):
            weights, *_ = np.linalg.lstsq(a[:, some], np.ones(len(y)), rcond=None)
            squares = float(((a[:, some] @ weights - 1) ** 2).sum())
            if weights.min() >= 0 and squares < least:
                best, least = np.zeros(a.shape[1]), squares
                best[some] = weights
    return [float(weight) for weight in best / scale]


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
    return fit_device(replace(start, **_fit_host(start, steps)), sizes, steps, **options)


def fit_device(
    start: Machine, sizes: Sizes, steps: Sequence[MeasuredStep], **options: Any
) -> Machine:
    """Return `start` with the efficiencies and times of a device that are nearest; see `fit`."""
    on_device = start.captures or start.overlaps_steps
    found = [
        _fit_device(replace(start, near_bytes=near), sizes, steps, overlaps, options)
        for overlaps in (True, False)
        for near in (NEAR_BYTES[:1] if on_device else NEAR_BYTES)
    ]
    return min(found, key=lambda m: _squares(m, sizes, steps, options))


def _fit_host(start: Machine, steps: Sequence[MeasuredStep]) -> dict[str, Any]:
    """Return the host's times; submitting is the device's time where nothing overlaps."""
    has_device = start.overlaps_steps
    before = [[1.0, s.work.sequences, s.work.tokens - s.work.sequences] for s in steps]
    captured = [s for s in steps if s.work.is_decode or not start.captures]
    seconds = [s.scheduling for s in steps]
    names = ("step_s", "step_sequence_s", "token_s")
    found: dict[str, Any] = dict(zip(names, least_squares(before, seconds), strict=True))
    if has_device:
        rows = [[1.0, s.work.sequences] for s in captured]
        fixed, each = least_squares(rows, [s.submitting for s in captured])
        found["step_s"] += fixed
        found["step_sequence_s"] += each
    after = least_squares([[1.0, s.work.samples] for s in steps], [s.updating for s in steps])
    return found | {"update_s": after[0], "update_sequence_s": after[1]}


def _fit_device(
    start: Machine,
    sizes: Sizes,
    steps: Sequence[MeasuredStep],
    overlaps: bool,
    options: dict[str, Any],
) -> Machine:
    cost = StepCost(sizes, start, **options)
    rows = [_columns(cost.parts(step.work), overlaps) for step in steps]
    names = list(rows[0])
    weights = least_squares([list(row.values()) for row in rows], [step.device for step in steps])
    found: dict[str, Any] = {"overlaps": overlaps}
    for name, weight in zip(names, weights, strict=True):
        is_time = name.endswith("_s")
        found[name] = weight if is_time else min(1 / weight if weight else np.inf, MOST_EFFICIENT)
    if overlaps:
        found["stream_efficiency"] = found["product_efficiency"]
    return replace(start, **found)


def _columns(parts: dict[str, float], overlaps: bool) -> dict[str, float]:
    """Return what the weights multiply; where two things overlap the longer one stays."""
    if not overlaps:
        return parts
    stream = parts.pop("stream_efficiency")
    parts["product_efficiency"] = max(stream, parts["product_efficiency"])
    keys, attention = parts["key_efficiency"], parts["attention_efficiency"]
    if attention:
        parts["key_efficiency"] = keys if keys > attention else 0.0
        parts["attention_efficiency"] = attention if attention >= keys else 0.0
        parts["far_efficiency"] = parts["far_efficiency"] if keys > attention else 0.0
    return parts


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
