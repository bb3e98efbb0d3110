"""The repaired interpreter computes in bfloat16 as hardware does."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from tests.kernels import interpreter  # noqa: E402
from tilewise.kernels.device import interpreting  # noqa: E402

pytestmark = pytest.mark.skipif(not interpreting(), reason="kernels are compiled here")


@triton.jit
def _arithmetic(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    cols = tl.arange(0, N)
    x, y = tl.load(x_ptr + cols), tl.load(y_ptr + cols)
    tl.store(out_ptr + cols, x * y + x)
    tl.store(out_ptr + N + cols, tl.where(x > y, x, -y))
    tl.store(out_ptr + 2 * N + cols, (x.to(tl.float32) * 1.00390625).to(tl.bfloat16))


@triton.jit
def _product(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    cells = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + cells, tl.dot(tl.load(x_ptr + cells), tl.load(y_ptr + cells)))


@triton.jit
def _doubled_sum(x):
    return 2 * tl.sum(x, 0)


@triton.jit
def _sums(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr, _doubled_sum(tl.load(x_ptr + tl.arange(0, N))))


def test_a_launch_leaves_the_language_as_it_was() -> None:
    """Device functions of other modules too, which see the language under another name."""
    before = [dict(vars(module)) for module in (tl, tl.core, tl.math, tl.tensor)]
    out = torch.empty(1)
    _sums[(1,)](torch.arange(8.0), out, N=8)
    assert out.item() == 56
    for module, names in zip((tl, tl.core, tl.math, tl.tensor), before, strict=True):
        changed = [name for name in names if vars(module)[name] is not names[name]]
        assert not changed, module


def test_bfloat16_arithmetic_matches_torch_bit_for_bit() -> None:
    x, y = torch.randn(2, 64).bfloat16()
    out = torch.empty(3, 64, dtype=torch.bfloat16)
    _arithmetic[(1,)](x, y, out, N=64)
    assert torch.equal(out[0], x * y + x)
    assert torch.equal(out[1], torch.where(x > y, x, -y))
    assert torch.equal(out[2], (x.float() * 1.00390625).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_product_of_half_tiles_is_summed_in_float32(dtype: torch.dtype) -> None:
    x, y = torch.randn(2, 32, 32).to(dtype)
    out = torch.empty(32, 32)
    _product[(1,)](x, y, out, N=32)
    torch.testing.assert_close(out, x.float() @ y.float(), rtol=1e-6, atol=1e-5)


def test_narrowing_rounds_to_nearest_even_and_keeps_nan_and_inf() -> None:
    values = torch.cat(
        [
            torch.randn(1000) * 1e3,
            torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.00390625]),
        ]
    )
    narrowed = torch.from_numpy(interpreter.widen(interpreter.narrow(values.numpy())))
    torch.testing.assert_close(narrowed, values.bfloat16().float(), rtol=0, atol=0, equal_nan=True)
