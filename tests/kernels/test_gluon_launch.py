"""Launching past Triton: parameters land where the kernel reads them, or Triton launches."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.attention_problem import BRAIN, CAUSAL, Call, make_problem
from tilewise.kernels import device
from tilewise.kernels.gluon import (
    _descriptors,
    _launch,
    _repeat,
    attention_fwd_launch,
    attention_fwd_repeat,
)

_SIZES = {"u32": ctypes.c_int32, "u64": ctypes.c_int64, "f32": ctypes.c_float}


class Pair(NamedTuple):
    """Two arguments in one."""

    left: object
    right: object


class Kernel:
    """Stands in for a jitted function with these parameter types; counts Triton's launches."""

    def __init__(self, types, kinds, attributes=None, **metadata):
        self.launches = []
        entry = ",\n".join(f".param .{t} p_{i}" for i, t in enumerate(types))
        usual = {"num_ctas": 1, "num_warps": 12, "shared": 1000, "global_scratch_size": 0}
        self.compiled = SimpleNamespace(
            asm={"ptx": f".visible .entry kernel(\n{entry}\n)\n{{ }}"},
            metadata=SimpleNamespace(**(usual | metadata)),
            src=SimpleNamespace(signature=dict(enumerate(kinds)), attrs=attributes or {}),
            function=77,
        )

    def __getitem__(self, grid):
        def start(*arguments, **constants):
            self.launches.append((grid, arguments, constants))
            return self.compiled

        return start


@pytest.fixture
def driver(monkeypatch):
    """A driver that reads the parameters of each launch; CPU tensors pass for a GPU's."""
    seen = []

    class Driver:
        types = ()

        def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, pointers, _):
            values = [
                _SIZES[t].from_address(pointers[i]).value if t in _SIZES else pointers[i]
                for i, t in enumerate(self.types)
            ]
            seen.append((function.value, (gx, gy, gz), (bx, by, bz), shared, values))
            return 0

        def cuTensorMapEncodeTiled(self, *arguments):
            return 0

    it = Driver()
    it.seen = seen
    monkeypatch.setattr(_launch, "driver", lambda: it)
    monkeypatch.setattr(_descriptors, "driver", lambda: it)
    monkeypatch.setattr(_launch, "_is_on_gpu", lambda leaves: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    monkeypatch.setattr(_launch, "_remembered", {})
    return it


SCRATCH = ["u64", "u64"]
TYPES = ["u64", "u32", "f32", "u64", "u64", *SCRATCH]
KINDS = ("*bf16", "i32", "fp32", ("*fp32", "*i32"), "constexpr")


def arguments(number=3):
    x, y, z = torch.zeros(16).bfloat16(), torch.zeros(16), torch.zeros(4, dtype=torch.int32)
    return (x, number, 0.5, Pair(y, z)), [x, y, z]


def test_the_second_call_writes_every_parameter_in_its_place(driver):
    kernel = Kernel(TYPES, KINDS)
    driver.types = TYPES[:-2]
    given, _ = arguments()
    _launch.launch(kernel, 9, *given, TILE=64)
    assert len(kernel.launches) == 1
    assert not driver.seen
    given, (x, y, z) = arguments(number=-8)
    _launch.launch(kernel, 7, *given, TILE=64)
    assert len(kernel.launches) == 1
    want = [x.data_ptr(), -8, 0.5, y.data_ptr(), z.data_ptr()]
    assert driver.seen == [(77, (7, 1, 1), (12 * 32, 1, 1), 1000, want)]


def test_none_has_no_parameter(driver):
    kernel = Kernel(["u64", "u32", *SCRATCH], ("*fp32", "i32"))
    driver.types = ["u64", "u32"]
    x = torch.zeros(8)
    for _ in range(2):
        _launch.launch(kernel, 1, Pair(None, x), 4)
    assert driver.seen[0][-1] == [x.data_ptr(), 4]


def test_a_descriptor_brings_its_map_its_sizes_and_its_strides(driver):
    types = ["b8", *["u32"] * 4, *["u64"] * 4, "u32"]
    kernel = Kernel([*types, *SCRATCH], ("tensordesc", "i32"))
    driver.types = types
    x = torch.zeros(2, 128, 3, 64, dtype=torch.bfloat16)
    for _ in range(2):
        _launch.launch(kernel, 1, _descriptors.descriptor(x, 64, 64), 11)
    found = driver.seen[0][-1]
    assert found[0] % 64 == 0  # where the copy engine may read it
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
        _launch.launch(kernel, 1, *arguments()[0], TILE=64)
        assert len(kernel.launches) == number, why
    assert not driver.seen


def test_what_triton_compiles_anew_for_is_another_launch(driver):
    kernel = Kernel(TYPES, KINDS)
    driver.types = TYPES[:-2]
    (x, number, scale, pair), _ = arguments()
    _launch.launch(kernel, 1, x, number, scale, pair, TILE=64)
    _launch.launch(kernel, 1, x, number, scale, pair, TILE=32)  # another constant
    _launch.launch(kernel, 1, x[1:], number, scale, pair, TILE=64)  # another alignment
    _launch.launch(kernel, 1, x.half(), number, scale, pair, TILE=64)  # another dtype
    assert len(kernel.launches) == 4
    _launch.launch(kernel, 1, x, 2**40, scale, pair, TILE=64)  # too wide for the parameter
    assert len(kernel.launches) == 5
    assert not driver.seen


def test_numbers_in_tuples_are_refused(driver):
    with pytest.raises(TypeError, match="numbers must be arguments of their own, got 4 in Pair"):
        _launch.launch(Kernel(TYPES, KINDS), 1, Pair(4, None))


def test_an_error_of_the_driver_is_raised(driver, monkeypatch):
    kernel = Kernel(TYPES, KINDS)
    _launch.launch(kernel, 1, *arguments()[0])
    monkeypatch.setattr(driver, "cuLaunchKernel", lambda *_: 700, raising=False)
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        _launch.launch(kernel, 1, *arguments()[0])


def test_a_descriptor_does_not_keep_its_tensor_alive():
    import weakref

    x = torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16)
    watched = weakref.ref(x.untyped_storage())
    _descriptors.descriptor(x, 64, 64)
    del x
    assert watched() is None


