"""The `gl` that emulated kernels see."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.experimental.gluon import language as real

from tools.gluon_emulator import barriers, copies, groups, numbers, products, shared
from tools.gluon_emulator.assembly import inline_asm_elementwise
from tools.gluon_emulator.errors import EmulationError, NotEmulated
from tools.gluon_emulator.machine import Worker, current, machine, note
from tools.gluon_emulator.memory import Pointer
from tools.gluon_emulator.registers import (
    Layout,
    Register,
    Scalar,
    common,
    dtype_of,
    register,
    values_of,
)

_LAYOUTS = (
    "AutoLayout", "BlockedLayout", "SliceLayout", "DistributedLinearLayout", "DotOperandLayout",
    "NVMMADistributedLayout", "NVMMASharedLayout", "SwizzledSharedLayout", "CoalescedLayout",
)  # fmt: skip


class Language:
    """Namespace of operations; what is missing says so by name."""

    constexpr = staticmethod(lambda value: getattr(value, "value", value))
    static_range = staticmethod(range)

    def __getattr__(self, name: str) -> Any:
        if name in numbers.DTYPES or isinstance(getattr(real, name, None), real.dtype):
            return getattr(real, name)
        if name in _LAYOUTS:
            return Layout
        raise NotEmulated(f"gl.{name}")


gl = Language()


def operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add a function to the language."""
    setattr(Language, function.__name__.removesuffix("_"), staticmethod(function))
    return function


for _function in (inline_asm_elementwise, shared.allocate_shared_memory):
    operation(_function)


@operation
def program_id(axis: int = 0) -> Scalar:
    return Scalar(current().cta.place[axis])


@operation
def num_programs(axis: int = 0) -> Scalar:
    return Scalar(machine().grid[axis])


@operation
def num_warps() -> int:
    return current().num_warps


@operation
def warp_specialize(functions_and_args: Any, worker_num_warps: Any, worker_num_regs: Any) -> None:
    """Run the first function here and the others as workers, until all have ended."""
    parent = current()
    if len(functions_and_args) != len(worker_num_warps) + 1:
        raise EmulationError("every worker needs its number of warps, and no other")
    workers = []
    for (function, args), warps in zip(functions_and_args[1:], worker_num_warps, strict=True):
        for argument in _leaves(args):
            if isinstance(argument, Register) and argument.values.ndim:
                raise EmulationError("a worker takes no tensors")
        name = f"worker {len(workers)} ({function.__name__})"
        worker = Worker(name, parent.cta, int(warps), parent.clock)
        machine().start(worker, functools.partial(_partition, function, args))
        workers.append(worker)
    note("start", [worker.number for worker in workers])
    parent.clock[parent.lane] += 1
    function, args = functions_and_args[0]
    _partition(function, args)
    note("join", [worker.number for worker in workers])
    machine().wait(lambda: all(worker.finished for worker in workers), "its workers")
    for worker in workers:
        parent.clock.join(worker.clock)


def _partition(function: Callable[..., Any], args: Any) -> None:
    function(*args)
    finish(current())


def finish(worker: Worker) -> None:
    """Check that a partition ends with nothing under way that it has started."""
    copies.finish(worker)
    groups.finish(worker)
    products.finish(worker)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


@operation
def static_assert(condition: Any, message: str = "") -> None:
    assert condition, message


@operation
def static_print(*_: object) -> None: ...


@operation
def assume(condition: Any) -> None:
    if not condition:
        raise EmulationError("an assumption does not hold")


@operation
def device_assert(condition: Any, message: str = "", mask: Any = None) -> None:
    if not np.all(values_of(condition)):
        raise EmulationError(message)


for _name in ("multiple_of", "max_contiguous", "max_constancy"):
    setattr(Language, _name, staticmethod(lambda value, *_: value))


@operation
def barrier(*, cluster: bool = False) -> None:
    note("barrier")
    machine().step()
    current().meetings += 1


Language.thread_barrier = staticmethod(barrier)


@operation
def convert_layout(value: Any, layout: Any, assert_trivial: bool = False) -> Any:
    if not isinstance(value, Register):
        raise EmulationError(f"{type(value).__name__} has no layout to convert")
    return value


@operation
def set_auto_layout(value: Any, layout: Any) -> Any:
    return value


@operation
def arange(start: int, end: int, layout: Any = None) -> Register:
    return Register(np.arange(int(start), int(end)), real.int32)


@operation
def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Register:
    values = np.broadcast_to(values_of(value), [int(size) for size in shape])
    return Register(numbers.converted(values, dtype_of(value), dtype), dtype)


