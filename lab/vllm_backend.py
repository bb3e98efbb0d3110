"""tilewise's attention inside vLLM beside vLLM's own: tokens, and tokens a second.

    python lab/vllm_backend.py --json F     about 120 s on an H200, half of it starts
    python lab/vllm_backend.py --engines story:graphs:CUSTOM,TRITON_ATTN --cases none

Each backend is an engine of vLLM's in a process of its own; all of them start side by side and then
take turns, so that a number and the one beside it are of the same minute. Shapes have random
weights, drawn here as a trained model's are sized (vLLM's dummy weights are so small that all
tokens tie), "story" is the packaged model with its weights.

tokens    greedy tokens of prompts of mixed lengths with their log-probabilities; against the first
          backend: the first token that differs and how far apart its two candidates were there, and
          how far apart the best two tokens' log-probabilities are up to it
rates     rows and lengths of prompts: seconds of their pass alone (one token), and of 128 tokens

Modes are graphs (of decode steps; nothing is compiled), compiled (as vLLM is by itself) and eager.

The file is written after every answer.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tilewise.bench.engines.shapes import model_directory
from tilewise.bench.engines.vllm import ENVIRONMENT
from tilewise.bench.roofline import device_name
from tilewise.children import environment

ROOT = Path(__file__).resolve().parents[1]
BACKENDS = ("FLASH_ATTN", "CUSTOM")
ENGINES = ("story:graphs:FLASH_ATTN,CUSTOM,TRITON_ATTN", "qwen3-0.6b", "llama-3-8b",
           "qwen3-0.6b:compiled")  # fmt: skip
CASES = ((1, 128), (32, 512), (256, 512))
NEW_TOKENS, REPEATS = 128, 3
TOKEN_LENGTHS = (5, 16, 17, 64, 130, 300, 511, 700)


# ---------------------------------------------------------------------- the engine's process


def child(settings: dict[str, Any]) -> None:
    """Serve one engine: a line of JSON in, a line of JSON out."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    began = time.perf_counter()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import vllm
    from vllm.model_executor.models import registry

    # A model is looked at in this process: another one would import everything once more.
    registry._run_in_subprocess = lambda look: look()
    imported = time.perf_counter()
    options: dict[str, Any] = {"max_num_batched_tokens": settings["step_tokens"]}
    if settings["mode"] == "graphs":  # neither Dynamo nor Inductor
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": settings["sizes"],
        }
    elif settings["mode"] == "compiled":
        options["compilation_config"] = {"cudagraph_capture_sizes": settings["sizes"]}
    else:
        options["enforce_eager"] = True
    backend, _, block_size = settings["backend"].partition("@")
    if block_size:
        options["block_size"] = int(block_size)
    is_random = settings["shape"] != "story"
    llm = vllm.LLM(
        model=settings["directory"],
        load_format="dummy" if is_random else "auto",
        skip_tokenizer_init=True,
        dtype=settings["dtype"],
        max_model_len=settings["max_len"],
        max_num_seqs=settings["rows"],
        gpu_memory_utilization=0.01,
        kv_cache_memory_bytes=settings["cache_bytes"],
        enable_prefix_caching=False,
        disable_log_stats=True,
        generation_config="vllm",
        attention_config={"backend": backend},
        seed=0,
        **options,
    )
    if is_random:
        llm.apply_model(draw)
    loaded = time.perf_counter()

    def answer(value: dict[str, Any]) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    config = llm.llm_engine.vllm_config
    facts = {
        "import_s": imported - began,
        "load_s": loaded - imported,
        "vllm": vllm.__version__,
        "block_size": config.cache_config.block_size,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "compilation": str(config.compilation_config.mode),
        "runner": 2 if config.use_v2_model_runner else 1,
        "gib": torch.cuda.memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0,
    }
    answer(facts | llm.apply_model(layer_facts)[0])
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(generate(vllm, llm, request))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"[:600]})


def draw(model: torch.nn.Module) -> None:
    """Write weights whose outputs keep their inputs' size, the same in every process."""
    for name, weight in model.named_parameters():
        generator = torch.Generator(device=weight.device)
        generator.manual_seed(zlib.crc32(name.encode()))
        with torch.no_grad():
            if weight.dim() == 1:  # of a norm; queries are enlarged for attention that chooses
                weight.fill_(2.0 if "q_norm" in name else 1.0)
            elif "embed" in name:  # small beside what layers add, or each token repeats itself
                weight.normal_(0.0, 0.05, generator=generator)
            else:
                weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)


