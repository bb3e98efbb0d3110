"""What a checkpoint's own head gains: tokens/s of a sequence with guesses and without, on a GPU.

    python lab/own_head.py --json F
    python lab/own_head.py --device cpu --tiny --tokens 12      # tries without a GPU

The model has the sizes of GLM-4.7-Flash, or those of a config.json, and random weights. Rows of a
step that verifies guesses choose experts of their own, so that a mixture reads more weights the
more rows there are; --dense puts a block of the width of its first layers in place of experts. The
head guesses nothing right. So acceptance is simulated: each guess is taken for right with the
probability --acceptance until one is not. Everything else is done as always: guesses, their
verification, draws. Times are of the difference between long and short answers, the median of the
turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.on_shape import machine
from tilewise import LLM, SamplingParams
from tilewise.engine.batch import Batch, SampledToken
from tilewise.engine.config import OwnHead
from tilewise.engine.steps import runner

GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
    "vocab_size": 154_880,
    "hidden_size": 2048,
    "intermediate_size": 10_240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.8,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "rope_interleave": True,
    "tie_word_embeddings": False,
}
TINY = {
    "vocab_size": 503, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32,
    "q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def simulated(acceptance: float) -> Callable[..., list[list[SampledToken]]]:
    """Return an `accepted` that takes each guess for right with a probability."""
    draw = random.Random(0)

    def accepted(batch: Batch, samples: list[list[SampledToken]]) -> list[list[SampledToken]]:
        rows, found = iter(samples), []
        for run in batch.sequences:
            if run.num_drafts == 0:
                found.append(next(rows))
                continue
            drawn = [next(rows)[0] for _ in range(run.num_drafts + 1)]
            drafts, right = run.token_ids[-run.num_drafts :], 0
            while right < run.num_drafts and draw.random() < acceptance:
                right += 1
            found.append([SampledToken(token) for token in drafts[:right]] + [drawn[right]])
        return found

    return accepted


def seconds(llm: LLM, rows: int, tokens: int) -> float:
    """Return how long answers of so many tokens take."""
    draw = torch.Generator().manual_seed(rows)
    prompts = torch.randint(3, 500, (rows, 128), generator=draw).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    llm.reset_prefix_cache()
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    return time.perf_counter() - began


def rate(llm: LLM, rows: int, options: argparse.Namespace) -> float:
    """Return the tokens/s of a sequence after its first ones."""
    short = max(2, options.tokens // 8)
    found = []
    for turn in range(options.turns + 1):
        taken = seconds(llm, rows, options.tokens) - seconds(llm, rows, short)
        if turn:  # the first one captures
            found.append((options.tokens - short) / taken)
    return statistics.median(found)


def main() -> None:
    """Measure each number of guesses, and none."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, help="a config.json in place of GLM-4.7-Flash's")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--guesses", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--dense", action="store_true", help="feed-forward blocks of one expert that all rows use"
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = json.loads(options.config.read_text()) if options.config else GLM
    runner.accepted = simulated(options.acceptance)
    results: dict[str, Any] = {"machine": machine(options.device), "tokens_per_s": {}}
    results["options"] = {name: str(value) for name, value in vars(options).items()}
    with tempfile.TemporaryDirectory() as folder:
        whole = config | (TINY if options.tiny else {})
        if options.dense:  # the head's layer is of the kind of the last one
            whole["first_k_dense_replace"] = whole["num_hidden_layers"]
        (Path(folder) / "config.json").write_text(json.dumps(whole))
        for guesses in options.guesses:
            own = OwnHead(num_tokens=guesses, is_adaptive=False) if guesses else None
            settings: dict[str, Any] = {"graphs": "lazy"} if options.device == "cuda" else {}
            with LLM(
                folder,
                device=options.device,
                dtype="bfloat16",
                random_weights=True,
                speculative=own,
                max_num_seqs=max(options.rows),
                max_model_len=128 + options.tokens + 8,
                num_blocks=max(options.rows) * (options.tokens // 16 + 10),
                **settings,
            ) as llm:
                found = {str(rows): round(rate(llm, rows, options), 2) for rows in options.rows}
            results["tokens_per_s"][str(guesses)] = found
            print(guesses, "guesses", found, flush=True)
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
            if options.json:
                options.json.write_text(json.dumps(results) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
