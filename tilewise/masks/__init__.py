"""Masks as data: build a BlockMask once, combine it with & | ~, give it to `attention(mask=)`.

    mask = masks.causal(4096) & masks.document([1000, 3000, 96])
    o = tilewise.attention(q, k, v, mask=mask)

docs/guide/masks.md shows every builder and recipes.
"""

from tilewise.masks.analytic import (
    causal,
    from_distance,
    global_local,
    prefix_lm,
    strided,
    window,
)
from tilewise.masks.block_mask import BlockMask, TileCounts, TileLists
from tilewise.masks.build import block_sparse, cat, dense, from_predicate
from tilewise.masks.documents import document
from tilewise.masks.of_flex import from_flex
from tilewise.masks.tile_map import EMPTY, FULL, TILES

__all__ = [
    "EMPTY",
    "FULL",
    "TILES",
    "BlockMask",
    "TileCounts",
    "TileLists",
    "block_sparse",
    "cat",
    "causal",
    "dense",
    "document",
    "from_distance",
    "from_flex",
    "from_predicate",
    "global_local",
    "prefix_lm",
    "strided",
    "window",
]
