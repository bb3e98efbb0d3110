"""Two orders of one product: the same numbers, n times fewer reads."""

from __future__ import annotations

import pytest
import torch

from tilewise.reference.matmul import matmul_inner, matmul_outer


@pytest.mark.parametrize("n", [1, 3, 8])
def test_matmul_i_reads_two_n_cubed_and_matmul_ii_two_n_squared(n):
    a, b = torch.randn(2, n, n, dtype=torch.float64)
    inner, inner_memory = matmul_inner(a, b)
    outer, outer_memory = matmul_outer(a, b)
    torch.testing.assert_close(inner, a @ b)
    torch.testing.assert_close(outer, a @ b)
    assert inner_memory.loads == 2 * n**3
    assert outer_memory.loads == 2 * n**2
    assert inner_memory.peak_sram == 2
    assert outer_memory.peak_sram == 2 * n
