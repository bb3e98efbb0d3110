"""The CPU rows of the server's table, in one run, into one JSON.

    python lab/serve_rows.py --json lab/results/serve_cpu.json      about 9 minutes
    python lab/serve_rows.py --quick                                    whether it runs

throughput   streams of the packaged model against the engine called directly, taken in turn
cpu          processor time of the server's event loop for a streamed token
weights      tokens of two keys of weights 1 and 3 whose queues are both full
flood        first tokens of a key that asks once a second, alone and beside one that floods
leaves       steps until the blocks of a client that has left are free
page         throughput with the page's stream of events open, and without

The last lines tell of each row whether it holds. Nothing else may run meanwhile: the load averages
before and after are in the JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

import tilewise
from tilewise.bench.serving.client import Answer, load, summary
from tilewise.bench.serving.client import ask as stream
from tilewise.bench.workload import Asked
from tilewise.children import environment
from tilewise.server.keys import hash_of

WORDS = ("once", "upon", "a", "time", "there", "was", "little", "girl", "dog", "cat", "liked", "to")
MORE: list[str] = []  # options of tilewise serve, from the command line
KEYS = {"alice": 1, "bob": 3, "root": 1}


@dataclass
class Stream:
    """What one request saw; seconds of time.perf_counter."""

    begun: float
    times: list[float] = field(default_factory=list)
    tokens: int = 0


def body(seed: int, tokens: int, words: int = 24, **more: Any) -> dict[str, Any]:
    """Return a request whose prompt is drawn by its seed.

    It says how to draw, as the engine called directly does by default: what it left out would be
    that of the model's generation_config.json.
    """
    draw = random.Random(seed)
    prompt = " ".join(draw.choice(WORDS) for _ in range(words))
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": seed,
            "temperature": 1.0, "top_p": 1.0, **more}  # fmt: skip


async def ask(port: int, asked: dict[str, Any], key: str, events: int | None = None) -> Stream:
    """Stream one request; after so many events, if they are given, leave."""
    content = json.dumps({**asked, "stream": True, "stream_options": {"include_usage": True}})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Authorization: Bearer key-of-{key}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    found = Stream(time.perf_counter())
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    writer.write((head + content).encode())
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"a request must be answered, got {status.decode().strip()}")
    while line := await reader.readline():
        if b'"choices":[{' in line:
            found.times.append(time.perf_counter())
            if len(found.times) == events:
                break
        elif b'"completion_tokens"' in line:
            found.tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    writer.close()
    return found


async def answered(port: int, asked: dict[str, Any], key: str) -> Answer:
    """Stream one request by the client of `tilewise bench serve`, which leaves cores to others."""
    url = f"http://127.0.0.1:{port}"
    found = await stream(url, asked, f"key-of-{key}", time.perf_counter())
    if found.error is not None:
        raise RuntimeError(f"a request must be answered, got {found.error}")
    return found


def all_of(port: int, bodies: list[dict[str, Any]], key: str = "root") -> float:
    """Stream all requests at once; return tokens a second."""
    asked = [Asked(one, key=f"key-of-{key}") for one in bodies]
    found = summary(asyncio.run(load(f"http://127.0.0.1:{port}", asked)))
    if found["failed"]:
        raise RuntimeError(f"all requests must be answered, {found['failed']} were not")
    return float(found["tokens_per_second"])


class Server:
    """`tilewise serve` in a process of its own, with three keys."""

    def __init__(self, seats: int, *more: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        keys = Path(self.folder.name) / "keys.toml"
        keys.write_text(
            "".join(
                f'[keys.{name}]\nhash = "{hash_of(f"key-of-{name}")}"\nweight = {weight}.0\n'
                f"admin = {str(name == 'root').lower()}\n"
                for name, weight in KEYS.items()
            )
        )
        command = [
            sys.executable, "-m", "tilewise", "serve", "--port", "0", "--log-level", "error",
            "--keys-file", str(keys), "--max-num-seqs", str(seats), *MORE, *more,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, env=environment(), stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if match := re.search(r" at http://127\.0\.0\.1:(\d+)", line):
                self.port = int(match.group(1))
                return
        raise RuntimeError("the server must start, and did not")

    def get(self, path: str) -> Any:
        """Return what an administrator is told."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", headers={"Authorization": "Bearer key-of-root"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def cpu_seconds(self) -> float:
        """Return the processor time of its main thread, which runs its event loop."""
        pid = self.process.pid
        text = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text()
        return int(text.split()[0]) / 1e9

    def process_seconds(self) -> float:
        """Return the processor time of all its threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(60)
        self.folder.cleanup()


@contextmanager
def server(seats: int, *more: str) -> Iterator[Server]:
    """Run a server for a block."""
    made = Server(seats, *more)
    try:
        yield made
    finally:
        made.stop()


def throughput(quick: bool, repeats: int, counts: list[int]) -> list[dict[str, Any]]:
    """Measure the engine directly and through HTTP in turn, for each number of streams."""
    from tilewise.engine.llm import LLM
    from tilewise.engine.request import SamplingParams

    rows = []
    for streams in (1, 4) if quick else counts:
        tokens = 16 if quick else 400 if streams < 16 else 200 if streams < 64 else 128
        bodies = [body(i, tokens) for i in range(streams)]
        prompts = [one["prompt"] for one in bodies]
        params = [
            SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i) for i in range(streams)
        ]
        llm = LLM("story", max_num_seqs=streams)
        direct, http, cpu, cpu_batched, whole = [], [], [], [], []
        with server(streams) as running:
            for turn in range(repeats + 1):  # the first one warms both up
                begun = time.perf_counter()
                llm.generate(prompts, params)
                direct.append(streams * tokens / (time.perf_counter() - begun))
                before, of_all = running.cpu_seconds(), running.process_seconds()
                http.append(all_of(running.port, bodies))
                cpu.append(1e3 * (running.cpu_seconds() - before) / (streams * tokens))
                whole.append(1e3 * (running.process_seconds() - of_all) / (streams * tokens))
                if streams >= 64 and turn:  # few connections, each with many samples of a step
                    few = [body(i, tokens // 2, n=32) for i in range(streams // 32)]
                    before = running.cpu_seconds()
                    all_of(running.port, few)
                    spent = running.cpu_seconds() - before
                    cpu_batched.append(1e3 * spent / (streams * (tokens // 2)))
        llm.close()
        row = {
            "streams": streams,
            "tokens_each": tokens,
            "direct_tokens_per_second": direct[1:],
            "http_tokens_per_second": http[1:],
            # Of each turn: what disturbs the machine disturbs both of its halves.
            "ratio": median(a / b for a, b in zip(http[1:], direct[1:], strict=True)),
            "event_loop_ms_per_token": cpu[1:],
            "process_ms_per_token": whole[1:],
            "event_loop_ms_per_token_32_samples_a_connection": cpu_batched,
        }
        print(
            f"{streams} streams: {row['ratio']:.3f} of the engine called directly, "
            f"{median(cpu[1:]):.4f} ms a token",
            flush=True,
        )
        rows.append(row)
    return rows


def weights(quick: bool, seconds: float) -> dict[str, Any]:
    """Keep the queues of two keys full and count the tokens that come while they are.

    What begins before the queues are full and what is left in them at the end is not counted: there
    both keys get as much as they asked for, whatever their weights.
    """
    seats, tokens = (4, 8) if quick else (16, 32)
    seconds = 4.0 if quick else seconds

    async def keep_full(port: int) -> dict[str, int]:
        begin = time.perf_counter() + seconds / 10
        end = begin + seconds
        numbers = iter(range(10**9))

        async def user(key: str) -> int:
            made = 0
            while time.perf_counter() < end:
                found = await answered(port, body(next(numbers), tokens), key)
                inside = sum(begin <= when < end for when in found.times)
                made += round(found.num_tokens * inside / len(found.times))
            return made

        users = [(key, user(key)) for key in ("alice", "bob") for _ in range(4 * seats)]
        made = await asyncio.gather(*(one for _, one in users))
        found = {"alice": 0, "bob": 0}
        for (key, _), count in zip(users, made, strict=True):
            found[key] += count
        return found

    with server(seats, "--scheduling-policy", "fair") as running:
        found = asyncio.run(keep_full(running.port))
    share = found["bob"] / found["alice"]
    print(f"weights 1 and 3: tokens 1 : {share:.3f}", flush=True)
    return {"tokens": found, "seconds": seconds, "ratio": share, "asked": 3.0}


def flood(quick: bool, seconds: float) -> dict[str, Any]:
    """Measure first tokens of a key that asks once a second, alone and beside one that floods.

    A long prompt each second, as of a chat that goes on, and a short one half a second later. A
    first token waits for the step that runs, and has the next one to itself. The row is that of
    the worse ones.
    """
    count, size, words = (3, 8, 100) if quick else (int(seconds), 64, 700)

    async def seldom(port: int) -> dict[str, list[float]]:
        async def one(i: int, later: float, words: int) -> float:
            await asyncio.sleep(i + later)
            asked = body(1000 + 2 * i + (later > 0), 8, words=words)
            found = await answered(port, asked, "alice")
            return 1e3 * (found.times[0] - found.begun)

        long, short = await asyncio.gather(
            asyncio.gather(*(one(i, 0.0, words) for i in range(count))),
            asyncio.gather(*(one(i, 0.5, 24) for i in range(count))),
        )
        return {"long": list(long), "short": list(short)}

    def beside(port: int) -> dict[str, list[float]]:
        # A client of its own: in this process it would delay the other one's, not the server.
        command = [sys.executable, __file__, "--flood", str(port), str(size)]
        flooding = subprocess.Popen(command)
        try:
            time.sleep(1 if quick else 3)
            return asyncio.run(seldom(port))
        finally:
            flooding.terminate()
            flooding.wait()

    # Seats for everybody: what is asked is whether a flood delays others, not whether it can
    # take all seats, which bounds of the queue and max_requests of a key decide.
    with server(2 * size, "--scheduling-policy", "fair", "--no-enable-prefix-caching") as running:
        all_of(running.port, [body(i, 8) for i in range(size)])
        alone = asyncio.run(seldom(running.port))
        with_flood = beside(running.port)

    def p99(values: list[float]) -> float:
        return sorted(values)[min(len(values) - 1, len(values) * 99 // 100)]

    found: dict[str, Any] = {"flood": size, "long_prompt_words": words}
    for kind in ("long", "short"):
        ratio = p99(with_flood[kind]) / p99(alone[kind])
        found |= {f"{kind}_alone_ms": alone[kind], f"{kind}_beside_ms": with_flood[kind]}
        found[f"{kind}_p99_ratio"] = ratio
        told = f"{p99(alone[kind]):.1f} ms alone, {p99(with_flood[kind]):.1f} ms beside it"
        print(f"flood, {kind} prompts: p99 of first tokens {told}, {ratio:.2f} times", flush=True)
    return found


async def flood_of(port: int, size: int) -> None:
    """Ask again and again, as many at once as are said, until this process is ended."""

    async def again(i: int) -> None:
        while True:
            await answered(port, body(i, 64), "bob")

    await asyncio.gather(*map(again, range(size)))


def leaves(quick: bool, seconds: float) -> dict[str, Any]:
    """Count the steps between a client's leaving and the end of its request."""
    count, others = (3, 3) if quick else (min(30, int(seconds)), 15)

    async def leave(port: int, running: Server) -> list[int]:
        async def again(i: int) -> None:
            while True:
                await ask(port, body(i, 300), "bob")

        users = [asyncio.create_task(again(i)) for i in range(others)]
        await asyncio.sleep(1)
        found = []
        _, since = await asyncio.to_thread(_trace, running, 0)
        for i in range(count):
            asked = body(5000 + i, 900, request_id=f"leaves-{i}")
            await ask(port, asked, "alice", events=10)
            left = time.perf_counter()  # of the machine's clock, as the trace's times are
            await asyncio.sleep(0.5)
            trace, since = await asyncio.to_thread(_trace, running, since)
            ends = [
                e for e in trace if e["kind"] == "finish" and e["request_id"] == f"cmpl-leaves-{i}"
            ]
            if not ends:
                raise RuntimeError("the request of a client that has left must end within 0.5 s")
            found.append(
                sum(e["kind"] == "schedule" and left < e["time"] < ends[0]["time"] for e in trace)
            )
        for user in users:
            user.cancel()
        await asyncio.gather(*users, return_exceptions=True)
        return found

    with server(2 * others) as running:
        steps = asyncio.run(leave(running.port, running))
    print(f"a client leaves: its blocks are free within {max(steps)} steps", flush=True)
    return {"steps": steps, "most": max(steps)}


def _trace(running: Server, since: int) -> tuple[list[dict[str, Any]], int]:
    """Return the events from a number on, and the number of the next one."""
    events: list[dict[str, Any]] = []
    while True:
        told = running.get(f"/v1/trace?since={since}&limit=10000")
        events += told["data"]
        since = told["next"]
        if len(told["data"]) < 10000:
            return events, since


def page(quick: bool, repeats: int) -> dict[str, Any]:
    """Measure throughput with the page's stream open and without, in turn."""
    streams, tokens = (4, 16) if quick else (64, 200)
    bodies = [body(i, tokens) for i in range(streams)]
    rates: dict[bool, list[float]] = {False: [], True: []}
    with server(streams) as running:
        all_of(running.port, bodies)
        for _ in range(repeats):
            for is_open in (False, True):
                stop = threading.Event()
                viewer = threading.Thread(target=_view, args=(running, stop), daemon=True)
                if is_open:
                    viewer.start()
                    time.sleep(0.5)
                rates[is_open].append(all_of(running.port, bodies))
                stop.set()
                if is_open:
                    viewer.join(15)
    pairs = zip(rates[True], rates[False], strict=True)
    cost = 1 - median(opened / closed for opened, closed in pairs)
    print(f"the page open costs {100 * cost:.2f} % of the throughput", flush=True)
    return {"closed": rates[False], "open": rates[True], "cost": cost}


def _view(running: Server, stop: threading.Event) -> None:
    """Ask what the page asks: its events, and metrics every two seconds."""
    headers = {"Authorization": "Bearer key-of-root"}
    url = f"http://127.0.0.1:{running.port}/v1/events"
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
        asked = 0.0
        while not stop.is_set() and answer.readline():
            if time.perf_counter() - asked > 2:
                asked = time.perf_counter()
                metrics = url.replace("/v1/events", "/metrics")
                urllib.request.urlopen(urllib.request.Request(metrics, headers=headers)).read()


def held(found: dict[str, Any]) -> dict[str, bool]:
    """Return whether each row of the table holds, and print it with its bound."""
    rows: list[tuple[str, float, str, float]] = []
    for row in found.get("throughput", []):
        streams = row["streams"]
        rows.append((f"{streams} streams, of the engine called directly", row["ratio"], ">=", 0.85))
        if streams == 256:
            spent = median(row["event_loop_ms_per_token"])
            rows.append(("ms of the server for a token, 256 streams", spent, "<", 0.15))
        if row["event_loop_ms_per_token_32_samples_a_connection"]:
            spent = median(row["event_loop_ms_per_token_32_samples_a_connection"])
            rows.append((f"the same in batches of a step, {streams} samples", spent, "<", 0.05))
    if "weights" in found:
        away = abs(found["weights"]["ratio"] / 3 - 1)
        rows.append(("two keys of weights 1 and 3, away from 1 : 3", away, "<=", 0.05))
    if "flood" in found:
        for kind in ("long", "short"):
            ratio = found["flood"][f"{kind}_p99_ratio"]
            rows.append((f"a flood's p99 of first tokens, {kind} prompts", ratio, "<=", 1.5))
    if "leaves" in found:
        rows.append(("steps until a client's blocks are free", found["leaves"]["most"], "<=", 2))
    if "page" in found:
        rows.append(("the page's share of throughput", found["page"]["cost"], "<", 0.02))
    holds = {}
    for name, value, rule, bound in rows:
        fits = {">=": value >= bound, "<=": value <= bound, "<": value < bound}[rule]
        print(f"{'holds' if fits else 'FAILS'}  {name}: {value:.4g} {rule} {bound}", flush=True)
        holds[name] = fits
    return holds


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="small numbers that say nothing")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--serve",
        nargs="*",
        default=[],
        metavar="OPTION",
        help="further ones of tilewise serve, without their dashes: engine-process",
    )
    parser.add_argument(
        "--seconds", type=float, default=45.0, help="of full queues, and of first tokens alone"
    )
    parser.add_argument("--flood", nargs=2, type=int, metavar=("PORT", "N"), help="only do this")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64, 256])
    rows = ("throughput", "weights", "flood", "leaves", "page")
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows)
    options = parser.parse_args()
    if options.flood:
        asyncio.run(flood_of(*options.flood))
        return
    repeats = 1 if options.quick else options.repeats
    MORE.extend(f"--{one}" for one in options.serve)
    found: dict[str, Any] = {
        "versions": {"tilewise": tilewise.__version__, "torch": torch.__version__,
                     "python": platform.python_version()},
        "cores": len(os.sched_getaffinity(0)),
        "cpu": next((line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().split("\n")
                     if line.startswith("model name")), platform.machine()),
        "date": time.strftime("%Y-%m-%d"),
        "serve": options.serve,
        "load_before": os.getloadavg(),
    }  # fmt: skip
    if "throughput" in options.rows:
        found["throughput"] = throughput(options.quick, repeats, options.streams)
    for name, measure in (("weights", weights), ("flood", flood), ("leaves", leaves)):
        if name in options.rows:
            found[name] = measure(options.quick, options.seconds)
    if "page" in options.rows:
        found["page"] = page(options.quick, repeats)
    found["load_after"] = os.getloadavg()
    found["holds"] = held(found)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
