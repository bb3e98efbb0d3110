"""What a decode step does to the rows of a batch, before the model runs and after the sampler.

what     begin: puts blocks that begin now into the table, finds slots and lengths, and the place
         of the step's results. finish: stores the tokens, and moves the rows on by one
grid     (tiles of TILE_B rows,)
program  TILE_B rows; the first one also moves the place on, which only finish reads
traffic  some 60 bytes a row, with one sector of its table
numerics integers
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.triton.early import await_previous, begin_next, options

TILE_B = 128


@triton.jit(do_not_specialize=["num_rows"])
def _begin_kernel(
    position_ptr, active_ptr, fresh_ptr, table_ptr, place_ptr, positions_ptr, slot_ptr, seqlen_ptr,
    num_rows, stride_table, BLOCK_SIZE: tl.constexpr, RING: tl.constexpr, TILE_B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE_B + tl.arange(0, TILE_B)
    inside = row < num_rows
    active = tl.load(active_ptr + row, mask=inside, other=0)
    position = tl.load(position_ptr + row, mask=inside, other=0) * active
    fresh = tl.load(fresh_ptr + row, mask=inside, other=-1)
    entry = table_ptr + row.to(tl.int64) * stride_table + position // BLOCK_SIZE
    begins = inside & (fresh >= 0)
    block = tl.load(entry, mask=inside & (fresh < 0), other=0)
    block = tl.where(begins, fresh, block)
    tl.store(entry, block, mask=begins)
    tl.store(fresh_ptr + row, -1, mask=begins)
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(positions_ptr + row, position, mask=inside)
    tl.store(slot_ptr + row, tl.where(active != 0, slot, -1), mask=inside)
    tl.store(seqlen_ptr + row, (position + active).to(tl.int32), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(place_ptr, (tl.load(place_ptr) + 1) % RING)


@triton.jit(do_not_specialize=["num_rows"])
def _finish_kernel(
    drawn_ptr, finite_ptr, token_ptr, position_ptr, counter_ptr, active_ptr, place_ptr, results_ptr,
    num_rows, stride_place, TILE_B: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_next(EARLY)
    await_previous(EARLY)
    row = tl.program_id(0) * TILE_B + tl.arange(0, TILE_B)
    inside = row < num_rows
    active = tl.load(active_ptr + row, mask=inside, other=0)
    drawn = tl.load(drawn_ptr + row, mask=inside, other=0)
    finite = tl.load(finite_ptr + row, mask=inside, other=0)
    runs = inside & (active != 0)
    tl.store(token_ptr + row, drawn, mask=runs)
    position = tl.load(position_ptr + row, mask=runs, other=0)
    tl.store(position_ptr + row, position + 1, mask=runs)
    counter = tl.load(counter_ptr + row, mask=runs, other=0)
    tl.store(counter_ptr + row, counter + 1, mask=runs)
    result = results_ptr + tl.load(place_ptr) * stride_place + 2 * row
    tl.store(result, drawn, mask=inside)
    tl.store(result + 1, finite.to(tl.int64), mask=inside)


def begin(
    position: Tensor, active: Tensor, fresh: Tensor, table: Tensor, place: Tensor, *,
    block_size: int, ring: int, positions: Tensor, slot_mapping: Tensor, seqlens_k: Tensor,
) -> None:  # fmt: skip
    """See `ops.decode_rows.begin_decode`."""
    num_rows = len(positions)
    _begin_kernel[(triton.cdiv(num_rows, TILE_B),)](
        position, active, fresh, table, place, positions, slot_mapping, seqlens_k,
        num_rows, table.stride(0), BLOCK_SIZE=block_size, RING=ring, TILE_B=TILE_B, num_warps=4,
    )  # fmt: skip


def finish(
    drawn: Tensor, is_finite: Tensor, token: Tensor, position: Tensor, counter: Tensor,
    active: Tensor, place: Tensor, results: Tensor,
) -> None:  # fmt: skip
    """See `ops.decode_rows.finish_decode`."""
    num_rows = len(drawn)
    if is_finite.dtype == torch.bool:
        is_finite = is_finite.view(torch.uint8)
    _finish_kernel[(triton.cdiv(num_rows, TILE_B),)](
        drawn, is_finite, token, position, counter, active, place, results,
        num_rows, results.stride(0), TILE_B=TILE_B, num_warps=4, **options("finish"),
    )  # fmt: skip
