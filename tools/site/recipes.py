"""Write docs/guide/recipes.md: model, hardware, command, and what to expect of both.

python -m tools.site.recipes

A rate is measured, from the committed result that its row names, or simulated by the clock of
`tilewise simulate` from the sizes of the model and the profile of the machine. Memory is counted:
weights, and the cache of 32 sequences of 1,024 tokens.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tilewise.bench.engines.shapes import SHAPES
from tilewise.cost.machine import MACHINES
from tilewise.cost.model import read_sizes
from tilewise.cost.step import StepCost, StepWork
from tools.site import marks
from tools.site.numbers import load, number

PAGE = marks.ROOT / "docs" / "guide" / "recipes.md"
MARK = marks.begin("the recipes", "recipes")
CONTEXT, BATCHES = 1024, (1, 32, 256)
# Bytes beside weights and cache: kernels, temporaries, graphs (docs/guide/sizing.md).
RESERVE = 3.5e9


class Recipe(NamedTuple):
    """A row of the page.

    Attributes:
        model: name of the model on the hub.
        shape: name of its sizes in `SHAPES`.
        hardware: name of the machine, as a reader says it.
        profile: name of the machine's profile, of which a simulated row is made; "" for none.
        gpus: number of GPUs.
        result: name of the file of results, of a measured row; "" for none.
    """

    model: str
    shape: str
    hardware: str
    profile: str = ""
    gpus: int = 1
    result: str = ""


RECIPES = (
    Recipe("story", "story", "2 CPU cores (Xeon with AMX)", result="engine_cpu"),
    Recipe("Qwen/Qwen3-0.6B", "qwen3-0.6b", "1 H200", result="engine_h200_landed_qwen"),
    Recipe("Qwen/Qwen3-0.6B", "qwen3-0.6b", "1 H100", result="engine_transformers_h100"),
    Recipe("Qwen/Qwen3-0.6B", "qwen3-0.6b", "1 A100, 40 GB", profile="a100"),
    Recipe("meta-llama/Llama-3.2-1B", "llama-1b", "1 H100", profile="h100"),
    Recipe("meta-llama/Llama-3.1-8B", "llama-3-8b", "1 H200", result="engine_h200_llama_vllm"),
    Recipe("meta-llama/Llama-3.1-8B", "llama-3-8b", "1 H100", profile="h100"),
    Recipe("meta-llama/Llama-3.1-8B", "llama-3-8b", "1 A100, 40 GB", profile="a100"),
    Recipe("meta-llama/Llama-3.1-8B", "llama-3-8b", "4 H200", gpus=4, result="shard_engine_h200"),
    Recipe("meta-llama/Llama-3.1-70B", "llama-3-70b", "2 H200", profile="h200", gpus=2),
    Recipe("meta-llama/Llama-3.1-70B", "llama-3-70b", "4 H200", profile="h200", gpus=4),
    Recipe("meta-llama/Llama-3.1-70B", "llama-3-70b", "4 H100", profile="h100", gpus=4),
)


def measured(recipe: Recipe) -> dict[int, float]:
    """Return decoded tokens a second by the batch, from a committed result."""
    rows: list[dict[str, Any]] = load(recipe.result)["rows"]
    found: dict[int, float] = {}
    for row in rows:
        if "ranks" in row:
            if row["ranks"] == recipe.gpus:
                rate = 1e3 * row["batch"] / row["ms"]
                found[row["batch"]] = max(rate, found.get(row["batch"], 0.0))
        elif row["engine"] == "tilewise" and row["threads"] in (None, 2):
            found |= {row["batch"]: row["decode tok/s"]} if row.get("decode tok/s") else {}
    return found


def fits(recipe: Recipe, batch: int) -> bool:
    """Whether weights and the cache of a batch have room on a GPU of a recipe's profile."""
    sizes = read_sizes(SHAPES[recipe.shape])
    held = 2 * sizes.parameters + sizes.cache_bytes() * batch * CONTEXT
    room = 0.9 * MACHINES[recipe.profile].memory_bytes - RESERVE
    return held / recipe.gpus <= room


def simulated(recipe: Recipe) -> dict[int, float]:
    """Return decoded tokens a second by the batch, by the clock of simulations."""
    sizes = read_sizes(SHAPES[recipe.shape])
    cost = StepCost(sizes, MACHINES[recipe.profile], tensor_parallel=recipe.gpus)
    found = {}
    for batch in BATCHES:
        if fits(recipe, batch):
            work = StepWork(batch, batch, batch, batch, batch * CONTEXT, is_decode=True)
            found[batch] = batch / cost.device(work)
    return found


def memory(recipe: Recipe) -> tuple[float, float]:
    """Return the bytes of all weights in bfloat16, and of the cache of 32 sequences."""
    config = SHAPES.get(recipe.shape)
    if config is None:  # the packaged model
        story = marks.ROOT / "tilewise" / "assets" / "story" / "config.json"
        config = json.loads(story.read_text(encoding="utf-8"))
    sizes = read_sizes(config)
    return 2.0 * sizes.parameters, float(sizes.cache_bytes() * 32 * CONTEXT)


def table() -> str:
    """Return the recipes in Markdown."""
    rows = []
    for recipe in RECIPES:
        rates = measured(recipe) if recipe.result else simulated(recipe)
        weights, cache = memory(recipe)
        command = f"tilewise serve {recipe.model}"
        if recipe.gpus > 1:
            command += f" --tensor-parallel-size {recipe.gpus}"
        origin = (
            f"[measured](../../lab/results/{recipe.result}.json)" if recipe.result else "simulated"
        )
        each = f" / {recipe.gpus}" if recipe.gpus > 1 else ""
        rows.append(
            [recipe.hardware, f"`{command}`",
             *(number(rates.get(batch)) for batch in BATCHES),
             f"{number(weights / 1e9)} + {number(cache / 1e9)} GB{each}", origin]
        )  # fmt: skip
    head = ["hardware", "command", *(f"batch {b}, tokens/s" for b in BATCHES),
            "weights + cache of 32", "from"]  # fmt: skip
    return marks.table(head, rows)


def written(page: str) -> str:
    """Return a page with the table between its marks."""
    return marks.replaced(page, MARK, table())


if __name__ == "__main__":
    marks.write(PAGE, written)
