"""The host's time of steps of trees of this package, their engines in turns on one GPU.

    python lab/host_turns.py TREE ... --json F [--kv-cache-dtype fp8_e4m3] [--together]

Qwen3-0.6B's shape with random weights. Each tree has a process of its own, with a cache for just
these requests, and is called by its folder's name.
Printed are seconds until ready and what they went to, then for 256 prompts of 1,024 tokens and 128
more seconds, milliseconds a step, a digest of all tokens (equal, where no kernel changes), and of
the host's wall and CPU milliseconds a step the 10th, 50th and 90th of a hundred: of steps with
prompts, and of steps of all rows that decode. A first start compiles kernels, a second one loads
them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH, PROMPT, NEW = 256, 1024, 128
PARTS = ("wall", "cpu", "schedule", "submit", "update")
PARTS_OF_SUBMIT = ("take", "send", "run", "_read")  # rows, their copies, the graph, results


def serve(label: str, cache_dtype: str) -> None:
    """Make an engine of the tree on the path, and answer each line of standard input with one."""
    began = time.perf_counter()
    from tilewise import LLM, SamplingParams
    from tilewise.bench.engines import workloads
    from tilewise.bench.engines.ours import Compilations
    from tilewise.bench.engines.shapes import SHAPES, model_directory

    counted = Compilations()
    directory, _ = model_directory("qwen3-0.6b", Path(tempfile.gettempdir()) / f"turns-{label}")
    llm = LLM(
        directory, device="cuda", dtype="bfloat16", random_weights=True, max_num_seqs=BATCH,
        max_model_len=2048, enable_prefix_caching=False, use_progress=True,
        kv_cache_dtype=cache_dtype,
        num_blocks=BATCH * (-(-(PROMPT + NEW) // 16) + 2),
    )  # fmt: skip
    engine, steps, now = llm.engine, list[dict[str, Any]](), dict[str, Any]()

    def say(**found: Any) -> None:
        print("@" + json.dumps({"tree": label, **found}), flush=True)

    def timed(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                now[name] = now.get(name, 0.0) + time.perf_counter() - started
                if name == "submit":
                    now["decodes"], now["rows"] = args[0].decodes, len(args[0].sequences)

        setattr(owner, name, call)

    for owner, name in (
        (engine.scheduler, "schedule"),
        (engine.runner, "submit"),
        (engine.scheduler, "update"),
    ):
        timed(owner, name)
    runner = engine.runner
    for owner, name in ((runner.rows, "take"), (runner.rows, "send"), (runner, "_read")):
        timed(owner, name)
    for each in runner.steps.values():
        if each.bucket == BATCH:
            timed(each, "run")
    step = engine.step

    def noted() -> Any:
        now.clear()
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return step()
        finally:
            now["wall"], now["cpu"] = time.perf_counter() - wall, time.thread_time() - cpu
            steps.append(dict(now))

    engine.step = noted
    say(
        ready_s=round(time.perf_counter() - began, 2),
        parts=engine.runner.start_seconds,
        compiled=counted.count,
        loaded=counted.loaded,
    )
    work = workloads.fixed(BATCH, PROMPT, NEW, vocab_size=SHAPES["qwen3-0.6b"]["vocab_size"])
    prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]

    def run(new: int) -> tuple[float, str]:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        started = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - started
        tokens = json.dumps([list(output.outputs[0].token_ids) for output in outputs])
        return seconds, hashlib.sha1(tokens.encode()).hexdigest()[:12]

    for _ in sys.stdin:
        first, _ = run(1)
        steps.clear()
        seconds, digest = run(NEW)
        with_prompts = [s for s in steps if s.get("decodes") is False]
        decodes = [s for s in steps if s.get("decodes") and s["rows"] == BATCH]
        say(
            prefill_s=round(first, 3),
            s=round(seconds, 3),
            tokens=digest,
            step_ms=round(1e3 * (seconds - first) / (NEW - 1), 3),
            with_prompts=_percentiles(with_prompts),
            decodes=_percentiles(decodes),
        )


def _percentiles(steps: list[dict[str, Any]]) -> dict[str, list[float]]:
    found = dict[str, list[float]]()
    for name in (*PARTS, *PARTS_OF_SUBMIT) if steps else ():
        values = sorted(1e3 * step.get(name, 0.0) for step in steps)
        found[name] = [round(values[int(f * (len(values) - 1))], 3) for f in (0.1, 0.5, 0.9)]
    return found


def main() -> None:
    """Start both, and let them take turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="+", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--together", action="store_true", help="all start at once")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    running = []
    for tree in given.trees:
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", tree.resolve().name]
        process = subprocess.Popen(
            [*command, given.kv_cache_dtype],
            cwd=tree,
            text=True,
            env=os.environ | {"PYTHONPATH": str(tree.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        running.append(process)
        if not given.together:
            rows.append(_read(process))
    rows += [_read(process) for process in running if given.together]
    for turn in range(given.turns + 1):  # the first one warms up
        for process in running if turn % 2 == 0 else reversed(running):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            rows.append({"turn": turn} | _read(process))
    for process in running:
        process.communicate()
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows))


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("@"):
            print(line[1:], end="", file=sys.stderr)
            row: dict[str, Any] = json.loads(line[1:])
            return row
    raise SystemExit(f"an engine ended with status {process.wait()}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3])
    else:
        main()
