"""Rows of a wide grid that together show every pair of values: what an everyday run keeps of it.

Most mistakes show by one value, or by two that meet. Rows that matter by themselves are given
beside these, and all the others run with the slow tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable
from itertools import combinations, product


def covering(
    *axes: Collection[Hashable], where: Callable[..., bool] = lambda *row: True
) -> list[tuple[Hashable, ...]]:
    """Return few rows of a grid, in its order, that show all pairs which its rows show.

    The row is taken next that shows most pairs not yet seen, of several the one whose pairs were
    seen least, of these the first: the same axes give the same rows.

    Args:
        axes: the values of each axis, all different.
        where: says of a row whether the grid has it.
    """
    grid = [row for row in product(*axes) if where(*row)]
    pairs_of = {row: set(combinations(enumerate(row), 2)) for row in grid}
    seen: Counter[object] = Counter()
    num_missing = len(set().union(*pairs_of.values()))
    taken = set()

    def worth(row: tuple[Hashable, ...]) -> tuple[int, int]:
        counts = [seen[pair] for pair in pairs_of[row]]
        return counts.count(0), -sum(counts)

    while len(seen) < num_missing:
        row = max(grid, key=worth)
        taken.add(row)
        seen.update(pairs_of[row])
    return [row for row in grid if row in taken]
