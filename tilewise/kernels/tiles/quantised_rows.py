"""How products with weights of 8 and 4 bits are cut, and up to how many rows: pure tables.

Measured on an H200 (2026-11-29, torch 2.11, triton 3.6; lab/results/quantised_h200.json).
"""

from __future__ import annotations

from typing import NamedTuple

from tilewise.kernels.quantised_weight import LANES_BLOCK
from tilewise.kernels.tiles.linear_rows import SHARED

MOST_ROWS = 64
"""The most rows for which mma.sync of codes is faster than the values of parts and a product."""


class QuantisedTile(NamedTuple):
    """How a product of few rows with a weight of 8 or 4 bits is cut, by mma.sync on any NVIDIA GPU.

    Attributes:
        rows: rows of x of a CTA: 8, 16 or 32.
        tiles: tiles of 16 outputs of a warp: 1, 2 or 4.
        warps_n: warps of a CTA that have different outputs and share rows of x.
        warps_k: warps that have the same outputs and take the steps of K in turns.
        holds_inputs: True if rows of x are loaded two steps ahead as codes are; False if they are
            loaded when they are needed, which takes fewer registers.
    """

    rows: int
    tiles: int
    warps_n: int
    warps_k: int
    holds_inputs: bool = False


def tile_of(
    outputs: int, channels: int, rows: int, *, batch_invariant: bool = False
) -> QuantisedTile:
    """Choose the tile of a product with a quantised weight (outputs, channels) by mma.sync.

    The order of a row's sum depends on `warps_k` alone; with `batch_invariant` that follows from
    the shape of the weight and not from `rows`.
    """
    warps = 8 if channels >= 8192 else 4
    is_wide = outputs >= 16384
    if rows <= 8:
        return QuantisedTile(8, 2 if is_wide else 1, 1, warps, not is_wide)
    if rows <= 16:
        if is_wide:
            return QuantisedTile(16, 4, 1, warps) if batch_invariant else QuantisedTile(16, 4, 2, 2)
        return QuantisedTile(16, 2 if outputs > 2048 else 1, 1, warps)
    if batch_invariant:
        return QuantisedTile(16, 4, 1, warps)
    if is_wide:
        return QuantisedTile(32, 2, 4, 1)
    return QuantisedTile(16, 4 if outputs > 2048 else 2, 1, 4)


class RingTile(NamedTuple):
    """How a product on Hopper with a quantised weight in the order of lanes is cut, for which WGMMA
    multiplies out of a ring of stages.

    Attributes:
        tile_n: outputs of a CTA: 64 or 128, 16 for each warp.
        parts: CTAs that share a tile of outputs, each with a part of the channels.
        ctas: the CTAs of a multiprocessor, among which its shared memory is divided.
        fetches: whether a CTA fetches its codes behind the first stages into L2 when it begins.
    """

    tile_n: int
    parts: int
    ctas: int
    fetches: bool = False


MOST_RING_ROWS = 512
"""The most rows for which a `RingTile` is chosen: more multiply values of parts."""
SMS = 132  # of an H200
_LEAST_BLOCKS = 4  # of a part
_MOST_PARTS = 8
_MOST_STAGES = 16
RING_ROWS = (8, 16, 32, 64, 128)
"""Rows of x of a CTA: those of a tile are padded to the next."""


