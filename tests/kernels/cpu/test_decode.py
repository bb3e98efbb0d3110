"""Decoding on a CPU: chunks of every size, 8-bit keys multiplied as integers, facts it goes by."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from tests.kernels.quantised_cache import quantised
from tilewise import ops
from tilewise.kernels import device
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.products import LONGEST_INTEGER_DOT
from tilewise.kernels.cpu.machine.rows import DTYPE_CODES, why_not_dtype
from tilewise.kernels.cpu.paged import decode, decode_launch, weights
from tilewise.kernels.cpu.paged.dot_products import dots_1
from tilewise.kernels.cpu.paged.weighted_sums import weigh_rest_1
from tilewise.reference import paged as reference
from tilewise.testing import accumulator_scales, assert_within_budget, make_paged_cache

NARROW = [d for d in (torch.bfloat16, torch.float16) if why_not_dtype(d) is None]
by_dtype = pytest.mark.parametrize("dtype", NARROW, ids=lambda d: str(d)[6:])
needs_integers = pytest.mark.skipif(
    not simd.HAS_INTEGER_DOT, reason="this CPU multiplies no pairs of integers"
)
# name: (key lengths, block size, (Hq, Hk), (D, Dv), options)
CASES: dict[str, tuple[list[int], int, tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "groups of 4": ([1, 70, 600], 16, (8, 2), (128, 128), {}),
    "heads alone": ([33, 5], 16, (3, 3), (64, 64), {}),
    "groups of 7": ([19, 534], 16, (7, 1), (80, 24), {}),
    "head dim 8": ([19, 34], 3, (4, 1), (8, 8), {}),
    "head dim 200": ([40], 16, (4, 1), (200, 72), {}),
    "longer than integers may be": ([40], 16, (4, 1), (LONGEST_INTEGER_DOT + 8, 16), {}),
    "window and softcap": ([700, 20], 16, (4, 2), (64, 64), {"window": 600, "softcap": 4.0}),
}


def _call(name: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    """q, an int8 cache and the other arguments of a call."""
    lengths, block_size, (num_q_heads, num_kv_heads), (dim, v_dim), options = CASES[name]
    caches = make_paged_cache(lengths, block_size, num_kv_heads, dim, v_head_dim=v_dim)
    k_cache, v_cache, table, seqlens_k = caches
    (k_cache, k_scale), (v_cache, v_scale) = (
        quantised(cache, torch.int8, fixed=False) for cache in (k_cache, v_cache)
    )
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(len(lengths), num_q_heads, dim, generator=generator).to(dtype)
    edges = torch.arange(len(lengths) + 1, dtype=torch.int32)
    metadata = {"block_table": table, "seqlens_k": seqlens_k, "cu_seqlens_q": edges}
    return [q, k_cache, v_cache], metadata | options | {"k_scale": k_scale, "v_scale": v_scale}


def _run(tensors: list[Tensor], metadata: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return ops.paged_attention(*tensors, **metadata, max_seqlen_q=1, return_lse=True, backend="cpu")


@by_dtype
@pytest.mark.parametrize("name", CASES)
def test_rounded_queries_keep_the_budget(name: str, dtype: torch.dtype) -> None:
    tensors, metadata = _call(name, dtype)
    truth = reference.paged_attention(
        tensors[0].double(), *tensors[1:], **metadata, return_lse=True
    )
    eager = reference.paged_attention(*tensors, **metadata, return_lse=True)
    wide = [
        (cache.double() * metadata[scale].unsqueeze(-1)).nan_to_num()
        for cache, scale in zip(tensors[1:], ("k_scale", "v_scale"), strict=True)
    ]
    scales = accumulator_scales(tensors[0], *wide, wide[1], tensors[0].shape[2] ** -0.5)
    for part, *results in zip(("o", "lse"), _run(tensors, metadata), truth, eager, strict=True):
        assert_within_budget(*results, name=part, scale=scales.get(part, 0.0))


@needs_integers
@by_dtype
@pytest.mark.parametrize("name", ["groups of 4", "heads alone", "groups of 7", "head dim 8"])
def test_a_query_in_integers_is_2_to_the_minus_16_of_its_largest_element_off(
    name: str, dtype: torch.dtype
) -> None:
    tensors, metadata = _call(name, dtype)
    _, lse = _run(tensors, metadata)
    _, exact = _run([tensors[0].float(), *tensors[1:]], metadata)
    assert not torch.equal(lse, exact), "nothing was rounded"
    q, k = tensors[0].double(), tensors[1].double() * metadata["k_scale"].double().unsqueeze(-1)
    longest = k.nan_to_num().abs().sum(-1).max()
    bound = q.abs().amax(-1).T * longest * q.shape[-1] ** -0.5 * 2.0**-16
    assert bool(((lse - exact).abs() <= bound + 1e-5).all())


@needs_integers
def test_only_narrow_queries_of_int8_caches_are_rounded() -> None:
    for name, dtype, cache_dtype, expected in (
        ("groups of 4", torch.bfloat16, torch.int8, True),
        ("groups of 4", torch.float32, torch.int8, False),
        ("groups of 4", torch.bfloat16, torch.float8_e4m3fn, False),
        ("longer than integers may be", torch.bfloat16, torch.int8, False),
    ):
        head_dim = CASES[name][3][0]
        found = decode_launch.takes_integers(cache_dtype, DTYPE_CODES[dtype], head_dim)
        assert found == expected


def _one_key(head_dim: int, value: int) -> tuple[list[Tensor], dict[str, Any]]:
    """One sequence of one key whose elements are all `value`, queries of ones."""
    k_cache = torch.full((1, 16, 1, head_dim), value, dtype=torch.int8)
    scale = torch.ones(1, 16, 1)
    metadata = {
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
        "seqlens_k": torch.ones(1, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
        "softmax_scale": 1.0, "k_scale": scale, "v_scale": scale,
    }  # fmt: skip
    return [torch.ones(1, 4, head_dim, dtype=torch.bfloat16), k_cache, k_cache], metadata


@pytest.mark.parametrize("value", [-128, 127])
def test_the_largest_sum_of_integers_does_not_overflow(value: int) -> None:
    o, lse = _run(*_one_key(LONGEST_INTEGER_DOT, value))
    torch.testing.assert_close(
        lse, torch.full_like(lse, LONGEST_INTEGER_DOT * value), rtol=1e-6, atol=0
    )
    assert torch.equal(o, torch.full_like(o, value))


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-30, 1e30])
def test_queries_of_any_size_have_logits(value: float) -> None:
    tensors, metadata = _one_key(64, 3)
    tensors[0] *= value
    _, lse = _run(tensors, metadata)
    want = tensors[0].double().sum(-1).T * 3
    torch.testing.assert_close(lse.double(), want, rtol=1e-5, atol=1e-33)


@by_dtype
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_query_that_is_not_finite_spoils_its_own_head_alone(
    value: float, dtype: torch.dtype
) -> None:
    tensors, metadata = _call("groups of 4", dtype)
    want, _ = _run(tensors, metadata)
    tensors[0][2, 5, 7] = value
    o, lse = _run(tensors, metadata)
    assert bool(o[2, 5].isnan().all())
    assert bool(lse[5, 2].isnan())
    spoiled = torch.zeros(o.shape[:2], dtype=torch.bool)
    spoiled[2, 5] = True
    assert torch.equal(o[~spoiled], want[~spoiled])


def test_bits_of_integers_do_not_depend_on_threads() -> None:
    tensors, metadata = _call("groups of 4", torch.bfloat16)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(_run(tensors, metadata))
    finally:
        torch.set_num_threads(before)
    for o, lse in results[1:]:
        assert torch.equal(o, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("dims", [(64, 64), (48, 80)], ids=["rows in turn", "rows of two sizes"])
def test_chunks_of_every_size_agree_with_float64(
    chunk: int, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_launch, "chunk_of", lambda key_bytes: chunk)
    k_cache, v_cache, table, lengths = make_paged_cache(
        [1, 63, 64, 65, 1100], 16, 2, dims[0], v_head_dim=dims[1], dtype=torch.bfloat16
    )
    q = torch.randn(5, 8, dims[0], generator=torch.Generator().manual_seed(3)).bfloat16()
    metadata = {"block_table": table, "seqlens_k": lengths}
    metadata["cu_seqlens_q"] = torch.arange(6, dtype=torch.int32)
    tensors = [q, k_cache, v_cache]
    truth = reference.paged_attention(*(t.double() for t in tensors), **metadata)
    eager = reference.paged_attention(*tensors, **metadata)
    assert_within_budget(_run(tensors, metadata)[0], truth, eager, name="o")


@pytest.mark.parametrize(
    ("l2", "key_bytes", "chunk"),
    [
        (512 << 10, 8 * 128 * 4, 16),
        (512 << 10, 8 * 128 * 2, 32),
        (2 << 20, 8 * 128 * 4, 64),
        (1280 << 10, 8 * 128 * 4, 32),
        (512 << 10, 128 * 256 * 4, decode.FEWEST),
        (64 << 20, 256, decode.CHUNK),
    ],
)
def test_a_chunk_and_the_next_fill_a_quarter_of_the_cache(
    l2: int, key_bytes: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "l2_bytes", lambda: l2)
    assert decode.chunk_of(key_bytes) == chunk


@pytest.mark.parametrize(("told", "expected"), [("1280K\n", 1280 << 10), ("much", 1 << 20)])
def test_the_size_of_the_cache_is_what_linux_tells(
    told: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.open", lambda *args: io.StringIO(told))
    assert device.l2_bytes.__wrapped__() == expected


def test_without_linux_the_cache_has_a_usual_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError

    monkeypatch.setattr("builtins.open", refuse)
    assert device.l2_bytes.__wrapped__() == 1 << 20


def test_rounding_to_integers_is_to_the_nearest() -> None:
    row = np.array([1.0, -1.0, 0.5, 0.0, 1e-9], np.float32)
    q = np.zeros(7, np.uint16)
    unit = njit(lambda *args: decode._round_row(*args))(row, len(row), q, 1)
    assert q.view(np.int16).tolist() == [0, 32767, -32767, 16384, 0, 0, 0]
    assert unit == pytest.approx(1 / 32767)


def _weights(rows: Tensor, tensors: list[Tensor], metadata: dict[str, Any]) -> Tensor:
    """Unnormalised float64 weights (keys, Hq) of the one sequence, times the values' scales."""
    q, k_cache, _ = tensors
    group = q.shape[1] // k_cache.shape[2]
    k, v_scale = k_cache.flatten(0, 1)[rows].double(), metadata["v_scale"].flatten(0, 1)[rows]
    k = k * metadata["k_scale"].flatten(0, 1)[rows].double().unsqueeze(-1)
    logits = torch.einsum("hd,khd->kh", q[0].double(), k.repeat_interleave(group, 1))
    logits *= metadata.get("softmax_scale", q.shape[-1] ** -0.5)
    return logits.sub(logits.amax(0)).exp() * v_scale.double().repeat_interleave(group, 1)


