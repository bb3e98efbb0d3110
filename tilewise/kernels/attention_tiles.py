"""Tiles of dense and packed attention: which rows of a table may run a call.

The first row runs; the others are what `python -m tilewise.bench.tune` tries beside it.
"""

from __future__ import annotations

from typing import Literal

from tilewise.kernels.spec import AttentionSpec
from tilewise.kernels.tiles import TileConfig, padded_head_dim

__all__ = ["Part", "candidates"]


Part = Literal["fwd", "dkdv", "dq"]
_Table = dict[tuple[Part, int], tuple[TileConfig, ...]]

# Key: part, larger padded head dim. The first row runs, the others are what the tuner tries.
_HALF_SM90: _Table = {
    ("fwd", 64): (
        TileConfig(128, 128, 4, 3),
        TileConfig(128, 64, 4, 3),
        TileConfig(128, 128, 8, 3),
    ),
    ("fwd", 128): (
        TileConfig(128, 128, 8, 3),
        TileConfig(128, 64, 8, 3),
        TileConfig(128, 128, 8, 2),
    ),
    ("fwd", 256): (TileConfig(128, 64, 8, 2), TileConfig(128, 32, 8, 3)),
    ("dkdv", 64): (
        TileConfig(64, 128, 8, 3),
        TileConfig(128, 128, 8, 2),
        TileConfig(64, 128, 4, 3),
    ),
    ("dkdv", 128): (TileConfig(64, 128, 8, 2), TileConfig(64, 128, 8, 3), TileConfig(64, 64, 4, 2)),
    ("dkdv", 256): (TileConfig(64, 64, 8, 2), TileConfig(32, 64, 8, 2)),
    ("dq", 64): (TileConfig(128, 128, 8, 3), TileConfig(128, 64, 4, 3), TileConfig(128, 64, 8, 3)),
    ("dq", 128): (TileConfig(128, 64, 8, 3), TileConfig(128, 128, 8, 2), TileConfig(64, 64, 4, 3)),
    ("dq", 256): (TileConfig(64, 64, 8, 2), TileConfig(64, 32, 4, 2)),
}


def candidates(spec: AttentionSpec, part: Part, arch: int = 90) -> tuple[TileConfig, ...]:
    """Return the rows that may run `part` of a dense or packed call; the default is the first.

    Args:
        spec: the call; its head dims and dtype are looked at.
        part: "fwd", "dkdv" (dk and dv) or "dq".
        arch: compute capability, major * 10 + minor.
    """
    width = max(padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim), 64)
    return _HALF_SM90[part, width]
