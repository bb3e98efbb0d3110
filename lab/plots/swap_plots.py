"""Redraw the plot of swapping against recomputing in docs/design/engine.md from its result.

python lab/plots/swap_plots.py
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
IMAGES, RESULTS = ROOT / "docs" / "images", ROOT / "lab" / "results"
WAYS = {
    "recompute": ("black", "o-", "computed again"),
    "swap": ("#d62728", "s-", "swapped"),
    "auto": ("#1f77b4", "^--", "auto, as it chose then"),
}


def crossings(rows: list[dict[str, Any]]) -> list[float]:
    """Return the lengths of context at which the better way changes, between measured ones."""
    found = []
    gaps = [(row["length"], row["swap"]["s"] - row["recompute"]["s"]) for row in rows]
    for (short, before), (long, after) in itertools.pairwise(gaps):
        if before * after < 0:
            found.append(short + (long - short) * before / (before - after))
    return found


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw milliseconds by length of context, and each way beside the better one."""
    rows = document["rows"]
    lengths = [row["length"] for row in rows]
    better = [min(row["recompute"]["s"], row["swap"]["s"]) for row in rows]
    figure, (times, shares) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for way, (colour, style, label) in WAYS.items():
        middle = [row[way]["s"] for row in rows]
        spread = [
            [1e3 * (row[way]["s"] - row[way]["least"]) for row in rows],
            [1e3 * (row[way]["most"] - row[way]["s"]) for row in rows],
        ]
        times.errorbar(
            lengths, [1e3 * s for s in middle], spread, fmt=style, ms=4, capsize=2, color=colour,
            label=label,
        )  # fmt: skip
        more = [100 * (s / best - 1) for s, best in zip(middle, better, strict=True)]
        shares.plot(lengths, more, style, ms=4, color=colour, label=label)
    for length in crossings(rows):
        shares.axvline(length, color="#888888", ls=":")
        shares.annotate(f" {length:,.0f}", (length, 12), fontsize=8, color="#555555")
    shares.axhline(5, color="#2ca02c", ls=":", label="5 %, asked of auto")
    for axes in (times, shares):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths], fontsize=8)
        axes.set_xlabel("tokens of the sequence that is preempted")
        axes.grid(alpha=0.3)
    handles, labels = shares.get_legend_handles_labels()
    figure.legend(handles, labels, ncols=4, loc="outside lower center", frameon=False)
    times.set_yscale("log")
    times.set_ylabel(f"milliseconds, {document['new tokens']} new tokens included")
    shares.set_ylabel("% more than the better of the two")
    figure.suptitle(
        f"{document['shape']}, {document['device']}, link {document['link_gb_per_s']:.0f} GB/s"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Draw it."""
    draw(json.loads((RESULTS / "swap_h200.json").read_text()), IMAGES / "swap_h200.png")


if __name__ == "__main__":
    main()
