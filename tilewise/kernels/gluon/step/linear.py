"""The product of few rows on Hopper: which calls its own kernel takes, and where it is launched.

The contract is that of `kernels.triton.step.linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels import device, early
from tilewise.kernels.gluon.step.rows import Shape, linear_rows_kernel
from tilewise.kernels.host.descriptors import matrix_descriptor, why_no_descriptor
from tilewise.kernels.host.lasting import zeros_of_stream
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned, rows_of
from tilewise.kernels.spec import LinearSpec
from tilewise.kernels.tiles import linear_rows as tiles
from tilewise.kernels.tiles.invariant_many import cut
from tilewise.kernels.tiles.linear_rows import RowsTile

__all__ = ["launch", "launch_parts", "why_not", "why_not_product"]

_DTYPES = (torch.float16, torch.bfloat16)


def why_not(spec: LinearSpec) -> str | None:
    """Say why this kernel cannot run `spec` on the device at hand, which must be a Hopper GPU (or
    "cuda" where no GPU is seen), or return None when it can; `why_not_product` has the other
    rules."""
    return device.why_not_hopper(spec.device_type) or why_not_product(spec)


def why_not_product(spec: LinearSpec) -> str | None:
    """Say why the kernel cannot run `spec` on Hopper, or return None when it can: 16 bits, K a
    multiple of 8, and a weight that TMA can read."""
    if spec.dtype not in _DTYPES:
        return f"dtype must be float16 or bfloat16, got {spec.dtype}"
    if spec.channels % 8:
        return f"K must be a multiple of 8, got {spec.channels}"
    if not spec.addressable:
        return "weight must start on a 16-byte boundary and have rows that are multiples of 16"
    return None


@planned
def launch(
    maker: Maker, x: Tensor, weight: Tensor, bias: Tensor | None, tile: RowsTile | None = None
) -> Tensor:
    """Return y = x weight^T + bias, (..., N), of x (..., K), weight (N, K) and bias (N,).

    x may have as many rows as fit a tile, or any number where the tile says how they are cut.

    Args:
        tile: instead of the table's, for tuning and tests.

    Raises:
        ValueError: x has more rows, the tile does not fit shared memory, or TMA cannot read the
            weight.
    """
    outputs, channels = weight.shape
    y = maker.empty((*x.shape[:-1], outputs), x.dtype)
    if y.numel() == 0:
        return y
    if tile is None:
        tile = tiles.tile_of(outputs, channels)._replace(early=early.mode("rows"))
    _run(maker, _readable(maker, x, weight), weight, bias, y, tile)
    return y


@planned
def launch_parts(maker: Maker, x: Tensor, weight: Tensor, tile: RowsTile | None = None) -> Tensor:
    """Return float32 (parts, ..., N), the sums over each part of K; their total, added in this
    order and rounded once, is the result of `launch` without a bias.

    Args:
        tile: as for `launch`.
    """
    outputs, channels = weight.shape
    if tile is None:
        rows = x.numel() // channels
        tile = cut(rows, outputs, channels, leaves=True) or tiles.tile_of(outputs, channels)
        tile = tile._replace(early=early.mode("rows"))
    shape = (tiles.parts_of(tile, channels), *x.shape[:-1], outputs)
    sums = maker.empty(shape, torch.float32)
    if sums.numel() > 0:
        _run(maker, _readable(maker, x, weight), weight, None, sums, tile, keeps_parts=True)
    return sums


def _readable(maker: Maker, x: Tensor, weight: Tensor) -> Tensor:
    """Return x as (rows, K) that TMA can read, copied if needed; raise ValueError if TMA cannot
    read the weight."""
    check_weight(maker, weight)
    return maker.addressable(rows_of(maker, x))


def check_weight(maker: Maker, weight: Tensor) -> None:
    """Raise ValueError unless TMA can read a weight where it lies."""
    reason = why_no_descriptor(weight)
    if reason is None and not maker.is_aligned(weight):
        reason = "tensors must start on a 16-byte boundary"
    if reason is not None:
        raise ValueError(f"weight must be addressable by TMA: {reason}")


def _run(
    maker: Maker,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    tile: RowsTile,
    *,
    keeps_parts: bool = False,
) -> None:
    """Add to the plan the launch that writes y = x weight^T + bias, or partial sums over K, to y.

    Args:
        maker: the maker of the plan.
        x: (rows, K), aligned and contiguous as TMA requires.
        weight, bias: (N, K), and (N,) or None.
        y: (rows, N); with keeps_parts float32 (P, rows, N), the sums over each part of K.
        tile: the tile sizes.

    Raises:
        ValueError: x has more rows than a tile, or two stages do not fit shared memory.
    """
    outputs, channels = weight.shape
    rows = x.shape[0]
    of_tile = tile.rows or rows
    if of_tile > tiles.most_rows(tile):
        raise ValueError(f"x must have at most {tiles.most_rows(tile)} rows, got {of_tile}")
    padded = tiles.row_tile(of_tile)
    tile = tiles.fitted(tile, padded, channels)
    stages = tiles.stages_of(tile, padded, channels)
    if stages == 0:
        raise ValueError(f"two stages of {tile} must fit shared memory for {padded} rows")
    if tile.rows:
        stages = max(2, stages)
    parts = tiles.parts_of(tile, channels)
    num_tiles = -(-outputs // tile.tile_n) * -(-rows // padded)
    sums = arrived = y  # never touched
    if parts > 1 and not keeps_parts:
        size = num_tiles * parts * tile.tile_n * padded
        sums = maker.empty((size,), torch.float32)
        arrived = counters(maker, num_tiles)
    shape = Shape(
        padded,
        tile.tile_n,
        tile.tile_k,
        stages,
        parts,
        tile.num_warps,
        tile.early,
        bias is not None,
        keeps_parts,
        tile.rows > 0,
    )
    options = {"launch_pdl": True} if tile.early else {}
    maker.launch(
        linear_rows_kernel,
        num_tiles * parts,
        matrix_descriptor(weight, tile.tile_n, tile.tile_k),
        matrix_descriptor(x, padded, tile.tile_k),
        y if bias is None else bias,
        y,
        sums,
        arrived,
        rows,
        outputs,
        channels,
        tiles.channels_of_part(tile, channels),
        shape=shape,
        num_warps=tile.num_warps,
        **options,
    )


def counters(maker: Maker, count: int) -> Tensor:
    """Return `count` int32 zeros with which the launches of a plan count, and which they leave as
    zeros."""

    def make(_: int) -> Tensor:
        return zeros_of_stream(count, maker.device)

    return maker.ask(make, torch.empty(count, dtype=torch.int32, device="meta"))
