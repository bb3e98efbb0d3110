"""What batch invariance costs on a CPU: tokens/s of prompts and of decoding, with it and without.

    python benchmarks/batch_invariance.py --dtype bfloat16 --turns 5

Both engines live in one process and take turns; each number is the median of the turns, in CPU time
of the process, since others may use the cores. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import torch

from tilewise import LLM, SamplingParams

SHAPES = {"prompt": [(1, 500), (8, 500)], "decode": [(1, 16), (8, 16), (32, 16), (8, 700)]}


def seconds(llm: LLM, kind: str, batch: int, length: int, tokens: int) -> float:
    """CPU time of one call of generate, without that of its prompts where decoding is measured."""
    prompts = [
        {"prompt_token_ids": [(7 * i + j) % 4000 + 3 for j in range(length)]} for i in range(batch)
    ]

    def run(count: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        started = time.process_time()
        llm.generate(prompts, params)
        return time.process_time() - started

    if kind == "prompt":
        return run(1)
    return run(tokens + 1) - run(1)


def main() -> None:
    """Measure, print a line each, then JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="story")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engines = {
        flag: LLM(
            args.model, dtype=args.dtype, device="cpu", batch_invariant=flag,
            enable_prefix_caching=False,
        )
        for flag in (False, True)
    }  # fmt: skip
    rows = []
    for kind, shapes in SHAPES.items():
        for batch, length in shapes:
            times: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(args.turns + 1):
                for flag, llm in engines.items():
                    taken = seconds(llm, kind, batch, length, args.tokens)
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
            print(f"{kind} {batch} x {length}: {rates[False]:,.0f} tokens/s without, "
                  f"{rates[True]:,.0f} with, {cost:+.1%} time", flush=True)  # fmt: skip
    load = round(os.getloadavg()[0], 1)
    print(json.dumps({"model": args.model, "threads": args.threads, "load": load, "rows": rows}))


if __name__ == "__main__":
    main()
