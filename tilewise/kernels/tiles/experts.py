"""How the products of a mixture of experts are cut: pure tables.

Measured on an H200 (2026-11-29, torch 2.11, triton 3.6; lab/results/experts_h200.json): a layer's
choice and both products, microseconds, and the share of the read of the experts that are hit
(gpt-oss-20b at 32 and 256 rows on 2026-11-30).

    rows     Qwen3-30B-A3B, bfloat16   int4         e4m3         gpt-oss-20b, MXFP4; in blocks
       1        29     58 %          20   22 %     27   32 %     36   33 %        76   16 %
      32       259     91 %         103   60 %    167   71 %    163   56 %       422   22 %
     256       317     85 %         145   49 %    202   67 %    231   41 %       339   28 %
   4,096       891     30 %         777    9 %  1,021   13 %  1,742    5 %

"In blocks" is the portable kernel, which other GPUs run; the other narrow ones are `NarrowTile`s.
"""

from __future__ import annotations

from typing import NamedTuple

from tilewise.kernels.tiles.linear_rows import SHARED

RANKED = 16384
"""Numbers in the table, of choices by experts, in which a program ranks choices: 64 a thread of
eight warps."""

COUNTED_CHOICES, CHUNK = 4096, 1024
"""The most choices that each program counts itself, and how many at once."""


class ExpertTile(NamedTuple):
    """How a product of a mixture, of each expert's rows by its weight, is cut in Triton.

    Attributes:
        tile_m: rows of a tile, all of one expert.
        tile_n: the outputs of a tile.
        tile_k: channels of a step.
        num_warps, num_stages: warps of a program, and depth of Triton's pipeline over the channels.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int


# A step of a few tokens reads weights and hardly multiplies; a prompt's rows fill larger tiles.
_FEW = ExpertTile(16, 64, 128, 4, 4)
_SOME = ExpertTile(32, 128, 64, 4, 4)
_MANY = ExpertTile(128, 128, 64, 8, 3)
# Of packed weights a step has a quarter of the bytes, and unpacking them takes most of its time.
_FEW_PACKED = ExpertTile(16, 64, 128, 4, 4)
_SOME_PACKED = ExpertTile(64, 128, 64, 4, 4)
_WIDE = ExpertTile(16, 32, 32, 4, 2)  # of float32


def expert_tile(
    assignments: int,
    num_experts: int,
    itemsize: int,
    *,
    packed: bool = False,
    batch_invariant: bool = False,
) -> ExpertTile:
    """Choose the tile of both products of a mixture in Triton.

    Args:
        assignments: rows in all, tokens times the experts of each.
        num_experts: the experts among which the assignments are.
        itemsize: bytes of a row's element.
        packed: True if weights are MXFP4.
        batch_invariant: True for one tile, whatever the number of rows.
    """
    if itemsize > 2:
        return _WIDE
    if batch_invariant:
        return _SOME
    each = assignments / num_experts
    if each < 16:
        return _FEW_PACKED if packed else _FEW
    if each <= 64:
        return _SOME_PACKED if packed else _SOME
    return _MANY


def most_row_tiles(assignments: int, num_experts: int, tile_m: int) -> int:
    """Return the most tiles of rows that `assignments` rows can need, however they fall to experts:
    each tile has at most tile_m rows, of one expert."""
    hit = min(num_experts, assignments)
    return hit + (assignments - hit) // tile_m


_MOST_STAGES = 12  # of a ring


class NarrowTile(NamedTuple):
    """How products by experts are cut on Hopper, whose weights are of 8 or 4 bits.

    Attributes:
        rows: rows of a tile: 8 or 16 by mma.sync, 32, 64 or 128 by WGMMA.
        source: the rows of x that the tile of an expert reads: SORTED (those of the expert), TOKENS
            (all) or TOKEN (the only one), of `gluon.quantised.experts`.
        warpgroups: the warpgroups that multiply, each for 64 outputs: 1 up to 16 rows, else 2 or 4.
        parts: the parts of the channels of the second product, one of which an item takes.
        ctas: the CTAs of a multiprocessor, among which its memory and registers are divided.
    """

    rows: int
    source: int
    warpgroups: int
    parts: int
    ctas: int

    @property
    def is_few(self) -> bool:
        """Whether a tile has few rows, at most 16, for which mma.sync multiplies, not WGMMA."""
        return self.rows <= 16

    @property
    def registers(self) -> tuple[int, int]:
        """(Registers of a thread that multiplies, registers of each thread when a CTA begins)."""
        multiply = 128 * self.warpgroups
        threads = multiply + 128  # the warp that copies has room for four
        at_start = min(65536 // (threads * self.ctas) // 8 * 8, 248)
        return min((at_start * threads - 40 * 128) // multiply // 8 * 8, 240), at_start


_SORTED, _TOKENS, _TOKEN = 0, 1, 2  # see `gluon.quantised.experts`
_FEW_TOKENS = 8  # more are sorted, so that an expert multiplies its own


def narrow_tile(
    tokens: int, active: int, num_experts: int, *, batch_invariant: bool = False
) -> NarrowTile:
    """Choose the tile of both products of a mixture on Hopper, whose weights have 8 or 4 bits.

    Args:
        tokens, active, num_experts: the sizes of the call; each token has `active` experts.
        batch_invariant: True for sums of a row in one order, whatever the number of rows.
    """
    each = tokens * active / num_experts
    rows = next((size for size in (32, 64) if 1.5 * each <= size), 128)
    if batch_invariant:
        return NarrowTile(rows, _SORTED, 2, 1, 1)
    if tokens == 1:
        return NarrowTile(8, _TOKEN, 1, 2, 4)
    if tokens <= _FEW_TOKENS:
        return NarrowTile(8, _TOKENS, 1, 1, 4)
    if each <= 12:
        return NarrowTile(8 if each <= 5 else 16, _SORTED, 1, 1, 4)
    if rows == 64:
        return NarrowTile(64, _SORTED, 4, 1, 1)
    return NarrowTile(rows, _SORTED, 2, 1, 2 if rows == 32 else 1)


def narrow_stages(tile: NarrowTile, channels: int, code_bytes: int) -> int:
    """Return how many stages of the ring fit the shared memory of a CTA: 1 to _MOST_STAGES.

    Args:
        tile: the cut of the product.
        channels: the channels of a stage.
        code_bytes: the bytes of a row of codes in a stage.
    """
    # Beside the ring: barriers, and where results are turned around.
    beside = 4096 + tile.warpgroups * 64 * tile.rows * 2
    room = min(SHARED // tile.ctas, SHARED - 1024) - 1024 - beside
    stage = code_bytes * 64 * tile.warpgroups + 2 * tile.rows * channels
    return max(1, min(room // stage, _MOST_STAGES))
