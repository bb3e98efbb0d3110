"""Redraw the plots of docs/guide/sizing.md from the results of `tilewise simulate`.

python lab/plots/simulate_plots.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from tilewise.bench.simulate import MODELS
from tilewise.cost import StepCost, StepWork, machine, recompute_seconds, swap_seconds

ROOT = Path(__file__).resolve().parents[2]
IMAGES, RESULTS = ROOT / "docs" / "images", ROOT / "lab" / "results"

# Colour, marker and name of each allocator's curve.
ALLOCATORS = {
    "max": ("#d62728", "s", "contiguous, longest"),
    "pow2": ("#ff7f0e", "^", "contiguous, next 2ⁿ"),
    "oracle": ("#bcbd22", "v", "contiguous, true length"),
    "paged": ("#1f77b4", "o", "blocks of 16"),
    "prefix": ("#2ca02c", "D", "blocks of 16, prefix cache"),
}

Row = dict[str, Any]


def load(name: str) -> dict[str, Any]:
    """Read a committed result."""
    return json.loads((RESULTS / f"simulate_{name}.json").read_text())


def curves(axes: Any, rows: list[Row], *, value: str = "s/token", most: float = 1.0) -> None:
    """Draw a value, up to `most`, against the request rate, a curve for each allocator."""
    top = min(most, 1.05 * max(row[value] for row in rows))
    for allocator, (colour, marker, label) in ALLOCATORS.items():
        mine = sorted((r for r in rows if r["allocator"] == allocator), key=lambda r: r["rate"])
        if mine:
            axes.plot(
                [r["rate"] for r in mine], [r[value] for r in mine], marker=marker, ms=4,
                color=colour, label=label,
            )  # fmt: skip
    axes.set_ylim(0, top)
    axes.set_xlabel("requests a second")
    axes.grid(alpha=0.3)


def draw_paper(path: Path) -> None:
    """The paper's figures: one sample, several samples of a prompt, prompts that begin alike."""
    figure, panels = plt.subplots(2, 3, figsize=(13.5, 7.6), layout="constrained")
    curves(panels[0, 0], load("basic")["rows"])
    panels[0, 0].set_title("one sample")
    samples = load("samples")["rows"] + load("samples_prefix")["rows"]
    for axes, n in zip((panels[0, 1], panels[0, 2], panels[1, 0]), (2, 4, 6), strict=True):
        curves(axes, [r for r in samples if r["n"] == n], most=1.5)
        axes.set_title(f"{n} samples of each prompt")
    shared = load("prefix")["rows"]
    for axes, tokens in zip(panels[1, 1:], (80, 341), strict=True):
        curves(axes, [r for r in shared if r["prefix"] == tokens])
        axes.set_title(f"{tokens} tokens that all prompts begin with")
    for axes in panels[:, 0]:
        axes.set_ylabel("normalised latency, s / token")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=5, loc="outside lower center", frameon=False)
    figure.suptitle("OPT-13B, A100 40 GB, 15,700 slots, Azure's conversations of 2023 (simulated)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_h200(path: Path) -> None:
    """Llama 3.1 8B on an H200: conversations, and Mooncake's long prompts."""
    figure, panels = plt.subplots(1, 3, figsize=(13.5, 4.4), layout="constrained")
    curves(panels[0], load("h200")["rows"])
    panels[0].set_title("Azure's conversations")
    panels[0].set_ylabel("normalised latency, s / token")
    rows = load("mooncake")["rows"]
    curves(panels[1], rows, most=4)
    panels[1].set_title("Mooncake, prompts of 12,000 tokens")
    panels[1].set_ylabel("normalised latency, s / token")
    budgets = load("budget")["rows"]
    x = [r["budget"] for r in budgets]
    for name, colour, label in (
        ("ttft p50", "#1f77b4", "first token, median"),
        ("ttft p90", "#aec7e8", "first token, p90"),
        ("tpot p50", "#d62728", "between tokens, median"),
        ("tpot p99", "#ff9896", "between tokens, p99"),
    ):
        panels[2].plot(x, [r[name] for r in budgets], "o-", ms=4, color=colour, label=label)
    panels[2].set_xscale("log", base=2)
    panels[2].set_yscale("log")
    panels[2].set_xticks(x, [f"{v:,}" for v in x])
    panels[2].set_xlabel("tokens of a step at most")
    panels[2].set_ylabel("seconds")
    panels[2].set_title(f"Mooncake, {budgets[0]['rate']:g} a second")
    panels[2].grid(alpha=0.3)
    panels[2].set_ylim(bottom=1e-3)
    panels[2].legend(fontsize=8, loc="lower right")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=5, loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_ablations(path: Path) -> None:
    """Block sizes, preempting in a service, and what it takes by length of the context."""
    figure, panels = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    panels = panels.flat
    rows = load("blocks")["rows"]
    paged = [r for r in rows if r["block"] is not None]
    x = [r["block"] for r in paged]
    panels[0].plot(x, [r["s/token"] for r in paged], "o-", color="#2ca02c", label="blocks")
    [oracle] = [r for r in rows if r["block"] is None]
    panels[0].axhline(oracle["s/token"], color="#bcbd22", ls=":", label="contiguous, true length")
    panels[0].set_xscale("log", base=2)
    panels[0].set_xticks(x, [str(v) for v in x])
    panels[0].set_xlabel("tokens of a block")
    panels[0].set_ylabel("normalised latency, s / token")
    panels[0].set_ylim(bottom=0)
    panels[0].set_title(f"block size: OPT-13B, A100, {oracle['rate']:g} a second")
    panels[0].legend(fontsize=8)
    panels[0].grid(alpha=0.3)
    _swapping(panels[1])
    for axes, gpu, model in ((panels[2], "a100", "opt-13b"), (panels[3], "h200", "llama-8b")):
        _preemption(axes, gpu, model)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _swapping(axes: Any) -> None:
    """Preempting 4 samples of each prompt in a service."""
    rows = load("swap")["rows"]
    for allocator, style, cached in (("paged", "-", ""), ("prefix", "--", ", prefix cache")):
        for kind, colour in (("recompute", "black"), ("swap", "#d62728"), ("auto", "#1f77b4")):
            mine = [r for r in rows if r["allocator"] == allocator]
            mine = [r for r in mine if f"preemption={kind}," in r["options"]]
            axes.plot(
                [r["rate"] for r in mine], [r["s/token"] for r in mine], "o" + style, ms=4,
                color=colour, label=kind + cached,
            )  # fmt: skip
    axes.set_xlabel("requests a second")
    axes.set_ylabel("normalised latency, s / token")
    axes.set_ylim(bottom=0)
    axes.set_title("preemption in a service: OPT-13B, A100, 4 samples")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _beside(cost: StepCost, tokens: int) -> float:
    """Return what computing a sequence again adds to steps of 16 sequences that run anyway."""
    rows, context, chunk = 16, 1000, 8192
    step = cost.device(StepWork(rows, rows, rows, rows, rows * context, is_decode=True))
    seconds = 0.0
    for start in range(0, tokens, chunk):
        n = min(chunk, tokens - start)
        keys = rows * context + start + n
        pairs = n * start + n * (n + 1) // 2
        seconds += cost.device(StepWork(rows + n, rows + 1, rows, rows, keys, pairs)) - step
    return seconds


def _preemption(axes: Any, gpu: str, model: str) -> None:
    where, sizes = machine(gpu), MODELS[model]
    cost = StepCost(sizes, where)
    contexts = [2**i for i in range(5, min(sizes.max_len, 32_768).bit_length())]
    alone = [1e3 * recompute_seconds(cost, tokens, 8192) for tokens in contexts]
    axes.plot(contexts, alone, "o--", ms=4, color="black", label="computed again, alone")
    beside = [1e3 * _beside(cost, tokens) for tokens in contexts]
    axes.plot(contexts, beside, "o-", ms=4, color="black", label="computed again, beside 16 others")
    pieces = 2 * sizes.num_layers  # of a block: keys and values of each layer
    for block, colour in ((16, "#d62728"), (256, "#ff7f0e")):
        moved = [
            2e3 * swap_seconds(where, tokens * cost.cache_bytes, pieces * -(-tokens // block))
            for tokens in contexts
        ]
        axes.plot(
            contexts,
            moved,
            "s-",
            ms=4,
            color=colour,
            label=f"swapped, layer by layer, blocks of {block}",
        )
    whole = [2e3 * swap_seconds(where, tokens * cost.cache_bytes, 1) for tokens in contexts]
    axes.plot(contexts, whole, "^-", ms=4, color="#1f77b4", label="swapped, one transfer")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of the sequence")
    axes.set_ylabel("milliseconds, out and in")
    axes.set_title(f"preemption: {model}, {where.name}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def main() -> None:
    """Draw all of them."""
    draw_paper(IMAGES / "simulate_paper.png")
    draw_h200(IMAGES / "simulate_h200.png")
    draw_ablations(IMAGES / "simulate_ablations.png")


if __name__ == "__main__":
    main()
