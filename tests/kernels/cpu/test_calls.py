"""A kernel that is called where it lies computes what it does when Python calls it."""

from __future__ import annotations

import numpy as np
import pytest
from numba import types

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
