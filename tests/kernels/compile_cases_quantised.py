"""What test_compile.py compiles of products with weights of 8 and 4 bits, on meta tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from tests.kernels.compile_cases import Case, meta
from tilewise.kernels.gluon.quantised import linear, mixture, narrow
from tilewise.kernels.quantised_weight import E2M1, QuantisedWeight
from tilewise.kernels.tiles.experts import NarrowTile
from tilewise.kernels.tiles.quantised_rows import FewTile, QuantisedTile, RingTile, StreamTile

ARCHITECTURES = (80, 86, 90, 120)
_ROWS, _COLUMNS = 4096, 4096
_BYTE, _HALF, _WIDE = torch.uint8, torch.float16, torch.float32


def _weight(codes: torch.dtype, scales: torch.dtype, block: tuple[int, int], **more: object):
    """Return a weight; `more` are dtypes of further tensors, by name, and plain fields."""
    rows, columns = _ROWS, _COLUMNS
    grid = (-(-rows // block[0]), columns // block[1])
    outer = more.get("outer_block", (1, 1))
    assert isinstance(outer, tuple)
    shapes = {
        "zeros": grid,
        "minimums": grid,
        "outer": (-(-rows // outer[0]), -(-columns // outer[1])),
        "outer_minimums": (-(-rows // outer[0]), -(-columns // outer[1])),
    }
    tensors = {
        name: meta(*shapes[name], dtype=value)
        for name, value in more.items()
        if isinstance(value, torch.dtype)
    }
    width = columns // 2 if codes == _BYTE else columns
    fields = {name: value for name, value in more.items() if name not in tensors}
    return QuantisedWeight(
        meta(rows, width, dtype=codes), meta(*grid, dtype=scales), block, **tensors, **fields
    )  # type: ignore[arg-type]


_K_QUANT = {"minimums": _BYTE, "outer": _HALF, "outer_minimums": _HALF, "outer_block": (1, 256)}
# name -> weight, rows of x, tile
_CALLS = {
    "int4-row": (_weight(_BYTE, _HALF, (1, 128), zeros=_BYTE), 1, (8, 2, 1, 8, True)),
    "int4-many": (_weight(_BYTE, _HALF, (1, 128), zeros=_BYTE), 32, (32, 2, 4, 2)),
    "k-quant": (_weight(_BYTE, _BYTE, (1, 32), **_K_QUANT), 4, (8, 2, 1, 8, True)),
    "mxfp4": (
        _weight(_BYTE, torch.float8_e8m0fnu, (1, 32), table=E2M1), 16, (16, 2, 2, 4)),
    "nf4": (_weight(_BYTE, _WIDE, (1, 64), table=tuple(map(float, range(16)))), 8, (8, 1, 1, 8)),
    "int8": (_weight(torch.int8, torch.bfloat16, (1, _COLUMNS)), 8, (8, 2, 1, 8)),
    "fp8-blocks": (_weight(torch.float8_e4m3fn, _WIDE, (128, 128)), 16, (16, 2, 2, 4)),
}  # fmt: skip
_QUICK = (("int4-row", 80), ("k-quant", 90))
# Hopper's, with codes in the order of lanes: name -> weight, rows of x, tile
_RINGS = {
    "int4-row": (_weight(_BYTE, _HALF, (1, 128), zeros=_BYTE), 1, (64, 4, 3)),
    "int4-16": (_weight(_BYTE, _HALF, (1, 128), zeros=_BYTE), 16, (128, 1, 2)),
    "int4-many": (_weight(_BYTE, _HALF, (1, 128), zeros=_BYTE), 256, (128, 1, 1)),
    "int4-small-groups": (_weight(_BYTE, _HALF, (1, 32), zeros=_BYTE), 8, (64, 4, 3)),
    "k-quant": (_weight(_BYTE, _BYTE, (1, 32), **_K_QUANT), 8, (64, 4, 3)),
    "mxfp4": (_weight(_BYTE, torch.float8_e8m0fnu, (1, 32), table=E2M1), 16, (64, 4, 3)),
    "nf4": (_weight(_BYTE, _WIDE, (1, 64), table=tuple(map(float, range(16)))), 8, (64, 4, 3)),
    "int8": (_weight(torch.int8, torch.bfloat16, (1, _COLUMNS)), 8, (64, 4, 3)),
    "fp8-blocks": (_weight(torch.float8_e4m3fn, _WIDE, (128, 128)), 16, (128, 1, 2)),
    "fp8-many": (_weight(torch.float8_e4m3fn, _WIDE, (128, 128)), 256, (128, 1, 1)),
}  # fmt: skip


# Of few rows, likewise.
_FEW = {
    "int4": (_weight(_BYTE, _HALF, (1, 128), zeros=_BYTE), 1, (4, 4)),
    "int4-wide": (_weight(_BYTE, _HALF, (1, 128), zeros=_BYTE), 8, (1, 4)),
    "int4-16": (_weight(_BYTE, _HALF, (1, 128), zeros=_BYTE), 16, (4, 4)),
    "k-quant": (_weight(_BYTE, _BYTE, (1, 32), **_K_QUANT), 8, (4, 4)),
    "mxfp4": (_weight(_BYTE, torch.float8_e8m0fnu, (1, 32), table=E2M1), 8, (4, 4)),
    "nf4": (_weight(_BYTE, _WIDE, (1, 64), table=tuple(map(float, range(16)))), 8, (4, 4)),
    "int8": (_weight(torch.int8, torch.bfloat16, (1, _COLUMNS)), 8, (4, 4)),
    "fp8-blocks": (_weight(torch.float8_e4m3fn, _WIDE, (128, 128)), 8, (4, 4)),
}  # fmt: skip


# Codes that stream, likewise: kind of `_FEW`, rows.
_STREAMS = {
    "int4": ("int4", 1, (16, 2)),
    "int4-16": ("int4", 16, (16, 2)),
    "int4-16-narrow": ("int4", 16, (8, 1)),
    "k-quant": ("k-quant", 8, (16, 1)),
    "mxfp4": ("mxfp4", 8, (16, 2)),
    "nf4": ("nf4", 8, (16, 2)),
    "int8": ("int8", 8, (8, 2)),
    "fp8-blocks": ("fp8-blocks", 16, (16, 2)),
}


def launch(name: str, dtype: torch.dtype) -> None:
    """Call the launcher of a product."""
    weight, rows, tile = _CALLS[name]
    x = meta(rows, _COLUMNS, dtype=dtype)
    linear.launch(x, weight, None, tile=QuantisedTile(*tile))


def launch_ring(name: str) -> None:
    """Call the launcher of a product of Hopper's."""
    weight, rows, tile = _RINGS[name]
    x = meta(rows, _COLUMNS, dtype=torch.bfloat16)
    linear.launch(x, replace(weight, in_lanes=True), None, tile=RingTile(*tile))


