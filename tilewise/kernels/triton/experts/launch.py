"""A mixture of experts in five launches, whichever experts are chosen; the host waits for
nothing."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tilewise.kernels.tiles.experts import ROUTED_TOKENS, expert_tile, most_row_tiles
from tilewise.kernels.triton.elements import why_not as why_not
from tilewise.kernels.triton.experts.products import combine_kernel, down_kernel, up_kernel
from tilewise.kernels.triton.experts.route import choose_kernel, place_kernel

COMBINED = 1024  # channels of a program that adds up a token's experts


def launch(
    x: Tensor,
    logits: Tensor,
    up: Tensor,
    up_scale: Tensor | None,
    up_bias: Tensor,
    down: Tensor,
    down_scale: Tensor | None,
    down_bias: Tensor,
    *,
    num_active: int,
    limit: float,
    alpha: float,
    batch_invariant: bool,
) -> Tensor:
    """Return y (T, E) of x (T, E) and logits (T, N); see `ops.expert_mlp`."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, width = x.shape
    if y.numel() == 0:
        return y
    num_experts, inner = up.shape[0], up.shape[1] // 2
    experts, slots = triton.next_power_of_2(num_experts), triton.next_power_of_2(num_active)
    rows = tokens * num_active
    tiles = triton.cdiv(tokens, ROUTED_TOKENS)
    ints = torch.empty(3 * rows + tiles * experts + experts + 1, dtype=torch.int32, device=x.device)
    chosen, place, row, counts, start = ints.split((rows, rows, rows, tiles * experts, experts + 1))
    weight = torch.empty((tokens, num_active), dtype=torch.float32, device=x.device)
    sizes = {"ACTIVE": num_active, "TOKENS": ROUTED_TOKENS, "EXPERTS": experts, "SLOTS": slots}
    choose_kernel[(tiles,)](
        logits, chosen, weight, counts, tokens, num_experts, logits.stride(0), **sizes, num_warps=4
    )
    place_kernel[(tiles,)](chosen, counts, start, place, row, tokens, **sizes, num_warps=4)
    tile = expert_tile(rows, num_experts, x.itemsize, batch_invariant=batch_invariant)
    row_tiles = most_row_tiles(rows, num_experts, tile.tile_m)
    shape = {"TILE_M": tile.tile_m, "TILE_N": tile.tile_n, "TILE_K": tile.tile_k}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    a = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    packed = up_scale is not None
    up_kernel[(row_tiles * triton.cdiv(2 * inner, tile.tile_n),)](
        x, up, up_scale if packed else up, up_bias, start, row, a, row_tiles, inner, width,
        x.stride(0), limit, alpha, ACTIVE=num_active, PACKED=packed, EXPERTS=experts, **shape,
        **options,
    )  # fmt: skip
    o = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    packed = down_scale is not None
    down_kernel[(row_tiles * triton.cdiv(width, tile.tile_n),)](
        a, down, down_scale if packed else down, down_bias, start, o, row_tiles, width, inner,
        PACKED=packed, EXPERTS=experts, **shape, **options,
    )  # fmt: skip
    part = min(COMBINED, triton.next_power_of_2(width))
    parts = triton.cdiv(width, part)
    combine_kernel[(tokens * parts,)](
        o, weight, place, y, width, parts, ACTIVE=num_active, TILE=part, num_warps=4
    )
    return y
