"""`tilewise serve` beside `vllm serve`, and beside the engine called directly, in one run.

    python benchmarks/serve_peers.py --peer-path vllm=FOLDER --json F       about 150 s on an H200
    python benchmarks/serve_peers.py --peers thread        beside the engine in the server's process
    python benchmarks/serve_peers.py --device cpu --shape tiny --requests 16 --lengths 8 32 \\
        --peers none                                                        whether it runs

The model is a published shape with random weights and a made tokenizer, so that both servers turn
tokens into text. What is sent are nano-vllm's 256 requests (`tilewise bench serve` is the client):
all at once, then as a Poisson process at 0.7 of the rate at which vLLM answered them (ours, where
there is no vLLM). The engine called directly comes first and ends, so that two servers and their
caches fit a card of 80 GB; servers take turns. Prefix caching is off, as every run sends the same
prompts. Of a server that does not start the end of its log is in the JSON's file, and what leads to
the first error in it on standard output.

direct    tokens a second of LLM.generate, and the share of it that comes through HTTP
most      all requests at once: tokens a second, first tokens, between tokens
rate      the same at 0.7 of vLLM's highest rate

The last line is JSON; `holds` says which rows of issue 17's table do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import tilewise
from tilewise.bench.engines import vllm as vllm_peer
from tilewise.bench.engines.process import ROOT, EngineFailed, EngineProcess
from tilewise.bench.engines.shapes import SHAPES, read_sizes
from tilewise.bench.engines.workloads import Workload, nano
from tilewise.bench.roofline import device_name
from tilewise.bench.serve import load, summary
from tilewise.bench.workload import Asked, arriving

SHARE = 0.7  # of the highest rate
TINY: dict[str, Any] = SHAPES["llama-0.4b"] | {
    "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 2048,
}  # fmt: skip
BLOCK_SIZE = 16
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
    """A server that did not start.

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
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **environment}, cwd=folder
            )

    @property
    def url(self) -> str:
        """Without a path."""
        return f"http://127.0.0.1:{self.port}"

    def wait(self, timeout: float) -> ServerProcess:
        """Wait until it is ready.

        Raises:
            EngineFailed: it has ended, or is not.
        """
        while time.perf_counter() - self.begun < timeout:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=2) as answer:
                    if answer.status == 200:
                        self.start_s = time.perf_counter() - self.begun
                        return self
            except OSError:
                time.sleep(0.2)
        code, text = self.process.poll(), self.log.read_text(errors="replace")
        how = "was not ready" if code is None else f"ended with {code}"
        raise ServerFailed(
            f"{self.name} {how} after {time.perf_counter() - self.begun:.0f} s: {cause_of(text)}",
            text[-LOG_KEPT:],
        )

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
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
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
            {"prompt": prompt, "max_tokens": new, "ignore_eos": True, "seed": number,
             "temperature": workload.temperature}
        )
        for number, (prompt, new) in enumerate(
            zip(workload.prompts, workload.new_tokens, strict=True)
        )
    ]  # fmt: skip


def warm_up(server: ServerProcess, asked: list[Asked]) -> None:
    """Send short requests at once, so that all that comes with the first ones is done."""
    short = [Asked({**one.body, "max_tokens": 4}) for one in asked]
    asyncio.run(load(server.url, short))


def most(run: _Run, asked: list[Asked], repeats: int) -> dict[str, dict[str, Any]]:
    """Send all at once to one server after the other, several times; of each best run all is told.

    In turns, since what else the machine does changes from second to second.
    """
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in run.ready}
    for _ in range(repeats):
        for name in list(runs):
            found = _all_at_once(run.ready[name], asked)
            if found["failed"]:
                run.fail(name, EngineFailed(f"{name}: {found['failed']} requests failed"))
                del runs[name]
            else:
                runs[name].append(found)
    return {
        name: max(found, key=lambda one: one["tokens_per_second"])
        | {"runs": [one["tokens_per_second"] for one in found]}
        for name, found in runs.items()
    }


