"""Tile sizes as pure tables: (op, head dim, dtype, arch) -> TileConfig.

Shipped code never autotunes. Each row of a table names where it was measured: device, shape, date;
`python lab/tune.py` and `tune_paged` print candidates, and a person commits them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tilewise.kernels.spec import FOUR_BITS, PagedSpec


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one program of a Triton kernel is shaped.

    Attributes:
        tile_m: query rows of one program.
        tile_n: keys of one step of its loop.
        num_warps: warps (of 32 threads) of one program.
        num_stages: depth of the software pipeline over the loop.
    """

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How the keys of short runs are dealt out to programs; all of it known on the host.

    A pair is (sequence, split). The device cuts every sequence into ceil(tiles / t) splits, t being
    split_tiles or, unless it is fixed, as many more as keep the pairs within target_pairs + B.

    Attributes:
        target_pairs: pairs that fill the device.
        split_tiles: key tiles of a split, at least (exactly, when fixed).
        num_pairs: pairs launched, an upper bound; a program without a pair leaves at once.
        fixed: True if a split's size does not depend on the other sequences.
        alone: True if no sequence can have a second split, so nothing is merged.
        weighed: True if split_tiles is chosen on the device by a model of waves, target_pairs being
            what runs at a time; only for kernels that read a plan.
        merges_apart: True if a second kernel merges splits, though kernels read a plan.
    """

    target_pairs: int
    split_tiles: int
    num_pairs: int
    fixed: bool
    alone: bool
    weighed: bool = False
    merges_apart: bool = False


@dataclass(frozen=True, slots=True)
class PagedWork:
    """Which kernels one call of paged attention launches.

    Attributes:
        split_run: sequences with 1 ... split_run new tokens have their keys split; 0 is none.
        split_config, split_plan: tiles and plan of the kernel that splits keys.
        rows_config: tiles of the kernel for the longer runs; None when there cannot be any.
    """

    split_run: int
    split_config: TileConfig
    split_plan: SplitPlan
    rows_config: TileConfig | None


MAX_SPLIT_RUN = 8  # new tokens: speculative drafts; longer runs reuse keys enough without splits
MANY_SEQS = 128  # that decode: their keys are read in larger steps, see `paged_split_config`
SMALL_TILE_ROWS = 64  # rows of a key head that one tile of the split kernel holds
MIN_SPLIT_KEYS = 64  # 1,024 keys alone: 1.3 us less than with 128 (H200, 2026-11-22)
LONE_KEYS = 128  # a table no wider than this is left whole: then nothing is merged
INVARIANT_SPLIT_KEYS = 2048  # keys of one split when its size must not depend on the batch
PROGRAMS_PER_SM = 2  # splits are equal, so more waves only merge more (H200, 2026-11-20)
# Of two stages four fit: with two programs 1 x 131,072 keys took 162 us in place of 133, 32 x 8,192
# keys of 256 channels 149 in place of 139 (H200 as sm_80, 2026-11-29).
PROGRAMS_OF_TWO_STAGES = 4
# Where a plan tells programs what to read, splits are weighed by how many run at a time: 4 of the
# split kernel's fit an SM. With 2, 1 x 131,072 keys took 146 us in place of 136 (H200, 2026-11-22).
RESIDENT_PROGRAMS, PLANNED_WAVES = 4, 4
WIDE_RESIDENT_PROGRAMS = 2  # of heads of more than 256 channels
# Where kernels do not begin early, a second kernel merges splits: a program that merges alone keeps
# all waiting. 32 x 8,192 keys of 256 channels take 139.5 us, and 155.7 merged by the last program,
# 131,072 keys beside 60 short rows 155.2 and 169.6, 64 x 4,096 254.2 and 252.6 (H200 as sm_80,
# lab/results/ampere_words_h200.json, 2026-11-30).
# Of 8-bit caches as sm_80, 32 heads on 8 of 128, e4m3, planned (the same file): tiles of 128 keys,
# of 64 in parentheses. 64 x 4,096 keys take 188 us with three programs an SM, 199 with two (211),
# 16 x 8,192 95 and 131 (117), 16 x 4,096 without groups 188 and 203 (213), 128 x 2,048 176 (205).
# Eight heads and fewer are merged apart and take two: 1 x 131,072 105 us, with three 130 (108).
BYTE_TILE_N, PROGRAMS_OF_BYTES, PROGRAMS_OF_LONE_BYTES, LONE_HEADS = 128, 3, 2, 8
# Sequences that decode and fill the device once without splits, this many programs an SM, have more
# keys in flight a program: 32 x 1,024 keys, 8 key heads, a step of Qwen3-0.6B of 28 layers takes
# 1,936 us in place of 2,077 (H200, 2026-11-23, lab/results/early_decode_h200.json); with twice
# the sequences a layer takes 153 us in place of 127 (tune_paged_planned_h200.json).
# One sequence has such steps, too: one row of Qwen3-0.6B after 1,024 tokens takes 757 us in place
# of 773, after 3,000 899 in place of 930 (H200, lab/results/lone_decode_h200.json, 2026-11-30).
WHOLE_PROGRAMS, WHOLE_TILE_N, WHOLE_STAGES = 2, 64, 3
_LEAST_FILLED = 0.9
# Windows of fewer keys are read by programs of two warps, where rows have 256 bytes.
SHORT_WINDOW = 256
# Of gluon.paged.decode: 64 x 4,096 keys of 4 bits took 89.0 us, with tiles of 32 keys 95.0, of
# 16 keys 106; of e4m3 140, with tiles of 32 keys 141.5 (H200, 2026-11-30, paged_int4_h200.json).
BYTE_STAGES, BYTE_PROGRAMS_PER_SM, BYTE_MIN_SPLIT_KEYS = 4, 2, 256
NIBBLE_KEYS, NIBBLE_STAGES, BYTE_KEYS = 64, 2, 16
WIDE_SHARED_MEMORY = (80, 87, 90, 100, 101, 103, 110)  # 164 KiB or more an SM; others have ~100


def padded_head_dim(head_dim: int) -> int:
    """Return the channels of a tile for a head dim: the next power of two, at least the 16 that a
    tensor core multiplies."""
    return max(16, 1 << (head_dim - 1).bit_length())


class KeyPart(NamedTuple):
    """The channels of q and k that one product of q k^T multiplies: their number, and the number
    with the zeros to which a tile is padded."""

    channels: int
    padded: int  # channels of a tile, padded with zeros


_NO_PART = KeyPart(0, 0)
_WHOLE_KEYS = 128  # channels that are always one product
_LEAST_PART = 64  # channels of a second part: rows of 64 and more are swizzled alike


def parts_of_keys(head_dim: int) -> tuple[KeyPart, KeyPart]:
    """Return the two parts of D channels whose products add up to q k^T; the second has no channels
    where one product takes them all.

    There are two where the power of two below D and the padded rest take less room than one padded
    D: 192 channels are 128 and 64, 576 are 512 and 64.
    """
    padded = padded_head_dim(head_dim)
    first = padded // 2
    rest = max(_LEAST_PART, padded_head_dim(head_dim - first))
    if head_dim <= _WHOLE_KEYS or rest >= first:
        return KeyPart(head_dim, padded), _NO_PART
    return KeyPart(first, first), KeyPart(head_dim - first, rest)


def has_only_mma_sync(arch: int) -> bool:
    """Return whether a GPU of this compute capability has no matrix instruction but mma.sync, by
    which single warps multiply out of their registers: all but 9.x to 11.x."""
    return arch // 10 not in (9, 10, 11)


def is_wide(spec: PagedSpec) -> bool:
    """Return whether heads have more than 256 channels of q and k or of v; a tile of such heads has
    fewer rows."""
    return max(spec.head_dim, spec.v_head_dim) > 256


def padded_value_dim(head_dim: int, v_head_dim: int) -> int:
    """Return the channels of a tile of values that is stored beside one of keys: the padded
    v_head_dim, but at least as many as the tile of keys has, up to 64.

    Where neither is copied ahead of its use, and values are swizzled less widely than keys, ptxas
    of CUDA 12.8 makes their descriptors of registers that nothing has written: wrong sums, and an
    illegal access on an H200. Rows of 64 channels and more are swizzled alike.
    """
    return max(padded_head_dim(v_head_dim), min(padded_head_dim(head_dim), 64))


def _compute_bytes(spec: PagedSpec) -> int:
    """Return the bytes of an operand's element: 8-bit caches are widened to q's dtype, and a cache
    in another float dtype than q's makes both float32."""
    is_plain = spec.dtype == spec.cache_dtype or spec.cache_dtype.itemsize == 1
    return spec.dtype.itemsize if is_plain else 4


