"""What adapters cost: tokens/s of decoding with none, one, and many in a batch, beside an engine
that has none; and the op alone, beside the time in which its bytes are read.

    python lab/adapters.py --json F              # an H200: Llama-3-8B, 256 rows, 32 adapters
    python lab/adapters.py --kernels --json F    # the op alone, and other constants of it
    python lab/adapters.py --device cpu --shape story --rows 8 --adapters 4 --tokens 24

An engine without adapters comes first, and then one with them, whose cases take turns; each number
is the median of the turns, of tokens that decode steps gave and the time that they took. Adapters
are random, of rank 16 and of all linear layers. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.on_shape import machine, make
from tilewise import LLM, SamplingParams, ops
from tilewise.engine.config import RequestTerms
from tilewise.engine.waiter import Waiter, raise_first
from tilewise.models.adapters import AdapterSite
from tilewise.nn import adapted as nn_adapted

WANTED = {"none": 1.0, "one": 0.94, "many": 0.88}  # of the engine without adapters
FILES = 2  # adapters that are written; others are loaded from the same files, to slots of their own


def write(folder: Path, sites: dict[str, AdapterSite], rank: int, dtype: torch.dtype) -> Path:
    """Write a random adapter of all linear layers."""
    from safetensors.torch import save_file

    folder.mkdir()
    tensors = {}
    for name, site in sites.items():
        for half, shape in ("A", (rank, site.in_features)), ("B", (site.out_features, rank)):
            tensor = torch.randn(shape) / site.in_features**0.5
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = tensor.to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(sites)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def decode_rate(llm: LLM, options: argparse.Namespace, names: list[str]) -> float:
    """Return the tokens/s of decode steps in which row i uses adapter i of the names, in turn."""
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 500, (options.rows, options.prompt), generator=draw).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    llm.reset_prefix_cache()
    made = [
        llm.prepare(
            {"prompt_token_ids": ids},
            params,
            RequestTerms(lora_request=names[i % len(names)] if names else ""),
        )
        for i, ids in enumerate(prompts)
    ]
    before = llm.engine.stats()
    waiter = Waiter(made)
    llm.loop.submit(*made)
    while not waiter.is_over:
        waiter.wait()
    raise_first(made)
    after = llm.engine.stats()
    tokens = after.decode_tokens - before.decode_tokens
    return tokens / (after.decode_seconds - before.decode_seconds)


def engines(options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Yield case and tokens/s of each turn."""
    length = options.prompt + options.tokens
    blocks = options.rows * (-(-length // 16) + 1)
    settings: dict[str, Any] = {
        "num_blocks": blocks,
        "max_num_seqs": options.rows,
        "max_model_len": min(8192, max(length, 256)),
    }
    with make(options.shape, options.device, options.dtype, **settings) as llm:
        decode_rate(llm, options, [])
        for _ in range(options.turns):
            yield "base", decode_rate(llm, options, [])
    if options.device == "cuda":
        torch.cuda.empty_cache()
    settings |= {"enable_lora": True, "max_loras": options.adapters, "max_lora_rank": options.rank}
    with (
        tempfile.TemporaryDirectory() as root,
        make(options.shape, options.device, options.dtype, **settings) as llm,
    ):
        adapters = llm._adapters
        assert adapters is not None
        dtype = getattr(torch, options.dtype)
        sites = dict(adapters._sites)
        folders = [write(Path(root) / str(i), sites, options.rank, dtype) for i in range(FILES)]
        names = [str(i) for i in range(options.adapters)]
        for i, name in enumerate(names):
            llm.load_lora_adapter(name, folders[i % FILES])
        cases = {"none": [], "one": names[:1], "many": names}
        for chosen in cases.values():
            decode_rate(llm, options, chosen)
        for _ in range(options.turns):
            for case, chosen in cases.items():
                yield case, decode_rate(llm, options, chosen)


def layers(options: argparse.Namespace) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return the inputs and the edges of the outputs of the linear layers of a layer."""
    from lab.on_shape import SHAPES

    shape = SHAPES[options.shape]
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    heads = shape["num_attention_heads"] * shape["head_dim"]
    kv = shape["num_key_value_heads"] * shape["head_dim"]
    return {
        "qkv": (width, (0, heads, heads + kv, heads + 2 * kv)),
        "o": (heads, (0, width)),
        "gate_up": (width, (0, inner, 2 * inner)),
        "down": (inner, (0, width)),
    }


def microseconds(work: Callable[[], None], count: int = 20) -> float:
    """Return the time of a call in a CUDA graph of many, in a chain as a step has them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            work()
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / count)
    return statistics.median(times)


def kernels(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the time of the op on each linear layer, for several rows and adapters and forms."""
    from tilewise.kernels.triton.step import low_rank

    read = 4.2e12  # bytes/s that a copy reads on an H200; for the roof beside each time
    dtype = getattr(torch, options.dtype)
    forms = [
        {},
        {"TILE_N": 128},
        {"TILE_N": 512},
        {"TILE_K": 128},
        {"CHANNELS": 512},
        {"CHANNELS": 2048},
    ]
    usual = {name: getattr(low_rank, name) for name in ("TILE_N", "TILE_K", "CHANNELS")}
    for name, (channels, edges) in layers(options).items():
        parts, rank, count = len(edges) - 1, options.rank, options.adapters
        # Slots of several layers, so that none is in L2 from the call before.
        copies = [
            ops.LowRank(
                torch.randn(count, parts * rank, channels, device="cuda", dtype=dtype),
                torch.randn(count, rank, edges[-1], device="cuda", dtype=dtype),
                torch.ones(count, parts, device="cuda"),
                torch.full((count, parts), rank, dtype=torch.int32, device="cuda"),
                torch.tensor(edges, dtype=torch.int32, device="cuda"),
            )
            for _ in range(max(2, 2**28 // (count * rank * (parts * channels + edges[-1]) * 2)))
        ]
        for rows, used in ((1, 1), (16, 1), (256, 1), (256, count), (512, count)):
            x = torch.randn(rows, channels, device="cuda", dtype=dtype)
            y = torch.zeros(rows, edges[-1], device="cuda", dtype=dtype)
            slots = (torch.arange(rows) % used).numpy()
            tiles = ops.RowTiles(*(torch.from_numpy(t).cuda() for t in ops.tile_rows(slots)))
            own = copies[0]
            nbytes = used * (own.a[0].nbytes + own.b[0].nbytes) + x.nbytes + 2 * y.nbytes
            for form in forms if options.forms else forms[:1]:
                for constant, value in (usual | form).items():
                    setattr(low_rank, constant, value)
                turn = iter(copies * 1000)

                def work(x: Any = x, y: Any = y, tiles: Any = tiles, turn: Any = turn) -> None:
                    ops.add_low_rank(y, x, next(turn), tiles)

                found = microseconds(work)
                yield {
                    "layer": name,
                    "rows": rows,
                    "adapters": used,
                    "form": form or "usual",
                    "us": round(found, 2),
                    "roof": round(nbytes / read * 1e6 / found, 3),
                }


def main() -> None:
    """Measure, print a line each, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--in-turn", action="store_true", help="no product beside another")
    parser.add_argument("--kernels", action="store_true", help="the op alone")
    parser.add_argument("--forms", action="store_true", help="with --kernels: other constants, too")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    nn_adapted.IS_BESIDE = not options.in_turn
    told: dict[str, Any] = {"options": vars(options), "machine": machine(options.device)}
    if options.kernels:
        told["kernels"] = []
        for row in kernels(options):
            told["kernels"].append(row)
            print(row, flush=True)
    else:
        found: dict[str, list[float]] = {}
        for case, rate in engines(options):
            found.setdefault(case, []).append(rate)
            print(f"{case:>5} {rate:10.1f} tokens/s", flush=True)
        told["tokens_per_s"] = rates = {
            case: round(statistics.median(each), 1) for case, each in found.items()
        }
        told["turns"] = {case: [round(x, 1) for x in each] for case, each in found.items()}
        told["of_base"] = {case: round(rates[case] / rates["base"], 4) for case in WANTED}
        told["wanted"] = WANTED
    line = json.dumps(told)
    if options.json:
        Path(options.json).write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
