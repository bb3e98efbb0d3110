"""A step of reinforcement learning, beside TRL's over transformers' generate, in one process.

    python lab/rl_speed.py --device cuda --shape qwen3-0.6b --json F
    python lab/rl_speed.py --device cpu --shape tiny --prompts 2 --samples 4 --length 8 --steps 2

Each step samples answers of one length to random prompts, scores them by code, and changes all
weights by the gradient of GRPO's objective, in passes of `--rows` answers. Forms: "exact" is the
loop of `examples/rl` with an engine whose log-probabilities are those of the training pass,
"mismatch" the same with neither, "trl" GRPOTrainer of TRL with its fastest settings (weights and
Adam in the model's 16 bits, no second pass for old log-probabilities, no reference model, no
checkpoints of activations). The model has random weights; a form has a model of its own, the forms
run one after the other, and the first step of each is not counted. A row says the tokens sampled
a second of the whole loop, median and extremes of the steps, and what parts of ours take.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "rl"))

from grpo import objective
from policy import Policy, log_probabilities

from lab.on_shape import folder_of, machine, random_prompts
from tilewise import LLM, SamplingParams
from tilewise.models import load_model

WARM_STEPS = 1  # that are not counted: graphs are captured, memory is taken, in TRL's as in ours
WORDS = 50_000  # of the vocabulary, that prompts are drawn from


def reward(token_ids: list[int]) -> float:
    """Return the share of even tokens: a task that needs no words."""
    return sum(token % 2 == 0 for token in token_ids) / max(1, len(token_ids))


def advantages_of(rewards: torch.Tensor) -> torch.Tensor:
    """Return (reward - mean of the group) / (deviation + 1e-4), for (prompts, samples)."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def now(device: str) -> float:
    """Return seconds, after what the device was asked for."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def prompts_of(options: argparse.Namespace, vocab: int, step: int) -> list[dict[str, list[int]]]:
    """Return the prompts of a step, the same in each form."""
    top = min(vocab, WORDS)
    return random_prompts(options.prompts, options.prompt, options.prompt, top, seed=step)


def ours(options: argparse.Namespace, is_exact: bool) -> Iterator[dict[str, float]]:
    """Run steps of this package's loop; yield the seconds of each one's parts."""
    folder, is_random = folder_of(options.shape)
    model = load_model(folder, dtype=options.dtype, device=options.device, random_weights=is_random)
    if is_exact:
        model.use_inference_bits()
    policy = Policy(model, rank=0, lr=1e-6)
    seats = options.prompts * options.samples
    tokens = options.prompt + options.length
    llm = LLM(
        model,
        device=options.device,
        num_blocks=seats * (tokens // 16 + 2),
        max_num_seqs=seats,
        max_model_len=tokens + 16,
        batch_invariant=is_exact,
        **({"graphs": "lazy"} if options.device == "cuda" else {}),
    )
    for step in range(WARM_STEPS + options.steps):
        at = now(options.device)
        params = SamplingParams(
            n=options.samples, max_tokens=options.length, seed=step, ignore_eos=True, logprobs=0
        )
        outputs = llm.generate(prompts_of(options, model.config.vocab_size, step), params)
        sampled = now(options.device)
        rows = [[*o.prompt_token_ids, *each.token_ids] for o in outputs for each in o.outputs]
        firsts = [options.prompt] * len(rows)
        old = torch.tensor(
            [
                told[token]
                for o in outputs
                for each in o.outputs
                for told, token in zip(each.logprobs, each.token_ids, strict=True)
            ],
            device=options.device,
        ).view(len(rows), -1)
        scores = torch.tensor([[reward(each.token_ids) for each in o.outputs] for o in outputs])
        advantages = advantages_of(scores).flatten().to(options.device)
        for first in range(0, len(rows), options.rows):
            some = slice(first, first + options.rows)
            logp = log_probabilities(model, rows[some], firsts[some])
            sizes = [options.length] * len(rows[some])
            value, _ = objective(
                logp, old[some].flatten(), advantages[some], sizes, is_sequence_level=False
            )
            (-value * len(sizes) / len(rows)).backward()
        policy.step()
        trained = now(options.device)
        llm.update_weights()
        ended = now(options.device)
        yield {
            "rollout": sampled - at,
            "train": trained - sampled,
            "update": ended - trained,
            "all": ended - at,
        }
    llm.close()


def trl(options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Run steps of TRL's trainer; yield the seconds of each."""
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        PreTrainedTokenizerFast,
        TrainerCallback,
    )
    from trl import GRPOConfig, GRPOTrainer

    folder, _ = folder_of(options.shape)
    config = AutoConfig.from_pretrained(folder)
    dtype = getattr(torch, options.dtype)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    vocab = {f"t{i}": i for i in range(config.vocab_size)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t0"
    )
    steps = WARM_STEPS + options.steps
    texts = [
        " ".join(f"t{token}" for token in prompt["prompt_token_ids"])
        for step in range(steps)
        for prompt in prompts_of(options, config.vocab_size, step)
    ]
    # With a name of its own it is not hashed, which some versions of dill and Arrow cannot do.
    dataset = Dataset(InMemoryTable(pyarrow.table({"prompt": texts})), fingerprint="prompts")
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not ends:
                ends.append(now(options.device))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(now(options.device))

    def score(completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert all(len(ids) == options.length for ids in completion_ids), "answers of one length"
        return [reward(ids) for ids in completion_ids]

    seats = options.prompts * options.samples
    with tempfile.TemporaryDirectory() as out:
        settings = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=options.rows,
            gradient_accumulation_steps=seats // options.rows,
            num_generations=options.samples,
            max_completion_length=options.length,
            generation_kwargs={"min_new_tokens": options.length},
            temperature=1.0,
            beta=0.0,
            max_steps=steps,
            bf16=options.dtype == "bfloat16",
            gradient_checkpointing=False,
            learning_rate=1e-6,
            shuffle_dataset=False,
            logging_steps=10**6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=options.device == "cpu",
            loss_type="grpo",
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=score,
            args=settings,
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    assert len(ends) == steps + 1
    for began, ended in itertools.pairwise(ends):
        yield {"all": ended - began}


def main() -> None:
    """Measure, and print a row."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--forms", nargs="+", default=["exact", "mismatch", "trl"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--length", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--rows", type=int, default=64, help="answers of a training pass")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.prompts * options.samples % options.rows:
        parser.error(f"--rows must divide prompts x samples, got {options.rows}")
    run = {"exact": lambda: ours(options, True), "mismatch": lambda: ours(options, False)}
    run["trl"] = lambda: trl(options)
    tokens = options.prompts * options.samples * options.length
    rows: dict[str, Any] = {}
    for form in options.forms:
        torch.manual_seed(0)
        found = list(run[form]())[WARM_STEPS:]
        parts = {name: statistics.median(each[name] for each in found) for name in found[0]}
        totals = [each["all"] for each in found]
        rows[form] = {
            "tokens_a_second": round(tokens / parts["all"]),
            "spread": [round(tokens / seconds) for seconds in (max(totals), min(totals))],
            "seconds": {name: round(value, 4) for name, value in parts.items()},
        }
        print(form, json.dumps(rows[form]), flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        if {"exact", "trl"} <= set(rows):
            own, other = (rows[form]["tokens_a_second"] for form in ("exact", "trl"))
            rows["exact"]["times_trl"] = round(own / other, 2)
        given = {name: str(value) for name, value in vars(options).items()}
        row = {**machine(options.device), **given, "rows": rows}
        if options.json is not None:
            options.json.write_text(json.dumps(row, indent=1) + "\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
