"""How the rows kernel of paged attention is cut: tiles of rows, and splits of keys where few."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewise.kernels.spec import PagedSpec
from tilewise.kernels.tiles.paged import (
    MANY_SEQS,
    PROGRAMS_PER_SM,
    SMALL_TILE_ROWS,
    TileConfig,
    is_wide,
    paged_rows_config,
    paged_split_config,
    row_bytes,
)

MIN_SPLIT_KEYS = 256  # a split writes and reads its rows in float32: for 128 rows, 256 keys' bytes
# Sequences that decode after a shared prefix have few keys of their own: two steps in flight leave
# room for more programs. 4,096 of 64 keys, 8 key heads of 64, take 407 us in place of 590, the same
# bits (with the pass of 4 groups of 256 keys; H200, 2026-11-23, samples_steps_h200.json).
CROWD_STAGES, _CROWD_ROW_BYTES = 2, 256


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """The items of one launch of the rows kernel, as far as the host knows them.

    An item, the work of a program, is (sequence, tile of rows, split of keys) for one key head. The
    device cuts a sequence's keys into splits of split_tiles tiles, or as many more as keep the
    items within target_items and one more for each tile of rows.

    Attributes:
        config: the tiles of the kernel.
        splits: whether keys are split at all; if not, an item is a tile of rows.
        num_items: items launched, an upper bound; a program without one leaves at once.
        lone: True if every sequence has at most one tile, as in a decode step, and is an item.
        num_parts, num_merged: bounds of the items that write a partial result, and of the tiles of
            rows whose parts are merged.
    """

    config: TileConfig
    splits: bool
    target_items: int
    split_tiles: int
    num_items: int
    num_parts: int
    num_merged: int
    lone: bool = False


def extend_config(spec: PagedSpec, arch: int) -> TileConfig:
    """Choose the tile of the rows kernel for a call's longest run: the split kernel's where all
    rows of a run fit a small tile; with batch_invariant a function of the widths alone."""
    run = max(1, spec.max_seqlen_q)
    if not spec.batch_invariant and run * spec.group_size <= SMALL_TILE_ROWS:
        config = paged_split_config(spec, run, arch)
        is_crowd = spec.has_shared and run == 1 and spec.num_seqs >= MANY_SEQS
        if is_crowd and arch // 10 == 9 and row_bytes(spec) == _CROWD_ROW_BYTES:
            config = replace(config, num_stages=CROWD_STAGES)
        return config
    config = paged_rows_config(spec, arch)
    if spec.has_tree:
        # Half as many keys a step, and the bytes of a mask do not spill the rest of a row.
        config = replace(config, tile_n=max(16, config.tile_n // 2))
    return config


def plan_rows(
    spec: PagedSpec, config: TileConfig, sm_count: int, *, adds: bool = False
) -> RowsPlan:
    """Return the bounds on the items of a call, tiles of rows times splits of keys, and whether
    keys are split: only where there are too few tiles of rows to fill half of the device, and never
    with batch_invariant.

    Args:
        spec: the call's spec.
        config: the tile's sizes.
        sm_count: the multiprocessors of the device.
        adds: True for a pass whose parts are merged into results that exist already.
    """
    rows = spec.num_tokens * spec.group_size
    # Every sequence wastes less than one tile, so this bounds the tiles of any cu_seqlens_q.
    most_tiles = rows // config.tile_m + spec.num_seqs
    span = spec.max_blocks * spec.block_size
    run = max(1, spec.max_seqlen_q)
    if spec.window_left >= 0:
        span = min(span, spec.window_left + run + config.tile_n)
    key_tiles = max(1, -(-span // config.tile_n))
    most_rows = SMALL_TILE_ROWS // 2 if is_wide(spec) else SMALL_TILE_ROWS
    per_sm = PROGRAMS_PER_SM if config.tile_m <= most_rows else 1
    target = max(1, sm_count * per_sm // spec.num_kv_heads)
    split_tiles = max(1, MIN_SPLIT_KEYS // config.tile_n)
    # At least so many tiles of rows there are; half a wave of them can be cut in two.
    fewest_tiles = max(
        -(-rows // config.tile_m),
        -(-run * spec.group_size // config.tile_m),
        -(-spec.num_tokens // run),
    )
    splits = not spec.batch_invariant and 2 * fewest_tiles <= target and key_tiles > split_tiles
    if not splits:
        lone = not adds and run == 1 and spec.group_size <= config.tile_m
        num_items = max(1, spec.num_seqs) if lone else most_tiles
        return RowsPlan(config, False, 1, key_tiles, num_items, 0, 0, lone)
    num_items = min(most_tiles + target, most_tiles * -(-key_tiles // split_tiles))
    # A sequence that is split has less than twice its share of the target in items.
    num_parts = num_items if adds else min(num_items, 2 * target)
    num_merged = most_tiles if adds else min(most_tiles, target)
    return RowsPlan(config, True, target, split_tiles, num_items, num_parts, num_merged)
