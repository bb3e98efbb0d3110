"""`tilewise bench engine`: the whole engine beside its peers, and beside the roof of the device.

The same requests go to each engine, which runs in a process of its own (`engines/`). Workloads:
"fixed" is a batch of equal prompts, greedy: prefill is the time to the first token, decode is the
rest;
"nano" is nano-vllm's 256 requests; "samples" draws many samples of each prompt. The roof is the
least time that the device's read bandwidth and its rate of matrix products allow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import tilewise
from tilewise.bench.engines import workloads
from tilewise.bench.engines.measure import OURS, Bench, Competitor, Session
from tilewise.bench.engines.process import ROOT
from tilewise.bench.engines.roof import Roof
from tilewise.bench.engines.shapes import SHAPES, Sizes, model_directory, read_sizes
from tilewise.bench.engines.workloads import Workload
from tilewise.bench.report import emit, format_table, positive, say
from tilewise.bench.roofline import device_name, measure_ceilings
from tilewise.children import environment, spawning
from tilewise.engine.config import engine_flags
from tilewise.flags import Parser, add_flag
from tilewise.models import load_model
from tilewise.models.weights import save_model

Row = dict[str, Any]

PEERS = ("transformers", "transformers_cb", "vllm", "llamacpp")
# The best of a few: others may use a CPU's cores and its memory at the same time.
CEILING_TRIES = {"cpu": 4, "cuda": 1}
COLUMNS = [
    "shape",
    "workload",
    "batch",
    "prompt",
    "engine",
    "threads",
    "prefill tok/s",
    "decode tok/s",
    "output tok/s",
    "ms a step",
    "% of roof",
    "busy %",
    "host ms",
    "spread %",
    "x best peer",
    "error",
]
_ELEMENT_BYTES = {"int4": 0.5, "int8": 1, "fp8_e4m3": 1, "float32": 4}


def plan_workloads(options: argparse.Namespace, name: str, sizes: Sizes) -> list[Workload]:
    """Return the workloads that the options ask for; kind "fixed" gives one for each batch.

    Args:
        options: the parsed command line.
        name: the name of the model, for errors.
        sizes: the sizes of the model.

    Raises:
        ValueError: the model has fewer positions than the workload needs.
    """
    found: list[Workload] = []
    for kind in options.workload:
        if kind == "fixed":
            found += [
                workloads.fixed(
                    batch, options.prompt_tokens, options.new_tokens, vocab_size=sizes.vocab_size
                )
                for batch in options.batch
            ]
            if options.prefill_tokens:
                length = options.prefill_tokens
                found.append(workloads.fixed(1, length, 1, vocab_size=sizes.vocab_size))
        elif kind == "nano":
            shortest, longest = options.lengths
            found.append(
                workloads.nano(
                    requests=options.requests,
                    shortest=shortest,
                    longest=longest,
                    vocab_size=sizes.vocab_size,
                )
            )
        else:
            prompts, n, length, new = options.samples
            found.append(
                workloads.samples(
                    prompts=prompts,
                    n=n,
                    prompt_tokens=length,
                    new_tokens=new,
                    max_num_seqs=options.max_num_seqs,
                    vocab_size=sizes.vocab_size,
                )
            )
    for workload in found:
        if workload.max_len > sizes.max_len:
            raise ValueError(
                f"{workload.name} must fit the {sizes.max_len:,} positions of {name}, "
                f"got {workload.max_len:,} tokens"
            )
    return found


def plan_sessions(
    options: argparse.Namespace, shape: str, folder: Path, limits: tuple[float, float]
) -> list[Session]:
    """Return the sessions of a shape: one for each number of threads, with and without prefix
    cache.

    Only the workload "samples" runs with the prefix cache.

    Args:
        options: the parsed command line.
        shape: the name of a shape, "story", or a checkpoint's directory.
        folder: the folder for configurations and converted models.
        limits: the device's read bandwidth in bytes/s, and its rate of matrix products in FLOP/s.
    """
    directory, is_random = model_directory(shape, folder)
    sizes = read_sizes(json.loads((directory / "config.json").read_text()))
    asked = plan_workloads(options, shape, sizes)
    if is_random and "llamacpp" in options.peers:
        # llama.cpp reads files only; then all engines read the same weights.
        directory, is_random = save_random(directory, folder, options.dtype), False
    cache = 4 if options.dtype == "float32" else 2
    roof = Roof(
        sizes,
        *limits,
        weight_bytes=4 if options.dtype == "float32" else 2,
        cache_bytes=_ELEMENT_BYTES.get(options.kv_cache_dtype or "", cache),
    )
    sessions = []
    for threads in options.threads or [None]:
        for shares in (False, True):
            chosen = [w for w in asked if (w.name == "samples") == shares]
            if not chosen:
                continue
            settings: dict[str, Any] = {
                "directory": str(directory),
                "random_weights": is_random,
                "device": options.device,
                "dtype": options.dtype,
                "max_num_seqs": max(w.max_num_seqs for w in chosen),
                "max_len": max(w.max_len for w in chosen),
                "memory": options.memory,
                "prefix_caching": shares,
                "kv_cache_dtype": options.kv_cache_dtype,
                "max_num_batched_tokens": options.max_num_batched_tokens,
            }
            ours = settings | {"graphs": options.graphs, "weight_dtype": options.weight_dtype}
            competitors = [
                Competitor(
                    OURS if size == 1 else f"{OURS} x{size}",
                    OURS,
                    ours if size == 1 else ours | {"tensor_parallel_size": size},
                    threads=threads,
                )
                for size in options.tensor_parallel
            ]
            for peer in options.peers:
                competitors += _peer(options, peer, settings, shape, folder, threads)
            sessions.append(Session(shape, sizes, chosen, competitors, roof))
    return sessions


def _peer(
    options: argparse.Namespace,
    peer: str,
    settings: dict[str, Any],
    shape: str,
    folder: Path,
    threads: int | None,
) -> list[Competitor]:
    python, path = options.peer_python.get(peer), options.peer_path.get(peer)
    if peer != "llamacpp":
        return [Competitor(peer, peer, settings, python, path, threads)]
    found = []
    for dtype in ("bf16", "f16"):
        file = folder / f"{shape.replace('/', '_')}-{dtype}.gguf"
        own = settings | {"gguf": str(file)}
        if not file.exists():
            command = [python or sys.executable, "-m", "tilewise.bench.engines.gguf"]
            command += [settings["directory"], str(file), dtype]
            done = subprocess.run(
                command, cwd=ROOT, env=environment(), capture_output=True, text=True
            )
            if done.returncode != 0:
                say(f"llamacpp {dtype}: {done.stderr[-400:]}")  # its start then fails, in its row
        found.append(Competitor(f"llamacpp {dtype}", "llamacpp", own, python, path, threads))
    return found


def save_random(directory: Path, folder: Path, dtype: str) -> Path:
    """Return a checkpoint directory below `folder` with random weights of a configuration; it is
    written if it is not there.

    Args:
        directory: the directory with config.json.
        folder: the folder for converted models.
        dtype: the dtype of the weights.
    """
    place = folder / f"{directory.name}-weights"
    if not (place / "model.safetensors").exists():
        model = load_model(directory, dtype=dtype, random_weights=True)
        save_model(model, place, max_shard_bytes=1 << 62)
    return place


def _limits(options: argparse.Namespace) -> tuple[tuple[float, float], Row]:
    """Return the device's read bandwidth (bytes/s) and rate of matrix products (FLOP/s), and a row
    for the document that says whether they were given or how they were measured.

    They are measured in a process that ends, so that none of the device's memory stays taken.
    """
    if options.limits is not None:
        read, flops = options.limits
        return (read, flops), {"given": True, "read_bytes": read, "matmul_flops": flops}
    with spawning(), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        dtype = getattr(torch, options.dtype)
        tries = [
            pool.submit(measure_ceilings, options.device, dtype).result()
            for _ in range(CEILING_TRIES[options.device])
        ]
    ceilings = replace(
        tries[0],
        **{
            name: max(getattr(each, name) for each in tries)
            for name in ("matmul_flops", "read_bytes", "copy_bytes")
        },
    )
    say(str(ceilings))
    return (ceilings.read_bytes, ceilings.matmul_flops), ceilings.as_dict()


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if name not in PEERS or not value:
        raise argparse.ArgumentTypeError(f"must be PEER=PATH with a PEER of {', '.join(PEERS)}")
    return name, value


def _peers(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(PEERS)}, got {unknown[0]}")
    return names


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line of `tilewise bench engine`."""
    parser = Parser(prog="tilewise bench engine", description=__doc__)
    add = parser.add_argument
    add(
        "--shape",
        "--model",
        nargs="+",
        default=["story"],
        metavar="SHAPE",
        help=f"{', '.join(SHAPES)} (random weights), story, or a checkpoint; default: story",
    )
    add(
        "--workload",
        nargs="+",
        choices=("fixed", "nano", "samples"),
        default=["fixed"],
        help="default: fixed",
    )
    add("--device", choices=("cpu", "cuda"), default=None, help="default: cuda if any")
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    add("--repeats", type=positive, default=3, help="turns that count, after one to warm up")
    add("--json", metavar="FILE", default=None, help="also write the results here, as they come")
    fixed = parser.add_argument_group("fixed")
    fixed.add_argument(
        "--batch", nargs="+", type=positive, default=[1, 8, 64], help="sequences at once"
    )
    fixed.add_argument("--prompt-tokens", type=positive, default=128)
    fixed.add_argument("--new-tokens", type=positive, default=64)
    fixed.add_argument(
        "--prefill-tokens",
        type=positive,
        metavar="N",
        help="also one prompt of N tokens, prefill only",
    )
    many = parser.add_argument_group("nano and samples")
    many.add_argument("--requests", type=positive, default=256, help="of nano")
    many.add_argument(
        "--lengths",
        nargs=2,
        type=positive,
        default=[100, 1024],
        metavar=("LOW", "HIGH"),
        help="tokens of nano's prompts and answers",
    )
    many.add_argument(
        "--samples",
        nargs=4,
        type=positive,
        default=[128, 1024, 256, 128],
        metavar=("PROMPTS", "N", "TOKENS", "NEW"),
        help="prompts, samples of each, and lengths",
    )
    many.add_argument(
        "--max-num-seqs", type=positive, default=4096, help="samples that run at once (4096)"
    )
    engine = parser.add_argument_group("the engines")
    for flag in engine_flags(("kv_cache_dtype", "weight_dtype", "graphs")):
        add_flag(engine, flag, None)
    engine.add_argument(
        "--tensor-parallel",
        nargs="+",
        type=positive,
        default=[1],
        metavar="N",
        help="processes of tilewise, each with a device; each number in turn (1)",
    )
    engine.add_argument("--max-num-batched-tokens", type=positive, default=None)
    engine.add_argument("--memory", type=float, default=0.85, help="share of a GPU's (0.85)")
    engine.add_argument(
        "--threads", nargs="+", type=positive, default=None, help="of a CPU; each number in turn"
    )
    peers = parser.add_argument_group("peers")
    peers.add_argument(
        "--peers",
        type=_peers,
        default=["transformers"],
        metavar="NAME,...",
        help=f"of {', '.join(PEERS)}; default: transformers",
    )
    peers.add_argument("--no-peer", action="store_true", help="measure tilewise alone")
    peers.add_argument(
        "--peer-python",
        type=_pair,
        action="append",
        default=[],
        metavar="PEER=PYTHON",
        help="interpreter of a peer's environment",
    )
    peers.add_argument(
        "--peer-path",
        type=_pair,
        action="append",
        default=[],
        metavar="PEER=FOLDER",
        help="goes before all else on a peer's PYTHONPATH",
    )
    limits = parser.add_argument_group("roof and profile")
    limits.add_argument(
        "--limits",
        nargs=2,
        type=float,
        default=None,
        metavar=("BYTES", "FLOPS"),
        help="of the device, a second; default: measured",
    )
    limits.add_argument("--no-profile", action="store_true", help="do not look inside a step")
    limits.add_argument("--trace", metavar="FOLDER", help="keep the profiler's traces here")
    limits.add_argument(
        "--timeout", type=float, default=1800.0, help="seconds of one start or one run (1800)"
    )
    limits.add_argument(
        "--seconds",
        type=float,
        default=None,
        metavar="S",
        help="of all together: nothing new begins after it, and what was measured stays",
    )
    limits.add_argument("--work-dir", metavar="FOLDER", help="for logs and converted models")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tilewise bench engine`: measure all shapes on all engines, and print the table; then all
    results as JSON in one line, unless standard output is a terminal and no --json names a file for
    them.

    Returns the exit status, 0; wrong options end in argparse's SystemExit.
    """
    command = parser()
    options = command.parse_args(argv)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        command.error("--device cuda needs a GPU that torch can see")
    if options.new_tokens < 2:
        command.error(f"--new-tokens must be at least 2, got {options.new_tokens}")
    if options.seconds is not None and not options.seconds > 0:
        command.error(f"--seconds must be above 0, got {options.seconds}")
    if options.no_peer:
        options.peers = []
    options.peer_python, options.peer_path = dict(options.peer_python), dict(options.peer_path)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.work_dir or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        limits, ceilings = _limits(options)
        document: Row = {"version": tilewise.__version__, "device": device_name(options.device)}
        document |= {"torch": torch.__version__, "dtype": options.dtype, "ceilings": ceilings}
        document |= {"kv_cache_dtype": options.kv_cache_dtype, "graphs": options.graphs}
        document |= {"prompt_tokens": options.prompt_tokens, "new_tokens": options.new_tokens}
        bench = Bench(
            document,
            json_path=options.json,
            folder=folder,
            repeats=options.repeats,
            timeout=options.timeout,
            trace=options.trace,
            looks_inside=not options.no_profile,
            seconds=options.seconds,
        )
        for shape in options.shape:
            for session in plan_sessions(options, shape, folder, limits):
                bench.run(session, in_turns=options.device == "cpu")
    print(f"{document['device']}, torch {torch.__version__}, {options.dtype}")
    print(format_table(bench.rows, [c for c in COLUMNS if any(c in row for row in bench.rows)]))
    emit(bench.document, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