@needs_integers
@by_dtype
@pytest.mark.parametrize("softmax_scale", [0.01, 0.3], ids=["flat", "few keys weigh most"])
def test_weights_in_integers_are_2_to_the_minus_16_of_a_chunks_largest_off(
    softmax_scale: float, dtype: torch.dtype
) -> None:
    length, heads, dim = 301, (8, 2), 64
    k_cache, v_cache, table, seqlens_k = make_paged_cache([length], 16, heads[1], dim)
    (k_cache, k_scale), (v_cache, v_scale) = (
        quantised(cache, torch.int8) for cache in (k_cache, v_cache)
    )
    # Rows of q whose elements have one magnitude are exact integers: the weights alone are off.
    signs = torch.randint(0, 2, (1, heads[0], dim), generator=torch.Generator().manual_seed(4))
    tensors = [(signs * 2 - 1).to(dtype), k_cache, v_cache]
    metadata = {
        "block_table": table, "seqlens_k": seqlens_k, "k_scale": k_scale, "v_scale": v_scale,
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32), "softmax_scale": softmax_scale,
    }  # fmt: skip
    o, lse = _run(tensors, metadata)
    truth, lse_truth = reference.paged_attention(
        tensors[0].double(), *tensors[1:], **metadata, return_lse=True
    )
    torch.testing.assert_close(lse.double(), lse_truth, rtol=1e-6, atol=2e-5)
    rows = (table[0].long()[:, None] * 16 + torch.arange(16)).flatten()[:length]
    weighed = _weights(rows, tensors, metadata)
    chunks = weighed.split(decode.CHUNK)  # of as many keys or more than those of any machine
    largest = torch.cat([chunk.amax(0).expand_as(chunk) for chunk in chunks])
    stored = v_cache.flatten(0, 1)[rows].double().abs().repeat_interleave(4, 1)
    totals = (weighed / v_scale.flatten(0, 1)[rows].double().repeat_interleave(4, 1)).sum(0)
    bound = 2.0**-16 * torch.einsum("kh,khd->hd", largest, stored) / totals[:, None]
    rounding = torch.finfo(dtype).eps / 2 * truth[0].abs() + 2e-6
    assert bool(((o[0].double() - truth[0]).abs() <= bound + rounding).all())


