"""Functions of a register of floats, lane by lane."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import numpy as np
import pytest
from numba import njit

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.gemm import lanes_in


@njit
def powers(x: np.ndarray, y: np.ndarray) -> None:
    for i in range(0, len(x), lanes_in(x)):
        simd.store(y, i, simd.exp2(simd.load(x, i)))


@njit
def tangents(x: np.ndarray, y: np.ndarray) -> None:
    for i in range(0, len(x), lanes_in(x)):
        simd.store(y, i, simd.tanh(simd.load(x, i)))


def tanh(x: Decimal) -> Decimal:
    decay = (-2 * x).exp()
    return (1 - decay) / (1 + decay)


@pytest.mark.parametrize(
    ("kernel", "truth", "most"),
    [(powers, lambda x: Decimal(2) ** x, 1.0), (tangents, tanh, 3.0)],
    ids=["exp2", "tanh"],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_function_is_accurate_to_units_of_its_dtype(
    dtype: type, kernel: Callable[..., None], truth: Callable[[Decimal], Decimal], most: float
) -> None:
    x = np.random.default_rng(0).uniform(-3.0, 3.0, 512).astype(dtype)
    y = np.empty_like(x)
    kernel(x, y)
    exact = [truth(Decimal(float(number))) for number in x]
    units = [
        abs(Decimal(float(found)) - expected) / Decimal(float(np.spacing(dtype(abs(expected)))))
        for found, expected in zip(y, exact, strict=True)
    ]
    assert max(units) <= most


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_integers_have_exact_powers(dtype: type) -> None:
    """A row of one key has p = 1."""
    x = np.arange(-64, 64).astype(dtype)
    y = np.empty_like(x)
    powers(x, y)
    assert (y == np.exp2(x)).all()
