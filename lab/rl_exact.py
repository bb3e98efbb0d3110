"""Rounds of sampling and training over one model: the difference, the memory, tokens a second.

    python lab/rl_exact.py --device cuda --shape qwen3-0.6b --tokens 1000000 --json F
    python lab/rl_exact.py --device cuda --shape qwen3-0.6b --rounds 1000 --samples 16 --length 8
    python lab/rl_exact.py --device cpu --shape tiny --rounds 3

Each round samples answers to random prompts (forks of one prefix, in chunks, preempted by a small
cache, in groups that threads submit at random), computes the training forward pass over them,
compares each log-probability with the engine's, changes the weights by the gradient of a
policy-gradient loss, and updates the engine. The row says the largest difference, how many tokens
differ, the bytes of the device's allocator after each tenth of the rounds, and the rates. The exit
status is 1 if one token differs, or memory has grown between the second tenth and the last.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "rl"))

from policy import Policy, log_probabilities

from lab.on_shape import folder_of, machine, random_prompts
from tilewise import LLM, SamplingParams
from tilewise.models import load_model

MOST_GROWTH = 1 << 20  # bytes over all rounds: what the last answers hold differs by some kB


def sample(llm: LLM, prompts: list[Any], options: argparse.Namespace, draw: random.Random) -> Any:
    """Return rows, first places and log-probabilities of the answers to prompts."""
    groups: list[list[Any]] = [[] for _ in range(draw.randint(1, 4))]
    for prompt in prompts:
        draw.choice(groups).append(prompt)
    found: list[Any] = []

    def ask(group: list[Any], seed: int) -> None:
        params = SamplingParams(
            n=options.samples,
            max_tokens=options.length,
            seed=seed,
            ignore_eos=True,
            logprobs=0,
        )
        found.extend(llm.generate(group, params))

    threads = [
        threading.Thread(target=ask, args=(group, draw.randrange(2**31))) for group in groups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows, firsts, old = [], [], []
    for output in found:
        for each in output.outputs:
            rows.append([*output.prompt_token_ids, *each.token_ids])
            firsts.append(len(output.prompt_token_ids))
            old += [told[token] for told, token in zip(each.logprobs, each.token_ids, strict=True)]
    return rows, firsts, torch.tensor(old)


def main() -> None:
    """Measure, and print a row."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=0, help="0: as many as --tokens needs")
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rows", type=int, default=64, help="rows of a training pass")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--num-blocks", type=int, default=0, help="0: for half of the answers")
    parser.add_argument("--mismatch", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    draw = random.Random(0)
    torch.manual_seed(0)
    directory, is_random = folder_of(options.shape)
    model = load_model(
        directory, dtype=options.dtype, device=options.device, random_weights=is_random
    )
    policy = Policy(model, rank=options.rank, lr=1e-5)
    if not options.mismatch:
        model.use_inference_bits()
    seats = options.prompts * options.samples
    blocks = options.num_blocks or max(16, seats * (options.length + 16) // 16 // 2)
    llm = LLM(
        model,
        device=options.device,
        num_blocks=blocks,
        max_num_seqs=seats,
        max_model_len=256,
        swap_space_gib=0.1,
        batch_invariant=not options.mismatch,
        **({"graphs": "lazy"} if options.device == "cuda" else {}),
    )
    vocab = model.config.vocab_size
    of_a_round = seats * options.length
    rounds = options.rounds or max(1, -(-options.tokens // of_a_round))
    worst, differing, total, memory = 0.0, 0, 0, []
    seconds = {"rollout": 0.0, "train": 0.0, "update": 0.0}

    def row() -> dict[str, Any]:
        stats = llm.engine.stats().scheduler
        return {
            **{name: str(value) for name, value in vars(options).items() if name != "json"},
            **machine(options.device),
            "rounds": number + 1,
            "tokens": total,
            "max_difference": worst,
            "tokens_that_differ": differing,
            "preemptions": stats.num_preemptions,
            "swapped": stats.num_swapped,
            "memory": memory,
            "seconds": {name: round(value, 2) for name, value in seconds.items()},
            "tokens_a_second": round(total / sum(seconds.values())),
        }

    def lap(name: str, since: float) -> float:
        if options.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds[name] += now - since
        return now

    for number in range(rounds):
        at = time.perf_counter()
        prompts = random_prompts(options.prompts, 4, 40, vocab, seed=number)
        rows, firsts, old = sample(llm, prompts, options, draw)
        at = lap("rollout", at)
        done = 0
        for first in range(0, len(rows), options.rows):
            some = slice(first, first + options.rows)
            logp = log_probabilities(model, rows[some], firsts[some])
            own = old[done : done + len(logp)].to(logp.device)
            done += len(logp)
            gap = (logp.detach() - own).abs()
            worst = max(worst, gap.max().item())
            differing += int((gap != 0).sum())
            advantage = torch.randn(len(logp), device=logp.device)
            (-((logp - own).exp() * advantage).sum() / len(old)).backward()
        policy.step()
        at = lap("train", at)
        llm.update_weights()
        lap("update", at)
        total += len(old)
        if number % max(1, rounds // 10) == 0:
            held = torch.cuda.memory_allocated() if options.device == "cuda" else 0
            reserved = torch.cuda.memory_reserved() if options.device == "cuda" else 0
            memory.append((number, held, reserved))
            print(
                f"round {number}: {total:,} tokens, {differing} differ, {held:,} bytes", flush=True
            )
        if options.json is not None:  # a machine may be lent for less time than all rounds take
            options.json.write_text(json.dumps(row(), indent=1) + "\n")
    print(json.dumps(row()))
    llm.close()
    grows = len(memory) > 3 and memory[-1][1] > memory[2][1] + MOST_GROWTH
    if not options.mismatch and (differing or grows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