@operation
def zeros(shape: Any, dtype: Any, layout: Any = None) -> Register:
    return full(shape, 0, dtype)


@operation
def full_like(
    input: Any, value: Any, shape: Any = None, dtype: Any = None, layout: Any = None
) -> Any:
    return full(shape or input.shape, value, dtype or input.dtype)


@operation
def zeros_like(input: Any, shape: Any = None, dtype: Any = None, layout: Any = None) -> Any:
    return full_like(input, 0, shape, dtype)


@operation
def to_tensor(value: Any) -> Any:
    return register(values_of(value), dtype_of(value))


@operation
def where(condition: Any, x: Any, y: Any) -> Any:
    a, b, dtype = common(x, y)
    chosen = values_of(condition)
    ranks = {array.ndim for array in (a, b, chosen) if array.ndim}
    if len(ranks) > 1:
        raise EmulationError(f"where of shapes {chosen.shape}, {a.shape}, {b.shape}")
    return register(np.where(chosen, a, b), dtype)


@operation
def maximum(x: Any, y: Any, propagate_nan: Any = None) -> Any:
    a, b, dtype = common(x, y)
    return register(np.fmax(a, b), dtype)


@operation
def minimum(x: Any, y: Any, propagate_nan: Any = None) -> Any:
    a, b, dtype = common(x, y)
    return register(np.fmin(a, b), dtype)


@operation
def fma(x: Any, y: Any, z: Any) -> Any:
    a, b, dtype = common(x, y)
    c = values_of(z, dtype)
    return register(numbers.rounded(a.astype(np.float64) * b + c, dtype), dtype)


@operation
def cdiv(x: Any, div: Any) -> Any:
    return (x + (div - 1)) // div


@operation
def umulhi(x: Any, y: Any) -> Any:
    a, b, dtype = common(x, y)
    product = (a.astype(np.uint32).astype(np.uint64) * b.astype(np.uint32)) >> np.uint64(32)
    return register(product.astype(np.uint32).astype(numbers.working(dtype)), dtype)


@operation
def fdiv(x: Any, y: Any, ieee_rounding: bool = False) -> Any:
    return x / y


Language.div_rn = staticmethod(fdiv)


def _float_function(name: str, function: Callable[[np.ndarray], np.ndarray]) -> None:
    def apply(x: Any) -> Any:
        return register(numbers.rounded(function(values_of(x)), dtype_of(x)), dtype_of(x))

    setattr(Language, name, staticmethod(apply))


