"""The Triton kernels over a paged cache of latents agree with float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.attention_problem import ON_CPU, ON_GPU
from tests.kernels.planned import latent
from tilewise.kernels.spec import PagedSpec
from tilewise.kernels.tiles import latent as mla_tiles
from tilewise.kernels.tiles import paged as tiles
from tilewise.kernels.triton.latent import plan as mla_decode
from tilewise.reference import mla as reference
from tilewise.testing import accumulator_scales, assert_within_budget, make_paged_cache


@dataclass(frozen=True)
class Case:
    """A batch: runs[b] new tokens of a sequence of lengths[b] tokens, in the end."""

    name: str
    runs: tuple[int, ...]
    lengths: tuple[int, ...]
    num_heads: int = 16
    dims: tuple[int, int] = (64, 16)
    block_size: int = 64
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    padding: int = 0
    batch_invariant: bool = False


@dataclass
class Inputs:
    """What a launcher takes."""

    spec: PagedSpec
    q_latent: Tensor
    q_rope: Tensor
    cache: Tensor
    tensors: dict[str, Tensor]


def make_inputs(case: Case, device: str) -> Inputs:
    rank, rope_dim = case.dims
    cache_dtype = case.cache_dtype or case.dtype
    cache, _, block_table, seqlens_k = make_paged_cache(
        list(case.lengths), case.block_size, 1, rank + rope_dim, dtype=cache_dtype, device=device
    )
    num_tokens = sum(case.runs) + case.padding
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(num_tokens, case.num_heads, rank + rope_dim, generator=generator)
    q_latent, q_rope = q.to(device, case.dtype).split((rank, rope_dim), dim=-1)
    spec = PagedSpec(
        device_type=device, dtype=case.dtype, cache_dtype=cache_dtype, num_seqs=len(case.runs),
        num_tokens=num_tokens, max_seqlen_q=max(case.runs), num_q_heads=case.num_heads,
        num_kv_heads=1, head_dim=rank + rope_dim, v_head_dim=rank, block_size=case.block_size,
        max_blocks=block_table.shape[1], softmax_scale=(rank + rope_dim) ** -0.5,
        batch_invariant=case.batch_invariant,
    )  # fmt: skip
    starts = torch.tensor((0, *case.runs)).cumsum(0).int().to(device)
    tensors = {"block_table": block_table, "seqlens_k": seqlens_k, "cu_seqlens_q": starts}
    return Inputs(spec, q_latent, q_rope, cache.squeeze(2), tensors)


def launch(inputs: Inputs) -> tuple[Tensor, Tensor]:
    assert mla_decode.why_not(inputs.spec) is None
    return latent(
        mla_decode, inputs.q_latent, inputs.q_rope, inputs.cache, inputs.spec, **inputs.tensors
    )


def expected(inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The reference, on inputs converted to `dtype`."""
    result = reference.mla_decode(
        inputs.q_latent.to(dtype), inputs.q_rope.to(dtype), inputs.cache.to(dtype),
        softmax_scale=inputs.spec.softmax_scale, return_lse=True, **inputs.tensors,
    )  # fmt: skip
    assert isinstance(result, tuple)
    return result


def check(inputs: Inputs) -> None:
    o, lse = launch(inputs)
    assert o.dtype == inputs.spec.dtype
    assert lse.dtype == torch.float32
    truth, eager = expected(inputs, torch.float64), expected(inputs, inputs.spec.dtype)
    q = torch.cat([inputs.q_latent, inputs.q_rope], -1)
    cache = inputs.cache.double().nan_to_num()
    scales = accumulator_scales(q, cache, cache, q, inputs.spec.softmax_scale)
    for name, *results in zip(("o", "lse"), (o, lse), truth, eager, strict=True):
        assert_within_budget(*results, name=name, scale=scales.get(name, 0.0))


