"""Redraw the plots of docs/guide/training.md from the results of `tilewise bench train`.

python lab/plots/training_plots.py

It reads all of lab/results/train_h200*.json, and draws nothing where there is none. The later
file's row replaces an earlier one of the same shape, way and length.
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
# Colour and name of each way, in the order of bars.
WAYS = {
    "eager": ("#7f7f7f", "transformers, eager"),
    "sdpa": ("#ff7f0e", "transformers, sdpa"),
    "tilewise": ("#9ecae1", 'transformers, "tilewise"'),
    "sdpa-compiled": ("#ffbb78", "transformers, sdpa, compiled"),
    "tilewise-compiled": ("#6baed6", 'transformers, "tilewise", compiled'),
    "ours": ("#1f77b4", "examples/, rows or texts"),
    "ours-packed": ("#08519c", "examples/, packed documents"),
}
Row = dict[str, Any]


def load(folder: Path) -> list[Row]:
    """Return the rows of all documents of `folder`, one of each shape, way, N and B."""
    rows: dict[tuple[Any, ...], Row] = {}
    for path in sorted(folder.glob("train_h200*.json")):
        for row in json.loads(path.read_text())["rows"]:
            rows[tuple(row[name] for name in ("shape", "way", "N", "B"))] = row
    return list(rows.values())


def draw_rates(rows: list[Row], path: Path) -> None:
    """Draw each shape's tokens a second at its shortest length, ways side by side.

    Raises:
        ValueError: there is no row with a rate.
    """
    measured = [row for row in rows if "tokens/s" in row]
    if not measured:
        raise ValueError("rows must hold a rate, got none")
    shapes = list(dict.fromkeys(row["shape"] for row in measured))
    figure, panels = plt.subplots(
        1, len(shapes), figsize=(3.4 * len(shapes) + 1, 3.6), layout="constrained", squeeze=False
    )
    for axes, shape in zip(panels[0], shapes, strict=True):
        length = min(row["N"] for row in measured if row["shape"] == shape)
        of_shape = {r["way"]: r for r in measured if (r["shape"], r["N"]) == (shape, length)}
        ways = [way for way in WAYS if way in of_shape]
        for place, way in enumerate(ways):
            row = of_shape[way]
            axes.bar(place, row["tokens/s"] / 1e3, color=WAYS[way][0])
            mfu = f"\n{row['MFU']:.0%}" if "MFU" in row else ""
            axes.text(place, row["tokens/s"] / 1e3, f"{row['tokens/s'] / 1e3:.0f}{mfu}",
                      ha="center", va="bottom", fontsize=7)  # fmt: skip
        axes.set_xticks(range(len(ways)), [WAYS[way][1] for way in ways], rotation=60, fontsize=7,
                        ha="right", rotation_mode="anchor")  # fmt: skip
        axes.set_ylim(0, 1.2 * max(of_shape[way]["tokens/s"] for way in ways) / 1e3)
        axes.set_title(f"{shape}, N {length:,}", fontsize=9)
        axes.set_ylabel("thousand tokens/s; % is MFU", fontsize=8)
    figure.suptitle(_title(measured), fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_lengths(rows: list[Row], path: Path) -> None:
    """Draw tokens a second and peak memory over N: linear axes above, logarithmic ones below.

    Raises:
        ValueError: no shape has rows of several lengths.
    """
    lengths = {
        shape: {r["N"] for r in rows if r["shape"] == shape} for r in rows for shape in [r["shape"]]
    }
    several = [shape for shape, found in lengths.items() if len(found) > 1]
    if not several:
        raise ValueError("rows must hold several lengths of a shape, got none")
    shape = "gpt2-small" if "gpt2-small" in several else several[0]
    figure, panels = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
    for is_log, pair in zip((False, True), panels, strict=True):
        for axes, value, label in zip(
            pair, ("tokens/s", "GiB"), ("tokens/s", "peak memory, GiB"), strict=True
        ):
            for way, (colour, name) in WAYS.items():
                of_way = sorted(
                    (r for r in rows if (r["shape"], r["way"]) == (shape, way)),
                    key=lambda r: r["N"],
                )
                shown = [row for row in of_way if value in row]
                lost = [row["N"] for row in of_way if row.get("error") == "out of memory"]
                if shown:
                    axes.plot([r["N"] for r in shown], [r[value] for r in shown], "o-",
                              color=colour, label=name, markersize=4)  # fmt: skip
                if lost:  # at the lower edge, whatever the axis
                    axes.plot(lost, [0.03] * len(lost), "x", color=colour,
                              label=None if shown else name, markersize=6,
                              transform=axes.get_xaxis_transform())  # fmt: skip
            if is_log:
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
            axes.set(xlabel="N, tokens of a sequence (x: out of memory)", ylabel=label)
            axes.grid(alpha=0.3)
    panels[0][0].legend(fontsize=7)
    figure.suptitle(f"{shape}; {_title(rows)}", fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_losses(rows: list[Row], path: Path) -> None:
    """Draw the losses of the first steps: the ways must lie on one another.

    Raises:
        ValueError: there are no losses.
    """
    measured = [row for row in rows if len(row.get("losses", ())) > 1]
    if not measured:
        raise ValueError("rows must hold losses, got none")
    shapes = list(dict.fromkeys(row["shape"] for row in measured))
    figure, panels = plt.subplots(
        1, len(shapes), figsize=(3.6 * len(shapes), 3.4), layout="constrained", squeeze=False
    )
    for axes, shape in zip(panels[0], shapes, strict=True):
        length = min(row["N"] for row in measured if row["shape"] == shape)
        # Packed documents are other sequences: their losses are others.
        of_shape = [row for row in measured if (row["shape"], row["N"]) == (shape, length)]
        shown = [row for row in of_shape if row["way"] != "ours-packed"]
        for place, row in enumerate(shown):  # thinner and thinner, since they lie on one another
            colour, name = WAYS[row["way"]]
            axes.plot(range(1, len(row["losses"]) + 1), row["losses"], color=colour, label=name,
                      linewidth=1.5 + 2 * (len(shown) - 1 - place))  # fmt: skip
        axes.set_title(f"{shape}, N {length:,}", fontsize=9)
        axes.set(xlabel="step", ylabel="loss, nats a token")
        axes.legend(fontsize=6)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _title(rows: list[Row]) -> str:
    named = next((row for row in rows if "name" in row), {})
    return f"{named.get('name', '')}, bfloat16, torch {named.get('torch', '')}"


def main() -> None:
    rows = load(RESULTS)
    if not rows:
        print("lab/results holds no train_h200*.json: nothing is drawn")
        return
    for draw, name in (
        (draw_rates, "training_h200.png"),
        (draw_lengths, "training_over_n_h200.png"),
        (draw_losses, "training_losses_h200.png"),
    ):
        try:
            draw(rows, IMAGES / name)
        except ValueError as error:
            print(f"{name} is not drawn: {error}")


if __name__ == "__main__":
    main()
