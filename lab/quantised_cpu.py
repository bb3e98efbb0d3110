"""Quantised models on a CPU: our engine beside llama.cpp, the same GGUF files, in turns.

    python lab/quantised_cpu.py --gguf FILE ... --peer-python P --json F [--wide DIRECTORY ...]

What  milliseconds of a decode step of 1, 8 and 32 sequences, tokens per second of a prompt of 512,
      bytes of the packed weights, and how far logits are from those of the dequantised weights.
How   each file has a process of each engine, which answers in turns; the least of the rounds
      counts, as other work on a machine only adds. A step's time is that of the answers of 24
      tokens less those of one.

llama.cpp runs through llama-cpp-python, in the environment of --peer-python. Its files of random
weights are made by `tilewise.bench.engines.gguf` and its own quantiser. --wide directories hold
the checkpoints that they were made of, measured in bfloat16 for comparison.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from tilewise.bench.engines.process import ROOT, EngineProcess
from tilewise.bench.roofline import device_name
from tilewise.models import load_model
from tilewise.nn.packed import PackedLinear

BATCHES, PROMPT, NEW, LONG = (1, 8, 32), 16, 24, 512
TIMEOUT_S = 600.0


def start(name: str, file: Path, log: Path, python: str | None) -> EngineProcess:
    """Return an engine's process with a model."""
    settings: dict[str, Any] = {
        "directory": str(file), "gguf": str(file), "random_weights": False, "device": "cpu",
        "dtype": "bfloat16", "max_num_seqs": max(BATCHES), "max_len": LONG + 8, "memory": 0.4,
        "prefix_caching": False, "kv_cache_dtype": None, "max_num_batched_tokens": None,
    }  # fmt: skip
    threads = torch.get_num_threads()
    if python is None:
        return EngineProcess(name, settings, log, threads=threads)
    return EngineProcess(name, settings, log, python=python, path=str(ROOT), threads=threads)


def seconds(process: EngineProcess, prompts: list[list[int]], new: int) -> float:
    """Return how long an answer takes."""
    request = {
        "do": "generate", "prompts": prompts, "new_tokens": [new] * len(prompts),
        "temperature": 0.0, "n": 1,
    }  # fmt: skip
    return float(process.ask(request, TIMEOUT_S)["seconds"])


def measure(processes: dict[str, EngineProcess], vocab_size: int, rounds: int) -> list[Any]:
    """Return rows of all engines, which take turns."""
    draw, rows = random.Random(0), []

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]

    for batch in BATCHES:
        asked = prompts(batch, PROMPT)
        best = {name: [9e9, 9e9] for name in processes}
        for _ in range(rounds):
            for name, process in processes.items():
                for place, new in enumerate((1, NEW)):
                    best[name][place] = min(best[name][place], seconds(process, asked, new))
        for name, (one, all_) in best.items():
            step = (all_ - one) / (NEW - 1)
            rows.append({"engine": name, "batch": batch, "ms a step": round(1e3 * step, 2)})
    asked = prompts(1, LONG)
    for name, process in processes.items():
        least = min(seconds(process, asked, 1) for _ in range(rounds))
        rows.append({"engine": name, "prompt": LONG, "tok/s": round(LONG / least)})
    return rows


@torch.inference_mode()
def held(file: Path) -> dict[str, Any]:
    """Return what the packed weights take, and the error of log-probabilities of a prompt.

    The error is that beside float32 computation with the dequantised values: the mean of the
    absolute differences of the log-probabilities of the most probable tokens.
    """
    ids = torch.randint(0, 30_000, (1, 64), generator=torch.Generator().manual_seed(0))
    found = []
    for dtype in ("bfloat16", "float32"):
        model = load_model(file, dtype=dtype)
        if dtype == "bfloat16":
            model.pack_for_inference()
            linears = [m.panels for m in model.modules() if isinstance(m, PackedLinear)]
        found.append(model.compute_logits(model(ids)).float().log_softmax(-1))
    top = found[1].argmax(-1, keepdim=True)
    error = (found[0].gather(-1, top) - found[1].gather(-1, top)).abs().mean()
    bytes_ = sum(panels.num_bytes for panels in linears)
    bits = 8 * bytes_ / sum(panels.num_weights for panels in linears)
    return {
        "MiB of weights": round(bytes_ / 2**20, 1), "bits a weight": round(bits, 2),
        "log-probability error": round(float(error), 5),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", nargs="+", type=Path, required=True)
    parser.add_argument("--wide", nargs="*", type=Path, default=[])
    parser.add_argument("--peer-python")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--without-error", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {
        "device": device_name("cpu"), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "rows": [],
    }  # fmt: skip
    if options.json and options.json.exists():  # parts of a run, one after another
        report["rows"] = json.loads(options.json.read_text())["rows"]
    with tempfile.TemporaryDirectory() as folder:
        for file in (*options.gguf, *options.wide):
            is_wide = file in options.wide
            processes = {"tilewise": start("tilewise", file, Path(folder) / "ours", None)}
            if options.peer_python and not is_wide:
                theirs = start("llamacpp", file, Path(folder) / "theirs", options.peer_python)
                processes["llama.cpp"] = theirs
                report["llama.cpp"] = theirs.facts
            vocab_size = 30_000
            rows = measure(processes, vocab_size, options.rounds)
            for process in processes.values():
                process.close()
            about = {} if is_wide or options.without_error else held(file)
            for row in rows:
                report["rows"].append({"model": file.name} | row)
                print(json.dumps(report["rows"][-1]), flush=True)
            if about:
                report["rows"].append({"model": file.name} | about)
                print(json.dumps(report["rows"][-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
