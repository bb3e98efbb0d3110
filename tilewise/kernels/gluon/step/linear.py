"""The product of few rows on Hopper: which calls its own kernel takes, and where it is launched.

The contract is that of `kernels.triton.step.linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels import device, early
from tilewise.kernels.gluon.step.rows import Shape, linear_rows_kernel
from tilewise.kernels.host.descriptors import (
    addressable,
    matrix_descriptor,
    why_no_descriptor,
)
from tilewise.kernels.host.lasting import lasting
from tilewise.kernels.host.launch import launch as start
from tilewise.kernels.spec import LinearSpec
from tilewise.kernels.tiles import linear_rows as tiles
from tilewise.kernels.tiles.invariant_many import cut
from tilewise.kernels.tiles.linear_rows import RowsTile

__all__ = ["forget_counters", "launch", "launch_parts", "why_not", "why_not_product"]

_DTYPES = (torch.float16, torch.bfloat16)
_COUNTERS = 1 << 20  # of a device: what launches inside of graphs take is never given back
_TOGETHER = 32  # counters of 128 bytes: every launch's start where Triton takes it for aligned
_OF_A_STREAM = 1 << 12  # counters of the launches of one stream outside of graphs


def why_not(spec: LinearSpec) -> str | None:
    """Say why this kernel cannot run `spec`, or return None when it can."""
    return device.why_not_hopper(spec.device_type) or why_not_product(spec)


def why_not_product(spec: LinearSpec) -> str | None:
    """Say why the kernel cannot run `spec` on Hopper, or return None when it can."""
    if spec.dtype not in _DTYPES:
        return f"dtype must be float16 or bfloat16, got {spec.dtype}"
    if spec.channels % 8:
        return f"K must be a multiple of 8, got {spec.channels}"
    if not spec.addressable:
        return "weight must start on a 16-byte boundary and have rows that are multiples of 16"
    return None


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, tile: RowsTile | None = None) -> Tensor:
    """Return y (..., N) of x (..., K), weight (N, K) and bias (N,).

    As many rows as fit a tile, or any number where the tile says how they are cut.

    Args:
        tile: instead of the table's, for tuning and tests.
    """
    outputs, channels = weight.shape
    y = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    if tile is None:
        tile = tiles.tile_of(outputs, channels)._replace(early=early.mode("rows"))
    _run(_readable(x, weight), weight, bias, y, tile)
    return y


def launch_parts(x: Tensor, weight: Tensor, tile: RowsTile | None = None) -> Tensor:
    """Return float32 (parts, ..., N): added in this order and rounded once, what `launch` gives.

    Args:
        tile: as for `launch`.
    """
    outputs, channels = weight.shape
    if tile is None:
        rows = x.numel() // channels
        tile = cut(rows, outputs, channels, leaves=True) or tiles.tile_of(outputs, channels)
        tile = tile._replace(early=early.mode("rows"))
    shape = (tiles.parts_of(tile, channels), *x.shape[:-1], outputs)
    sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    if sums.numel() > 0:
        _run(_readable(x, weight), weight, None, sums, tile, keeps_parts=True)
    return sums


def _readable(x: Tensor, weight: Tensor) -> Tensor:
    """Return x as rows that TMA can read; a copy lives until the kernel is launched."""
    reason = why_no_descriptor(weight)
    if reason is not None:
        raise ValueError(f"weight must be addressable by TMA: {reason}")
    return addressable(x.reshape(-1, weight.shape[1]))


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    tile: RowsTile,
    *,
    keeps_parts: bool = False,
) -> None:
    """Compute y, or with keeps_parts the sums of parts, of x (rows, K), which TMA can read."""
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
        sums = torch.empty(size, dtype=torch.float32, device=x.device)
        arrived = _counters(num_tiles, x.device)
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
    start(
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


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


class _Counters:
    """Zeros of one device, which every launch leaves as zeros.

    Launches of a stream come one after the other and share theirs. One in a graph has its own for
    good: another graph may run at the same time, and lives as long as it likes.
    """

    def __init__(self, where: torch.device) -> None:
        self._zeros = lasting(
            lambda: torch.zeros(_COUNTERS, dtype=torch.int32, device=where), where
        )
        self._used = 0
        self._of_stream: dict[int, int] = {}

    def take(self, count: int, stream: int, capturing: bool) -> Tensor | None:
        """Return `count` of them, None where there are not so many."""
        if capturing:
            return self._next(count)
        if count > _OF_A_STREAM:
            return None
        begin = self._of_stream.get(stream)
        if begin is not None:
            return self._zeros[begin : begin + count]
        found = self._next(_OF_A_STREAM)
        if found is None:
            return None
        self._of_stream[stream] = self._used - _OF_A_STREAM
        return found[:count]

    def _next(self, count: int) -> Tensor | None:
        count = -(-count // _TOGETHER) * _TOGETHER
        if self._used + count > _COUNTERS:
            return None
        self._used += count
        return self._zeros[self._used - count : self._used]


_of_device: dict[int, _Counters] = {}


def _counters(count: int, where: torch.device) -> Tensor:
    """Return `count` zeros for the next launch of the current stream."""
    if where.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=where)
    capturing = _capturing()
    index = torch.cuda.current_device()
    known = _of_device.get(index)
    if known is None and not capturing:
        known = _of_device[index] = _Counters(where)
    stream = torch._C._cuda_getCurrentRawStream(index)
    found = None if known is None else known.take(count, stream, capturing)
    if found is None:  # a graph before anything else: it fills its own at each replay
        found = torch.zeros(count, dtype=torch.int32, device=where)
    return found


def forget_counters() -> None:
    """Take new zeros from here on; no graph that was captured before may be replayed again."""
    _of_device.clear()
