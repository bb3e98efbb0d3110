"""Products of one row: float64 on the same inputs, with every norm, activation and part."""

import pytest
import torch
import torch.nn.functional as F

from tests.ops.paged.test_api import BACKENDS
from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.testing import assert_within_budget

on_each_backend = pytest.mark.parametrize(
    ("backend", "place"), [("reference", "cpu"), *BACKENDS[1:]]
)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def _problem(width, outputs, dtype, place, parts=0):
    torch.manual_seed(0)
    x = torch.randn(*([parts] if parts else []), 1, width)
    residual, norm = torch.randn(1, width), torch.rand(width) + 0.5
    weight, bias = torch.randn(outputs, width) * width**-0.5, torch.randn(outputs)
    x = x.to(place) if parts else x.to(place, dtype)
    return x, *(t.to(place, dtype) for t in (residual, norm, weight, bias))


def _apart(x, residual, norm, weight, bias, *, is_gated, wide):
    """Return y of separate operations; those behind the norm in float64 if `wide`."""
    if x.dtype == torch.float32:
        total = x[0]
        for part in x[1:]:
            total = total + part
        x = total.to(residual.dtype)
    total = x + residual
    h = F.rms_norm(total, norm.shape, None, 1e-6) * norm
    if wide:
        h, weight, bias = h.double(), weight.double(), None if bias is None else bias.double()
    y = F.linear(h, weight, bias)
    if is_gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y, total


@on_each_backend
@DTYPES
@pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(
    ("width", "outputs", "parts", "has_bias"),
    [(64, 40, 0, False), (200, 34, 3, True), (1024, 16, 1, False), (1, 2, 2, True)],
)
def test_it_is_a_norm_a_product_and_an_activation(
    width, outputs, parts, has_bias, is_gated, dtype, backend, place
):
    *given, bias = _problem(width, outputs, dtype, place, parts)
    bias = bias if has_bias else None
    y, total = ops.add_rms_norm_linear(
        *given[:3], 1e-6, given[3], bias, is_gated=is_gated, backend=backend
    )
    plain, stream = _apart(*given, bias, is_gated=is_gated, wide=False)
    wide, _ = _apart(*given, bias, is_gated=is_gated, wide=True)
    assert torch.equal(total, stream)
    assert y.dtype == dtype
    assert_within_budget(y, wide, plain)


@on_each_backend
@DTYPES
@pytest.mark.parametrize(("channels", "outputs"), [(40, 9), (2048, 8), (2500, 3), (8, 1)])
def test_parts_add_up_to_the_product(channels, outputs, dtype, backend, place):
    x, _, _, weight, _ = _problem(channels, outputs, dtype, place)
    parts = ops.row_linear_parts(x, weight, backend=backend)
    wide = x.double() @ weight.double().T
    assert parts.dtype == torch.float32
    assert parts.shape[1:] == (1, outputs)
    assert len(parts) == (3 if channels == 2500 and backend == "triton" else 1)
    torch.testing.assert_close(parts.double().sum(0), wide, rtol=1e-5, atol=1e-5)


@on_each_backend
def test_rows_of_weights_may_lie_apart_and_there_may_be_none(backend, place):
    x, residual, norm, weight, _ = _problem(64, 20, torch.bfloat16, place)
    every_other = weight[::2]
    y, _ = ops.add_rms_norm_linear(x, residual, norm, 1e-6, every_other, backend=backend)
    same, _ = ops.add_rms_norm_linear(
        x, residual, norm, 1e-6, every_other.contiguous(), backend=backend
    )
    assert torch.equal(y, same)
    y, total = ops.add_rms_norm_linear(x, residual, norm, 1e-6, weight[:0], backend=backend)
    assert y.shape == (1, 0)
    assert total.shape == (1, 64)


def test_a_cpu_has_no_kernel_and_gains_nothing():
    x, residual, norm, weight, _ = _problem(64, 20, torch.bfloat16, "cpu")
    with pytest.raises(UnsupportedError, match="row_linear must run on triton or reference, got c"):
        ops.add_rms_norm_linear(x, residual, norm, 1e-6, weight, backend="cpu")
    assert not ops.row_linear_pays(weight)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"residual": (2, 64)}, ValueError, "residual must be one contiguous row"),
        ({"x": (1, 63)}, ValueError, "x must have shape"),
        ({"norm": (63,)}, ValueError, "norm_weight must"),
        ({"weight": (20, 63)}, ValueError, "weight must"),
        ({"weight": (21, 64)}, ValueError, "weight must have an even number of rows if is"),
        ({"bias": (19,)}, ValueError, "bias must"),
        ({"x": (0, 1, 64)}, ValueError, r"x must be \(P, \.\.\., E\) with P at least 1, got"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(change, error, sentence):
    shapes = {"x": (1, 64), "residual": (1, 64), "norm": (64,), "weight": (20, 64), "bias": (20,)}
    given = {name: torch.zeros(shape).bfloat16() for name, shape in (shapes | change).items()}
    if given["x"].dim() == 3:
        given["x"] = given["x"].float()
    weight = given["weight"]
    bias = given["bias"] if len(weight) == 20 else None
    with pytest.raises(error, match=sentence):
        ops.add_rms_norm_linear(
            given["x"], given["residual"], given["norm"], 1e-6, weight, bias, is_gated=True,
            backend="reference",
        )  # fmt: skip


@pytest.mark.parametrize("shape", [(64,), (1, 64), (1, 1, 64)], ids=str)
def test_float32_beside_a_float32_residual_is_a_row(shape):
    *given, bias = _problem(64, 20, torch.float32, "cpu")
    given[:2] = (x.view(shape) for x in given[:2])
    wide, narrow = (
        ops.add_rms_norm_linear(*each[:3], 1e-6, *each[3:], bias.to(each[0]), backend="reference")
        for each in ([x.double() for x in given], given)
    )
    assert narrow[0].shape == (*shape[:-1], 20)
    for mine, other in zip(narrow, wide, strict=True):
        torch.testing.assert_close(mine, other.float())


def test_a_row_of_many_channels_is_refused():
    wide = torch.zeros(1, 4096).bfloat16()
    with pytest.raises(ValueError, match="residual must have at most 2048 channels, got 4096"):
        ops.add_rms_norm_linear(wide, wide, wide[0], 1e-6, wide, backend="reference")


def test_fakes_have_the_shapes_of_results():
    x, residual, norm, weight, bias = _problem(64, 20, torch.bfloat16, "cpu", 2)
    for is_gated in (False, True):
        arguments = (x, residual, norm, 1e-6, weight, bias, is_gated, "reference")
        torch.library.opcheck(torch.ops.tilewise.add_rms_norm_linear.default, arguments)
    torch.library.opcheck(
        torch.ops.tilewise.row_linear_parts.default, (residual, weight, "reference")
    )
