"""add_low_rank(): what adapters of low rank add to a product, each row by its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.low_rank import TILE, LowRank, RowTiles
from tilewise.kernels.spec import ElementSpec
from tilewise.ops import checks, dispatch
from tilewise.ops.library import refuse_vmap
from tilewise.ops.step import register_step, step

__all__ = ["TILE", "add_low_rank"]


def add_low_rank(
    y: Tensor, x: Tensor, weights: LowRank, tiles: RowTiles, *, backend: str | None = None
) -> None:
    """Add each row's adapter to a product: y[t] += scale (x[t] A^T) B, in place.

    For part p of the columns of y, A is a[slot, p R : (p + 1) R], B is b[slot] and the factor is
    scale[slot, p], with the slot of the row's tile. Rows that are in no tile are left alone. Sums
    are float32, in an order that depends on the shapes of a and b alone: what is added to a row has
    the same bits whatever rows are beside it, and whatever adapters these use. Nothing is
    differentiable.

    Args:
        y: (..., N), T rows, contiguous: the dtype of x, or float32; written.
        x: (..., K), T rows, float32, float16 or bfloat16, last dim contiguous.
        weights: A, B and scales, of x's dtype and on its device.
        tiles: the slots of the rows.
        backend: "triton", "cpu" or "reference"; None chooses by the device.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Source: Hu et al., 2021 (LoRA); Chen et al., 2023 (Punica: adapters mixed in a batch).

    Example:
        >>> y = linear(x)
        >>> add_low_rank(y, x, weights, tiles)
    """
    _add_low_rank(
        y,
        x,
        weights.a,
        weights.b,
        weights.scale,
        weights.ranks,
        weights.edges,
        tiles.slots,
        tiles.rows,
        backend,
    )


def _check(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    ranks: Tensor,
    edges: Tensor,
    slots: Tensor,
    rows: Tensor,
    backend: str | None,
) -> None:
    weights, tiles = LowRank(a, b, scale, ranks, edges), RowTiles(slots, rows)
    checks.check_float("x", x)
    checks.check_last_dim_contiguous("x", x)
    num_slots, total, channels = weights.a.shape
    rank, outputs = weights.b.shape[1:]
    if x.dim() < 1 or x.shape[-1] != channels:
        raise ValueError(f"x must be (..., {channels}), got shape {tuple(x.shape)}")
    if y.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"y must be float32 or of x's dtype {x.dtype}, got {y.dtype}")
    checks.check_shape("y", y, (*x.shape[:-1], outputs))
    checks.check_device("y", y, x.device)
    if not y.is_contiguous():
        raise ValueError(f"y must be contiguous, got strides {y.stride()}")
    parts = weights.parts
    if rank % TILE or total != parts * rank:
        raise ValueError(
            f"weights.a must have {parts} parts of {rank} rows, a multiple of {TILE}, got {total}"
        )
    for name, shape, dtype in (
        ("a", (num_slots, total, channels), x.dtype),
        ("b", (num_slots, rank, outputs), x.dtype),
        ("scale", (num_slots, parts), torch.float32),
        ("ranks", (num_slots, parts), torch.int32),
        ("edges", (parts + 1,), torch.int32),
    ):
        tensor = getattr(weights, name)
        checks.check_same_dtype(f"weights.{name}", tensor, dtype)
        checks.check_shape(f"weights.{name}", tensor, shape)
        checks.check_device(f"weights.{name}", tensor, x.device)
        if not tensor.is_contiguous():
            raise ValueError(f"weights.{name} must be contiguous, got strides {tensor.stride()}")
    checks.check_int32("tiles.slots", tiles.slots, (len(tiles.slots),), x.device)
    checks.check_int32("tiles.rows", tiles.rows, (len(tiles.slots), TILE), x.device)
    dispatch.check_backend_name(backend)


def _chosen(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    ranks: Tensor,
    edges: Tensor,
    slots: Tensor,
    rows: Tensor,
    backend: str | None,
) -> partial[None]:
    if not (x.numel() and len(slots)):
        return partial(_fake)
    name = dispatch.choose("low_rank", ElementSpec(x.device.type, x.dtype), backend)
    launch = dispatch.kernel_module("low_rank", name).launch
    weights, tiles = LowRank(a, b, scale, ranks, edges), RowTiles(slots, rows)
    if name == "triton":
        return partial(launch, y, x, weights, tiles)
    flat = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
    return partial(launch, *flat, weights, tiles)


def _fake(*_: Any) -> None:
    return None


register_step(
    "add_low_rank(Tensor(a!) y, Tensor x, Tensor a, Tensor b, Tensor scale, Tensor ranks, "
    "Tensor edges, Tensor slots, Tensor rows, str? backend) -> ()",
    _chosen,
    _fake,
)
refuse_vmap("add_low_rank")
_add_low_rank = step("add_low_rank", _check)
