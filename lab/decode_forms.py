"""Captured decode steps of one model in forms that differ by constants of modules, in turns.

    python lab/decode_forms.py FORMS.toml --json F [--shape qwen3-0.6b] [--batch 256]
        [--context 1024] [--cache-dtype float8_e4m3fn]
        [--temperature 0.6] [--rounds 5] [--workers 8] [--only NAME ...]

FORMS.toml has a table for each form: module -> {constant = value}; an empty one is the package.
Each form is captured as the engine captures a step. Its logits are compared, step by step, with
those of the first form: the largest difference over the largest logit, and the share of rows whose
greedy token is another. Replays of all forms then take turns. Processes of their own compile
beforehand, over a model of one layer. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

import tilewise
from lab.profile_decode import BLOCK, decoding, fill
from tilewise.bench.engines.roof import Roof
from tilewise.bench.engines.shapes import model_directory, read_sizes
from tilewise.bench.report import emit, say
from tilewise.cache.storage import KVStorage
from tilewise.engine.captured.decode_step import DecodeStep
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.settings import cache_spec
from tilewise.models import load_model
from tilewise.ops import call

COMPARED, REPLAYS = 4, 20  # steps whose logits are compared; replays that are timed together
Form = Mapping[str, Mapping[str, Any]]


@contextmanager
def applied(form: Form) -> Iterator[None]:
    """Let modules have a form's constants."""
    kept = []
    for name, constants in form.items():
        module = importlib.import_module(name)
        for constant, value in constants.items():
            kept.append((module, constant, getattr(module, constant)))
            setattr(module, constant, value)
    forget_plans()
    try:
        yield
    finally:
        for module, constant, value in kept:
            setattr(module, constant, value)
        forget_plans()


def forget_plans() -> None:
    """Let calls that come again be planned anew: those before had other constants or tiles."""
    call.forget()