def test_a_repeated_launch_takes_new_addresses_and_keeps_the_rest(driver):
    types = ["b8", *["u32"] * 4, *["u64"] * 4, "u64", "u32", "f32", "u64", "u64"]
    kernel = Kernel([*types, *SCRATCH], ("tensordesc", *KINDS))
    driver.types = types
    x = torch.zeros(2, 128, 3, 64, dtype=torch.bfloat16)
    given, _ = arguments(number=-8)
    given = (_descriptors.descriptor(x, 64, 64), *given)
    assert _launch.launch(kernel, 9, *given) is None
    prepared = _launch.launch(kernel, 9, *given)
    repeat = _repeat.Repeat(prepared, 9, given)
    repeat.start((16, 32, 48), (4096,))
    (first, again) = driver.seen
    assert again[:4] == first[:4]
    shape_and_strides = first[4][1:9]
    assert again[4] == [4096, *shape_and_strides, 16, -8, 0.5, 32, 48]
    _launch.launch(kernel, 9, *given)
    assert driver.seen[2] == first  # whose parameters lie elsewhere


class TestForwardPass:
    """A call of attention whose spec and strides were seen before."""

    @pytest.fixture
    def launches(self, monkeypatch):
        """Count launches; what repeats them keeps the addresses that it is given."""
        seen = []

        class Again:
            device = 0

            def __init__(self, prepared, grid, arguments):
                del prepared, grid, arguments

            def start(self, addresses, maps):
                seen.append((addresses, len(maps)))

        def launch(*arguments, **constants):
            del arguments, constants
            seen.append("anew")
            return "prepared"

        monkeypatch.setattr(attention_fwd_launch, "launch", launch)
        monkeypatch.setattr(attention_fwd_launch, "Repeat", Again)
        monkeypatch.setattr(attention_fwd_repeat, "map_address", id)
        monkeypatch.setattr(attention_fwd_repeat, "_calls", {})
        monkeypatch.setattr(device, "sm_count_of", lambda _: 132)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        return seen

    def run(self, problem, **changes):
        tensors = problem.tensors | changes
        return attention_fwd_launch.launch_fwd(
            problem.q, problem.k, problem.v, problem.spec, **tensors
        )

    def test_other_tensors_of_the_same_call_are_not_looked_at_again(self, launches):
        call = Call(70, 80, (4, 2), (64, 64), 2, BRAIN, CAUSAL, alibi="heads")
        first, second = (make_problem(call, "cpu") for _ in range(2))
        self.run(first)
        o, lse = self.run(second)
        assert launches[0] == "anew"
        ((addresses, maps),) = launches[1:]
        assert maps == 6
        slopes = second.alibi_slopes.data_ptr()
        assert (*addresses[:2], addresses[3]) == (o.data_ptr(), lse.data_ptr(), slopes)
        assert (o.shape, lse.shape) == ((2, 70, 4, 64), (2, 4, 70))

    def test_what_differs_is_launched_anew(self, launches):
        problem = make_problem(
            Call(70, 80, (4, 2), (64, 64), 2, BRAIN, CAUSAL, alibi="heads"), "cpu"
        )
        self.run(problem)
        slopes = problem.alibi_slopes
        self.run(problem, alibi_slopes=slopes.expand(2, 4).contiguous())  # of sequences
        self.run(problem, alibi_slopes=slopes.repeat_interleave(2)[::2])  # not contiguous
        self.run(problem, alibi_slopes=torch.cat([slopes, slopes])[1:5])  # not aligned
        problem.k = problem.k.transpose(1, 2).contiguous().transpose(1, 2)  # other strides
        self.run(problem)
        assert launches == ["anew"] * 5