def layer_facts(model: torch.nn.Module) -> dict[str, Any]:
    """Return which class computes attention."""
    for module in model.modules():
        if hasattr(module, "impl") and hasattr(module, "attn_backend"):
            kind = type(module.impl)
            version = getattr(module.impl, "vllm_flash_attn_version", None)
            return {"attention": f"{kind.__module__}.{kind.__name__}", "flash_attn": version}
    return {"attention": "none found"}


def generate(vllm: Any, llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of a batch, and its tokens if they are asked for."""
    wants = request.get("logprobs")
    params = vllm.SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=request["new"], detokenize=False,
        logprobs=wants,
    )  # fmt: skip
    asked = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    began = time.perf_counter()
    outputs = llm.generate(asked, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    found = [output.outputs[0] for output in outputs]
    if any(len(one.token_ids) != request["new"] for one in found):
        raise RuntimeError("an answer has another length")
    answer: dict[str, Any] = {"seconds": seconds}
    if wants:
        answer["ids"] = [list(one.token_ids) for one in found]
        answer["top"] = [
            [sorted(((x.logprob, i) for i, x in at.items()), reverse=True) for at in one.logprobs]
            for one in found
        ]
    return answer


# ---------------------------------------------------------------------- the side that asks


class Failed(RuntimeError):
    """An engine that ended, failed or took too long."""


class Engine:
    """An engine's process.

    Args:
        settings: what `child` reads.
        log: file for what it prints.
    """

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        self.name = f"{settings['shape']}, {settings['backend']}, {settings['mode']}"
        self.settings, self.log = settings, log
        self._file = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._file, text=True,
            env=environment(), cwd=ROOT,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put("")

    def answer(self, seconds: float) -> dict[str, Any]:
        """Return the next answer.

        Raises:
            Failed: there is none within `seconds`, or it is an error.
        """
        try:
            line = self._lines.get(timeout=max(0.1, seconds))
        except queue.Empty:
            self.close()
            raise Failed(f"no answer in {seconds:.0f} s: {self.told()}") from None
        if not line:
            self._lines.put("")
            raise Failed(f"ended: {self.told()}")
        value: dict[str, Any] = json.loads(line)
        if "error" in value:
            raise Failed(value["error"])
        return value

    def send(self, request: dict[str, Any]) -> None:
        """Ask for something, whose answer is the next one."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def told(self) -> str:
        """Return the errors of its log, or its end."""
        text = self.log.read_text(errors="replace")
        at = text.find("Traceback (most recent call last)")
        return text[-1500:] if at < 0 else text[at : at + 500] + "\n[...]\n" + text[-1500:]

    def close(self) -> None:
        """Stop it."""
        with suppress(OSError, AttributeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        self._process.kill()
        self._process.wait()
        self._file.close()


def prompts_of(rows: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Return random prompts."""
    drawn, end = random.Random(f"{rows}, {length}, {seed}"), min(vocabulary, 10_000)
    return [[drawn.randrange(1, end) for _ in range(length)] for _ in range(rows)]


def compare(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return how two backends' tokens differ.

    Returns:
        rows: of each prompt the tokens that are equal from the first on, and where one differs the
        gap of log-probability between the first backend's token and the second's there.
        error: the differences of the chosen tokens' log-probabilities, where all before is equal:
        their median and their maximum.
    """
    rows, errors = list[dict[str, Any]](), list[float]()
    both = (first["ids"], second["ids"], first["top"], second["top"])
    for a, b, top_a, top_b in zip(*both, strict=True):
        equal = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        row: dict[str, Any] = {"equal": equal, "of": len(a)}
        for i in range(min(equal + 1, len(a))):
            known = {token: value for value, token in top_b[i]}
            errors += [abs(value - known[token]) for value, token in top_a[i][:2] if token in known]
        if equal < len(a):
            here = {token: value for value, token in top_a[equal]}
            row["gap"] = here[a[equal]] - here[b[equal]] if b[equal] in here else None
        rows.append(row)
    return {"rows": rows, "error_median": statistics.median(errors), "error_max": max(errors),
            "equal": sum(r["equal"] for r in rows), "of": sum(r["of"] for r in rows)}  # fmt: skip


def settings_of(options: argparse.Namespace, shape: str, backend: str, mode: str) -> dict[str, Any]:
    """Return the settings of an engine."""
    directory, _ = model_directory(shape, options.work / "models")
    config = json.loads((directory / "config.json").read_text())
    if options.layers and shape != "story":
        config["num_hidden_layers"] = config["max_window_layers"] = options.layers
        directory = options.work / "models" / f"{shape}-{options.layers}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config))
    most = 0 if shape == "story" else options.llama_rows if shape == "llama-3-8b" else 256
    cases = [(rows, length) for rows, length in options.cases if rows <= most]
    needed = max([rows * (length + NEW_TOKENS + 16) for rows, length in cases] + [12_000])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    channels = config["num_key_value_heads"] * head_dim
    return {
        "shape": shape,
        "backend": backend,
        "mode": mode,
        "dtype": options.dtype,
        "directory": str(directory),
        "vocabulary": config["vocab_size"],
        "step_tokens": 8192,
        "max_len": min(1024, config["max_position_embeddings"]),
        "rows": 256,
        "sizes": sorted({1, 8, *[rows for rows, _ in options.cases]}),
        "cases": cases,
        "cache_bytes": needed * 4 * config["num_hidden_layers"] * channels,
    }


class Run:
    """What one call measures: engines by shape and mode, and what they answered."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.perf_counter()
        self.groups = list[list[Engine]]()
        self.result: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "device": device_name("cuda" if torch.cuda.is_available() else "cpu"),
            "torch": torch.__version__,
            "new_tokens": NEW_TOKENS,
            "starts": {},
            "failed": {},
            "tokens": {},
            "rates": [],
        }

    def left(self) -> float:
        """Return the seconds that are left."""
        return float(self.options.seconds - (time.perf_counter() - self.began))

    def write(self) -> None:
        """Write the file."""
        self.result["seconds"] = time.perf_counter() - self.began
        if self.options.json:
            self.options.json.write_text(json.dumps(self.result, indent=1) + "\n")

    def start(self) -> None:
        """Start all engines side by side."""
        options = self.options
        for shape, mode, backends in options.engines:
            group = []
            for backend in backends:
                log = options.work / f"{shape}.{backend}.{mode}.log"
                group.append(Engine(settings_of(options, shape, backend, mode), log))
            self.groups.append(group)
        for group in self.groups:
            for engine in [*group]:
                facts = self._answered(group, engine, min(options.start, self.left()))
                if facts is not None:
                    self.result["starts"][engine.name] = facts
                    print(engine.name, json.dumps(facts), flush=True)
                self.write()

    def ask(self, group: list[Engine], engine: Engine, request: dict[str, Any]) -> Any:
        """Return an engine's answer, or None if it failed, which ends it."""
        engine.send(request)
        return self._answered(group, engine, min(60.0, self.left()))

    def _answered(self, group: list[Engine], engine: Engine, seconds: float) -> Any:
        try:
            return engine.answer(seconds)
        except Failed as error:
            self.result["failed"][engine.name] = str(error)
            print(engine.name, "failed:", str(error)[-900:], flush=True)
            group.remove(engine)
            engine.close()
            return None

    def compare_tokens(self, group: list[Engine]) -> None:
        """Let all backends continue the same prompts."""
        own = group[0].settings
        if own["shape"] == "story":
            prompts = self._story(group)
        else:
            prompts = [prompts_of(1, n, own["vocabulary"], n)[0] for n in TOKEN_LENGTHS]
        request = {"prompts": prompts, "new": self.options.tokens, "logprobs": 5}
        answers = {e.settings["backend"]: self.ask(group, e, request) for e in [*group]}
        base = next(iter(answers), "")
        for backend, other in answers.items():
            if backend != base and answers.get(base) is not None and other is not None:
                name = f"{own['shape']}, {own['mode']}: {backend} against {base}"
                self.result["tokens"][name] = found = compare(answers[base], other)
                print(name, json.dumps(found), flush=True)

    def _story(self, group: list[Engine]) -> list[list[int]]:
        """Return the beginnings of a story that the packaged model tells."""
        from tokenizers import Tokenizer

        folder = Path(group[0].settings["directory"])
        start = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("Once upon a time").ids
        told = self.ask(group, group[0], {"prompts": [start], "new": 700, "logprobs": 1})
        ids = [*start, *(told["ids"][0] if told else ())]
        return [ids[:n] for n in TOKEN_LENGTHS if n <= len(ids)]

    def measure(self, group: list[Engine], rows: int, length: int) -> None:
        """Measure a case, each backend in its turn."""
        vocabulary = group[0].settings["vocabulary"]
        for engine in [*group]:  # as many rows as will be measured: their graphs and tiles
            prompts = prompts_of(rows, length, vocabulary, 99)
            self.ask(group, engine, {"prompts": prompts, "new": 8})
        seconds: dict[str, dict[int, list[float]]] = {}
        for turn in range(self.options.repeats):
            prompts = prompts_of(rows, length, vocabulary, turn)
            for engine in [*group] if turn % 2 == 0 else group[::-1]:
                for new in (1, NEW_TOKENS):
                    found = self.ask(group, engine, {"prompts": prompts, "new": new})
                    if found is None:
                        break
                    of = seconds.setdefault(engine.settings["backend"], {1: [], NEW_TOKENS: []})
                    of[new].append(found["seconds"])
            if self.left() < 5:
                break
        for backend, of in seconds.items():
            if of[NEW_TOKENS]:
                self._add_row(group[0].settings, backend, rows, length, of)

    def _add_row(
        self, own: dict[str, Any], backend: str, rows: int, length: int, of: dict[int, list[float]]
    ) -> None:
        first_s, all_s = min(of[1]), min(of[NEW_TOKENS])
        step_s = (all_s - first_s) / (NEW_TOKENS - 1)
        row = {
            "shape": own["shape"],
            "mode": own["mode"],
            "backend": backend,
            "rows": rows,
            "length": length,
            "first_s": first_s,
            "all_s": all_s,
            "decode_ms": 1e3 * step_s,
            "decode_tokens_s": rows / step_s,
            "prompt_tokens_s": rows * length / first_s,
            "tokens_s": rows * NEW_TOKENS / all_s,
            "seconds": of,
        }
        self.result["rates"].append(row)
        told = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        print(json.dumps(told | {"seconds": None}), flush=True)


def main() -> None:
    options = parse()
    if options.child:
        child(json.loads(options.child))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    run = Run(options)
    run.start()
    for group in run.groups if options.tokens else ():
        if group:
            run.compare_tokens(group)
            run.write()
    for group in run.groups:
        for rows, length in group[0].settings["cases"] if group else ():
            if group and run.left() > 5:
                run.measure(group, rows, length)
                run.write()
        for engine in group:
            engine.close()
    run.write()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--child", help=argparse.SUPPRESS)
    add("--engines", nargs="*", default=ENGINES, metavar="SHAPE[:MODE[:BACKEND,...]]",
        help="a shape or story; graphs, compiled or eager; of vLLM, NAME@N has blocks of N tokens"
    )  # fmt: skip
    add("--cases", nargs="*", default=[f"{n}x{m}" for n, m in CASES], help="ROWSxLENGTH, or none")
    add("--llama-rows", type=int, default=32, help="the most rows of llama-3-8b")
    add("--layers", type=int, default=0, help="layers of a shape, 0 for its own")
    add("--tokens", type=int, default=64, help="greedy tokens that are compared, 0 for none")
    add("--repeats", type=int, default=REPEATS, help="runs of each case")
    add("--dtype", default="bfloat16", help="dtype of the weights")
    add("--start", type=float, default=120.0, help="seconds until an engine must be ready")
    add("--seconds", type=float, default=180.0, help="seconds of it all")
    add("--work", type=Path, default=Path("/tmp/tilewise-vllm"), help="folder for models and logs")
    add("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    given = [] if options.cases == ["none"] else options.cases
    options.cases = [tuple(map(int, case.split("x"))) for case in given]
    engines = [(*engine.split(":"), "", "")[:3] for engine in options.engines]
    options.engines = [
        (shape, mode or "graphs", backends.split(",") if backends else BACKENDS)
        for shape, mode, backends in engines
    ]
    return options


if __name__ == "__main__":
    main()