def _all_at_once(server: ServerProcess, asked: list[Asked]) -> dict[str, Any]:
    before, own = server.cpu_seconds(), time.process_time()
    found = summary(asyncio.run(load(server.url, asked)))
    made = sum(one.body["max_tokens"] for one in asked)
    after = server.cpu_seconds()
    found["cpu_ms_per_token"] = {
        name: 1e3 * (value - before.get(name, 0.0)) / made
        for name, value in sorted(after.items(), key=lambda pair: -pair[1])
        if value - before.get(name, 0.0) > 0.02 * found["seconds"]
    }
    found["client_cpu_ms_per_token"] = 1e3 * (time.process_time() - own) / made
    return found


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


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start everything, measure one after the other, and return the rows."""
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
    run = _Run(options, folder, document, servers_of(options, workload, model, blocks))
    try:
        if "vllm" in run.commands:  # which takes longest
            run.start("vllm", environments["vllm"])
        try:
            direct = EngineProcess(
                "tilewise", settings, folder / "direct.log", start_timeout=options.start_s
            )
            try:
                direct.ask(workload.as_request(), options.start_s)  # warms it up
                run.wait_for_all()  # while it starts, it takes cores
                rates = [
                    workload.tokens_out
                    / direct.ask(workload.as_request(), options.start_s)["seconds"]
                    for _ in range(options.repeats)
                ]
            finally:
                direct.close()
            document["direct_tokens_per_second"] = rates
            print(f"direct: {max(rates):,.0f} tok/s", flush=True)
        except (EngineFailed, OSError) as error:
            document["errors"]["direct"] = str(error)
            print(f"direct failed: {error}", flush=True)
        for name in run.commands:
            if name != "vllm":
                run.start(name, environments["tilewise"])
        run.wait_for_all()
        for one in run.ready.values():
            warm_up(one, asked)
        rows: dict[str, Any] = document.setdefault("servers", {})
        for name, found in most(run, asked, options.repeats).items():
            rows[name] = {"most": found}
            _say(name, "all at once, the best", found)
        peer = rows.get("vllm", rows.get("tilewise"))
        if peer is not None:
            rate = SHARE * peer["most"]["requests_per_second"]
            document["rate"] = rate
            for name in rows:
                if time.perf_counter() - run.begun > options.seconds:
                    document["errors"][f"{name} at that rate"] = "there was no time for it"
                    continue
                sent = arriving(asked, rate, burstiness=1.0, burst=1, seed=1)
                rows[name]["rate"] = summary(asyncio.run(load(run.ready[name].url, sent)))
                _say(name, f"at {rate:.1f} requests/s", rows[name]["rate"])
    finally:
        run.stop()
    document["holds"] = held(document)
    return document


class _Run:
    """The servers of one run.

    Attributes:
        commands: of each server.
        ready: those that answer.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        folder: Path,
        document: dict[str, Any],
        commands: dict[str, list[str]],
    ) -> None:
        self.options, self.folder, self.document = options, folder, document
        self.commands, self.begun = commands, time.perf_counter()
        self.ready: dict[str, ServerProcess] = {}
        self._waiting: dict[str, ServerProcess] = {}

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
            except EngineFailed as error:
                self.fail(name, error)
                one.stop()
            else:
                self.document.setdefault("start_s", {})[name] = one.start_s
                print(f"{name} is ready after {one.start_s:.0f} s", flush=True)
            del self._waiting[name]

    def fail(self, name: str, error: EngineFailed) -> None:
        """Keep why a server is not measured; the other rows are worth having."""
        self.document["errors"][name] = str(error)
        print(f"{name} failed: {error}", flush=True)
        if isinstance(error, ServerFailed):
            self.document.setdefault("logs", {})[name] = error.log
            print(f"of its log\n{shown_of(error.log)}", flush=True)

    def stop(self) -> None:
        """End all."""
        for one in (*self.ready.values(), *self._waiting.values()):
            one.stop()


