"""An engine's start with nothing compiled: its kernels one after another, and side by side.

    python lab/cold_start.py [--shape qwen3-0.6b] [--tensor-parallel N] [--processes 0 16]
        [--turns 1] [--seconds 190] [--device cuda] [--cache FOLDER --starts warm] [--json FILE]

Each start is a process of its own with a cache of Triton's of its own, empty before: first "cold",
then once more, "warm"; or only one of them, with a cache that is there. With 0 processes nothing is
compiled ahead. Of one GPU it is also told which kernels the start itself compiled after the others:
what the rehearsal had not asked for, none if all is well.
All starts must give the same greedy tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPTS = [[3, 17, 255, 400], list(range(100, 230)), [42] * 1100]


def start(given: argparse.Namespace) -> None:
    """Start an engine in this process, and tell how that went."""
    began = time.perf_counter()
    from triton import knobs

    from tilewise import LLM, SamplingParams

    compiled, loaded = list[str](), list[str]()

    def told(*, src: Any, cache_hit: bool, **_: Any) -> None:
        (loaded if cache_hit else compiled).append(src.name)

    knobs.compilation.listener = told
    imported = time.perf_counter()
    llm = LLM(
        given.directory, device=given.device, random_weights=True, max_num_seqs=256,
        max_model_len=given.length, tensor_parallel_size=given.tensor_parallel,
        gpu_memory_utilization=given.gpu_memory_utilization,
    )  # fmt: skip
    ready = time.perf_counter()
    row: dict[str, Any] = {"imports": imported - began, "LLM": ready - imported}
    row |= llm.start_seconds
    row = {name: round(seconds, 2) for name, seconds in row.items()}
    row |= {"compiled at start": compiled.copy(), "loaded at start": len(loaded)}
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    outputs = llm.generate(
        [{"prompt_token_ids": p} for p in PROMPTS if len(p) + 16 <= given.length], params
    )
    row["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
    row["compiled later"] = compiled[len(row["compiled at start"]) :]
    print("@" + json.dumps(row), flush=True)


def run(given: argparse.Namespace, processes: int, cache: str, left: float) -> dict[str, Any]:
    """Start an engine in a process of its own."""
    environment = os.environ | {
        "TRITON_CACHE_DIR": cache, "TILEWISE_COMPILE_PROCESSES": str(processes),
    }  # fmt: skip
    command = [sys.executable, __file__, *sys.argv[1:], "--directory", given.directory]
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=max(1.0, left)
        )
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {left:.0f} s"}
    row = next((line for line in done.stdout.splitlines() if line.startswith("@")), None)
    if row is None:
        return {"error": done.stderr[-2000:]}
    found: dict[str, Any] = {
        "process": round(time.perf_counter() - began, 1),
        **json.loads(row[1:]),
    }
    warned = [line for line in done.stderr.splitlines() if "RuntimeWarning" in line]
    return found | {"warned": warned}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--processes", type=int, nargs="+", default=[0, 16])
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence (4096)")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--cache", help="Triton's, in place of one for each turn")
    parser.add_argument("--starts", nargs="+", choices=("cold", "warm"), default=["cold", "warm"])
    parser.add_argument("--seconds", type=float, default=190.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--directory", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.directory:
        start(given)
        return
    from tilewise import children
    from tilewise.bench.engines.shapes import model_directory

    end = time.monotonic() + given.seconds
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        directory, _ = model_directory(given.shape, Path(folder))
        given.directory = str(directory)
        # What any first process pays, the disk's part of the imports, is nobody's.
        first = [sys.executable, "-c", "import torch, triton, tilewise.engine.llm"]
        subprocess.run(first, env=children.environment())
        for turn in range(given.turns):
            for processes in given.processes:
                cache = given.cache or f"{folder}/{turn}-{processes}"
                for kind in given.starts:
                    row = run(given, processes, cache, end - time.monotonic())
                    rows.append({"processes": processes, "start": kind, "turn": turn} | row)
                    shown = {name: value for name, value in rows[-1].items() if name != "tokens"}
                    print(json.dumps(shown), flush=True)
                    if given.json is not None:
                        given.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    done = [row for row in rows if "tokens" in row]
    are_equal = all(row["tokens"] == done[0]["tokens"] for row in done)
    print(f"{len(done)} of {len(rows)} starts ended; tokens are {'' if are_equal else 'NOT '}equal")
    sys.exit(0 if are_equal and len(done) == len(rows) else 1)


if __name__ == "__main__":
    main()
