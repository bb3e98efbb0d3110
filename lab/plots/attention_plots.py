"""Redraw the plots of docs/: from the committed results in lab/results/, masks from themselves.

python lab/plots/attention_plots.py
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
from matplotlib.ticker import LogLocator

ROOT = Path(__file__).resolve().parents[2]
IMAGES, RESULTS = ROOT / "docs" / "images", ROOT / "lab" / "results"
# Colour and name of each row's peer, in the order of legends.
PEERS = {
    "tilewise": ("#1f77b4", "tilewise"),
    "sdpa_flash": ("#ff7f0e", "SDPA flash"),
    "sdpa_cudnn": ("#2ca02c", "SDPA cuDNN"),
    "sdpa_efficient": ("#9467bd", "SDPA efficient"),
    "flex": ("#e377c2", "FlexAttention"),
    "sdpa_math": ("#8c564b", "SDPA math"),
    "standard": ("#7f7f7f", "softmax(QKᵀ)V, bf16"),
}
LOST = "x: out of memory"


def load(name: str) -> dict[str, Any]:
    """Read one result document."""
    document: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return document


def series(
    document: dict[str, Any], op: str, peer: str, value: str, head_dim: int, causal: bool
) -> tuple[list[int], list[float], list[int]]:
    """Return N and a value of each dense row that has it, and the N that ran out of memory."""
    rows = sorted(
        (
            row
            for row in document["rows"]
            if row.get("table") == "dense"
            and (row["op"], row["peer"], row["D"], row["causal"]) == (op, peer, head_dim, causal)
        ),
        key=lambda row: row["N"],
    )
    measured = [row for row in rows if value in row]
    lost = [row["N"] for row in rows if row.get("error", "").startswith("out of memory")]
    return [row["N"] for row in measured], [row[value] for row in measured], lost


def _ticks_of_n(axes: Any, document: dict[str, Any], is_log: bool) -> None:
    lengths = sorted({row["N"] for row in document["rows"] if row.get("table") == "dense"})
    shown = lengths if is_log else [n for n in lengths if 8 * n >= lengths[-1]]
    if is_log:
        axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [f"{n:,}" for n in shown], rotation=45, fontsize=7)
    axes.minorticks_off()
    axes.set_xlabel("N, tokens of a sequence", fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.grid(alpha=0.3)


def _title(document: dict[str, Any]) -> str:
    ceilings = document["ceilings"]
    return f"{ceilings['name']}, bfloat16, torch {ceilings['torch_version']}"


def _shape_note(document: dict[str, Any]) -> str:
    dense = [row for row in document["rows"] if row.get("table") == "dense"]
    first = min(dense, key=lambda row: row["N"])
    tokens, hidden = first["B"] * first["N"], first["H"] * first["D"]
    return f"{tokens:,} tokens in all (at least one sequence), {hidden:,} channels in all"


def _legend(figure: Any) -> None:
    found = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(found.values(), found, loc="outside lower center", ncols=8, frameon=False)


def draw_over_n(
    document: dict[str, Any], path: Path, head_dim: int = 128, causal: bool = True
) -> None:
    """Time and memory over N, linear and log-log, forward and backward, ours and every peer."""
    figure, panels = plt.subplots(2, 4, figsize=(15, 7.6), layout="constrained")
    columns = [(op, is_log) for op in ("forward", "backward") for is_log in (False, True)]
    for (value, what), row_of_panels in zip(
        (("ms", "time, ms"), ("peak_MB", "peak memory beyond the inputs, MiB")),
        panels,
        strict=True,
    ):
        for axes, (op, is_log) in zip(row_of_panels, columns, strict=True):
            peers_lost = 0
            for peer, (colour, label) in PEERS.items():
                n, values, lost = series(document, op, peer, value, head_dim, causal)
                if is_log:  # a pass that needed no page more than it had
                    values = [max(each, 0.01) for each in values]
                if n:
                    width = 2.2 if peer == "tilewise" else 1.2
                    axes.plot(n, values, "o-", ms=3, lw=width, color=colour, label=label)
                if lost:
                    heights = [0.97 - 0.04 * peers_lost] * len(lost)
                    at = axes.get_xaxis_transform()
                    axes.plot(lost, heights, "x", color=colour, transform=at, label=LOST)
                    peers_lost += 1
            if is_log:
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
                axes.yaxis.set_major_formatter(lambda y, place: f"{y:,g}")
            _ticks_of_n(axes, document, is_log)
            axes.set_ylabel(what, fontsize=8)
            axes.set_title(f"{op} pass, {'log-log' if is_log else 'linear'}", fontsize=9)
    rule = "causal" if causal else "full"
    figure.suptitle(
        f"Attention over N: D {head_dim}, {rule}, {_shape_note(document)}\n{_title(document)}",
        fontsize=11,
    )
    _legend(figure)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_speed(document: dict[str, Any], path: Path) -> None:
    """TFLOP/s over N for D 64 and 128, causal and full, beside what a matrix product reaches."""
    figure, panels = plt.subplots(2, 4, figsize=(15, 7.2), layout="constrained", sharey="row")
    columns = [(head_dim, causal) for head_dim in (64, 128) for causal in (False, True)]
    ceiling = document["ceilings"]["matmul_flops"] / 1e12
    for op, row_of_panels in zip(("forward", "backward"), panels, strict=True):
        for axes, (head_dim, causal) in zip(row_of_panels, columns, strict=True):
            for peer, (colour, label) in PEERS.items():
                n, speed, _ = series(document, op, peer, "TFLOP/s", head_dim, causal)
                if n:
                    width = 2.2 if peer == "tilewise" else 1.2
                    axes.plot(n, speed, "o-", ms=3, lw=width, color=colour, label=label)
            axes.axhline(ceiling, color="0.6", lw=1, ls="--", label="matrix product, measured")
            axes.set_ylim(bottom=0)
            _ticks_of_n(axes, document, is_log=True)
            rule = "causal" if causal else "full"
            axes.set_title(f"{op} pass, D {head_dim}, {rule}", fontsize=9)
        row_of_panels[0].set_ylabel("TFLOP/s by the FlashAttention papers' count", fontsize=8)
    figure.suptitle(f"Speed of attention: {_shape_note(document)}\n{_title(document)}", fontsize=11)
    _legend(figure)
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
    draw_masks(IMAGES / "masks.png")
    for device in ("h200", "cpu"):
        name = f"attention_{device}.json"
        if not (RESULTS / name).exists():
            print(f"no {name}: its plots stay as they are")
            continue
        document = load(name)
        if not any(row.get("table") == "dense" for row in document["rows"]):
            print(f"no dense rows in {name}: its plots stay as they are")
            continue
        draw_speed(document, IMAGES / f"attention_{device}.png")
        draw_over_n(document, IMAGES / f"attention_over_n_{device}.png")


if __name__ == "__main__":
    main()