def launch_few(name: str) -> None:
    """Call the launcher of a product of few rows of Hopper's."""
    weight, rows, tile = _FEW[name]
    x = meta(rows, _COLUMNS, dtype=torch.bfloat16)
    linear.launch(x, replace(weight, in_lanes=True), None, tile=FewTile(*tile))


def launch_stream(name: str) -> None:
    """Call the launcher of a product of few rows past which codes stream."""
    kind, rows, tile = _STREAMS[name]
    weight = replace(_FEW[kind][0], in_lanes=True)
    x = meta(rows, _COLUMNS, dtype=torch.bfloat16)
    linear.launch(x, weight, None, tile=StreamTile(*tile))


# Experts of gpt-oss and Qwen3-30B-A3B: weights of both products, tokens.
def _experts(kind: str, experts: int, width: int, inner: int):
    def one(rows: int, columns: int) -> QuantisedWeight:
        if kind == "mxfp4":
            blocks = -(-columns // 128)
            return QuantisedWeight(
                meta(rows, blocks * 64, dtype=_BYTE),
                meta(rows, blocks * 4, dtype=torch.float8_e8m0fnu), (1, 32), table=E2M1,
                in_lanes=True,
            )  # fmt: skip
        if kind == "int4":
            grid = (rows, columns // 128)
            return QuantisedWeight(
                meta(rows, columns // 2, dtype=_BYTE), meta(*grid, dtype=_HALF), (1, 128),
                zeros=meta(*grid, dtype=_BYTE), in_lanes=True,
            )  # fmt: skip
        return QuantisedWeight(
            meta(rows, columns, dtype=torch.float8_e4m3fn),
            meta(rows // 128, columns // 128, dtype=_WIDE), (128, 128), in_lanes=True,
        )  # fmt: skip

    return one(experts * 2 * inner, width), one(experts * width, inner)


_EXPERTS = {
    f"{kind}-{tokens}": (kind, sizes, tokens)
    for kind, sizes in (
        ("mxfp4", (32, 4, 2880, 2880)), ("int4", (128, 8, 2048, 768)),
        ("fp8-blocks", (128, 8, 2048, 768)),
    )
    for tokens in (1, 16, 32, 256, 1024)
}  # fmt: skip


def launch_experts(name: str, tile: NarrowTile | None = None) -> None:
    """Call the launcher of a mixture's products."""

    kind, (experts, active, width, inner), tokens = _EXPERTS[name]
    up, down = _experts(kind, experts, width, inner)
    is_gpt = kind == "mxfp4"
    bias = [meta(experts, rows, dtype=torch.bfloat16) for rows in (2 * inner, width)]
    mixture.launch(
        meta(tokens, width, dtype=torch.bfloat16),
        meta(tokens, active, dtype=torch.int32), meta(tokens, active, dtype=_WIDE),
        up, bias[0] if is_gpt else None, down, bias[1] if is_gpt else None, None, None, inner=inner,
        activation="clamped" if is_gpt else "silu", interleaved=is_gpt, limit=7.0, alpha=1.702,
        weighs_input=False, batch_invariant=False, tile=tile,
    )  # fmt: skip


def launch_early(mode: int) -> None:
    """Call Hopper's products as a decode step launches them."""
    from tilewise.kernels import early

    with early.launching({"rows": mode}):
        launch_few("int4")
        launch_stream("int4")
        launch_ring("int4-many")
        launch_experts("mxfp4-1")
        launch_experts("int4-256")


def launch_rounded() -> None:
    """Call the launcher of many rows that are rounded to e4m3."""
    weight = _weight(torch.float8_e4m3fn, torch.bfloat16, (128, 128), in_lanes=True)
    narrow.launch(meta(_ROWS, _COLUMNS, dtype=torch.float16), weight, meta(_ROWS, dtype=_HALF))


def cases() -> Iterator[Case]:
    """Yield each kind of code and of scale, for each architecture; in float16 for one."""
    for arch in ARCHITECTURES:
        for name in _CALLS:
            dtype = torch.float16 if arch == 86 else torch.bfloat16
            yield Case(
                f"sm_{arch}-quantised-{name}",
                arch,
                lambda name=name, dtype=dtype: launch(name, dtype),  # type: ignore[misc]
                slow=(name, arch) not in _QUICK,
                mma="mma.sync",
            )
    for mode in (1, 2):
        yield Case(
            f"sm_90-quantised-early-{mode}",
            90,
            lambda mode=mode: launch_early(mode),  # type: ignore[misc]
            slow=mode != 1,
            mma="mma.sync",
        )
    for name in _FEW:
        yield Case(
            f"sm_90-quantised-few-{name}",
            90,
            lambda name=name: launch_few(name),  # type: ignore[misc]
            slow=True,  # every day they are compiled as they begin early
            mma="mma.sync",
        )
    for name in _STREAMS:
        yield Case(
            f"sm_90-quantised-stream-{name}",
            90,
            lambda name=name: launch_stream(name),  # type: ignore[misc]
            slow=True,
            mma="mma.sync",
        )
    for name in _EXPERTS:
        yield Case(
            f"sm_90-quantised-experts-{name}",
            90,
            lambda name=name: launch_experts(name),  # type: ignore[misc]
            slow=True,
        )
    yield Case(
        "sm_90-quantised-experts-four",
        90,
        lambda: launch_experts("mxfp4-256", NarrowTile(64, 0, 4, 1, 1)),
        slow=True,
    )
    yield Case(
        "sm_90-quantised-experts-two-ctas",
        90,
        lambda: launch_experts("mxfp4-256", NarrowTile(64, 0, 2, 1, 2)),
        slow=True,
    )
    yield Case("sm_90-quantised-rounded-rows", 90, launch_rounded, mma="wgmma.mma_async")
    for name in _RINGS:
        yield Case(
            f"sm_90-quantised-ring-{name}",
            90,
            lambda name=name: launch_ring(name),  # type: ignore[misc]
            slow=True,
            mma="wgmma.mma_async",
        )


CASES = [*cases()]
