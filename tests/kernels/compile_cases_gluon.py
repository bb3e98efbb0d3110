"""What test_compile.py compiles of Hopper's own kernels: calls of their launchers, on meta tensors.

Every row that the product's choices can take is here, full and causal, and every feature by itself
and in one mix. A loop that runs often must keep all in registers, unless it is listed as known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from tests.kernels.compile_cases import Case, attention_spec, meta, tensor_of_bias, tensors_of_mask
from tests.kernels.compile_cases_mla import launch_mla, mla_spec
from tests.kernels.planned import hopper_backward, hopper_fp8, hopper_results, tensors_of
from tilewise.kernels.gluon.attention import fp8 as attention_fp8
from tilewise.kernels.gluon.backward.launch import why_not_bwd
from tilewise.kernels.gluon.forward.launch import why_not_fwd
from tilewise.kernels.gluon.latent import plan as mla_decode
from tilewise.kernels.gluon.step import invariant_linear, linear
from tilewise.kernels.gluon.wide import plan as wide
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.plan import Call
from tilewise.kernels.spec import AttentionSpec, AttentionTensors, PagedSpec
from tilewise.kernels.tiles import invariant_many
from tilewise.kernels.tiles.invariant_many import ManyTile
from tilewise.kernels.tiles.linear_rows import RowsTile

ARCH = 90  # compiled for any other, LLVM aborts the process


@dataclass(frozen=True)
class GluonCase(Case):
    """A call of a Hopper launcher.

    Attributes:
        known: what may be wrong and why it may, by what is wrong: "complaints" of ptxas,
            "operands" overwritten in flight, "hot spills" in the loop that runs most.
    """

    known: dict[str, str] = field(default_factory=dict)


def _tensors(spec: AttentionSpec) -> dict[str, Any]:
    """Return q, k, v and the other tensors of a call, as keyword arguments."""

    def rows(heads: int, width: int, seqlen: int) -> Tensor:
        lead = (spec.batch * seqlen,) if spec.is_varlen else (spec.batch, seqlen)
        return meta(*lead, heads, width, dtype=spec.dtype)

    def numbers(present: bool, *size: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return meta(*size, dtype=dtype) if present else None

    cu_seqlens = numbers(spec.is_varlen, spec.batch + 1, dtype=torch.int32)
    return {
        "q": rows(spec.num_q_heads, spec.head_dim, spec.max_seqlen_q),
        "k": rows(spec.num_kv_heads, spec.head_dim, spec.max_seqlen_k),
        "v": rows(spec.num_kv_heads, spec.v_head_dim, spec.max_seqlen_k),
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "seqlens_k": numbers(spec.has_seqlens_k, spec.batch, dtype=torch.int32),
        "bias": tensor_of_bias(spec),
        "alibi_slopes": numbers(spec.has_alibi, spec.num_q_heads),
        "sinks": numbers(spec.has_sinks, spec.num_q_heads),
        "philox": numbers(spec.dropout_p > 0, 2, dtype=torch.int64),
        "mask": tensors_of_mask(spec),
    }


def launch_forward(spec: AttentionSpec) -> None:
    """Call the launcher of the forward pass."""
    tensors = _tensors(spec)
    hopper_results(tensors.pop("q"), tensors.pop("k"), tensors.pop("v"), spec, **tensors)


def launch_backward(spec: AttentionSpec) -> None:
    """Call the launcher of the backward pass."""
    tensors = _tensors(spec)
    q, k, v = (tensors.pop(name) for name in "qkv")
    o = meta(*q.shape[:-1], spec.v_head_dim, dtype=spec.dtype)
    heads_rows = (spec.num_q_heads, q.shape[0]) if spec.is_varlen else (
        spec.batch, spec.num_q_heads, spec.max_seqlen_q
    )  # fmt: skip
    lse = meta(*heads_rows, dtype=torch.float32)
    hopper_backward(o, lse, q, k, v, o, lse, spec, **tensors)


def launch_fp8(spec: AttentionSpec) -> None:
    """Call the launchers of the e4m3 forward pass, quantising first."""
    tensors = _tensors(spec)
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "sinks")
    given = AttentionTensors(**{name: tensors[name] for name in names})
    if tensors["mask"] is not None:
        of_mask = {f"mask_{name}": x for name, x in tensors["mask"]._asdict().items()}
        given = given._replace(**of_mask)
    counter = meta(1, dtype=torch.int32)
    with mock.patch.object(attention_fp8, "counter_of", return_value=counter):
        hopper_fp8(given, spec)


_SHORT = {"max_seqlen_q": 1024, "max_seqlen_k": 1024}
_LONG = {"max_seqlen_q": 16384, "max_seqlen_k": 16384}
# The choices of the tables: name -> (head dims, changes).
_ROWS: dict[str, tuple[tuple[int, int], dict[str, object]]] = {
    "d64-short": ((64, 64), _SHORT),
    "d64-long": ((64, 64), _LONG),
    "d128": ((128, 128), {}),
    "d256": ((256, 256), {}),
    "d192-128": ((192, 128), {}),
    "d64-128": ((64, 128), {}),
    "d80": ((80, 80), {}),
    "d96": ((96, 96), {}),
}
_FEATURES: dict[str, dict[str, object]] = {
    "fp16": {"dtype": torch.float16},
    "window": {"window_left": 1000},
    "varlen": {"is_varlen": True},
    "lengths": {"has_seqlens_k": True},
    "tail": {"max_seqlen_k": 4001},
    "sinks": {"has_sinks": True},
    "softcap": {"softcap": 30.0},
    "alibi": {"has_alibi": True},
    "bias": {"has_bias": True},
    "mask": {"mask_tile": (128, 128)},
    "dropout": {"dropout_p": 0.1},
    "deterministic": {"deterministic": True},
    "varlen-window-sinks": {"is_varlen": True, "window_left": 1000, "has_sinks": True},
    "everything": {
        "window_left": 1000, "is_varlen": True, "softcap": 30.0, "has_alibi": True,
        "has_sinks": True, "has_bias": True, "mask_tile": (128, 128), "dropout_p": 0.1,
    },
}  # fmt: skip
# Forward passes that also write the largest logit of each row.
_MAXIMA = {"d64-long-causal", "d128-causal", "d128-full", "d256-causal", "d128-softcap"}
# Of the backward pass, most where dq has a kernel of its own: name -> (head dim, changes).
_APART: dict[str, tuple[int, dict[str, object]]] = {
    "d256-bias": (256, {"has_bias": True}),
    "d256-mask": (256, {"mask_tile": (128, 128)}),
    "d256-dropout": (256, {"dropout_p": 0.1}),
    "d256-everything": (256, _FEATURES["everything"]),
    "d64-deterministic-mask": (64, {"deterministic": True, "mask_tile": (128, 128)}),
    "d128-deterministic-mask": (128, {"deterministic": True, "mask_tile": (128, 128)}),
    "d64-dropout-full": (64, {"dropout_p": 0.1, "causal": False}),
    "d128-dropout-long-full": (128, {"dropout_p": 0.1, "causal": False, **_LONG}),
    # Queries passed by, and tiles of keys in turns in a ring; d64-short has both, and turns alone.
    "d64-shorter-causal": (64, {"max_seqlen_q": 512, "max_seqlen_k": 512}),
    "d128-long-full": (128, {"causal": False, **_LONG}),
}
_QUICK = {"mla-128-heads", "fwd-d128-causal", "bwd-d128-causal"}
# Every day products of few rows with parts, early weights and odd sizes; of many rows the tile that
# is whole and the one in parts with a bias.
_QUICK_PRODUCTS = {
    "linear-parts", "linear-early", "linear-tiles-early", "linear-odd", "many-whole-128x256",
    "many-bias-fp16",
}  # fmt: skip
_FULL_REGISTERS = (
    "128 queries a step fill the registers beside dk and dv: the fastest row of plain calls "
    "(H200, 2026-11-20) is not tuned for what this feature adds"
)
_ALL_AT_ONCE = "every feature at once is for correctness, not for speed"
# What may be wrong, by version of Triton ("" is every one) and case, and why it may be.
KNOWN: dict[str, dict[str, dict[str, str]]] = {
    "": {
        "bwd-d64-varlen": {"hot spills": _FULL_REGISTERS},
        "bwd-d64-varlen-window-sinks": {"hot spills": _FULL_REGISTERS},
        "bwd-d64-softcap": {"hot spills": _FULL_REGISTERS},
        "bwd-d64-alibi": {"hot spills": _FULL_REGISTERS},
        "bwd-d64-bias": {"hot spills": _FULL_REGISTERS},
        "bwd-d64-mask": {"hot spills": _FULL_REGISTERS},
        "bwd-d128-bias": {"hot spills": "three moves in 767 instructions"},
        "bwd-d128-dropout-long-full": {"hot spills": "one move in 649 instructions"},
        "bwd-d64-short-causal": {"hot spills": "one move in 759 instructions"},
        "bwd-d64-long-causal": {"hot spills": "one move in 759 instructions"},
        "fwd-wide-full": {"hot spills": "one move in 365 instructions"},
        "mla-e4m3-128-heads": {
            "hot spills": "21 moves in 1,084 instructions beside sums of 64 rows"
        },
        "mla-int8-128-heads": {
            "hot spills": "15 moves in 1,296 instructions beside sums of 64 rows"
        },
        "mla-int8-drafts-block-16": {"hot spills": "one move in 921 instructions"},
        "bwd-d64-everything": {"hot spills": _ALL_AT_ONCE},
        "bwd-d128-everything": {"hot spills": _ALL_AT_ONCE},
        "bwd-d256-everything": {"hot spills": _ALL_AT_ONCE},
    },
    "3.6": {
        "fwd-d128-dropout": {"hot spills": "two moves in 670 instructions, none from 3.7 on"},
    },
}
_COPIES = "this version makes the loop 190 instructions longer beside q in registers, and spills"
for _version in ("3.8", "3.9"):
    KNOWN[_version] = {
        f"mla-{name}": {"hot spills": _COPIES} for name in ("128-heads", "drafts", "block-128-fp16")
    }
KNOWN["3.8"]["bwd-d128-dropout"] = {"hot spills": "one move in 702 instructions"}
KNOWN["3.9"]["bwd-d128-dropout"] = {"hot spills": "18 moves in 784 instructions"}
REFUSED: dict[str, str] = {}  # what is not built, by why_not's reason


def _case(name: str, launch: Callable[[Any], None], spec: AttentionSpec | PagedSpec) -> GluonCase:
    return GluonCase(
        f"sm_{ARCH}-gluon-{name}",
        ARCH,
        lambda: launch(spec),
        slow=name not in _QUICK,
        known={
            what: reason
            for version, cases in KNOWN.items()
            if triton.__version__.startswith(version)
            for what, reason in cases.get(name, {}).items()
        },
    )


def attention_cases() -> Iterator[GluonCase]:
    """Yield every row, full and causal, and every feature on wide and narrow heads."""
    specs = {}
    for name, (dims, changes) in _ROWS.items():
        specs[f"{name}-full"] = attention_spec(*dims, causal=False, **changes)
        specs[f"{name}-causal"] = attention_spec(*dims, **changes)
    for name, changes in _FEATURES.items():
        for head_dim in (64, 128):
            specs[f"d{head_dim}-{name}"] = attention_spec(head_dim, **changes)
    for name, spec in specs.items():
        for part, why_not, launch in (
            ("fwd", why_not_fwd, launch_forward),
            ("bwd", why_not_bwd, launch_backward),
        ):
            reason = why_not(spec)
            if reason is None:
                yield _case(f"{part}-{name}", launch, spec)
                if part == "fwd" and name in _MAXIMA:
                    yield _case(f"fwd-{name}-maxima", launch, spec._replace(needs_max=True))
            else:
                REFUSED[f"{part}-{name}"] = reason
    for name, (head_dim, changes) in _APART.items():
        spec = attention_spec(head_dim, **changes)  # type: ignore[arg-type]
        assert why_not_bwd(spec) is None, name
        yield _case(f"bwd-{name}", launch_backward, spec)


def launch_wide(spec: AttentionSpec) -> None:
    """Call the launcher of the forward pass in heads of more than 256 channels."""
    given = _tensors(spec)
    tensors = tensors_of(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    maker = Maker(Call.of(spec, tensors))
    maker.finish(wide.add_fwd(maker, spec, maker.tensors)).run(*tensors)


def wide_cases() -> Iterator[GluonCase]:
    """Yield the forward pass in heads of more than 256 channels."""
    for name, changes in {
        "causal": {},
        "full": {"window_right": -1},
        "window": {"window_left": 1000},
        "d320-sinks-fp16": {"dtype": torch.float16, "has_sinks": True, "head_dim": 320},
    }.items():
        spec = attention_spec(512)._replace(**changes)
        assert wide.why_not(spec) is None, name
        yield _case(f"fwd-wide-{name}", launch_wide, spec)


def fp8_cases() -> Iterator[GluonCase]:
    """Yield the e4m3 rows, and their features."""
    for head_dim in (64, 128, 256):
        for name, changes in {
            "full": {"causal": False},
            "causal": {},
            "window": {"window_left": 1000},
            "lengths": {"has_seqlens_k": True},
            "softcap": {"softcap": 30.0},
            "sinks": {"has_sinks": True},
            "varlen": {"is_varlen": True},
            "mask": {"mask_tile": (128, 128)},
        }.items():
            spec = attention_spec(head_dim, **changes)  # type: ignore[arg-type]
            yield _case(f"fp8-d{head_dim}-{name}", launch_fp8, spec)


def latent_cases() -> Iterator[GluonCase]:
    """Yield decoding from latents: one new token and several, both dtypes, wide blocks."""
    half = {"dtype": torch.float16, "cache_dtype": torch.float16}
    drafts = {"max_seqlen_q": 2, "num_tokens": 32}
    for name, changes in {
        "128-heads": {},
        "drafts": drafts,
        "block-128-fp16": half | drafts | {"block_size": 128},
        "block-16": {"block_size": 16},
        "block-32-drafts": drafts | {"block_size": 32},
        "e4m3-16-heads": {"cache_dtype": torch.float8_e4m3fn, "num_q_heads": 16},
        "e4m3-128-heads": {"cache_dtype": torch.float8_e4m3fn},
        "int8-16-heads": {"cache_dtype": torch.int8, "num_q_heads": 16},
        "int8-drafts-block-16": {"cache_dtype": torch.int8, "num_q_heads": 16, "block_size": 16}
        | drafts,
        "int8-128-heads": {"cache_dtype": torch.int8},
    }.items():
        yield _case(f"mla-{name}", functools.partial(launch_mla, mla_decode), mla_spec(changes))


@dataclass(frozen=True)
class Product:
    """Rows of x, the weight, and how the product is cut."""

    rows: int
    outputs: int
    channels: int
    tile: RowsTile
    dtype: torch.dtype = torch.bfloat16
    has_bias: bool = False


def launch_product(product: Product) -> None:
    """Call the launcher of the product of few rows."""
    x, weight, bias = (
        meta(*shape, dtype=product.dtype)
        for shape in (
            (product.rows, product.channels),
            (product.outputs, product.channels),
            (product.outputs,),
        )
    )
    linear.launch(x, weight, bias if product.has_bias else None, product.tile)


def product_cases() -> Iterator[GluonCase]:
    """Yield products of few rows: in parts and alone, wide tiles, early weights, odd sizes."""
    half = torch.float16
    for name, product in {
        "one-row": Product(1, 28672, 4096, RowsTile(128, 64, 1, 2)),
        "parts": Product(32, 4096, 14336, RowsTile(128, 64, 7, 2)),
        "wide": Product(64, 28672, 4096, RowsTile(256, 64, 1, 1)),
        "two-warpgroups": Product(256, 4096, 4096, RowsTile(128, 64, 4, 1, num_warps=8)),
        "early": Product(16, 1024, 2048, RowsTile(64, 128, 8, 2, early=1), half, True),
        "tiles": Product(256, 6144, 1024, RowsTile(128, 64, 1, 1, num_warps=8, rows=128)),
        "tiles-early": Product(256, 1024, 3072, RowsTile(64, 64, 4, 1, early=1, rows=128)),
        "odd": Product(33, 1001, 1000, RowsTile(64, 64, 3, 3), has_bias=True),
    }.items():
        yield GluonCase(
            f"sm_{ARCH}-gluon-linear-{name}",
            ARCH,
            functools.partial(launch_product, product),
            slow=f"linear-{name}" not in _QUICK_PRODUCTS,
        )


@dataclass(frozen=True)
class Many:
    """A product of many rows whose sums are those of one row."""

    rows: int
    outputs: int
    channels: int
    tile: ManyTile
    dtype: torch.dtype = torch.bfloat16
    has_bias: bool = False


def launch_many(product: Many) -> None:
    """Call the launcher of the product of many rows."""
    rows, outputs, channels = product.rows, product.outputs, product.channels
    x, weight, bias = (
        meta(*shape, dtype=product.dtype)
        for shape in ((rows, channels), (outputs, channels), (outputs,))
    )
    invariant_linear.launch_many(x, weight, bias if product.has_bias else None, product.tile)


def many_cases() -> Iterator[GluonCase]:
    """Yield every tile of the table, with and without parts, and what else changes the code."""
    found = {
        f"{'parts' if parts else 'whole'}-{tile.tile_m}x{tile.tile_n}": Many(
            8192, 1024 if parts else 4096, 2048 if parts else 1024, tile
        )
        for parts in (False, True)
        for tile in invariant_many.candidates(parts)
    }
    tile = invariant_many.candidates(True)[0]
    found["bias-fp16"] = Many(100, 1000, 1000, tile, torch.float16, has_bias=True)
    for name, product in found.items():
        yield GluonCase(
            f"sm_{ARCH}-gluon-many-{name}",
            ARCH,
            functools.partial(launch_many, product),
            slow=f"many-{name}" not in _QUICK_PRODUCTS,
        )


CASES: list[GluonCase] = [
    *attention_cases(), *wide_cases(), *fp8_cases(), *latent_cases(), *product_cases(),
    *many_cases(),
]  # fmt: skip
