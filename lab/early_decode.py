"""What a decode step gains by kernels that begin early, in all forms, in one run.

    python lab/early_decode.py --json F [--shape qwen3-0.6b] [--batch 32] [--context 1024]
        [--rounds 5] [--workers 14] [--seconds 100] [--only NAME ...]

A variant says which kinds of kernels begin early and when they let the next one begin
(`tilewise.kernels.early`), and which tiles the products of few rows have. Each is captured as the
engine captures a step. Its logits are first compared, bit for bit and step by step, with those of
the same kernels launched one after the other; a variant that differs has no time. Then replays of
all variants take turns. Last, the best tile of every product is taken together.

Processes of their own compile for all variants beforehand, over a model of one layer.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

import tilewise
from lab.decode_forms import Bench, forget_plans
from tilewise.bench.engines.roof import Roof
from tilewise.bench.engines.shapes import model_directory, read_sizes
from tilewise.bench.report import emit, say
from tilewise.engine.captured.decode_step import DecodeStep
from tilewise.kernels import early
from tilewise.kernels.early import AFTER, CHOSEN, FIRST, OFF
from tilewise.kernels.tiles import linear_rows
from tilewise.kernels.tiles import paged as paged_tiles
from tilewise.kernels.tiles.linear_rows import RowsTile
from tilewise.kernels.triton.paged import decode

COMPARED = 12  # steps
KINDS = tuple(CHOSEN)


class Variant(NamedTuple):
    """How a step is launched.

    Attributes:
        modes: of `early.launching`.
        tiles: by weight (outputs, channels), its tile of Hopper's product; others as tables say.
        keys: of a split that attention asks for ahead.
        attention: keys of a step, warps, stages and programs a multiprocessor; None is the table's.
        merges: products add their parts themselves, not the norm that follows.
    """

    modes: Mapping[str, int]
    tiles: Mapping[tuple[int, int], RowsTile] = {}
    keys: int = 64
    attention: tuple[int, int, int, int] | None = None
    merges: bool = False


def products_of(sizes: Any) -> dict[str, tuple[int, int]]:
    """Return (outputs, channels) of a layer's products."""
    names = ("qkv", "o", "gate_up", "down")
    pairs = zip(names, sizes.products, strict=True)
    return {name: (outputs, channels) for name, (channels, outputs) in pairs}


