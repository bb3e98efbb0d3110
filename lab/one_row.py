"""A captured step of one row, its products apart from norms and activations, and in one.

    python lab/one_row.py --json F [SHAPE or FOLDER ...]

Each model has random weights. A step is captured with `ops.row_linear_pays` false everywhere and
true for every weight, and replayed in turns; the logits of the first step are compared. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lab.decode_forms import Bench, forget_plans
from tilewise import ops
from tilewise.bench.engines.shapes import model_directory
from tilewise.bench.report import emit

FORMS: dict[str, Callable[[Tensor], bool]] = {
    "apart": lambda weight: False,
    "in one": lambda weight: True,
}


@contextmanager
def choosing(pays: Callable[[Tensor], bool]) -> Iterator[None]:
    """Let a layer of one row take its products in one where `pays` says so of each weight."""
    module: Any = ops
    chosen = module.row_linear_pays
    module.row_linear_pays = pays
    forget_plans()
    try:
        yield
    finally:
        module.row_linear_pays = chosen
        forget_plans()


def measure(shape: str, context: int, rounds: int) -> dict[str, Any]:
    """Return microseconds of a step in each form, and how far its logits are from the first's."""
    with tempfile.TemporaryDirectory() as folder:
        directory, _ = model_directory(shape, Path(folder))
        bench = Bench(directory, 1, context, torch.bfloat16, 1)
        steps = {name: bench.capture(choosing(pays)) for name, pays in FORMS.items()}
        first = bench.logits(steps["apart"])[0]
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                times[name].append(bench.time(step))
        found = {}
        for name, step in steps.items():
            far = (bench.logits(step)[0] - first).abs().max() / first.abs().max()
            found[name] = {
                "us": median(times[name]), "all us": times[name], "difference": float(far)
            }  # fmt: skip
        return found


def main() -> None:
    """Measure, print a line for each model, then JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=["qwen3-0.6b"])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU that torch can see")
    rows = {}
    for shape in options.shapes:
        rows[Path(shape).name] = found = measure(shape, options.context, options.rounds)
        print(shape, *(f"{name} {row['us']:.1f} us" for name, row in found.items()), flush=True)
        torch.cuda.empty_cache()
    emit(
        {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows},
        options.json,
    )


if __name__ == "__main__":
    main()
