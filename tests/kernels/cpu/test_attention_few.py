"""Calls over keys of one tile and gradients of one query, which have kernels of their own; keys
that are multiplied where they lie."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor

from tilewise import ops
from tilewise.kernels.cpu.attention import plan as cpu
from tilewise.kernels.cpu.attention.forward_few import MOST_ROWS
from tilewise.kernels.cpu.machine.blocks import UNROLLED
from tilewise.kernels.cpu.machine.rows import why_not_dtype
from tilewise.ops import call as memory
from tilewise.testing import make_qkv

DTYPES = [
    dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    if why_not_dtype(dtype) is None
]
NAMES = [str(dtype)[6:] for dtype in DTYPES]
EPS = {torch.float64: 1e-13, torch.float32: 4e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}

# Batch, queries, keys, heads of q and of k, dims of q and of v.
FEW = {
    "one key": (2, 9, 1, 2, 2, 64, 64),
    "less than a register": (1, 16, 7, 4, 4, 64, 64),
    "groups": (2, 33, 65, 6, 2, 64, 32),
    "odd dims": (1, 20, 70, 2, 2, 33, 17),
    "several tiles of rows": (1, 150, 128, 4, 2, 64, 64),
    "more queries than keys": (1, 70, 20, 2, 1, 80, 96),
}
RULES = [{}, {"causal": True}, {"window": (5, 3)}, {"window": 20, "softmax_scale": 0.3}]


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_memory", memory._Memory())


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make(sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    batch, queries, keys, heads, kv_heads, dim, v_dim = sizes
    torch.manual_seed(3)
    shapes = ((queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, v_dim))
    return [torch.randn(batch, *shape, dtype=torch.float64).to(dtype) for shape in shapes]


def by_tiles(q: Tensor, k: Tensor, v: Tensor, **rule: object) -> tuple[Tensor, Tensor]:
    """Return o and lse by the kernel for any number of keys."""
    with (
        mock.patch.object(memory, "_memory", memory._Memory()),
        mock.patch.object(cpu, "_has_few_keys", return_value=False),
        mock.patch.object(cpu, "attention_forward_few", side_effect=AssertionError),
    ):
        found: tuple[Tensor, Tensor] = ops.attention(q, k, v, return_lse=True, **rule)
    return found


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_few_keys_have_the_bits_of_many(dtype: torch.dtype, name: str, rule: dict) -> None:
    tensors = make(FEW[name], dtype)
    expected = by_tiles(*tensors, **rule)
    for number in (1, 2):
        with threads(number), torch.no_grad():
            found = ops.attention(*tensors, return_lse=True, **rule)
            alone = ops.attention(*tensors, **rule)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        assert torch.equal(alone, expected[0])


def test_few_keys_are_given_to_their_kernel() -> None:
    tensors = make(FEW["groups"], torch.float32)
    with mock.patch.object(cpu, "attention_forward_few", side_effect=ZeroDivisionError):
        with pytest.raises(ZeroDivisionError):
            ops.attention(*tensors)
        for more in ({"softcap": 5.0}, {"softmax_scale": -0.1}, {"sinks": torch.zeros(6)}):
            ops.attention(*tensors, **more)
        ops.attention(*make((1, 5, 129, 2, 2, 16, 16), torch.float32))
        ops.attention(*make((1, MOST_ROWS + 1, 5, 1, 1, 16, 16), torch.float32))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_what_is_out_of_sight_touches_no_row(dtype: torch.dtype, which: str, poison: float) -> None:
    q, k, v = make((1, 70, 70, 4, 2, 64, 64), dtype)
    clean = ops.attention(q, k, v, causal=True)
    {"k": k, "v": v}[which][0, 50, 1, 3] = poison
    found, _ = ops.attention(q, k, v, causal=True, return_lse=True)
    # A matrix unit adds pairs of products in an order of its own. With more threads other tiles
    # share their keys, and are multiplied like those that hold the infinity or not.
    atol = 4 * EPS[dtype] if dtype == torch.bfloat16 else 0.0
    for number in (1, 2, 3):
        with threads(number):
            tiles, _ = by_tiles(q, k, v, causal=True)
        assert torch.allclose(found, tiles, rtol=0, atol=atol, equal_nan=True)
    assert found[:, :50].isfinite().all()
    assert torch.allclose(found[:, :50], clean[:, :50], rtol=0, atol=atol)
    assert not found[0, 50:, 2:].isfinite().all()


@pytest.mark.parametrize("keys", [7, 20, 65])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_no_row_reads_the_keys_of_the_next_sequence(dtype: torch.dtype, keys: int) -> None:
    q, k, v = make((2, 16, keys, 2, 2, 64, 64), dtype)
    expected = ops.attention(q[:1], k[:1], v[:1])
    k[1], v[1] = math.nan, math.inf
    assert torch.equal(ops.attention(q, k, v)[:1], expected)


# Rows of a half, one and several blocks, and several tiles of them; keys of one tile and of
# several, in whole tiles and registers and not.
LYING = {
    "few rows": (1, 3, 128, 4, 4, 64, 64),
    "few rows, several tiles": (1, 4, 300, 2, 2, 64, 96),
    "rows of a tile": (1, 16, 257, 6, 2, 32, 64),
    "tiles of rows": (1, 150, 261, 2, 2, 64, 64),
    "more than the tasks of few": (1, 600, 90, 2, 1, 64, 64),
}


@pytest.mark.parametrize("poison", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("name", LYING)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_keys_where_they_lie_have_the_bits_of_those_in_a_cache(
    dtype: torch.dtype, name: str, poison: float
) -> None:
    """Keys of a cache are brought to scratch before they are multiplied."""
    q, k, v = make(LYING[name], dtype)
    if poison != 0.0:
        k[0, -2, 0, 3] = v[0, -1, -1, 5] = v[0, 40, 0, 1] = poison
    keys = k.shape[1]
    caches = [torch.cat([x[0], torch.full_like(x[0, :3], math.nan)]) for x in (k, v)]
    expected, expected_lse = ops.paged_attention(
        q[0], *[x[: keys + 1][None] for x in caches],
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        seqlens_k=torch.tensor([keys], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, q.shape[1]], dtype=torch.int32), max_seqlen_q=q.shape[1],
        return_lse=True,
    )  # fmt: skip
    # Rows behind the last key are another's, and are not to be read.
    k, v = (x[:keys][None] for x in caches)
    for number in (1, 2):
        with threads(number):
            found, lse = ops.attention(q, k, v, causal=True, return_lse=True)
        assert same(found[0], expected)
        assert same(lse[0], expected_lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_rows_that_see_nothing_are_zero_beside_an_infinite_value(dtype: torch.dtype) -> None:
    q, k, v = make((1, 200, 100, 2, 2, 64, 64), dtype)
    v[0, 3, 0, 0] = math.inf
    for _ in range(3):  # once it was what memory happened to hold
        found, lse = ops.attention(q, k, v, causal=True, return_lse=True)
        assert (found[:, :100] == 0).all()
        assert (lse[..., :100] == -math.inf).all()


def test_strides_of_dims_of_one_element_mean_nothing() -> None:
    q, k, v = make((1, 16, 16, 4, 4, 64, 64), torch.float32)
    expected = ops.attention(q, k, v)
    strange = [x.as_strided(x.shape, (7, *x.stride()[1:])) for x in (q, k, v)]
    assert all(x.is_contiguous() for x in strange)
    assert torch.equal(ops.attention(*strange), expected)


def gradients(tensors: list[Tensor], do: Tensor, **rule: object) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    return torch.autograd.grad(ops.attention(*leaves, **rule), leaves, do)


# Of one tile of keys and one of rows: parts of a register and of a word of keys, groups, rows that
# see nothing, keys that nobody sees.
TILES = {
    "less than a register": (1, 16, 7, 4, 4, 64, 64),
    "one register": (2, 16, 16, 4, 4, 64, 64),
    "groups": (2, 20, 66, 6, 2, 64, 32),
    "more queries than keys": (1, 60, 20, 2, 2, 32, 96),
    "all": (1, 64, 128, 2, 2, 64, 64),
}


@pytest.mark.parametrize("poison", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_gradients_of_a_tile_have_the_bits_of_many(
    dtype: torch.dtype, name: str, rule: dict, poison: float
) -> None:
    q, k, v = make(TILES[name], dtype)
    if poison != 0.0:
        k[0, -1, 0, 3] = v[0, -1, -1, 5] = poison
    do = torch.randn(*q.shape[:3], v.shape[-1], dtype=dtype)
    with (
        mock.patch.object(cpu, "_has_few", return_value=False),
        mock.patch.object(memory, "_memory", memory._Memory()),
    ):
        expected = gradients([q, k, v], do, **rule)
    takes = TILES[name][2] % UNROLLED == 0
    hidden = mock.patch.object(cpu, "attention_backward", side_effect=AssertionError)
    for number in (1, 2):
        with threads(number), hidden if takes else nullcontext():
            found = gradients([q, k, v], do, **rule)
        assert all(same(x, y) for x, y in zip(found, expected, strict=True))


# A step, one tile, and one query more than fits a tile.
LYING_OTHERWISE = {"a query": (2, 1, 90, 4, 2, 64, 64), "a tile": (2, 20, 66, 6, 2, 64, 32),
                   "tiles": (1, 90, 150, 2, 2, 64, 64)}  # fmt: skip


@pytest.mark.parametrize("name", LYING_OTHERWISE)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_gradients_have_the_same_bits_however_do_lies(dtype: torch.dtype, name: str) -> None:
    """That of `o.sum()` is one number, expanded."""
    tensors = make(LYING_OTHERWISE[name], dtype)
    shape = (*tensors[0].shape[:3], tensors[2].shape[-1])
    wide = torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.float64).to(dtype)
    lying = [torch.ones((), dtype=dtype).expand(shape), wide[..., : shape[-1]], wide[..., ::2],
             wide[:1, :1, :, 3:4].expand(shape)]  # fmt: skip
    for do in lying:
        assert not do.is_contiguous()
        expected = gradients(tensors, do.contiguous())
        for x, y in zip(gradients(tensors, do), expected, strict=True):
            assert torch.equal(x, y)


# Keys of one chunk and of several, and a group whose rows are padded.
ROWS = {
    "a step": (2, 1, 32, 4, 4, 64, 64),
    "chunks": (2, 1, 1300, 4, 2, 64, 32),
    "odd dims": (1, 1, 75, 6, 2, 33, 17),
    "wide": (1, 1, 600, 2, 1, 192, 128),
}


@pytest.mark.parametrize(
    "rule", [{}, {"causal": True}, {"window": 40}, {"softmax_scale": -0.3}], ids=str
)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_the_gradient_of_one_query(dtype: torch.dtype, name: str, rule: dict) -> None:
    tensors = make(ROWS[name], dtype)
    do = torch.randn(*tensors[0].shape[:3], tensors[2].shape[-1]).to(dtype)
    with mock.patch.object(cpu, "attention_backward", side_effect=AssertionError):
        found = gradients(tensors, do, **rule)
    doubles = [x.double() for x in tensors]
    truth = gradients(doubles, do.double(), backend="reference", **rule)
    for x, expected in zip(found, truth, strict=True):
        assert x.dtype == dtype
        assert (x.double() - expected).abs().max() <= EPS[dtype] * expected.abs().max()


def test_bits_of_one_query_repeat_on_any_number_of_threads() -> None:
    tensors = make((1, 1, 2100, 3, 3, 64, 64), torch.float32)
    do = torch.randn(1, 1, 3, 64)
    first = gradients(tensors, do)
    for number in (1, 2, 5):
        with threads(number):
            for x, expected in zip(gradients(tensors, do), first, strict=True):
                assert torch.equal(x, expected)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_one_query_has_no_gradient_from_keys_out_of_sight(poison: float) -> None:
    q, k, v = make((1, 1, 600, 4, 2, 64, 64), torch.float32)
    do = torch.randn(1, 1, 4, 64)
    expected = gradients([q, k[:, -41:], v[:, -41:]], do)
    k[:, :-41], v[:, :-41] = poison, poison
    dq, dk, dv = gradients([q, k, v], do, window=(40, 0))
    assert torch.allclose(dq, expected[0], rtol=0, atol=1e-5)
    for x, same_x in ((dk, expected[1]), (dv, expected[2])):
        assert torch.allclose(x[:, -41:], same_x, rtol=0, atol=1e-5)
        assert (x[:, :-41] == 0).all()


def test_one_key_moves_nothing_but_its_value() -> None:
    q, k, v = make((2, 1, 1, 4, 2, 64, 64), torch.float32)
    dq, dk, dv = gradients([q, k, v], torch.randn(2, 1, 4, 64))
    assert (dq == 0).all()
    assert (dk == 0).all()
    assert (dv != 0).any()


@pytest.mark.parametrize("sizes", [(1, 1, 16, 12, 12, 64), (1, 16, 16, 4, 4, 64)], ids=str)
def test_first_calls_of_several_threads_are_right(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may be the first to prepare what all then share, and let go of what others use."""
    q, k, v = make_qkv(*sizes)
    do = torch.randn_like(q)

    def both(start: threading.Barrier | None = None) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        if start is not None:
            start.wait()
        found: list[Tensor] = []
        for _ in range(5):
            o = ops.attention(*leaves)
            found = [o.detach(), *torch.autograd.grad(o, leaves, do)]
        return found

    expected = both()
    for _ in range(10):
        monkeypatch.setattr(memory, "_memory", memory._Memory())
        start = threading.Barrier(4)
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(both, start) for _ in range(4)]:
                assert all(map(torch.equal, future.result(), expected))
