"""Whether a request has the same tokens and log-probabilities, bit for bit, whatever is around it.

    python lab/same_bits.py --device cuda --shape qwen3-0.6b --dtype bfloat16 --json F
    python lab/same_bits.py --device cpu --shape tiny --requests 12

Seeded requests, greedy ones among them, run alone, one after the other; then all of them

    batch       in steps of up to 64 sequences
    chunks 7, chunks 64   in steps of so many tokens
    preempted   in a cache too small for them, computed again
    swapped     the same, kept in main memory
    prefix hit  a second time, finding what the first has left in the cache
    forward     against `Decoder.forward` over each whole sequence, without a cache

with `batch_invariant=True`, in one process and with one set of graphs. A row says how many requests
have the tokens and the bits that they have alone. The exit status is 1 if one has not, `forward`
excepted: on a GPU its attention is another kernel, and the row says how many agree all the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.on_shape import Clock, machine, make, random_prompts, use
from tilewise import LLM, SamplingParams, ops

Answer = tuple[tuple[int, ...], tuple[float, ...]]
BLOCK = 16


def answers(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[Answer]:
    """Return the tokens and log-probabilities of each request."""
    found = []
    for output in llm.generate(prompts, params):
        [sample] = output.outputs
        tokens = tuple(sample.token_ids)
        rows = zip(sample.logprobs, tokens, strict=True)
        found.append((tokens, tuple(row[token] for row, token in rows)))
    return found


def forward(llm: LLM, prompts: list[Any], expected: list[Answer]) -> list[Answer]:
    """Return the log-probabilities of the same tokens by one pass over each whole sequence."""
    found = []
    with torch.inference_mode():
        for prompt, (tokens, _) in zip(prompts, expected, strict=True):
            start = len(prompt["prompt_token_ids"])
            ids = torch.tensor([[*prompt["prompt_token_ids"], *tokens]], device=llm.model_device)
            logits = llm.model.compute_logits(llm.model(ids))[0, start - 1 : -1]
            if logits.is_cuda:  # torch's log_softmax rounds otherwise than the engine's kernel
                rows = ops.token_logprobs(logits.contiguous(), ids[0, start:].contiguous(), 0)[0]
            else:
                rows = logits.log_softmax(-1).gather(-1, ids[0, start:, None])[:, 0]
            found.append((tokens, tuple(rows.tolist())))
    return found


def compare(name: str, found: list[Answer], expected: list[Answer], seconds: float) -> dict:
    """Return a row."""
    wrong = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    other = [i for i in wrong if found[i][0] != expected[i][0]]
    largest = max(
        (abs(x - y) for i in wrong if i not in other
         for x, y in zip(found[i][1], expected[i][1], strict=True)), default=0.0,
    )  # fmt: skip
    return {
        "mode": name, "requests": len(found), "same bits": len(found) - len(wrong),
        "same tokens": len(found) - len(other), "largest difference": largest,
        "first that differ": wrong[:5], "seconds": round(seconds, 2),
    }  # fmt: skip


def main() -> int:
    """Run all modes, print a line each, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="story")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=40, help="new ones of each")
    parser.add_argument("--longest", type=int, default=40, help="tokens of a prompt at most")
    parser.add_argument("--json", help="write the last line there, too")
    args = parser.parse_args()
    shared, seats = 24, 64
    longest = shared + args.longest + args.tokens
    per_request = -(-longest // BLOCK) + 1
    roomy = seats * per_request + 8
    clock = Clock(args.device)
    started = clock()
    llm = make(
        args.shape, args.device, args.dtype, batch_invariant=True, block_size=BLOCK,
        num_blocks=max(roomy, args.requests * per_request), max_num_seqs=seats,
        max_model_len=longest, max_num_batched_tokens=512, swap_space_gib=1.0,
    )  # fmt: skip
    llm.model_device = next(iter(llm.engine.runner.storage.whole)).device
    start_s = clock() - started
    vocab = llm.config.vocab_size
    prompts = random_prompts(args.requests, 3, args.longest, vocab, shared=shared, seed=1)
    params = [
        SamplingParams(
            temperature=(0.0, 1.0, 0.8)[i % 3], top_p=0.9 if i % 3 == 2 else 1.0, seed=i,
            max_tokens=args.tokens, ignore_eos=True, logprobs=0,
        )
        for i in range(args.requests)
    ]  # fmt: skip

    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        """Print a row and write all so far: who has little time on a machine ends in the middle."""
        rows.append(row)
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        if args.json:
            Path(args.json).write_text(as_line() + "\n", encoding="utf-8")

    def as_line() -> str:
        return json.dumps(
            {
                "benchmark": "same bits", "shape": args.shape, "dtype": args.dtype,
                "start_s": round(start_s, 1), **machine(args.device), "rows": rows,
            }
        )  # fmt: skip

    use(llm, enable_prefix_caching=False)
    started = clock()
    expected = [answers(llm, [p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    keep(compare("alone", expected, expected, clock() - started))
    # A few sequences fit, and each wants blocks while it runs.
    scarce = 4 * per_request
    modes: dict[str, dict[str, Any]] = {
        "batch": {},
        "chunks 7": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        "chunks 64": {"max_num_batched_tokens": 64},
        "preempted": {"num_blocks": scarce, "preemption": "recompute"},
        "swapped": {"num_blocks": scarce, "preemption": "swap"},
        "prefix hit": {"enable_prefix_caching": True},
    }
    for name, changes in modes.items():
        plain = {"max_num_seqs": seats, "max_num_batched_tokens": 512, "num_blocks": roomy}
        use(llm, **(plain | {"enable_prefix_caching": False} | changes))
        if name == "prefix hit":
            answers(llm, prompts, params)
        started = clock()
        found = answers(llm, prompts, params)
        row = compare(name, found, expected, clock() - started)
        stats = llm.engine.stats().scheduler
        row |= {
            "preemptions": stats.num_preemptions,
            "swapped": stats.num_swapped,
            "tokens found": stats.prefix_hit_tokens,
        }
        keep(row)
    started = clock()
    keep(compare("forward", forward(llm, prompts, expected), expected, clock() - started))
    reached = {row["mode"]: row for row in rows}
    llm.close()
    print(as_line())
    assert reached["preempted"]["preemptions"], "the small cache must preempt"
    assert reached["swapped"]["swapped"], "and swap"
    assert reached["prefix hit"]["tokens found"], "and the warm one find"
    wrong = [r["mode"] for r in rows if r["same bits"] < r["requests"] and r["mode"] != "forward"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
