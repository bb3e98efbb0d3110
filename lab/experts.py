"""The products of mixtures of experts on a GPU, beside torch's grouped_mm and the roof.

    python lab/experts.py --json FILE [--models qwen3-30b-a3b] [--rows 1 32 256] [--sweep]
        [--formats bf16 int4]

A row is one (model, format, rows, form): the route and both products of one layer, captured in a
graph over copies of the weights that together are several times the L2 cache, each with choices of
its own. `read` is the share of the roof of the bytes of the experts that are hit, `multiplied` that
of the card's FLOP/s; results are checked against float64 first. The forms are the table's tile,
with --sweep every one of `TILES` or `NARROW_TILES` (a person commits the best to
`kernels.tiles.experts`), torch's grouped_mm as transformers calls it, and the choice of experts
alone (--parts). The format "blocks" is MXFP4 as the portable kernel reads it.

    TRITON_INTERPRET=1 python lab/experts.py --dry-run      # tiny sizes on a CPU, no times
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise import ops
from tilewise.kernels.gluon.quantised import mixture
from tilewise.kernels.quantised_weight import E2M1, QuantisedWeight
from tilewise.kernels.tiles.experts import ExpertTile, NarrowTile, expert_tile, narrow_tile
from tilewise.kernels.triton.experts import launch
from tilewise.ops.call import forget

ROOF, PEAK = 4.48e12, 990e12  # bytes and FLOPs a second, an H200
REPEATS, CALLS = 7, 10
WEIGHT_BYTES = 1 << 30  # of all copies


class Model(NamedTuple):
    """The sizes of a layer's mixture."""

    experts: int
    active: int
    hidden: int
    inner: int
    formats: tuple[str, ...] = ("bf16", "int4", "fp8", "int8")
    is_clamped: bool = False


MODELS = {
    "qwen3-30b-a3b": Model(128, 8, 2048, 768),
    "gpt-oss-20b": Model(32, 4, 2880, 2880, ("bf16", "mxfp4", "blocks"), True),
    "deepseek-v2-lite": Model(64, 6, 2048, 1408),
    "mixtral-8x7b": Model(8, 2, 4096, 14336),
    "gemma-4-26b-a4b": Model(128, 8, 2816, 704),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384)
TINY = {
    "tiny": Model(4, 2, 64, 32, ("bf16",)),
    "tiny-blocks": Model(4, 2, 64, 32, ("blocks",), True),
}
BITS = {"bf16": 16.0, "blocks": 4.25, "mxfp4": 4.25, "int4": 4.1875, "fp8": 8.002, "int8": 8.0}
TILES = [
    ExpertTile(m, n, k, warps, stages)
    for m, n, k, warps in (
        (16, 32, 128, 4), (16, 32, 256, 4), (16, 64, 64, 4), (16, 64, 128, 4), (16, 64, 256, 4),
        (16, 128, 64, 4), (16, 128, 128, 4), (16, 128, 128, 8), (32, 64, 128, 4), (32, 128, 64, 4),
        (32, 128, 128, 4), (64, 64, 128, 4), (64, 128, 64, 4), (64, 128, 128, 8), (64, 256, 64, 8),
        (128, 128, 64, 8), (128, 256, 64, 8), (128, 128, 128, 8),
    )
    for stages in (3, 4, 5)
]  # fmt: skip


# (rows, source, warpgroups, parts, CTAs), see `NarrowTile`
NARROW_TILES = [
    *(NarrowTile(8, 2, 1, parts, 4) for parts in (1, 2, 3)),
    *(NarrowTile(rows, 1, 1, 1, ctas) for rows in (8, 16) for ctas in (3, 4)),
    *(NarrowTile(rows, 0, 1, 1, 4) for rows in (8, 16)),
    *(NarrowTile(32, 0, 2, 1, ctas) for ctas in (1, 2)),
    *(NarrowTile(64, 0, groups, 1, ctas) for groups, ctas in ((2, 1), (2, 2), (4, 1))),
    *(NarrowTile(128, 0, groups, 1, 1) for groups in (2, 4)),
]  # fmt: skip


def fits(tile: NarrowTile, tokens: int, each: float) -> bool:
    """Return whether a tile is worth a try."""
    if tile.source:
        return tokens == 1 if tile.source == 2 else 1 < tokens <= tile.rows
    return tokens > 1 and 0.9 * each <= tile.rows <= max(8, 8 * each)


class Layer(NamedTuple):
    """What one call takes."""

    x: Tensor
    logits: Tensor
    weights: dict[str, Any]


