"""Tile sizes as pure tables: (op, head dim, dtype, arch) -> TileConfig.

Shipped code never autotunes. Each row of a table names where it was measured: device, shape, date;
`tilewise bench tune` prints candidates, and a person commits them.
"""

from __future__ import annotations

from dataclasses import dataclass


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
