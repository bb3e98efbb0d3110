"""Ops of a step that come again: straight to their plans, and to no plan of another call."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from tests.kernels.gluon.driver import AnyKernel, pretended_gpu
from tests.ops.test_call import entered
from tilewise import ops
from tilewise.kernels import early
from tilewise.kernels.triton.step import activation, linear, norm, sampling
from tilewise.ops import call, derivatives, step

KERNELS = {
    linear: ("_linear_kernel",),
    norm: ("_norm_kernel",),
    activation: ("_gated_mul_kernel",),
    sampling: ("_draw_kernel",),
}


@contextmanager
def on_gpu():
    """Let CPU tensors pass for those of a GPU; yield the driver."""
    call.forget()
    with pretended_gpu() as driver, pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "_checked_once", lambda _: True)
        for module, kernels in KERNELS.items():
            for name in kernels:
                patch.setattr(module, name, AnyKernel(driver))
        patch.setattr("tilewise.kernels.triton.step.chunks._chunk_kernel", AnyKernel(driver))
        yield driver
    call.forget()


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


def calls_of() -> dict[str, object]:
    """Return a call of each op, with tensors of its own."""
    x, weight, scale, logits = rows(4, 64), rows(96, 64), rows(64), rows(3, 500).float()
    residual = rows(4, 64)
    return {
        "linear": lambda: ops.linear(x, weight, backend="triton"),
        "rms_norm": lambda: ops.rms_norm(x, scale, 1e-6, backend="triton"),
        "add_rms_norm": lambda: ops.add_rms_norm(x, residual, scale, 1e-6, backend="triton"),
        "silu_mul": lambda: ops.silu_mul(x, backend="triton"),
        "gated_mul": lambda: ops.gated_mul(residual, x, function="sigmoid", backend="triton"),
        "sample_tokens": lambda: ops.sample_tokens(logits, backend="triton"),
    }


@pytest.mark.parametrize("name", calls_of())
def test_a_call_like_one_before_enters_few_functions_and_launches_for_its_tensors(name):
    if derivatives.TensorGuards is None:
        pytest.skip("this torch has no guard that finds a call")
    with on_gpu() as driver:
        for _ in range(3):
            calls_of()[name]()
        again = calls_of()[name]
        driver.seen.clear()
        seen = entered(again)
    launches = len(driver.seen)
    assert launches == (2 if name == "sample_tokens" else 1)
    assert len(seen) <= 10 + 2 * launches, seen
    assert not any("checks." in each or "dispatch." in each for each in seen), seen


def test_a_launch_takes_the_addresses_of_its_own_call():
    with on_gpu() as driver:
        for _ in range(3):
            x, weight, bias = rows(4, 64), rows(96, 64), rows(96)
            y = ops.linear(x, weight, bias, backend="triton")
            last = [each.data_ptr() for each in (x, weight, bias, y)]
            assert driver.seen[-1].values[:4] == last if driver.seen else True
        assert len(driver.seen) == 2


def num_plans() -> int:
    return sum(isinstance(found, step._Bound) for found in call._memory.calls.values())


@pytest.mark.parametrize(
    "change",
    [
        {"x": rows(5, 64)}, {"x": rows(4, 128)[:, :64]}, {"x": rows(257)[1:].view(4, 64)},
        {"weight": rows(97, 64)}, {"bias": rows(96)}, {"early": {"linear": early.AFTER}},
    ],
    ids=["rows", "strides", "alignment", "weight", "bias", "early"],
)  # fmt: skip
def test_whatever_differs_has_a_plan_of_its_own(change):
    change = dict(change)
    modes = change.pop("early", {})
    given = {"x": rows(4, 64), "weight": rows(96, 64), "bias": None} | change
    with on_gpu():
        for _ in range(2):
            ops.linear(rows(4, 64), rows(96, 64), backend="triton")
        assert num_plans() == 1
        with early.launching(modes):
            for _ in range(2):
                ops.linear(**given, backend="triton")
        assert num_plans() == 2


def test_layers_whose_weights_differ_are_each_found_at_once():
    x, weights = rows(4, 64), [rows(32 + i, 64) for i in range(step._MOST_ALIKE)]
    with on_gpu():
        for weight in 2 * weights:
            ops.linear(x, weight, backend="triton")
        seen = [entered(partial(ops.linear, x, each, backend="triton")) for each in weights]
        assert not any("check" in name for names in seen for name in names), seen
        for i in range(3 * step._MOST_ALIKE):
            ops.linear(x, rows(100 + i, 64), backend="triton")
        assert max(len(v) for v in call._memory.calls.values() if isinstance(v, list)) == 8


def test_what_is_wrong_is_refused_after_a_right_call_too():
    with on_gpu():
        ops.linear(rows(4, 64), rows(96, 64), backend="triton")
        with pytest.raises(ValueError, match="x must have at most 32 rows"):
            ops.linear(rows(33, 64), rows(96, 64), backend="triton")
        with pytest.raises(TypeError, match="weight must"):
            ops.linear(rows(4, 64), rows(96, 64).half(), backend="triton")
        with pytest.raises(ValueError, match="backend must be"):
            ops.linear(rows(4, 64), rows(96, 64), backend="nothing")


def test_a_call_past_the_public_function_leaves_its_checks_to_be_done():
    with on_gpu():
        x, weight = rows(33, 64), rows(96, 64)
        torch.ops.tilewise.linear(x, weight, None, "triton")
        with pytest.raises(ValueError, match="x must have at most 32 rows"):
            ops.linear(x, weight, backend="triton")


def test_a_tensor_that_is_given_twice_stands_for_two():
    x, other, scale = rows(4, 64), rows(4, 64), rows(64)
    with on_gpu() as driver:
        ops.add_rms_norm(x, x, scale, 1e-6, backend="triton")
        ops.add_rms_norm(x, other, scale, 1e-6, backend="triton")
        ops.add_rms_norm(x, other, scale, 1e-6, backend="triton")
    assert driver.seen[-1].values[:2] == [x.data_ptr(), other.data_ptr()]


class Dispatched(TorchDispatchMode):
    seen: list

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **kwargs or {})


class Called(TorchFunctionMode):
    seen: list

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kind", [Dispatched, Called])
def test_a_mode_sees_a_call_like_one_before(kind):
    x, weight = rows(4, 64), rows(96, 64)
    with on_gpu():
        for _ in range(2):
            ops.linear(x, weight, backend="triton")
        mode = kind()
        mode.seen = []
        with mode:
            ops.linear(x, weight, backend="triton")
    assert torch.ops.tilewise.linear.default in mode.seen


@pytest.mark.parametrize("learns", [False, True], ids=["alone", "unrecorded"])
def test_a_gradient_is_refused_after_calls_without_one(learns):
    with on_gpu():
        x, weight = rows(4, 64).requires_grad_(learns), rows(96, 64)
        with torch.no_grad():
            for _ in range(2):
                ops.linear(x, weight, backend="triton")
        y = ops.linear(x.requires_grad_(), weight, backend="triton")
        with pytest.raises(Exception, match="it has no gradient"):
            y.sum().backward()


def test_parameters_are_known_where_no_gradient_is_recorded():
    x, weight = rows(4, 64), torch.nn.Parameter(rows(96, 64))
    with on_gpu(), torch.no_grad():
        for _ in range(2):
            ops.linear(x, weight, backend="triton")
        seen = entered(lambda: ops.linear(x, weight, backend="triton"))
    assert not any("check" in name for name in seen), seen
