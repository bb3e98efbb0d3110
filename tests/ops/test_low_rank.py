"""add_low_rank: float64 on the same inputs, mixed adapters, and the same bits beside any other."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.ops.paged.test_api import BACKENDS
from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.kernels.low_rank import TILE
from tilewise.testing import assert_within_budget

each = pytest.mark.parametrize(("backend", "place"), [("cpu", "cpu"), *BACKENDS[1:]])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def weights(dtype, place, *, channels=200, edges=(0, 80, 96, 130), rank=32, ranks=None):
    """Return random adapters in three slots, of several ranks in each part."""
    parts = len(edges) - 1
    if ranks is None:
        ranks = torch.tensor([[20, 16, 3], [0, 5, 32], [16, 0, 0]])[:, :parts]
    a = torch.randn(len(ranks), parts * rank, channels) / 8
    b = torch.randn(len(ranks), rank, edges[-1])
    for slot in range(len(ranks)):
        for part in range(parts):
            own = int(ranks[slot, part])
            a[slot, part * rank + own : (part + 1) * rank] = 0
            b[slot, own:, edges[part] : edges[part + 1]] = 0
    return ops.LowRank(
        a.to(place, dtype),
        b.to(place, dtype),
        (torch.rand(len(ranks), parts) + 0.5).to(place),
        ranks.to(place, torch.int32),
        torch.tensor(edges, dtype=torch.int32, device=place),
    )


def tiles(slots, place, more=0):
    """Return the tiles of rows, with so many tiles without rows behind them."""
    found, rows = ops.tile_rows(np.array(slots))
    found = np.concatenate([found, np.full(more, -1, np.int32)])
    rows = np.concatenate([rows, np.full((more, TILE), -1, np.int32)])
    return ops.RowTiles(torch.from_numpy(found).to(place), torch.from_numpy(rows).to(place))


def expected(y, x, own, slots):
    """Return y + scale (x A^T) B of each row, in the dtype of the tensors."""
    y, edges, rank = y.clone(), own.edges.tolist(), own.rank
    for row, slot in enumerate(slots):
        for part, (first, end) in enumerate(pairwise(edges)):
            if slot >= 0:
                h = x[row] @ own.a[slot, part * rank : (part + 1) * rank].to(x.dtype).T
                h = h * own.scale[slot, part].to(x.dtype)
                y[row, first:end] += h @ own.b[slot, :, first:end].to(x.dtype)
    return y


SLOTS = [0, 1, -1, 2, 0, 1, -1] + [0] * 17 + [2, 1, 0]


@each
@DTYPES
def test_each_row_gets_what_its_own_adapter_adds(dtype, backend, place):
    own, slots = weights(dtype, place), SLOTS
    x = torch.randn(len(slots), 200).to(place, dtype)
    y = torch.randn(len(slots), 130).to(place, dtype)
    found = y.clone()
    ops.add_low_rank(found, x, own, tiles(slots, place, more=2), backend=backend)
    wide = expected(y.double(), x.double(), own, slots)
    assert_within_budget(found, wide, expected(y, x, own, slots))
    alone = [row for row, slot in enumerate(slots) if slot < 0]
    assert torch.equal(found[alone], y[alone])


@each
def test_the_reference_agrees(backend, place):
    own = weights(torch.float32, place, channels=40, edges=(0, 33))
    x, y = torch.randn(5, 40).to(place), torch.zeros(5, 33).to(place)
    other = y.clone()
    ops.add_low_rank(y, x, own, tiles([0, 2, 1, 0, 2], place), backend=backend)
    ops.add_low_rank(other, x, own, tiles([0, 2, 1, 0, 2], place), backend="reference")
    torch.testing.assert_close(y, other)


@each
@DTYPES
def test_the_bits_of_a_row_do_not_depend_on_its_neighbours(dtype, backend, place):
    own = weights(dtype, place)
    x = torch.randn(len(SLOTS), 200).to(place, dtype)
    y = torch.randn(len(SLOTS), 130).to(place, dtype)
    if backend == "triton" and place == "cpu":  # the order of numpy's sums is its own
        for tensor in (x, own.a, own.b, own.scale):
            tensor.copy_((tensor * 4).round() / 4)
    together = y.clone()
    ops.add_low_rank(together, x, own, tiles(SLOTS, place), backend=backend)
    for row in (0, 1, 3, 20, 26):
        alone = y[row : row + 1].clone()
        ops.add_low_rank(alone, x[row : row + 1], own, tiles([SLOTS[row]], place), backend=backend)
        assert torch.equal(alone[0], together[row])


@each
def test_sums_of_parts_are_float32_beside_rows_of_16_bits(backend, place):
    own = weights(torch.bfloat16, place, channels=64, edges=(0, 48))
    x = torch.randn(3, 64).to(place, torch.bfloat16)
    y = torch.randn(3, 48, device=place)
    found = y.clone()
    ops.add_low_rank(found, x, own, tiles([2, -1, 0], place), backend=backend)
    wide = expected(y, x.float(), own, [2, -1, 0])
    torch.testing.assert_close(found, wide, rtol=2e-2, atol=2e-2)
    assert torch.equal(found[1], y[1])


@each
def test_ranks_to_512_and_many_channels(backend, place):
    ranks = torch.tensor([[512], [100]])
    own = weights(torch.float32, place, channels=2100, edges=(0, 40), rank=512, ranks=ranks)
    x, y = torch.randn(3, 2100).to(place) / 8, torch.zeros(3, 40).to(place)
    found = y.clone()
    ops.add_low_rank(found, x, own, tiles([1, 0, 1], place), backend=backend)
    wide = expected(y.double(), x.double(), own, [1, 0, 1])
    # A library may add 512 ranks in parts; the kernel adds them in one chain: 512 roundings.
    scale = 512**0.5 * float(wide.abs().max())
    assert_within_budget(found, wide, expected(y, x, own, [1, 0, 1]), scale=scale)


def test_no_row_and_no_tile_change_nothing():
    own = weights(torch.float32, "cpu")
    y = torch.randn(2, 130)
    before = y.clone()
    ops.add_low_rank(y, torch.randn(2, 200), own, tiles([-1, -1], "cpu"))
    ops.add_low_rank(y[:0], torch.randn(0, 200), own, tiles([], "cpu", more=1))
    assert torch.equal(y, before)


def test_tiles_hold_the_rows_of_one_slot_each():
    slots, rows = ops.tile_rows(np.array([3, -1, 0] + [3] * 20))
    assert slots.tolist() == [0, 3, 3]
    assert rows[0].tolist() == [2] + [-1] * 15
    assert sorted(rows[rows >= 0].tolist()) == [0, *range(2, 23)]
    assert (rows[2] >= 0).sum() == 5
    assert ops.most_tiles(23, 2) >= 3
    assert ops.most_tiles(1, 8) == 1
    assert ops.most_tiles(256, 32) == 46


WRONG = [
    ({"x": torch.zeros(2, 199)}, ValueError, r"x must be \(..., 200\)"),
    ({"y": torch.zeros(2, 130, dtype=torch.float64)}, TypeError, "y must be float32 or of x's"),
    ({"y": torch.zeros(2, 131)}, ValueError, "y must have shape"),
    ({"y": torch.zeros(130, 2).T}, ValueError, "y must be contiguous"),
    ({"x": torch.zeros(2, 200, dtype=torch.bfloat16)}, TypeError, "weights.a must"),
    ({"backend": "gluon"}, UnsupportedError, "it has no kernel for this op"),
]


@pytest.mark.parametrize(("more", "error", "message"), WRONG)
def test_wrong_arguments_are_named(more, error, message):
    given = {"y": torch.zeros(2, 130), "x": torch.zeros(2, 200), "backend": None} | more
    y, x, backend = given["y"], given["x"], given["backend"]
    with pytest.raises(error, match=message):
        ops.add_low_rank(y, x, weights(torch.float32, "cpu"), tiles([0, 1], "cpu"), backend=backend)
