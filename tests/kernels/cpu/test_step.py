"""Packed weights and products with them: layout, numerics, bits, NaN, and CPUs with less."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch
import torch.nn.functional as F

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.step.panels import interleave, pack, rows_of, unpack
from tilewise.ops.panels import multiply, why_not_pack
from tilewise.testing import assert_within_budget

pytestmark = pytest.mark.skipif(
    why_not_pack(torch.empty(2, 2)) is not None, reason="needs an x86 CPU"
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
SHAPES = pytest.mark.parametrize("shape", [(1, 1), (64, 32), (65, 33), (200, 100)], ids=str)


@DTYPES
@SHAPES
def test_a_weight_comes_back_out_of_its_panels(dtype, shape):
    weight = torch.randn(shape).to(dtype)
    panels = pack(weight)
    assert torch.equal(unpack(panels), weight)
    chosen = torch.randint(0, shape[0], (2, 5))
    assert torch.equal(rows_of(panels, chosen), weight[chosen])


@DTYPES
@SHAPES
@pytest.mark.parametrize("rows", [1, 2, 8, 17, 33, 100])
def test_products_are_within_the_budget_of_float64(dtype, shape, rows):
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    x = torch.randn(rows, shape[1]).to(dtype)
    exact = F.linear(x.double(), weight.double(), bias.double())
    eager = F.linear(x, weight, bias)
    held = float((x.double().abs() @ weight.double().abs().T).max())
    assert_within_budget(multiply(x, pack(weight, bias)), exact, eager, scale=held)


@DTYPES
def test_a_rows_bits_depend_on_no_other_row(dtype):
    weight, x = torch.randn(96, 200).to(dtype), torch.randn(70, 200).to(dtype)
    panels = pack(weight)
    alone = torch.cat([multiply(row[None], panels) for row in x])
    for rows in (2, 5, 16, 17, 32, 33, 70):
        assert torch.equal(multiply(x[:rows], panels), alone[:rows])


@DTYPES
def test_what_is_not_finite_stays_in_its_row(dtype):
    weight, x = torch.randn(96, 48).to(dtype), torch.randn(9, 48).to(dtype)
    panels = pack(weight)
    clean = multiply(x, panels)
    x[4, 7], x[6, 0] = float("nan"), float("inf")
    y = multiply(x, panels)
    others = [row for row in range(9) if row not in (4, 6)]
    assert torch.equal(y[others], clean[others])
    assert not y[4].isfinite().any()
    assert not y[6].isfinite().any()


def test_products_of_more_rows_than_fit_a_chunk():
    weight, x = torch.randn(70, 4096).bfloat16(), torch.randn(300, 4096).bfloat16()
    exact = x.double() @ weight.double().T
    assert_within_budget(multiply(x, pack(weight)), exact, F.linear(x, weight))


def test_gate_and_up_lie_in_turns_of_sixteen():
    weight = torch.arange(2.0 * 20).view(40, 1)
    mixed, bias = interleave(weight, weight[:, 0])
    expected = torch.zeros(2, 2, 16)
    expected[0, 0], expected[0, 1] = torch.arange(16.0), torch.arange(20.0, 36.0)
    expected[1, 0, :4], expected[1, 1, :4] = torch.arange(16.0, 20.0), torch.arange(36.0, 40.0)
    assert torch.equal(mixed.view(2, 2, 16), expected)
    assert torch.equal(bias, mixed[:, 0])


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.empty(2, 2, dtype=torch.float64), "dtype must be"),
        (torch.empty(0, 2), "must be a matrix with elements"),
        (torch.empty(2), "must be a matrix with elements"),
        (torch.empty(2, 2, device="meta"), "device must be cpu"),
    ],
    ids=["float64", "empty", "vector", "elsewhere"],
)
def test_a_refusal_says_why(weight, words):
    assert words in why_not_pack(weight)


def resident() -> int:
    """Bytes of main memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_memory_does_not_grow_with_the_numbers_of_rows():
    panels = pack(torch.randn(64, 64).bfloat16())
    x = torch.randn(2048, 64).bfloat16()
    for rows in (1, 2048):
        multiply(x[:rows], panels)
    before = resident()
    for rows in range(1, 2049):
        multiply(x[:rows], panels)
    assert resident() <= 1.02 * before


# What LLVM would be told of other CPUs is put in place before any kernel is made.
OTHER_CPU = """
import torch
from tilewise.kernels.cpu.machine import simd
simd.HAS_TILES = False
if {registers} == 16:
    simd.HAS_BF16_DOT, simd.REGISTER_BYTES, simd.NUM_REGISTERS = False, 32, 16
from tilewise.ops.panels import multiply, pack, pack_int8, unpack
from tilewise.testing import assert_within_budget
for dtype in ({dtypes}):
    weight, x = torch.randn(80, 104).to(dtype), torch.randn(37, 104).to(dtype)
    bytes_ = pack_int8(weight)[0]
    stood = unpack(pack_int8(weight.float())[0])
    for panels, w in ((pack(weight), weight), (bytes_, stood)):
        y = multiply(x, panels)
        assert_within_budget(y, x.double() @ w.double().T, x @ w.to(dtype).T)
        for rows in (1, 3, 6):
            assert torch.equal(multiply(x[:rows], panels), y[:rows])
"""


@pytest.mark.skipif(
    any((numba.config.CPU_NAME, numba.config.CPU_FEATURES)), reason="is told of another CPU itself"
)
@pytest.mark.parametrize(
    ("registers", "dtypes"),
    [(32, "torch.bfloat16,"), (16, "torch.bfloat16, torch.float16")],
    ids=["no tiles", "AVX2"],
)
def test_cpus_with_less_compute_the_same_function(registers, dtypes, tmp_path):
    if registers == simd.NUM_REGISTERS and not simd.HAS_TILES:
        pytest.skip("this CPU has no more: it runs all rows so")
    code = OTHER_CPU.format(registers=registers, dtypes=dtypes)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
