"""Products of blocks of rows, and the row sums that the backward pass subtracts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from tests.kernels.cpu.test_attention import spec_of
from tilewise.kernels.cpu.attention.call import CallFrame
from tilewise.kernels.cpu.attention.delta import delta_kernel
from tilewise.kernels.cpu.attention.gradients import BackwardTasks, gradients_of, place_gradients
from tilewise.kernels.cpu.attention.problem import SCORE_ROW, TILE_M, Backward
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.blocks import (
    BLOCK,
    HALF,
    UNROLLED,
    add_block,
    rescale_first,
    set_first,
)
from tilewise.kernels.cpu.machine.threads import run_tasks
from tilewise.kernels.plan import Layout
from tilewise.kernels.spec import AttentionTensors

LANES = simd.lanes_of(np.float32)
WIDTH = 2 * LANES


@njit
def products(c, a, b, words, scale, columns, rows):
    """Rows 0 ... of c with a by rows, the next ones with a by columns, the last ones rescaled."""
    ldc = WIDTH
    set_first(c, 0, ldc, columns, rows, a, 0, words, 1, b, 0, ldc, words)
    add_block(c, BLOCK * ldc, ldc, columns, a, 0, 1, BLOCK, b, 0, words)
    rescale_first(
        c, 2 * BLOCK * ldc, ldc, columns, rows, a, 0, words, 1, b, 0, ldc, words, scale, 0
    )


@pytest.mark.parametrize("rows", [1, HALF, HALF + 1, BLOCK])
@pytest.mark.parametrize("columns", [LANES, WIDTH])
@pytest.mark.parametrize("words", [0, 2 * UNROLLED, 34])
def test_blocks_are_products(words: int, columns: int, rows: int) -> None:
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(n * words).astype(np.float32) for n in (BLOCK, WIDTH))
    c = random.standard_normal((3, BLOCK, WIDTH)).astype(np.float32)
    scale = random.standard_normal(BLOCK).astype(np.float32)
    panel = b.reshape(words, WIDTH).astype(np.float64)
    by_rows = a.reshape(BLOCK, words) @ panel
    by_columns = a.reshape(words, BLOCK).T @ panel
    before = c.copy()
    expected = c.astype(np.float64)
    expected[:, :, :columns] = np.stack(
        [by_rows, c[1] + by_columns, c[2] * scale[:, None] + by_rows]
    )[:, :, :columns]
    products(c.reshape(-1), a, b, words, scale, columns, rows)
    if words == 0:
        expected[0, :, :columns] = 0
    if rows <= HALF:  # a half of a block leaves the other as it was
        expected[::2, HALF:] = before[::2, HALF:]
    np.testing.assert_allclose(c, expected, rtol=0, atol=1e-5)


def test_tiles_are_whole_blocks_of_rows() -> None:
    assert TILE_M % BLOCK == 0
    assert BLOCK % UNROLLED == 0
    assert SCORE_ROW % LANES == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_delta_is_the_row_sum_less_dlse(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v, o, do = (torch.randn(2, 37, 3, 21).to(dtype) for _ in range(5))
    dlse = torch.randn(2, 3, 37)
    spec = spec_of([q, k, v], {}, {})
    layouts = AttentionTensors(*map(Layout.of, (q, k, v)))
    frame = CallFrame(spec, layouts, o)
    problem = frame.problem(AttentionTensors(q, k, v), o)
    place_gradients(problem.arrays.starts, do, q, k, v, frame.numbers, frame.numbers)
    grads = gradients_of(BackwardTasks.of(spec, None), do, q, k, v, torch.zeros(0))
    grads = grads._replace(rows_per_task=10, num_row_tasks=8)
    delta = dlse.clone()
    none = np.empty(0, np.float32)
    call = Backward(*problem, grads, none, delta.view(-1).numpy(), none, none, np.empty(0, int))
    run_tasks(delta_kernel, 8, call)
    expected = (do.double() * o.double()).sum(-1).transpose(1, 2) - dlse
    torch.testing.assert_close(delta.double(), expected, rtol=0, atol=1e-5)
