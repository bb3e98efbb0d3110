"""The rows of `covering` show every pair of the grid, and are few."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.covering import covering


def pairs(rows):
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


@pytest.mark.parametrize("sizes", [(2, 2, 2), (13, 5, 3), (4, 4, 4, 4), (3, 1), (2,) * 6], ids=str)
def test_every_pair_is_shown_by_few_rows(sizes):
    axes = [range(size) for size in sizes]
    rows, grid = covering(*axes), list(product(*axes))
    assert pairs(rows) == pairs(grid)
    assert [row for row in grid if row in rows] == rows  # each once, in the grid's order
    most = sorted(sizes)[-2:]
    assert most[0] * most[1] <= len(rows) <= 1.6 * most[0] * most[1] + 4


def test_a_row_that_the_grid_has_not_is_not_taken():
    def where(a, b, c):
        return a != b

    rows = covering("abc", "abc", "xy", where=where)
    assert all(where(*row) for row in rows)
    assert pairs(rows) == pairs(row for row in product("abc", "abc", "xy") if where(*row))
