"""A CUDA driver that reads the parameters of each launch, and kernels that Triton would compile."""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.kernels.host import descriptors, plan
from tilewise.kernels.host import launch as _launch
from tilewise.kernels.host.memory import LaunchMemory

_SIZES = {"u32": ctypes.c_int32, "u64": ctypes.c_int64, "f32": ctypes.c_float}
SCRATCH = ["u64", "u64"]
STREAM = 5
_functions = itertools.count(77)


class Launch(SimpleNamespace):
    """What a launch was: function, grid, block, shared, stream and the values of its parameters.

    Of a descriptor the value is (address of its tensor, all else that is encoded).
    """


class Driver:
    """What `_launch` and `_descriptors` call of the driver; `seen` are the launches."""

    def __init__(self) -> None:
        self.seen: list[Launch] = []
        self.types: dict[int, list[str]] = {}
        self.status = 0

    def read(self, function: int, pointers: Any) -> list[Any]:
        """Return the values of a launch's parameters."""
        values: list[Any] = []
        for place, kind in enumerate(self.types[function]):
            if kind == "b8":
                assert pointers[place] % 64 == 0  # where the copy engine may read it
                values.append(struct.unpack("=Qq", ctypes.string_at(pointers[place], 16)))
            else:
                values.append(_SIZES[kind].from_address(pointers[place]).value)
        return values

    def cuLaunchKernelEx(self, *given: Any) -> int:
        return self.take(*given)

    def take(self, config: Any, function: Any, pointers: Any, extra: None) -> int:
        """Note a launch; a test may put something else in its place."""
        it, values = config._obj, self.read(function.value, pointers)
        grid, block = ((it.grid_x, it.grid_y, it.grid_z), (it.block_x, it.block_y, it.block_z))
        launch = Launch(function=function.value, grid=grid, block=block, shared=it.shared)
        launch.stream, launch.values = it.stream, values
        self.seen.append(launch)
        return self.status

    def cuTensorMapEncodeTiled(self, target, kind, rank, base, shape, steps, box, *rest) -> int:
        beside = (kind, rank, *shape, *steps, *box, *(x for x in rest if isinstance(x, int)))
        ctypes.memmove(target.value, struct.pack("=Qq", base.value, hash(beside)), 16)
        return self.status


class Kernel:
    """Stands in for a jitted function with these parameter types; counts Triton's launches."""

    def __init__(self, types, kinds, attributes=None, params=(), **metadata) -> None:
        self.launches: list[Any] = []
        self.params = params
        entry = ",\n".join(f".param .{t} p_{i}" for i, t in enumerate(types))
        usual = {"num_ctas": 1, "num_warps": 12, "shared": 1000, "global_scratch_size": 0}
        self.compiled = SimpleNamespace(
            asm={"ptx": f".visible .entry kernel(\n{entry}\n)\n{{ }}"},
            metadata=SimpleNamespace(**(usual | metadata)),
            src=SimpleNamespace(signature=dict(enumerate(kinds)), attrs=attributes or {}),
            function=next(_functions),
        )

    def __getitem__(self, grid):
        def start(*arguments, **constants):
            self.launches.append((grid, arguments, constants))
            return self.compiled

        return start


class AnyKernel:
    """Stands in for a jitted function, and takes the parameters that it is launched with."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.launches = 0

    def __getitem__(self, grid):
        def start(*arguments, **constants):
            self.launches += 1
            types = list(_types(arguments))
            kernel = Kernel([*types, *SCRATCH], [*map(_kind, arguments)])
            self._driver.types[kernel.compiled.function] = types
            return kernel.compiled

        return start


def _kind(argument) -> object:
    """Return what Triton's signature says of an argument that is no constant."""
    if isinstance(argument, tuple):
        return tuple(map(_kind, argument))
    if isinstance(argument, Tensor | TensorDescriptor):
        return "*u8"
    if isinstance(argument, float):
        return "fp32"
    if argument is None:
        return "constexpr"
    return "i32" if -(2**31) <= argument < 2**31 else "i64"


def _types(arguments) -> Iterator[str]:
    for argument in arguments:
        if isinstance(argument, TensorDescriptor):
            rank = len(argument.shape)
            yield from ("b8", *["u32"] * rank, *["u64"] * rank)
        elif isinstance(argument, tuple):
            yield from _types(argument)
        elif isinstance(argument, Tensor):
            yield "u64"
        elif isinstance(argument, float):
            yield "f32"
        elif argument is not None:
            yield "u32" if -(2**31) <= argument < 2**31 else "u64"


@contextmanager
def pretended_gpu() -> Iterator[Driver]:
    """Let CPU tensors pass for those of a GPU whose launches are only looked at."""
    it = Driver()
    with (
        mock.patch.object(_launch, "driver", return_value=it),
        mock.patch.object(descriptors, "driver", return_value=it),
        mock.patch.object(_launch, "_is_on_gpu", _yes),
        mock.patch.object(_launch, "launches", LaunchMemory()),
        mock.patch.object(plan, "_is_on_gpu", _yes),
        mock.patch.object(plan, "_current_device", return_value=None),  # the index of a CPU
        mock.patch.object(plan, "_fresh", _fresh),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", _no),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=STREAM, create=True),
    ):
        yield it


def _yes(tensors: object) -> bool:
    return True  # a mock would keep the tensors


def _no() -> bool:
    return False


def _fresh(shape, stride, dtype) -> Tensor:
    x: Tensor = torch._C._dynamo.guards._empty_strided_cpu(shape, stride, dtype)
    return x.fill_(float("nan") if dtype.is_floating_point else 7)
