"""Run a compiled kernel on as many threads as torch uses.

Kernels are compiled without numba's own thread pool: its fall-back layer aborts the process when
two Python threads enter it, its OpenMP layer when a forked child does. Here a kernel is a function
that releases the GIL and takes task numbers from a shared counter until none is left. It runs on
the caller's thread and on helpers from a pool; a helper that starts late finds fewer tasks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, typeof, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from tilewise.kernels.cpu.machine.linked import LinkedCompiler
from tilewise.kernels.cpu.machine.once import compile_once


@functools.cache
def _sources() -> list[tuple[str, float, int]]:
    """Return the path, time of modification and size of every file of the folder cpu/, from which
    kernels are compiled; read once per process."""
    folder = Path(__file__).parents[1]
    files = sorted(folder.rglob("*.py"))
    return [
        (str(file.relative_to(folder)), file.stat().st_mtime, file.stat().st_size) for file in files
    ]


def kernel(function: Callable[..., Any]) -> Any:
    """Decorate a kernel that Python calls: it is compiled when it is first called, releases the
    GIL, and is compiled once per machine, since other processes load it.

    Numba compiles a cached function again when its own file changes. Kernels are compiled from all
    files of the folder cpu/, so the stamp covers them all. If no cache can be written, nothing is
    cached.
    """
    try:
        compiled = njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:
        return njit(nogil=True, error_model="numpy")(function)
    if hasattr(compiled, "py_func"):  # numba may be configured to compile nothing
        compile_once(compiled, _sources())
    return compiled


# Functions that kernels call, never called from Python: no wrapper and no machine code is made.
inner = njit(
    error_model="numpy",
    no_cpython_wrapper=True,
    no_cfunc_wrapper=True,
    pipeline_class=LinkedCompiler,
)
# Functions with several definitions, one for each kind of arguments.
overloaded = functools.partial(
    overload, jit_options={"error_model": "numpy", "pipeline_class": LinkedCompiler}
)
# Functions that kernels call for every row or block, inlined because a call would count references
# to each array atomically.
inlined = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, inline="always")


def _new_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="tilewise-kernel")


_pool = _new_pool()


def pool() -> ThreadPoolExecutor:
    """Return the pool of helper threads that all kernels of this process share, one for each
    core."""
    return _pool


def _renew_pool() -> None:
    """Replace the pool in a forked child, which inherits the pool but none of its threads."""
    global _pool
    _pool = _new_pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_pool)


def run_tasks(function: Callable[..., None], num_tasks: int, *args: Any) -> None:
    """Call function(*args, counter, num_tasks) on as many threads as torch uses, at most one for
    each task, and return when all have ended.

    counter is a new int64 array (1,) of zero, from which each call takes task numbers by
    `next_task` until none is left. This thread takes part; an error of any thread is raised.
    """
    counter = np.zeros(1, np.int64)
    helpers = min(num_tasks, torch.get_num_threads()) - 1
    futures = [_pool.submit(function, *args, counter, num_tasks) for _ in range(helpers)]
    try:
        function(*args, counter, num_tasks)
    finally:
        for future in futures:
            future.cancel() or future.result()


def run_alone(function: Callable[..., None], num_tasks: int, *args: Any) -> None:
    """Call function(*args, counter, num_tasks) on this thread only: for kernels of microseconds.

    counter is a new int64 array (1,) of zero, from which the kernel takes the numbers of its tasks.
    """
    function(*args, np.zeros(1, np.int64), num_tasks)


def entry_of(function: Callable[..., None], args: tuple[Any, ...]) -> Callable[..., None]:
    """Return the compiled function that a kernel runs for arguments of these types, or the kernel
    itself if it was not compiled for them.

    The kernel must have been called with such arguments before. Numba's search takes a call 0.3 us;
    the caller guarantees the types.
    """
    compiled = getattr(function, "overloads", {}).get(tuple(map(typeof, args)))
    found: Callable[..., None] = getattr(compiled, "entry_point", function)
    return found


@intrinsic
def next_task(typingctx, counter):
    """Return counter[0] and raise it by one, atomically; counter is the int64 array of
    `run_tasks`."""

    def codegen(context, builder, sig, args):
        data = cgutils.create_struct_proxy(counter)(context, builder, value=args[0]).data
        return builder.atomic_rmw("add", data, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(counter), codegen


@inner
def scratch(count, like):
    """Return an uninitialised array of `count` elements of like's dtype on a cache-line
    boundary."""
    raw = np.empty(count + 64 // like.itemsize, like.dtype)
    skip = (-raw.ctypes.data % 64) // like.itemsize
    return raw[skip : skip + count]


@inner
def zero_scratch(count, like):
    """Return an array of `count` zeros of like's dtype on a cache-line boundary."""
    array = scratch(count, like)
    array[:] = 0
    return array


@intrinsic
def borrowed(typingctx, value):
    """Return `value`, an array or a tuple of arrays and numbers, as arrays over the same memory
    that count no references to it.

    A call counts references to the arrays it passes on, by atomic additions of 5 ns each: a third
    of a backward pass. A borrowed array has no count; its owner must outlive it, see `keep_alive`.
    """

    def lend(context, builder, kind, item):
        if isinstance(kind, types.Array):
            array = cgutils.create_struct_proxy(kind)(context, builder, value=item)
            array.meminfo = cgutils.get_null_value(array.meminfo.type)
            array.parent = cgutils.get_null_value(array.parent.type)
            return array._getvalue()
        if isinstance(kind, types.BaseTuple):
            items = [
                lend(context, builder, each, builder.extract_value(item, index))
                for index, each in enumerate(kind)
            ]
            return context.make_tuple(builder, kind, items)
        return item

    def codegen(context, builder, sig, args):
        return lend(context, builder, value, args[0])

    return value(value), codegen


@intrinsic
def bare(typingctx, array):
    """Return a pointer to array[0], from which vectors are loaded and numbers indexed as from the
    array.

    Passing on even a borrowed array calls a function that finds nothing to count; a pointer costs
    nothing. The array must outlive it, see `keep_alive`.
    """

    def codegen(context, builder, sig, args):
        return cgutils.create_struct_proxy(array)(context, builder, value=args[0]).data

    return types.CPointer(array.dtype)(array), codegen


@intrinsic
def keep_alive(typingctx, owner):
    """Keep the memory of `owner`, an array or a tuple of them, alive until this call; it does
    nothing else."""

    def codegen(context, builder, sig, args):
        return context.get_dummy_value()

    return types.void(owner), codegen
