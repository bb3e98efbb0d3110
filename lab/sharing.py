"""What sharing gives: prompts that begin alike, samples of one prompt, beams.

    python lab/sharing.py --turns 5 --json lab/results/sharing_cpu.json
    python lab/sharing.py --device cuda --shape qwen3-0.6b --turns 3 --json F
    python lab/sharing.py --device cuda --shape llama-3-8b --case beams --turns 3 --json F

Each row compares two ways to do the same, in one process and in turns; numbers are medians of the
turns, in wall time and in CPU time of the process (others may use the cores), with the least and
the most. Tokens computed are counted, and do not depend on the machine. The last line is JSON.

    shared    48 requests of 400 + 8 tokens (on a GPU 4,000), 90 % of each prompt the same, arriving
              together: with the prefix cache, and without
    samples   64 samples of one prompt of 400 (4,000) tokens, 8 tokens each: as n = 64, and as 64
              prompts that have nothing in common
    beams     a beam search of width 4 behind 400 tokens, 64 new ones, beside n = 4 of the same
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.on_shape import machine, make, use
from tilewise import LLM, SamplingParams
from tilewise.engine.scheduling.beams import BeamSearchParams

LENGTHS = {"cpu": 400, "cuda": 4000}
NEW, BEAM_TOKENS = 8, 64


def prompt(number: int, length: int, shared: int = 0) -> dict[str, list[int]]:
    """A prompt, of which the first `shared` tokens are the same for all numbers."""
    own = [(7919 * (number + 1) + 31 * j) % 4000 + 3 for j in range(length - shared)]
    return {"prompt_token_ids": [(17 * j) % 4000 + 3 for j in range(shared)] + own}


def measured(llm: LLM, run: Callable[[LLM], int]) -> dict[str, float]:
    """Seconds of one run from an empty cache, tokens generated and tokens computed."""
    llm.reset_prefix_cache()
    before = llm.engine.stats()
    wall, cpu = time.perf_counter(), time.process_time()
    generated = run(llm)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    after = llm.engine.stats()
    computed = sum(
        getattr(after, name) - getattr(before, name) for name in ("prefill_tokens", "decode_tokens")
    )
    return {"wall": wall, "cpu": cpu, "generated": generated, "computed": computed}


def generate(llm: LLM, prompts: list[dict[str, list[int]]], params: Any) -> int:
    """Run them; return how many tokens came."""
    outputs = llm.generate(prompts, params)
    return sum(len(c.token_ids) for output in outputs for c in output.outputs)


def main() -> None:
    """Measure, print a line each, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", "--model", default="story")
    parser.add_argument("--case", nargs="+", choices=("shared", "samples", "beams"))
    parser.add_argument("--length", type=int, help="tokens of a prompt")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="write the last line there, too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    length = args.length or LENGTHS[args.device]
    settings: dict[str, Any] = {}
    if args.device == "cuda":
        blocks = 64 * (-(-(length + NEW) // 16) + 2)
        longest = length + 2 * BEAM_TOKENS
        settings = {"num_blocks": blocks, "max_num_seqs": 64, "max_model_len": longest}
    llm = make(args.shape, args.device, args.dtype, **settings)

    def with_cache() -> None:
        use(llm, enable_prefix_caching=True)

    def without() -> None:
        use(llm, enable_prefix_caching=False)

    greedy = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    many = SamplingParams(n=64, temperature=1.0, seed=1, max_tokens=NEW, ignore_eos=True)
    one = SamplingParams(temperature=1.0, seed=1, max_tokens=NEW, ignore_eos=True)
    alike = [prompt(i, length, length * 9 // 10) for i in range(48)]
    apart = [prompt(i, length) for i in range(64)]
    short = prompt(0, min(length, 400))
    beams = BeamSearchParams(beam_width=4, max_tokens=BEAM_TOKENS, ignore_eos=True)
    four = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=BEAM_TOKENS, ignore_eos=True)
    cases: dict[str, tuple[tuple[str, Callable[[], None], Callable[[LLM], int]], ...]] = {
        "shared": (
            ("prefix cache", with_cache, lambda llm: generate(llm, alike, greedy)),
            ("without", without, lambda llm: generate(llm, alike, greedy)),
        ),
        "samples": (
            ("n = 64", with_cache, lambda llm: generate(llm, apart[:1], many)),
            ("64 prompts", with_cache, lambda llm: generate(llm, apart, one)),
        ),
        "beams": (
            ("beams of 4", with_cache, lambda llm: generate(llm, [short], beams)),
            ("n = 4", with_cache, lambda llm: generate(llm, [short], four)),
        ),
    }
    rows = []
    for name, ways in cases.items():
        if args.case and name not in args.case:
            continue
        found: dict[str, list[dict[str, float]]] = {way: [] for way, *_ in ways}
        for turn in range(args.turns + 1):
            for way, prepare, run in ways:
                prepare()
                result = measured(llm, run)
                if turn:
                    found[way].append(result)
        row: dict[str, Any] = {"case": name}
        rates: dict[str, dict[str, float]] = {}
        for way, results in found.items():
            width = 4 if name == "beams" else 1  # a step of a search computes all of its beams
            each = {}
            for clock in ("wall", "cpu"):
                per_s = [
                    (BEAM_TOKENS * width if name == "beams" else r["generated"]) / r[clock]
                    for r in results
                ]
                each[clock] = statistics.median(per_s)
                row[f"{way}, tokens/s, {clock}"] = [
                    round(x, 1) for x in (each[clock], min(per_s), max(per_s))
                ]
            row[f"{way}, tokens computed"] = int(results[0]["computed"])
            rates[way] = each
        first, second = rates.values()
        row["times, wall"] = round(first["wall"] / second["wall"], 2)
        row["times, cpu"] = round(first["cpu"] / second["cpu"], 2)
        rows.append(row)
        counts = ", ".join(f"{key} {value}" for key, value in row.items() if "computed" in key)
        print(f"{name}: {row['times, wall']} times by the clock, {row['times, cpu']} by CPU time")
        print(f"  {counts}", flush=True)
    line = json.dumps(
        {
            "benchmark": "sharing", "shape": args.shape, "dtype": args.dtype,
            "threads": args.threads, "length": length, "turns": args.turns,
            **machine(args.device), "rows": rows,
        }
    )  # fmt: skip
    print(line)
    if args.json:
        Path(args.json).write_text(line + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
