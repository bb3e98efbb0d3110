"""Launching past Triton: parameters land where the kernel reads them, or Triton launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.gluon.driver import SCRATCH, STREAM, Kernel, pretended_gpu
from tilewise.kernels.host import descriptors
from tilewise.kernels.host import launch as _launch
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.plan import Call, Layout


class Pair(NamedTuple):
    """Two arguments in one."""

    left: object
    right: object


@pytest.fixture
def driver():
    with pretended_gpu() as it:
        yield it


def knows(driver, kernel, types):
    driver.types[kernel.compiled.function] = types


TYPES = ["u64", "u32", "f32", "u64", "u64", *SCRATCH]
KINDS = ("*bf16", "i32", "fp32", ("*fp32", "*i32"), "constexpr")


def arguments(number=3):
    x, y, z = torch.zeros(16).bfloat16(), torch.zeros(16), torch.zeros(4, dtype=torch.int32)
    return (x, number, 0.5, Pair(y, z)), [x, y, z]


def test_the_second_call_writes_every_parameter_in_its_place(driver):
    kernel = Kernel(TYPES, KINDS)
    knows(driver, kernel, TYPES[:-2])
    given, _ = arguments()
    _launch.launch_now(kernel, 9, *given, TILE=64)
    assert len(kernel.launches) == 1
    assert not driver.seen
    given, (x, y, z) = arguments(number=-8)
    _launch.launch_now(kernel, 7, *given, TILE=64)
    assert len(kernel.launches) == 1
    want = [x.data_ptr(), -8, 0.5, y.data_ptr(), z.data_ptr()]
    (seen,) = driver.seen
    assert seen.values == want
    assert (seen.function, seen.shared) == (kernel.compiled.function, 1000)
    assert (seen.grid, seen.block, seen.stream) == ((7, 1, 1), (12 * 32, 1, 1), STREAM)


@pytest.mark.parametrize("grid", [(3, 5), (3, 5, 2)])
def test_a_grid_may_have_two_axes_or_three(driver, grid):
    kernel = Kernel(TYPES, KINDS)
    knows(driver, kernel, TYPES[:-2])
    for _ in range(2):
        _launch.launch_now(kernel, grid, *arguments()[0], TILE=64)
    assert kernel.launches[0][0] == grid
    assert driver.seen[0].grid == (*grid, 1)[:3]


def test_none_has_no_parameter(driver):
    kernel = Kernel(["u64", "u32", *SCRATCH], ("*fp32", "i32"))
    knows(driver, kernel, ["u64", "u32"])
    x = torch.zeros(8)
    for _ in range(2):
        _launch.launch_now(kernel, 1, Pair(None, x), 4)
    assert driver.seen[0].values == [x.data_ptr(), 4]


def test_a_descriptor_brings_its_map_its_sizes_and_its_strides(driver):
    types = ["b8", *["u32"] * 4, *["u64"] * 4, "u32"]
    kernel = Kernel([*types, *SCRATCH], ("tensordesc", "i32"))
    knows(driver, kernel, types)
    x = torch.zeros(2, 128, 3, 64, dtype=torch.bfloat16)
    for _ in range(2):
        _launch.launch_now(kernel, 1, descriptors.descriptor(x, 64, 64), 11)
    found = driver.seen[0].values
    assert found[0][0] == x.data_ptr()
    assert found[1:5] == [2, 3, 128, 64]
    assert found[5:9] == [128 * 3 * 64, 64, 3 * 64, 1]
    assert found[9] == 11


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (Kernel([*TYPES, "u64"], KINDS), "another number of parameters"),
        (Kernel(TYPES, KINDS, num_ctas=2), "a cluster"),
        (Kernel(TYPES, KINDS, global_scratch_size=64), "scratch memory"),
        (Kernel(TYPES, KINDS, {(1,): [["tt.divisibility", 16]]}), "a multiple compiled in"),
        (Kernel(["u64", *TYPES[2:]], ("*bf16", "constexpr", *KINDS[2:])), "a value compiled in"),
    ],
)
def test_what_is_unexpected_goes_tritons_way(driver, kernel, why):
    for number in (1, 2, 3):
        _launch.launch_now(kernel, 1, *arguments()[0], TILE=64)
        assert len(kernel.launches) == number, why
    assert not driver.seen


def test_what_triton_compiles_anew_for_is_another_launch(driver):
    kernel = Kernel(TYPES, KINDS)
    knows(driver, kernel, TYPES[:-2])
    (x, number, scale, pair), _ = arguments()
    _launch.launch_now(kernel, 1, x, number, scale, pair, TILE=64)
    _launch.launch_now(kernel, 1, x, number, scale, pair, TILE=32)  # another constant
    _launch.launch_now(kernel, 1, x[1:], number, scale, pair, TILE=64)  # another alignment
    _launch.launch_now(kernel, 1, x.half(), number, scale, pair, TILE=64)  # another dtype
    assert len(kernel.launches) == 4
    _launch.launch_now(kernel, 1, x, 2**40, scale, pair, TILE=64)  # too wide for the parameter
    assert len(kernel.launches) == 5
    assert not driver.seen


class TestIntegersThatTritonMayCompileIn:
    """Strides that are marked in no way: 1 and multiples of 16 change the kernel."""

    KINDS = ("*bf16", "i32", "i32")

    def kernel(self, driver, types, *kinds, attributes=None):
        params = [SimpleNamespace(do_not_specialize=marked) for marked in (False, False, True)]
        kernel = Kernel([*types, *SCRATCH], ("*bf16", *kinds), attributes, params)
        knows(driver, kernel, types)
        return kernel

    def test_each_kind_of_value_is_another_launch(self, driver):
        divisible = {(1,): [["tt.divisibility", 16]]}
        kernel = self.kernel(driver, ["u64", "u32", "u32"], "i32", "i32", attributes=divisible)
        x = torch.zeros(16)
        for stride in (32, 48, 0):
            _launch.launch_now(kernel, 1, x, stride, 7)
        assert len(kernel.launches) == 1
        assert [seen.values for seen in driver.seen] == [[x.data_ptr(), i, 7] for i in (48, 0)]
        for stride in (1, 8, 2**31):  # 2**31 is a multiple of 16, but of 64 bits
            _launch.launch_now(kernel, 1, x, stride, 7)
        assert len(kernel.launches) == 4

    def test_not_every_kind_is_remembered(self, driver, monkeypatch):
        monkeypatch.setattr(_launch, "_MAX_CALLS", 2)
        kernel = self.kernel(driver, ["u64", "u32", "u32"], "i32", "i32")
        x = torch.zeros(16)
        for stride in (1, 2, 16, 32, 1):
            _launch.launch_now(kernel, 1, x, stride, 7)
        (calls,) = _launch.launches.calls.values()
        assert len(calls.prepared) <= 2
        assert len(kernel.launches) == 4  # 1 came anew
        assert [seen.values for seen in driver.seen] == [[x.data_ptr(), 32, 7]]

    def test_a_constant_has_no_parameter(self, driver):
        kernel = self.kernel(driver, ["u64", "u32"], "constexpr", "i32")
        x = torch.zeros(16)
        for number in (7, 9):
            _launch.launch_now(kernel, 1, x, 1, number)
        assert len(kernel.launches) == 1
        assert driver.seen[0].values == [x.data_ptr(), 9]


def test_numbers_in_tuples_are_parameters_of_their_kind(driver):
    params = [SimpleNamespace(do_not_specialize=False)]
    kinds = ((("i32", "constexpr"), "*fp32"),)
    kernel = Kernel(["u32", "u64", *SCRATCH], kinds, {(0, 0, 0): [["tt.divisibility", 16]]}, params)
    knows(driver, kernel, ["u32", "u64"])
    x = torch.zeros(16)
    for stride in (32, 64, 3):  # 3 is compiled anew
        _launch.launch_now(kernel, 1, Pair(Pair(stride, 1), x))
    assert len(kernel.launches) == 2
    assert [seen.values for seen in driver.seen] == [[64, x.data_ptr()]]
    unmarked = Kernel(["u32", "u64", *SCRATCH], kinds, {}, ())
    for _ in range(2):  # nothing says that the 1 may be compiled in
        _launch.launch_now(unmarked, 1, Pair(Pair(32, 1), x))
    assert len(unmarked.launches) == 2


def test_an_error_of_the_driver_is_raised(driver):
    kernel = Kernel(TYPES, KINDS)
    _launch.launch_now(kernel, 1, *arguments()[0])
    knows(driver, kernel, TYPES[:-2])
    driver.status = 700
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        _launch.launch_now(kernel, 1, *arguments()[0])


def test_a_thread_without_a_context_gets_one(driver, monkeypatch):
    """As autograd's threads, until they call CUDA's runtime."""
    kernel, devices, given = Kernel(TYPES, KINDS), [], arguments()[0]
    _launch.launch_now(kernel, 1, *given)
    knows(driver, kernel, TYPES[:-2])
    driver.status = 201

    def zeros(*_, device):
        devices.append(device.type)
        driver.status = 0

    monkeypatch.setattr(_launch.torch, "zeros", zeros)
    seen = len(driver.seen)
    _launch.launch_now(kernel, 1, *given)
    assert devices == ["cuda"]
    assert len(driver.seen) == seen + 2
    driver.status = 201
    monkeypatch.setattr(_launch.torch, "zeros", lambda *_, device: None)
    with pytest.raises(RuntimeError, match="CUDA error 201"):
        _launch.launch_now(kernel, 1, *given)


def test_a_descriptor_does_not_keep_its_tensor_alive():
    import weakref

    x = torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16)
    watched = weakref.ref(x.untyped_storage())
    descriptors.descriptor(x, 64, 64)
    del x
    assert watched() is None


def test_a_launch_of_a_plan_takes_new_addresses_and_keeps_the_rest(driver):
    types = ["b8", *["u32"] * 4, *["u64"] * 4, "u64", "u32", "f32", "u64", "u64"]
    kernel = Kernel([*types, *SCRATCH], ("tensordesc", *KINDS))
    knows(driver, kernel, types)
    mapped = torch.zeros(2, 128, 3, 64, dtype=torch.bfloat16)
    given, tensors = arguments(number=-8)
    layouts = tuple(map(Layout.of, (*tensors, mapped)))
    maker = Maker(Call(None, mapped.device, layouts), ("y", "z", "a", "x"))
    y, z, a, described = maker.inputs
    maker.launch(kernel, 9, descriptors.descriptor(described, 64, 64), y, -8, 0.5, Pair(z, a))
    plan = maker.finish(())
    for _ in range(2):
        plan.run(*tensors, mapped)
    others = [each.clone() for each in (*tensors, mapped)]
    plan.run(*others)
    assert len(kernel.launches) == 1
    first, other = driver.seen
    (encoded, beside), shape_and_strides = first.values[0], first.values[1:9]
    assert encoded == mapped.data_ptr()
    for launch, (y, z, a, x) in ((first, (*tensors, mapped)), (other, others)):
        numbers = [y.data_ptr(), -8, 0.5, z.data_ptr(), a.data_ptr()]
        assert launch.values == [(x.data_ptr(), beside), *shape_and_strides, *numbers]
        assert (launch.stream, launch.function, launch.grid) == (STREAM, first.function, (9, 1, 1))
    _launch.launch_now(kernel, 9, descriptors.descriptor(mapped, 64, 64), *given)
    assert len(kernel.launches) == 1  # whose parameters lie elsewhere


def test_a_launch_says_what_starts_it_again(driver):
    assert _launch.launch_now(Kernel([*TYPES, "u64"], KINDS), 1, *arguments()[0]) is None
    kernel = Kernel(TYPES, KINDS)
    assert _launch.launch_now(kernel, 1, *arguments()[0]) is not None
    too_wide = arguments(number=2**40)[0]
    assert _launch.launch_now(kernel, 1, *too_wide) is None
