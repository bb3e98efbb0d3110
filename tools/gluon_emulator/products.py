"""WGMMA: products that run in order beside their warpgroup and are finished when waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.experimental.gluon import language as gl

from tools.gluon_emulator import numbers
from tools.gluon_emulator.errors import InFlight, Protocol
from tools.gluon_emulator.machine import Worker, current, machine, note
from tools.gluon_emulator.registers import Layout, Register
from tools.gluon_emulator.shared import SharedMemory


class Sum:
    """The accumulator of a product that may still run; only a wait makes a tensor of it."""

    def __init__(self, shape: list[int], dtype: gl.dtype, values: np.ndarray | None = None) -> None:
        self.shape, self.dtype, self.result = shape, dtype, values
        self.type = SimpleNamespace(shape=shape, element_ty=dtype, scalar=dtype, layout=Layout())

    def __getattr__(self, name: str) -> Any:
        raise InFlight(f"{current().name} uses the sum of a product before it waited for it")


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg", "lt", "gt"):
    setattr(Sum, f"__{_name}__", lambda self, *_: self.__getattr__("arithmetic"))


class Products:
    """The products of one partition."""

    def __init__(self) -> None:
        self.issued = 0
        self.running: list[tuple[Any, Any, Any, bool, Sum]] = []


def _products(worker: Worker) -> Products:
    if worker.products is None:
        worker.products = Products()
    return worker.products


def warpgroup_mma_init(value: Register) -> Sum:
    """Return a tensor as the accumulator of products to come."""
    return Sum(value.shape, value.dtype, value.values)


def warpgroup_mma(
    a: Any, b: SharedMemory, acc: Any, *, use_acc: Any = True, precision: Any = None,
    max_num_imprecise_acc: Any = None, is_async: bool = False,
) -> Any:  # fmt: skip
    """Start acc + a @ b; wait for it unless is_async."""
    machine().step()
    worker = current()
    if worker.num_warps % 4:
        raise Protocol(f"{worker.name} has {worker.num_warps} warps, which is no warpgroup")
    (rows, depth), (depth_b, columns) = a.shape, b.shape
    if depth != depth_b or list(acc.shape) != [rows, columns] or a.dtype != b.dtype:
        raise Protocol(f"{a.dtype}{a.shape} @ {b.dtype}{b.shape} + {acc.shape}")
    if rows % (16 * worker.num_warps):
        raise Protocol(f"{rows} rows are no multiple of 16 for each of {worker.num_warps} warps")
    products = _products(worker)
    products.issued += 1
    read = [x for x in (a, b) if isinstance(x, SharedMemory)]
    note("multiply", [(x.history, x.memory) for x in read])
    for operand in (a, b):
        if isinstance(operand, SharedMemory):
            operand.history.add(
                worker, operand.memory, writes=False, what="multiplies",
                lane=(worker.lane, "products"), epoch=products.issued,
            )  # fmt: skip
    total = Sum(list(acc.shape), acc.dtype)
    products.running.append((a, b, acc, bool(use_acc), total))
    return total if is_async else warpgroup_mma_wait(0, (total,))


def _values(operand: Any) -> np.ndarray:
    return operand.memory if isinstance(operand, SharedMemory) else operand.values


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = None) -> Any:
    """Wait until at most `num_outstanding` products run; return deps, finished ones as tensors."""
    if deps is None:
        raise Protocol("warpgroup_mma_wait needs deps")
    note("multiplied", int(num_outstanding))
    machine().step()
    worker = current()
    products = _products(worker)
    while len(products.running) > num_outstanding:
        # The operands are read at the latest moment that is legal.
        a, b, acc, use_acc, total = products.running.pop(0)
        result = np.matmul(_values(a), _values(b))
        if use_acc:
            result = result + (acc.result if isinstance(acc, Sum) else acc.values)
        total.result = numbers.rounded(result, total.dtype)
    worker.clock[(worker.lane, "products")] = products.issued - len(products.running)
    results = [
        Register(dep.result, dep.dtype) if isinstance(dep, Sum) and dep.result is not None else dep
        for dep in deps
    ]
    return results[0] if len(results) == 1 else tuple(results)


def mma_v2(a: Register, b: Register, acc: Register, *_: Any, **__: Any) -> Register:
    """Multiply what each warp has in registers: a sum in float32."""
    total = np.matmul(a.values, b.values) + acc.values
    return Register(numbers.rounded(total, acc.dtype), acc.dtype)


def finish(worker: Worker) -> None:
    """Check that a partition ends with all products waited for."""
    if _products(worker).running:
        raise Protocol(f"{worker.name} ends while its products run")
