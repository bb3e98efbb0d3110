"""rms_norm and add_rms_norm: what the separate operations give, on every backend."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.paged.test_api import BACKENDS
from tilewise import ops
from tilewise.kernels.plan import Maker
from tilewise.reference import norm as oracle
from tilewise.testing import assert_within_budget

on_each_backend = pytest.mark.parametrize(("backend", "place"), BACKENDS)
on_each_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
SHAPES = [(1, 64), (5, 33), (2, 3, 100), (1, 1), (3, 1024), (2, 5000), (7, 16)]
EPS = 1e-5


def _eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, None, EPS) * weight


def _rows(shape: tuple[int, ...], dtype: torch.dtype, place: str) -> tuple[Tensor, Tensor, Tensor]:
    x, residual = (3 * torch.randn(shape) for _ in range(2))
    weight = 1 + 0.3 * torch.randn(shape[-1])
    x, residual, weight = (t.to(place, dtype) for t in (x, residual, weight))
    return x, residual, weight


def _assert_rounded_alike(got: Tensor, wanted: Tensor) -> None:
    """Equal, but where float32 before the last rounding stood next to a boundary."""
    if got.dtype == torch.float32:
        return
    off = (got.view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
    assert int(off.max()) <= 2
    assert int(off.count_nonzero()) <= max(2, off.numel() // 500)


@on_each_backend
@on_each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_norm_of_a_sum_keeps_the_budget(shape, dtype, backend, place):
    x, residual, weight = _rows(shape, dtype, place)
    before = [t.clone() for t in (x, residual, weight)]
    y, total = ops.add_rms_norm(x, residual, weight, EPS, backend=backend)
    assert torch.equal(total, x + residual)
    wide = (x + residual).double()
    truth = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()
    eager = _eager_norm(x + residual, weight)
    assert y.dtype == dtype
    assert_within_budget(y, truth, eager, name="y")
    _assert_rounded_alike(y, eager)
    _assert_rounded_alike(y, oracle.add_rms_norm(x, residual, weight, EPS)[0])
    alone = ops.rms_norm(total, weight, EPS, backend=backend)
    assert torch.equal(alone, y)
    assert all(torch.equal(a, b) for a, b in zip((x, residual, weight), before, strict=True))


@on_each_backend
@on_each_dtype
@pytest.mark.parametrize("count", [1, 2, 5])
def test_parts_are_added_in_their_order_and_rounded(count, dtype, backend, place):
    for shape in ((1, 64), (2, 3, 100), (0, 8)):
        _, residual, weight = _rows(shape, dtype, place)
        parts = torch.randn(count, *shape).to(place)
        x = parts[0]
        for part in parts[1:]:
            x = x + part
        wanted = ops.add_rms_norm(x.to(dtype), residual, weight, EPS, backend=backend)
        found = ops.add_parts_rms_norm(parts, residual, weight, EPS, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_parts_that_are_none_are_refused():
    residual, weight = torch.ones(3, 8), torch.ones(8)
    for parts, error, message in (
        (torch.ones(2, 3, 8).half(), TypeError, "parts must be float32"),
        (torch.ones(0, 3, 8), ValueError, "P at least 1"),
        (torch.ones(2, 4, 8), ValueError, "parts must have shape"),
        (torch.ones(3, 2, 8).transpose(0, 1), ValueError, "parts must be contiguous"),
    ):
        with pytest.raises(error, match=message):
            ops.add_parts_rms_norm(parts, residual, weight, EPS)


@on_each_backend
def test_rows_may_be_strided_and_there_may_be_none(backend, place):
    x, residual, weight = _rows((6, 3, 40), torch.float32, place)
    apart, other = x[::2, 1], residual.transpose(0, 1)[1, ::2]
    y, total = ops.add_rms_norm(apart, other, weight, EPS, backend=backend)
    assert y.is_contiguous()
    assert total.is_contiguous()
    assert torch.equal(total, apart + other)
    torch.testing.assert_close(y, _eager_norm(total, weight), rtol=1e-5, atol=1e-6)
    three = ops.rms_norm(x.transpose(0, 1), weight, EPS, backend=backend)
    torch.testing.assert_close(three, _eager_norm(x.transpose(0, 1), weight), rtol=1e-5, atol=1e-6)
    none = ops.add_rms_norm(x[:0], residual[:0], weight, EPS, backend=backend)
    assert [t.shape for t in none] == [(0, 3, 40)] * 2


@on_each_backend
@pytest.mark.parametrize("tokens", [1, 5])
def test_heads_are_read_where_a_projection_wrote_them(tokens, backend, place, monkeypatch):
    both, _, _ = _rows((tokens, 9, 40), torch.bfloat16, place)
    weight = torch.randn(40).to(place, torch.bfloat16)
    if backend == "triton":
        monkeypatch.setattr(Maker, "copy", None)
    for heads in (both[:, 1:6], both[:, 7:8], both.transpose(0, 1)):
        y = ops.rms_norm(heads, weight, EPS, backend=backend)
        assert y.is_contiguous()
        assert torch.equal(y, ops.rms_norm(heads.contiguous(), weight, EPS, backend=backend))
        rows = heads.reshape(-1, 40)
        flat = ops.rms_norm(rows, weight, EPS, backend=backend)
        assert torch.equal(y, flat.view(heads.shape))
        if backend != "cpu":
            y = ops.shifted_rms_norm(heads, weight, EPS, backend=backend)
            flat = ops.shifted_rms_norm(rows, weight, EPS, backend=backend)
            assert torch.equal(y, flat.view(heads.shape))


@on_each_backend
def test_heads_may_lie_more_than_2_31_elements_apart(backend, place):
    few, _, weight = _rows((2, 3, 40), torch.bfloat16, place)
    far = torch.empty(2**31 + 80, dtype=few.dtype, device=place)  # 4 GiB, hardly touched
    far = far.as_strided(few.shape, (40, 2**30, 1)).copy_(few)
    expected = ops.rms_norm(few, weight, EPS, backend=backend)
    assert torch.equal(ops.rms_norm(far, weight, EPS, backend=backend), expected)


@on_each_backend
def test_a_row_that_is_not_finite_spoils_no_other(backend, place):
    x, residual, weight = _rows((3, 48), torch.float32, place)
    x[1, 7] = math.nan
    y, _ = ops.add_rms_norm(x, residual, weight, EPS, backend=backend)
    assert bool(y[1].isnan().all())
    assert bool(y[::2].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_many_rows_on_any_number_of_threads(dtype):
    x, residual, weight = _rows((700, 512), dtype, "cpu")
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append([*ops.add_rms_norm(x, residual, weight, EPS)])
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    if dtype == torch.float64:
        torch.testing.assert_close(results[0][0], _eager_norm(x + residual, weight))


def test_they_are_clean_nodes_of_a_graph():
    x, residual, weight = _rows((3, 10), torch.float32, "cpu")
    torch.library.opcheck(torch.ops.tilewise.rms_norm.default, (x, weight, EPS, None))
    torch.library.opcheck(torch.ops.tilewise.add_rms_norm.default, (x, residual, weight, EPS, None))


REFUSALS = {
    "integers": (lambda x, w: ops.rms_norm(x.int(), w, EPS), "x must be one of"),
    "a scalar": (lambda x, w: ops.rms_norm(x[0, 0], w, EPS), r"x must be \(\.\.\., E\)"),
    "columns": (lambda x, w: ops.rms_norm(x.T, w[:3], EPS), "x must have stride 1"),
    "another dtype": (lambda x, w: ops.rms_norm(x, w.half(), EPS), "weight must have dtype"),
    "a short weight": (lambda x, w: ops.rms_norm(x, w[:5], EPS), "weight must have shape"),
    "a narrow residual": (
        lambda x, w: ops.add_rms_norm(x, x[:, :5], w, EPS), "residual must have shape",
    ),
    "a coarse residual": (
        lambda x, w: ops.add_rms_norm(x, x.half(), w, EPS), "residual must have dtype",
    ),
    "an unknown backend": (
        lambda x, w: ops.rms_norm(x, w, EPS, backend="mps"), "backend must be one of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name):
    call, message = REFUSALS[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call(torch.randn(3, 10), torch.ones(10))


@pytest.mark.parametrize(
    ("backend", "place"),
    [
        pytest.param("reference", "cpu", id="reference"),
        pytest.param("triton", "cpu", id="triton-interpreted"),
        pytest.param("triton", "cuda", id="triton", marks=pytest.mark.gpu),
    ],
)
@on_each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_norm_by_one_plus_its_weight_keeps_the_budget(shape, dtype, backend, place):
    x, residual, weight = _rows(shape, dtype, place)
    y, total = ops.add_shifted_rms_norm(x, residual, weight, EPS, backend=backend)
    assert torch.equal(total, x + residual)
    wide = total.double()
    truth = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * (1 + weight.double())
    eager = F.rms_norm(total.float(), weight.shape, 1 + weight.float(), EPS).to(dtype)
    assert y.dtype == dtype
    assert_within_budget(y, truth, eager, name="y")
    assert torch.equal(ops.shifted_rms_norm(total, weight, EPS, backend=backend), y)
    parts = torch.randn(3, *shape).to(place)
    wanted = ((parts[0] + parts[1]) + parts[2]).to(dtype)
    both = (
        ops.add_parts_shifted_rms_norm(parts, residual, weight, EPS, backend=backend),
        ops.add_shifted_rms_norm(wanted, residual, weight, EPS, backend=backend),
    )
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
