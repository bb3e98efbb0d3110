"""The softmax between the matrix unit's products, on any CPU that multiplies pairs of bfloat16.

The unit is not needed: scores are given. What the whole forward pass makes of such logits is in
tests/ops/attention/test_huge_logits.py, which test_instruction_sets.py runs in tile registers.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from tilewise.kernels.cpu.attention import forward_softmax as softmax
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.visible import WORDS

pytestmark = pytest.mark.skipif(not simd.HAS_BF16_DOT, reason="needs VDPBF16PS")

SIDE, TILE = 32, 128
_LANES, _SLACK, _LOWEST = softmax.LANES, softmax.SLACK, softmax.LOWEST
_exponentiate, _raise = softmax.exponentiate_rows, softmax.raise_rows
_lower, _centre = softmax.lower_rows, softmax.centre_rows
_log_sum, _start = softmax.log_sum, softmax.start_at_sink


@njit(error_model="numpy")
def _raise_all(like, s, p, columns, factor, seen, word, m, raised, sums, si, acc, shifts, spare):
    for top in range(0, SIDE, _LANES):
        _raise(
            like, s, top * SIDE, p, top * TILE, TILE, columns, factor, seen, word + top * WORDS, m,
            raised, top, sums, si + top * 2 * _LANES, acc, top * _LANES, _LANES, _LANES, spare,
        )  # fmt: skip
    if _lower(like, m, 0, SIDE, shifts):
        _centre(like, s, 0, SIDE, m, raised, 0, shifts)


@njit(error_model="numpy")
def _weigh(scores, p, seen, sinks, scale, lse):
    """p, in bfloat16, and lse of 32 rows and 128 keys, as `attend_strips` goes about it."""
    like, factor = scores[:0], np.float32(scale * math.log2(math.e))
    m, raised = np.full(SIDE, _LOWEST, np.float32), np.full(SIDE, -np.inf, np.float32)
    sums, acc = np.zeros(4 * SIDE * _LANES, np.float32), np.zeros(SIDE * _LANES, np.float32)
    shifts, spare = np.empty(SIDE, np.float32), np.empty(_LANES * _LANES, np.float32)
    half, parity = SIDE * 2 * _LANES, 0
    for row in range(SIDE):
        if sinks[row] > -np.inf:
            m[row], raised[row], total = _start(like, sinks[row], scale)
            sums[2 * row * _LANES] = sums[(2 * row + 1) * _LANES] = total
    for word in range(TILE // SIDE):
        s = scores[word * SIDE * SIDE : (word + 1) * SIDE * SIDE]
        at = parity * half
        if _lower(like, m, 0, SIDE, shifts):
            _raise_all(like, s, p, word * SIDE, factor, seen, word, m, raised, sums, at, acc,
                       shifts, spare)  # fmt: skip
        for turn in range(2):
            largest = _exponentiate(
                like, s, 0, p, word * SIDE, TILE, SIDE, factor, shifts, 0, False, seen, word, sums,
                at, half - at, False, seen, 0,
            )  # fmt: skip
            if turn == 1 or simd.max_lanes(largest) <= _SLACK:
                break
            _raise_all(like, s, p, word * SIDE, factor, seen, word, m, raised, sums, at, acc,
                       shifts, spare)  # fmt: skip
        parity = 1 - parity
    for row in range(SIDE):
        total = simd.sum_lanes(simd.load(sums, parity * half + 2 * row * _LANES))
        lse[row] = _log_sum(like, m[row], raised[row], total, scale) if total != 0 else -np.inf
    return parity


def weigh(
    s: Tensor, visible: Tensor, scale: float = 1.0, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the softmax of 32 rows and 128 keys, by p as rounded, and lse."""
    sinks = torch.full((SIDE,), -math.inf) if sinks is None else sinks
    blocks = s.float().view(SIDE, TILE // SIDE, SIDE).transpose(0, 1).contiguous()
    bits = (visible.view(SIDE, TILE // SIDE, SIDE).long() << torch.arange(SIDE)).sum(-1)
    p, lse = np.zeros(SIDE * TILE, np.uint16), np.empty(SIDE, np.float32)
    seen = np.zeros(SIDE * WORDS, np.int32)
    seen.reshape(SIDE, WORDS)[:, : TILE // SIDE] = bits.numpy().astype(np.uint32).view(np.int32)
    _weigh(blocks.view(-1).numpy(), p, seen, sinks.numpy(), scale, lse)
    words = torch.from_numpy(p.view(np.int16)).view(torch.bfloat16).view(SIDE, TILE)
    return words.double(), torch.from_numpy(lse)


def check(s: Tensor, visible: Tensor, scale: float = 1.0, sinks: Tensor | None = None) -> None:
    p, lse = weigh(s, visible, scale, sinks)
    logits = (s.float().double() * scale).masked_fill(~visible, -math.inf)
    last = torch.full((SIDE,), -math.inf) if sinks is None else sinks
    all_logits = torch.cat([logits, last.double()[:, None]], -1)
    right, expected = all_logits.softmax(-1).nan_to_num(), all_logits.logsumexp(-1)
    assert (p[~visible] == 0).all()
    assert p.isfinite().all()
    # p is right but for one factor a row, which the sums carry, too.
    weights = right[:, :TILE]
    most = weights.argmax(-1, keepdim=True)
    relative = p / p.gather(1, most).clamp(min=1e-300) * weights.gather(1, most)
    has_keys = weights.sum(-1) > 1e-3
    assert (relative - weights)[has_keys].abs().max() < 1e-2
    assert (p.gather(1, most)[has_keys] > 0).all()
    torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-3)


ALL = torch.ones(SIDE, TILE, dtype=torch.bool)
CAUSAL = torch.ones(SIDE, TILE, dtype=torch.bool).tril(TILE - SIDE)


@pytest.mark.parametrize("size", [1.0, 1e4, 1e6, 1e9, 1e12, 1e20, 1e30, 1e38])
@pytest.mark.parametrize("visible", [ALL, CAUSAL], ids=["all", "causal"])
def test_of_scores_of_any_size(size: float, visible: Tensor) -> None:
    s = torch.randn(SIDE, TILE).clamp(-3, 3) * size
    check(s, visible)
    check(s, visible, scale=0.088)


@pytest.mark.parametrize("fill", [-1e4, -1e5, -1e10, -1e32, float(torch.finfo().min), 3e38])
def test_of_fills(fill: float) -> None:
    """On some keys: of earlier blocks, of later ones, and of other rows of a block."""
    for columns in (slice(0, 64), slice(70, 128), slice(20, 100)):
        s = torch.randn(SIDE, TILE)
        s[::3, columns] = fill
        check(s, ALL)
        check(s, CAUSAL)


@pytest.mark.parametrize("fill", [-1e10, -1e30, float(torch.finfo().min)])
def test_rows_of_one_number_are_level(fill: float) -> None:
    s = torch.randn(SIDE, TILE)
    s[4] = fill
    p, lse = weigh(s, CAUSAL)
    assert (p[4][CAUSAL[4]] == 1).all()
    assert lse[4] == torch.tensor(fill)


@pytest.mark.parametrize("sink", [-1e30, -1e6, 0.5, 1e6, 1e30])
def test_of_sinks(sink: float) -> None:
    sinks = torch.full((SIDE,), sink)
    sinks[::2] = -math.inf
    for size in (1.0, 1e5, 1e12):
        check(torch.randn(SIDE, TILE) * size, CAUSAL, sinks=sinks)
        check(torch.randn(SIDE, TILE) * size, CAUSAL, 0.1, sinks)


def test_bits_of_a_row_do_not_depend_on_far_neighbours() -> None:
    s = torch.randn(SIDE, TILE) * 4
    alone = weigh(s, CAUSAL)
    far = s.clone()
    far[1::2] *= 1e10
    found = weigh(far, CAUSAL)
    for x, y in zip(found, alone, strict=True):
        assert torch.equal(x[::2], y[::2])


def test_a_row_that_sees_nothing_and_a_nan() -> None:
    s = torch.randn(SIDE, TILE) * 1e9
    s[3, 7] = math.nan
    visible = ALL.clone()
    visible[5] = False
    p, lse = weigh(s, visible)
    assert (p[5] == 0).all()
    assert lse[5] == -math.inf
    assert p[3].isnan().any()
    assert p[[0, 1, 2, 4, 6]].isfinite().all()
