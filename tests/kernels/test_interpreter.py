"""The repaired interpreter computes in bfloat16 as hardware does."""

from __future__ import annotations

import numpy as np
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
def _round_to_e4m3(x_ptr, out_ptr, N: tl.constexpr):
    cols = tl.arange(0, N)
    code = tl.load(x_ptr + cols).to(tl.float8e4nv)
    tl.store(out_ptr + cols, code.to(tl.uint8, bitcast=True))


def test_e4m3_is_rounded_to_nearest_even_and_saturates() -> None:
    x = torch.cat([torch.randn(1020) * 50, torch.tensor([31.5, 1e4, -1e4, 1e-9])])
    out = torch.empty(1024, dtype=torch.uint8)
    _round_to_e4m3[(1,)](x, out, N=1024)
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(out, want.view(torch.uint8))


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


@triton.jit
def _copy(x_ptr, out_ptr, N: tl.constexpr, AWAITS: tl.constexpr):
    cols = tl.arange(0, N)
    tl.store(out_ptr + cols, tl.load(x_ptr + cols, volatile=AWAITS))


@pytest.mark.parametrize("awaits", [True, False])
def test_who_waits_for_a_word_leaves_the_core_to_who_writes_it(monkeypatch, awaits: bool) -> None:
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    out = torch.empty(8)
    _copy[(1,)](torch.arange(8.0), out, N=8, AWAITS=awaits)
    assert torch.equal(out, torch.arange(8.0))
    assert bool(slept) == awaits


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


def _operand(kind):
    """A tensor of the interpreter, or a number as it is."""
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    if not isinstance(kind, tuple):
        return kind
    dtype, shape = kind
    data = (np.arange(np.prod(shape, dtype=int)) + 1).reshape(shape or (1,))
    data = TensorHandle(data.astype(_get_np_dtype(dtype)), dtype)
    return tl.tensor(data, tl.block_type(dtype, list(shape)) if shape else dtype)


def _told(convert, kinds, rules):
    from triton.runtime.interpreter import interpreter_semantic

    try:
        found = convert(interpreter_semantic, *map(_operand, kinds), *rules)
    except Exception as error:
        return type(error)
    return [(str(x.type), x.handle.data.dtype, x.handle.data.tolist()) for x in found]


def test_operands_become_what_tritons_rules_make_of_them() -> None:
    """Those that go a shorter way: of one type and shape, and numbers beside them."""
    convert = tl.semantic.TritonSemantic.binary_op_type_checking_impl
    dtypes = (tl.int1, tl.int8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.float32, tl.float64)
    tensors = [(dtype, shape) for dtype in dtypes for shape in ((), (4,), (1, 4), (2, 4))]
    numbers = [True, 0, 3, -5, 2**31 - 1, 2**31, -(2**31) - 1, 2**40, 2**63, 0.0, 1.5, 1e-40, 1e300]
    changed = 0
    for rules in ((), (True, True), (False, False, True, True), (False, False, False, True)):
        for one in tensors:
            for other in (*tensors, *numbers):
                for kinds in ((one, other), (other, one)):
                    wanted = _told(convert.__wrapped__, kinds, rules)
                    assert _told(convert, kinds, rules) == wanted, (kinds, rules)
                    changed += isinstance(wanted, list)
    assert changed > 5000
