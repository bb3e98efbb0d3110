"""`tilewise bench serve --direct`: an engine called directly, then through HTTP."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import resource
import subprocess
import sys
import time
from typing import Any

from tilewise.bench.serving.client import load, summary
from tilewise.bench.workload import Asked
from tilewise.children import environment
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams

__all__ = ["direct"]


def direct(options: argparse.Namespace, asked: list[Asked]) -> dict[str, Any]:
    """Measure the engine called directly, then the same requests through a server of its own.

    Args:
        options: the options of the command.
        asked: the requests, all of which are sent at once.

    Returns:
        The tokens a second of both, their ratio, the processor time per token of the server's event
        loop and of the client, and latencies through the server.

    Raises:
        RuntimeError: the server does not start.
    """
    bodies = [one.body for one in asked]
    seats = options.concurrency or len(bodies)
    llm = LLM(options.model, max_num_seqs=seats)
    prompts = [body["prompt"] for body in bodies]
    params = [SamplingParams(**{k: v for k, v in body.items() if k != "prompt"}) for body in bodies]
    llm.generate(prompts[:seats], SamplingParams(max_tokens=4))
    rates = []
    for _ in range(options.repeats):
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params)
        made = sum(len(o.outputs[0].token_ids) for o in outputs)
        rates.append(made / (time.perf_counter() - begun))
    llm.close()
    del llm
    command = [
        sys.executable,
        "-m",
        "tilewise",
        "serve",
        options.model,
        "--port",
        "0",
        "--max-num-seqs",
        str(seats),
        "--log-level",
        "error",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as server:
        assert server.stderr is not None
        try:
            url = None
            for line in server.stderr:
                if match := re.search(r" at (http\S+)", line):
                    url = match.group(1)
                    break
            if url is None:
                raise RuntimeError(f"the server of {options.model} must start, and did not")
            asyncio.run(load(url, asked[:seats], concurrency=seats))
            through, cpu, client = [], [], []
            for _ in range(options.repeats):
                before, mine = _cpu_seconds(server.pid), resource.getrusage(resource.RUSAGE_SELF)
                answers = asyncio.run(load(url, asked, concurrency=seats))
                found = summary(answers)
                after = resource.getrusage(resource.RUSAGE_SELF)
                made = sum(a.num_tokens for a in answers)
                through.append(found["tokens_per_second"])
                cpu.append(1e3 * (_cpu_seconds(server.pid) - before) / made)
                client.append(1e3 * (after.ru_utime - mine.ru_utime) / made)
        finally:
            server.terminate()
    return {
        "streams": seats,
        "direct_tokens_per_second": max(rates),
        "http_tokens_per_second": max(through),
        "ratio": max(through) / max(rates),
        "event_loop_ms_per_token": min(cpu),
        "client_ms_per_token": min(client),
        **{name: found[name] for name in ("ttft", "itl", "failed")},
    }


def _cpu_seconds(pid: int) -> float:
    """Return the processor time in seconds of the main thread of the process `pid`, which runs the
    server's event loop."""
    with open(f"/proc/{pid}/task/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
