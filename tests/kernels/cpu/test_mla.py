"""Latent attention on the CPU against the reference: heads, blocks, runs, splits, dtypes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.planned import latent
from tilewise.kernels.cpu.latent import plan as cpu
from tilewise.kernels.cpu.machine import amx
from tilewise.kernels.cpu.machine.rows import why_not_dtype
from tilewise.kernels.spec import PagedSpec
from tilewise.reference import mla as reference
from tilewise.testing import accumulator_scales, assert_within_budget, make_paged_cache

BF16 = torch.bfloat16
# Nobody decodes in float64, and compiling for it takes as long as for what they decode in.
OTHERS = [
    pytest.param(dtype, marks=[pytest.mark.slow] if dtype == torch.float64 else [])
    for dtype in (torch.float32, torch.float16, torch.float64)
    if why_not_dtype(dtype) is None
]


@dataclass(frozen=True)
class Case:
    """New tokens and lengths of each sequence, heads, (R, Dr), tokens of a block."""

    rows: tuple[int, ...] = (1, 1, 1)
    lengths: tuple[int, ...] = (40, 1, 130)
    num_heads: int = 16
    dims: tuple[int, int] = (64, 32)
    block_size: int = 16


CASES = {
    "decode": Case(),
    "576 and 512": Case(rows=(1, 2), lengths=(300, 70), dims=(512, 64), block_size=64),
    "one head": Case(num_heads=1),
    "7 heads": Case(num_heads=7),
    "20 heads": Case(num_heads=20),
    "32 heads": Case(num_heads=32),
    "64 heads": Case(num_heads=64),
    "128 heads": Case(num_heads=128),
    "300 heads": Case(num_heads=300),
    "blocks of 1": Case(block_size=1),
    "blocks of 3": Case(block_size=3),
    "blocks of 32": Case(block_size=32),
    "blocks of 256": Case(block_size=256),
    "a block exactly full": Case(lengths=(16, 32, 128)),
    "no key and no row": Case(rows=(1, 0, 1), lengths=(0, 5, 3)),
    "many splits": Case(lengths=(512, 513, 2700)),
    "splits of several blocks of rows": Case(rows=(3, 1), lengths=(1300, 700), num_heads=100),
    "odd widths": Case(dims=(31, 5)),
    "rank 48": Case(dims=(48, 16)),
    "drafts": Case(rows=(2, 4, 1), lengths=(300, 4, 700)),
    "prompts": Case(rows=(40, 1, 130)),
    "a chunk after a prefix": Case(rows=(33, 20), lengths=(200, 300), num_heads=5),
    "longer than its keys": Case(rows=(12, 9), lengths=(5, 9)),
}
QUICK = ("decode", "20 heads", "many splits", "odd widths", "a chunk after a prefix")
SLOW = ("300 heads", "blocks of 32", "32 heads", "64 heads", "prompts", "a block exactly full")
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]


@dataclass
class Call:
    """Tensors of a call as the launcher takes them."""

    q_latent: Tensor
    q_rope: Tensor
    cache: Tensor
    extra: dict[str, Tensor]
    batch_invariant: bool = False

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype, cache_dtype: torch.dtype | None = None) -> Call:
        rank, rope_dim = case.dims
        cache, _, table, lengths = make_paged_cache(
            list(case.lengths), case.block_size, 1, rank + rope_dim, dtype=cache_dtype or dtype
        )
        generator = torch.Generator().manual_seed(5)
        shape = (sum(case.rows), case.num_heads, rank + rope_dim)
        q = torch.randn(shape, generator=generator).to(dtype)
        edges = torch.tensor([0, *case.rows]).cumsum(0).int()
        extra = {"block_table": table, "seqlens_k": lengths, "cu_seqlens_q": edges}
        return cls(q[..., :rank], q[..., rank:], cache.squeeze(2), extra)

    def spec(self) -> PagedSpec:
        rank, rope_dim = self.q_latent.shape[2], self.q_rope.shape[2]
        rows, table = self.extra["cu_seqlens_q"].diff(), self.extra["block_table"]
        return PagedSpec(
            device_type="cpu", dtype=self.q_latent.dtype, cache_dtype=self.cache.dtype,
            num_seqs=len(rows), num_tokens=self.q_latent.shape[0], max_seqlen_q=int(rows.max()),
            num_q_heads=self.q_latent.shape[1], num_kv_heads=1, head_dim=rank + rope_dim,
            v_head_dim=rank, block_size=self.cache.shape[1], max_blocks=table.shape[1],
            softmax_scale=(rank + rope_dim) ** -0.5, batch_invariant=self.batch_invariant,
        )  # fmt: skip

    def run(self) -> tuple[Tensor, Tensor]:
        assert cpu.why_not(self.spec()) is None
        return latent(cpu, self.q_latent, self.q_rope, self.cache, self.spec(), **self.extra)

    def expected(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        o, lse = reference.mla_decode(
            self.q_latent.to(dtype), self.q_rope.to(dtype), self.cache.to(dtype),
            softmax_scale=self.spec().softmax_scale, return_lse=True, **self.extra,
        )  # fmt: skip
        return o, lse

    def check(self) -> None:
        dtype = self.q_latent.dtype
        actual, truth, eager = self.run(), self.expected(torch.float64), self.expected(dtype)
        q, cache = torch.cat([self.q_latent, self.q_rope], -1), self.cache.double().nan_to_num()
        scales = accumulator_scales(q, cache, cache, q, self.spec().softmax_scale)
        for name, *results in zip(("o", "lse"), actual, truth, eager, strict=True):
            # float64 has the reference's own precision: only its rounding is left to allow.
            factor = 2.0 if dtype != torch.float64 else 1e3
            assert_within_budget(
                *results, name=name, scale=factor / 2 * scales.get(name, 0.0), factor=factor
            )


@pytest.fixture(params=["matrix_unit", "vectors"])
def unit(request, monkeypatch):
    """Both ways to multiply bfloat16, where the CPU has both."""
    if request.param == "vectors":
        monkeypatch.setattr(amx, "HAS_AMX", False)
    elif not amx.HAS_AMX:
        pytest.skip("this CPU has no matrix unit")


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_agrees_with_float64(name, unit):
    Call.of(CASES[name], BF16).check()


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.parametrize("name", QUICK)
def test_other_dtypes_agree_with_float64(name, dtype):
    Call.of(CASES[name], dtype).check()


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(torch.float32, BF16), (BF16, torch.float32), (BF16, torch.float16)],
)
def test_queries_and_cache_may_differ_in_dtype(dtype, cache_dtype):
    if why_not_dtype(cache_dtype) is not None:
        pytest.skip("no conversion instructions")
    Call.of(CASES["drafts"], dtype, cache_dtype).check()


def test_strided_queries_cache_and_table(unit):
    call = Call.of(CASES["drafts"], BF16)
    want = call.run()
    tokens, heads, rank = call.q_latent.shape
    wide = torch.full((tokens, heads + 3, 2 * rank), math.nan, dtype=BF16)
    wide[:, :heads, :rank] = call.q_latent
    call.q_latent = wide[:, :heads, :rank]
    pool = torch.full((len(call.cache), 2, *call.cache.shape[1:]), math.nan, dtype=BF16)
    pool[:, 1] = call.cache
    call.cache = pool[:, 1]
    table = call.extra["block_table"]
    call.extra["block_table"] = torch.stack([table, -table], -1)[..., 0]
    for got, expected in zip(call.run(), want, strict=True):
        assert torch.equal(got, expected)


def test_rows_of_no_sequence_are_empty():
    call = Call.of(CASES["decode"], BF16)
    want_o, want_lse = call.run()
    call.q_latent, call.q_rope = (torch.cat([q, q]) for q in (call.q_latent, call.q_rope))
    o, lse = call.run()
    assert torch.equal(o[:3], want_o)
    assert torch.equal(lse[:, :3], want_lse)
    assert bool((o[3:] == 0).all())
    assert bool(lse[:, 3:].isneginf().all())


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("cu_seqlens_q", [0, 1, 2, 9], "rise from 0 to at most 3"),
        ("cu_seqlens_q", [0, 2, 1, 3], "rise from 0 to at most 3"),
        ("seqlens_k", [40, 1, 145], "be at most 144"),
    ],
)
def test_sequences_outside_of_memory_are_refused(name, value, rule):
    call = Call.of(CASES["decode"], BF16)
    call.extra[name] = torch.tensor(value, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"{name} must {rule}, got"):
        call.run()


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_latent_that_is_not_finite_reaches_only_those_who_see_it(value, dtype):
    """Of five new tokens the fourth is broken: the three before it must not know."""
    call = Call.of(Case(rows=(5,), lengths=(70,), num_heads=4), dtype)
    want, want_lse = call.run()
    block, slot = divmod(70 - 2, 16)
    call.cache[call.extra["block_table"][0, block], slot, 3] = value
    o, lse = call.run()
    torch.testing.assert_close(o[:3], want[:3])
    torch.testing.assert_close(lse[:, :3], want_lse[:, :3])
    assert bool(o[3:, :, 3].isnan().all())


@pytest.mark.parametrize("name", ["many splits", "splits of several blocks of rows", "prompts"])
def test_bits_do_not_depend_on_threads(name, unit):
    call, threads, results = Call.of(CASES[name], BF16), torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(call.run())
    finally:
        torch.set_num_threads(threads)
    for o, lse in results[1:]:
        assert torch.equal(o, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize("row", range(3))
def test_with_batch_invariance_bits_do_not_depend_on_neighbours(row, unit):
    case = Case(rows=(1, 5, 1), lengths=(1500, 40, 700))
    call = Call.of(case, BF16)
    call.batch_invariant = True
    o, lse = call.run()
    edges = call.extra["cu_seqlens_q"].tolist()
    rows = slice(edges[row], edges[row + 1])
    extra = {
        "block_table": call.extra["block_table"][row : row + 1],
        "seqlens_k": call.extra["seqlens_k"][row : row + 1],
        "cu_seqlens_q": torch.tensor([0, case.rows[row]], dtype=torch.int32),
    }
    alone = Call(call.q_latent[rows], call.q_rope[rows], call.cache, extra, batch_invariant=True)
    alone_o, alone_lse = alone.run()
    assert torch.equal(alone_o, o[rows])
    assert torch.equal(alone_lse, lse[:, rows])


def test_torch_multiplies_between_calls():
    """Torch's own kernels configure the same tile registers."""
    call = Call.of(CASES["32 heads"], BF16)
    a = torch.randn(64, 64).to(BF16)
    want, want_o = a @ a, call.run()[0]
    for _ in range(3):
        assert torch.equal(call.run()[0], want_o)
        assert torch.equal(a @ a, want)


