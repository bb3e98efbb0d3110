"""Reinforcement learning in one process: the engine that samples is the model that is trained.

    python examples/rl/grpo.py                  # float32, all weights, some minutes on a CPU
    python examples/rl/grpo.py --dtype bfloat16 --rank 16 --sequence-level
    python examples/rl/grpo.py --dtype bfloat16 --mismatch --log mismatch.json
    python examples/rl/plot.py exact.json mismatch.json --out rl.png

Each step samples `--samples` answers to each of some prompts, which share the blocks of their
prompt, scores them by code (`task.py`), and changes the weights by the gradient of

    J = mean_t min(r_t A, clip(r_t, 1 - e, 1 + e) A),   r_t = exp(logp_t - old_t),
    A = (reward - mean of its group) / (standard deviation of its group + 1e-4)

or, with --sequence-level, by that of one ratio for each answer, exp(mean_t (logp_t - old_t)). The
old log-probabilities are those that the engine returned with the tokens: there is no second pass.
Before the first change of a step they are, bit for bit, those of the training forward pass, in
spite of what happens to requests: too few cache blocks preempt and swap them, prompts are computed
in chunks, samples are forks of one prefix, and threads submit them in groups drawn at random. The
script checks that max |logp - old| == 0.0 at every step, and ends if it is not.

--mismatch puts back what others have: an engine whose sums depend on the batch, and torch's own
products in training. Then the difference is measured, and nothing is checked.

Sources: Shao et al., 2024 (GRPO); Zheng et al., 2025 (GSPO, the sequence-level form).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from policy import Policy, log_probabilities
from task import prompts, reward

from tilewise import LLM, SamplingParams
from tilewise.engine.settings import model_directory
from tilewise.models import load_model

CLIP, CLIP_SEQUENCE = 0.2, 3e-2


@dataclass(frozen=True)
class Answers:
    """What a step has sampled.

    Attributes:
        rows: the token ids of prompt and answer.
        firsts: the place of the first token of each answer.
        old: the engine's log-probabilities, float32 (tokens of all answers,).
        rewards: (prompts, samples).
        text: one of the answers.
    """

    rows: list[list[int]]
    firsts: list[int]
    old: Tensor
    rewards: Tensor
    text: str


def sample(llm: LLM, options: argparse.Namespace, draw: random.Random) -> Answers:
    """Let the engine answer prompts, which threads submit in groups drawn at random."""
    texts = prompts(options.prompts, draw)
    groups: list[list[str]] = [[] for _ in range(draw.randint(1, 3))]
    for text in texts:
        draw.choice(groups).append(text)
    found: dict[str, Any] = {}

    def ask(group: list[str], seed: int) -> None:
        asked = [
            SamplingParams(
                n=options.samples,
                temperature=1.0,
                max_tokens=options.tokens,
                seed=seed + i,
                logprobs=0,
            )
            for i in range(len(group))
        ]
        for text, output in zip(group, llm.generate(group, asked), strict=True):
            found[text] = output

    threads = [
        threading.Thread(target=ask, args=(group, draw.randrange(2**31)))
        for group in groups
        if group
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(found) != len(texts):
        raise RuntimeError("the engine has not answered all prompts")
    rows, firsts, old, rewards = [], [], [], []
    for text in texts:
        output = found[text]
        for each in output.outputs:
            rows.append([*output.prompt_token_ids, *each.token_ids])
            firsts.append(len(output.prompt_token_ids))
            old += [step[token] for step, token in zip(each.logprobs, each.token_ids, strict=True)]
        rewards.append([reward(each.text) for each in output.outputs])
    return Answers(
        rows, firsts, torch.tensor(old), torch.tensor(rewards), found[texts[0]].outputs[0].text
    )


def objective(
    logp: Tensor, old: Tensor, advantages: Tensor, sizes: list[int], *, is_sequence_level: bool
) -> tuple[Tensor, Tensor]:
    """Return J and the ratios, of tokens or of answers.

    Args:
        logp, old: (tokens of all answers,).
        advantages: (answers,).
        sizes: the tokens of each answer.
    """
    counts = torch.tensor(sizes, device=logp.device)
    answer = torch.repeat_interleave(torch.arange(len(sizes), device=logp.device), counts)
    change = logp - old
    if is_sequence_level:
        mean = torch.zeros_like(advantages).index_add(0, answer, change) / counts
        ratio, of_each, clip = mean.exp(), advantages, CLIP_SEQUENCE
    else:
        ratio, of_each, clip = change.exp(), advantages[answer], CLIP
    least = torch.minimum(ratio * of_each, ratio.clamp(1 - clip, 1 + clip) * of_each)
    return least.mean(), ratio.detach()


def learn(policy: Policy, answers: Answers, options: argparse.Namespace) -> dict[str, float]:
    """Change the weights; return what the first pass over the answers has shown.

    Raises:
        AssertionError: a log-probability is not the one of the engine, to the bit.
    """
    rewards = answers.rewards
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    sizes = [len(row) - first for row, first in zip(answers.rows, answers.firsts, strict=True)]
    shown: dict[str, float] = {}
    for epoch in range(options.epochs):
        logp = log_probabilities(policy.model, answers.rows, answers.firsts)
        old, scores = answers.old.to(logp.device), advantages.flatten().to(logp.device)
        value, ratio = objective(logp, old, scores, sizes, is_sequence_level=options.sequence_level)
        if epoch == 0:
            gap = (logp.detach() - old).abs()
            change = old - logp.detach()
            shown = {
                "difference": gap.max().item(),
                "kl": (change.exp() - 1 - change).mean().item(),
                "ratio": ratio.sub(1).abs().max().item(),
            }
            if not options.mismatch and shown["difference"] != 0.0:
                raise AssertionError(
                    f"max |logp_train - logp_rollout| must be 0.0, got {shown['difference']:g}, at "
                    f"{int((gap > 0).sum())} of {len(gap)} tokens"
                )
        (-value).backward()
        norm = policy.step()
        shown.setdefault("gradient", norm)
    return shown


def main(given: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Train; return the numbers of each step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="story")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--rank", type=int, default=0, help="of an adapter, a multiple of 16; 0 learns all weights"
    )
    parser.add_argument("--sequence-level", action="store_true")
    parser.add_argument("--mismatch", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=4, help="of a step, at most 32")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the answers of a step")
    parser.add_argument("--lr", type=float, help="default: 3e-5, or 5e-4 for adapters")
    parser.add_argument("--blocks", type=int, default=40, help="of the cache: few preempt requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="file for the numbers, JSON")
    options = parser.parse_args(given)
    torch.manual_seed(options.seed)
    draw = random.Random(options.seed)
    directory = model_directory(options.model)
    model = load_model(directory, dtype=options.dtype, device=options.device)
    lr = options.lr or (5e-4 if options.rank else 3e-5)
    policy = Policy(model, rank=options.rank, lr=lr)
    if not options.mismatch:
        model.use_inference_bits()
    llm = LLM(
        model,
        tokenizer=directory,
        device=options.device,
        batch_invariant=not options.mismatch,
        num_blocks=options.blocks,
        max_num_seqs=options.prompts * options.samples,
        max_num_batched_tokens=max(64, options.prompts * options.samples),
        swap_space_gib=0.02,
    )
    print(f"{options.dtype}, {policy.num_learnt:,} numbers learnt, {options.device}")
    log, began, tokens = [], time.perf_counter(), 0
    for step in range(options.steps):
        at = time.perf_counter()
        answers = sample(llm, options, draw)
        sampled = time.perf_counter() - at
        shown = learn(policy, answers, options)
        llm.update_weights()
        tokens += len(answers.old)
        stats = llm.engine.stats().scheduler
        shown |= {
            "step": step,
            "reward": answers.rewards.mean().item(),
            "tokens": tokens,
            "preemptions": stats.num_preemptions,
            "rollout_s": sampled,
            "step_s": time.perf_counter() - at,
        }
        log.append(shown)
        print(
            f"step {step:3}  reward {shown['reward']:.3f}  max |logp - old| "
            f"{shown['difference']:g}  tokens {tokens:,}  preempted {stats.num_preemptions}  "
            f"{time.perf_counter() - began:.0f} s",
            flush=True,
        )
    print(f"an answer of the last step: {answers.text!r}")
    llm.close()
    if options.log is not None:
        about = {name: str(value) for name, value in vars(options).items()}
        options.log.write_text(json.dumps({"options": about, "steps": log}, indent=1) + "\n")
    return log


if __name__ == "__main__":
    main()