CASES = [
    Case("one_long_sequence", (1,), (900,)),
    Case("lengths_of_one_and_none", (1, 1, 1), (1, 0, 20)),
    Case("ragged_batch_with_splits", (1, 1, 1), (3, 700, 260), dims=(32, 16)),
    Case("576_and_512", (1,), (150,), dims=(512, 64), dtype=torch.bfloat16),
    Case("32_heads", (1, 1), (40, 70), 32),
    Case("64_heads", (1,), (70,), 64, (96, 32)),
    Case("128_heads", (1, 1), (33, 64), 128, (16, 16)),
    Case("one_head", (1, 1), (33, 64), 1, (32, 16)),
    Case("7_heads_and_odd_widths", (1, 3), (33, 64), 7, (48, 10)),
    Case("block_of_1", (1, 1), (70, 9), block_size=1),
    Case("block_of_16_fp16", (1, 1), (70, 90), block_size=16, dtype=torch.float16),
    Case("block_of_256_bf16", (1, 1), (257, 300), block_size=256, dtype=torch.bfloat16),
    Case("narrow_queries_of_a_wide_cache", (1, 1), (70, 90), dtype=torch.float16,
         cache_dtype=torch.float32),
    Case("drafts", (2, 4, 1, 0, 3), (300, 4, 40, 17, 3), 16, (32, 16)),
    Case("padding_rows", (1, 1, 0), (40, 300, 0), padding=3),
    Case("prompts", (40, 37), (40, 37), 3, (32, 16)),
    Case("a_chunk_after_a_prefix", (45,), (333,), 4, (32, 16), block_size=8),
    Case("longer_than_its_keys", (12, 9), (5, 9), 4, (32, 16)),
    Case("mixed", (1, 33, 0, 1, 9), (300, 40, 20, 1, 90), 4, (32, 16), padding=2),
    Case("mixed_invariant", (1, 33, 3), (300, 40, 90), 4, (32, 16), batch_invariant=True),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
SELDOM = {
    "one_long_sequence", "576_and_512", "32_heads", "64_heads", "one_head", "block_of_16_fp16",
    "drafts", "prompts", "a_chunk_after_a_prefix", "mixed_invariant",
}  # fmt: skip
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name in SELDOM else []) for name in BY_NAME]


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64(name: str, device: str) -> None:
    check(make_inputs(BY_NAME[name], device))


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("num_heads", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("runs", "lengths"),
    [((1,), (20_001,)), ((1,) * 8, (4096, 1, 0, 777, 9000, 64, 63, 65)), ((2, 1), (900, 5000)),
     ((300, 1, 17), (2000, 900, 17))],
)  # fmt: skip
def test_agrees_with_float64_at_serving_size(num_heads, runs, lengths) -> None:
    case = Case("serving", runs, lengths, num_heads, (512, 64), dtype=torch.bfloat16)
    check(make_inputs(case, "cuda"))


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
def test_strided_queries_cache_and_table(device: str) -> None:
    inputs = make_inputs(BY_NAME["mixed"], device)
    heads = inputs.q_latent.shape[1]
    wide = [
        torch.full((q.shape[0], heads + 2, q.shape[2]), math.nan, device=device)
        for q in (inputs.q_latent, inputs.q_rope)
    ]
    wide[0][:, :heads], wide[1][:, :heads] = inputs.q_latent, inputs.q_rope
    inputs.q_latent, inputs.q_rope = (q[:, :heads] for q in wide)
    inputs.cache = torch.stack([torch.full_like(inputs.cache, math.nan), inputs.cache], 1)[:, 1]
    table = inputs.tensors["block_table"]
    inputs.tensors["block_table"] = torch.cat([table, table - 7], 1)[:, : table.shape[1]]
    check(inputs)


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
@pytest.mark.parametrize(("run", "length"), [(1, 300), (5, 90)])
def test_batch_invariance_is_bitwise(
    run: int, length: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "INVARIANT_SPLIT_KEYS", 128)  # so that 300 keys have three splits
    company = Case("company", (4, 60, 1, run), (40, 60, 300, length), 4, (32, 16),
                   padding=2, batch_invariant=True)  # fmt: skip
    many = make_inputs(company, device)
    alone = make_inputs(replace(company, runs=(run,), lengths=(length,), padding=0), device)
    rows = slice(65, 65 + run)
    alone.q_latent, alone.q_rope, alone.cache = many.q_latent[rows], many.q_rope[rows], many.cache
    table = alone.tensors["block_table"]
    table[:] = many.tensors["block_table"][-1:, : table.shape[1]]
    (o, lse), (many_o, many_lse) = launch(alone), launch(many)
    assert torch.equal(o, many_o[rows])
    assert torch.equal(lse, many_lse[:, rows])


def test_partial_sums_of_long_runs_are_not_kept() -> None:
    """A prompt of 128 heads has rows enough for every processor: nothing to split, or to merge."""
    spec = make_inputs(Case("prompt", (2048,), (2048,), 128), "cpu").spec
    work = mla_tiles.mla_work(spec, 90, 132)
    assert work.split_run == 0
    assert work.rows_config is not None


def test_refuses_what_it_cannot_run() -> None:
    spec = make_inputs(BY_NAME["drafts"], "cpu").spec
    for change, words in (
        ({"dtype": torch.float64}, "dtype of the queries must be float32"),
        ({"cache_dtype": torch.int32}, "dtype of the cache must be float32"),
        ({"v_head_dim": 1024, "head_dim": 1040}, "R must be 1 to 512, got 1024"),
        ({"head_dim": 32 + 200}, "Dr must be 1 to 128, got 200"),
    ):
        assert words in str(mla_decode.why_not(replace(spec, **change)))
