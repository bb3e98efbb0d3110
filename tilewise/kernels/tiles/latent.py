"""Tile sizes and split plans of attention over latents: pure tables, as in `paged.py`.

A spec is that of paged attention with one key head: head_dim is R + Dr, v_head_dim is R.
"""

from __future__ import annotations

from tilewise.kernels.spec import PagedSpec
from tilewise.kernels.tiles.paged import (
    MAX_SPLIT_RUN,
    PagedWork,
    SplitPlan,
    TileConfig,
    has_only_mma_sync,
    padded_head_dim,
    plan_splits,
)

MAX_ROWS = 64  # of a tile: 64 x 512 float32 sums are 128 registers for each thread of 8 warps
ONE_PER_SM = 1  # a program's tiles and queries take more than half of an SM's shared memory
# Bytes that are multiplied by mma.sync take 56 KiB, and few sequences would only have more splits.
TWO_PER_SM, MANY_SEQS_OF_BYTES = 2, 64


def mla_config(spec: PagedSpec, run: int, arch: int) -> TileConfig:
    """Choose the tile of Triton's kernel for runs of `run` tokens: a row for each token and head,
    up to MAX_ROWS, fewer for 8-bit caches and on mma.sync.

    Chosen by what compiles without spilling its hot loop into local memory, on Hopper not yet
    measured. But for 8-bit caches, of which a tile is held in three forms, as bytes, in registers
    and widened: B 128, 4,096 tokens, 128 heads takes 1,061 us with 32 rows and 4 warps, 1,776 with
    8, and 1,714 with 64 rows, which spill (H200, float8_e4m3fn, 2026-11-22). And as sm_80 on an
    H200 (lab/results/ampere_latents_h200.json, 2026-11-30), us of 64 x 16,384 tokens, 16 heads:
    32 keys in three stages 433, in two 442, 16 in two 740, in three of two programs 490; of
    64 keys in two stages by 8 warps 388. Of 128 x 4,096, 128 heads: 32 keys 1,802, 16 3,067; of
    float8_e4m3fn 1,970 and 1,788. Of float8_e4m3fn read in words of two channels, 64 x 16,384
    tokens take 411 with one program a multiprocessor and 340 with two, 1 x 131,072 83 and 97
    (lab/results/ampere_words_h200.json).
    """
    rows = run * spec.num_q_heads
    tile_m = min(max(16, 1 << (rows - 1).bit_length()), MAX_ROWS)
    is_plain = spec.dtype == spec.cache_dtype or spec.cache_dtype.itemsize == 1
    if not is_plain or spec.dtype.itemsize == 4:
        return TileConfig(16, 16, 8, 1)  # float32 operands: a tile of keys is 36 KiB
    is_narrow = padded_head_dim(spec.v_head_dim) <= 256
    if spec.cache_dtype.itemsize == 1:
        by_warps = (32, 4, 3) if tile_m == 16 else (16, 4, 2)
        return TileConfig(min(tile_m, 32), *(by_warps if has_only_mma_sync(arch) else (32, 4, 3)))
    if has_only_mma_sync(arch):  # q and the sums share the registers
        if tile_m == 16:
            return TileConfig(16, 32, 4, 2) if is_narrow else TileConfig(16, 64, 8, 2)
        return TileConfig(32, 32, 8, 2)
    if tile_m < 64:
        return TileConfig(tile_m, 32, 4, 3)
    return TileConfig(tile_m, 64 if is_narrow else 32, 8, 3)


def mla_splits(
    spec: PagedSpec, config: TileConfig, run: int, sm_count: int, arch: int
) -> SplitPlan:
    """Return the bounds on splits of the keys of a call for sequences with up to `run` new tokens,
    as `paged.plan_splits` does: with two programs an SM for many sequences over an 8-bit cache on
    mma.sync, else one."""
    has_bytes = spec.cache_dtype.itemsize == 1 and config.tile_m == 16 and has_only_mma_sync(arch)
    programs = TWO_PER_SM if has_bytes and spec.num_seqs >= MANY_SEQS_OF_BYTES else ONE_PER_SM
    return plan_splits(spec, config, run, sm_count, programs_per_sm=programs)


def mla_work(spec: PagedSpec, arch: int, sm_count: int) -> PagedWork:
    """Choose the kernels of one call over latents: one that splits keys for short runs, one over
    tiles of rows for long ones, or both.

    With batch_invariant a sequence's kernel, tiles and splits follow from its own run alone.
    """
    longest = max(1, spec.max_seqlen_q)
    rows_config: TileConfig | None = mla_config(spec, MAX_ROWS, arch)
    assert rows_config is not None
    programs = -(-longest * spec.num_q_heads // rows_config.tile_m) * spec.num_seqs
    if longest == 1:
        split_run, rows_config = 1, None
    elif spec.batch_invariant:
        split_run = 1
    elif longest <= MAX_SPLIT_RUN or 2 * programs <= sm_count:
        split_run, rows_config = longest, None
    else:
        split_run = 0 if spec.num_tokens == spec.num_seqs * longest else 1
    split_config = mla_config(spec, max(1, split_run), arch)
    plan = mla_splits(spec, split_config, max(1, split_run), sm_count, arch)
    return PagedWork(split_run, split_config, plan, rows_config)
