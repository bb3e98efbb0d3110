"""Operations on the rows of a decode batch, before the model runs and after the sampler.

what     begin: puts blocks that begin now into the table, finds slots and lengths, and the place
         of the step's results. start: likewise, and looks up the embedding and the angles of each
         row. finish: stores the tokens, and advances the rows by one
grid     (tiles of TILE_B rows,), of start (rows,)
program  TILE_B rows, or one; the first also advances the place, which only finish reads
traffic  some 60 bytes a row, with one sector of its table; of start the embedding, too
numerics integers, and copies
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels import early
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.triton.early import await_previous, begin_next, options
from tilewise.kernels.triton.step import sampling
from tilewise.kernels.triton.step.sampling import Moved

__all__ = ["Moved", "begin", "draw", "finish", "start"]

TILE_B = 128
ELEMENTS_PER_WARP = 256  # 8 a thread: a load of 16 bytes of 2-byte elements


@triton.jit(do_not_specialize=["num_rows"])
def _begin_kernel(
    position_ptr,
    active_ptr,
    fresh_ptr,
    table_ptr,
    place_ptr,
    positions_ptr,
    slot_ptr,
    seqlen_ptr,
    num_rows,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    RING: tl.constexpr,
    TILE_B: tl.constexpr,
):
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


@triton.jit
def _start_kernel(
    position_ptr,
    active_ptr,
    fresh_ptr,
    table_ptr,
    place_ptr,
    positions_ptr,
    slot_ptr,
    seqlen_ptr,
    token_ptr,
    embedding_ptr,
    angles_ptr,
    x_ptr,
    found_ptr,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ANGLES: tl.constexpr,
    TILE_ANGLES: tl.constexpr,
    EARLY: tl.constexpr,
):
    # The next kernel waits for the end of this one, which itself is never launched early.
    begin_next(EARLY)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + row)
    active = tl.load(active_ptr + row)
    position = tl.load(position_ptr + row) * active
    fresh = tl.load(fresh_ptr + row)
    column, angle = tl.arange(0, TILE), tl.arange(0, TILE_ANGLES)
    inside, is_angle = column < WIDTH, angle < ANGLES
    x = tl.load(embedding_ptr + token * WIDTH + column, mask=inside)
    found = tl.load(angles_ptr + position * ANGLES + angle, mask=is_angle)
    entry = table_ptr + row * stride_table + position // BLOCK_SIZE
    block = fresh
    if fresh >= 0:
        tl.store(entry, fresh)
        tl.store(fresh_ptr + row, -1)
    else:
        block = tl.load(entry)
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(positions_ptr + row, position)
    tl.store(slot_ptr + row, tl.where(active != 0, slot, -1))
    tl.store(seqlen_ptr + row, (position + active).to(tl.int32))
    tl.store(x_ptr + row * WIDTH + column, x, mask=inside)
    tl.store(found_ptr + row * ANGLES + angle, found, mask=is_angle)
    if row == 0:
        tl.store(place_ptr, (tl.load(place_ptr) + 1) % RING)


@triton.jit(do_not_specialize=["num_rows"])
def _finish_kernel(
    drawn_ptr,
    finite_ptr,
    token_ptr,
    position_ptr,
    counter_ptr,
    active_ptr,
    place_ptr,
    results_ptr,
    num_rows,
    stride_place,
    TILE_B: tl.constexpr,
    EARLY: tl.constexpr,
):
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


@planned
def begin(
    maker: Maker,
    position: Tensor,
    active: Tensor,
    fresh: Tensor,
    table: Tensor,
    place: Tensor,
    *,
    block_size: int,
    ring: int,
    positions: Tensor,
    slot_mapping: Tensor,
    seqlens_k: Tensor,
) -> None:
    """Prepare a decode step in place: enter new blocks in the table, compute positions and slots.

    The arguments are those of `ops.decode_rows.begin_decode`.
    """
    num_rows = len(positions)
    maker.launch(
        _begin_kernel,
        triton.cdiv(num_rows, TILE_B),
        position,
        active,
        fresh,
        table,
        place,
        positions,
        slot_mapping,
        seqlens_k,
        num_rows,
        table.stride(0),
        BLOCK_SIZE=block_size,
        RING=ring,
        TILE_B=TILE_B,
        num_warps=4,
    )


@planned
def start(
    maker: Maker,
    position: Tensor,
    active: Tensor,
    fresh: Tensor,
    table: Tensor,
    place: Tensor,
    *,
    block_size: int,
    ring: int,
    positions: Tensor,
    slot_mapping: Tensor,
    seqlens_k: Tensor,
    token: Tensor,
    embedding: Tensor,
    angles: Tensor,
) -> tuple[Tensor, Tensor]:
    """Prepare a decode step as `begin` does; return embedding[token] and angles[positions].

    The arguments are those of `ops.decode_rows.start_decode`.
    """
    num_rows, width, num_angles = len(positions), embedding.shape[1], angles.shape[1]
    x = maker.empty((num_rows, width), embedding.dtype)
    found = maker.empty((num_rows, num_angles), angles.dtype)
    tile = triton.next_power_of_2(width)
    maker.launch(
        _start_kernel,
        num_rows,
        position,
        active,
        fresh,
        table,
        place,
        positions,
        slot_mapping,
        seqlens_k,
        token,
        embedding,
        angles,
        x,
        found,
        table.stride(0),
        BLOCK_SIZE=block_size,
        RING=ring,
        WIDTH=width,
        TILE=tile,
        ANGLES=num_angles,
        TILE_ANGLES=triton.next_power_of_2(num_angles),
        num_warps=min(8, max(1, tile // ELEMENTS_PER_WARP)),
        EARLY=early.mode("start"),
    )
    return x, found


@planned
def finish(
    maker: Maker,
    drawn: Tensor,
    is_finite: Tensor,
    token: Tensor,
    position: Tensor,
    counter: Tensor,
    active: Tensor,
    place: Tensor,
    results: Tensor,
) -> None:
    """Advance token, position and counter of active rows, and write drawn tokens to `results`.

    The arguments are those of `ops.decode_rows.finish_decode`.
    """
    num_rows = len(drawn)
    if is_finite.dtype == torch.bool:
        is_finite = is_finite.view(torch.uint8)
    maker.launch(
        _finish_kernel,
        triton.cdiv(num_rows, TILE_B),
        drawn,
        is_finite,
        token,
        position,
        counter,
        active,
        place,
        results,
        num_rows,
        results.stride(0),
        TILE_B=TILE_B,
        num_warps=4,
        **options("finish"),
    )


@planned
def draw(
    maker: Maker,
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor | None,
    rows: Moved,
) -> tuple[Tensor, Tensor]:
    """Sample a token of each row of logits (R, V), and advance the rows as `finish` does.

    The sampling arguments are those of `ops.sample_tokens`, with rows.counter as counters.

    Returns:
        The sampled tokens, int64 (R,), and whether the largest logit of a row is finite, bool (R,).
    """
    return sampling.sample_tokens.write(
        maker, logits, temperature, top_k, top_p, min_p, seeds, rows.counter, rows
    )
