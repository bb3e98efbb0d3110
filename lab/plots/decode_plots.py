"""Redraw the plots of docs/design/decode.md from the committed result of `lab/paged.py`.

python lab/plots/decode_plots.py
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
PEERS = {
    "tilewise, planned": ("#1f77b4", "tilewise, with a plan"),
    "tilewise": ("#aec7e8", "tilewise"),
    "fa3": ("#d62728", "FlashAttention-3, same blocks"),
    "sdpa_contiguous": ("#2ca02c", "SDPA, contiguous keys"),
    "flex_contiguous": ("#9467bd", "FlexAttention, contiguous keys"),
}


def _draw_speed(axes: Any, rows: list[dict[str, Any]], ceiling: float) -> None:
    """TB/s of every case that memory decides, peers side by side."""
    rows = [row for row in rows if row["table"] == "decode" and "TB/s" in row["asked"]]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    peers = [peer for peer in PEERS if any(row["peer"] == peer for row in rows)]
    height = 0.8 / len(peers)
    for index, peer in enumerate(peers):
        mine = {row["case"]: row["TB/s"] for row in rows if row["peer"] == peer}
        places = [at + index * height for at, case in enumerate(cases) if case in mine]
        colour, label = PEERS[peer]
        axes.barh(places, list(mine.values()), height=0.9 * height, color=colour, label=label)
    axes.axvline(ceiling, color="black", linewidth=0.8, linestyle="--")
    axes.set_yticks([at + 0.4 - height / 2 for at in range(len(cases))], cases, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("TB/s of keys and values (dashed: the fastest read)")
    axes.set_title("decode, bfloat16, D 128, block 16", fontsize=10)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=len(peers))


def _draw_overhead(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Time over that of the same kernel on one block a sequence, by block size."""
    for peer in ("tilewise", "tilewise, planned"):
        times = {
            row["block_size"]: row["us"]
            for row in rows
            if row["table"] == "blocks" and row["peer"] == peer and "us" in row
        }
        if not times:
            continue
        whole = times.pop(max(times))
        sizes = sorted(times)
        colour, label = PEERS[peer]
        overheads = [100 * (times[size] / whole - 1) for size in sizes]
        axes.plot(sizes, overheads, marker="o", color=colour, label=label)
    axes.axhline(5, color="black", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("tokens of a block")
    axes.set_ylabel("% over contiguous keys, same kernel")
    axes.set_title("what paging costs: 64 x 4,096 keys, 32/8 heads", fontsize=10)
    axes.legend(fontsize=8)


def draw(result: Path, picture: Path) -> None:
    """Draw both panels of one result."""
    document = json.loads(result.read_text())
    rows = [row for row in document["rows"] if "us" in row]
    figure, panels = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    _draw_speed(panels[0], rows, document["ceilings"]["read_bytes"] / 1e12)
    _draw_overhead(panels[1], rows)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    draw(RESULTS / "decode_h200.json", IMAGES / "decode_h200.png")
