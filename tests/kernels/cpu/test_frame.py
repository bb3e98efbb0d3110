"""Arguments of kernels as words: what is written down comes back, and one plan serves threads."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numba import njit, typeof

from tilewise import ops
from tilewise.kernels.cpu.attention.frame import frame_of
from tilewise.kernels.cpu.attention.problem import NO_MASK, Arrays, Problem, Rule, Sizes
from tilewise.kernels.cpu.machine.frame import array_at, num_words, reader, words_of


class Inner(NamedTuple):
    is_on: bool
    factor: float
    table: np.ndarray


class Outer(NamedTuple):
    count: int
    inner: Inner
    is_off: bool
    last: int


def test_what_is_written_down_comes_back_in_a_kernel() -> None:
    table = np.arange(6, dtype=np.int32).reshape(2, 3)
    given = Outer(-7, Inner(True, math.pi, table), False, 1 << 62)
    kind = typeof(given)
    read = reader(kind)

    @njit
    def unpack(frame):
        value = read(frame, 1)
        rows = value.inner.table
        rows[1, 2] = 50
        return value.count, value.inner.is_on, value.inner.factor, rows.sum(), value.is_off, (
            value.last, rows.shape)  # fmt: skip

    frame = np.array([99, *words_of(given)], np.int64)
    assert len(frame) == 1 + num_words(kind)
    assert unpack(frame) == (-7, True, math.pi, 60, False, (1 << 62, (2, 3)))
    assert table[1, 2] == 50  # an array is its memory, not a copy


def test_an_array_is_read_and_written_at_its_address() -> None:
    @njit
    def double(address, like):
        values = array_at(address, 3, like)
        values *= 2
        return values.sum()

    for dtype in (np.float32, np.float64):
        values = np.array([1, 2, 3, 4], dtype)
        assert double(values.ctypes.data, values[:0]) == 12
        assert values.tolist() == [2, 4, 6, 4]


def test_equal_sizes_of_another_problem_bring_their_own_arrays() -> None:
    sizes, rule = Sizes(*range(len(Sizes._fields))), Rule(True, 0.5, 0.0, False, False)
    frames = []
    for value in (1, 2):
        like, starts = np.empty(0, np.float32), np.full((1, 12), value, np.int64)
        heads = np.full(4, value, np.float32)
        arrays = Arrays(like, like, starts, np.empty((0, 0), np.int32), heads, heads)
        frames.append((frame_of(Problem(sizes, rule, arrays)), arrays))
    differing = np.flatnonzero(frames[0][0] != frames[1][0])
    starts_at = len(words_of((sizes, rule, NO_MASK))) + 5  # behind the words of dropout
    assert differing[0] == starts_at


CALLS = {
    "tile by tile": (2, 16, 16),
    "one query": (2, 1, 40),
    "on all threads": (1, 200, 200),
    "one query on all threads": (4, 1, 3000),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_share_a_plan(name: str, dtype: torch.dtype) -> None:
    batch, rows, keys = CALLS[name]

    def tensors(seed: int) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(seed)
        shapes = [(batch, n, 4, 32) for n in (rows, keys, keys, rows)]
        return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]

    def compute(seed: int) -> list[torch.Tensor]:
        *leaves, do = tensors(seed)
        q, k, v = (x.requires_grad_() for x in leaves)
        o = ops.attention(q, k, v)
        return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]

    alone = [compute(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            together = pool.map(compute, [0, 1, 2, 3])
            for found, expected in zip(together, alone, strict=True):
                assert all(map(torch.equal, found, expected))
