"""The CPU's backward pass on long sequences and on each of its units: matrix and vector."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.cpu.test_attention import (
    CASES,
    Case,
    by_kernel,
    by_reference,
    cotangents,
    inputs_of,
    spec_of,
    wide,
)
from tilewise.kernels.cpu.attention import plan as cpu
from tilewise.kernels.cpu.machine import amx
from tilewise.kernels.cpu.machine.amx_tiles import PARTS, multiply_tiles
from tilewise.kernels.cpu.machine.rows import why_not_dtype
from tilewise.kernels.cpu.machine.threads import kernel
from tilewise.testing import accumulator_scales, assert_within_budget

needs_tiles = pytest.mark.skipif(not amx.HAS_AMX, reason="needs a CPU with AMX")
DTYPES = [dtype for dtype in PARTS if why_not_dtype(dtype) is None]

# More keys than a panel and more rows than a strip of `attention/backward_amx.py`, and wide heads.
LONG = {
    "causal": Case(seqlen_q=1100, seqlen_k=1100, heads=(2, 1), options={"causal": True}),
    "more keys": Case(seqlen_q=300, seqlen_k=1700, heads=(3, 3), dims=(64, 128)),
    "window": Case(seqlen_q=1300, seqlen_k=1300, options={"window": (150, 70)}),
    "dropped strips": Case(seqlen_q=1500, seqlen_k=600, options={"causal": True}),
    "lengths": Case(batch=2, seqlen_q=270, seqlen_k=900, seqlens_k=(520, 900)),
    "dims 576 and 512": Case(seqlen_q=140, seqlen_k=300, heads=(2, 1), dims=(576, 512)),
    "bias": Case(seqlen_q=520, seqlen_k=700, bias=(520, 1), options={"softcap": 4.0}),
}


def check(case: Case, dtype: torch.dtype) -> None:
    qkv, extra = inputs_of(case, dtype)
    do, dlse = cotangents(qkv)
    actual = by_kernel(qkv, do, dlse, spec_of(qkv, case.options, extra), extra)
    doubles = [tensor.double() for tensor in qkv]
    truth = by_reference(doubles, do.double(), dlse.double(), case.options, wide(extra))
    eager = by_reference(qkv, do, dlse, case.options, extra)
    scale = case.options.get("softmax_scale", case.dims[0] ** -0.5)
    scales = accumulator_scales(*qkv, do, abs(scale))
    ds = float((do.double().norm(dim=-1).max() * qkv[2].double().norm(dim=-1).max()).item())
    scales |= {"dbias": ds, "dsinks": ds * case.batch * case.seqlen_q}
    for key, value in actual.items():
        assert_within_budget(value, truth[key], eager[key], name=key, scale=scales[key])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", LONG)
def test_long_and_wide_calls_keep_the_budget(name: str, dtype: torch.dtype) -> None:
    check(LONG[name], dtype)


# Every day long calls in one dtype: how panels and strips are walked depends on none.
@needs_tiles
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            name,
            dtype,
            marks=[pytest.mark.slow] * (name in LONG and dtype is not torch.bfloat16),
            id=f"{name}-{str(dtype)[6:]}",
        )
        for name in [*CASES, *LONG]
        for dtype in DTYPES
    ],
)
def test_vector_units_keep_the_budget_where_the_matrix_unit_is_taken(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu.amx, "HAS_AMX", False)
    check({**CASES, **LONG}[name], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 30)}], ids=str)
def test_bits_of_many_chunks_repeat_on_any_number_of_threads(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    case = Case(seqlen_q=900, seqlen_k=1500, heads=(2, 1), options=options)
    qkv, extra = inputs_of(case, dtype)
    do, dlse = cotangents(qkv)
    spec = spec_of(qkv, options, extra)
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 5, 3):
            torch.set_num_threads(threads)
            runs.append(by_kernel(qkv, do, dlse, spec, extra))
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        assert all(torch.equal(run[key], runs[0][key]) for key in run)


@kernel
def _multiply(c, columns, a, b, rows, steps, parts, keeps, spare):
    amx.configure()
    multiply_tiles(c, 0, columns, rows, columns, a, 0, steps * 32, rows * steps * 32, b, 0,
                   2 * columns, 64, steps * 32 * columns, steps, parts, keeps, spare)  # fmt: skip
    amx.release()


def _parts_of(x: torch.Tensor, parts: int) -> torch.Tensor:
    found, rest = [], x.clone()
    for _ in range(parts):
        found.append(rest.bfloat16())
        rest = rest - found[-1].float()
    return torch.stack(found)


def _product_of_parts(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, parts: int, keeps: bool):
    """Return a b, or c + a b if `keeps`, as the matrix unit computes it."""
    (rows, columns), steps = c.shape, a.shape[1] // 32
    sums, spare = c.clone().view(-1).numpy(), np.empty(32 * 32, np.float32)
    a_rows = _parts_of(a, parts).view(-1).view(torch.uint16).numpy()
    b_words = _parts_of(b, parts).unflatten(1, (-1, 2)).transpose(2, 3).contiguous().view(-1)
    words = b_words.view(torch.uint16).numpy()
    _multiply(sums, columns, a_rows, words, rows, steps, parts, keeps, spare)
    return torch.from_numpy(sums).view(rows, columns).double()


@needs_tiles
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_product_of_parts_has_the_bits_of_its_operands(parts: int, keeps: bool) -> None:
    a, b = torch.randn(64, 96), torch.randn(96, 96)
    if parts < 3:
        kind = torch.bfloat16 if parts == 1 else torch.float16
        a, b = a.to(kind).float(), b.to(kind).float()
    start = torch.randn(64, 96)
    truth = a.double() @ b.double() + (start.double() if keeps else 0)
    error = (_product_of_parts(start, a, b, parts, keeps) - truth).abs().max()
    # float16's second parts multiply to 2^-18 of the product; the rest is rounding of float32.
    size = float((a.abs() @ b.abs()).max())
    assert error <= size * (2.0**-18 if parts == 2 else 2.0**-22)


@needs_tiles
def test_products_of_three_parts_round_a_large_sum_once() -> None:
    # Each of the six, added to the sum by itself, would round it: dv of many heads lost 4 bits so.
    a, b, start = torch.randn(64, 96), torch.randn(96, 96), 1000 * torch.randn(64, 96)
    truth = a.double() @ b.double() + start.double()
    error = (_product_of_parts(start, a, b, 3, True) - truth).abs()
    size = float((a.abs() @ b.abs()).max())
    assert bool((error <= truth.abs() * 2.0**-24 + size * 2.0**-22).all())
