"""What it takes to hand an engine the weights of a trainer on another GPU.

    torchrun --nproc-per-node 2 lab/rank_weights.py --device cuda --shape qwen3-0.6b --json F
    torchrun --nproc-per-node 2 lab/rank_weights.py --device cpu --shape tiny

The last rank has an engine, all others train; each turn changes the weights and sends them, over
NCCL on GPUs and gloo on a CPU. Beside it stands the time of broadcasts of the same tensors alone,
which is the link's. The exit status is 1 if the engine's tokens are not those of an update from
tensors of its own process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.on_shape import folder_of, machine, make, random_prompts
from tilewise import SamplingParams
from tilewise.distributed import receive_weights, send_weights
from tilewise.models.config import read_config
from tilewise.models.registry import empty_model

PATIENCE = timedelta(seconds=300)  # of a rank that waits for one which makes an engine
ASKED = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def shapes_of(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of a checkpoint's tensors, by name."""
    model = empty_model(read_config(folder), "float32", "meta")
    return {
        source: list(part.shape)
        for weight in model.weight_table()
        for source, part in weight.parts(model.get_parameter(weight.name))
    }


def tensors_of(
    shapes: dict[str, list[int]], dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, Tensor]:
    """Return random tensors, the same on all ranks."""
    draw = torch.Generator(device).manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=draw, device=device) * 0.02).to(dtype)
        for name, shape in shapes.items()
    }


def now(device: torch.device) -> float:
    """Return seconds, when all ranks have come so far."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Measure, and print a row on the engine's rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    first = time.perf_counter()
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if options.device == "cuda" else "gloo",
        timeout=PATIENCE,
        device_id=device if options.device == "cuda" else None,
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype = getattr(torch, options.dtype)
    for turn in range(size):  # one after the other, as each of them writes the folder
        if turn == rank:
            shapes = shapes_of(folder_of(options.shape)[0])
        now(device)
    is_engine = rank == size - 1

    def tell(what: str) -> None:
        if is_engine:
            print(f"{time.perf_counter() - first:.1f} s: {what}", file=sys.stderr, flush=True)

    seconds: dict[str, list[float]] = {"update": [], "link": []}
    answers: list[Any] = []
    llm = None
    if is_engine:
        llm = make(options.shape, str(device), options.dtype, num_blocks=64, max_model_len=256)
    tell("the engine is made")
    for turn in range(options.turns + 1):
        tensors = tensors_of(shapes, dtype, device, turn)
        began = now(device)
        if llm is None:
            send_weights(tensors)
        else:
            llm.update_weights(receive_weights())
        ended = now(device)
        for tensor in tensors.values():
            dist.broadcast(tensor, 0)
        linked = now(device)
        if turn:  # the first is a warm-up
            seconds["update"].append(ended - began)
            seconds["link"].append(linked - ended)
        tell(f"turn {turn}: {ended - began:.3f} s, the link {linked - ended:.3f} s")
        if llm is not None:
            prompts = random_prompts(4, 8, 30, llm.config.vocab_size, seed=turn)
            sent = [o.outputs[0].token_ids for o in llm.generate(prompts, ASKED)]
            llm.update_weights(tensors)
            answers.append((sent, [o.outputs[0].token_ids for o in llm.generate(prompts, ASKED)]))
    now(device)
    if llm is not None:
        llm.close()
        medians = {name: statistics.median(found) for name, found in seconds.items()}
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        row = {
            **machine(options.device),
            **{name: str(value) for name, value in vars(options).items()},
            "ranks": size,
            "bytes": num_bytes,
            "seconds": {name: [round(s, 4) for s in found] for name, found in seconds.items()},
            "bytes_a_second": round(num_bytes / medians["update"]),
            "beyond_the_link": round(medians["update"] / medians["link"] - 1, 3),
            "equal": all(sent == own for sent, own in answers),
        }
        print(json.dumps(row))
        if options.json is not None:
            options.json.write_text(json.dumps(row, indent=1) + "\n")
    dist.destroy_process_group()
    if any(sent != own for sent, own in answers):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