for _name in ("exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "floor", "ceil"):
    _float_function(_name, getattr(np, _name))
_float_function("sqrt_rn", np.sqrt)
_float_function("erf", np.vectorize(math.erf, otypes=[np.float64]))
_float_function("rsqrt", lambda x: 1 / np.sqrt(x))


@operation
def abs_(x: Any) -> Any:
    return register(np.abs(values_of(x)), dtype_of(x))


@operation
def expand_dims(input: Any, axis: int) -> Any:
    if isinstance(input, Pointer):
        return input.expand_dims(axis)
    return Register(np.expand_dims(values_of(input), axis), dtype_of(input))


@operation
def reshape(input: Any, *shape: Any) -> Any:
    return input.reshape(*shape)


@operation
def permute(input: Any, *dims: Any) -> Any:
    return input.permute(*dims)


@operation
def ravel(x: Any) -> Any:
    return x.reshape([x.values.size])


@operation
def broadcast(x: Any, y: Any) -> Any:
    a, b = np.broadcast_arrays(values_of(x), values_of(y))
    return Register(a, dtype_of(x)), Register(b, dtype_of(y))


@operation
def join(a: Any, b: Any) -> Register:
    return Register(np.stack([a.values, b.values], axis=-1), a.dtype)


@operation
def split(a: Any) -> tuple[Register, Register]:
    if a.shape[-1] != 2:
        raise EmulationError(f"split needs a last axis of 2, got {a.shape}")
    return Register(a.values[..., 0], a.dtype), Register(a.values[..., 1], a.dtype)


@operation
def cast(input: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: bool = False) -> Any:
    return input.to(dtype, bitcast=bitcast)


def _reduction(name: str, function: Callable[..., np.ndarray]) -> None:
    def apply(input: Any, axis: Any = None, keep_dims: bool = False, **_: Any) -> Any:
        axis = None if axis is None else int(axis)
        values = function(input.values, axis=axis, keepdims=keep_dims)
        return register(values.astype(numbers.working(input.dtype)), input.dtype)

    setattr(Language, name, staticmethod(apply))


_reduction("sum", np.sum)
_reduction("max", np.fmax.reduce)
_reduction("min", np.fmin.reduce)
_reduction("xor_sum", np.bitwise_xor.reduce)
_reduction("reduce_or", np.bitwise_or.reduce)


@operation
def reduce(input: Any, axis: int, combine_fn: Callable[..., Any], keep_dims: bool = False) -> Any:
    parts = [
        Register(np.take(input.values, index, axis), input.dtype)
        for index in range(input.shape[axis])
    ]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [combine_fn(a, b) for a, b in zip(parts[:half], parts[half:], strict=True)]
    values = parts[0].values
    return register(np.expand_dims(values, axis) if keep_dims else values, input.dtype)


@operation
def associative_scan(input: Any, axis: int, combine_fn: Callable[..., Any]) -> Any:
    parts: list[Any] = []
    for index in range(input.shape[axis]):
        part = Register(np.take(input.values, index, axis), input.dtype)
        parts.append(combine_fn(parts[-1], part) if parts else part)
    return register(np.stack([values_of(part) for part in parts], axis), input.dtype)


@operation
def load(
    pointer: Pointer, mask: Any = None, other: Any = None, volatile: bool = False, **_: Any
) -> Any:
    machine().step(reads=pointer.shape == [] and not volatile, polls=volatile)
    return pointer.read(mask, other)


@operation
def store(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
    machine().step()
    pointer.write(value, mask)


def _atomic(name: str, function: Callable[[Any, Any], Any]) -> None:
    def apply(pointer: Pointer, val: Any, mask: Any = None, sem: Any = None, scope: Any = None):
        machine().step(polls=True)
        addresses = pointer.addresses(mask)
        for address in addresses:
            machine().meet(address, str(sem or "acq_rel"))
        old = pointer.update(function, val, mask)
        if pointer.shape == [] and len(addresses) == 1 and isinstance(old, Scalar):
            note("atomic", name, addresses[0], int(val), int(old), str(sem or "acq_rel"))
        return old

    setattr(Language, f"atomic_{name}", staticmethod(apply))


_atomic("add", lambda old, new: old + new)
_atomic("xchg", lambda old, new: new)
_atomic("max", max)
_atomic("min", min)
_atomic("or", lambda old, new: old | new)
_atomic("and", lambda old, new: old & new)


@operation
def atomic_cas(pointer: Pointer, cmp: Any, val: Any, sem: Any = None, scope: Any = None) -> Any:
    machine().step(polls=True)
    for address in pointer.addresses(None):
        machine().meet(address, str(sem or "acq_rel"))
    wanted = values_of(cmp)
    return pointer.update(lambda old, new: new if old == wanted else old, val, None)


tma = SimpleNamespace(
    async_load=copies.load,
    async_copy_global_to_shared=copies.load,
    async_store=copies.store,
    async_copy_shared_to_global=copies.store,
    async_atomic_add=copies.add,
    store_wait=copies.store_wait,
)
async_copy = SimpleNamespace(
    async_copy_global_to_shared=groups.copy,
    commit_group=groups.commit,
    wait_group=groups.wait,
    mbarrier_arrive=groups.arrive,
)
mbarrier = SimpleNamespace(
    MBarrierLayout=shared.BarrierLayout,
    init=barriers.init,
    invalidate=barriers.invalidate,
    wait=barriers.wait,
    expect=barriers.expect,
    arrive=barriers.arrive,
)
# What kernels import by name.
BY_NAME: dict[str, Callable[..., Any]] = {
    "tma_load": copies.load,
    "async_load": copies.load,
    "async_copy_global_to_shared": copies.load,
    "tma_store": copies.store,
    "async_store": copies.store,
    "async_copy_shared_to_global": copies.store,
    "tma_add": copies.add,
    "async_atomic_add": copies.add,
    "store_wait": copies.store_wait,
    "commit_group": groups.commit,
    "wait_group": groups.wait,
    "prefetch": lambda pointers, nbytes, aligned=True: pointers.places(None) and None,
    "reinterpret": shared.reinterpret,
    "fence_async_shared": shared.fence_async_shared,
    "warpgroup_mma": products.warpgroup_mma,
    "warpgroup_mma_init": products.warpgroup_mma_init,
    "warpgroup_mma_wait": products.warpgroup_mma_wait,
    "mma_v2": products.mma_v2,
}
