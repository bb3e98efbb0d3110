"""Compare small random models of all decoder families with transformers, in an engine.

For each case of tests/models/every_decoder.py and each way ("auto", "tilewise", "transformers"): 64
greedy tokens of three prompts and their log-probabilities in float32, in chunks of 16 tokens, with
preemption, a prefix that is found, two samples, and bfloat16. The truth is transformers' pass over
a whole text without a cache. A model with states has a prompt of more than the 64 tokens
between two of their checkpoints, of which a prefix is found. A case is right, refused with a
reason, or wrong; a family serves if one of its cases is right and none is wrong.

python lab/models.py [--way auto] [--json FILE] [CASE ...]    # FILE is written case by case, and
                                                              # cases that it has are not run again
python lab/models.py --count FILE ...                         # how many families serve
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.models.every_decoder import CASES, FAMILIES, make
from tests.models.test_state_families import CASES as WITH_STATES
from tests.models.tiny import VOCAB
from tilewise import LLM, SamplingParams
from tilewise.errors import CheckpointError, UnsupportedError

STEPS = 64
SAMPLED = (
    8  # tokens of each of two samples, few enough that the prompt's blocks remain in the cache
)
LENGTHS = (30, 1, 9)
LONG = (70, 1, 9)  # of prompts to models with states
BLOCKS = {96: 30, 144: 44}  # of the cache, few enough for preemption, by the longest text
MOST_ERROR = 2e-4  # of a log-probability in float32
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "block_size": 4,
    "max_num_batched_tokens": 16,
}


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    """Return the prompts of the three lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


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
            error = float((torch.tensor(own) - chosen).abs().max())
            worst = max(worst, error if math.isfinite(error) else math.inf)
    return same, worst


def check(case: str, way: str) -> dict[str, Any]:
    """Return what one case gives in one way."""
    is_long = case in WITH_STATES
    given, longest = prompts(LONG if is_long else LENGTHS), 144 if is_long else 96
    sizes: dict[str, Any] = {**OPTIONS, "max_model_len": longest}
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, logprobs=1)
    asked = [{"prompt_token_ids": prompt} for prompt in given]
    found: dict[str, Any] = {"case": case, "family": CASES[case][0]}
    with tempfile.TemporaryDirectory() as directory:
        first = make(case)
        first.save_pretrained(directory)
        # As transformers reads it: a few set the row of padding to 0.
        model, narrow = (
            type(first).from_pretrained(directory, dtype=dtype, attn_implementation="eager")
            for dtype in (torch.float32, torch.bfloat16)
        )
        with LLM(
            directory, num_blocks=BLOCKS[longest], max_num_seqs=3, model_impl=way, **sizes
        ) as llm:
            config = llm.model.config
            found["way"] = "tilewise" if config.is_native else "transformers"
            found["architecture"] = config.architecture
            outputs = llm.generate(asked, params)
            found["tokens"], found["error"] = compare(model, given, outputs)
            # Where all layers have windows, they give back blocks before others lack them.
            found["preemptions"] = llm.engine.scheduler.stats().num_preemptions
            can_lack_blocks = None in config.windows
            few = replace(params, temperature=1.0, n=2, max_tokens=SAMPLED)
            for _ in range(2):
                sampled = llm.generate(asked[:1], few)
            found["prefix_tokens"] = sampled[0].num_cached_tokens
            found["error_of_two"] = compare(model, given[:1], sampled)[1]
            found["why_not_compiled"] = llm.engine.stats().why_not_compiled
        with LLM(
            directory, num_blocks=3 * BLOCKS[longest], dtype="bfloat16", model_impl=way, **sizes
        ) as llm:
            outputs = llm.generate(asked, params)
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
        and (found["preemptions"] > 0 or not can_lack_blocks)
        and found["prefix_tokens"] > 0
        and own < 2 * theirs + 0.006
    )
    return found


def counted(results: list[dict[str, Any]]) -> str:
    """Return how many of the families serve, natively or through transformers, and the others."""
    kinds: dict[str, list[str]] = {"native": [], "transformers": [], "refused": [], "wrong": []}
    for family in FAMILIES:
        own = [result for result in results if result["family"] == family]
        right = {result["way"] for result in own if result["is_right"]}
        if not own or any(not r["is_right"] and "refused" not in r for r in own):
            kinds["wrong"].append(family)
        elif right:
            kinds["native" if "tilewise" in right else "transformers"].append(family)
        else:
            kinds["refused"].append(family)
    served = len(kinds["native"]) + len(kinds["transformers"])
    lines = [f"{served} of {len(FAMILIES)} families serve"]
    lines += [f"{kind} ({len(names)}): {', '.join(names)}" for kind, names in kinds.items()]
    return "\n".join(lines)


def main() -> None:
    """Print a line for each case, or how many families serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all if none is named")
    parser.add_argument("--way", choices=("auto", "tilewise", "transformers"), default="auto")
    parser.add_argument("--json", type=Path, help="file for the results, written case by case")
    parser.add_argument("--count", type=Path, nargs="+", help="files of results to count")
    options = parser.parse_args()
    if options.count:
        print(counted([r for file in options.count for r in json.loads(file.read_text())["cases"]]))
        return
    warnings.simplefilter("ignore")
    file, results = options.json, []
    if file is not None and file.exists():
        results = json.loads(file.read_text(encoding="utf-8"))["cases"]
        results = [r for r in results if r["case"] not in options.cases]
    for case in options.cases or CASES:
        if any(result["case"] == case for result in results):
            continue
        try:
            result = check(case, options.way)
        except (CheckpointError, UnsupportedError) as error:
            said = " ".join(str(error).split()).rpartition("; ")[2][:300]  # the last reason
            result = {"case": case, "family": CASES[case][0], "is_right": False, "refused": said}
        except Exception as error:  # a crash is wrong, and the other cases are run
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            result = {"case": case, "family": CASES[case][0], "is_right": False, "crashed": said}
        print(json.dumps(result), flush=True)
        results.append(result)
        if file is not None:
            of = {"transformers": transformers.__version__, "torch": torch.__version__}
            text = json.dumps({**of, "way": options.way, "cases": results}, indent=1)
            file.write_text(text + "\n", encoding="utf-8")
    print(f"{sum(result['is_right'] for result in results)} of {len(results)} cases are right")
    print(counted(results))


if __name__ == "__main__":
    main()
