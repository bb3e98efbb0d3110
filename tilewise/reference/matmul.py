"""Two orders of multiplying square matrices, with equal FLOPs and different numbers of reads.

Both do 2 n^3 FLOPs. Reads of A and B are counted, as in the paper; C is accumulated in place and
is not counted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.reference.memory import Memory

__all__ = ["matmul_inner", "matmul_outer"]


def matmul_inner(a: Tensor, b: Tensor) -> tuple[Tensor, Memory]:
    """Multiply by inner products: MatMul I, c_ij = sum_k a_ik b_kj, 2 n^3 reads.

    Args:
        a, b: the factors, (n, n) each.

    Returns:
        C (n, n), and the counting memory.

    Source: Stratos, "Efficient Attention", section 1.2.
    """
    n, memory = a.shape[0], Memory(a=a, b=b)
    c = torch.zeros_like(a)
    for i in range(n):
        for j in range(n):
            for k in range(n):
                a_ik = memory.load("a", slice(i, i + 1), slice(k, k + 1))
                b_kj = memory.load("b", slice(k, k + 1), slice(j, j + 1))
                c[i : i + 1, j : j + 1] += a_ik * b_kj
    return c, memory


def matmul_outer(a: Tensor, b: Tensor) -> tuple[Tensor, Memory]:
    """Multiply by outer products: MatMul II, C = sum_k (column k of A)(row k of B), 2 n^2 reads.

    u = A[:, k] and v = B[k, :] stay in SRAM, 2 n elements, while n^2 products use them.

    Args:
        a, b: the factors, (n, n) each.

    Returns:
        C (n, n), and the counting memory.

    Source: Stratos, "Efficient Attention", section 1.2.
    """
    n, memory = a.shape[0], Memory(a=a, b=b)
    c = torch.zeros_like(a)
    for k in range(n):
        u = memory.load("a", columns=slice(k, k + 1))
        v = memory.load("b", rows=slice(k, k + 1))
        c += u * v
    return c, memory