def forms_of(outputs: int, channels: int) -> list[RowsTile]:
    """Return tiles to try for a product: as many programs as fill the device, or half of them."""
    count = -(-outputs // 64)
    found: dict[tuple[int, int], RowsTile] = {}
    for parts in (1, 2, 4, 8, 12):
        for ctas in (1, 2):
            tile = RowsTile(64, 128, parts, ctas)
            if channels // parts >= 256 and 48 <= count * parts <= 200:
                stages = linear_rows.stages_of(tile, 32, channels)
                found.setdefault((parts, stages), tile)  # what differs in name only is one form
    return list(found.values())


def variants_of(sizes: Any) -> dict[str, Variant]:
    """Return the variants by name; "off" is the first."""
    found = {
        "off": Variant({}),
        "first": Variant(dict.fromkeys(KINDS, FIRST)),
        "after": Variant(dict.fromkeys(KINDS, AFTER)),
    }
    every = found["first"]
    found["merged"] = every._replace(merges=True)
    found["off, merged"] = Variant({}, merges=True)
    for name, weight in products_of(sizes).items():
        for tile in forms_of(*weight):
            own = f"{name} {tile.parts}/{tile.ctas}"
            found[own] = every._replace(tiles={weight: tile})
            if name in ("o", "down") and tile.parts == 8:
                found[f"merged {own}"] = found[own]._replace(merges=True)
    for keys in (0, 128):
        found[f"{keys} keys"] = every._replace(keys=keys)
    for kind in ("attention", "norm", "rope", "activation", "linear"):
        found[f"but {kind}"] = every._replace(modes={**every.modes, kind: OFF})
        found[f"{kind} after"] = every._replace(modes={**every.modes, kind: AFTER})
    for attention in ((32, 4, 4, 4), (64, 4, 2, 4), (64, 4, 3, 2), (64, 8, 3, 2)):
        found["attention " + "x".join(map(str, attention))] = every._replace(attention=attention)
    return found


@contextmanager
def applied(variant: Variant) -> Iterator[None]:
    """Let the package do as a variant says."""
    chosen, table, keys = early.CHOSEN, dict(linear_rows._TABLE), decode.KEYS_AHEAD
    large, fills_whole = early.CHOSEN_LARGE, paged_tiles.fills_whole
    early.CHOSEN = early.CHOSEN_LARGE = variant.modes
    decode.KEYS_AHEAD = variant.keys
    leaves_parts = linear_rows.leaves_parts
    if variant.merges:
        linear_rows.leaves_parts = lambda *_: False
    resident, config_of = paged_tiles.RESIDENT_PROGRAMS, paged_tiles.paged_split_config
    if variant.attention is not None:
        keys_of_step, warps, stages, paged_tiles.RESIDENT_PROGRAMS = variant.attention

        def changed(*arguments: Any) -> Any:
            config = config_of(*arguments)
            return replace(config, tile_n=keys_of_step, num_warps=warps, num_stages=stages)

        paged_tiles.paged_split_config = changed
        paged_tiles.fills_whole = lambda *_: False
    for weight, tile in variant.tiles.items():
        linear_rows._TABLE[weight] = (tile, True)
    forget_plans()
    try:
        yield
    finally:
        early.CHOSEN, early.CHOSEN_LARGE, decode.KEYS_AHEAD = chosen, large, keys
        paged_tiles.fills_whole = fills_whole
        linear_rows.leaves_parts = leaves_parts
        paged_tiles.RESIDENT_PROGRAMS, paged_tiles.paged_split_config = resident, config_of
        linear_rows._TABLE.clear()
        linear_rows._TABLE.update(table)
        forget_plans()


def new_bench(directory: Path, rows: int, context: int) -> Bench:
    """Return a model whose step is compared over more steps than a form's."""
    return Bench(directory, rows, context, torch.bfloat16, COMPARED)


def warm(directory: Path, names: list[str], rows: int) -> None:
    """Compile what variants need, over a model of one layer."""
    config = json.loads((directory / "config.json").read_text())
    variants = variants_of(read_sizes(config))
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder)
        config |= {"num_hidden_layers": 1, "max_window_layers": 1, "layer_types": None}
        (small / "config.json").write_text(json.dumps(config))
        bench = new_bench(small, rows, 1024)
        for name in names:
            bench.capture(applied(variants[name]))
            bench.capture(applied(variants[name]._replace(modes={})))  # what it is compared with


def compiled(directory: Path, names: list[str], rows: int, workers: int) -> None:
    """Have processes of their own compile; they leave it in Triton's cache."""
    command = [sys.executable, __file__, "--warm", str(directory), "--batch", str(rows), "--only"]
    running = [
        subprocess.Popen([*command, *names[i::workers]], env=os.environ)
        for i in range(min(workers, len(names)))
    ]
    for process in running:
        process.wait()


