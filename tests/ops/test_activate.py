"""activate: torch's activations, whose bits do not depend on where an element lies."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.testing import assert_within_budget

EAGER = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "softplus": functools.partial(F.softplus, threshold=80.0),
    "exp": torch.exp,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
on_each_function = pytest.mark.parametrize("function", EAGER)
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@on_each_function
@on_each_dtype
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_every_function_keeps_the_budget(spread, backend, dtype, function):
    x = (spread * torch.randn(7, 999)).to(dtype)
    x = x.clamp(max=11) if function == "exp" else x  # the largest of float16 is exp(11.09)
    y = ops.activate(x, function, backend=backend)
    truth = EAGER[function](x.double())
    assert y.dtype == dtype
    assert_within_budget(y, truth, EAGER[function](x), name=function)


@on_each_function
def test_far_from_zero_nothing_cancels(function):
    """torch's gelu adds 1 to what is nearly -1; its float32 has no digit left at -5."""
    x = torch.linspace(-9.0, 9.0, 4001)
    truth = ops.activate(x.double(), function, backend="reference")
    y = ops.activate(x, function)
    seen = truth.abs() > 1e-30
    off = ((y.double() - truth) / truth)[seen].abs()
    assert off.max() < 1e-5
    torch.testing.assert_close(truth, EAGER[function](x.double()), rtol=1e-12, atol=1e-14)


@on_each_function
@on_each_dtype
def test_an_element_has_the_same_bits_wherever_it_lies(function, dtype):
    base = (3 * torch.randn(90)).to(dtype)
    alone = torch.cat([ops.activate(x.view(1), function) for x in base])
    for width in range(1, 71):
        for first in {0, 7, 90 - width}:
            row, wanted = base[first : first + width], alone[first : first + width]
            for rows in (1, 3):
                x = row.expand(rows, width).contiguous()
                assert torch.equal(ops.activate(x, function), wanted.expand(rows, width))
            apart = torch.stack([row, row]).expand(3, 2, width).contiguous()[:, 1]
            assert torch.equal(ops.activate(apart, function), wanted.expand(3, width))


@on_each_function
def test_many_elements_on_any_number_of_threads(function):
    x = torch.randn(401, 997)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results += [ops.activate(x, function), ops.activate(x[:, 3:], function)]
    finally:
        torch.set_num_threads(before)
    for result in results:
        assert torch.equal(result[:, -900:], results[0][:, -900:])
    assert_within_budget(results[0], EAGER[function](x.double()), EAGER[function](x))


@on_each_function
def test_the_edges_are_those_of_the_formula(function):
    """torch's gelu makes NaN of infinity and infinity of 3e38 on a CPU with AVX-512."""
    x = torch.tensor([math.inf, -math.inf, math.nan, -200.0, 200.0, 0.0, -0.0, 1e20, -1e20, 3e38])
    y, truth = ops.activate(x, function), ops.activate(x, function, backend="reference")
    torch.testing.assert_close(y, truth, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_shapes_and_strides():
    x = torch.randn(3, 4, 10)
    for part in (x[:, 1, :5], x.transpose(0, 1), x[:0], x[0, 0], x[..., :0]):
        y = ops.activate(part, "gelu")
        assert y.is_contiguous()
        assert y.shape == part.shape
        torch.testing.assert_close(y, F.gelu(part), rtol=1e-5, atol=1e-6)
    torch.library.opcheck(torch.ops.tilewise.activate.default, (x, "silu", None))


REFUSALS = {
    "integers": (lambda x: ops.activate(x.int(), "silu"), TypeError, "x must be one of"),
    "a scalar": (lambda x: ops.activate(x[0, 0], "silu"), ValueError, r"x must be \(\.\.\., E\)"),
    "columns": (lambda x: ops.activate(x.T, "silu"), ValueError, "x must have stride 1"),
    "a name": (lambda x: ops.activate(x, "swish"), ValueError, "one of sigmoid, .*, got 'swish'"),
    "a backend": (lambda x: ops.activate(x, "silu", backend="mps"), ValueError, "one of"),
    "no kernel": (
        lambda x: ops.activate(x, "silu", backend="triton"), UnsupportedError, "has no kernel",
    ),
    "float64": (
        lambda x: ops.activate(x.double(), "silu"), UnsupportedError, "got torch.float64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name):
    call, error, message = REFUSALS[name]
    with pytest.raises(error, match=message):
        call(torch.randn(3, 10))
