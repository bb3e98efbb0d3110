"""How the products of a mixture of experts are cut: pure tables.

Measured on an H200 (2026-11-29, torch 2.11, triton 3.6; lab/results/experts_h200.json): a layer's
choice and both products, microseconds, and the share of the read of the experts that are hit.

    rows     Qwen3-30B-A3B, bfloat16     gpt-oss-20b, MXFP4
       1        29     58 %                77    15 %
      32       254     93 %               421    22 %
     256       307     88 %               332    29 %
   4,096       765     35 %, 41 % of 990 TFLOP/s; torch's grouped_mm 1,516
"""

from __future__ import annotations

from typing import NamedTuple

RANKED = 16384
"""Numbers in the table, of choices by experts, in which a program ranks choices: 64 a thread of
eight warps."""

COUNTED_CHOICES, CHUNK = 4096, 1024
"""The most choices that each program counts itself, and how many at once."""


class ExpertTile(NamedTuple):
    """How a product by experts is cut.

    Attributes:
        tile_m: rows of one expert.
        tile_n: the outputs of a tile.
        tile_k: channels of a step.
        num_warps, num_stages: as Triton takes them.
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
    """Choose the tile of both products.

    Args:
        assignments: rows in all, tokens times the experts of each.
        num_experts: among which they are.
        itemsize: bytes of a row's element.
        packed: True if weights are MXFP4.
        batch_invariant: one tile, whatever the number of rows.
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
    """Return how many tiles of rows there are at most, however rows fall to experts."""
    hit = min(num_experts, assignments)
    return hit + (assignments - hit) // tile_m