def _split(paths: str | None) -> list[str]:
    return [one for one in (paths or "").split(os.pathsep) if one]


def held(document: dict[str, Any]) -> dict[str, Any]:
    """Return each row of the table: what was found, what is asked, and whether it holds."""
    rows, found = document.get("servers", {}), dict[str, Any]()

    def row(name: str, value: float, bound: float, is_least: bool) -> None:
        holds = value >= bound if is_least else value <= bound
        found[name] = {"found": value, "at least" if is_least else "at most": bound, "holds": holds}

    ours, theirs = rows.get("tilewise"), rows.get("vllm")
    if ours and document.get("direct_tokens_per_second"):
        rates = document["direct_tokens_per_second"]
        row(
            "of the engine called directly", median(ours["most"]["runs"]) / median(rates), 0.9, True
        )
        for name, where in (("process", "in a process of its own"), ("thread", "beside HTTP")):
            if other := rows.get(name):
                share = median(other["most"]["runs"]) / median(rates)
                row(f"the same, the engine {where}", share, 0.9, True)
    if ours and theirs:
        ratio = median(ours["most"]["runs"]) / median(theirs["most"]["runs"])
        row("throughput over vllm's", ratio, 1.0, True)
        for name in ("ttft", "itl"):
            for percent in ("p50", "p99"):
                if any("rate" not in one for one in (ours, theirs)):
                    continue
                pair = [one["rate"][name][percent] for one in (ours, theirs)]
                row(f"{name} {percent} over vllm's", pair[0] / max(1e-9, pair[1]), 1.0, False)
    for name, one in found.items():
        print(f"{'holds' if one['holds'] else 'FAILS'}  {name}: {one['found']:.3f}", flush=True)
    return found


def _say(name: str, what: str, found: dict[str, Any]) -> None:
    times = "".join(
        f", {kind} {found[kind]['p50']:.1f} / {found[kind]['p99']:.1f} ms"
        for kind in ("ttft", "itl")
        if kind in found
    )
    rate = found.get("tokens_per_second", 0.0)
    print(f"{name}, {what}: {rate:,.0f} tok/s{times}, {found['failed']} failed", flush=True)


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
    add("--repeats", type=int, default=2)
    add("--peers", nargs="+", default=["vllm"], choices=("vllm", "process", "thread", "none"))
    add("--peer-path", metavar="vllm=FOLDER", help="first on vLLM's PYTHONPATH")
    add("--peer-python", metavar="PYTHON", help="of vLLM's environment")
    add("--ours", nargs="*", default=[], metavar="OPTION=VALUE", help="for tilewise serve, no --")
    add("--vllm", nargs="*", default=[], metavar="OPTION=VALUE", help="for vllm serve, no --")
    add("--start-s", type=float, default=300.0, help="until everything must be ready")
    add("--seconds", type=float, default=1e9, help="after which no server's rate is measured")
    add("--work-dir", metavar="FOLDER", help="for logs and the made model")
    add("--json", metavar="FILE")
    options = parser.parse_args()
    options.peer_path = (options.peer_path or "").removeprefix("vllm=")
    options.ours = [f"--{one}" for one in options.ours]
    options.vllm = [f"--{one}" for one in options.vllm]
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.work_dir or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(options, folder.resolve())
    document = {
        "versions": {"tilewise": tilewise.__version__, "torch": torch.__version__,
                     "python": platform.python_version()},
        "device": device_name(options.device), "cores": len(os.sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%d"), "shape": options.shape, "dtype": options.dtype,
        "seconds": time.perf_counter() - begun, "threads": threading.active_count(), **found,
    }  # fmt: skip
    if options.json:
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    # Without logs, whose ends stand above: of a long output only the end may be kept.
    print(json.dumps({name: value for name, value in document.items() if name != "logs"}))


if __name__ == "__main__":
    main()
