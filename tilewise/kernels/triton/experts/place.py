"""Sort the rows of tokens by expert: a stable counting sort of T k choices.

what     for each choice its place among all, for each place its choice, and for each tile of
         places its expert, first place and last place + 1; a choice of no expert has no place
grid     (tiles of tokens,); with more than COUNTED_CHOICES a launch counts those of each tile first
program  TOKENS tokens: counts the choices of all tokens and of those before it, or adds up the
         counts of their tiles, and ranks its own; the first program writes the tiles of places, too
traffic  every choice, or N counts a tile of tokens, read by every program
numerics integers
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _choices(
    chosen_ptr,
    tile,
    tokens,
    experts,
    ACTIVE: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Return the choices of the TOKENS tokens of tile number `tile`, in order of token, then of
    slot.

    chosen_ptr: (tokens, ACTIVE), the experts of each token; SLOTS: ACTIVE, rounded up to a power of
    two. The three results have TOKENS * SLOTS entries: the number t * ACTIVE + i of choice i of
    token t, its expert, int32, and whether the choice exists and its expert is one of
    0 ... experts - 1.
    """
    pair = tl.arange(0, TOKENS * SLOTS)
    token, slot = tile * TOKENS + pair // SLOTS, pair % SLOTS
    is_choice = (token < tokens) & (slot < ACTIVE)
    at = token.to(tl.int64) * ACTIVE + slot
    which = tl.load(chosen_ptr + at, mask=is_choice, other=0)
    return at, which.to(tl.int32), is_choice & (which >= 0) & (which < experts)


@triton.jit(do_not_specialize=["tokens", "experts"])
def count_kernel(
    chosen_ptr,
    count_ptr,
    tokens,
    experts,
    ACTIVE: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    tile = tl.program_id(0)
    _, which, is_choice = _choices(chosen_ptr, tile, tokens, experts, ACTIVE, TOKENS, SLOTS)
    counts = tl.histogram(which, EXPERTS, mask=is_choice)
    tl.store(count_ptr + tile * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit(do_not_specialize=["tokens", "experts"])
def place_kernel(
    chosen_ptr,
    count_ptr,
    place_ptr,
    row_ptr,
    tile_ptr,
    tokens,
    experts,
    COUNTED: tl.constexpr,
    CHUNK: tl.constexpr,
    ACTIVE: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE_M: tl.constexpr,
):
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    expert = tl.arange(0, EXPERTS)
    before = tl.zeros([EXPERTS], tl.int32)
    total = tl.zeros([EXPERTS], tl.int32)
    if COUNTED:
        for other in range(0, tiles):
            counts = tl.load(count_ptr + other * EXPERTS + expert)
            total += counts
            before += tl.where(other < tile, counts, 0)
    else:
        end_of_all = tokens * ACTIVE
        for first_choice in range(0, end_of_all, CHUNK):
            choice = first_choice + tl.arange(0, CHUNK)
            inside = choice < end_of_all
            of_all = tl.load(chosen_ptr + choice, mask=inside, other=0)
            inside = inside & (of_all >= 0) & (of_all < experts)
            of_all = of_all.to(tl.int32)
            total += tl.histogram(of_all, EXPERTS, mask=inside)
            is_before = inside & (choice < tile * TOKENS * ACTIVE)
            before += tl.histogram(of_all, EXPERTS, mask=is_before)
    end = tl.cumsum(total, 0)
    start = end - total
    if tile == 0:
        row_tiles = (total + TILE_M - 1) // TILE_M
        through = tl.cumsum(row_tiles, 0)
        tl.store(tile_ptr, tl.max(through, 0))
        first = through - row_tiles
        for j in range(0, tl.max(row_tiles, 0)):
            to = tile_ptr + 1 + 3 * (first + j)
            is_tile = j < row_tiles
            tl.store(to, expert, mask=is_tile)
            tl.store(to + 1, start + j * TILE_M, mask=is_tile)
            tl.store(to + 2, end, mask=is_tile)
    at, which, is_choice = _choices(chosen_ptr, tile, tokens, experts, ACTIVE, TOKENS, SLOTS)
    hit = ((expert[None, :] == which[:, None]) & is_choice[:, None]).to(tl.int32)
    rank = tl.cumsum(hit, 0) - hit
    place = tl.sum(hit * (rank + (start + before)[None, :]), 1)
    tl.store(place_ptr + at, place, mask=is_choice)
    tl.store(row_ptr + place, at.to(tl.int32), mask=is_choice)
