"""The products of a mixture of experts with weights of 8 or 4 bits on Hopper: which calls take this
kernel, and its launches."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.gluon.quantised.experts import (
    ACTIVATIONS,
    SORTED,
    TOKEN,
    Shape,
    experts_kernel,
)
from tilewise.kernels.gluon.quantised.few import CHUNK
from tilewise.kernels.gluon.quantised.linear import (
    facts_of,
    fits_two_blocks,
    folds_scales,
    tensors_of,
    why_no_lanes,
)
from tilewise.kernels.gluon.quantised.operands import (
    ALTERNATING,
    HALVES,
    MAGIC_WORDS,
    SINGLE,
)
from tilewise.kernels.host.descriptors import chunk_descriptor, matrix_descriptor
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.quantised_weight import LANES_BLOCK, QuantisedWeight
from tilewise.kernels.spec import QuantisedExpertsSpec
from tilewise.kernels.tiles.experts import NarrowTile, most_row_tiles, narrow_stages, narrow_tile
from tilewise.kernels.triton.experts.launch import combine, gather, placed

__all__ = ["launch", "why_not"]

_DTYPES = (torch.float16, torch.bfloat16)


def why_not(spec: QuantisedExpertsSpec) -> str | None:
    """Say why this kernel cannot run `spec`, or return None when it can: on Hopper, in 16 bits,
    both weights in the order of lanes without a permutation, experts of whole blocks, and widths
    that are multiples of 64."""
    reason = device.why_not_hopper(spec.up.device_type)
    if reason is not None:
        return reason
    if spec.up.dtype not in _DTYPES:
        return f"dtype must be float16 or bfloat16, got {spec.up.dtype}"
    for name, weight, rows in (("up", spec.up, spec.outputs), ("down", spec.down, spec.width)):
        reason = why_no_lanes(weight)
        if reason is not None:
            return f"{name}: {reason}"
        if weight.has_permutation:
            return f"{name} must have no permutation of its columns"
        for block in (weight.block, weight.outer_block if weight.has_outer else (1, 1)):
            if rows % block[0]:
                return f"{name} must have experts of whole blocks of {block[0]} rows, got {rows}"
    for size in (spec.width, spec.inner):
        if size % CHUNK.value:
            return f"channels must be a multiple of {CHUNK.value}, got {size}"
    return None


@planned
def launch(
    maker: Maker,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    up: QuantisedWeight,
    up_bias: Tensor | None,
    down: QuantisedWeight,
    down_bias: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    *,
    inner: int,
    activation: str,
    interleaved: bool,
    limit: float,
    alpha: float,
    weighs_input: bool,
    batch_invariant: bool,
    tile: NarrowTile | None = None,
) -> Tensor:
    """Compute a mixture of experts: y (T, E) of x (T, E), with chosen and weights (T, k).

    Args:
        up, down: the experts' weights one below another, with codes in the order of lanes.
        inner: the channels between both.
        shared, shared_gate, activation, interleaved, limit, alpha, weighs_input, batch_invariant:
            as for `ops.expert_mlp`.
        tile: the tile sizes, for tuning and tests; None takes the table's.
    """
    y = maker.empty(x.shape, x.dtype)
    if y.numel() == 0:
        return y
    tokens, width = x.shape
    num_experts, active = down.shape[0] // width, chosen.shape[1]
    outputs, rows = up.shape[0] // num_experts, tokens * active
    if tile is None:
        tile = narrow_tile(tokens, active, num_experts, batch_invariant=batch_invariant)
    is_sorted = tile.source != TOKEN.value
    table, place, row = chosen, chosen, chosen
    row_tiles = rows
    if is_sorted:
        row_tiles = most_row_tiles(rows, num_experts, tile.rows)
        table, place, row = placed(maker, chosen, num_experts, tile.rows, row_tiles)
    source = maker.addressable(x)
    if tile.source == SORTED.value:
        source = gather(maker, x, chosen, place, num_experts)
    lists = (table, chosen, place, row)
    a = maker.empty((rows, inner), x.dtype)
    is_gated = inner != outputs
    pairs = (ALTERNATING if interleaved else HALVES) if is_gated else SINGLE
    _product(
        maker,
        source,
        up,
        up_bias,
        weights,
        a,
        lists,
        tile,
        tokens=tokens,
        num_experts=num_experts,
        row_tiles=row_tiles,
        source_rows=tile.source,
        pairs=pairs.value,
        activation=activation,
        limit=limit,
        alpha=alpha,
        weighed=weighs_input,
        parts=1,
    )
    parts = tile.parts
    dtype = x.dtype if parts == 1 else torch.float32
    o = maker.empty((parts, rows, width), dtype)
    _product(
        maker,
        a,
        down,
        down_bias,
        weights,
        o,
        lists,
        tile,
        tokens=tokens,
        num_experts=num_experts,
        row_tiles=row_tiles,
        source_rows=SORTED.value if is_sorted else tile.source,
        pairs=SINGLE.value,
        activation="",
        limit=limit,
        alpha=alpha,
        weighed=False,
        parts=parts,
    )
    combine(
        maker,
        o,
        weights,
        chosen,
        place,
        shared,
        shared_gate,
        y,
        num_experts,
        is_sorted=is_sorted,
        weighed=not weighs_input,
    )
    return y


def _product(
    maker: Maker,
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None,
    weights: Tensor,
    y: Tensor,
    lists: tuple[Tensor, Tensor, Tensor, Tensor],
    tile: NarrowTile,
    *,
    tokens: int,
    num_experts: int,
    row_tiles: int,
    source_rows: int,
    pairs: int,
    activation: str,
    limit: float,
    alpha: float,
    weighed: bool,
    parts: int,
) -> None:
    """Add to the plan the launch of the up or down product, which writes y (places, channels), or
    (parts, places, channels).

    Args:
        lists: the rows of each expert, as `place_kernel` writes them.
        tokens, num_experts: the numbers of both.
        row_tiles: the most tiles of rows.
        source_rows: the rows of x that a tile reads: SORTED, TOKENS or TOKEN of `experts`.
        pairs: the order of gates and values, one of the constants of `experts`.
        weighed: True to multiply rows by their weights.
        parts: the parts of K.
    """
    table, chosen, place, row = lists
    outputs, channels = weight.shape[0] // num_experts, weight.shape[1]
    folds = folds_scales(weight, x.dtype)
    of_block = LANES_BLOCK * 8 // weight.bits
    summed = min(of_block, weight.block[1])  # channels of a sum
    blocks = _blocks(weight, summed, tile.rows, folds=folds)
    of_stage = blocks * of_block
    stages = -(-channels // of_stage)
    part_stages = -(-stages // parts)
    groups = 1 if folds else of_stage // summed
    is_few = tile.is_few
    registers, at_start = tile.registers
    shape = Shape(
        **facts_of(weight, bias, x.dtype, summed),
        rows=tile.rows,
        few=is_few,
        warpgroups=tile.warpgroups,
        tile_n=64,
        num_warps=4,
        registers=registers,
        stages=narrow_stages(tile, of_stage, blocks * LANES_BLOCK),
        parts=parts,
        blocks=blocks,
        groups=groups,
        pairs=pairs,
        source=source_rows,
        activation=ACTIVATIONS.index(activation),
        weighed=weighed,
        active=chosen.shape[1],
    )
    columns = -(-outputs // (64 * tile.warpgroups))
    words = weight.codes.view(torch.int32)
    high = 32 if pairs == HALVES.value else 64
    if is_few:
        read = chunk_descriptor(x, of_stage // CHUNK.value, tile.rows, CHUNK.value)
    else:
        read = matrix_descriptor(x, tile.rows, of_stage // groups)
    tensors, grids = tensors_of(weight, bias, y, x.dtype)
    most = row_tiles * columns * parts
    options = {"launch_pdl": True} if shape.early else {}
    maker.launch(
        experts_kernel,
        min(most, device.sm_count_of(maker.device) * tile.ctas),
        matrix_descriptor(words, high, blocks * LANES_BLOCK // 4),
        read,
        *tensors,
        weights,
        table,
        chosen,
        place,
        row,
        y,
        MAGIC_WORDS["bf16" if x.dtype == torch.bfloat16 else "fp16"],
        tokens,
        num_experts,
        outputs,
        outputs // 2,
        columns,
        y.shape[-2],
        stages,
        part_stages,
        *grids,
        weight.block[0],
        weight.outer_block[0],
        limit,
        alpha,
        shape=shape,
        num_warps=4,
        maxnreg=at_start,
        **options,
    )


def _blocks(weight: QuantisedWeight, summed: int, rows: int, *, folds: bool) -> int:
    """Return the blocks of lanes in a stage, for tiles of `rows` rows: two if rows are at most 16
    and a stage has at most four sums, else one."""
    if rows > 16:  # of WGMMA's operands no more fit the registers
        return 1
    return 2 if folds or fits_two_blocks(weight, summed) else 1
