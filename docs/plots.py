"""Redraw the plots of docs/: from the committed results in docs/benchmarks/, masks from themselves.

python docs/plots.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import torch

from tilewise import masks

matplotlib.use("Agg")
from matplotlib import pyplot as plt

DOCS = Path(__file__).resolve().parent
COLOURS = {"tilewise": "#1f77b4", "sdpa_flash": "#ff7f0e", "sdpa_cudnn": "#7f7f7f"}
Row = dict[str, Any]


def load(name: str) -> dict[str, Any]:
    """Read one result document."""
    document: dict[str, Any] = json.loads((DOCS / "benchmarks" / name).read_text())
    return document


def draw_dense(document: dict[str, Any], path: Path) -> None:
    """Bars of TFLOP/s for each shape, forward above backward, ours beside torch's."""
    rows = [row for row in document["rows"] if row["op"] in ("forward", "backward")]
    peers = [p for p in COLOURS if any(row["peer"] == p for row in rows)]
    figure, panels = plt.subplots(2, 1, figsize=(10, 6.5), layout="constrained")
    for axes, op in zip(panels, ("forward", "backward"), strict=True):
        shapes = sorted({(r["D"], r["causal"], r["N"]) for r in rows if r["op"] == op})
        speed = {
            (r["peer"], r["D"], r["causal"], r["N"]): r.get("TFLOP/s", 0.0)
            for r in rows
            if r["op"] == op
        }
        width = 0.8 / len(peers)
        for i, peer in enumerate(peers):
            heights = [speed.get((peer, *shape), 0.0) for shape in shapes]
            places = [x + (i - (len(peers) - 1) / 2) * width for x in range(len(shapes))]
            axes.bar(places, heights, width, label=peer, color=COLOURS[peer])
        labels = [f"D {d}\n{'causal' if c else 'full'}\nN {n}" for d, c, n in shapes]
        axes.set_xticks(range(len(shapes)), labels, fontsize=7)
        axes.set_ylabel(f"{op}, TFLOP/s")
        axes.grid(axis="y", alpha=0.3)
    panels[0].legend(loc="upper left")
    ceilings = document["ceilings"]
    figure.suptitle(f"bf16 attention, {ceilings['name']}, torch {ceilings['torch_version']}")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_memory(document: dict[str, Any], path: Path) -> None:
    """Peak extra memory of the backward pass over N, beside the N x N matrix it avoids."""
    rows = [
        r
        for r in document["rows"]
        if r["op"] == "backward" and r["peer"] == "tilewise" and r["D"] == 128 and not r["causal"]
    ]
    rows.sort(key=lambda r: r["N"])
    lengths = [r["N"] for r in rows]
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(lengths, [r["peak_MB"] for r in rows], "o-", label="tilewise, measured")
    matrices = [2 * r["B"] * r["H"] * r["N"] ** 2 * 2 / 2**20 for r in rows]
    axes.plot(lengths, matrices, "s--", color="0.5", label="two N x N matrices in bf16, computed")
    axes.set(xscale="log", yscale="log", xlabel="N, tokens of a sequence", ylabel="MiB")
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title("Backward pass, D 128, 16,384 tokens in all")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_masks(path: Path) -> None:
    """One small mask of each builder, and two made of several, as their tiles."""
    seqlen, tile = 1536, 64
    causal = masks.causal(seqlen, tile=tile)
    near = masks.global_local(seqlen, window=(150, 150), global_tokens=[0, 1, 800], tile=tile)
    blocks = torch.arange(seqlen // 64)
    layout = (blocks[:, None] - blocks).abs() <= 1
    layout[:, :2] = layout[:2] = True
    chosen = torch.rand(layout.shape, generator=torch.Generator().manual_seed(0)).topk(3).indices
    layout.scatter_(1, chosen, True)
    shown = {
        "causal(1536)": causal,
        "window(1536, window=300)": masks.window(seqlen, window=300, tile=tile),
        "causal & document([500, 200, 836])": causal & masks.document([500, 200, 836], tile=tile),
        "prefix_lm(1536, 500)": masks.prefix_lm(seqlen, 500, tile=tile),
        "global_local(…, [0, 1, 800])": near,
        "strided(1536, stride=256, window=64)": masks.strided(
            seqlen, stride=256, window=64, tile=tile
        ),
        "block_sparse(…), BigBird": masks.block_sparse(layout, block_size=64),
        "~causal | window(…, window=300)": ~causal | masks.window(seqlen, window=300, tile=tile),
    }
    figure, panels = plt.subplots(2, 4, figsize=(14, 7.6), layout="constrained")
    for axes, (title, mask) in zip(panels.flat, shown.items(), strict=True):
        mask.plot(axes)
        legend = axes.get_legend()
        handles = legend.legend_handles
        legend.remove()
        axes.set_title(f"{title}\n{mask.sparsity:.0%} of the scores are not computed", fontsize=10)
        axes.set_xticks(range(0, seqlen + 1, 512))
        axes.set_yticks(range(0, seqlen + 1, 512))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Draw every plot whose results are there."""
    draw_masks(DOCS / "masks.png")
    h200 = load("ops_h200.json")
    draw_dense(h200, DOCS / "attention_h200.png")
    draw_memory(h200, DOCS / "memory_h200.png")
    draw_dense(load("ops_cpu.json"), DOCS / "attention_cpu.png")


if __name__ == "__main__":
    main()
