"""Redraw the plot of docs/results/paged-memory.md from the result of `tilewise bench waste`.

python lab/plots/memory_plot.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
IMAGES, RESULTS = ROOT / "docs" / "images", ROOT / "lab" / "results"
PARTS = {
    "tokens": ("#2ca02c", "tokens"),
    "reserved": ("#98df8a", "reserved for tokens to come"),
    "internal": ("#ff7f0e", "internal fragmentation"),
    "external": ("#c7c7c7", "external fragmentation and free"),
}
SHOWN = [("max", None), ("pow2", None), ("oracle", None), ("paged", 16)]
LABELS = [
    "contiguous,\nlongest",
    "contiguous,\nnext 2ⁿ",
    "contiguous,\noracle",
    "paged,\nblocks of 16",
]


def _bars(axes: Any, trace: dict[str, Any]) -> None:
    """What the memory is used for, allocator by allocator."""
    rows = [next(r for r in trace["rows"] if (r["allocator"], r["block"]) == key) for key in SHOWN]
    bottom = [0.0] * len(rows)
    for part, (colour, label) in PARTS.items():
        heights = [row[part] for row in rows]
        axes.bar(range(len(rows)), heights, bottom=bottom, color=colour, label=label, width=0.7)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    for place, row in enumerate(rows):
        axes.text(place, row["tokens"] / 2, f"{row['tokens']:.0f} %", ha="center", va="center")
        axes.text(place, 101.5, f"batch {row['batch']:.1f}", ha="center", fontsize=8)
    axes.set_xticks(range(len(rows)), LABELS, fontsize=8)
    axes.set_ylim(0, 108)
    axes.set_ylabel("cache memory, %")
    axes.set_title("trace: " + trace["trace"].removeprefix("AzureLLMInferenceTrace_"))


def _sizes(axes: Any, traces: list[dict[str, Any]]) -> None:
    """How much memory holds tokens, block size by block size."""
    for trace, colour in zip(traces, ("#1f77b4", "#d62728"), strict=True):
        name = trace["trace"].removeprefix("AzureLLMInferenceTrace_")
        paged = [row for row in trace["rows"] if row["allocator"] == "paged"]
        axes.plot(
            [row["block"] for row in paged], [row["tokens"] for row in paged], "o-", color=colour,
            label=f"{name}, paged",
        )  # fmt: skip
        oracle = next(row for row in trace["rows"] if row["allocator"] == "oracle")
        axes.axhline(oracle["tokens"], color=colour, ls=":", label=f"{name}, contiguous, oracle")
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**i for i in range(9)], [str(2**i) for i in range(9)])
    axes.set_xlabel("tokens of a block")
    axes.set_ylabel("cache memory that holds tokens, %")
    axes.set_ylim(40, 100)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower left")
    axes.set_title("block size")


def main() -> None:
    """Draw both traces and the sweep of block sizes side by side."""
    document = json.loads((RESULTS / "waste.json").read_text())
    figure, axes = plt.subplots(1, 3, figsize=(13.5, 4.6))
    for part, trace in zip(axes[:2], document["traces"], strict=True):
        _bars(part, trace)
    _sizes(axes[2], document["traces"])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=4, loc="lower left", frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(IMAGES / "paged_memory.png", dpi=110)


if __name__ == "__main__":
    main()