def ring_tile_of(outputs: int, blocks: int, row_tiles: int = 1) -> RingTile:
    """Choose the tile and the number of parts of a product with a quantised weight.

    Args:
        outputs: the rows of the weight.
        blocks: the blocks of 64 bytes of codes in a row of the weight.
        row_tiles: the tiles into which rows of x are cut; 1 with batch invariance, since the parts
            decide the order of a row's sum.
    """
    tiles = -(-outputs // 128) * row_tiles
    return RingTile(128, max(1, min(SMS // tiles, blocks // _LEAST_BLOCKS, _MOST_PARTS)), 1)


def ring_stages(
    tile: RingTile | FewTile, rows: int, channels: int, code_bytes: int, needed: int
) -> int:
    """Return how many stages of the ring fit the shared memory of a CTA, at most `needed` and
    _MOST_STAGES. If fewer than three fit, as few CTAs of a multiprocessor are reckoned with as
    leave room.

    Args:
        channels: the channels of a row of x in a stage.
        code_bytes: the bytes of a row of codes in a stage.
        needed: the stages of a part.
    """
    for ctas in range(tile.ctas, 0, -1):
        # Beside the ring: barriers, and where sums are turned around.
        beside = 4096 + tile.tile_n * rows * 2
        room = SHARED // ctas - 1024 - beside
        fitting = room // (code_bytes * tile.tile_n + 2 * rows * channels)
        if fitting >= min(needed, 3):
            break
    return max(1, min(fitting, needed, _MOST_STAGES))


def ring_registers(tile: RingTile | FewTile, rows: int) -> tuple[int, int]:
    """Return (registers of each thread when a CTA begins, registers of a thread that
    multiplies)."""
    ctas = 1 if rows > 32 else tile.ctas
    multiply = 2 * tile.tile_n
    threads = multiply + 128  # the warp that copies has room for four
    at_start = min(65536 // (threads * ctas) // 8 * 8, 248)
    return at_start, min((at_start * threads - 24 * 128) // multiply // 8 * 8, 240)


class FewTile(NamedTuple):
    """The tile of a product of up to 16 rows on Hopper by weights with codes in the order of lanes.

    Attributes:
        parts: CTAs that share 64 outputs, each with a part of the input channels.
        ctas: the CTAs of a multiprocessor, among which its memory and registers are divided.
    """

    parts: int
    ctas: int

    @property
    def tile_n(self) -> int:
        """Outputs of a CTA."""
        return 64


FEW_ROWS = 16
"""The most rows of `FewTile`s."""


def few_tile_of(outputs: int, blocks: int) -> FewTile:
    """Choose the tile of a product of up to 16 rows with a weight of `outputs` rows of `blocks`
    times 64 bytes of codes; the number of rows of x does not matter."""
    tiles = -(-outputs // 64)
    parts = min(4 * SMS // tiles, blocks // _LEAST_BLOCKS, _MOST_PARTS)
    return FewTile(max(1, parts), 4)


class StreamTile(NamedTuple):
    """How a product of up to 16 rows on Hopper is cut where codes in the order of lanes stream past
    rows of x in registers.

    Attributes:
        warps: warps of a CTA, which share the channels: 4, 8 or 16.
        blocks: blocks of 64 bytes of a row of codes that a warp has in a pass: 1 or 2.
    """

    warps: int
    blocks: int

    @property
    def ctas(self) -> int:
        """CTAs of a multiprocessor, among which its memory and registers are divided."""
        return 16 // self.warps


# The four products of a layer of Qwen3-0.6B take 11.4 us in int4 at one row, in a ring 21.3; of
# Llama-3-8B 4,096 -> 4,096 6.5 and 7.5, -> 28,672 24.6 and 26.1, at 16 rows 32 and 28 (H200,
# 2026-11-30, lab/results/quantised_h200.json).
_STREAM_BYTES = 16 << 20  # codes of a weight: a `FewTile` reads more of them faster
_STREAM_BLOCKS = 64  # of a row: four passes, or eight where a warp has one block in a pass
_STREAM_STAGES = 6


def stream_tile_of(outputs: int, blocks: int, rows: int) -> StreamTile | None:
    """Choose the tile of a product of up to 16 rows by the codes of a weight, `outputs` rows of
    `blocks` times 64 bytes, that stream; None if a `FewTile` is faster.

    One pass is chosen if 16 warps can hold all channels of the rows. A warp has one block in a
    pass, whatever the tile says, if blocks are odd in number or have four sums each.

    Args:
        rows: the rows of x.
    """
    if blocks > _STREAM_BLOCKS or outputs * blocks * LANES_BLOCK > _STREAM_BYTES:
        return None
    for each in (2,) if rows <= 8 else (1, 2):
        for warps in (4, 8, 16):
            if warps * each >= blocks:
                return StreamTile(warps, each)
    return StreamTile(8, 2)


def stream_stages(
    tile: StreamTile, blocks: int, rows: int, channels: int, tiles: int, passes: int
) -> int:
    """Return how many tiles of 16 outputs a CTA copies ahead: as many as fit its shared memory, at
    most _STREAM_STAGES and all.

    Args:
        blocks: the blocks that a warp has in a pass: those of the tile, or 1.
        rows: the rows of x, padded.
        channels: the channels of a warp in a pass.
        tiles: the tiles of a CTA.
        passes: the passes over them.
    """
    sums = 4 * 16 * rows  # bytes of the sums of a tile
    beside = 1024 + tile.warps * (2 * rows * channels + sums)
    beside += sums * tiles if passes > 1 else 0
    room = SHARED // tile.ctas - 1024 - beside
    return max(1, min(room // (1024 * tile.warps * blocks), _STREAM_STAGES, tiles * passes))
