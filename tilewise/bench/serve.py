"""How fast a server answers: requests over HTTP as users send them, and what each of them saw.

    tilewise bench serve --url http://127.0.0.1:8000 --num-prompts 200 --request-rate 8
    tilewise bench serve --direct --concurrency 64      the packaged model, with and without HTTP

Requests come by a Poisson process, or a gamma process of another burstiness, or in a closed loop
(--concurrency, the next when one ends). The client is a few lines over a socket: what is measured
should be the server. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Answer", "load", "main", "summary"]

WORDS = (
    "once", "upon", "a", "time", "there", "was", "little", "girl", "boy", "dog", "cat", "frog",
    "liked", "to", "play", "in", "the", "park", "with", "her", "friend", "and", "one", "day",
    "they", "found", "big", "red", "ball", "under", "old", "tree", "near", "river", "who",
)  # fmt: skip


@dataclass(slots=True)
class Answer:
    """What one request saw; seconds of time.perf_counter."""

    key: str
    begun: float
    times: list[float] = field(default_factory=list)  # of each event that brought text
    num_tokens: int = 0
    ended: float = 0.0
    error: str | None = None


async def ask(host: str, port: int, body: dict[str, Any], key: str, begun: float) -> Answer:
    """Send one request for a stream and read it to its end."""
    answer = Answer(key, begun)
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    head = [
        "POST /v1/completions HTTP/1.1", f"Host: {host}", "Connection: close",
        f"Content-Length: {len(content)}",
    ]  # fmt: skip
    if key:
        head.append(f"Authorization: Bearer {key}")
    try:
        reader, writer = await asyncio.open_connection(host, port, limit=2**20)
        try:
            writer.write("\r\n".join([*head, "", content]).encode())
            status = await reader.readline()
            if b" 200 " not in status:
                answer.error = status.decode().strip() or "closed"
            while line := await reader.readline():
                if line.startswith(b'data: {"error"'):
                    answer.error = line.decode().strip()
                elif b'"choices":[{' in line:
                    answer.times.append(time.perf_counter())
                elif b'"completion_tokens"' in line:
                    answer.num_tokens = json.loads(line[6:])["usage"]["completion_tokens"]
        finally:
            writer.close()
    except OSError as error:
        answer.error = str(error)
    answer.ended = time.perf_counter()
    return answer


async def load(
    url: str,
    bodies: Sequence[dict[str, Any]],
    *,
    rate: float | None,
    burstiness: float = 1.0,
    concurrency: int | None = None,
    keys: Sequence[str] = ("",),
    seed: int = 0,
) -> list[Answer]:
    """Send requests and return what each saw.

    Args:
        url: of the server.
        bodies: of /v1/completions.
        rate: requests a second; None is as fast as concurrency allows.
        burstiness: shape of the gamma distribution of intervals; 1 is a Poisson process, less is
            burstier.
        concurrency: requests under way at most; None is no bound.
        keys: of the requests in turn.
        seed: of the intervals.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    draw = random.Random(seed)
    seats = asyncio.Semaphore(concurrency or len(bodies))
    tasks: list[asyncio.Task[Answer]] = []

    async def one(body: dict[str, Any], key: str, begun: float | None) -> Answer:
        async with seats:
            return await ask(host, port, body, key, begun or time.perf_counter())

    due = time.perf_counter()
    for i, body in enumerate(bodies):
        begun = None
        if rate is not None:
            due += draw.gammavariate(burstiness, 1 / (rate * burstiness))
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            begun = due  # a client that is late in sending is the client's fault, not the user's
        tasks.append(asyncio.create_task(one(body, keys[i % len(keys)], begun)))
    return list(await asyncio.gather(*tasks))


