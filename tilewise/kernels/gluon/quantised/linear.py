"""The product with a weight of 8 or 4 bits on NVIDIA GPUs: which calls take this kernel, and its
launch."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels import device, early
from tilewise.kernels.gluon.quantised import narrow
from tilewise.kernels.gluon.quantised.few import CHUNK, quantised_few_kernel
from tilewise.kernels.gluon.quantised.few import Shape as FewShape
from tilewise.kernels.gluon.quantised.operands import (
    E4M3,
    E5M2,
    FP4,
    INT4,
    INT8,
    MAGIC_WORDS,
    SPREAD,
    TABLE,
)
from tilewise.kernels.gluon.quantised.ring import Shape as RingShape
from tilewise.kernels.gluon.quantised.ring import quantised_ring_kernel
from tilewise.kernels.gluon.quantised.rows import Shape, quantised_rows_kernel
from tilewise.kernels.gluon.quantised.stream import TILE, quantised_stream_kernel
from tilewise.kernels.gluon.quantised.stream import Shape as StreamShape
from tilewise.kernels.gluon.step.linear import counters
from tilewise.kernels.host.descriptors import chunk_descriptor, matrix_descriptor
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned, rows_of
from tilewise.kernels.quantised_weight import E2M1, LANES_BLOCK, QuantisedWeight
from tilewise.kernels.spec import QuantisedLinearSpec
from tilewise.kernels.tiles import quantised_rows as tiles
from tilewise.kernels.tiles.quantised_rows import (
    RING_ROWS,
    FewTile,
    QuantisedTile,
    RingTile,
    StreamTile,
)
from tilewise.kernels.triton.quantised.linear import kind_of, permuted, raw

__all__ = ["launch", "why_not"]

_DTYPES = (torch.float16, torch.bfloat16)
_OLDEST = 80  # mma.sync of bfloat16
_CODES = {
    torch.int8: INT8.value,
    torch.float8_e4m3fn: E4M3.value,
    torch.float8_e5m2: E5M2.value,
}
_WORDS = 8


def why_not(spec: QuantisedLinearSpec) -> str | None:
    """Say why these kernels cannot run `spec`, or return None when they can: on an NVIDIA GPU of
    compute capability 8.0 or newer, in 16 bits, with blocks and K of the multiples that they need,
    and few enough rows unless batch invariance is asked for; weights in the order of lanes need
    Hopper."""
    if spec.device_type != "cuda":
        return f"device must be cuda, got {spec.device_type}"
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU"
    arch = device.arch_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if arch < _OLDEST:
        return f"needs compute capability 8.0 or newer, got {arch // 10}.{arch % 10}"
    if spec.dtype not in _DTYPES:
        return f"dtype must be float16 or bfloat16, got {spec.dtype}"
    if spec.in_lanes:
        return _why_no_ring(spec)
    step = step_of(spec.block, spec.channels, spec.bits)
    least = 128 // spec.bits
    if spec.has_outer and 1 < spec.outer_block[1] < spec.channels and spec.outer_block[1] % step:
        return f"columns of outer_block must be a multiple of {step}, got {spec.outer_block[1]}"
    if step < least:
        return f"columns that share a scale must be a multiple of {least}, got {spec.block[1]}"
    if spec.channels % least:
        return f"K must be a multiple of {least}, got {spec.channels}"
    if not spec.batch_invariant and spec.rows > tiles.MOST_ROWS:
        return f"x must have at most {tiles.MOST_ROWS} rows to be faster so, got {spec.rows}"
    return None


def step_of(block: tuple[int, int], channels: int, bits: int) -> int:
    """Return the channels of a step: the largest number that divides both 512 / bits and the
    channels that share a scale."""
    shared = channels if block[1] >= channels else block[1]
    return math.gcd(shared, 512 // bits)


@planned
def launch(
    maker: Maker,
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None,
    batch_invariant: bool = False,
    tile: QuantisedTile | RingTile | FewTile | StreamTile | None = None,
) -> Tensor:
    """Return y = x W^T + bias, (..., N), of x (..., K), a quantised weight W (N, K) and bias (N,),
    by the kernel that is fastest for the weight's order and the number of rows.

    Args:
        batch_invariant: True for sums whose order the number of rows does not change.
        tile: instead of the table's, for tuning and tests.
    """
    outputs, channels = weight.shape
    is_exact = tile is not None or batch_invariant
    if not is_exact and narrow.takes(x.shape[:-1].numel(), weight):
        return narrow.launch.write(maker, x, weight, bias)
    y = maker.empty((*x.shape[:-1], outputs), x.dtype)
    if y.numel() == 0:
        return y
    x = permuted(maker, rows_of(maker, x), weight)
    rows = len(x)
    if weight.in_lanes:
        blocks = weight.codes.shape[1] // LANES_BLOCK
        if tile is None and rows <= tiles.FEW_ROWS and not batch_invariant:
            tile = tiles.stream_tile_of(outputs, blocks, rows) or tiles.few_tile_of(outputs, blocks)
        if tile is None:
            row_tiles = 1 if batch_invariant else -(-rows // RING_ROWS[-1])
            tile = tiles.ring_tile_of(outputs, blocks, row_tiles)
        if isinstance(tile, StreamTile):
            _launch_stream(maker, x, weight, bias, y, tile)
        elif isinstance(tile, FewTile):
            _launch_few(maker, x, weight, bias, y, tile)
        else:
            assert isinstance(tile, RingTile)
            _launch_ring(maker, x, weight, bias, y, tile)
        return y
    assert tile is None or isinstance(tile, QuantisedTile)
    if tile is None:
        tile = tiles.tile_of(outputs, channels, rows, batch_invariant=batch_invariant)
    kind, table = kind_and_table(weight, x.dtype)
    minimum = -1 if weight.minimums is None else kind_of(weight.minimums)
    step = step_of(weight.block, channels, weight.bits)
    shape = Shape(
        kind,
        tile.rows,
        tile.tiles,
        tile.warps_n,
        tile.warps_k,
        tile.holds_inputs,
        step,
        steps_of(weight.block, channels, step),
        steps_of(weight.outer_block, channels, step),
        kind_of(weight.scales),
        weight.outer is not None,
        weight.zeros is not None,
        minimum,
        weight.outer_minimums is not None,
        bias is not None,
        early.mode("rows"),
    )
    words = weight.codes.view(torch.int32)
    outer = weight.outer_minimums if weight.outer is None else weight.outer
    options = {"launch_pdl": True} if shape.early else {}
    maker.launch(
        quantised_rows_kernel,
        (-(-outputs // (16 * tile.tiles * tile.warps_n)), -(-rows // tile.rows)),
        x,
        words,
        raw(weight.scales, y),
        raw(weight.zeros, y),
        raw(weight.minimums, y),
        raw(weight.outer, y),
        raw(weight.outer_minimums, y),
        *table,
        y if bias is None else bias,
        y,
        MAGIC_WORDS["bf16" if x.dtype == torch.bfloat16 else "fp16"],
        rows,
        outputs,
        channels,
        words.shape[1],
        x.stride(0),
        weight.scales.shape[1],
        1 if outer is None else outer.shape[1],
        weight.block[0],
        weight.outer_block[0],
        shape=shape,
        num_warps=tile.warps_n * tile.warps_k,
        **options,
    )
    return y


def _launch_ring(
    maker: Maker,
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None,
    y: Tensor,
    tile: RingTile,
) -> None:
    """Add to the plan the launch that computes y (T, N) by WGMMA, from codes in the order of
    lanes."""
    outputs, channels = weight.shape
    rows = len(x)
    summed = min(LANES_BLOCK * 8 // weight.bits, weight.block[1])  # channels of a sum
    folds = folds_scales(weight, x.dtype)
    blocks = _blocks(weight, len(x), summed, folds=folds)
    of_stage = blocks * LANES_BLOCK * 8 // weight.bits
    stages = -(-channels // of_stage)
    padded = next((size for size in RING_ROWS if rows <= size), RING_ROWS[-1])
    # The channels of a part do not depend on the rows: a multiple of two blocks, if K is one.
    unit = max(1, 2 * LANES_BLOCK * 8 // weight.bits // of_stage)
    unit = 1 if stages % unit else unit
    part_stages = -(-(stages // unit) // tile.parts) * unit
    parts = -(-stages // part_stages)
    num_tiles = -(-outputs // tile.tile_n) * -(-rows // padded)
    sums = arrived = y  # never touched
    if parts > 1:
        size = num_tiles * parts * tile.tile_n * padded
        sums = maker.empty((size,), torch.float32)
        arrived = counters(maker, num_tiles * tile.tile_n // 64)
    at_start, registers = tiles.ring_registers(tile, padded)
    groups = 1 if folds else of_stage // summed
    tensors, grids = tensors_of(weight, bias, y, x.dtype)
    shape = RingShape(
        **facts_of(weight, bias, x.dtype, summed),
        rows=padded,
        warpgroups=tile.tile_n // 64,
        tile_n=64,
        num_warps=4,
        registers=registers,
        stages=tiles.ring_stages(tile, padded, of_stage, blocks * LANES_BLOCK, part_stages),
        parts=parts,
        blocks=blocks,
        groups=groups,
        fetches=tile.fetches,
    )
    x = maker.addressable(x)
    words = weight.codes.view(torch.int32)
    options = {"launch_pdl": True} if shape.early else {}
    maker.launch(
        quantised_ring_kernel,
        num_tiles * parts,
        matrix_descriptor(words, 64, blocks * LANES_BLOCK // 4),
        words,
        matrix_descriptor(x, padded, of_stage // groups),
        *tensors,
        y,
        sums,
        arrived,
        MAGIC_WORDS["bf16" if x.dtype == torch.bfloat16 else "fp16"],
        rows,
        outputs,
        stages,
        part_stages,
        *grids,
        weight.block[0],
        weight.outer_block[0],
        shape=shape,
        num_warps=shape.num_warps,
        maxnreg=at_start,
        **options,
    )


def _launch_few(
    maker: Maker,
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None,
    y: Tensor,
    tile: FewTile,
) -> None:
    """Add to the plan the launch that computes y (T, N) of up to 16 rows by mma.sync, from codes in
    the order of lanes that a ring brings."""
    outputs, channels = weight.shape
    rows = len(x)
    summed = min(LANES_BLOCK * 8 // weight.bits, weight.block[1])  # channels of a sum
    folds = folds_scales(weight, x.dtype)
    blocks = _blocks(weight, rows, summed, folds=folds)
    of_stage = blocks * LANES_BLOCK * 8 // weight.bits
    stages = -(-channels // of_stage)
    padded = 8 if rows <= 8 else 16
    part_stages = -(-stages // tile.parts)
    parts = -(-stages // part_stages)
    num_tiles = -(-outputs // tile.tile_n)
    sums = arrived = y  # never touched
    if parts > 1:
        size = num_tiles * parts * tile.tile_n * padded
        sums = maker.empty((size,), torch.float32)
        arrived = counters(maker, num_tiles)
    at_start, _ = tiles.ring_registers(tile, padded)
    tensors, grids = tensors_of(weight, bias, y, x.dtype)
    shape = FewShape(
        **facts_of(weight, bias, x.dtype, summed),
        rows=padded,
        tile_n=tile.tile_n,
        num_warps=4,
        stages=tiles.ring_stages(tile, padded, of_stage, blocks * LANES_BLOCK, part_stages),
        parts=parts,
        blocks=blocks,
        groups=1 if folds else of_stage // summed,
    )
    x = maker.addressable(x)
    words = weight.codes.view(torch.int32)
    options = {"launch_pdl": True} if shape.early else {}
    maker.launch(
        quantised_few_kernel,
        num_tiles * parts,
        matrix_descriptor(words, tile.tile_n, blocks * LANES_BLOCK // 4),
        chunk_descriptor(x, of_stage // CHUNK.value, padded, CHUNK.value),
        *tensors,
        y,
        sums,
        arrived,
        MAGIC_WORDS["bf16" if x.dtype == torch.bfloat16 else "fp16"],
        rows,
        outputs,
        stages,
        part_stages,
        *grids,
        weight.block[0],
        weight.outer_block[0],
        shape=shape,
        num_warps=4,
        maxnreg=at_start,
        **options,
    )


def _launch_stream(
    maker: Maker,
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None,
    y: Tensor,
    tile: StreamTile,
) -> None:
    """Add to the plan the launch that computes y (T, N) of up to 16 rows by mma.sync, from codes in
    the order of lanes that stream past rows of x."""
    outputs = weight.shape[0]
    rows = len(x)
    summed = min(LANES_BLOCK * 8 // weight.bits, weight.block[1])  # channels of a sum
    folds = folds_scales(weight, x.dtype)
    padded = 8 if rows <= 8 else 16
    in_row = weight.codes.shape[1] // LANES_BLOCK
    fits_two = in_row % 2 == 0 if folds else fits_two_blocks(weight, summed)
    blocks = tile.blocks if fits_two else 1
    of_pass = tile.warps * blocks
    passes = -(-in_row // of_pass)
    num_tiles = -(-outputs // TILE.value)
    ctas = min(num_tiles, tiles.SMS * tile.ctas)
    per_cta = -(-num_tiles // ctas)
    of_stage = blocks * LANES_BLOCK * 8 // weight.bits
    tensors, grids = tensors_of(weight, bias, y, x.dtype)
    shape = StreamShape(
        **facts_of(weight, bias, x.dtype, summed),
        rows=padded,
        num_warps=tile.warps,
        blocks=blocks,
        stages=tiles.stream_stages(tile, blocks, padded, of_stage, per_cta, passes),
        tiles=per_cta if passes > 1 else 0,
        groups=1 if folds else of_stage // summed,
        block_rows=weight.block[0],
        outer_rows=weight.outer_block[0],
        is_whole=outputs % TILE.value == 0 and in_row % of_pass == 0,
    )
    x = maker.addressable(x)
    words = weight.codes.view(torch.int32)
    options = {"launch_pdl": True} if shape.early else {}
    maker.launch(
        quantised_stream_kernel,
        ctas,
        words,
        chunk_descriptor(x, tile.warps * of_stage // CHUNK.value, padded, CHUNK.value),
        *tensors,
        y,
        MAGIC_WORDS["bf16" if x.dtype == torch.bfloat16 else "fp16"],
        rows,
        outputs,
        passes,
        words.shape[1],
        *grids,
        shape=shape,
        num_warps=tile.warps,
        maxnreg=min(65536 // (32 * tile.warps * tile.ctas) // 8 * 8, 248),
        **options,
    )


def folds_scales(weight: QuantisedWeight, dtype: torch.dtype) -> bool:
    """Return whether kernels multiply the weight's scales into bfloat16 operands: those of MXFP4 in
    the order of lanes, if `dtype` is bfloat16."""
    return weight.in_lanes and weight.is_spread and dtype == torch.bfloat16


def facts_of(
    weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype, summed: int
) -> dict[str, Any]:
    """Return the fields of a kernel's Shape that follow from a weight in the order of lanes.

    Args:
        dtype: the dtype of x.
        summed: the channels of a sum that is scaled.
    """
    kind, _ = kind_and_table(weight, dtype)
    is_whole = weight.zeros is not None and not weight.zeros.is_floating_point()
    channels = weight.shape[1]
    return {
        "kind": kind,
        "shared": steps_of(weight.block, channels, summed),
        "outer_shared": steps_of(weight.outer_block, channels, summed),
        "scale_kind": kind_of(weight.scales),
        "has_outer": weight.outer is not None,
        "has_zeros": weight.zeros is not None,
        "subtracts": is_whole and kind == INT4.value,
        "minimum_kind": -1 if weight.minimums is None else kind_of(weight.minimums),
        "has_outer_minimums": weight.outer_minimums is not None,
        "has_bias": bias is not None,
        "early": early.mode("rows"),
        "folds": folds_scales(weight, dtype),
        "turned": weight.is_spread,
    }


def tensors_of(
    weight: QuantisedWeight, bias: Tensor | None, y: Tensor, dtype: torch.dtype
) -> tuple[tuple[Tensor | int, ...], tuple[int, int]]:
    """Return the arguments of a kernel over codes in the order of lanes, for x of `dtype`: scales
    (int32 words if they are folded), zeros, minimums, outer, outer_minimums, the words of the table
    and the bias, y for those that are not there; and the columns of scales and of outer."""
    _, table = kind_and_table(weight, dtype)
    scales = raw(weight.scales, y)
    if folds_scales(weight, dtype):
        scales = scales.view(torch.int32)
    others = (weight.zeros, weight.minimums, weight.outer, weight.outer_minimums)
    outer = weight.outer_minimums if weight.outer is None else weight.outer
    tensors = (scales, *(raw(t, y) for t in others), *table, y if bias is None else bias)
    return tensors, (scales.shape[1], 1 if outer is None else outer.shape[1])


def fits_two_blocks(weight: QuantisedWeight, summed: int) -> bool:
    """Return whether a stage may have two blocks of lanes: K is a multiple of both, and they have
    at most four sums of `summed` channels."""
    both = 2 * LANES_BLOCK * 8 // weight.bits
    return weight.shape[1] % both == 0 and both // summed <= 4


def _blocks(weight: QuantisedWeight, rows: int, summed: int, *, folds: bool) -> int:
    """Return the blocks of lanes in a stage: two if rows are few and a stage has at most four sums,
    else one."""
    if folds:
        return 2 if rows <= 16 else 1
    return 2 if rows <= 32 and fits_two_blocks(weight, summed) else 1


def why_no_lanes(spec: QuantisedLinearSpec) -> str | None:
    """Say why Hopper's products cannot take a weight in the order of lanes, or return None."""
    of_block = LANES_BLOCK * 8 // spec.bits
    if spec.channels % of_block:
        return f"K must be a multiple of {of_block}, got {spec.channels}"
    shared = spec.channels if spec.block[1] >= spec.channels else spec.block[1]
    half, quarter = of_block // 2, of_block // 4
    if shared % of_block and shared not in (half, quarter):
        return (
            f"columns that share a scale must be {quarter}, {half} or multiples of {of_block}, "
            f"got {shared}"
        )
    if spec.has_outer and spec.outer_block[1] < spec.channels and spec.outer_block[1] % of_block:
        return f"columns of outer_block must be a multiple of {of_block}"
    return None


