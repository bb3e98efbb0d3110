"""Merge the partial results of `rows` over the splits of a sequence's keys.

what     o = sum_s w_s o_s with w_s = exp(lse_s - lse), and lse = log sum_s exp(lse_s), in the
         order of the splits; with ADDS the result in o and lse is one more summand, the first
grid     (tiles of rows that have parts * TILE_M, Hk), bounded by what the host knows
program  one row of one query head: reads the splits of its tile from the plan that the rows kernel
         has written, MERGE_TILE of them at once
traffic  parts once, o once
numerics float32; a part whose lse is -inf has weight 0
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)

import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.plan import Maker
from tilewise.kernels.spec import PagedSpec
from tilewise.kernels.tiles.paged import padded_head_dim
from tilewise.kernels.tiles.paged_rows import RowsPlan
from tilewise.kernels.triton.merge import add_parts, store_whole
from tilewise.kernels.triton.paged.keys import LOWEST, MERGE_TILE, run_of


@triton.jit(do_not_specialize=["stride_lh", "num_seqs", "num_entries", "num_tokens", "num_parts"])
def _merge_kernel(
    part_o_ptr,
    part_lse_ptr,
    plan_ptr,
    cu_seqlens_q_ptr,
    rows_ptr,
    o_ptr,
    lse_ptr,
    stride_ot,
    stride_oh,
    stride_lh,
    num_seqs,
    num_entries,
    num_tokens,
    num_parts,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    TILE_DV: tl.constexpr,
    TILE_M: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    ADDS: tl.constexpr,
    MERGE_TILE: tl.constexpr,
):
    own = tl.program_id(0) % TILE_M
    merged = tl.program_id(0) // TILE_M
    if merged >= tl.load(plan_ptr):
        return
    plan_ptr += 1 + 4 * merged
    seq = tl.load(plan_ptr)
    row = tl.load(plan_ptr + 1) * TILE_M + own
    part = tl.load(plan_ptr + 2)
    num_splits = tl.minimum(tl.load(plan_ptr + 3), num_parts)
    head = tl.program_id(1)
    # Overlapping runs have more items than there are programs, with entries that were never
    # written.
    if (seq < 0) | (seq >= num_seqs) | (row < 0) | (part < 0):
        return
    start, run = run_of(cu_seqlens_q_ptr, seq, True, num_entries)
    token = row // GROUP
    if token >= run:
        return
    row_tiles = (run * GROUP + TILE_M - 1) // TILE_M
    token += start
    if HAS_ROWS:
        token = tl.minimum(tl.maximum(tl.load(rows_ptr + token), 0), num_tokens - 1)
    q_head = head * GROUP + row % GROUP
    offs_s = tl.arange(0, MERGE_TILE)
    offs_dv = tl.arange(0, TILE_DV)
    o_row = o_ptr + token.to(tl.int64) * stride_ot + q_head * stride_oh
    lse_at = lse_ptr + q_head * stride_lh + token
    acc = tl.zeros([TILE_DV], dtype=tl.float32)
    l = 0.0
    m = LOWEST
    if ADDS:
        before = tl.load(lse_at)
        seen = before > float("-inf")
        acc = tl.load(o_row + offs_dv, mask=offs_dv < V_HEAD_DIM, other=0.0).to(tl.float32)
        l = tl.where(seen, 1.0, 0.0)
        m = tl.where(seen, before, LOWEST)
    for base in range(0, num_splits, MERGE_TILE):
        at = part + (base + offs_s) * row_tiles
        inside = (base + offs_s < num_splits) & (at < num_parts)
        at = at.to(tl.int64) * NUM_KV_HEADS + head
        at = at * TILE_M + own
        lse = tl.load(part_lse_ptr + at, mask=inside, other=float("-inf"))
        o = tl.load(
            part_o_ptr + at[:, None] * V_HEAD_DIM + offs_dv[None, :],
            mask=inside[:, None] & (offs_dv[None, :] < V_HEAD_DIM),
            other=0.0,
        )
        acc, l, m = add_parts(acc, l, m, o, lse)
    store_whole(acc, l, m, o_row + offs_dv, offs_dv < V_HEAD_DIM, lse_at)


def launch_merge(
    maker: Maker,
    o: Tensor,
    lse: Tensor,
    part_o: Tensor,
    part_lse: Tensor,
    bounds: Tensor,
    cu_seqlens_q: Tensor,
    rows: Tensor | None,
    spec: PagedSpec,
    plan: RowsPlan,
    *,
    adds: bool,
) -> None:
    """Add to a plan: write o and lse of the rows whose keys the rows kernel has split, merged.

    Args:
        part_o, part_lse: the partial results of the rows kernel.
        bounds: int32, the number of tiles of rows that have parts, then (sequence, tile, first
            part, number of splits) of each, written by the rows kernel.
        rows: as in `rows.launch_rows`.
        adds: True if o and lse hold the result of other keys, which is one more part.
    """
    tile_dv = padded_head_dim(spec.v_head_dim)
    maker.launch(
        _merge_kernel,
        (plan.num_merged * plan.config.tile_m, spec.num_kv_heads),
        part_o,
        part_lse,
        bounds,
        cu_seqlens_q,
        rows if rows is not None else cu_seqlens_q,
        o,
        lse,
        o.stride(0),
        o.stride(1),
        lse.stride(0),
        spec.num_seqs,
        spec.num_tokens,
        o.shape[0],
        plan.num_parts,
        NUM_KV_HEADS=spec.num_kv_heads,
        GROUP=spec.group_size,
        V_HEAD_DIM=spec.v_head_dim,
        TILE_DV=tile_dv,
        TILE_M=plan.config.tile_m,
        HAS_ROWS=rows is not None,
        ADDS=adds,
        MERGE_TILE=MERGE_TILE * 256 // max(256, tile_dv),
        num_warps=1,
    )
