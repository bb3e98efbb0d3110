"""Products of few rows, on which the decode step of a recurrence counts: their bits on a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _product(
    a_ptr,
    b_ptr,
    c_ptr,
    o_ptr,
    num_rows,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute o (ROWS, COLUMNS) = c + a b, STEP of the depth at a time; later rows are zeros."""
    row, column, some = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, STEP)
    tile = row[:, None] * COLUMNS + column[None, :]
    inside = (row < num_rows)[:, None]
    total = tl.load(c_ptr + tile, mask=inside, other=0.0)
    for begins in range(0, DEPTH, STEP):
        at = begins + some
        a = tl.load(a_ptr + row[:, None] * DEPTH + at[None, :], mask=inside, other=0.0)
        b = tl.load(b_ptr + at[:, None] * COLUMNS + column[None, :])
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(o_ptr + tile, total, mask=inside)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.bfloat16, "tf32"), (torch.float32, "tf32"), (torch.float32, "tf32x3")],
    ids=["bfloat16", "tf32", "three passes"],
)
def test_a_row_has_the_same_bits_among_few_rows_and_many(dtype, precision):
    generator = torch.Generator("cuda").manual_seed(0)
    rows, columns, depth = 64, 32, 128

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    a, b, c = normal(rows, depth).to(dtype), normal(depth, columns).to(dtype), normal(rows, columns)

    def product(size: int, step: int, num_warps: int) -> torch.Tensor:
        o = torch.zeros_like(c)
        _product[(1,)](
            a, b, c, o, size, size, columns, depth, step, precision,
            num_warps=num_warps,
        )  # fmt: skip
        return o[:16]

    wanted = product(64, depth, 4)
    assert torch.equal(product(16, depth, 4), wanted)
    assert torch.equal(product(16, depth, 2), wanted)
    # Three passes go through all of the depth one after the other.
    if precision != "tf32x3":
        assert torch.equal(product(16, 32, 4), wanted)
