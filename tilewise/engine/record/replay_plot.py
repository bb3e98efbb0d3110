"""Draw a replayed trace: owners of blocks over time, sharing, copies and evictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.engine.record.replay import KNOWN, NOBODY, PENDING, SEVERAL, Timeline

__all__ = ["draw", "summary"]

MOST_ROWS = 600  # of the block map; with more blocks a row stands for one of several
MOST_NAMES = 12  # requests in the legend
NUM_BARS = 120
STATES = {
    SEVERAL: ("#303030", "shared"),
    PENDING: ("#a9a9a9", "kept for a running step"),
    KNOWN: ("#d9e8d3", "free, in the prefix cache"),
    NOBODY: ("#ffffff", "free"),
}
ALONE = "#4e79a7"
HAPPENED = {
    "hit": ("#59a14f", "blocks found in the prefix cache"),
    "copy": ("#f28e2b", "blocks copied on write"),
    "evict": ("#9c755f", "cached blocks evicted"),
    "preempt": ("#e15759", "preemptions"),
    "swap_out": ("#b07aa1", "blocks swapped out"),
    "swap_in": ("#76b7b2", "blocks swapped in"),
}


def draw(timeline: Timeline, path: str | Path) -> None:
    """Plot a replay over time: use of the cache, its blocks, the queue, and events.

    The file has the format of `path`'s suffix, PNG without one.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("replay needs matplotlib: pip install 'tilewise[plot]'") from error
    figure = Figure(figsize=(12, 11), layout="constrained")
    occupancy, blocks, queue, events = figure.subplots(
        4, 1, sharex=True, height_ratios=[2, 4, 1.4, 1.4]
    )
    _occupancy(occupancy, timeline)
    _blocks(blocks, timeline)
    _queue(queue, timeline)
    _events(events, timeline)
    events.set_xlabel("seconds")
    events.set_xlim(0, max(float(timeline.times[-1]), 1e-9))
    figure.savefig(path, dpi=120)


def summary(timeline: Timeline) -> str:
    """Return one line with the numbers of requests, tokens and seconds, of blocks in use and shared
    at most, and of each kind of event that happened."""
    used = _used(timeline)
    parts = [
        f"{len(timeline.names)} requests",
        f"{timeline.num_tokens.sum():,} tokens in {timeline.times[-1]:.2f} s",
        f"{used.max()} of {len(timeline.owners)} blocks at most",
        f"{(timeline.owners == SEVERAL).sum(0).max()} shared at most",
        *(f"{v.sum()} {HAPPENED[k][1]}" for k, v in timeline.happened.items() if v.any()),
    ]
    return ", ".join(parts)


def _used(timeline: Timeline) -> NDArray[np.int64]:
    owners = timeline.owners
    used: NDArray[np.int64] = ((owners != NOBODY) & (owners != KNOWN)).sum(0)
    return used


def _occupancy(axes: Any, timeline: Timeline) -> None:
    owners = timeline.owners
    layers = {"of one sequence": (ALONE, (owners >= 0).sum(0))}
    for state in (SEVERAL, PENDING, KNOWN):
        colour, label = STATES[state]
        layers[label] = colour, (owners == state).sum(0)
    axes.stackplot(
        timeline.times,
        *(counts for _, counts in layers.values()),
        colors=[colour for colour, _ in layers.values()],
        labels=list(layers),
        step="post",
    )
    axes.set(ylim=(0, len(owners)), ylabel="blocks", title="What the blocks are used for")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _blocks(axes: Any, timeline: Timeline) -> None:
    owners = timeline.owners
    stride = -(-len(owners) // MOST_ROWS)
    shown = owners[::stride]
    picture = np.zeros((*shown.shape, 3))
    for state, (colour, _) in STATES.items():
        picture[shown == state] = _rgb(colour)
    requests = np.unique(shown[shown >= 0])
    for request in requests:
        picture[shown == request] = _colour(int(request))
    axes.imshow(
        picture,
        aspect="auto",
        interpolation="nearest",
        origin="lower",
        extent=(0, max(float(timeline.times[-1]), 1e-9), 0, len(owners)),
    )
    every = "" if stride == 1 else f", every {stride}th"
    axes.set(ylabel=f"block{every}", title="Who holds which block (a colour is a request)")
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=_colour(int(request)), label=timeline.names[request])
        for request in requests[:MOST_NAMES]
    ]
    if len(requests) > MOST_NAMES:
        patches.append(Patch(facecolor="none", label=f"and {len(requests) - MOST_NAMES} more"))
    patches += [
        Patch(facecolor=colour, edgecolor="0.6", label=label) for colour, label in STATES.values()
    ]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _queue(axes: Any, timeline: Timeline) -> None:
    axes.step(timeline.times, timeline.waiting, where="post", color="#e15759", label="waiting")
    axes.set(ylim=(0, max(1, int(timeline.waiting.max()) * 1.1)), ylabel="samples")
    edges, tokens = _binned(timeline, timeline.num_tokens)
    width = edges[1] - edges[0]
    rate = axes.twinx()
    rate.bar(edges[:-1], tokens / width, width, align="edge", color="#c6d8ea", zorder=0)
    rate.set(ylabel="tokens/s")
    axes.set_zorder(rate.get_zorder() + 1)
    axes.patch.set_visible(False)
    axes.set_title("Samples that wait (line), tokens computed (bars)")


def _events(axes: Any, timeline: Timeline) -> None:
    bottom = np.zeros(NUM_BARS)
    for kind, (colour, label) in HAPPENED.items():
        counts = timeline.happened.get(kind)
        if counts is None or not counts.any():
            continue
        edges, binned = _binned(timeline, counts)
        width = edges[1] - edges[0]
        axes.bar(
            edges[:-1],
            binned,
            width,
            bottom=bottom,
            align="edge",
            color=colour,
            label=f"{label} ({counts.sum()})",
        )
        bottom += binned
    axes.set(ylabel="count", title="What happened to them", ylim=(0, max(1.0, bottom.max() * 1.1)))
    if bottom.any():
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _binned(
    timeline: Timeline, counts: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the edges of NUM_BARS bars over the time, and the sum of `counts` in each bar."""
    end = max(float(timeline.times[-1]), 1e-9)
    sums, edges = np.histogram(timeline.times, NUM_BARS, (0, end), weights=counts)
    return edges, sums


def _colour(request: int) -> tuple[float, float, float]:
    """Return a colour for a request; neighbours differ, by the golden angle of hues."""
    from matplotlib.colors import hsv_to_rgb

    hue = (request * 0.61803398875) % 1.0
    red, green, blue = hsv_to_rgb((hue, 0.45 + 0.2 * (request % 3), 0.9 - 0.15 * (request % 2)))
    return float(red), float(green), float(blue)


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
