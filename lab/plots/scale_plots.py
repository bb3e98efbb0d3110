"""Redraw the plot of docs/guide/several-gpus.md from the results of `tilewise simulate`.

python lab/plots/scale_plots.py
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
# Colour of each number of GPUs that share a model, line of each number of GPUs in all.
PARALLEL = {2: "#1f77b4", 4: "#d62728", 8: "#2ca02c"}
GPUS = {8: ":", 64: "-", 1000: "--"}
ROUTING = {"prefix": "#2ca02c", "round-robin": "#d62728"}

Row = dict[str, Any]


def load(kind: str) -> list[Row]:
    """Return the rows of all committed results of a kind."""
    rows: list[Row] = []
    for gpus in GPUS:
        rows += json.loads((RESULTS / f"scale_{kind}_{gpus}.json").read_text())["rows"]
    return rows


def curve(axes: Any, rows: list[Row], value: str, **style: Any) -> None:
    """Draw a value against the requests that came for each GPU a second."""
    rows = sorted(rows, key=lambda row: row["rate"] / row["gpus"])
    axes.plot(
        [row["rate"] / row["gpus"] for row in rows],
        [row[value] for row in rows],
        **{"marker": "o", "ms": 4, **style},
    )


def draw(path: Path) -> None:
    """Chats by the GPUs that share a model, and long prompts by their routing."""
    figure, panels = plt.subplots(1, 3, figsize=(13.5, 4.6), layout="constrained")
    chats, long = load("chat"), load("long")
    for axes, value, title, top in (
        (panels[0], "tpot p50", "chats: between tokens, median", 0.08),
        (panels[1], "ttft p90", "chats: first token, p90", 1.5),
    ):
        for parallel, colour in PARALLEL.items():
            for gpus, line in GPUS.items():
                mine = [r for r in chats if (r["parallel"], r["gpus"]) == (parallel, gpus)]
                if mine:
                    label = f"{gpus:,} GPUs, {parallel} a replica"
                    curve(axes, mine, value, color=colour, ls=line, label=label)
        axes.set_title(title)
        axes.set_ylim(0, top)
    panels[0].legend(fontsize=7)
    for routing, colour in ROUTING.items():
        for gpus, line in GPUS.items():
            mine = [r for r in long if (r["routing"], r["gpus"]) == (routing, gpus)]
            label = f"{gpus:,} GPUs, {routing}"
            style = {"marker": "*", "ms": 10} if len(mine) == 1 else {}
            curve(panels[2], mine, "ttft p90", color=colour, ls=line, label=label, **style)
    panels[2].set_title("long prompts, 4 GPUs a replica: first token, p90")
    panels[2].set_yscale("log")
    panels[2].legend(fontsize=7, loc="lower right")
    for axes in panels:
        axes.set_xlabel("requests a second for each GPU")
        axes.set_ylabel("seconds")
        axes.grid(alpha=0.3)
    figure.suptitle("Llama 3.1 70B on H200s, in virtual time; sums between GPUs are not measured")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(IMAGES / "scale.png")
