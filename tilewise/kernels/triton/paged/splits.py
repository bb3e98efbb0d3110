"""The plan of a step: which keys of short runs each program reads.

what     cuts the keys of every sequence into splits; a pair is (sequence, split), and its record
         contains all that a program needs to know: FIELDS int32, see `plan_record`
grid     (pairs,), an upper bound; records after the last pair have no splits
program  reads every sequence's length, divides the keys into splits of equal size, finds its pair
traffic  8 bytes a sequence and program, from L2; 32 bytes a pair written
numerics integers

The number of splits follows from the lengths on the device, within bounds that the host knows: no
synchronisation, and a captured CUDA graph stays right when lengths change. Programs of a call
without a plan compute their record themselves; a plan is made once a step and read in every layer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.paged.keys import cached_keys, run_of
from tilewise.kernels.triton.visible import key_tile_range

FIELDS = tl.constexpr(8)
SPLIT_OVERHEAD = 256  # cost of a split's start and end, in keys, for the model of waves
TILE_B = 128  # sequences whose lengths are scanned at once: one for each thread of 4 warps


@triton.jit
def _run_tiles(
    seqlens_k_ptr,
    cu_seqlens_q_ptr,
    seq,
    num_seqs,
    num_tokens,
    max_keys,
    max_run,
    WINDOW_LEFT: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Return the number of key tiles that each of the sequences `seq` reads, at least 1.

    It is 0 for a sequence without new rows or with more than max_run of them.
    """
    inside = seq < num_seqs
    seqlen_k = cached_keys(seqlens_k_ptr, seq, inside, max_keys)
    _, num_rows = run_of(cu_seqlens_q_ptr, seq, inside, num_tokens)
    _, num_tiles = key_tile_range(seqlen_k, num_rows, WINDOW_LEFT, TILE_N)
    num_tiles = tl.maximum(num_tiles, 1)
    return tl.where((num_rows > 0) & (num_rows <= max_run), num_tiles, 0)


