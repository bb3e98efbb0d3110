"""Words of dropout in a WGMMA's layout: the reference's bits, where threads want them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.gluon.backward.logits import (
    draw_words,
    drop_gradients,
    kept_pairs,
    masks_of_pairs,
    words_of_dropout,
    words_of_pairs,
)
from tilewise.kernels.gluon.device.dropout import draw_of, drop, drop_pairs, random_words
from tilewise.kernels.gluon.device.warpgroup import operand_layout, pack, sum_layout, unpack
from tilewise.reference import dropout
from tools.gluon_emulator import emulated

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
SEED = (-(2**61) + 12345, 2**33 + 77)
HEAD, ROW, KEY = 3, 192, 128


@gluon.jit
def _store(out, x, N: gl.constexpr):
    row = gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))
    column = gl.arange(0, N, gl.SliceLayout(0, x.type.layout))
    gl.store(out + gl.expand_dims(row * N, 1) + gl.expand_dims(column, 0), x.to(gl.float32))


@gluon.jit
def of_queries(philox, out, out_pairs, limit, head, first_row, first_key, N: gl.constexpr):
    """Drop ones of 64 queries and N keys, as float32 and as pairs."""
    S: gl.constexpr = sum_layout(N)
    ones = gl.full([64, N], 1.0, gl.float32, S)
    words = random_words(draw_of(philox, limit), head, first_row, first_key, N, S)
    _store(out, drop(ones, words, gl.zeros_like(ones)), N)
    pairs = drop_pairs(pack(ones, gl.bfloat16), words)
    _store(out_pairs, unpack(pairs, gl.bfloat16, operand_layout(64)), N)


@gluon.jit
def of_keys(philox, out, out_pairs, limit, head, first_row, first_key, N: gl.constexpr):
    """Drop pairs of ones of 64 keys and N queries by a word of each query."""
    ones = gl.full([64, N], 1.0, gl.float32, sum_layout(N))
    words = words_of_dropout(ones, draw_of(philox, limit), head, first_row, first_key)
    pairs = pack(ones, gl.bfloat16)
    kept = unpack(pairs & kept_pairs(pairs, words), gl.bfloat16, operand_layout(64))
    _store(out, kept, N)
    _store(out_pairs, kept, N)


@gluon.jit
def of_pairs(philox, out, out_pairs, limit, head, first_row, first_key, N: gl.constexpr):
    """Drop ones of 64 keys and N queries by words of two, as float32 and as pairs."""
    S: gl.constexpr = sum_layout(N)
    ones = gl.full([64, N], 1.0, gl.float32, S)
    drawn = draw_words(N, draw_of(philox, limit), head, first_row, first_key)
    words = words_of_pairs(ones, drawn)
    delta = gl.zeros([N], gl.float32, gl.SliceLayout(0, S))
    _store(out, drop_gradients(ones, words, 1.0, delta), N)
    pairs = pack(ones, gl.bfloat16)
    kept = pairs & masks_of_pairs(pairs, words)
    _store(out_pairs, unpack(kept, gl.bfloat16, operand_layout(64)), N)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("n", [64, 128])
@pytest.mark.parametrize("threshold", [1, 26, 128, 255, 256])
@pytest.mark.parametrize(
    "kernel", [of_queries, of_keys, of_pairs], ids=["queries", "keys", "pairs"]
)
def test_words_are_the_references(kernel: object, threshold: int, n: int, device: str) -> None:
    philox = torch.tensor(SEED, device=device)
    results = [torch.full((64, n), torch.nan, device=device) for _ in range(2)]
    arguments = (philox, *results, (threshold << 16) - 1, HEAD, ROW, KEY, n)
    if device == "cpu":
        with emulated():
            kernel[(1,)](*arguments, num_warps=4)  # type: ignore[index]
    else:
        kernel[(1,)](*arguments, num_warps=4)  # type: ignore[index]
    keys_first = kernel is not of_queries
    rows, keys = (n, 64) if keys_first else (64, n)
    keep = dropout.keep_mask(
        philox, (1, 1, rows, keys), threshold / 256,
        first_head=HEAD, first_query=ROW, first_key=KEY,
    )[0, 0]  # fmt: skip
    want = (keep.T if keys_first else keep).float()
    for result in results:
        assert torch.equal(result, want)
