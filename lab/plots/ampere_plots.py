"""Redraw the plot of docs/design/ampere.md from the committed results.

python lab/plots/ampere_plots.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
PEER = "FlashAttention-2"
ARCHITECTURES = {"sm80": ("#1f77b4", "as sm_80"), "sm89": ("#ff7f0e", "as sm_89")}


def main() -> None:
    figure, panels = plt.subplots(1, 2, figsize=(12, 7.5), layout="constrained", sharey=True)
    for shift, (arch, (colour, label)) in enumerate(ARCHITECTURES.items()):
        text = (ROOT / f"lab/results/ampere_{arch}_h200.json").read_text()
        found = {name: row for name, row in json.loads(text)["TFLOP/s"].items()
                 if PEER in row["forward"]}  # fmt: skip
        for axes, part in zip(panels, ("forward", "backward"), strict=True):
            times = [row[part]["tilewise"] / row[part][PEER] for row in found.values()]
            places = [place + 0.4 * shift for place in range(len(times))]
            axes.barh(places, times, height=0.38, color=colour, label=label)
            axes.set_yticks([place + 0.2 for place in range(len(times))], list(found), fontsize=8)
            axes.set_title(part)
    for axes in panels:
        axes.axvline(1.0, color="black", linewidth=1)
        axes.set_xlabel("times FlashAttention-2's speed, in one run")
        axes.set_xlim(0, 1.8)
    panels[0].invert_yaxis()
    panels[1].legend(loc="lower right")
    figure.suptitle("attention by mma.sync, code of other architectures run on an H200")
    figure.savefig(ROOT / "docs/images/ampere_h200.png", dpi=110)


if __name__ == "__main__":
    main()
