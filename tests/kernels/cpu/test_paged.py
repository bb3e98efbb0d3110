"""Paged attention on the CPU against the reference: decoding, prefill chunks, mixtures."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.planned import paged
from tilewise import ops
from tilewise.kernels.cpu.attention.problem import K_LEN, NUM_STARTS
from tilewise.kernels.cpu.machine.rows import why_not_dtype
from tilewise.kernels.cpu.paged import plan as cpu
from tilewise.kernels.cpu.paged.decode import SPLIT, plan_decode
from tilewise.kernels.spec import PagedSpec
from tilewise.reference import paged as reference
from tilewise.testing import assert_within_budget, make_paged_cache

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
DTYPES = [dtype for dtype in DTYPES if why_not_dtype(dtype) is None]
# Nobody decodes in float64, and compiling for it takes as long as for what they decode in.
MARKED = [
    pytest.param(dtype, marks=[pytest.mark.slow] if dtype == torch.float64 else [])
    for dtype in DTYPES
]


@dataclass(frozen=True)
class Case:
    """New rows and lengths of each sequence, shapes and options."""

    rows: tuple[int, ...] = (1, 1, 1)
    lengths: tuple[int, ...] = (40, 1, 130)
    block_size: int = 16
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (64, 64)
    options: dict[str, Any] = field(default_factory=dict)
    alibi: bool = False
    sinks: bool = False


CASES = {
    "decode": Case(),
    "blocks of 1": Case(block_size=1),
    "blocks of 3": Case(block_size=3),
    "blocks of 256": Case(block_size=256),
    "a block exactly full": Case(lengths=(16, 32, 64)),
    "many splits": Case(lengths=(512, 513, 1700)),
    "no key and no row": Case(rows=(1, 0, 1), lengths=(0, 5, 3)),
    "heads alone": Case(heads=(3, 3)),
    "group of 2": Case(heads=(2, 1)),
    "group of 7": Case(heads=(14, 2)),
    "group of 8": Case(heads=(16, 2)),
    "head dim 8": Case(dims=(8, 8)),
    "head dim 80": Case(dims=(80, 80)),
    "head dim 128": Case(dims=(128, 128)),
    "dims 192 and 72": Case(dims=(192, 72)),
    "head dim 256": Case(dims=(256, 256), lengths=(9, 600, 70)),
    "window of 1": Case(options={"window": 1}),
    "window off the split": Case(lengths=(900, 600, 1300), options={"window": 600}),
    "softcap": Case(options={"softcap": 5.0}),
    "alibi": Case(alibi=True, lengths=(90, 3, 700)),
    "sinks": Case(sinks=True, lengths=(90, 0, 700)),
    "prefill": Case(rows=(40, 1, 130)),
    "chunked prefill": Case(rows=(33, 20, 2), lengths=(200, 20, 300)),
    "mixture": Case(rows=(1, 64, 0, 1, 5), lengths=(300, 100, 7, 0, 77)),
    "everything": Case(
        rows=(1, 70, 3), lengths=(1000, 300, 600), alibi=True, sinks=True,
        options={"window": 90, "softcap": 8.0, "softmax_scale": 0.2},
    ),
}  # fmt: skip


@dataclass
class Call:
    """Tensors of a call as launchers and reference take them."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    extra: dict[str, Tensor]
    options: dict[str, Any]

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype, cache_dtype: torch.dtype | None = None) -> Call:
        k_cache, v_cache, table, lengths = make_paged_cache(
            list(case.lengths), case.block_size, case.heads[1], case.dims[0],
            v_head_dim=case.dims[1], dtype=cache_dtype or dtype,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(5)
        q = torch.randn(sum(case.rows), case.heads[0], case.dims[0], generator=generator)
        edges = torch.tensor([0, *torch.tensor(case.rows).cumsum(0).tolist()], dtype=torch.int32)
        extra = {"block_table": table, "seqlens_k": lengths, "cu_seqlens_q": edges}
        if case.alibi:
            extra["alibi_slopes"] = torch.rand(case.heads[0], generator=generator) * 0.1
        if case.sinks:
            extra["sinks"] = torch.randn(case.heads[0], generator=generator)
        return cls(q.to(dtype), k_cache, v_cache, extra, case.options)

    def spec(self) -> PagedSpec:
        rows, table = self.extra["cu_seqlens_q"].diff(), self.extra["block_table"]
        window = self.options.get("window")
        return PagedSpec(
            device_type="cpu", dtype=self.q.dtype, cache_dtype=self.k_cache.dtype,
            num_seqs=len(rows), num_tokens=self.q.shape[0], max_seqlen_q=int(rows.max()),
            num_q_heads=self.q.shape[1], num_kv_heads=self.k_cache.shape[2],
            head_dim=self.q.shape[2], v_head_dim=self.v_cache.shape[3],
            block_size=self.k_cache.shape[1], max_blocks=table.shape[1],
            window_left=-1 if window is None else window - 1,
            softmax_scale=self.options.get("softmax_scale", self.q.shape[2] ** -0.5),
            softcap=self.options.get("softcap", 0.0), has_alibi="alibi_slopes" in self.extra,
            has_sinks="sinks" in self.extra,
        )  # fmt: skip

    def run(self, batch_invariant: bool = False) -> tuple[Tensor, Tensor]:
        spec = replace(self.spec(), batch_invariant=batch_invariant)
        return paged(cpu, self.q, self.k_cache, self.v_cache, spec, **self.extra)

    def by_reference(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        tensors = (t.to(dtype) for t in (self.q, self.k_cache, self.v_cache))
        extra = {
            name: t.double() if dtype == torch.float64 and t.is_floating_point() else t
            for name, t in self.extra.items()
        }
        return reference.paged_attention(*tensors, **extra, **self.options, return_lse=True)


def check(call: Call) -> None:
    for batch_invariant in (False, True):
        _check(call, *call.run(batch_invariant))


def _check(call: Call, o: Tensor, lse: Tensor) -> None:
    truth, eager = call.by_reference(torch.float64), call.by_reference(call.q.dtype)
    if call.q.dtype == torch.float64:
        torch.testing.assert_close(o, truth[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(lse, truth[1], rtol=0, atol=1e-10)
        return
    # Rounding a logit of magnitude s once changes o by |s| |v| and lse by |s|, in units of eps.
    s = call.spec().softmax_scale * float(call.q.double().norm(dim=-1).max()) ** 2
    assert_within_budget(o, truth[0], eager[0], name="o", scale=4 * s)
    assert_within_budget(lse, truth[1], eager[1], name="lse", scale=s)


@pytest.mark.parametrize("dtype", MARKED, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", CASES)
def test_output_and_lse_keep_the_budget_beside_nan_slots(name: str, dtype: torch.dtype) -> None:
    check(Call.of(CASES[name], dtype))


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_the_cache_may_have_a_dtype_of_its_own(
    dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    if cache_dtype not in DTYPES:
        pytest.skip(str(why_not_dtype(cache_dtype)))
    call = Call.of(Case(rows=(1, 9), lengths=(300, 50)), dtype, cache_dtype)
    o, _ = call.run()
    wide = Call(call.q.float(), call.k_cache.float(), call.v_cache.float(), call.extra, {})
    torch.testing.assert_close(
        o.float(), wide.run()[0], rtol=1e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_strided_queries_and_caches_equal_contiguous_ones(dtype: torch.dtype) -> None:
    call = Call.of(Case(rows=(1, 30, 1), lengths=(300, 40, 70)), dtype)
    o, lse = call.run()
    call.q = torch.cat([call.q, call.q], dim=1)[:, : call.q.shape[1]]
    call.k_cache = call.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    call.v_cache = torch.stack([call.v_cache, call.v_cache], dim=1)[:, 0]
    again = call.run()
    assert torch.equal(o, again[0])
    assert torch.equal(lse, again[1])


def test_table_entries_past_the_last_block_are_never_read() -> None:
    call = Call.of(Case(rows=(1, 20), lengths=(40, 20)), torch.bfloat16)
    o, _ = call.run()
    table = call.extra["block_table"]
    call.extra["block_table"] = torch.where(table < 0, 2**31 - 1, table).to(torch.int32)
    wider = torch.full((2, 9), -(2**31), dtype=torch.int32)
    wider[:, : table.shape[1]] = call.extra["block_table"]
    call.extra["block_table"] = wider
    assert torch.equal(call.run()[0], o)


def test_rows_past_the_last_sequence_are_empty() -> None:
    call = Call.of(Case(rows=(1, 3), lengths=(40, 20)), torch.float32)
    call.q = torch.cat([call.q, torch.full((2, *call.q.shape[1:]), math.nan)])
    o, lse = call.run()
    assert bool((o[4:] == 0).all())
    assert bool((lse[:, 4:] == -math.inf).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_bits_do_not_depend_on_threads_or_neighbours(dtype: torch.dtype) -> None:
    case = Case(rows=(1, 70, 1, 1), lengths=(2000, 90, 1, 700))
    call = Call.of(case, dtype)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(call.run())
    finally:
        torch.set_num_threads(before)
    for o, lse in results[1:]:
        assert torch.equal(o, results[0][0])
        assert torch.equal(lse, results[0][1])
    edges = call.extra["cu_seqlens_q"].tolist()
    for index in range(len(case.rows)):
        alone = Call(call.q[edges[index] : edges[index + 1]], call.k_cache, call.v_cache, {}, {})
        alone.extra = {
            "block_table": call.extra["block_table"][index : index + 1],
            "seqlens_k": call.extra["seqlens_k"][index : index + 1],
            "cu_seqlens_q": torch.tensor([0, case.rows[index]], dtype=torch.int32),
        }
        assert torch.equal(alone.run()[0], results[0][0][edges[index] : edges[index + 1]])


def test_concurrent_python_threads_do_not_disturb_each_other() -> None:
    call = Call.of(Case(rows=(1, 30, 1), lengths=(1500, 40, 70)), torch.bfloat16)
    want, _ = call.run()
    wrong: list[int] = []

    def work() -> None:
        wrong.extend(index for index in range(30) if not torch.equal(call.run()[0], want))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_refuses_what_it_cannot_run() -> None:
    spec = Call.of(Case(), torch.float32).spec()
    assert cpu.why_not(spec) is None
    for change, words in (
        ({"device_type": "cuda"}, "device must be cpu, got cuda"),
        ({"cache_dtype": torch.int16}, "dtype must be"),
        ({"cache_dtype": torch.float64}, "cache dtype must be float64 with float64 q only"),
        ({"head_dim": 7}, "head dims must be even, got 7 and 64"),
    ):
        changed = PagedSpec(**{name: getattr(spec, name) for name in spec.__slots__} | change)
        assert words in str(cpu.why_not(changed))


@pytest.mark.parametrize("window", [-1, 0, 1, 511, 512, 513, 1000])
def test_splits_of_a_window_begin_with_its_first_key(window: int) -> None:
    lengths = [0, 1, 2, 511, 512, 513, 514, 1023, 1024, 1025, 1026, 1536, 2000]
    starts = np.zeros((len(lengths), NUM_STARTS), np.int64)
    splits = np.zeros((len(lengths), 2), np.int64)
    starts[:, K_LEN] = lengths
    plan_decode(starts, window, 1, splits)
    for length, (first, count) in zip(lengths, splits.tolist(), strict=True):
        key = max(0, length - 1 - window) if window >= 0 else 0
        if length == 0:
            continue
        assert first * SPLIT <= key < (first + 1) * SPLIT
        assert (first + count - 1) * SPLIT < length <= (first + count) * SPLIT


def test_a_window_whose_first_key_ends_a_split_keeps_it() -> None:
    length, first = SPLIT + 200, SPLIT - 1
    k_cache, v_cache, table, seqlens = make_paged_cache([length], 16, 1, 8)
    block, offset = int(table[0, first // 16]), first % 16
    v_cache[block, offset] = 1e4
    cu = torch.tensor([0, 1], dtype=torch.int32)
    options = {"block_table": table, "seqlens_k": seqlens, "cu_seqlens_q": cu, "max_seqlen_q": 1}
    q = torch.randn(1, 2, 8)
    for window, sees in ((length - first, True), (length - first - 1, False)):
        got, want = (
            ops.paged_attention(q, k_cache, v_cache, window=window, backend=name, **options)
            for name in ("cpu", "reference")
        )
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert bool((got > 1).all()) == sees


@pytest.mark.parametrize(
    ("edges", "lengths", "rule"),
    [
        ([0, 1, 5], [8, 3], "cu_seqlens_q must rise from 0 to at most 3"),
        ([0, 2, 1], [8, 3], "cu_seqlens_q must rise from 0 to at most 3"),
        ([1, 2, 3], [8, 3], "cu_seqlens_q must rise from 0 to at most 3"),
        ([0, 1, 3], [9, 3], "seqlens_k must be at most 8"),
        ([0, 1, 3], [8, 2**31 - 1], "seqlens_k must be at most 8"),
    ],
)
def test_sequences_outside_of_memory_are_refused(edges, lengths, rule):
    """Such rows of o were written, and aborted the process."""
    cache = torch.randn(4, 4, 2, 16)
    given = {
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "seqlens_k": torch.tensor(lengths, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor(edges, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=f"{rule}, got"):
        ops.paged_attention(torch.randn(3, 2, 16), cache, cache, **given, max_seqlen_q=4)


@pytest.mark.parametrize(("edges", "most"), [([0, 1, 3], 1), ([0, 1, 2], 0)])
@pytest.mark.parametrize("is_latent", [False, True])
def test_a_sequence_has_no_more_rows_than_the_call_says(is_latent, edges, most):
    given = {
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "seqlens_k": torch.tensor([8, 3], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor(edges, dtype=torch.int32),
    }
    q, cache = torch.randn(edges[-1], 2, 16), torch.randn(4, 4, 2, 16)

    def run(**longest):
        if is_latent:
            latents = torch.randn(4, 4, 24)
            return ops.mla_decode(q, q[..., :8], latents, softmax_scale=1.0, **given, **longest)
        return ops.paged_attention(q, cache, cache, **given, **longest)

    run(max_seqlen_q=most + 1)
    with pytest.raises(ValueError, match=f"max_seqlen_q must be at least {most + 1}, .*got {most}"):
        run(max_seqlen_q=most)


def test_the_length_of_a_sequence_without_rows_is_not_looked_at():
    cache, q = torch.randn(4, 4, 2, 16), torch.randn(2, 2, 16)
    given = {
        "block_table": torch.tensor([[0, 1], [2, 3], [-1, -1]], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1, 2, 2], dtype=torch.int32),
    }
    o, other = (
        ops.paged_attention(
            q, cache, cache, seqlens_k=torch.tensor([8, 3, last], dtype=torch.int32),
            max_seqlen_q=1, **given,
        )
        for last in (0, 99)
    )  # fmt: skip
    assert torch.equal(o, other)
