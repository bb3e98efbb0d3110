"""What audit and canary cost: tokens a second with and without, in turns, in one process.

    python lab/audit_cost.py --device cpu --shape story --json F
    python lab/audit_cost.py --device cuda --shape qwen3-0.6b --requests 256 --json F

All requests run together; the clock stops when the last has ended, so that what is computed again
in idle steps is not part of it, as it is not in a server. A CPU's clock is that of the process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.on_shape import Clock, machine, make, random_prompts
from tilewise import SamplingParams

FORMS = {
    "none": {},
    "audit 0.02": {"audit": 0.02},
    "canary 0.05": {"canary": 0.05},
    "audit 0.02, canary 0.05": {"audit": 0.02, "canary": 0.05},
}


def main() -> None:
    """Measure, and print rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="story")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engines = {
        name: make(
            options.shape,
            options.device,
            options.dtype,
            batch_invariant=True,
            num_blocks=2 * options.requests * (options.prompt + options.tokens + 16) // 16,
            max_num_seqs=options.requests,
            **settings,
        )
        for name, settings in FORMS.items()
    }
    clock = Clock(options.device)
    params = SamplingParams(temperature=1.0, max_tokens=options.tokens, ignore_eos=True)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(options.turns + 1):
        vocab = engines["none"].config.vocab_size
        prompts = random_prompts(options.requests, options.prompt, options.prompt, vocab, seed=turn)
        for name, llm in engines.items():
            began = clock()
            llm.generate(prompts, params)
            if turn:  # the first is a warm-up
                seconds[name].append(clock() - began)
            while llm.loop.call(llm.engine.has_unfinished):
                pass
    tokens = options.requests * options.tokens
    base = statistics.median(seconds["none"])
    rows = {
        name: {
            "tokens_a_second": round(tokens / statistics.median(found)),
            "cost": round(statistics.median(found) / base - 1, 4),
            "spread": [round(tokens / worst) for worst in (max(found), min(found))],
            "audited": llm.engine.stats().num_audited,
            "different": llm.engine.stats().num_audits_different,
            "blocks_checked": llm.engine.stats().num_blocks_checked,
        }
        for (name, found), llm in zip(seconds.items(), engines.values(), strict=True)
    }
    row = {**machine(options.device), "clock": clock.name, **vars(options), "rows": rows}
    row = {name: str(value) if isinstance(value, Path) else value for name, value in row.items()}
    print(json.dumps(row, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
