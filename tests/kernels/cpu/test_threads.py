"""How CPU kernels are compiled, cached and spread over threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import njit
from numba.core.codegen import JITCodeLibrary

from tests import warm
from tilewise.kernels.cpu.machine import threads

ROOT = str(Path(__file__).parents[3])
IMPORT_LAUNCHERS = """
from tilewise.kernels.cpu import merge, rope
from tilewise.kernels.cpu.attention import plan
from tilewise.kernels.cpu.paged import cache, plan
from tilewise.kernels.cpu.attention.forward import attention_forward
from tilewise.kernels.cpu.paged.cache import _scatter_rows
assert not attention_forward.signatures
assert not _scatter_rows.signatures
"""

WRITE_ONE_ROW = """
import torch
from tilewise.kernels.cpu.paged import cache as cache_ops
k, cache = torch.randn(1, 1, 8), torch.zeros(1, 4, 1, 8)
cache_ops.write_kv_cache(k, k, cache, cache.clone(), torch.tensor([2]))
assert torch.equal(cache[0, 2], k[0])
assert _scatter_rows.signatures
"""

RUN_IN_A_FORKED_CHILD = """
import os, numpy as np
from tilewise.kernels.cpu.machine import threads

def work(seen, counter, num_tasks):
    seen.append(1)

import torch
torch.set_num_threads(2)
threads.run_tasks(work, 2, [])
child = os.fork()
if child == 0:
    seen = []
    threads.run_tasks(work, 2, seen)
    os._exit(0 if seen else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def run(script: str, **environment: str) -> None:
    subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": ROOT, **environment},
        check=True,
        timeout=240,
    )


@threads.inner
def halve(number):
    if number % 2:
        raise ValueError("number must be even")
    return number // 2


def test_what_kernels_call_becomes_machine_code_as_a_part_of_them_only(monkeypatch) -> None:
    made, make = [], JITCodeLibrary._finalize_specific

    def counted(library) -> None:
        made.append(library.name)
        make(library)

    monkeypatch.setattr(JITCodeLibrary, "_finalize_specific", counted)
    kernels = [njit(lambda number, more=more: halve(number) + more) for more in (1, 2)]
    assert [kernel(8) for kernel in kernels] == [5, 6]
    assert sum("lambda" in name for name in made) == 2
    assert not any("halve" in name for name in made)
    with pytest.raises(ValueError, match="must be even"):
        kernels[1](3)


def test_launchers_compile_nothing_when_imported_and_kernels_run_without_a_cache() -> None:
    run(IMPORT_LAUNCHERS + WRITE_ONE_ROW, NUMBA_CACHE_DIR="/proc/no-such-folder")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    environment = os.environ | {"PYTHONPATH": ROOT}
    warm.run([sys.executable, "-c", RUN_IN_A_FORKED_CHILD], env=environment, check=True)


def test_an_error_in_a_helper_thread_reaches_the_caller() -> None:
    def fail(counter: np.ndarray, num_tasks: int) -> None:
        raise RuntimeError("from a task")

    with pytest.raises(RuntimeError, match="from a task"):
        threads.run_tasks(fail, 2)


def test_a_kernel_is_entered_past_the_search_for_its_code() -> None:
    @njit
    def add(numbers, more):
        numbers[:] += more

    numbers = np.zeros(3, np.float32)
    assert threads.entry_of(add, (numbers, 1)) is add  # nothing is compiled yet
    add(numbers, 1)
    enter = threads.entry_of(add, (numbers, 2))
    assert enter is not add
    enter(numbers, 2)
    assert numbers.tolist() == [3, 3, 3]
    assert threads.entry_of(add, (numbers.astype(np.float64), 2)) is add
    assert threads.entry_of(add.py_func, (numbers, 2)) is add.py_func


def test_a_bare_pointer_reads_and_writes_its_array() -> None:
    @njit
    def swap(array):
        pointer = threads.bare(array)
        pointer[0], pointer[2] = pointer[2], pointer[0]
        return pointer[1]

    array = np.array([1, 2, 3])
    assert swap(array) == 2
    assert array.tolist() == [3, 2, 1]


def test_the_cache_stamp_changes_with_any_file_of_the_folder() -> None:
    names = {name for name, _, _ in threads._sources()}
    assert {
        "machine/simd.py",
        "machine/gemm.py",
        "attention/forward.py",
        "paged/decode.py",
    } <= names