def summary(answers: Sequence[Answer], goodput: dict[str, float] | None = None) -> dict[str, Any]:
    """Return rates, percentiles in milliseconds, goodput and Jain's index of fairness over keys.

    Args:
        goodput: bounds in milliseconds for "ttft", "tpot", "e2e"; requests within all count.
    """
    good = [a for a in answers if a.error is None and a.times]
    found: dict[str, Any] = {"requests": len(answers), "failed": len(answers) - len(good)}
    if not good:
        return found
    seconds = max(a.ended for a in good) - min(a.begun for a in good)
    found["seconds"] = seconds
    found["requests_per_second"] = len(good) / seconds
    found["tokens_per_second"] = sum(a.num_tokens for a in good) / seconds
    of_each = [
        {
            "ttft": 1e3 * (a.times[0] - a.begun),
            "tpot": 1e3 * (a.times[-1] - a.times[0]) / max(1, a.num_tokens - 1),
            "e2e": 1e3 * (a.ended - a.begun),
        }
        for a in good
    ]
    values = {name: [one[name] for one in of_each] for name in ("ttft", "tpot", "e2e")}
    values["itl"] = [
        1e3 * (b - a) for one in good for a, b in zip(one.times, one.times[1:], strict=False)
    ]
    for name, measured in values.items():
        ranked = sorted(measured) or [0.0]
        found[name] = {
            "mean": mean(ranked),
            **{f"p{p}": ranked[min(len(ranked) - 1, len(ranked) * p // 100)] for p in (50, 90, 99)},
        }
    if goodput:
        within = [all(one[name] <= bound for name, bound in goodput.items()) for one in of_each]
        found["goodput"] = sum(within) / seconds
    keys = {a.key for a in good}
    if len(keys) > 1:
        shares = [sum(a.num_tokens for a in good if a.key == key) for key in keys]
        found["jain"] = sum(shares) ** 2 / (len(shares) * sum(s * s for s in shares))
    return found


def _bodies(options: argparse.Namespace) -> list[dict[str, Any]]:
    draw = random.Random(options.seed)
    shared = [draw.choice(WORDS) for _ in range(options.shared_words)]
    bodies = []
    for i in range(options.num_prompts):
        words = [*shared, *(draw.choice(WORDS) for _ in range(options.words))]
        bodies.append(
            {
                "prompt": " ".join(words),
                "max_tokens": options.max_tokens,
                "temperature": options.temperature,
                "seed": i,
                "ignore_eos": True,
            }
        )
    return bodies


def _direct(options: argparse.Namespace, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Measure the engine called directly, then the same requests through a server of its own."""
    from tilewise.engine.llm import LLM
    from tilewise.engine.request import SamplingParams

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
        sys.executable, "-m", "tilewise", "serve", options.model, "--port", "0",
        "--max-num-seqs", str(seats), "--log-level", "error",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ}) as server:
        assert server.stderr is not None
        try:
            url = None
            for line in server.stderr:
                if match := re.search(r" at (http\S+)", line):
                    url = match.group(1)
                    break
            if url is None:
                raise RuntimeError(f"the server of {options.model} must start, and did not")
            asyncio.run(load(url, bodies[:seats], rate=None, concurrency=seats))
            through, cpu, client = [], [], []
            for _ in range(options.repeats):
                before, mine = _cpu_seconds(server.pid), resource.getrusage(resource.RUSAGE_SELF)
                answers = asyncio.run(load(url, bodies, rate=None, concurrency=seats))
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
    """Return the processor time of a process's main thread, which runs its event loop."""
    with open(f"/proc/{pid}/task/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _bounds(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in ("ttft", "tpot", "e2e") or not value.replace(".", "", 1).isdecimal():
        raise argparse.ArgumentTypeError(f"must be ttft:MS, tpot:MS or e2e:MS, got {text!r}")
    return name, float(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="tilewise bench serve", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of any server with /v1/completions")
    add("--direct", action="store_true", help="start a server, beside the engine without one")
    add("--model", default="story", help="with --direct")
    add("--repeats", type=int, default=3, help="with --direct; the best counts")
    add("--num-prompts", type=int, default=64)
    add("--words", type=int, default=24, help="of each prompt")
    add("--shared-words", type=int, default=0, help="with which all prompts begin")
    add("--max-tokens", type=int, default=64)
    add("--temperature", type=float, default=1.0)
    add("--request-rate", type=float, help="a second (default: as fast as they are answered)")
    add("--burstiness", type=float, default=1.0, help="1 is a Poisson process, less is burstier")
    add("--concurrency", type=int, help="requests under way at most")
    add("--goodput", type=_bounds, nargs="+", default=[], metavar="ttft:MS")
    add("--api-key", nargs="+", default=[""], help="of the requests in turn")
    add("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    bodies = _bodies(options)
    if options.direct:
        found = _direct(options, bodies)
    else:
        answers = asyncio.run(
            load(
                options.url, bodies, rate=options.request_rate, burstiness=options.burstiness,
                concurrency=options.concurrency, keys=options.api_key, seed=options.seed,
            )
        )  # fmt: skip
        found = summary(answers, dict(options.goodput))
        for answer in answers:
            if answer.error:
                print(f"failed: {answer.error[:200]}", file=sys.stderr)
                break
    for name, value in found.items():
        if isinstance(value, dict):
            text = "  ".join(f"{key} {number:10.2f}" for key, number in value.items())
            print(f"{name:<26}{text} ms")
        else:
            print(f"{name:<26}{value:,.3f}".rstrip("0").rstrip("."))
    print(json.dumps(found))
    return 0 if not found.get("failed") else 1


if __name__ == "__main__":
    sys.exit(main())
