"""The picture of a measured load: what users waited for, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise.bench.serving.client import Answer

__all__ = ["draw"]

MEASURED, PREDICTED, FAILED = "#4e79a7", "#f28e2b", "#e15759"
KEYS = ("#4e79a7", "#59a14f", "#b07aa1", "#9c755f", "#edc948", "#76b7b2")


def draw(answers: Sequence[Answer], virtual: Sequence[Any], path: str) -> None:
    """Draw shares of requests by TTFT and by TPOT, TTFT over time, and tokens a second.

    Args:
        answers: the answers that were measured.
        virtual: the timings of the same requests in virtual time (`engine.virtual.Timing`); may be
            empty.
        path: the path of the file, PNG or the format of its ending.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'tilewise[plot]'") from error
    good = [a for a in answers if a.error is None and a.times]
    started = min(a.begun for a in answers)
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    (first, between), (over_time, rate) = figure.subplots(2, 2)
    done = [t for t in virtual if not t.refusal]
    _shares(first, [a.times[0] - a.begun for a in good], "measured", MEASURED)
    _shares(
        between,
        [
            1e3 * (a.times[-1] - a.times[0]) / (a.num_tokens / a.samples - 1)
            for a in good
            if a.num_tokens > a.samples
        ],
        "measured",
        MEASURED,
    )
    if done:
        _shares(first, [t.first_token - t.arrival for t in done], "simulated", PREDICTED)
        _shares(
            between,
            [
                1e3 * (t.last_token - t.first_token) / (t.output_tokens / t.samples - 1)
                for t in done
                if t.output_tokens > t.samples
            ],
            "simulated",
            PREDICTED,
        )
    first.set_xlabel("seconds to the first token")
    between.set_xlabel("milliseconds between two tokens of a sample (mean)")
    for axes in (first, between):
        axes.set_ylabel("share of requests")
        axes.set_ylim(0, 1.02)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    _over_time(over_time, good, [a for a in answers if a not in good], started)
    _rate(rate, good, done, started)
    figure.savefig(path, dpi=110)


def _shares(axes: Any, values: list[float], label: str, colour: str) -> None:
    ranked = sorted(values)
    shares = [(i + 1) / len(ranked) for i in range(len(ranked))]
    axes.step([0.0, *ranked], [0.0, *shares], where="post", label=label, color=colour)


def _over_time(axes: Any, good: Sequence[Answer], failed: Sequence[Answer], started: float) -> None:
    names = sorted({a.key for a in good})
    for i, name in enumerate(names):
        mine = [a for a in good if a.key == name]
        axes.scatter(
            [a.begun - started for a in mine],
            [a.times[0] - a.begun for a in mine],
            s=12,
            color=KEYS[i % len(KEYS)],
            label=f"key {i + 1}",  # never the key itself
        )
    if failed:
        axes.scatter(
            [a.begun - started for a in failed],
            [0.0] * len(failed),
            s=24,
            marker="x",
            color=FAILED,
            label="failed",
        )
    if len(names) > 1 or failed:
        axes.legend(loc="upper left")
    axes.set_xlabel("arrival, seconds")
    axes.set_ylabel("seconds to the first token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _rate(axes: Any, good: Sequence[Answer], done: Sequence[Any], started: float) -> None:
    """Draw, over time, the tokens that have come and the number of requests under way.

    Args:
        axes: the axes of matplotlib.
        good: the answers without an error.
        done: the timings in virtual time, which are drawn beside them.
        started: the time of the first request.
    """
    events = sorted((when - started, a.num_tokens / len(a.times)) for a in good for when in a.times)
    made, so_far = [0.0], 0.0
    for _, tokens in events:
        so_far += tokens
        made.append(so_far)
    axes.plot([0.0, *(when for when, _ in events)], made, color=MEASURED, label="tokens, measured")
    if done:
        ends = sorted((t.last_token, t.output_tokens) for t in done)
        total, steps = 0, [0]
        for _, tokens in ends:
            total += tokens
            steps.append(total)
        axes.step(
            [0.0, *(when for when, _ in ends)],
            steps,
            where="post",
            color=PREDICTED,
            label="tokens of ended requests, simulated",
        )
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens so far")
    axes.grid(alpha=0.3)
    beside = axes.twinx()
    changes = sorted(
        [(a.begun - started, 1) for a in good] + [(a.ended - started, -1) for a in good]
    )
    live, counts = 0, []
    for _, change in changes:
        live += change
        counts.append(live)
    beside.step(
        [when for when, _ in changes],
        counts,
        where="post",
        color="#888888",
        linewidth=0.8,
        label="requests under way",
    )
    beside.set_ylabel("requests under way")
    beside.set_ylim(bottom=0)
    lines = [*axes.get_lines(), *beside.get_lines()]
    axes.legend(lines, [line.get_label() for line in lines], loc="upper left", fontsize="small")
