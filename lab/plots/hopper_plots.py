"""Redraw the plots of Hopper: the pipelines by hand, the speeds from the committed result.

python lab/plots/hopper_plots.py
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
    "tilewise": ("#1f77b4", "tilewise"),
    "fa4": ("#9467bd", "FlashAttention-4"),
    "fa3": ("#d62728", "FlashAttention-3"),
    "sdpa_cudnn": ("#2ca02c", "SDPA cuDNN"),
    "tilewise_triton": ("#aec7e8", "tilewise, portable Triton"),
}
TENSOR, SPECIAL, COPY, OTHER = "#1f77b4", "#ff7f0e", "#7f7f7f", "#2ca02c"
# (lane, begin, length, text, colour): one step of the steady state takes one unit of time.
Box = tuple[int, float, float, str, str]


def _forward() -> tuple[list[str], list[Box]]:
    """Two consumers take turns: one multiplies while the other is in its exponentials."""
    lanes = ["loader warp", "warpgroup 0", "warpgroup 1"]
    boxes: list[Box] = []
    for step in range(4):
        at = float(step)
        boxes.append((0, at, 0.42, f"K{step + 1}", COPY))
        boxes.append((0, at + 0.46, 0.42, f"V{step}", COPY))
        for lane, shift in ((1, 0.0), (2, 0.5)):
            before = step - 1
            boxes.append((lane, at + shift, 0.24, f"Q K{step}ᵀ", TENSOR))
            if before >= 0:
                boxes.append((lane, at + shift + 0.24, 0.24, f"P{before} V{before}", TENSOR))
            boxes.append((lane, at + shift + 0.5, 0.48, f"softmax of S{step}", SPECIAL))
    return lanes, boxes


def _backward() -> tuple[list[str], list[Box]]:
    """Two consumers of 64 keys share dS; dQ lags by a step and leaves by a warp of its own."""
    lanes = ["loader warp", "warpgroup 0 (64 keys)", "warpgroup 1 (64 keys)", "dQ warp"]
    boxes: list[Box] = []
    for step in range(3):
        at = 1.25 * step
        boxes.append((0, at, 0.5, f"Q{step + 1}, lse", COPY))
        boxes.append((0, at + 0.55, 0.5, f"dO{step + 1}, delta", COPY))
        for lane, shift in ((1, 0.0), (2, 0.35)):
            begin = at + shift
            boxes.append((lane, begin, 0.18, "dP", TENSOR))
            boxes.append((lane, begin + 0.18, 0.25, "P = exp", SPECIAL))
            boxes.append((lane, begin + 0.43, 0.18, "dV", TENSOR))
            boxes.append((lane, begin + 0.61, 0.16, "dS", SPECIAL))
            boxes.append((lane, begin + 0.77, 0.32, f"dK, dQ{step - 1}" if step else "dK", TENSOR))
            boxes.append((lane, begin + 1.09, 0.16, f"S{step + 1}", TENSOR))
        if step:
            boxes.append((3, at + 1.2, 0.5, f"add dQ{step - 1}", OTHER))
    return lanes, boxes


def draw_pipelines(path: Path) -> None:
    """Who does what when, in the steady state of both kernels."""
    figure, panels = plt.subplots(2, 1, figsize=(13, 6.2), layout="constrained")
    titles = (
        "forward: 2 x 64 queries, K and V in rings",
        "backward: 2 x 64 keys, Q and dO in rings",
    )
    for axes, (lanes, boxes), title in zip(panels, (_forward(), _backward()), titles, strict=True):
        for lane, begin, length, text, colour in boxes:
            axes.barh(lane, length, left=begin, height=0.72, color=colour, edgecolor="white")
            axes.text(
                begin + length / 2, lane, text, ha="center", va="center", fontsize=7, color="white"
            )
        axes.set_yticks(range(len(lanes)), lanes, fontsize=9)
        axes.invert_yaxis()
        axes.set_xticks([])
        axes.set_xlabel("time (not to scale)", fontsize=8)
        axes.set_title(title, fontsize=10)
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
    names = (
        "tensor cores",
        "exponentials and other arithmetic",
        "copy engine, in",
        "copy engine, out",
    )
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in (TENSOR, SPECIAL, COPY, OTHER)]
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_speed(document: dict[str, Any], path: Path) -> None:
    """TFLOP/s of 18 shapes, forward and backward, as bars beside the peers of the same run."""
    dense = [row for row in document["rows"] if row["table"] == "dense"]
    head_dims = sorted({row["D"] for row in dense})
    seqlens = sorted({row["N"] for row in dense})
    ceiling = document["ceilings"]["matmul_flops"] / 1e12
    figure, panels = plt.subplots(2, 2, figsize=(14, 7.5), layout="constrained", sharey="row")
    for row_of_panels, op in zip(panels, ("forward", "backward"), strict=True):
        for axes, causal in zip(row_of_panels, (False, True), strict=True):
            labels = [f"{n:,}\nD {d}" for d in head_dims for n in seqlens]
            for place, (peer, (colour, name)) in enumerate(PEERS.items()):
                found = {
                    (row["D"], row["N"]): row.get("TFLOP/s")
                    for row in dense
                    if (row["op"], row["peer"], row["causal"]) == (op, peer, causal)
                }
                heights = [found.get((d, n)) or 0.0 for d in head_dims for n in seqlens]
                if not any(heights):
                    continue
                at = [i + 0.165 * (place - 2) for i in range(len(heights))]
                axes.bar(at, heights, width=0.155, color=colour, label=name)
                if peer == "tilewise":
                    for x, height in zip(at, heights, strict=True):
                        axes.text(x, height + 6, f"{height:.0f}", ha="center", fontsize=7)
            axes.axhline(ceiling, color="0.6", lw=1, ls="--", label="matrix product, measured")
            axes.set_xticks(range(len(labels)), labels, fontsize=8)
            axes.set_title(f"{op}, {'causal' if causal else 'full'}", fontsize=10)
            axes.grid(axis="y", alpha=0.3)
        row_of_panels[0].set_ylabel("TFLOP/s by the papers' count", fontsize=9)
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=6, frameon=False)
    versions = f"torch {document['ceilings']['torch_version']}, triton {document['triton']}"
    figure.suptitle(
        f"Attention on one {document['ceilings']['name']}: bfloat16, 16,384 tokens, "
        f"2,048 channels in all; {versions}",
        fontsize=11,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Draw what there is."""
    draw_pipelines(IMAGES / "hopper_pipeline.png")
    result = RESULTS / "libraries_h200.json"
    if result.exists():
        draw_speed(json.loads(result.read_text()), IMAGES / "hopper_speed.png")
    else:
        print(f"no {result.name}: its plot stays as it is")


if __name__ == "__main__":
    main()
