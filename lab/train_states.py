"""A training step of Qwen3.5-0.8B's shape beside transformers with flash-linear-attention.

    python lab/train_states.py --json F

Weights are random, the same for both, and so are the tokens: 16,384 a step, in documents of 4,096
and of 16,384. Ours is `tilewise.training` over packed documents; theirs is transformers' model in
rows, with autocast to bfloat16, fused AdamW, torch's attention and, where it is installed, fla's
kernels. The losses of the first steps come first, then milliseconds of a step, the median. The
first step of each takes minutes: torch.compile compiles 24 layers as one graph, and fla tunes each
kernel over up to 25 configurations. The standard error has the seconds at which each step ended.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.on_shape import machine
from lab.recurrent import without_models
from tilewise.bench.engines.shapes import SHAPES
from tilewise.models import ModelConfig, build_model
from tilewise.training.decoder import Documents
from tilewise.training.packing import Batch
from tilewise.training.parameters import load_parameters
from tilewise.training.trainer import Settings, Trainer

# Without the dtype: transformers' weights are float32, and so are ours.
SHAPE: dict[str, Any] = {
    name: value
    for name, value in SHAPES["qwen3.5-0.8b"].items()
    if name not in ("model_type", "dtype")
} | {"max_position_embeddings": 32_768}
_TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
_LR, _BETAS, _EPS = 1e-4, (0.9, 0.95), 1e-8
_COMPARED = 4  # steps whose losses are shown
_START = time.perf_counter()

Step = Callable[[Tensor], Tensor]


def peer(shape: dict[str, Any], device: str) -> Any:
    """Return transformers' model of the shape with random weights."""
    without_models()
    import transformers

    fields = {name: value for name, value in shape.items() if name != "architectures"}
    config = transformers.Qwen3_5TextConfig(**fields, use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.Qwen3_5ForCausalLM._from_config(config, attn_implementation="sdpa")
    return model.train()


def peer_step(model: Any, device: str) -> Step:
    """Return a step of transformers' model over rows (B, S + 1)."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=0.0, fused=True
    )

    def step(rows: Tensor) -> Tensor:
        ids, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        with torch.autocast(device, torch.bfloat16):
            loss: Tensor = model(input_ids=ids, labels=ids, shift_labels=targets).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def our_step(shape: dict[str, Any], tensors: dict[str, Tensor], device: str, mode: str) -> Step:
    """Return a step of `tilewise.training` over the same rows, packed."""
    model = build_model(ModelConfig.from_hf(shape), device=torch.device(device))
    load_parameters(model, tensors)
    settings = Settings(
        lr=_LR, final_lr=1.0, warm_up=0, steps=1, decay=0.0, betas=_BETAS, eps=_EPS, clip=0.0,
        compile=mode,
    )  # fmt: skip
    trainer = Trainer(model, settings, words=shape["vocab_size"])

    def step(rows: Tensor) -> Tensor:
        count, length = rows.shape[0], rows.shape[1] - 1
        edges = torch.arange(count + 1, dtype=torch.int32, device=rows.device) * length
        batch = Batch(
            rows[:, :-1].reshape(-1), rows[:, 1:].reshape(-1),
            torch.arange(length, device=rows.device).repeat(count), Documents(edges, length), None,
            count, count * length**2, {},
        )  # fmt: skip
        return trainer.step([batch])

    return step


def tell(what: str) -> None:
    """Write a line of progress with the seconds since the start."""
    print(f"{time.perf_counter() - _START:8.1f}", what, file=sys.stderr, flush=True)


def measure(step: Step, draws: list[Tensor], steps: int) -> dict[str, Any]:
    """Return the first losses, and the median of the milliseconds of later steps."""
    is_cuda = draws[0].is_cuda
    losses = []
    for n in range(_COMPARED):
        losses.append(float(step(draws[n % len(draws)])))
        tell(f"step {n}, loss {losses[-1]:.4f}")
    times = []
    for n in range(steps):
        begin = time.perf_counter()
        step(draws[n % len(draws)])
        if is_cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    found = {
        "losses": losses,
        "ms": statistics.median(times),
        "low": min(times),
        "high": max(times),
    }
    if is_cuda:
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    return found


def main() -> None:
    """Measure both ways for each length."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tokens", type=int, default=16_384, help="of a step")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16_384])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--compile", default="default", help="our mode of torch.compile")
    parser.add_argument("--ways", nargs="+", default=["ours", "theirs"])
    parser.add_argument("--tiny", action="store_true", help="a small shape, to try the script")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    shape = SHAPE | (_TINY if options.tiny else {})
    results: dict[str, Any] = {"machine": machine(options.device), "options": vars(options)}
    for length in options.lengths:
        tell(f"documents of {length}")
        torch.manual_seed(length)
        draws = [
            torch.randint(
                shape["vocab_size"], (options.tokens // length, length + 1), device=options.device
            )
            for _ in range(2)
        ]
        row: dict[str, Any] = {}
        for way in options.ways:
            model = peer(shape, options.device)
            # transformers falls back to torch where it cannot import fla.
            results["fla"] = "fla.ops.gated_delta_rule" in sys.modules
            tell(f"{way}: weights drawn, fla {results['fla']}")
            if way == "theirs":
                step = peer_step(model, options.device)
            else:
                step = our_step(shape, model.state_dict(), options.device, options.compile)
            del model
            gc.collect()
            row[way] = measure(step, draws, options.steps)
            print(length, way, row[way], flush=True)
            del step
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
        if "ours" in row and "theirs" in row:
            row["times"] = row["theirs"]["ms"] / row["ours"]["ms"]
        results[str(length)] = row
        if options.json:
            Path(options.json).write_text(json.dumps(results) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