def layers_of(model: Model, form: str, rows: int, device: str, *, is_one: bool) -> list[Layer]:
    """Return copies of a layer with weights of a format, or one."""
    size = 3 * model.experts * model.hidden * model.inner * BITS[form] / 8
    copies = max(2, min(16, int(WEIGHT_BYTES // size)))
    if device == "cpu" or is_one:
        copies = 1
    draw = torch.Generator(device).manual_seed(0)

    # (Triton's interpreter multiplies no bfloat16.)
    kind = torch.float32 if device == "cpu" else torch.bfloat16

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=draw, device=device, dtype=kind) * scale

    def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.randint(low, high, shape, generator=draw, device=device, dtype=dtype)

    def narrow(outputs: int, inputs: int) -> QuantisedWeight:
        scale, high = inputs**-0.5, model.experts * outputs
        if form == "mxfp4":
            exponent = 125 + round(math.log2(scale))
            scales = integers(exponent, exponent + 1, high, inputs // 32)
            codes = integers(0, 256, high, inputs // 2)
            return QuantisedWeight(codes, scales.view(torch.float8_e8m0fnu), (1, 32), E2M1)
        if form == "int4":
            grid = (high, inputs // 128)
            scales = torch.full(grid, scale / 6.6, dtype=torch.float16, device=device)
            codes = integers(0, 256, high, inputs // 2)
            return QuantisedWeight(codes, scales, (1, 128), zeros=integers(0, 16, *grid))
        if form == "int8":
            scales = torch.full((high, 1), scale / 73, device=device)
            codes = integers(-127, 128, high, inputs, dtype=torch.int8)
            return QuantisedWeight(codes, scales, (1, inputs))
        scales = torch.full((high // 128, inputs // 128), scale, device=device)
        return QuantisedWeight(
            normal(high, inputs, scale=1.0).to(torch.float8_e4m3fn), scales, (128, 128)
        )

    def one() -> Layer:
        shapes = {"up": (2 * model.inner, model.hidden), "down": (model.hidden, model.inner)}
        weights: dict[str, Any] = {}
        for name, (outputs, inputs) in shapes.items():
            if form == "blocks":
                groups = (model.experts, outputs, inputs // 32)
                exponent = 125 + round(math.log2(inputs**-0.5))
                weights[name] = integers(0, 256, *groups, 16)
                weights[f"{name}_scale"] = integers(exponent, exponent + 1, *groups)
            elif form == "bf16":
                weights[name] = normal(model.experts, outputs, inputs, scale=inputs**-0.5)
            else:
                weights[name] = narrow(outputs, inputs)
            if model.is_clamped:
                weights[f"{name}_bias"] = normal(model.experts, outputs, scale=0.1)
        if form not in ("blocks", "bf16"):
            placed = ops.placed_experts(
                weights["up"], weights["down"], model.hidden, model.inner, kind
            )
            assert not isinstance(placed, str), placed
            weights |= {"up": placed[0], "down": placed[1], "inner_size": model.inner}
        if model.is_clamped:
            weights |= {"activation": "clamped", "interleaved": True}
        x = normal(rows, model.hidden, scale=1.0)
        return Layer(x, normal(rows, model.experts, scale=1.0), weights)

    return [one() for _ in range(copies)]


def multiply(
    layer: Layer, rows: slice, chosen: Tensor, weights: Tensor, backend: str | None
) -> Tensor:
    """Multiply some rows with the weights of their experts."""
    is_narrow = "inner_size" in layer.weights
    call = ops.quantised_expert_mlp if is_narrow else ops.expert_mlp
    return call(layer.x[rows], chosen, weights, **layer.weights, backend=backend)


def ours(layer: Layer, active: int) -> Tensor:
    """Route and multiply."""
    chosen, weights = ops.choose_experts(layer.logits, active, backend="triton")
    is_narrow = "inner_size" in layer.weights
    return multiply(layer, slice(None), chosen, weights, "gluon" if is_narrow else "triton")


def grouped(layer: Layer, active: int) -> Tensor:
    """Multiply as transformers' grouped_mm implementation of experts does."""
    experts = layer.logits.shape[1]
    weights, chosen = layer.logits.float().softmax(-1).topk(active, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    order = chosen.flatten().argsort()
    ids = chosen.flatten().int() if chosen.is_cuda else chosen.flatten().float()
    counts = torch.histc(ids, bins=experts, min=0, max=experts - 1)
    offsets = counts.cumsum(0, dtype=torch.int32)
    rows = layer.x[order // active]
    gate, up = F.grouped_mm(rows, layer.weights["up"].mT, offs=offsets).chunk(2, -1)
    o = F.grouped_mm(F.silu(gate) * up, layer.weights["down"].mT, offs=offsets)
    o = o * weights.flatten()[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return o[back].view(*chosen.shape, -1).sum(1).to(layer.x.dtype)


def check(layer: Layer, active: int, y: Tensor) -> None:
    """Compare the first rows with float64."""
    some = slice(0, min(4, len(y)))
    chosen, weights = ops.choose_experts(layer.logits[some], active, backend="reference")
    expected = multiply(layer, some, chosen, weights, "reference").double()
    error = (y[some].double() - expected).norm() / expected.norm()
    if not error < 0.02:
        raise AssertionError(f"results differ from float64 by {error:.1%}")


def bytes_and_flops(model: Model, form: str, layer: Layer) -> tuple[float, float]:
    """Return the bytes of the experts that are hit, and the FLOPs of all rows."""
    hit = layer.logits.topk(model.active, -1).indices.unique().numel()
    weight = 3 * model.hidden * model.inner
    return hit * weight * BITS[form] / 8, (2.0 * weight * len(layer.x) * model.active)


def seconds(call: Callable[[Layer], Any], layers: list[Layer]) -> float:
    """Return the median time of a call in a graph over all copies."""
    for layer in layers:
        call(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            call(layer)
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / CALLS / len(layers))
    return float(statistics.median(times))


def measure(
    name: str, model: Model, kind: str, rows: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a row for each form."""
    device = "cpu" if args.dry_run else "cuda"
    layers = layers_of(model, kind, rows, device, is_one=args.once)
    size, flops = bytes_and_flops(model, kind, layers[0])
    each = rows * model.active / model.experts
    is_narrow = kind not in ("bf16", "blocks")
    place, tile_of = (mixture, "narrow_tile") if is_narrow else (launch, "expert_tile")
    original = getattr(place, tile_of)
    table: ExpertTile | NarrowTile
    if is_narrow:
        table = narrow_tile(rows, model.active, model.experts)
        tiles = [tile for tile in NARROW_TILES if fits(tile, rows, each)]
    else:
        packed = kind == "blocks"
        table = expert_tile(rows * model.active, model.experts, 2, packed=packed)
        tiles = [tile for tile in TILES if tile.tile_m <= max(16, 8 * each)]
    forms: dict[str, tuple[Callable[[Layer], Any], ExpertTile | NarrowTile | None]] = {
        "ours": (lambda layer: ours(layer, model.active), table)
    }
    for tile in tiles if args.sweep else ():
        if tile != table:
            forms[f"ours {'x'.join(map(str, tile))}"] = (forms["ours"][0], tile)
    if args.parts:
        forms["choose"] = (
            lambda layer: ops.choose_experts(layer.logits, model.active, backend="triton"), None
        )  # fmt: skip
    if kind == "bf16" and not model.is_clamped:
        forms["grouped_mm"] = (lambda layer: grouped(layer, model.active), None)
    found = []
    for form, (call, form_tile) in forms.items():
        if form_tile is not None:
            setattr(place, tile_of, lambda *_, tile=form_tile, **__: tile)
        row: dict[str, Any] = {
            "model": name, "format": kind, "rows": rows, "form": form, "tile": form_tile
        }  # fmt: skip
        forget()  # plans of calls alike, which have the tile of the form before
        try:
            y = call(layers[0])
            if isinstance(y, Tensor) and not args.once:
                check(layers[0], model.active, y)
            if not args.dry_run and not args.once:
                time = seconds(call, layers)
                row |= {
                    "us": round(time * 1e6, 1),
                    "read": round(size / ROOF / time, 3),
                    "multiplied": round(flops / PEAK / time, 3),
                }
        except Exception as error:  # a form that a card cannot run costs its own row alone
            row["error"] = " ".join(str(error).split())[:200]
            if args.dry_run:
                raise
        finally:
            setattr(place, tile_of, original)
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def main() -> None:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS][:2])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--formats", nargs="+", choices=BITS, help="all of a model by default")
    parser.add_argument("--once", action="store_true", help="run each form once, untimed")
    parser.add_argument("--sweep", action="store_true", help="try every tile of TILES")
    parser.add_argument("--parts", action="store_true", help="time the choice of experts alone")
    parser.add_argument("--dry-run", action="store_true", help="run tiny sizes on a CPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    models = TINY if args.dry_run else {name: MODELS[name] for name in args.models}
    rows = (1, 3, 40) if args.dry_run else args.rows
    found = []
    for name, model in models.items():
        for kind in args.formats or model.formats:
            for count in rows:
                found += measure(name, model, kind, count, args)
    best: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in found:
        key = (row["model"], row["format"], row["rows"])
        if "us" in row and row["tile"] and row["us"] < best.get(key, {"us": 1e30})["us"]:
            best[key] = row
    for row in best.values():
        print("best", json.dumps(row))
    if args.json:
        card = "cpu" if args.dry_run else torch.cuda.get_device_name()
        head = {"device": card, "torch": torch.__version__, "roof": ROOF, "peak": PEAK}
        args.json.write_text(json.dumps({**head, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
