"""`tilewise serve` beside `vllm serve`, and beside the engine called directly, in one run.

    python lab/serve_peers.py --peer-path vllm=FOLDER --json F       about 200 s on an H200
    python lab/serve_peers.py --peers thread        beside the engine in the server's process
    python lab/serve_peers.py --device cpu --shape tiny --requests 16 --lengths 8 32 \\
        --peers none                                                        whether it runs

The model is a published shape with random weights and a made tokenizer, so that both servers turn
tokens into text. What is sent are nano-vllm's 256 requests (`tilewise bench serve` is the client):
all at once, then as a Poisson process at 0.7 of the rate at which vLLM answered them (ours, where
there is no vLLM). Servers take turns; the engine called directly comes when they have ended, so
that two engines and their caches fit a card of 80 GB. Prefix caching is off, as every run sends the
same prompts, and no request has a seed: vLLM draws those one by one, 256 launches a step. Of a
server that fails the end of its log is in the JSON's file, and what leads to the first error in it
on standard output. The file is written after every run, and none begins that would end after
--seconds.

most      all requests at once: tokens a second, first tokens, between tokens
rate      the same at 0.7 of vLLM's highest rate
direct    tokens a second of LLM.generate, and the share of it that comes through HTTP

The last line is JSON; `holds` says which rows of issue 17's table do.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch

import tilewise
from tilewise import children
from tilewise.bench.engines import vllm as vllm_peer
from tilewise.bench.engines.process import ROOT, EngineFailed, EngineProcess
from tilewise.bench.engines.shapes import SHAPES, read_sizes
from tilewise.bench.engines.workloads import Workload, nano
from tilewise.bench.roofline import device_name
from tilewise.bench.serving.client import load, summary
from tilewise.bench.workload import Asked, arriving

SHARE = 0.7  # of the highest rate
TINY: dict[str, Any] = SHAPES["llama-0.4b"] | {
    "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 2048,
}  # fmt: skip
BLOCK_SIZE = 16
TOLD_S = 20.0  # between two lines on a server that is still starting
STOP_S = 15.0
LOG_KEPT, LOG_SHOWN = 100_000, 4_000  # characters of a server's that did not start
ERROR = re.compile(r"\b[A-Za-z_.]*(Error|Exception|Killed|Interrupt)\b: \S.*")


def write_model(shape: str, folder: Path) -> Path:
    """Write a shape's config.json and a tokenizer of as many made words; return the folder."""
    config = TINY if shape == "tiny" else SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    # The 256 characters of byte-level tokenizers: a text is encoded as its bytes, as no two of
    # them are ever merged, and every other id has a text of its own.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = [chr(b) for b in plain] + [chr(256 + i) for i in range(len(others))]
    size, end = config["vocab_size"], config["eos_token_id"]
    words = letters + [f"\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}w{i}" for i in range(256, size)]
    words[end] = "<|end|>"
    vocabulary = {word: i for i, word in enumerate(words)}
    ending = {"content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True}  # fmt: skip
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                "use_regex": True}  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": end, **ending}], "normalizer": None, "pre_tokenizer": by_bytes,
        "post_processor": None, "decoder": by_bytes,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "model_max_length": config["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class ServerFailed(EngineFailed):
    """A server that did not start, or answered wrongly.

    Attributes:
        log: the end of what it wrote.
    """

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


def cause_of(log: str) -> str:
    """Return what a log says of the end of its process: the errors in it, the first of them first.

    A server whose engine is another process tells of that one's error first, and then of its own,
    with which its log ends: that the engine has ended.
    """
    # Warnings that come earlier name errors, too.
    told = log[_first_traceback(log) :]
    lines = [" ".join(line.split()) for line in told.splitlines() if line.strip()]
    named = dict.fromkeys(found[0] for line in lines if (found := ERROR.search(line)))
    errors = [one[:500] for one in named]
    return " | ".join(errors[:3] + errors[3:][-2:]) or " ".join(lines[-15:])[-1500:]


def shown_of(log: str) -> str:
    """Return of a long log what leads to its first error, and its end."""
    first = ERROR.search(log, _first_traceback(log))
    if len(log) <= LOG_SHOWN or first is None or len(log) - first.start() <= LOG_SHOWN:
        return log[-LOG_SHOWN:]
    half = LOG_SHOWN // 2
    return f"{log[max(0, first.end() - half) : first.end()]}\n[...]\n{log[-half:]}"


def _first_traceback(log: str) -> int:
    return max(0, log.find("Traceback (most recent"))


class ServerProcess:
    """A server in a process of its own.

    Args:
        name: of its log.
        command: that starts it on `port`.
        environment: beside this process's.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        folder: Path,
        environment: dict[str, str],
    ) -> None:
        self.name, self.port, self.log = name, port, folder / f"{name}-serve.log"
        self.begun = time.perf_counter()
        self.start_s = 0.0
        with self.log.open("wb") as log:
            # A group of its own: an engine that outlives its server would keep the card's memory.
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=children.environment(**environment),
                cwd=folder, process_group=0,
            )  # fmt: skip

    @property
    def url(self) -> str:
        """Without a path."""
        return f"http://127.0.0.1:{self.port}"

    def wait(self, timeout: float) -> ServerProcess:
        """Wait until it is ready.

        Raises:
            EngineFailed: it has ended, or is not.
        """
        told = self.begun
        while (now := time.perf_counter()) - self.begun < timeout:
            if self.process.poll() is not None:
                break
            if now - told > TOLD_S:
                told = now
                print(f"{self.name}, {now - self.begun:.0f} s: {self._last_line()}", flush=True)
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=2) as answer:
                    if answer.status == 200:
                        self.start_s = time.perf_counter() - self.begun
                        return self
            except OSError:
                time.sleep(0.2)
        code = self.process.poll()
        how = "was not ready" if code is None else f"ended with {code}"
        raise self.failed(f"{how} after {time.perf_counter() - self.begun:.0f} s")

    def failed(self, how: str) -> ServerFailed:
        """Return an error that tells how it failed, what its log has on that, and the log."""
        text = self.log.read_text(errors="replace")
        return ServerFailed(f"{self.name} {how}: {cause_of(text)}", text[-LOG_KEPT:])

    def _last_line(self) -> str:
        lines = self.log.read_text(errors="replace")[-LOG_SHOWN:].split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[:200]

    def cpu_seconds(self) -> dict[str, float]:
        """Return the processor time of each of its threads, and of its children's, by name."""
        found: dict[str, float] = {}
        for pid in _family(self.process.pid):
            for task in Path(f"/proc/{pid}/task").glob("*"):
                try:
                    text = (task / "stat").read_text()
                except OSError:  # it has ended
                    continue
                fields = text.rsplit(")", 1)[1].split()
                name = re.sub(r"\d+", "", text[text.index("(") + 1 : text.rindex(")")])
                name = f"{'child ' if pid != self.process.pid else ''}{name}"
                if task.name == str(self.process.pid):
                    name = "main"
                spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                found[name] = found.get(name, 0.0) + spent
        return found

    def stop(self) -> None:
        """End it, and all processes that it has started."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _family(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        for file in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += map(int, file.read_text().split())
            except OSError:
                continue
    return found


def asked_of(workload: Workload) -> list[Asked]:
    """Return a workload's requests, all at once."""
    return [
        Asked(
            {"prompt": prompt, "max_tokens": new, "ignore_eos": True,
             "temperature": workload.temperature}
        )
        for prompt, new in zip(workload.prompts, workload.new_tokens, strict=True)
    ]  # fmt: skip


def warm_up(server: ServerProcess, asked: list[Asked]) -> None:
    """Send short requests at once, so that all that comes with the first ones is done."""
    short = [Asked({**one.body, "max_tokens": 4}) for one in asked]
    asyncio.run(load(server.url, short))


def sent(server: ServerProcess, asked: list[Asked]) -> dict[str, Any]:
    """Send requests and return what they saw, and whose processor time they took.

    Raises:
        ServerFailed: a request failed, or has not as many tokens as it asked for.
    """
    before, own = server.cpu_seconds(), time.process_time()
    answers = asyncio.run(load(server.url, asked))
    own = time.process_time() - own
    for one, answer in zip(asked, answers, strict=True):
        wanted = one.body["max_tokens"]
        wrong = answer.error or (answer.num_tokens != wanted and f"{answer.num_tokens} tokens")
        if wrong:
            raise server.failed(f"answered one of {wanted} tokens with {wrong}")
    found = summary(answers)
    made = sum(one.body["max_tokens"] for one in asked)
    # Near 1, and alike: else times between events are not times between tokens.
    found["events_per_token"] = sum(len(answer.times) for answer in answers) / made
    found["cpu_ms_per_token"] = {
        name: 1e3 * (value - before.get(name, 0.0)) / made
        for name, value in sorted(server.cpu_seconds().items(), key=lambda pair: -pair[1])
        if value - before.get(name, 0.0) > 0.02 * found["seconds"]
    }
    found["client_cpu_ms_per_token"] = 1e3 * own / made
    return found


def most(run: _Run, asked: list[Asked]) -> None:
    """Send all at once to one server after the other, several times; of each best run all is told.

    In turns, since what else the machine does changes from second to second.
    """
    for _ in range(run.options.repeats):
        for name in list(run.ready):
            row = run.rows.get(name, {}).get("most", {"seconds": 0.0, "runs": []})
            if not run.has_time(row["seconds"], f"all at once to {name}"):
                return
            found = run.measured(name, asked, "all at once")
            if found is None:
                continue
            runs = [*row["runs"], found["tokens_per_second"]]
            better = found if found["tokens_per_second"] == max(runs) else row
            run.keep(name, "most", better | {"runs": runs})


def at_rate(run: _Run, asked: list[Asked]) -> None:
    """Send at a share of the highest rate of vLLM to one server after the other."""
    peer = run.rows.get("vllm", run.rows.get("tilewise"))
    if peer is None:
        return
    rate = run.document["rate"] = SHARE * peer["most"]["requests_per_second"]
    slowest = max(row["most"]["e2e"]["p99"] for row in run.rows.values()) / 1e3
    arrivals = arriving(asked, rate, burstiness=1.0, burst=1, seed=1)
    for _ in range(run.options.rates):
        # All or none, as they are compared.
        needed = len(run.ready) * (len(asked) / rate + slowest)
        if not run.has_time(needed, f"{rate:.1f} requests/s"):
            return
        for name in list(run.ready):
            found = run.measured(name, arrivals, f"at {rate:.1f} requests/s")
            if found is not None:
                run.keep(name, "rate", [*run.rows[name].get("rate", []), found])


def directly(run: _Run, workload: Workload, settings: dict[str, Any]) -> None:
    """Call the engine without a server."""
    most = run.rows.get("tilewise", {}).get("most", {"seconds": 0.0})["seconds"]
    start_s = run.document.get("start_s", {}).get("tilewise", 0.0)
    if not run.has_time(start_s + (1 + run.options.repeats) * most, "direct"):
        return
    start_s = run.options.start_s
    try:
        engine = EngineProcess(
            "tilewise", settings, run.folder / "direct.log", start_timeout=start_s
        )
        try:
            engine.ask(workload.as_request(), start_s)  # warms it up
            for _ in range(run.options.repeats):
                seconds = engine.ask(workload.as_request(), start_s)["seconds"]
                rates = run.document.setdefault("direct_tokens_per_second", [])
                rates.append(workload.tokens_out / seconds)
                print(f"direct: {rates[-1]:,.0f} tok/s", flush=True)
                run.write()
        finally:
            engine.close()
    except (EngineFailed, OSError) as error:
        run.document["errors"]["direct"] = str(error)
        print(f"direct failed: {error}", flush=True)


def servers_of(
    options: argparse.Namespace, workload: Workload, model: Path, blocks: int
) -> dict[str, list[str]]:
    """Return the command that starts each server, without its port."""
    seats, longest = str(workload.max_num_seqs), str(workload.max_len)
    ours = [
        sys.executable, "-m", "tilewise", "serve", str(model), "--load-format", "dummy",
        "--device", options.device, "--dtype", options.dtype, "--max-model-len", longest,
        "--max-num-seqs", seats, "--num-blocks", str(blocks), "--no-enable-prefix-caching",
        "--log-level", "warning", *options.ours,
    ]  # fmt: skip
    found = {"tilewise": ours}
    for name, flag in (("process", "--engine-process"), ("thread", "--no-engine-process")):
        if name in options.peers:
            found[name] = [*ours, flag]
    if "vllm" in options.peers:
        sizes = read_sizes(json.loads((model / "config.json").read_text()))
        cache = blocks * BLOCK_SIZE * sizes.cache_bytes()
        found["vllm"] = [
            options.peer_python or sys.executable, "-m", "vllm.entrypoints.cli.main", "serve",
            str(model), "--load-format", "dummy", "--dtype", options.dtype, "--max-model-len",
            longest, "--max-num-seqs", seats,
            # Without measuring free memory, which others change while it starts. It refuses to
            # start where this share is not free, though the cache's size is given.
            "--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(cache),
            "--no-enable-prefix-caching",
            "--generation-config", "vllm", "--attention-backend", "FLASH_ATTN",
            "--uvicorn-log-level", "warning", *options.vllm,
        ]  # fmt: skip
    return found


def measure(
    options: argparse.Namespace, folder: Path, write: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Start everything, measure one after the other, and return the rows.

    Args:
        write: is given what was found so far, after every run.
    """
    model = write_model(options.shape, folder / options.shape)
    shortest, longest = options.lengths
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    workload = nano(
        requests=options.requests, shortest=shortest, longest=longest, vocab_size=vocab_size
    )
    asked = asked_of(workload)
    # Room for all requests at their full lengths: whoever preempts would be another's test.
    blocks = 64 + sum(
        -(-(len(p) + new) // BLOCK_SIZE) + 1
        for p, new in zip(workload.prompts, workload.new_tokens, strict=True)
    )
    settings = {
        "directory": str(model), "random_weights": True, "device": options.device,
        "dtype": options.dtype, "max_num_seqs": workload.max_num_seqs,
        "max_len": workload.max_len, "memory": 0.3, "num_blocks": blocks,
        "prefix_caching": False,
    }  # fmt: skip
    # Absolute: the servers run elsewhere.
    paths = [str(Path(one).resolve()) for one in _split(os.environ.get("PYTHONPATH"))]
    theirs = [str(Path(one).resolve()) for one in _split(options.peer_path)]
    environments = {
        "tilewise": {"PYTHONPATH": os.pathsep.join([str(ROOT), *paths])},
        "vllm": vllm_peer.SERVER_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([*theirs, *paths])},
    }
    document: dict[str, Any] = {
        "workload": {"requests": len(asked), "tokens_in": workload.tokens_in,
                     "tokens_out": workload.tokens_out, "num_blocks": blocks},
        "errors": {},
    }  # fmt: skip
    run = _Run(options, folder, document, servers_of(options, workload, model, blocks), write)
    try:
        # All at once: vLLM takes a minute longer than ours, with which nothing else can be done.
        for name in run.commands:
            run.start(name, environments["vllm" if name == "vllm" else "tilewise"])
        run.wait_for_all()
        for one in run.ready.values():
            warm_up(one, asked)
        most(run, asked)
        at_rate(run, asked)
        run.stop()  # the caches of three do not fit
        directly(run, workload, settings)
    finally:
        run.stop()
        run.write()
    tell(document["holds"])
    return document


class _Run:
    """The servers of one run.

    Attributes:
        commands: of each server.
        ready: those that answer.
        rows: what was measured of each server.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        folder: Path,
        document: dict[str, Any],
        commands: dict[str, list[str]],
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        self.options, self.folder, self.document = options, folder, document
        self.commands, self.begun = commands, time.perf_counter()
        self.ready: dict[str, ServerProcess] = {}
        self.rows: dict[str, dict[str, Any]] = document.setdefault("servers", {})
        self._waiting: dict[str, ServerProcess] = {}
        self._write = write

    def start(self, name: str, environment: dict[str, str]) -> None:
        """Start a server and do not wait for it."""
        port = free_port()
        command = [*self.commands[name], "--port", str(port)]
        self._waiting[name] = ServerProcess(name, command, port, self.folder, environment)

    def wait_for_all(self) -> None:
        """Wait for those that were started; of one that fails keep why."""
        for name, one in list(self._waiting.items()):
            try:
                self.ready[name] = one.wait(self.options.start_s)
            except ServerFailed as error:
                self.fail(name, error)
                one.stop()
            else:
                self.document.setdefault("start_s", {})[name] = one.start_s
                print(f"{name} is ready after {one.start_s:.0f} s", flush=True)
            del self._waiting[name]
            self.write()

    def has_time(self, seconds: float, what: str) -> bool:
        """Return whether so much is left, and say so where it is not."""
        if time.perf_counter() - self.begun + seconds <= self.options.seconds:
            return True
        self.document["errors"][what] = "there was no time for it"
        print(f"{what}: there was no time for it", flush=True)
        return False

    def measured(self, name: str, asked: list[Asked], how: str) -> dict[str, Any] | None:
        """Return what requests to a server saw; one that fails is not asked again."""
        try:
            found = sent(self.ready[name], asked)
        except ServerFailed as error:
            self.fail(name, error)
            self.ready.pop(name).stop()
            return None
        _say(name, how, found)
        return found

    def keep(self, name: str, kind: str, found: Any) -> None:
        """Keep what a server's row is now."""
        self.rows.setdefault(name, {})[kind] = found
        self.write()

    def fail(self, name: str, error: ServerFailed) -> None:
        """Keep why a server is not measured; the other rows are worth having."""
        self.document["errors"][name] = str(error)
        self.document.setdefault("logs", {})[name] = error.log
        print(f"{name} failed: {error}\nof its log\n{shown_of(error.log)}", flush=True)
        self.write()

    def write(self) -> None:
        """Judge and write what was found so far."""
        self.document["holds"] = held(self.document)
        self._write(self.document)

    def stop(self) -> None:
        """End all."""
        servers = (*self.ready.values(), *self._waiting.values())
        for one in servers:
            one.process.terminate()
        for one in servers:
            one.stop()
        self.ready, self._waiting = {}, {}


def _split(paths: str | None) -> list[str]:
    return [one for one in (paths or "").split(os.pathsep) if one]


def held(document: dict[str, Any]) -> dict[str, Any]:
    """Return each row of the table: what was found, what is asked, and whether it holds."""
    rows, found = document.get("servers", {}), dict[str, Any]()

    def row(name: str, value: float, bound: float, is_least: bool) -> None:
        holds = value >= bound if is_least else value <= bound
        found[name] = {"found": value, "at least" if is_least else "at most": bound, "holds": holds}

    def share_of(one: dict[str, Any], rates: list[float]) -> float:
        return median(one["most"]["runs"]) / median(rates)

    ours, theirs = rows.get("tilewise"), rows.get("vllm")
    if ours and (rates := document.get("direct_tokens_per_second")):
        row("of the engine called directly", share_of(ours, rates), 0.9, True)
        for name, where in (("process", "in a process of its own"), ("thread", "beside HTTP")):
            if name in rows:
                row(f"the same, the engine {where}", share_of(rows[name], rates), 0.9, True)
    if ours and theirs:
        row("throughput over vllm's", share_of(ours, theirs["most"]["runs"]), 1.0, True)
        if "rate" in ours and "rate" in theirs:
            for name, percent in itertools.product(("ttft", "itl"), ("p50", "p99")):
                pair = [median(r[name][percent] for r in one["rate"]) for one in (ours, theirs)]
                row(f"{name} {percent} over vllm's", pair[0] / max(1e-9, pair[1]), 1.0, False)
    return found


def tell(found: dict[str, Any]) -> None:
    """Print which rows hold."""
    for name, one in found.items():
        print(f"{'holds' if one['holds'] else 'FAILS'}  {name}: {one['found']:.3f}", flush=True)


def _say(name: str, what: str, found: dict[str, Any]) -> None:
    times = "".join(
        f", {kind} {found[kind]['p50']:.1f} / {found[kind]['p99']:.1f} ms"
        for kind in ("ttft", "itl")
        if kind in found
    )
    print(f"{name}, {what}: {found['tokens_per_second']:,.0f} tok/s{times}", flush=True)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", default="qwen3-0.6b", choices=(*SHAPES, "tiny"))
    add("--device", default="cuda", choices=("cpu", "cuda"))
    add("--dtype", default="bfloat16")
    add("--requests", type=int, default=256)
    add("--lengths", nargs=2, type=int, default=[100, 1024], metavar=("LOW", "HIGH"))
    add("--repeats", type=int, default=2, help="of what is sent all at once, and of calls")
    add("--rates", type=int, default=1, help="runs of each server at the lower rate")
    add("--peers", nargs="+", default=["vllm"], choices=("vllm", "process", "thread", "none"))
    add("--peer-path", metavar="vllm=FOLDER", help="first on vLLM's PYTHONPATH")
    add("--peer-python", metavar="PYTHON", help="of vLLM's environment")
    add("--ours", nargs="*", default=[], metavar="OPTION=VALUE", help="for tilewise serve, no --")
    add("--vllm", nargs="*", default=[], metavar="OPTION=VALUE", help="for vllm serve, no --")
    add("--start-s", type=float, default=300.0, help="until everything must be ready")
    add("--seconds", type=float, default=1e9, help="by which what is measured must have ended")
    add("--work-dir", metavar="FOLDER", help="for logs and the made model")
    add("--json", metavar="FILE")
    options = parser.parse_args()
    options.peer_path = (options.peer_path or "").removeprefix("vllm=")
    options.ours = [f"--{one}" for one in options.ours]
    options.vllm = [f"--{one}" for one in options.vllm]
    begun = time.perf_counter()
    signal.signal(signal.SIGTERM, _end)
    document: dict[str, Any] = {
        "versions": {"tilewise": tilewise.__version__, "torch": torch.__version__,
                     "python": platform.python_version()},
        "device": device_name(options.device), "cores": len(os.sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%d"), "shape": options.shape, "dtype": options.dtype,
    }  # fmt: skip

    def write(found: dict[str, Any]) -> None:
        document.update(found, seconds=time.perf_counter() - begun)
        if options.json:
            Path(options.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.work_dir or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        measure(options, folder.resolve(), write)
    # Without logs, whose ends stand above: of a long output only the end may be kept.
    print(json.dumps({name: value for name, value in document.items() if name != "logs"}))


def _end(number: int, frame: object) -> NoReturn:
    """End as an error does, so that servers end, too."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