def test_one_long_sequence_is_cut_for_every_core_and_a_prompt_is_not(monkeypatch):
    asked = []
    original = cpu.run_tasks

    def spy(function, num_tasks, *args):
        asked.append(num_tasks)
        return original(function, num_tasks, *args)

    monkeypatch.setattr(cpu, "run_tasks", spy)
    monkeypatch.setattr(cpu.os, "cpu_count", lambda: 2)
    Call.of(Case(rows=(1,), lengths=(4096,)), BF16).run()
    assert asked == [8, 4]  # 512 keys each; then 16 rows, four at a time
    asked.clear()
    Call.of(Case(rows=(600,), lengths=(700,)), BF16).run()
    assert asked == [75]  # 9,600 rows in blocks of 128


def test_scratch_starts_empty_whatever_was_there(monkeypatch):
    monkeypatch.setattr(np, "empty", lambda shape, dtype=float: np.full(shape, 3, dtype))
    Call.of(CASES["many splits"], BF16).check()


def test_refuses_what_it_cannot_run():
    spec = Call.of(Case(), BF16).spec()
    for change, words in (
        ({"device_type": "cuda"}, "device must be cpu, got cuda"),
        ({"cache_dtype": torch.int32}, "dtype must be"),
        ({"dtype": torch.float64}, "cache dtype must be float64 with float64 queries only"),
    ):
        assert words in str(cpu.why_not(replace(spec, **change)))
