"""A kernel that is called where it lies computes what it does when Python calls it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import types

from tests import warm
from tilewise.kernels.cpu.machine.calls import address_of, call_at, empty_of
from tilewise.kernels.cpu.machine.threads import kernel


@kernel
def _scale(like, numbers, factor, negates, sums):
    sums[0] = 0.0
    for number in numbers:
        sums[0] += number * factor
    if negates:
        sums[0] = -sums[0]
    sums[1] = like.itemsize
    sums[2] = len(like)
    if factor > 100:
        raise ValueError


@kernel
def _call(address, size, numbers, factor, negates, sums):
    call_at(address, (empty_of(size), numbers, factor, negates, sums))
    sums[0] += types.float64(1.0)


@pytest.mark.parametrize("dtype", [np.int16, np.float64])
@pytest.mark.parametrize("negates", [False, True])
def test_it_gets_all_arguments(dtype, negates):
    like, sums = np.empty(0, dtype), np.zeros(3)
    address = address_of(_scale, like, np.zeros(1), 1, True, sums)
    _call(address, like.itemsize, np.arange(5.0), 3, negates, sums)
    assert sums.tolist() == [1 + (-30 if negates else 30), like.itemsize, 0]


def test_what_it_raises_reaches_python():
    like, sums = np.empty(0, np.int16), np.zeros(3)
    address = address_of(_scale, like, np.zeros(1), 1, True, sums)
    with pytest.raises(ValueError):
        _call(address, 2, np.arange(5.0), 101, False, sums)
    assert sums[0] == 1010


def test_it_is_compiled_once_for_python_and_for_kernels():
    like, sums = np.empty(0, np.float32), np.zeros(3)
    _scale(like, np.arange(2.0), 2, False, sums)
    before = len(_scale.overloads)
    address_of(_scale, like, np.zeros(1), 1, True, sums)
    assert len(_scale.overloads) == before


_ELSEWHERE = """
import numpy as np
from numba import types
from tilewise.kernels.cpu.machine.calls import address_of, call_at, empty_of
from tilewise.kernels.cpu.machine.threads import kernel

@kernel
def scale(like, numbers, factor, sums):
    sums[0] = (numbers * factor).sum() + like.itemsize

@kernel
def call(address, size, numbers, factor, sums):
    call_at(address, (empty_of(size), numbers, factor, sums))

sums = np.zeros(1)
address = address_of(scale, np.empty(0, np.int16), np.zeros(1), 1, sums)
call(address, 2, np.arange(5.0), 3, sums)
loaded = [sum(x.stats.cache_hits.values()) for x in (scale, call)]
print(*loaded, sums[0])
"""


def test_another_process_loads_both_and_calls_where_it_has_them(tmp_path):
    """An address is that of a process; nothing that is kept on the disk may hold it."""
    script = tmp_path / "elsewhere.py"
    script.write_text(_ELSEWHERE)
    root = str(Path(__file__).parents[3])
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": root}
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
    told = [
        warm.run([sys.executable, "-c", code, str(script)], env=environment, check=True)
        .stdout.split()
        for _ in range(2)
    ]  # fmt: skip
    assert told == [["0", "0", "32.0"], ["1", "1", "32.0"]]
