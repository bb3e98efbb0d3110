"""Weights of 8 bits: numpy's definition of them, products beside float64, and bits.

CPUs with less are in test_step.py, where a process tries both kinds of weights.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tilewise.kernels.cpu.step.int8 import pack_int8, quantise
from tilewise.kernels.cpu.step.panels import pack
from tilewise.ops.panels import multiply, rows_of, unpack, why_not_pack
from tilewise.testing import assert_within_budget

pytestmark = pytest.mark.skipif(
    why_not_pack(torch.empty(2, 2)) is not None, reason="needs an x86 CPU"
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
SHAPES = pytest.mark.parametrize(
    "shape", [(1, 1), (64, 64), (65, 33), (130, 97), (70, 200)], ids=str
)


def by_numpy(weight):
    """Whole numbers and what they stand for, group by group, in float32 as numpy rounds it."""
    rows = weight.float().numpy()
    whole, stood = np.zeros(rows.shape, np.int8), np.zeros(rows.shape, np.float32)
    for n in range(rows.shape[0]):
        for first in range(0, rows.shape[1], 64):
            group = rows[n, first : first + 64]
            scale = np.float32(np.abs(group).max()) / np.float32(127)
            # 127 times that of the largest float32 would be rounded to infinity.
            scale = min(
                scale, np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))
            )
            if scale == 0:
                continue
            q = np.clip(np.rint(group / scale), -127, 127)
            whole[n, first : first + 64] = q
            stood[n, first : first + 64] = q.astype(np.float32) * scale
    return torch.from_numpy(whole), torch.from_numpy(stood)


def extreme(shape, dtype):
    """Groups that are zero, tiny and as large as the dtype holds, and rows of one number each."""
    weight = torch.randn(shape).to(dtype)
    weight[::3, :64] = 0
    weight[1::3, :64] = torch.finfo(dtype).smallest_normal * 2**10
    weight[2::3, 64:] = torch.finfo(dtype).max
    weight[-1] = -0.5
    return weight


@DTYPES
@SHAPES
@pytest.mark.parametrize("make", [lambda s, d: torch.randn(s).to(d), extreme], ids=["", "extreme"])
def test_panels_stand_for_what_the_definition_says(dtype, shape, make):
    weight = make(shape, dtype)
    whole, stood = by_numpy(weight)
    q, scale = quantise(weight)
    assert torch.equal(q, whole)
    assert scale.shape == (shape[0], -(-shape[1] // 64))
    panels, error = pack_int8(weight)
    assert panels.dtype == dtype
    assert torch.equal(unpack(panels), stood.to(dtype))
    chosen = torch.randint(0, shape[0], (2, 5))
    assert torch.equal(rows_of(panels, chosen), stood.to(dtype)[chosen])
    exact = weight.double()
    assert error == pytest.approx(float((stood - exact).norm() / exact.norm()), rel=1e-3)
    assert (stood - exact).abs().le(0.5001 * scale.repeat_interleave(64, 1)[:, : shape[1]]).all()


def test_the_error_of_many_normal_numbers():
    # A scale is 2.4 / 127 sigma in the mean of 64 numbers; uniform within a step: / sqrt(12).
    _, error = pack_int8(torch.randn(4200, 640))  # more rows than are quantised at once
    assert 0.005 < error < 0.0065


@DTYPES
@SHAPES
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 64])
def test_products_are_within_the_budget_of_float64(dtype, shape, rows):
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    weight[0] = 0
    x = torch.randn(rows, shape[1]).to(dtype)
    stood = by_numpy(weight)[1]
    exact = x.double() @ stood.double().T + bias.double()
    eager = x @ stood.to(dtype).T + bias
    held = float((x.double().abs() @ stood.double().abs().T).max())
    assert_within_budget(multiply(x, pack_int8(weight, bias)[0]), exact, eager, scale=held)


def test_products_of_more_rows_than_fit_a_chunk():
    weight, x = torch.randn(70, 4096).bfloat16(), torch.randn(300, 4096).bfloat16()
    stood = by_numpy(weight)[1]
    exact = x.double() @ stood.double().T
    assert_within_budget(multiply(x, pack_int8(weight)[0]), exact, x @ stood.bfloat16().T)


@DTYPES
def test_a_rows_bits_depend_on_neither_other_rows_nor_threads(dtype):
    weight, x = torch.randn(700, 200).to(dtype), torch.randn(70, 200).to(dtype)
    panels, _ = pack_int8(weight)
    alone = torch.cat([multiply(row[None], panels) for row in x])
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for rows in (2, 5, 16, 17, 32, 33, 70):
                assert torch.equal(multiply(x[:rows], panels), alone[:rows]), (threads, rows)
    finally:
        torch.set_num_threads(before)


@DTYPES
def test_what_is_not_finite_stays_in_its_row(dtype):
    weight, x = torch.randn(96, 72).to(dtype), torch.randn(40, 72).to(dtype)
    panels, _ = pack_int8(weight)
    clean = multiply(x, panels)
    x[4, 7], x[36, 0] = float("nan"), float("inf")
    y = multiply(x, panels)
    others = [row for row in range(40) if row not in (4, 36)]
    assert torch.equal(y[others], clean[others])
    assert not y[[4, 36]].isfinite().any()


def test_a_weight_takes_half_of_the_memory():
    weight = torch.randn(640, 1024).bfloat16()
    assert pack_int8(weight)[0].num_bytes == pytest.approx(pack(weight).num_bytes * 17 / 32)


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_what_is_not_finite_has_no_int8(bad):
    weight = torch.zeros(3, 70)
    weight[2, 69] = float(bad)
    with pytest.raises(ValueError, match="weight must be finite"):
        pack_int8(weight)
