"""Batch-invariant decoding on a CPU: the bits of a row alone are those it has in a chunk.

That these are right is for test_cpu_paged.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import pytest
import torch
from torch import Tensor

from tilewise.kernels.cpu.machine import amx, simd
from tilewise.kernels.cpu.paged import decode_simd, decode_tiles
from tilewise.kernels.cpu.paged.quantise import BYTE_CODES
from tilewise.ops import attention as dense_attention
from tilewise.ops import paged_attention

LENGTHS = (1, 40, 129, 300, 16, 33)


class Case(NamedTuple):
    heads: tuple[int, int] = (8, 4)
    dims: tuple[int, int] = (32, 32)
    dtype: torch.dtype = torch.bfloat16
    cache: torch.dtype | None = None
    block_size: int = 16
    options: tuple[str, ...] = ()
    window: int | None = None
    lengths: tuple[int, ...] = LENGTHS


CASES = {
    "bfloat16": Case(),
    "float32": Case(dtype=torch.float32),
    "float16": Case(dtype=torch.float16),
    "float64": Case(dtype=torch.float64),
    "one head a group": Case(heads=(3, 3), dims=(64, 64)),
    "five heads a group": Case(heads=(10, 2), dims=(64, 64)),
    "twenty heads a group": Case(heads=(40, 2), dims=(96, 64), lengths=(150, 20)),
    "seven heads of floats": Case(heads=(7, 1), dims=(48, 16), dtype=torch.float32),
    "odd widths": Case(dims=(30, 20)),
    "odd widths of floats": Case(dims=(30, 20), dtype=torch.float32),
    "small blocks": Case(block_size=8),
    "blocks of 24 floats": Case(block_size=24, dtype=torch.float32),
    "wide blocks": Case(block_size=64, dims=(128, 128), lengths=(700, 90)),
    "window": Case(window=70),
    "window of one": Case(window=1),
    "window of floats": Case(window=70, dtype=torch.float32),
    "everything": Case(options=("sinks", "alibi_slopes", "softcap"), window=200),
    "everything in floats": Case(
        options=("sinks", "alibi_slopes", "softcap"), window=200, dtype=torch.float32
    ),
    "negative scale": Case(options=("softmax_scale",)),
    "int8": Case(cache=torch.int8),
    "e4m3": Case(cache=torch.float8_e4m3fn),
    "int8 for floats": Case(cache=torch.int8, dtype=torch.float32),
    "float32 cache": Case(cache=torch.float32),
    "bfloat16 cache": Case(cache=torch.bfloat16, dtype=torch.float32),
}


class Call(NamedTuple):
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    options: dict[str, Any]


def make(case: Case, runs: int) -> Call:
    """Sequences whose last `runs` tokens are queries; slots that hold no key are NaN."""
    torch.manual_seed(7)
    (num_q, num_k), (dim, v_dim), size = case.heads, case.dims, case.block_size
    counts = [-(-length // size) for length in case.lengths]
    order, table = torch.randperm(sum(counts) + 1), torch.full((len(counts), max(counts)), -1)
    cache = case.cache or case.dtype
    k, v = (torch.randn(sum(counts) + 1, size, num_k, d) for d in (dim, v_dim))
    seen = torch.zeros(k.shape[:2], dtype=torch.bool)
    first = 0
    for row, (length, count) in enumerate(zip(case.lengths, counts, strict=True)):
        table[row, :count] = order[first : first + count]
        seen.view(-1)[(table[row, :count, None] * size + torch.arange(size)).view(-1)[:length]] = 1
        first += count
    options: dict[str, Any] = {"window": case.window}
    if cache in BYTE_CODES:
        k, v = k * 40, v * 40
        options |= {name: torch.rand(k.shape[:3]) / 40 for name in ("k_scale", "v_scale")}
    else:
        k[~seen], v[~seen] = torch.nan, torch.nan
    extra = {
        "sinks": torch.randn(num_q), "alibi_slopes": torch.rand(num_q) / 8, "softcap": 20.0,
        "softmax_scale": -0.3,
    }  # fmt: skip
    options |= {name: extra[name] for name in case.options}
    options |= {
        "block_table": table.int(), "seqlens_k": torch.tensor(case.lengths, dtype=torch.int32)
    }  # fmt: skip
    taken = [min(runs, length) for length in case.lengths]
    q = 3 * torch.randn(sum(case.lengths), num_q, dim)
    ends = torch.tensor(case.lengths).cumsum(0)
    rows = [torch.arange(end - n, end) for end, n in zip(ends.tolist(), taken, strict=True)]
    options["cu_seqlens_q"] = torch.tensor([0, *taken]).cumsum(0).int()
    options["max_seqlen_q"] = max(taken)
    return Call(q[torch.cat(rows)].to(case.dtype), k.to(cache), v.to(cache), options)


def run(call: Call) -> tuple[Tensor, Tensor]:
    o, lse = paged_attention(
        call.q, call.k_cache, call.v_cache, **call.options, batch_invariant=True, return_lse=True,
        backend="cpu",
    )  # fmt: skip
    return o, lse


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_alone_has_the_bits_of_a_chunk(case: Case, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        o, lse = run(make(case, 1))
        assert o.isfinite().all()
        for length in (2, 9, 64):
            chunk = make(case, length)
            many_o, many_lse = run(chunk)
            last = chunk.options["cu_seqlens_q"][1:].long() - 1
            assert torch.equal(o, many_o[last])
            assert torch.equal(lse, many_lse[:, last])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_alone_has_the_bits_of_dense_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    length, size = 200, 16
    q, k, v = (torch.randn(1, length, heads, 64).to(dtype) for heads in (6, 2, 2))
    dense, lse = dense_attention(q, k, v, causal=True, return_lse=True)
    blocks = -(-length // size)
    caches = [torch.zeros(blocks, size, 2, 64, dtype=dtype) for _ in range(2)]
    for cache, rows in zip(caches, (k, v), strict=True):
        cache.view(-1, 2, 64)[:length] = rows[0]
    lengths = torch.arange(1, length + 1, dtype=torch.int32)
    o, own_lse = paged_attention(
        q[0], *caches, block_table=torch.arange(blocks, dtype=torch.int32).expand(length, -1),
        seqlens_k=lengths, cu_seqlens_q=torch.arange(length + 1, dtype=torch.int32),
        max_seqlen_q=1, batch_invariant=True, return_lse=True,
    )  # fmt: skip
    assert torch.equal(o, dense[0])
    assert torch.equal(own_lse, lse[0])


def test_mixed_runs_are_cut_as_they_come() -> None:
    case = Case(lengths=(50, 200, 7))
    alone, _ = run(make(case, 1))
    mixed = make(case, 3)
    edges = mixed.options["cu_seqlens_q"].tolist()
    kept = [*range(edges[0], edges[1]), edges[2] - 1, *range(edges[2], edges[3])]
    mixed.options["cu_seqlens_q"] = torch.tensor([0, 3, 4, 7], dtype=torch.int32)
    o, _ = run(mixed._replace(q=mixed.q[kept]))
    assert torch.equal(o[[2, 3, 6]], alone)


class Widths(NamedTuple):
    num_kv_heads: int
    head_dim: int
    k_size: int

    @property
    def v_head_dim(self) -> int:
        return self.head_dim


def test_heads_of_a_task_keep_threads_busy_and_tiles_in_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_tiles, "_L2", 2 << 20)
    heads_of = decode_tiles.heads_of_task.py_func
    small = Widths(num_kv_heads=8, head_dim=32, k_size=2)
    assert heads_of(small, 64, 2) == 8
    assert heads_of(small, 1, 2) == 1
    wide = Widths(num_kv_heads=8, head_dim=1 << 16, k_size=4)
    assert heads_of(wide, 64, 1) == 1
    assert heads_of(Widths(num_kv_heads=3, head_dim=32, k_size=2), 1, 8) == 3


@pytest.mark.slow  # compiles both kernels as CPUs without tile registers have them
@pytest.mark.skipif(not simd.HAS_BF16_DOT, reason="needs VDPBF16PS")
@pytest.mark.parametrize("name", ["bfloat16", "seven heads of floats", "everything", "int8"])
def test_pairs_of_bfloat16_agree_without_tile_registers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @numba.njit(nogil=True, error_model="numpy")
    def decode(sizes, rule, arrays, heads, lse, counter, num_tasks):
        decode_simd.decode_tiles_simd(sizes, rule, arrays, heads, lse, counter, num_tasks)

    monkeypatch.setattr(amx, "HAS_AMX", False)
    monkeypatch.setattr(decode_tiles, "_decode", decode)
    case = CASES[name]._replace(dtype=torch.bfloat16)
    o, lse = run(make(case, 1))
    chunk = make(case, 9)
    many_o, many_lse = run(chunk)
    last = chunk.options["cu_seqlens_q"][1:].long() - 1
    assert torch.equal(o, many_o[last])
    assert torch.equal(lse, many_lse[:, last])