def measure(
    bench: Bench,
    variants: Mapping[str, Variant],
    rounds: int,
    references: dict[Any, Any],
    until: float = float("inf"),
) -> dict[str, dict[str, Any]]:
    """Compare and time variants; return a row for each."""
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, DecodeStep] = {}
    for name, variant in variants.items():
        if time.perf_counter() > until:
            rows[name] = {"error": "the time was over"}
            continue
        key = tuple(sorted(variant.tiles.items())), variant.attention
        try:
            if key not in references:
                with applied(variant._replace(modes={})):
                    references[key] = bench.logits(bench.new_step())
            step = bench.capture(applied(variant))
            pairs = zip(bench.logits(step), references[key], strict=True)
            wrong = [i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
            rows[name] = {"wrong steps": wrong} if wrong else {}
            if not wrong:
                steps[name] = step
        except Exception as error:
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(bench.time(step))
    for name, each in times.items():
        rows[name] |= {"us": median(each), "all us": each}
    return rows


def best_of(
    rows: Mapping[str, Mapping[str, Any]], variants: Mapping[str, Variant], sizes: Any
) -> Variant:
    """Return the fastest tile of every product together, and the fastest number of keys."""
    tiles = {}
    plain = rows["first"]["us"]
    for name in products_of(sizes):
        own = [
            n for n in rows if n.startswith(f"{name} ") and "us" in rows[n] and variants[n].tiles
        ]
        fastest = min(own, key=lambda n: rows[n]["us"], default=None)
        if fastest is not None and rows[fastest]["us"] < plain:
            tiles |= variants[fastest].tiles
    shaped = ["first", *(n for n in rows if n in variants and variants[n].attention is not None)]
    attention = variants[min(shaped, key=lambda n: rows[n].get("us", 1e9))].attention
    keyed = ["first", *(n for n in rows if n.endswith(" keys") and "us" in rows[n])]
    keys = variants[min(keyed, key=lambda n: rows[n]["us"])].keys
    modes = dict.fromkeys(KINDS, FIRST)
    for kind in KINDS:
        forms = {FIRST: plain}
        for name, mode in ((f"{kind} after", AFTER), (f"but {kind}", OFF)):
            forms[mode] = rows.get(name, {}).get("us", float("inf"))
        modes[kind] = min(forms, key=lambda mode: forms[mode])
    return Variant(modes, tiles, keys, attention)


def main() -> None:
    """Measure, print a table, then JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--limits", nargs=2, type=float, default=[4.4e12, 750e12])
    parser.add_argument("--warm", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU that torch can see")
    if options.warm is not None:
        warm(options.warm, options.only, options.batch)
        return
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        directory, _ = model_directory(options.shape, Path(folder))
        sizes = read_sizes(json.loads((directory / "config.json").read_text()))
        variants = variants_of(sizes)
        if options.only:
            variants = {name: variants[name] for name in options.only}
        if options.workers:
            compiled(directory, list(variants), options.batch, options.workers)
        say(f"compiled in {time.perf_counter() - began:.0f} s")
        bench = new_bench(directory, options.batch, options.context)
        references: dict[Any, Any] = {}
        until = began + 0.8 * options.seconds
        rows = measure(bench, variants, options.rounds, references, until)
        chosen: dict[str, Any] | None = None
        if not options.only and "us" in rows["first"]:
            together = {"off": variants["off"], "first": variants["first"]}
            best = best_of(rows, variants, sizes)
            together["together"] = best
            together["together, late"] = best._replace(modes={})
            for kind in KINDS:
                if best.modes[kind] != FIRST:
                    modes = {**best.modes, kind: FIRST}
                    together[f"together, {kind} first"] = best._replace(modes=modes)
            found = measure(bench, together, 2 * options.rounds, references)
            rows |= {f"{name} (last)": row for name, row in found.items()}
            say(f"together: {best}")
            chosen = best._asdict() | {
                "modes": dict(best.modes),
                "tiles": [[*weight, *tile] for weight, tile in best.tiles.items()],
            }
    roof = 1e6 * Roof(sizes, *options.limits).step(options.batch, options.batch * options.context)
    for name, row in sorted(rows.items(), key=lambda item: item[1].get("us", 0.0)):
        said = f"{row['us']:9.1f} us  {100 * roof / row['us']:5.1f} %" if "us" in row else str(row)
        print(f"{name:28} {said}", flush=True)
    say(f"all in {time.perf_counter() - began:.0f} s")
    document = {
        "version": tilewise.__version__, "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "shape": options.shape, "batch": options.batch,
        "context": options.context, "roof us": roof, "together": chosen, "rows": rows,
    }  # fmt: skip
    emit(document, options.json)


if __name__ == "__main__":
    main()