class Bench:
    """A model whose decode step is captured again and again.

    Args:
        directory: of the model's configuration.
        rows, context: of the step.
        dtype: of the cache.
        compared: steps whose logits are compared.
        temperature: at which tokens are drawn.
    """

    def __init__(
        self,
        directory: Path,
        rows: int,
        context: int,
        dtype: torch.dtype,
        compared: int = COMPARED,
        temperature: float = 0.6,
    ) -> None:
        where, steps = torch.device("cuda"), compared + REPLAYS + 8
        model = load_model(directory, dtype="bfloat16", device=where, random_weights=True)
        longest = context + steps
        spec = cache_spec(model.config, BLOCK, dtype, longest)
        cache = KVStorage(spec, rows * -(-longest // BLOCK), where)
        fill(cache)
        self.runner = DeviceRunner(model, cache, max_num_seqs=rows, max_model_len=longest)
        self.rows, self.context, self.compared = rows, context, compared
        self.runner.submit(decoding(rows, context, steps, 0, temperature)).result()
        state = self.runner.rows
        self._kept = [x.clone() for x in (state.token, state.position, state.counter)]

    def rewind(self) -> None:
        """Put the rows back to the first step."""
        state = self.runner.rows
        for x, kept in zip((state.token, state.position, state.counter), self._kept, strict=True):
            x.copy_(kept)
        state.position[: self.rows].fill_(self.context - 1)

    def new_step(self) -> DecodeStep:
        """Make a step that shares nothing with others but the model and the rows."""
        runner = self.runner
        return DecodeStep(
            runner.model, runner.storage, runner.rows, runner.results, self.rows, keeps_logits=True
        )

    def capture(self, change: AbstractContextManager[None]) -> DecodeStep:
        """Capture a step inside a change of the package; its rows are as they were."""
        with change:
            step = self.runner.steps[self.rows] = self.new_step()
            self.runner.capture(self.rows)
        return step

    def logits(self, step: DecodeStep) -> list[torch.Tensor]:
        """Return the logits of the first steps."""
        self.rewind()
        found = []
        for _ in range(self.compared):
            step.run()
            assert step.logits is not None
            found.append(step.logits.to(torch.float32, copy=True))
        return found

    def time(self, step: DecodeStep) -> float:
        """Return microseconds of a replay."""
        self.rewind()
        for _ in range(3):
            step.run()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(REPLAYS):
            step.run()
        events[1].record()
        events[1].synchronize()
        return float(1e3 * events[0].elapsed_time(events[1]) / REPLAYS)


def compared(found: list[torch.Tensor], first: list[torch.Tensor]) -> dict[str, Any]:
    """Return how far logits are from those of the first form."""
    pairs = list(zip(found, first, strict=True))
    return {
        "equal": all(torch.equal(a, b) for a, b in pairs),
        "finite": all(bool(a.isfinite().all()) for a in found),
        "difference": max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs),
        "other tokens": float((found[0].argmax(1) != first[0].argmax(1)).double().mean()),
    }


def warm(directory: Path, forms: list[Form], rows: int, context: int, dtype: torch.dtype) -> None:
    """Compile what forms need, over a model of one layer."""
    config = json.loads((directory / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        config |= {"num_hidden_layers": 1, "max_window_layers": 1, "layer_types": None}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        bench = Bench(Path(folder), rows, context, dtype)
        for form in forms:
            bench.capture(applied(form))


def main() -> None:
    """Measure, print a table, then JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("forms", type=Path)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--cache-dtype", default="float8_e4m3fn")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--limits", nargs=2, type=float, default=[4.4e12, 750e12])
    parser.add_argument("--warm", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU that torch can see")
    forms: dict[str, Form] = tomllib.loads(options.forms.read_text())
    names = options.only or list(forms)
    dtype = getattr(torch, options.cache_dtype)
    sizes_of = (options.batch, options.context, dtype)
    if options.warm is not None:
        warm(options.warm, [forms[name] for name in names], *sizes_of)
        return
    began = time.perf_counter()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        directory, _ = model_directory(options.shape, Path(folder))
        sizes = read_sizes(json.loads((directory / "config.json").read_text()))
        command = [
            sys.executable, __file__, str(options.forms), "--warm", str(directory),
            "--batch", str(options.batch), "--context", str(options.context),
            "--cache-dtype", options.cache_dtype, "--only",
        ]  # fmt: skip
        workers = [
            subprocess.Popen([*command, *names[i :: options.workers]], env=os.environ)
            for i in range(min(options.workers, len(names)))
        ]
        for process in workers:
            process.wait()
        say(f"compiled in {time.perf_counter() - began:.0f} s")
        bench = Bench(directory, *sizes_of, temperature=options.temperature)
        steps: dict[str, DecodeStep] = {}
        first: list[torch.Tensor] = []
        for name in names:
            try:
                step = bench.capture(applied(forms[name]))
                found = bench.logits(step)
            except Exception as error:
                rows[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
                continue
            first = first or found
            rows[name], steps[name] = compared(found, first), step
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            times[name].append(bench.time(step))
    roof = 1e6 * Roof(sizes, *options.limits).step(options.batch, options.batch * options.context)
    for name, row in rows.items():
        if times.get(name):  # without rounds forms are only compared
            row |= {"us": median(times[name]), "all us": times[name]}
            row |= {"us, least": min(times[name]), "us, most": max(times[name])}
        shown = {key: value for key, value in row.items() if key != "all us"}
        print(f"{options.cache_dtype} {name:28} {shown}", flush=True)
    say(f"all in {time.perf_counter() - began:.0f} s")
    document = {
        "version": tilewise.__version__, "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "shape": options.shape, "batch": options.batch,
        "context": options.context, "temperature": options.temperature,
        "cache dtype": options.cache_dtype, "roof us of 16 bits": roof,
        "forms": forms, "rows": rows,
    }  # fmt: skip
    emit(document, options.json)


if __name__ == "__main__":
    main()
