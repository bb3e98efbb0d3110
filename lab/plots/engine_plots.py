"""Redraw the plot of docs/results/engine.md from the results of `tilewise bench engine`.

python lab/plots/engine_plots.py
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

# Colour and name of each engine's rows, in the order of bars.
ENGINES = {
    "tilewise": ("#1f77b4", "tilewise"),
    "vllm": ("#d62728", "vLLM"),
    "vllm, another run": ("#ff9896", "vLLM, another run of the same card"),
    "transformers_cb": ("#2ca02c", "transformers, continuous batching"),
    "transformers": ("#98df8a", "transformers, generate"),
    "llamacpp bf16": ("#9467bd", "llama.cpp, bf16"),
    "llamacpp f16": ("#c5b0d5", "llama.cpp, f16"),
}

Row = dict[str, Any]


def shares(document: dict[str, Any]) -> list[Row]:
    """Return the rows of fixed batches that have a share of the roof."""
    return [
        row
        for row in document["rows"]
        if row.get("workload") == "fixed" and "% of roof" in row and "ms a step" in row
    ]


def with_peer(rows: list[Row], other: list[Row], name: str) -> list[Row]:
    """Add another run's rows of an engine to shapes in which this run has none of it."""
    measured = {row["shape"] for row in rows if row["engine"] == name}
    wanted = {row["shape"] for row in rows} - measured
    return rows + [
        row | {"engine": f"{name}, another run"} for row in other if row["shape"] in wanted
    ]


def of_one_run(documents: list[list[Row]]) -> list[Row]:
    """Return the rows of all runs, of a shape that one run has with a peer those of it alone."""
    together: dict[str, list[Row]] = {}
    for rows in documents:
        for shape in {row["shape"] for row in rows}:
            own = [row for row in rows if row["shape"] == shape]
            if len({row["engine"] for row in own}) > 1:
                together[shape] = own
    alone = [row for rows in documents for row in rows if row["shape"] not in together]
    return [row for rows in together.values() for row in rows] + alone


def draw(rows: list[Row], title: str, path: Path) -> None:
    """Draw a panel for each shape: percent of the roof by batch, engines side by side.

    Raises:
        ValueError: there is no row to draw.
    """
    if not rows:
        raise ValueError("rows must hold a share of the roof, got none")
    best: dict[tuple[str, int, str], float] = {}
    for row in rows:  # of several numbers of threads the best
        key = (row["shape"], row["batch"], row["engine"])
        best[key] = max(best.get(key, 0.0), row["% of roof"])
    shapes = list(dict.fromkeys(shape for shape, _, _ in best))
    figure, panels = plt.subplots(
        1, len(shapes), figsize=(5.2 * len(shapes), 4.2), layout="constrained", squeeze=False
    )
    for axes, shape in zip(panels[0], shapes, strict=True):
        batches = sorted({batch for s, batch, _ in best if s == shape})
        engines = [e for e in ENGINES if any((shape, b, e) in best for b in batches)]
        width = 0.8 / len(engines)
        for index, engine in enumerate(engines):
            found = [(i, best[shape, b, engine]) for i, b in enumerate(batches)
                     if (shape, b, engine) in best]  # fmt: skip
            colour, label = ENGINES[engine]
            places = [at + (index - (len(engines) - 1) / 2) * width for at, _ in found]
            bars = axes.bar(
                places, [share for _, share in found], 0.92 * width, color=colour, label=label
            )
            axes.bar_label(bars, fmt="%.0f", fontsize=7)
        axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axes.set_xlabel("sequences at once")
        axes.set_ylabel("% of the roof, decode steps")
        axes.set_title(shape, fontsize=10)
        axes.grid(axis="y", alpha=0.3)
    handles = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def load(device: str) -> list[dict[str, Any]]:
    """Read the documents of a device, engine_DEVICE*.json, but for those of other caches."""
    paths = sorted(RESULTS.glob(f"engine_{device}*.json"))
    documents = [json.loads(path.read_text()) for path in paths]
    return [document for document in documents if document.get("kv_cache_dtype") is None]


def main() -> None:
    """Draw what there are results for."""
    other = shares(json.loads((RESULTS / "engine_vllm_h200.json").read_text()))
    for device in ("h200", "cpu"):
        documents = load(device)
        rows = of_one_run([shares(document) for document in documents])
        if not rows:
            print(f"engine_{device}*.json has no shares of the roof: not drawn")
            continue
        if device == "h200":
            rows = with_peer(rows, other, "vllm")
        first = documents[0]
        title = f"{first['device']}, {first['dtype']}, torch {first['torch']}"
        draw(rows, title, IMAGES / f"engine_{device}.png")


if __name__ == "__main__":
    main()