@triton.jit
def find_split(
    seqlens_k_ptr,
    cu_seqlens_q_ptr,
    pair,
    num_seqs,
    num_tokens,
    max_keys,
    max_run,
    target_pairs,
    split_tiles,
    WINDOW_LEFT: tl.constexpr,
    TILE_N: tl.constexpr,
    FIXED: tl.constexpr,
    TILE_B: tl.constexpr,
):
    """Return the sequence of a pair, its first pair, and the number of key tiles of a split.

    A pair is a sequence and one of its splits; pairs are numbered sequence by sequence. The
    sequence is B for a pair after the last one.

    Tiles per split is split_tiles, or without FIXED as many more as keep all pairs within
    target_pairs + B: sum of ceil(tiles_b / t) <= sum of tiles_b / t + B.
    """
    if not FIXED:
        total = 0
        for base in range(0, num_seqs, TILE_B):
            seq = base + tl.arange(0, TILE_B)
            total += tl.sum(
                _run_tiles(
                    seqlens_k_ptr,
                    cu_seqlens_q_ptr,
                    seq,
                    num_seqs,
                    num_tokens,
                    max_keys,
                    max_run,
                    WINDOW_LEFT,
                    TILE_N,
                )
            )
        split_tiles = tl.maximum(split_tiles, (total + target_pairs - 1) // target_pairs)
    found = 0
    pairs_before = 0
    first_pair = 0
    for base in range(0, num_seqs, TILE_B):
        seq = base + tl.arange(0, TILE_B)
        tiles = _run_tiles(
            seqlens_k_ptr,
            cu_seqlens_q_ptr,
            seq,
            num_seqs,
            num_tokens,
            max_keys,
            max_run,
            WINDOW_LEFT,
            TILE_N,
        )
        ends = pairs_before + tl.cumsum((tiles + split_tiles - 1) // split_tiles, 0)
        passed = (ends <= pair) & (seq < num_seqs)
        found += tl.sum(passed.to(tl.int32))
        first_pair = tl.maximum(first_pair, tl.max(tl.where(passed, ends, 0)))
        pairs_before = tl.max(ends)
    return found, first_pair, split_tiles


@triton.jit
def _weigh_waves(
    seqlens_k_ptr,
    cu_seqlens_q_ptr,
    num_seqs,
    num_tokens,
    max_keys,
    max_run,
    target_pairs,
    split_tiles,
    num_pairs,
    WINDOW_LEFT: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_B: tl.constexpr,
    OVERHEAD: tl.constexpr,
):
    """Return the tiles per split that take the least time by a model of waves.

    target_pairs run at a time, each for its tiles and OVERHEAD more. Compared are the longest
    sequence in 1 ... 8 splits, in as many as fill one wave, and in up to seven fewer.
    """
    total = 0
    longest = 1
    for base in range(0, num_seqs, TILE_B):
        seq = base + tl.arange(0, TILE_B)
        tiles = _run_tiles(
            seqlens_k_ptr,
            cu_seqlens_q_ptr,
            seq,
            num_seqs,
            num_tokens,
            max_keys,
            max_run,
            WINDOW_LEFT,
            TILE_N,
        )
        total += tl.sum(tiles)
        longest = tl.maximum(longest, tl.max(tiles))
    one_wave = tl.maximum(split_tiles, (total + target_pairs - 1) // target_pairs)
    most = (longest + one_wave - 1) // one_wave
    choice = tl.arange(0, 16)
    splits = tl.where(choice < 8, choice + 1, tl.maximum(most - (choice - 8), 1))
    size = tl.maximum((longest + splits - 1) // splits, split_tiles)
    size = tl.where(choice == 15, one_wave, size)
    pairs = tl.zeros([16], dtype=tl.int32)
    for base in range(0, num_seqs, TILE_B):
        seq = base + tl.arange(0, TILE_B)
        tiles = _run_tiles(
            seqlens_k_ptr,
            cu_seqlens_q_ptr,
            seq,
            num_seqs,
            num_tokens,
            max_keys,
            max_run,
            WINDOW_LEFT,
            TILE_N,
        )
        pairs += tl.sum((tiles[:, None] + size[None, :] - 1) // size[None, :], 0)
    waves = (pairs + target_pairs - 1) // target_pairs
    cost = waves * (size + OVERHEAD)
    cost = tl.where((pairs <= num_pairs) | (choice == 15), cost, 2147483647)
    return tl.max(tl.where(cost == tl.min(cost, 0), size, 0), 0)


@triton.jit
def plan_record(
    seqlens_k_ptr,
    cu_seqlens_q_ptr,
    pair,
    num_seqs,
    num_tokens,
    max_keys,
    max_run,
    target_pairs,
    split_tiles,
    WINDOW_LEFT: tl.constexpr,
    TILE_N: tl.constexpr,
    FIXED: tl.constexpr,
    TILE_B: tl.constexpr,
):
    """Return the eight numbers of the record of a pair, from which a program knows its work.

    It contains the sequence, its first row and number of rows, its keys, the first tile and the end
    of the tiles of this split, the sequence's first pair and its number of splits, which is 0 if
    there is no such pair.
    """
    seq, first_pair, split_tiles = find_split(
        seqlens_k_ptr,
        cu_seqlens_q_ptr,
        pair,
        num_seqs,
        num_tokens,
        max_keys,
        max_run,
        target_pairs,
        split_tiles,
        WINDOW_LEFT,
        TILE_N,
        FIXED,
        TILE_B,
    )
    exists = seq < num_seqs
    start, run = run_of(cu_seqlens_q_ptr, seq, exists, num_tokens)
    seqlen_k = cached_keys(seqlens_k_ptr, seq, exists, max_keys)
    first_tile, num_tiles = key_tile_range(seqlen_k, run, WINDOW_LEFT, TILE_N)
    num_splits = (tl.maximum(num_tiles, 1) + split_tiles - 1) // split_tiles
    split = pair - first_pair
    first = first_tile + split * num_tiles // num_splits
    last = first_tile + (split + 1) * num_tiles // num_splits
    num_splits = tl.where(exists, num_splits, 0)
    return seq, start, run, seqlen_k, first, last, first_pair, num_splits


@triton.jit(
    do_not_specialize=[
        "num_seqs",
        "num_tokens",
        "max_keys",
        "max_run",
        "target_pairs",
        "split_tiles",
        "num_pairs",
    ]
)
def _plan_kernel(
    seqlens_k_ptr,
    cu_seqlens_q_ptr,
    plan_ptr,
    num_seqs,
    num_tokens,
    max_keys,
    max_run,
    target_pairs,
    split_tiles,
    num_pairs,
    WINDOW_LEFT: tl.constexpr,
    TILE_N: tl.constexpr,
    FIXED: tl.constexpr,
    TILE_B: tl.constexpr,
    FIELDS: tl.constexpr,
    WEIGHED: tl.constexpr,
    OVERHEAD: tl.constexpr,
):
    pair = tl.program_id(0)
    if WEIGHED:
        split_tiles = _weigh_waves(
            seqlens_k_ptr,
            cu_seqlens_q_ptr,
            num_seqs,
            num_tokens,
            max_keys,
            max_run,
            target_pairs,
            split_tiles,
            num_pairs,
            WINDOW_LEFT,
            TILE_N,
            TILE_B,
            OVERHEAD,
        )
    seq, start, run, seqlen_k, first, last, first_pair, num_splits = plan_record(
        seqlens_k_ptr,
        cu_seqlens_q_ptr,
        pair,
        num_seqs,
        num_tokens,
        max_keys,
        max_run,
        target_pairs,
        split_tiles,
        WINDOW_LEFT,
        TILE_N,
        FIXED or WEIGHED,
        TILE_B,
    )
    record_ptr = plan_ptr + pair * FIELDS
    tl.store(record_ptr, seq)
    tl.store(record_ptr + 1, start)
    tl.store(record_ptr + 2, run)
    tl.store(record_ptr + 3, seqlen_k)
    tl.store(record_ptr + 4, first)
    tl.store(record_ptr + 5, last)
    tl.store(record_ptr + 6, first_pair)
    tl.store(record_ptr + 7, num_splits)