def row_bytes(spec: PagedSpec) -> int:
    """Return the bytes of shared memory that one key and its value take, with padded channels, in
    the dtype in which they are multiplied."""
    keys = sum(part.padded for part in parts_of_keys(spec.head_dim))
    return (keys + padded_head_dim(spec.v_head_dim)) * _compute_bytes(spec)


def paged_split_config(spec: PagedSpec, run: int, arch: int) -> TileConfig:
    """Choose the tile of the split kernel for runs of `run` tokens.

    Hopper: 16 KiB of keys and values a step and four steps in flight; within 3 % of the fastest row
    on each decode shape of `lab/tune_paged.py` (H200, bf16, D 128, block 16; 2026-11-20).
    Of 128 and more sequences that decode, 32 KiB and two steps: 256 x 1,024 keys, planned, take
    245.9 us in place of 249.3, 32 x 1,024 would take 41.3 in place of 40.9 (2026-11-23,
    lab/results/tune_paged_planned_h200.json), and so of 256 channels: planned, 0.38 to 0.96 of a
    read on six shapes in place of 0.35 to 0.69 (lab/results/decode_d256_h200.json, 2026-11-29).
    Rows of 256 bytes there (64 channels): three steps of 16 KiB in place of four, 4 to 7 % less for
    128 x 1,056, 32 x 544 and 8 x 2,048 keys, 64 heads on 8, 3 % more for one of 131,072. Behind a
    window of 128 keys they are read by two warps, 32 keys a step: 256 x 544 take 27.4 us in place
    of 34.4, 32 x 544 10.8 in place of 15.5 (2026-11-30, lab/results/window_decode_h200.json).
    Elsewhere 32 KiB and two steps, of narrower heads than 128 channels as on Hopper: as sm_80 on an
    H200 0.86 to 0.94 of a read, of three steps 0.71 to 0.91 (bf16, block 16; 2026-11-29,
    docs/design/ampere.md).
    """
    rows = run * spec.group_size
    if is_wide(spec):
        return _wide_config(spec, rows, arch)
    tile_m = min(max(16, 1 << (rows - 1).bit_length()), 64)
    is_hopper = arch // 10 == 9
    size = row_bytes(spec)
    is_measured = spec.cache_dtype.itemsize == 2 and spec.max_seqlen_q == 1
    is_crowd = size == 512 and spec.num_seqs >= MANY_SEQS
    takes_more = is_measured and (is_crowd or (size == 1024 and tile_m == 16))
    if takes_more or not (is_hopper or size < 512):
        step_bytes, num_stages = 32768, 2
    else:
        step_bytes, num_stages = 16384, 4
    tile_n = min(max(16, 1 << (step_bytes // size).bit_length() - 1), 128)
    if is_measured and is_hopper and size == 256:
        if 0 <= spec.window_left < SHORT_WINDOW and tile_m == 16:
            return TileConfig(tile_m, 32, 2, 3)
        num_stages = 3
    is_plain = not (spec.has_alibi or spec.softcap > 0)  # with those 128 keys spill
    if spec.cache_dtype == FOUR_BITS and is_hopper and is_plain and tile_m == 16 and size <= 512:
        tile_n, num_stages = 128, 3  # 34 % of a read in place of 20 (H200, 64 x 4,096, D 128)
    # Without WGMMA 64 rows of q and o fill the registers of 4 warps and spill.
    if _reads_many_bytes(spec, tile_m, arch):
        tile_n, num_stages = BYTE_TILE_N, 2
    num_warps = 8 if tile_m == 64 and has_only_mma_sync(arch) else 4
    return TileConfig(tile_m, tile_n, num_warps, num_stages)


def _reads_many_bytes(spec: PagedSpec, tile_m: int, arch: int) -> bool:
    """Return whether a call is like those over 8-bit caches that were measured to read faster in
    tiles of 128 keys: bfloat16 queries, rows of 512 bytes when widened, 16 rows a tile, on mma.sync
    with 164 KiB of shared memory."""
    is_plain = not (spec.has_alibi or spec.softcap > 0) and spec.dtype == torch.bfloat16
    has_bytes = spec.cache_dtype in (torch.int8, torch.float8_e4m3fn)
    has_room = arch in WIDE_SHARED_MEMORY and has_only_mma_sync(arch)
    return has_bytes and has_room and is_plain and tile_m == 16 and row_bytes(spec) == 512


def paged_rows_config(spec: PagedSpec, arch: int) -> TileConfig:
    """Choose the tile of the rows kernel, for long runs: the largest that keeps its loops free of
    spills.

    A function of the widths alone, not of the batch: 64 rows in place of 128 for runs of one token
    gave one of 48 preempted requests other tokens (H200, 2026-11-23).
    """
    if is_wide(spec):
        is_hopper = arch // 10 == 9 and _compute_bytes(spec) == 2
        return TileConfig(64, 32, 8, 2) if is_hopper else _wide_config(spec, 64, arch)
    wide = max(padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim)) > 128
    if _compute_bytes(spec) == 4:
        return TileConfig(16, 16, 4, 2) if wide else TileConfig(32, 32, 4, 2)
    if _decodes_invariantly(spec, arch):
        # Half of the rows in half of the warps: prompts take 3 % longer, 8 x 1,024 rows 273 us in
        # place of 265 (H200, tune_paged_rows_h200.json), and two programs fit a multiprocessor.
        return TileConfig(64, 32, 4, 2) if wide else TileConfig(64, 64, 4, 3)
    if has_only_mma_sync(arch):
        return TileConfig(64, 32, 8, 2) if wide else TileConfig(128, 32, 8, 3)
    return TileConfig(128, 32, 8, 2) if wide else TileConfig(128, 64, 8, 3)


def _wide_config(spec: PagedSpec, rows: int, arch: int) -> TileConfig:
    """Choose the tile of heads of more than 256 channels for `rows` rows of a key head: query
    tokens times heads of its group.

    Chosen by what compiles without spilling its hot loop into local memory; not yet measured. Of 16
    and 32 rows two programs fit a multiprocessor, of 64 one. Of 16 rows and 32 keys each of 4 warps
    multiplies 8 keys, 780 instructions a step; 8 warps, or half the keys, multiply some of them
    twice.
    """
    has_room = arch in WIDE_SHARED_MEMORY
    if _compute_bytes(spec) == 4:
        return TileConfig(16, 16, 8, 2 if has_room else 1)
    if rows <= 16:  # bytes as float16 take more registers than as bfloat16, see `widen_once`
        from_bytes = spec.cache_dtype.itemsize == 1 and spec.dtype == torch.float16
        return TileConfig(16, 32, 8 if from_bytes else 4, 2)
    if rows <= 32 or not has_room:
        return TileConfig(32, 16, 8, 2)
    return TileConfig(64, 16, 8, 3 if arch // 10 == 9 else 2)


def _most_tiles(spec: PagedSpec, tile_n: int, run: int) -> int:
    """Return the most tiles of keys that a run of new tokens can see, by the width of the block
    table and the window; at least 1."""
    span = spec.max_blocks * spec.block_size
    if spec.window_left >= 0:
        span = min(span, spec.window_left + run + tile_n)  # + a first tile cut by the window
    return max(1, -(-span // tile_n))


def _decodes_invariantly(spec: PagedSpec, arch: int) -> bool:
    """Return whether a batch-invariant call has rows that decode run in the split kernel, each with
    its keys in one piece: on Hopper, with 16-bit operands and heads of up to 256 channels.

    Both kernels fold the same tiles of keys by the same code, which the compiler rounds alike on
    Hopper in heads of up to 256 channels; the split kernel has a plan and begins early.
    """
    is_hopper = arch // 10 == 9
    return spec.batch_invariant and is_hopper and _compute_bytes(spec) == 2 and not is_wide(spec)


def plan_splits(
    spec: PagedSpec,
    config: TileConfig,
    run: int,
    sm_count: int,
    *,
    programs_per_sm: int = PROGRAMS_PER_SM,
    min_split_keys: int = MIN_SPLIT_KEYS,
    waves: int = 1,
) -> SplitPlan:
    """Return the bounds on splits of a call's keys, which follow from the width of the block table.

    The host does not know the lengths of sequences. With more than one wave, splits are weighed
    against the programs that run at a time.

    Args:
        spec: the call's spec.
        config: the tile's sizes.
        run: the largest number of query tokens of a sequence.
        sm_count: the multiprocessors of the device.
        programs_per_sm: the programs to start on each; with waves, those that run at a time.
        min_split_keys: the fewest keys of a split.
        waves: the number of rounds in which programs may run.
    """
    most_tiles = _most_tiles(spec, config.tile_n, run)
    keys = INVARIANT_SPLIT_KEYS if spec.batch_invariant else min_split_keys
    split_tiles = max(1, keys // config.tile_n)
    if most_tiles <= max(split_tiles, LONE_KEYS // config.tile_n):
        return SplitPlan(1, most_tiles, spec.num_seqs, fixed=True, alone=True)
    num_pairs = spec.num_seqs * -(-most_tiles // split_tiles)
    if spec.batch_invariant:
        return SplitPlan(1, split_tiles, num_pairs, fixed=True, alone=False)
    programs_per_pair = spec.num_kv_heads * -(-run * spec.group_size // config.tile_m)
    if waves > 1:
        target = max(1, sm_count * programs_per_sm // programs_per_pair)
        num_pairs = min(num_pairs, waves * target + spec.num_seqs)
        return SplitPlan(target, split_tiles, num_pairs, fixed=False, alone=False, weighed=True)
    target = -(-sm_count * programs_per_sm // programs_per_pair)
    return SplitPlan(
        target, split_tiles, min(num_pairs, target + spec.num_seqs), fixed=False, alone=False
    )


def _is_measured(spec: PagedSpec, arch: int) -> bool:
    """Return whether sequences decode one token each, on Hopper, over rows of 512 bytes in 16 bits:
    the calls for which steps of WHOLE_TILE_N keys were measured."""
    is_row = spec.cache_dtype.itemsize == 2 and row_bytes(spec) == 512 and arch // 10 == 9
    return is_row and spec.max_seqlen_q == 1


def fills_whole(spec: PagedSpec, arch: int, sm_count: int) -> bool:
    """Return whether sequences that decode fill the device about once without splits: 0.9 to 1 of
    its WHOLE_PROGRAMS programs an SM have a key head of a sequence; False of what was not measured.
    """
    slots = WHOLE_PROGRAMS * sm_count
    filled = spec.num_seqs * spec.num_kv_heads / slots
    return _is_measured(spec, arch) and _LEAST_FILLED <= filled <= 1


def planned_work(spec: PagedSpec, arch: int, sm_count: int) -> PagedWork:
    """Choose the kernels of one call as `paged_work` does, but with tiles and splits for a plan
    that lists on the device which keys each program reads."""
    work = paged_work(spec, arch, sm_count)
    if _decodes_invariantly(spec, arch):
        return work
    config = work.split_config
    resident = WIDE_RESIDENT_PROGRAMS if is_wide(spec) else RESIDENT_PROGRAMS
    is_whole = fills_whole(spec, arch, sm_count)
    if is_whole or (spec.num_seqs == 1 and _is_measured(spec, arch)):
        config = replace(config, tile_n=WHOLE_TILE_N, num_stages=WHOLE_STAGES)
    if is_whole:
        resident = WHOLE_PROGRAMS
    merges_apart = has_only_mma_sync(arch)
    if _reads_many_bytes(spec, config.tile_m, arch):
        merges_apart = spec.num_seqs * spec.num_kv_heads <= LONE_HEADS
        resident = PROGRAMS_OF_LONE_BYTES if merges_apart else PROGRAMS_OF_BYTES
    run = max(1, work.split_run)
    plan = plan_splits(spec, config, run, sm_count, programs_per_sm=resident, waves=PLANNED_WAVES)
    if merges_apart:
        plan = replace(plan, merges_apart=True)
    return replace(work, split_config=config, split_plan=plan)


def byte_decode_plan(spec: PagedSpec, sm_count: int) -> tuple[int, SplitPlan]:
    """Return (stages of the ring, splits) of Hopper's own decode kernel over caches of 8 and 4
    bits, one warp of which reads the keys of one head."""
    keys = byte_decode_keys(spec)
    stages = NIBBLE_STAGES if keys == NIBBLE_KEYS else BYTE_STAGES
    config = TileConfig(16, keys, 4, stages)
    groups = replace(spec, num_q_heads=spec.num_q_heads // 4, num_kv_heads=spec.num_kv_heads // 4)
    plan = plan_splits(
        groups,
        config,
        max(1, spec.max_seqlen_q),
        sm_count,
        programs_per_sm=BYTE_PROGRAMS_PER_SM,
        min_split_keys=byte_split_keys(spec, sm_count),
        waves=PLANNED_WAVES,
    )
    return stages, plan


def byte_split_keys(spec: PagedSpec, sm_count: int) -> int:
    """Return the fewest keys of a split of Hopper's own decode kernel over caches of 8 and 4 bits.

    A warp reads all keys of a split, of one head: where sequences are few, splits are a quarter as
    long.
    """
    programs = spec.num_seqs * spec.num_kv_heads // 4
    is_small = 8 * programs < BYTE_PROGRAMS_PER_SM * sm_count
    return BYTE_MIN_SPLIT_KEYS // 4 if is_small else BYTE_MIN_SPLIT_KEYS


def byte_decode_keys(spec: PagedSpec) -> int:
    """Return the keys of a tile of Hopper's own decode kernel over caches of 8 and 4 bits."""
    rows = 8 if spec.max_seqlen_q * spec.group_size <= 8 else 16
    is_narrow = spec.cache_dtype == FOUR_BITS and rows * spec.head_dim <= 1024
    return NIBBLE_KEYS if is_narrow else BYTE_KEYS


class DirectTile(NamedTuple):
    """Tiles of the decode kernel over 8-bit caches where mma.sync is the product, see
    `gluon.paged.direct`."""

    keys: int  # of a step of its loop
    registers: int  # of a thread at most
    programs: int  # of a multiprocessor, as many as these registers allow
    ahead: bool  # True if the next keys and values are loaded before these are multiplied


DIRECT_MIN_SPLIT_KEYS = 32  # 1,024 keys alone: 9.0 us, with 64 10.5 (H200 as sm_80, 2026-11-30)


def direct_decode_tile(spec: PagedSpec) -> DirectTile:
    """Choose the tile of the decode kernel over 8-bit caches where mma.sync is the product.

    64 x 4,096 keys of e4m3, 32 heads on 8 of 128: 144 us, loaded after they are multiplied 155; of
    64 heads on 8 of 64 103 us, loaded after and with four programs 88 (H200 as sm_80, 2026-11-30,
    lab/results/ampere_bytes_h200.json).
    """
    if spec.head_dim == 64:
        return DirectTile(32, 128, 4, ahead=False)
    return DirectTile(32, 255, 2, ahead=True)


def direct_decode_plan(spec: PagedSpec, sm_count: int) -> SplitPlan:
    """Return the splits of the decode kernel over 8-bit caches where mma.sync is the product, one
    warp of which reads the keys of one head.

    All splits run at once, or those of more sequences than that: a CTA that finds no pair would
    wait for a place.
    """
    tile = direct_decode_tile(spec)
    groups = replace(spec, num_q_heads=spec.num_q_heads // 4, num_kv_heads=spec.num_kv_heads // 4)
    plan = plan_splits(
        groups,
        TileConfig(16, tile.keys, 4, 2),
        max(1, spec.max_seqlen_q),
        sm_count,
        programs_per_sm=tile.programs,
        min_split_keys=DIRECT_MIN_SPLIT_KEYS,
        waves=PLANNED_WAVES,
    )
    if plan.fixed:
        return plan
    return replace(plan, num_pairs=min(plan.num_pairs, plan.target_pairs + spec.num_seqs))


def paged_work(spec: PagedSpec, arch: int, sm_count: int) -> PagedWork:
    """Choose the kernels of one call of paged attention: the split kernel for short runs, the rows
    kernel over tiles of rows for long ones, or both.

    With batch_invariant every row meets the tiles of keys of the rows kernel in one order, however
    long its run is: a token has the same bits alone and in a chunk.
    """
    longest = max(1, spec.max_seqlen_q)
    rows_config: TileConfig | None = paged_rows_config(spec, arch)
    assert rows_config is not None
    programs = -(-longest * spec.group_size // rows_config.tile_m) * spec.num_kv_heads
    # 16 new tokens after 8,192, 32/8 heads: 27 us here, 28 there; 64 after 32,768: 204 and 113
    # (H200, 2026-11-22). Both kernels split keys.
    is_small = longest * spec.group_size <= SMALL_TILE_ROWS
    if _decodes_invariantly(spec, arch):
        tiles = _most_tiles(spec, rows_config.tile_n, 1)
        whole = SplitPlan(1, tiles, spec.num_seqs, fixed=True, alone=True)
        if longest == 1:
            return PagedWork(1, rows_config, whole, None)
        # Runs that are all of one length have no token that decodes.
        is_even = spec.num_tokens == spec.num_seqs * longest
        return PagedWork(0 if is_even else 1, rows_config, whole, rows_config)
    if spec.batch_invariant:
        split_run = 0
    elif longest == 1:
        split_run, rows_config = 1, None
    elif longest <= MAX_SPLIT_RUN or (is_small and programs * spec.num_seqs * 2 <= sm_count):
        split_run, rows_config = longest, None
    else:
        split_run = 0 if spec.num_tokens == spec.num_seqs * longest else 1
    split_config = paged_split_config(spec, max(1, split_run), arch)
    fits_four = split_config.tile_m == 16 and split_config.num_stages == 2 and not is_wide(spec)
    fits_four = fits_four and not _reads_many_bytes(spec, split_config.tile_m, arch)
    programs = PROGRAMS_OF_TWO_STAGES if fits_four else PROGRAMS_PER_SM
    run = max(1, split_run)
    plan = plan_splits(spec, split_config, run, sm_count, programs_per_sm=programs)
    return PagedWork(split_run, split_config, plan, rows_config)
