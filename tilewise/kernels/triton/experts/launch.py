"""The products of a mixture of experts, whichever experts are chosen; the host waits for
nothing."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.tiles.experts import (
    CHUNK,
    COUNTED_CHOICES,
    RANKED,
    expert_tile,
    most_row_tiles,
)
from tilewise.kernels.triton.elements import why_not as why_not
from tilewise.kernels.triton.experts.place import count_kernel, place_kernel
from tilewise.kernels.triton.experts.products import (
    combine_kernel,
    down_kernel,
    gather_kernel,
    up_kernel,
)

GROUP = 32  # channels of a scale of MXFP4
COMBINED = 1024  # channels of a program that adds up or copies a token's rows


@planned
def launch(
    maker: Maker,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    up: Tensor,
    up_scale: Tensor | None,
    up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    down_bias: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    *,
    activation: str,
    interleaved: bool,
    limit: float,
    alpha: float,
    weighs_input: bool,
    batch_invariant: bool,
) -> Tensor:
    """Return y (T, E), the weighted sum of each token's experts, and `shared` if there is one.

    The arguments are those of `ops.expert_mlp`, whose docstring has the formula.
    """
    y = maker.empty(x.shape, x.dtype)
    (tokens, width), (num_experts, outputs) = x.shape, up.shape[:2]
    if y.numel() == 0:
        return y
    inner, active = down.shape[2] * (1 if down_scale is None else GROUP), chosen.shape[1]
    rows = tokens * active
    packed = up_scale is not None
    tile = expert_tile(
        rows, num_experts, x.itemsize, packed=packed, batch_invariant=batch_invariant
    )
    is_sorted = tokens > tile.tile_m
    slots = triton.next_power_of_2(active)
    table, place, row, row_tiles = chosen, chosen, chosen, rows
    if is_sorted:
        row_tiles = most_row_tiles(rows, num_experts, tile.tile_m)
        table, place, row = placed(maker, chosen, num_experts, tile.tile_m, row_tiles)
    # bfloat16 is unpacked by instructions for two numbers, which only NVIDIA's GPUs know.
    in_pairs = x.dtype == torch.bfloat16 and device.runs_ptx()
    sizes = {
        "IN_PAIRS": in_pairs,
        "SORTED": is_sorted,
        "ACTIVE": active,
        "SLOTS": slots,
        "TILE_M": tile.tile_m,
        "TILE_N": tile.tile_n,
        "TILE_K": tile.tile_k,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    a = maker.empty((rows, inner), x.dtype)
    columns = triton.cdiv(outputs, tile.tile_n)
    maker.launch(
        up_kernel,
        row_tiles * columns,
        x,
        up,
        up if up_scale is None else up_scale,
        up if up_bias is None else up_bias,
        table,
        chosen,
        row,
        weights,
        a,
        tokens,
        num_experts,
        columns,
        inner,
        width,
        x.stride(0),
        limit,
        alpha,
        ACTIVATION=activation,
        GATED=inner != outputs,
        INTERLEAVED=interleaved,
        WEIGHED=weighs_input,
        BIASED=up_bias is not None,
        PACKED=up_scale is not None,
        **sizes,
    )
    o = maker.empty((rows, width), x.dtype)
    columns = triton.cdiv(width, tile.tile_n)
    maker.launch(
        down_kernel,
        row_tiles * columns,
        a,
        down,
        down if down_scale is None else down_scale,
        down if down_bias is None else down_bias,
        table,
        chosen,
        row,
        o,
        tokens,
        num_experts,
        columns,
        width,
        inner,
        BIASED=down_bias is not None,
        PACKED=down_scale is not None,
        **sizes,
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


def combine(
    maker: Maker,
    o: Tensor,
    weights: Tensor,
    chosen: Tensor,
    place: Tensor,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    y: Tensor,
    num_experts: int,
    *,
    is_sorted: bool,
    weighed: bool,
) -> None:
    """Add to a plan: write to y (T, E) the sum of the rows of each token's experts, and of a block
    that all tokens use.

    Args:
        o: the rows (places, E), or (parts, places, E) whose parts are to be added.
        weights, chosen: (T, k), the weight of each choice and its expert.
        place: the row of o of each choice, (T, k), if `is_sorted`; otherwise not read: choice i of
            token t is row t k + i.
        shared, shared_gate: as of `ops.expert_mlp`.
        num_experts: the number of experts; a choice of another number adds nothing.
        is_sorted: whether the rows of o lie in the order of experts.
        weighed: whether rows are multiplied by their weights.
    """
    tokens, width = y.shape
    part = min(COMBINED, triton.next_power_of_2(width))
    parts = triton.cdiv(width, part)
    maker.launch(
        combine_kernel,
        tokens * parts,
        o,
        weights,
        chosen,
        place,
        y if shared is None else shared,
        y if shared_gate is None else shared_gate,
        y,
        num_experts,
        width,
        parts,
        o.shape[-2],
        0 if shared is None else shared.stride(0),
        0 if shared_gate is None else shared_gate.stride(0),
        HAS_SHARED=shared is not None,
        GATED=shared_gate is not None,
        WEIGHED=weighed,
        SORTED=is_sorted,
        ACTIVE=chosen.shape[1],
        PARTS=1 if o.dim() == 2 else o.shape[0],
        TILE=part,
        num_warps=4,
    )


def gather(maker: Maker, x: Tensor, chosen: Tensor, place: Tensor, num_experts: int) -> Tensor:
    """Add to a plan: copy each row of x (T, E) to the places of its token's choices.

    Args:
        chosen, place: (T, k), the expert and the place of each choice, from `placed`; a choice of
            no expert is not copied.

    Returns:
        The rows in the order of experts, (T k, E).
    """
    tokens, width = x.shape
    rows = maker.empty((chosen.numel(), width), x.dtype)
    part = min(COMBINED, triton.next_power_of_2(width))
    parts = triton.cdiv(width, part)
    maker.launch(
        gather_kernel,
        tokens * parts,
        x,
        chosen,
        place,
        rows,
        num_experts,
        width,
        parts,
        x.stride(0),
        ACTIVE=chosen.shape[1],
        TILE=part,
        num_warps=4,
    )
    return rows


def placed(
    maker: Maker, chosen: Tensor, num_experts: int, tile_m: int, row_tiles: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Add to a plan the launches that sort the choices of tokens (T, k) by expert.

    Args:
        tile_m: the rows of a tile of a product, which holds rows of one expert.
        row_tiles: the most tiles that any choices may need.

    Returns:
        Three flat int32 tensors: the number of tiles and then, tile by tile, its expert, first
            place and end; the place of each choice, unwritten for a choice of no expert; and the
            choice (t k + i) at each place.
    """
    tokens, active = chosen.shape
    experts = max(triton.next_power_of_2(num_experts), 32)  # a histogram has a bin a lane at least
    slots = triton.next_power_of_2(active)
    each = max(RANKED // (slots * experts), 1)
    tiles, rows = triton.cdiv(tokens, each), tokens * active
    is_counted = rows > COUNTED_CHOICES
    split = (1 + 3 * row_tiles, rows, rows, tiles * experts if is_counted else 0)
    ints = maker.empty((sum(split),), torch.int32)
    table, place, row, counts = ints.split(split)
    sizes = {"ACTIVE": active, "TOKENS": each, "EXPERTS": experts, "SLOTS": slots}
    if is_counted:
        maker.launch(count_kernel, tiles, chosen, counts, tokens, num_experts, **sizes, num_warps=4)
    maker.launch(
        place_kernel,
        tiles,
        chosen,
        counts if is_counted else chosen,
        place,
        row,
        table,
        tokens,
        num_experts,
        COUNTED=is_counted,
        CHUNK=CHUNK,
        TILE_M=tile_m,
        **sizes,
        num_warps=8,
    )
    return table, place, row