@by_dtype
def test_a_value_that_is_not_a_number_spoils_the_heads_of_its_key_head_alone(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One task has both key heads, and its last chunk is the first key of a register: behind it
    # lies the scale of the last head's second key of the chunk before.
    monkeypatch.setattr(decode_launch, "chunk_of", lambda key_bytes: 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    tensors, metadata = _call("groups of 4", dtype)
    metadata["seqlens_k"][2] = 512 + 17
    want, _ = _run(tensors, metadata)
    metadata["v_scale"][metadata["block_table"][2, 32], 1, 1] = math.nan
    o, _ = _run(tensors, metadata)
    assert bool(o[2, 4:].isnan().all())
    assert torch.equal(o[2, :4], want[2, :4])
    assert torch.equal(o[:2], want[:2])


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_values_of_any_size_are_weighed(scale: float) -> None:
    tensors, metadata = _one_key(64, 3)
    metadata["v_scale"] = torch.full_like(metadata["v_scale"], scale)
    o, _ = _run(tensors, metadata)
    torch.testing.assert_close(o.double(), torch.full_like(o, 3 * scale).double(), rtol=0, atol=0)


@needs_integers
@pytest.mark.parametrize("heads", [1, 4])
def test_a_word_of_weights_is_that_of_two_keys(heads: int) -> None:
    lanes = simd.REGISTER_BYTES // 4
    numbers = np.linspace(-32767, 32767, lanes).astype(np.float32)
    store = {1: weights.store_pairs_1, 4: weights.store_pairs_4}[heads]
    words = np.zeros(lanes // 2 + 2, np.float32)
    njit(lambda words, x: store(words, 1, simd.load(x, 0)))(words, numbers)
    assert words[0] == words[-1] == 0
    pairs = words[1:-1].view(np.int16).reshape(-1, heads, 2)
    by_key = np.rint(numbers).astype(np.int16).reshape(-1, heads)
    assert np.array_equal(pairs.transpose(0, 2, 1).reshape(-1, heads), by_key)


def test_a_chunk_of_8_bits_has_as_many_keys_as_one_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def note(key_bytes: int) -> int:
        asked.append(key_bytes)
        return 16

    monkeypatch.setattr(decode_launch, "chunk_of", note)
    tensors, metadata = _call("groups of 4", NARROW[0])
    _run(tensors, metadata)
    metadata = {name: value for name, value in metadata.items() if not name.endswith("scale")}
    _run([tensor.to(NARROW[0]) for tensor in tensors], metadata)
    assert asked == [2 * (128 + 128) * 2] * 2


def test_rows_of_float64_are_multiplied_and_weighed_in_float64() -> None:
    """What has a width of its own in float64: the whole kernel of it runs with the slow tests."""

    @njit
    def compute(like, q, addresses, dim, lanes, scores, ones, sums):
        dots_1(like, scores, 0, addresses, 0, 0, addresses, 0, q, 0, 0, dim)
        at = dim // lanes * lanes
        weigh_rest_1(
            like, q, sums, 0, 0, ones, scores, addresses, 0, 0, addresses, 0, at * 8, lanes,
            dim - at,
        )  # fmt: skip

    lanes = simd.REGISTER_BYTES // 8
    rng, dim = np.random.default_rng(0), 2 * lanes + 3
    rows, q = rng.standard_normal((lanes, dim)), np.zeros(dim + lanes)
    q[:dim] = rng.standard_normal(dim)
    addresses = rows.ctypes.data + np.arange(lanes) * rows.strides[0]
    like, scores, sums = decode_launch.CACHE_LIKE[torch.float64], np.zeros(lanes), np.zeros(lanes)
    compute(like, q, addresses, dim, lanes, scores, np.ones(lanes), sums)
    np.testing.assert_allclose(scores, rows @ q[:dim], rtol=0, atol=1e-14)
    rest = dim % lanes
    np.testing.assert_allclose(sums[:rest], scores @ rows[:, -rest:], rtol=0, atol=1e-14)
    assert not sums[rest:].any()
