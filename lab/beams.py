"""Tokens a second of beams beside as many drawn samples, on the packaged model.

    python lab/beams.py [--width 4] [--tokens 128] [--repeats 5]

Both draw width * tokens tokens of each prompt. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import torch

from tilewise import LLM, BeamSearchParams, SamplingParams

PROMPTS = ["Once upon a time", "The dog said", "A girl named Lily", "One day a boy"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    llm = LLM("story", num_blocks=800, max_num_seqs=4 * asked.width)
    kinds = {
        "n": SamplingParams(n=asked.width, max_tokens=asked.tokens, ignore_eos=True, seed=1),
        "beams": BeamSearchParams(asked.width, max_tokens=asked.tokens, ignore_eos=True),
    }
    rows = []
    for count in (1, 4):
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for repeat in range(asked.repeats + 1):
            for kind, params in kinds.items():  # in turn, so that both meet the same machine
                started = time.perf_counter()
                outputs = llm.generate(PROMPTS[:count], params)
                seconds = time.perf_counter() - started
                tokens = sum(len(c.token_ids) for o in outputs for c in o.outputs)
                if repeat > 0:  # the first one warms up
                    rates[kind].append(tokens / seconds)
        for kind, values in rates.items():
            median = statistics.median(values)
            rows.append(
                {
                    "prompts": count,
                    "kind": f"{kind} of {asked.width}",
                    "tokens_per_second": round(median, 1),
                    "least": round(min(values), 1),
                    "most": round(max(values), 1),
                }
            )
            print(
                f"{count} prompts, {kind} of {asked.width}: {median:.0f} tokens/s "
                f"({min(values):.0f} to {max(values):.0f})"
            )
    about = {"device": platform.processor() or platform.machine(), "torch": torch.__version__}
    print(json.dumps({**about, "model": "story", "tokens": asked.tokens, "rows": rows}))


if __name__ == "__main__":
    main()
