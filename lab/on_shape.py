"""What the engine's benchmarks share: an LLM of a shape, and another scheduler over its cache."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilewise import LLM
from tilewise.bench.engines import shapes
from tilewise.bench.engines.shapes import model_directory
from tilewise.engine.scheduling.scheduler import Scheduler

__all__ = ["SHAPES", "Clock", "folder_of", "machine", "make", "random_prompts", "use"]

# For tries without a GPU: everything that a real shape has, and little of it.
TINY = shapes.SHAPES["qwen3-0.6b"] | {
    "vocab_size": 503,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_window_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES = shapes.SHAPES | {"tiny": TINY}


def make(shape: str, device: str, dtype: str, **settings: Any) -> LLM:
    """Return an engine of a shape with random weights, or of the packaged model ("story").

    Args:
        shape: of `bench.engines.shapes`, "tiny", "story" or a directory.
        device: "cpu", "cuda" or one of its GPUs.
        dtype: of the weights.
        settings: as `LLM` takes them.
    """
    directory, is_random = folder_of(shape)
    if device.startswith("cuda"):  # the sizes that a benchmark runs are few
        settings = {"graphs": "lazy"} | settings
    return LLM(directory, device=device, dtype=dtype, random_weights=is_random, **settings)


def folder_of(shape: str) -> tuple[Path, bool]:
    """Return a checkpoint's folder of a shape, see `make`, and whether its weights are drawn."""
    folder = Path(tempfile.gettempdir()) / f"tilewise-shapes-{os.getuid()}"
    if shape != "tiny":
        return model_directory(shape, folder)
    directory = folder / shape
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(TINY) + "\n")
    return directory, True


def use(llm: LLM, **changes: Any) -> Scheduler:
    """Let an idle engine go on with a new scheduler, and return it: same cache, same graphs.

    Args:
        llm: nothing of it is unfinished.
        changes: of what `Scheduler` takes; what is not named is as in the scheduler before, but for
            policies, which are the defaults. More blocks than the cache has are no use.
    """

    def restart() -> Scheduler:
        old = llm.engine.scheduler
        limits = replace(old.limits)
        host = llm.engine.runner.host
        settings = {
            "num_blocks": [limits.num_blocks, *limits.other_blocks],
            "block_size": limits.block_size,
            "windows": limits.windows,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_model_len": limits.max_model_len,
            "num_swap_blocks": 0 if host is None else host.blocks.counts,
        }
        new = Scheduler(**(settings | changes))
        llm.engine.restart(new)
        return new

    return llm.loop.call(restart)


def random_prompts(
    count: int, shortest: int, longest: int, vocab_size: int, *, shared: int = 0, seed: int = 0
) -> list[dict[str, list[int]]]:
    """Return prompts of random tokens; the first `shared` are the same in all."""
    draw = torch.Generator().manual_seed(seed)
    top = min(vocab_size, 50_000)
    common = torch.randint(3, top, (shared,), generator=draw).tolist()
    lengths = torch.randint(shortest, longest + 1, (count,), generator=draw).tolist()
    return [
        {"prompt_token_ids": [*common, *torch.randint(3, top, (n,), generator=draw).tolist()]}
        for n in lengths
    ]


class Clock:
    """Seconds: by the wall on a GPU, of the process's CPU time on a CPU that others may use."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.name = "wall" if device == "cuda" else "cpu"

    def __call__(self) -> float:
        """Return now."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()


def machine(device: str) -> dict[str, Any]:
    """Return what a row must say of where it was measured."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu"
    return {
        "device": name,
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
