"""gated_mul and silu_mul: what the two separate operations give, on every backend."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.paged.test_api import BACKENDS
from tests.ops.test_norm import _assert_rounded_alike
from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.kernels import early
from tilewise.kernels.plan import Maker
from tilewise.kernels.triton.step import activation
from tilewise.reference import norm as oracle
from tilewise.testing import assert_within_budget

on_each_backend = pytest.mark.parametrize(("backend", "place"), BACKENDS)
on_each_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
FUNCTIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
}
# Function and shape: each function, one channel, an odd row, three dims, several tiles, no rows.
CASES = [
    ("silu", (1, 2)), ("silu", (5, 66)), ("silu", (2, 3, 200)), ("silu", (3, 6144)),
    ("silu", (0, 8)), ("gelu", (1, 2)), ("gelu", (4, 6144)), ("gelu_tanh", (5, 66)),
    ("gelu_tanh", (3, 6144)), ("sigmoid", (5, 66)), ("sigmoid", (2, 3, 4096)),
]  # fmt: skip


def _truth(function: str, gate: Tensor, x: Tensor) -> Tensor:
    return ops.activate(gate.double(), function, backend="reference") * x.double()


@on_each_backend
@on_each_dtype
@pytest.mark.parametrize(("function", "shape"), CASES, ids=str)
def test_elements_times_a_function_of_a_gate_keep_the_budget(
    function, shape, dtype, backend, place
):
    both = (4 * torch.randn(shape)).to(place, dtype)
    y = ops.gated_mul(both, function=function, backend=backend)
    gate, x = both.chunk(2, -1)
    eager = FUNCTIONS[function](gate) * x
    assert (y.dtype, y.is_contiguous()) == (dtype, True)
    assert_within_budget(y, _truth(function, gate, x), eager)
    if not y.numel():
        return
    # Far below zero gelu of torch in float32 has lost most of its digits, on each device others.
    is_near = gate > (-1.0 if "gelu" in function else -math.inf)
    if is_near.any():
        _assert_rounded_alike(y[is_near], eager[is_near])
        _assert_rounded_alike(y[is_near], oracle.gated_mul(both, None, function)[is_near])
    if place == "cuda" and function != "gelu":  # torch's keeps digits there on a GPU
        _assert_rounded_alike(y, eager)
    if function == "silu":
        assert torch.equal(ops.silu_mul(both, backend=backend), y)


@on_each_backend
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gate_and_its_rows_may_lie_apart(dtype, function, backend, place, monkeypatch):
    """As a projection's: the gate's channels before others, x in rows of its own."""
    both = (3 * torch.randn(6, 3, 80)).to(place, dtype)
    wanted = ops.gated_mul(both, function=function, backend=backend)
    gate, x = both.chunk(2, -1)
    with monkeypatch.context() as patch:
        if backend == "triton":
            patch.setattr(Maker, "copy", None)
        for other in (x, x.contiguous()):
            y = ops.gated_mul(gate, other, function=function, backend=backend)
            assert torch.equal(y, wanted)
        y = ops.gated_mul(both[::2, 1], function=function, backend=backend)
        assert torch.equal(y, wanted[::2, 1])
    # Rows that no single stride reaches, and one row alone.
    y = ops.gated_mul(gate[1::2, :2], x[1::2, :2], function=function, backend=backend)
    assert torch.equal(y, wanted[1::2, :2])
    assert torch.equal(
        ops.gated_mul(gate[4, 2], x[4, 2], function=function, backend=backend), wanted[4, 2]
    )
    shifted = torch.empty(both.numel() + 1, dtype=dtype, device=place)[1:].view(both.shape)
    assert torch.equal(
        ops.gated_mul(shifted.copy_(both), function=function, backend=backend), wanted
    )


@on_each_backend
def test_rows_may_lie_more_than_2_31_elements_apart(backend, place):
    gate, x = torch.randn(2, 3, 40).to(place, torch.bfloat16)
    far = torch.empty(2**31 + 80, dtype=gate.dtype, device=place)  # 4 GiB, hardly touched
    far = far.as_strided(gate.shape, (2**30, 1)).copy_(gate)
    wanted = ops.gated_mul(gate, x, function="sigmoid", backend=backend)
    assert torch.equal(ops.gated_mul(far, x, function="sigmoid", backend=backend), wanted)
    wanted = ops.gated_mul(x, gate, function="sigmoid", backend=backend)
    assert torch.equal(ops.gated_mul(x, far, function="sigmoid", backend=backend), wanted)


@on_each_backend
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_edges_are_those_of_torch(function, backend, place):
    edges = [math.inf, -math.inf, math.nan, -200.0, 200.0, -90.0, 0.0, -0.0, 1e30, -1e30]
    gate = torch.tensor(edges)
    y = ops.gated_mul(gate.to(place), torch.ones_like(gate).to(place), function=function,
                      backend=backend).cpu()  # fmt: skip
    wanted = FUNCTIONS[function](gate)
    assert y[0] == (1.0 if function == "sigmoid" else math.inf)
    if "gelu" in function:  # at infinities torch gives numbers or NaN, by the device
        y, wanted = y[2:], wanted[2:]
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-30, equal_nan=True)
    assert torch.equal(y[-4:-2].signbit(), wanted[-4:-2].signbit())  # of both zeros


@on_each_backend
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_row_does_not_depend_on_others_nor_an_element_on_its_place(function, backend, place):
    both = (3 * torch.randn(9, 2 * 1100)).to(place, torch.bfloat16)
    y = ops.gated_mul(both, function=function, backend=backend)
    alone = torch.cat([ops.gated_mul(r, function=function, backend=backend) for r in both.split(1)])
    assert torch.equal(alone, y)
    gate, x = both.chunk(2, -1)
    for first, end in ((0, 1), (1, 34), (1023, 1100)):
        part = (t[:, first:end] for t in (gate, x))
        assert torch.equal(
            ops.gated_mul(*part, function=function, backend=backend), y[:, first:end]
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_many_rows_on_any_number_of_threads(dtype):
    both = torch.randn(700, 512).to(dtype)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append([ops.gated_mul(both, function=f) for f in ("silu", "gelu_tanh")])
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    if dtype == torch.float64:
        for function, y in zip(("silu", "gelu_tanh"), results[0], strict=True):
            wanted = FUNCTIONS[function](both[:, :256]) * both[:, 256:]
            torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-13)


def test_gelu_of_float64_is_not_computed_by_a_polynomial():
    with pytest.raises(UnsupportedError, match="function must not be gelu for float64"):
        ops.gated_mul(torch.randn(3, 8).double(), function="gelu")


def test_it_is_a_clean_node_of_a_graph():
    op, both = torch.ops.tilewise.gated_mul.default, torch.randn(3, 10)
    torch.library.opcheck(op, (both, None, "gelu_tanh", None))
    torch.library.opcheck(op, (both[:, :5], torch.randn(3, 5), "sigmoid", None))


@pytest.mark.parametrize("modes", [{}, {"activation": early.FIRST}, {"activation": early.AFTER}])
@pytest.mark.parametrize("has_both", [True, False])
def test_a_call_is_one_launch_whatever_the_function(modes, has_both, monkeypatch):
    """An output gate and a projection are read where they lie."""
    launched = []

    def note(maker, kernel, grid, *arguments, **options):
        launched.append((kernel, options["EARLY"], options.get("launch_pdl")))

    monkeypatch.setattr(Maker, "copy", None)
    gate = torch.randn(7, 256)[:, :128]
    for function in FUNCTIONS:
        with monkeypatch.context() as patch, early.launching(modes):
            patch.setattr("tilewise.kernels.host.plan.Maker.launch", note)
            both = torch.randn(7, 192)[:, 64:]
            given = (both, None) if has_both else (gate, both)
            activation.gated_mul.plan(*given, function)
    mode = modes.get("activation", early.OFF)
    assert launched == [(activation._gated_mul_kernel, mode, True if mode else None)] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [early.OFF, early.FIRST, early.AFTER])
def test_beginning_early_changes_no_bits(mode):
    gate, x = torch.randn(2, 64, 2048, device="cuda", dtype=torch.bfloat16)
    wanted = [ops.gated_mul(gate, x + 1, function=function) for function in FUNCTIONS]
    for _ in range(20):
        with early.launching({"activation": mode}):
            found = [ops.gated_mul(gate, x + 1, function=function) for function in FUNCTIONS]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


ROWS = torch.randn(3, 10)
REFUSALS = {
    "an odd width": (lambda: ops.gated_mul(ROWS[:, :7], function="silu"), ValueError,
                     r"gate must be \(\.\.\., 2 I\), got shape \(3, 7\)"),
    "an odd width of silu_mul": (lambda: ops.silu_mul(ROWS[:, :7]), ValueError,
                                 r"gate_up must be \(\.\.\., 2 I\)"),
    "a scalar": (lambda: ops.gated_mul(ROWS[0, 0], ROWS[0, 0], function="silu"), ValueError,
                 r"gate must be \(\.\.\., I\)"),
    "an unknown function": (lambda: ops.gated_mul(ROWS, function="relu"), ValueError,
                            "function must be one of silu, gelu, gelu_tanh, sigmoid, got 'relu'"),
    "an unknown backend": (lambda: ops.silu_mul(ROWS, backend="mps"), ValueError,
                           "backend must be one of"),
    "another shape": (lambda: ops.gated_mul(ROWS, ROWS[:, :5], function="gelu"), ValueError,
                      r"x must have shape \(3, 10\)"),
    "another dtype": (lambda: ops.gated_mul(ROWS, ROWS.half(), function="gelu"), TypeError,
                      "x must have dtype"),
    "integers": (lambda: ops.gated_mul(ROWS.int(), function="gelu"), TypeError,
                 "gate must be one of"),
    "columns": (lambda: ops.gated_mul(ROWS.T, ROWS.T, function="gelu"), ValueError,
                "gate must have stride 1"),
    "columns of x": (
        lambda: ops.gated_mul(ROWS, torch.randn(10, 3).T, function="gelu"), ValueError,
        "x must have stride 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name):
    call, error, message = REFUSALS[name]
    with pytest.raises(error, match=message):
        call()