def _why_no_ring(spec: QuantisedLinearSpec) -> str | None:
    reason = device.why_not_hopper(spec.device_type) or why_no_lanes(spec)
    if reason is None and not spec.batch_invariant and narrow.why_not(spec) is None:
        return None
    if reason is None and not spec.batch_invariant and spec.rows > tiles.MOST_RING_ROWS:
        return f"x must have at most {tiles.MOST_RING_ROWS} rows to be faster so, got {spec.rows}"
    return reason


def steps_of(block: tuple[int, int], channels: int, step: int) -> int:
    """Return how many steps of `step` channels share a scale of `block`; 0 if all of a row do."""
    return 0 if block[1] >= channels else block[1] // step


@functools.cache
def kind_and_table(weight: QuantisedWeight, dtype: torch.dtype) -> tuple[int, tuple[int, ...]]:
    """Return the kind of a weight's codes, a constant of `operands`, and a general table of 16
    numbers as eight words of bytes, zeros for kinds without one."""
    if weight.codes.dtype != torch.uint8:
        return _CODES[weight.codes.dtype], (0,) * _WORDS
    if weight.table is None:
        return INT4.value, (0,) * _WORDS
    if weight.table == E2M1:
        kind = SPREAD if weight.in_lanes and weight.is_spread else FP4
        return kind.value, (0,) * _WORDS
    table = torch.tensor(weight.table).to(dtype)
    narrow = table.view(torch.uint8).view(2, 8, 2)  # half, entry, byte
    words = narrow.transpose(1, 2).contiguous().view(-1).view(torch.int32)
    return TABLE.value, tuple(words.tolist())
