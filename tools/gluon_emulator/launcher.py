"""Meet the host: whoever starts a Gluon kernel runs it in the emulator instead."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tools.gluon_emulator.language import finish
from tools.gluon_emulator.machine import Cta, Machine, current
from tools.gluon_emulator.memory import Descriptor, Known, Memory, Pointer
from tools.gluon_emulator.program import Program
from tools.gluon_emulator.recording import Recording
from tools.gluon_emulator.registers import Register, Scalar

_OPTIONS = ("num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "debug", "launch_pdl")
_UNCHANGED = Program()
_recordings: list[list[Recording]] = []


@contextlib.contextmanager
def emulated(
    seed: int = 0,
    *,
    resident: int = 4,
    program: Program = _UNCHANGED,
    idempotent: frozenset[str] = frozenset(),
) -> Iterator[list[str]]:
    """Run Gluon kernels that are started inside the block in the emulator.

    Args:
        seed: of the schedule.
        resident: CTAs that run at a time.
        program: the source, changed or not.
        idempotent: kernel functions that partitions may run on the same memory at the same time,
            because they all write the same.

    Yields:
        the names of the kernels that have run.
    """
    names: list[str] = []
    known: Known = {}
    data_ptr = torch.Tensor.data_ptr

    def remembered(tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        address = data_ptr(tensor)
        known[address] = storage.data_ptr() + storage.nbytes(), StorageWeakRef(storage)
        return address

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names.append(kernel.fn.__name__)
        num_warps = kwargs.pop("num_warps", 4)
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        assert options.get("num_ctas", 1) == 1, "clusters are not emulated"
        bound = inspect.signature(kernel.fn).bind(*args, **kwargs)
        bound.apply_defaults()
        constant = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
        arguments = {
            name: value if name in constant else _on_device(value, known)
            for name, value in bound.arguments.items()
        }
        grid = grid(bound.arguments) if callable(grid) else grid
        function = program.function(kernel)

        def body(_: Cta) -> None:
            function(**arguments)
            finish(current())

        machine = Machine(seed + len(names), resident, idempotent)
        machine.run(tuple(grid), num_warps, body)
        for recordings in _recordings:
            recordings.append(Recording(kernel.fn.__name__, resident, machine.ctas))

    with (
        mock.patch.object(GluonJITFunction, "run", run),
        mock.patch.object(torch.Tensor, "data_ptr", remembered),
    ):
        yield names


@contextlib.contextmanager
def recorded() -> Iterator[list[Recording]]:
    """Yield a list that gets what each kernel inside the block has done, for `Replay`."""
    recordings: list[Recording] = []
    _recordings.append(recordings)
    try:
        yield recordings
    finally:
        # Not `remove`: lists of the same recordings, one block inside another, are equal.
        _recordings[:] = [other for other in _recordings if other is not recordings]


def _on_device(value: Any, known: Known) -> Any:
    """Return an argument as the kernel sees it."""
    if isinstance(value, torch.Tensor):
        return Pointer(Memory(value))
    if isinstance(value, TensorDescriptor):
        return Descriptor(value, known)
    if isinstance(value, bool):
        return Scalar(value, gl.int1)
    if isinstance(value, int):
        return Scalar(value, gl.int32 if -(2**31) <= value < 2**31 else gl.int64)
    if isinstance(value, float):
        return Register(np.asarray(value), gl.float32)
    if isinstance(value, tuple):
        fields = [_on_device(field, known) for field in value]
        return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)
    assert value is None, f"{type(value).__name__} cannot be an argument"
    return None
