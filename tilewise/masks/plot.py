"""Draw the empty, partial and full tiles of a mask."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.masks.tile_map import EMPTY, FULL, Ints

COLOURS = {"empty": "#f2f2f2", "full": "#4e79a7", "partial": "#f28e2b"}
_GRID = 32  # largest number of tiles a side at which grid lines help
_LEAST_CELLS = 16  # smallest number of cells a side, however small the axes are


def draw(numbers: Ints, shape: tuple[int, ...], tile: tuple[int, int], ax: Any) -> Any:
    """Draw the tile numbers (R, C) of one sequence and head on matplotlib's `ax`, new axes if None,
    and return the axes; raise ImportError without matplotlib. `BlockMask.plot` has the rules."""
    try:
        from matplotlib import pyplot
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "BlockMask.plot needs matplotlib: pip install 'tilewise[plot]'"
        ) from error
    if ax is None:
        _, ax = pyplot.subplots(layout="constrained")
    box = ax.get_window_extent()
    over_q, over_k = (
        max(1, -(-count // max(int(pixels), _LEAST_CELLS)))
        for count, pixels in zip(numbers.shape, (box.height, box.width), strict=True)
    )
    cells = _pooled(numbers, over_q, over_k)
    reach_q, reach_k = cells.shape[0] * over_q * tile[0], cells.shape[1] * over_k * tile[1]
    if cells.size:
        ax.imshow(
            cells,
            cmap=ListedColormap(list(COLOURS.values())),
            vmin=-0.5,
            vmax=2.5,
            interpolation="nearest",
            extent=(0, reach_k, reach_q, 0),
        )
    ax.set(xlim=(0, max(shape[3], 1)), ylim=(max(shape[2], 1), 0), xlabel="key", ylabel="query")
    if max(numbers.shape) <= _GRID:
        ax.hlines(np.arange(1, numbers.shape[0]) * tile[0], 0, shape[3], "white", linewidth=0.8)
        ax.vlines(np.arange(1, numbers.shape[1]) * tile[1], 0, shape[2], "white", linewidth=0.8)
    patches = [
        Patch(facecolor=colour, edgecolor="0.6", label=kind) for kind, colour in COLOURS.items()
    ]
    ax.legend(handles=patches, loc="upper left", bbox_to_anchor=(0, -0.12), ncols=3, frameon=False)
    return ax


def _pooled(numbers: Ints, over_q: int, over_k: int) -> Ints:
    """Return the kinds (0 empty, 1 full, 2 partial) of cells of over_q x over_k tiles, by
    maximum."""
    kinds = np.where(numbers == EMPTY, 0, np.where(numbers == FULL, 1, 2)).astype(np.int32)
    rows, columns = (-(-n // over) for n, over in zip(kinds.shape, (over_q, over_k), strict=True))
    padded = np.zeros((rows * over_q, columns * over_k), np.int32)
    padded[: kinds.shape[0], : kinds.shape[1]] = kinds
    pooled: Ints = padded.reshape(rows, over_q, columns, over_k).max((1, 3))
    return pooled
