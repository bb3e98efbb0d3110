"""A training step of transformers as devices of sm_80 run its attention, beside FlashAttention-2.

    TRITON_OVERRIDE_ARCH=sm80 python lab/ampere_training.py --json found.json [--only NAME]

Only attention is exchanged, of one model: "tilewise", whose kernels are those of `lab/ampere.py`,
and "sdpa", which may take FlashAttention-2 only. Steps are those of `tilewise bench train` (float32
parameters, bfloat16 autocast, fused AdamW), in turns of which each is first in turn; losses of
equal weights that differ by more than 0.01 end the run. All else, torch's own, is Hopper's code.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab.ampere import take_overridden
from tilewise.bench.trainers import worker

ROWS = (("gpt2-small", 1024, 16), ("llama-1b", 4096, 2))  # shape, N, batch
WAYS = ("tilewise", "sdpa")
TURNS, STEPS = 6, 4
MOST_APART = 0.01


class Row:
    """A model whose attention is exchanged, and its step."""

    def __init__(self, shape: str, length: int, batch: int, where: str = "cuda") -> None:
        spec = {
            "shape": shape, "way": "tilewise", "N": length, "B": batch, "text": None, "lr": 1e-4,
            "seed": 0, "compile": "default",
        }  # fmt: skip
        self.name, self.where = f"{shape}/{length}", where
        models: list[Any] = []
        made = worker.hugging_face

        def kept(*given: Any) -> Any:
            models.append(made(*given))
            return models[-1]

        worker.hugging_face = kept
        self.step, self.facts = worker.make_step(spec, torch.device(where))
        worker.hugging_face = made
        self.model = models[0]
        ids = torch.randint(0, 256, (1, length), device=where)
        self.losses: dict[str, float] = {}
        for way in WAYS:
            with self._choose(way), torch.no_grad(), torch.autocast(where, torch.bfloat16):
                self.losses[way] = self.model(input_ids=ids, labels=ids).loss.item()
        if not abs(self.losses["tilewise"] - self.losses["sdpa"]) < MOST_APART:
            raise SystemExit(f"{self.name}: losses are {self.losses}")
        for way in WAYS:  # compiles and allocates
            self._seconds(way, 2)

    def _choose(self, way: str) -> Any:
        self.model.config._attn_implementation = way
        is_peer = way == "sdpa"
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if is_peer else contextlib.nullcontext()

    def _seconds(self, way: str, steps: int) -> float:
        """Return the seconds of a step."""
        with self._choose(way):
            began = time.perf_counter()
            for index in range(steps):
                loss = self.step(index)
            loss.item()  # waits
            return (time.perf_counter() - began) / steps

    def measure(self) -> dict[str, Any]:
        """Return tokens a second of both."""
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(TURNS):
            for way in WAYS if turn % 2 == 0 else reversed(WAYS):
                seconds[way].append(self._seconds(way, STEPS))
        tokens = self.facts["tokens"]
        ratios = [b / a for a, b in zip(seconds["tilewise"], seconds["sdpa"], strict=True)]
        return {
            "tokens/s": {way: round(tokens / statistics.median(seconds[way])) for way in WAYS},
            "times sdpa": round(statistics.median(ratios), 4),
            "least and most": [round(min(ratios), 4), round(max(ratios), 4)],
            "losses": self.losses,
        }


def main(between: Callable[[], object] = lambda: None) -> None:
    """Print and write what was found; `between` is called before anything is timed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", help="rows by name, as gpt2-small/1024")
    given = parser.parse_args()
    arch = take_overridden()
    torch.set_float32_matmul_precision("high")
    chosen = [r for r in ROWS if not given.only or f"{r[0]}/{r[1]}" in given.only]
    rows = [Row(*each) for each in chosen]
    between()
    found: dict[str, Any] = {}
    for row in rows:
        found[row.name] = row.measure()
        print(row.name, json.dumps(found[row.name]), flush=True)
    if given.json:
        facts = {
            "GPU": torch.cuda.get_device_name(), "torch": torch.__version__,
            "as": f"sm_{arch}" if arch else None, "rows": found,
        }  # fmt: skip
        given.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
