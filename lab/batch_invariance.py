"""What batch invariance costs: tokens/s of prompts and of decoding, with it and without.

    python lab/batch_invariance.py --dtype bfloat16 --turns 5
    python lab/batch_invariance.py --device cuda --shape qwen3-0.6b --turns 3 --json F

Both engines live in one process and take turns; each number is the median of the turns: on a GPU of
wall time, on a CPU of the CPU time of the process, since others may use the cores. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.on_shape import Clock, machine, make
from tilewise import LLM, SamplingParams

SHAPES = {
    "cpu": {"prompt": [(1, 500), (8, 500)], "decode": [(1, 16), (8, 16), (32, 16), (8, 700)]},
    "cuda": {
        "prompt": [(1, 1024), (32, 1024)],
        "decode": [(1, 128), (32, 128), (256, 128), (64, 1024)],
    },
}


def seconds(llm: LLM, kind: str, batch: int, length: int, tokens: int, clock: Clock) -> float:
    """Time of one call of generate, without that of its prompts where decoding is measured."""
    prompts = [
        {"prompt_token_ids": [(7 * i + j) % 4000 + 3 for j in range(length)]} for i in range(batch)
    ]

    def run(count: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        started = clock()
        llm.generate(prompts, params)
        return clock() - started

    if kind == "prompt":
        return run(1)
    return run(tokens + 1) - run(1)


def main() -> None:
    """Measure, print a line each, then JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", "--model", default="story")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kind", nargs="+", choices=("prompt", "decode"))
    parser.add_argument("--batch", nargs="+", type=int, help="those of the list with these only")
    parser.add_argument("--json", help="write the last line there, too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock, shapes_of = Clock(args.device), SHAPES[args.device]
    chosen = {
        kind: [s for s in shapes_of[kind] if not args.batch or s[0] in args.batch]
        for kind in args.kind or shapes_of
    }
    rooms = [
        (batch, -(-(length + args.tokens + 1) // 16) + 1)
        for rows in chosen.values()
        for batch, length in rows
    ]
    settings = {"enable_prefix_caching": False, "max_model_len": None}
    if args.device == "cuda":
        settings |= {
            "max_model_len": 1025 + args.tokens,
            "max_num_seqs": max(batch for batch, _ in rooms),
            "num_blocks": max(batch * blocks for batch, blocks in rooms),
        }
    started = clock()
    engines = {
        flag: make(args.shape, args.device, args.dtype, batch_invariant=flag, **settings)
        for flag in (False, True)
    }
    start_s = clock() - started
    rows = []
    for kind, shapes in chosen.items():
        for batch, length in shapes:
            times: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(args.turns + 1):
                for flag, llm in engines.items():
                    taken = seconds(llm, kind, batch, length, args.tokens, clock)
                    if turn:
                        times[flag].append(taken)
            count = batch * (length if kind == "prompt" else args.tokens)
            rates = {flag: count / statistics.median(taken) for flag, taken in times.items()}
            pairs = zip(times[True], times[False], strict=True)
            cost = statistics.median(on / off for on, off in pairs) - 1
            rows.append(
                {
                    "kind": kind, "batch": batch, "length": length, "dtype": args.dtype,
                    "tokens_per_s": round(rates[False]), "invariant": round(rates[True]),
                    "cost": round(cost, 3),
                }
            )  # fmt: skip
            print(
                f"{kind} {batch} x {length}: {rates[False]:,.0f} tokens/s without, "
                f"{rates[True]:,.0f} with, {cost:+.1%} time",
                flush=True,
            )
    line = json.dumps(
        {
            "benchmark": "batch invariance", "shape": args.shape, "threads": args.threads,
            "clock": clock.name, "start_s": round(start_s, 1), **machine(args.device),
            "rows": rows,
        }
    )  # fmt: skip
    print(line)
    if args.json:
        Path(args.json).write_text(line + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
