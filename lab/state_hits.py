"""What prefix hits give a model with states: prompts of 4,096 tokens, 90 % of them alike, and none.

    python lab/state_hits.py [--requests 24] [--device cpu] [--json FILE]

A small random model of Qwen3.5's layers (gated delta, and attention in each fourth) answers the
prompts with `--tokens` tokens each, first alike beside none alike, then in turn; the answers must
be those of each prompt alone.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

from tests.models.tiny import save_hf
from tilewise import LLM, SamplingParams

VOCAB = 2048


def write_model(folder: Path, hidden: int, layers: int) -> Path:
    """Write a random checkpoint."""
    config = transformers.Qwen3_5ForCausalLM.config_class(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 256, 1), head_dim=64, linear_num_key_heads=hidden // 64,
        linear_num_value_heads=hidden // 64, linear_key_head_dim=64, linear_value_head_dim=64,
        max_position_embeddings=8192, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(1)
    return Path(save_hf(transformers.Qwen3_5ForCausalLM(config).eval(), folder))


def prompts(count: int, length: int, shared: int) -> list[dict[str, list[int]]]:
    """Draw prompts that begin with the same tokens."""
    draw = random.Random(shared)
    first = [draw.randrange(3, VOCAB) for _ in range(shared)]
    return [
        {"prompt_token_ids": first + [draw.randrange(3, VOCAB) for _ in range(length - shared)]}
        for _ in range(count)
    ]


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder), args.hidden, args.layers)
        settings = {
            "device": args.device, "max_num_seqs": 8, "max_model_len": 4608, "num_blocks": 8192,
            "batch_invariant": True,
        }  # fmt: skip
        params = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
        for name, shared in (("none alike", 0), ("90 % alike", args.length * 9 // 10)):
            llm = LLM(path, **settings)
            llm.generate(prompts(1, args.length, 1), params)  # what is compiled once
            given = prompts(args.requests, args.length, shared)
            start = time.perf_counter()
            found = llm.generate(given, params)
            seconds = time.perf_counter() - start
            stats, storage = llm.engine.stats().scheduler, llm.engine.runner.storage
            rows[name] = {
                "seconds": round(seconds, 3),
                "prompt_tokens_per_s": round(args.requests * args.length / seconds, 1),
                "hit_share": round(stats.prefix_hit_tokens / (args.requests * args.length), 3),
                "checkpoints": stats.checkpoints[0],
                "checkpoint_bytes": storage.states.checkpoints.shape[1],
            }
            alone = LLM(path, **settings, enable_prefix_caching=False)
            for i in (0, args.requests - 1):
                [truth] = alone.generate([given[i]], params)
                assert truth.outputs[0].token_ids == found[i].outputs[0].token_ids
            llm.close()
            alone.close()
            print(name, rows[name], flush=True)
    ratio = rows["90 % alike"]["prompt_tokens_per_s"] / rows["none alike"]["prompt_tokens_per_s"]
    print(f"{ratio:.2f} times the throughput")
    if args.json is not None:
        told = {"device": args.device, "torch": torch.__version__, "requests": args.requests}
        args.json.write_text(json.dumps(told | {"rows": rows, "ratio": ratio}, indent=1) + "\n")


if __name__ == "__main__":
    main()
