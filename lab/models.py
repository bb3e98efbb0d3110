"""Compare small random models of families with transformers, in an engine: the long form.

For each family of tests/models/test_families.py and each way ("tilewise", "transformers"): 64
greedy tokens of three prompts and their log-probabilities in float32, in chunks of 16 tokens, with
preemption, a prefix that is found, two samples, and bfloat16. The truth is transformers' pass over
a whole text without a cache.

python lab/models.py [--way tilewise] [--json FILE] [FAMILY ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.models.test_families import CASES, make
from tests.models.tiny import VOCAB
from tilewise import LLM, SamplingParams

STEPS = 64
LENGTHS = (30, 1, 9)
MOST_ERROR = 2e-4  # of a log-probability in float32
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "block_size": 4,
    "max_model_len": 96,
    "max_num_batched_tokens": 16,
}


def prompts() -> list[list[int]]:
    """Return the prompts of the three lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


@torch.no_grad()
def truth(model: Any, prompt: list[int], sampled: list[int]) -> torch.Tensor:
    """Return the log-probabilities (n, V) of what follows a prompt, in float32."""
    text = torch.tensor([prompt + sampled])
    logits = model(text, use_cache=False).logits[0, len(prompt) - 1 : -1]
    found: torch.Tensor = logits.float().log_softmax(-1)
    return found


def compare(model: Any, given: list[list[int]], outputs: Any) -> tuple[int, float]:
    """Return how many tokens are the most likely ones, and the largest error."""
    same, worst = 0, 0.0
    for prompt, output in zip(given, outputs, strict=True):
        for sample in output.outputs:
            tokens = list(sample.token_ids)
            want = truth(model, prompt, tokens)
            same += int((want.argmax(-1) == torch.tensor(tokens)).sum())
            chosen = want.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            own = [step[t] for step, t in zip(sample.logprobs, tokens, strict=True)]
            worst = max(worst, float((torch.tensor(own) - chosen).abs().max()))
    return same, worst


def check(case: str, way: str) -> dict[str, Any]:
    """Return what one family says in one way."""
    model, given = make(case), prompts()
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, logprobs=1)
    asked = [{"prompt_token_ids": prompt} for prompt in given]
    found: dict[str, Any] = {"family": case, "way": way}
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        with LLM(directory, num_blocks=30, max_num_seqs=3, model_impl=way, **OPTIONS) as llm:
            outputs = llm.generate(asked, params)
            found["tokens"], found["error"] = compare(model, given, outputs)
            found["preemptions"] = llm.engine.scheduler.stats().num_preemptions
            for _ in range(2):
                sampled = llm.generate(asked[:1], replace(params, temperature=1.0, n=2))
            found["prefix_tokens"] = sampled[0].num_cached_tokens
            found["error_of_two"] = compare(model, given[:1], sampled)[1]
            found["why_not_compiled"] = llm.engine.stats().why_not_compiled
        with LLM(directory, num_blocks=90, dtype="bfloat16", model_impl=way, **OPTIONS) as llm:
            outputs = llm.generate(asked, params)
        narrow = make(case).to(torch.bfloat16)
        own = theirs = 0.0
        for prompt, output in zip(given, outputs, strict=True):
            [sample] = output.outputs
            tokens = list(sample.token_ids)
            exact, rounded = (truth(m, prompt, tokens) for m in (model, narrow))
            index = torch.tensor(tokens)[:, None]
            steps = sample.logprobs or []
            said = torch.tensor([step[t] for step, t in zip(steps, tokens, strict=True)])
            own += float((said - exact.gather(1, index)[:, 0]).abs().mean())
            theirs += float((rounded - exact).gather(1, index).abs().mean())
        found["bfloat16_error"], found["bfloat16_error_of_transformers"] = own, theirs
    found["is_right"] = (
        found["tokens"] == STEPS * len(LENGTHS)
        and max(found["error"], found["error_of_two"]) < MOST_ERROR
        and found["prefix_tokens"] > 0
        and own < 2 * theirs + 0.006
    )
    return found


def main() -> None:
    """Print a line for each family and way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="all if none is named")
    parser.add_argument("--way", choices=("tilewise", "transformers"), default="tilewise")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results = []
    for case in options.families or CASES:
        try:
            result = check(case, options.way)
        except Exception as error:  # a refusal is a result, too
            said = " ".join(str(error).split())[:200]
            result = {"family": case, "way": options.way, "is_right": False, "refused": said}
        results.append(result)
        print(json.dumps(result), flush=True)
    print(f"{sum(result['is_right'] for result in results)} of {len(results)} are right")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
