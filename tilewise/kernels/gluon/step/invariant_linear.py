"""Products on Hopper whose rows do not depend on one another: which calls, and which kernel.

The contract is that of `kernels.triton.step.invariant_linear`. A weight that is taken here is so
for any number of rows, and the order of its sums is that of `kernels.gluon.step.linear`.
"""

from __future__ import annotations

from torch import Tensor

from tilewise.kernels import device, early
from tilewise.kernels.gluon.step import linear
from tilewise.kernels.gluon.step.many import STEP, Shape, linear_many_kernel
from tilewise.kernels.host.descriptors import matrix_descriptor
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned, rows_of
from tilewise.kernels.spec import LinearSpec
from tilewise.kernels.tiles.invariant_many import ManyTile, cut, many_tile
from tilewise.kernels.tiles.linear_rows import channels_of_part, parts_of, tile_of

__all__ = ["launch", "launch_many", "why_not", "why_not_product"]


def why_not(spec: LinearSpec) -> str | None:
    """Say why these kernels cannot run `spec` on the device at hand, which must be a Hopper GPU (or
    "cuda" where no GPU is seen), or return None when they can; `why_not_product` has the other
    rules."""
    return device.why_not_hopper(spec.device_type) or why_not_product(spec)


def why_not_product(spec: LinearSpec) -> str | None:
    """Say why the kernels cannot run `spec` on Hopper, or return None when they can: N must be a
    multiple of 8, and the rules of `linear.why_not_product` hold, too."""
    if spec.outputs % 8:
        return f"N must be a multiple of 8, got {spec.outputs}"
    return linear.why_not_product(spec)


@planned
def launch(maker: Maker, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return y = x weight^T + bias, (..., N), of x (..., K), weight (N, K) and bias (N,); the bits
    of a row do not depend on the other rows or their number."""
    outputs, channels = weight.shape
    rows = x.numel() // channels
    in_tiles = cut(rows, outputs, channels)
    if in_tiles is not None:
        in_tiles = in_tiles._replace(early=early.mode("rows"))
        return linear.launch.write(maker, x, weight, bias, in_tiles)
    has_parts = parts_of(tile_of(outputs, channels), channels) > 1
    tile = many_tile(rows, outputs, channels, has_parts)
    if tile is None:
        return linear.launch.write(maker, x, weight, bias)
    return launch_many.write(maker, x, weight, bias, tile)


@planned
def launch_many(
    maker: Maker, x: Tensor, weight: Tensor, bias: Tensor | None, tile: ManyTile
) -> Tensor:
    """Return y = x weight^T + bias as `launch` does, computed by the kernel for many rows."""
    outputs, channels = weight.shape
    y = maker.empty((*x.shape[:-1], outputs), x.dtype)
    if y.numel() == 0:
        return y
    linear.check_weight(maker, weight)
    x = maker.addressable(rows_of(maker, x))
    rows = x.shape[0]
    few = tile_of(outputs, channels)
    has_parts = parts_of(few, channels) > 1
    tiles = -(-rows // tile.tile_m) * -(-outputs // tile.tile_n)
    shape = Shape(
        tile.tile_m,
        tile.tile_n,
        tile.stages,
        tile.columns,
        tile.group,
        tile.num_warps,
        has_parts,
        bias is not None,
    )
    maker.launch(
        linear_many_kernel,
        min(tiles, tile.ctas * device.sm_count_of(maker.device)),
        matrix_descriptor(x, tile.tile_m, STEP.value),
        matrix_descriptor(weight, tile.tile_n, STEP.value),
        y if bias is None else bias,
        matrix_descriptor(y.view(rows, outputs), tile.tile_m, tile.columns),
        rows,
        outputs,
        channels,
        channels_of_part(few, channels),
        shape=shape,
        num_warps=tile.num_warps,
    )
    return y
