"""Swapping against recomputing by length of context, on this machine's link; and what "auto" does.

    python lab/swap_or_recompute.py --device cuda --shape qwen3-0.6b --json F --plot P.png
    python lab/swap_or_recompute.py --from F --plot P.png

Two requests of a length fit the cache, but not what they generate: the second loses its blocks when
it has some tokens, waits for the end of the first, and goes on. Seconds of the whole run are
compared, `preemption="recompute"`, "swap" and "auto" in turns, medians of the turns. The prefix
cache is off, as it would find what was computed. Below the crossover it is faster to compute again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import itertools

from lab.on_shape import Clock, machine, make, random_prompts, use
from tilewise import SamplingParams

BLOCK, NEW = 16, 48
LENGTHS = {"cpu": (64, 128, 256, 400), "cuda": (64, 256, 1024, 4096, 16_384, 32_000)}
WAYS = ("recompute", "swap", "auto")


def crossover(rows: list[dict[str, Any]]) -> float | None:
    """Return the length from which on swapping is faster, by a line between the two beside it.

    None if one way is the faster at all lengths.
    """
    gains = [(row["length"], row["recompute"]["s"] - row["swap"]["s"]) for row in rows]
    for (first, low), (second, high) in itertools.pairwise(gains):
        if low < 0 <= high:
            return first + (second - first) * low / (low - high)
    return None


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all lengths and return what is written."""
    lengths = args.lengths or LENGTHS[args.device]
    longest = max(lengths)
    llm = make(
        args.shape, args.device, args.dtype, block_size=BLOCK, max_num_seqs=4,
        num_blocks=2 * (longest // BLOCK) + 8, max_model_len=longest + NEW,
        swap_space_gib=args.swap_space_gib, enable_prefix_caching=False,
    )  # fmt: skip
    clock = Clock(args.device)
    rows = []
    for length in lengths:
        prompts = random_prompts(2, length, length, llm.config.vocab_size, seed=length)
        params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        swapped: dict[str, int] = dict.fromkeys(WAYS, 0)
        texts = set()
        for turn in range(args.turns + 1):
            for way in WAYS:
                use(
                    llm,
                    num_blocks=2 * -(-length // BLOCK) + 2,
                    enable_prefix_caching=False,
                    preemption=way,
                )
                started = clock()
                outputs = llm.generate(prompts, params)
                seconds = clock() - started
                stats = llm.engine.stats().scheduler
                assert stats.num_preemptions == 1, f"one is preempted, got {stats.num_preemptions}"
                texts.add(tuple(tuple(o.outputs[0].token_ids) for o in outputs))
                if turn:
                    found[way].append(seconds)
                    swapped[way] += stats.num_swapped
        assert swapped["swap"] == args.turns, "there is room to swap"
        row: dict[str, Any] = {"length": length, "texts": len(texts)}
        for way, each in found.items():
            row[way] = {
                "s": round(statistics.median(each), 5),
                "least": round(min(each), 5),
                "most": round(max(each), 5),
            }
        row["auto swaps"] = swapped["auto"] / args.turns
        best = min(row["recompute"]["s"], row["swap"]["s"])
        row["auto against the better"] = round(row["auto"]["s"] / best - 1, 4)
        rows.append(row)
        print(
            f"{length}: recompute {row['recompute']['s']:.4f} s, swap {row['swap']['s']:.4f} s, "
            f"auto {row['auto']['s']:.4f} s ({row['auto swaps']:.0%} swapped, "
            f"{row['auto against the better']:+.1%} of the better)",
            flush=True,
        )
    rates = llm.engine.scheduler.preemption.rates
    spec = llm.engine.runner.storage.spec
    result = {
        "benchmark": "swap or recompute", "shape": args.shape, "dtype": args.dtype,
        "clock": clock.name, "turns": args.turns, "new tokens": NEW,
        "link_gb_per_s": round(rates.link_blocks * spec.bytes_per_block / 1e9, 2),
        "prefill_tokens_per_s": round(rates.prefill_tokens), "crossover": crossover(rows),
        **machine(args.device), "rows": rows,
    }  # fmt: skip
    llm.close()
    return result


def draw(result: dict[str, Any], path: str) -> None:
    """Plot seconds by length, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    lengths = [row["length"] for row in result["rows"]]
    for way, style in zip(WAYS, ("o-", "s-", "x--"), strict=True):
        parts = [row[way] for row in result["rows"]]
        middle = [part["s"] for part in parts]
        errors = [
            [part["s"] - part["least"] for part in parts],
            [part["most"] - part["s"] for part in parts],
        ]
        axes.errorbar(lengths, middle, errors, fmt=style, capsize=2, label=way)
    if result["crossover"] is not None:
        axes.axvline(result["crossover"], color="0.6", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of context of the one that is preempted")
    axes.set_ylabel(f"seconds of the run ({result['clock']})")
    axes.set_title(f"{result['shape']} on {result['device']}", fontsize=10)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure or read, print JSON, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="story")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--swap-space-gib", type=float, default=5.0)
    parser.add_argument("--json", help="write the last line there, too")
    parser.add_argument("--from", dest="source", help="draw these results; measure nothing")
    parser.add_argument("--plot", help="draw them as PNG")
    args = parser.parse_args()
    if args.source:
        result = json.loads(Path(args.source).read_text(encoding="utf-8"))
    else:
        result = measure(args)
        line = json.dumps(result)
        print(line)
        if args.json:
            Path(args.json).write_text(line + "\n", encoding="utf-8")
    if args.plot:
        draw(result, args.plot)


if __name__ == "__main__":
    main()
