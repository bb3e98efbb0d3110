"""The Triton kernels over a paged cache agree with float64, whatever the batch looks like."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.planned import paged, serving_spec
from tilewise.kernels import device
from tilewise.kernels.device import interpreting
from tilewise.kernels.host.launch import launch_now
from tilewise.kernels.spec import PagedSpec
from tilewise.kernels.tiles import paged as tiles
from tilewise.kernels.triton.paged import decode as paged_decode
from tilewise.kernels.triton.paged import plan as paged_attention
from tilewise.reference import paged as reference
from tilewise.testing import accumulator_scales, assert_within_budget, make_paged_cache

interpreted = pytest.mark.skipif(not interpreting(), reason="kernels are compiled here")


@dataclass(frozen=True)
class Case:
    """A batch: runs[b] new tokens of a sequence of lengths[b] tokens, in the end."""

    name: str
    runs: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 64
    v_head_dim: int | None = None
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    window: int | None = None
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    padding: int = 0
    batch_invariant: bool = False

    def grown(self, factor: int) -> Case:
        """Return the case at serving size: longer prompts, longer histories, bfloat16."""
        runs = tuple(run if run <= 8 else run * factor for run in self.runs)
        lengths = tuple(length if length <= 8 else length * factor for length in self.lengths)
        window = (
            self.window * factor if self.window is not None and self.window > 1 else self.window
        )
        cache_dtype = None if self.cache_dtype is None else torch.float16
        return replace(
            self,
            runs=runs,
            lengths=lengths,
            window=window,
            dtype=torch.bfloat16,
            cache_dtype=cache_dtype,
        )


@dataclass
class Inputs:
    """What a launcher takes, and what the reference takes."""

    spec: PagedSpec
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tensors: dict[str, Tensor | None]
    window: int | None


def make_inputs(case: Case, device: str = "cpu") -> Inputs:
    num_q_heads, num_kv_heads = case.heads
    cache_dtype = case.cache_dtype or case.dtype
    v_head_dim = case.v_head_dim or case.head_dim
    k_cache, v_cache, block_table, seqlens_k = make_paged_cache(
        list(case.lengths),
        case.block_size,
        num_kv_heads,
        case.head_dim,
        v_head_dim=v_head_dim,
        dtype=cache_dtype,
        device=device,
    )
    num_tokens = sum(case.runs) + case.padding
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(num_tokens, num_q_heads, case.head_dim, generator=generator)
    per_head = torch.rand(2, num_q_heads, generator=generator).to(device)
    starts = torch.tensor((0, *case.runs)).cumsum(0).int()
    spec = PagedSpec(
        device_type=device,
        dtype=case.dtype,
        cache_dtype=cache_dtype,
        num_seqs=len(case.runs),
        num_tokens=num_tokens,
        max_seqlen_q=max(case.runs),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=case.head_dim,
        v_head_dim=v_head_dim,
        block_size=case.block_size,
        max_blocks=block_table.shape[1],
        window_left=-1 if case.window is None else case.window - 1,
        softmax_scale=case.head_dim**-0.5,
        softcap=case.softcap,
        has_alibi=case.alibi,
        has_sinks=case.sinks,
        batch_invariant=case.batch_invariant,
    )
    tensors = {
        "block_table": block_table,
        "seqlens_k": seqlens_k,
        "cu_seqlens_q": starts.to(device),
        "alibi_slopes": per_head[0] * 0.3 if case.alibi else None,
        "sinks": per_head[1] * 4 - 2 if case.sinks else None,
    }
    return Inputs(spec, q.to(device, case.dtype), k_cache, v_cache, tensors, case.window)


def launch(inputs: Inputs) -> tuple[Tensor, Tensor]:
    assert paged_attention.why_not(inputs.spec) is None
    return paged(
        paged_attention, inputs.q, inputs.k_cache, inputs.v_cache, inputs.spec, **inputs.tensors
    )


def expected(inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The reference, on inputs converted to `dtype`."""
    tensors = {
        name: tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor
        for name, tensor in inputs.tensors.items()
    }
    result = reference.paged_attention(
        inputs.q.to(dtype),
        inputs.k_cache,
        inputs.v_cache,
        softmax_scale=inputs.spec.softmax_scale,
        window=inputs.window,
        softcap=inputs.spec.softcap,
        return_lse=True,
        **tensors,
    )
    assert isinstance(result, tuple)
    return result


def check(inputs: Inputs) -> None:
    o, lse = launch(inputs)
    assert o.dtype == inputs.spec.dtype
    assert lse.dtype == torch.float32
    truth_o, truth_lse = expected(inputs, torch.float64)
    eager_o, eager_lse = expected(inputs, inputs.spec.dtype)
    owned = (cache.double().nan_to_num() for cache in (inputs.k_cache, inputs.v_cache))
    scales = accumulator_scales(inputs.q, *owned, inputs.q, inputs.spec.softmax_scale)
    assert_within_budget(o, truth_o, eager_o, name="o", scale=scales.get("o", 0.0))
    assert_within_budget(lse, truth_lse, eager_lse, name="lse", scale=scales.get("lse", 0.0))


CASES = [
    Case("decode", (1, 1, 1), (40, 33, 170)),
    Case("decode_one_long_sequence", (1,), (1500,)),
    Case("decode_lengths_of_one_and_none", (1, 1, 1), (1, 0, 20)),
    Case("decode_ragged_batch_with_splits", (1, 1, 1, 1), (3, 900, 260, 40)),
    Case("decode_mha_d128", (1, 1), (70, 129), (4, 4), 128),
    Case("decode_mqa_group_of_8", (1, 1), (70, 300), (8, 1), 128),
    Case("decode_group_of_7", (1, 1), (70, 300), (14, 2), 64),
    Case("decode_block_of_1", (1, 1), (70, 90), block_size=1),
    Case("decode_block_of_8_fp16", (1, 1), (70, 290), block_size=8, dtype=torch.float16),
    Case("decode_block_of_64_full", (1, 1), (64, 128), block_size=64),
    Case("decode_block_of_256_bf16", (1, 1), (257, 600), block_size=256, dtype=torch.bfloat16),
    Case("decode_d80", (1, 1), (70, 90), head_dim=80),
    Case("decode_d96_dv32", (1, 1), (70, 290), head_dim=96, v_head_dim=32),
    Case("prompts_d20_dv10", (40, 3), (90, 130), head_dim=20, v_head_dim=10, dtype=torch.bfloat16),
    Case("decode_d256", (1, 1), (70, 290), head_dim=256),
    Case("decode_d512", (1, 1), (70, 290), (8, 1), 512, dtype=torch.bfloat16),
    Case("decode_d576_dv512", (1, 1), (70, 290), (4, 1), 576, 512, dtype=torch.float16),
    Case("mixed_d192_dv128", (1, 20), (190, 90), (4, 2), 192, 128),
    Case("mixed_d320_dv64", (1, 20, 3), (190, 90, 3), (4, 2), 320, 64, window=60, softcap=5.0,
         alibi=True, sinks=True, dtype=torch.bfloat16),
    Case("prompts_d136_dv512", (20, 3), (90, 60), (2, 1), 136, 512, dtype=torch.bfloat16),
    Case("prompts_d576_narrow_queries_of_wide_cache", (9, 3), (90, 60), (2, 1), 576, 512,
         dtype=torch.float16, cache_dtype=torch.float32),
    Case("mixed_invariant_d512", (1, 20), (300, 90), (4, 2), 512, batch_invariant=True,
         dtype=torch.bfloat16),
    Case("decode_window", (1, 1, 1), (40, 300, 900), window=100),
    Case("decode_window_of_1", (1, 1), (40, 300), window=1),
    Case("decode_everything", (1, 1), (600, 31), window=300, softcap=5.0, alibi=True, sinks=True),
    Case("decode_narrow_queries_of_wide_cache", (1, 1), (70, 90), dtype=torch.float16,
         cache_dtype=torch.float32),
    Case("decode_padding_rows", (1, 1, 0), (40, 300, 0), padding=3),
    Case("drafts", (2, 4, 1, 0, 3), (300, 4, 40, 17, 3), sinks=True),
    Case("drafts_in_a_window", (2, 4), (163, 131), window=35),
    Case("prefill", (40, 37), (40, 37)),
    Case("prefill_chunk_after_a_prefix", (45,), (333,), (4, 4), block_size=8),
    Case("prefill_longer_than_its_keys", (12, 9), (5, 9), sinks=True),
    Case("mixed", (1, 33, 0, 1, 9), (300, 40, 20, 1, 90), padding=2),
    Case("mixed_everything", (1, 50, 1), (333, 120, 7), (7, 1), 32, window=40, softcap=3.0,
         alibi=True, sinks=True),
    Case("decode_invariant_with_idle_sequences", (1, 0, 1, 1, 0), (40, 17, 0, 300, 3), padding=3,
         batch_invariant=True),
    Case("mixed_invariant", (1, 33, 3), (300, 40, 90), batch_invariant=True),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


@interpreted
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_float64(case: Case) -> None:
    check(make_inputs(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_float64_on_a_gpu(case: Case) -> None:
    check(make_inputs(case.grown(8), "cuda"))


@pytest.mark.gpu
@pytest.mark.large
def test_agrees_with_float64_on_a_gpu_over_130_000_keys() -> None:
    check(make_inputs(Case("long", (1,), (130_001,), (32, 8), 128, dtype=torch.bfloat16), "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["decode", "mixed_everything", "decode_d256", "prefill"])
def test_agrees_with_float64_on_a_gpu_in_float32(name: str) -> None:
    check(make_inputs(replace(BY_NAME[name].grown(4), dtype=torch.float32), "cuda"))


@interpreted
def test_strided_queries_and_a_fused_cache() -> None:
    check(_with_strides(make_inputs(BY_NAME["mixed"])))


@pytest.mark.gpu
def test_strided_queries_and_a_fused_cache_on_a_gpu() -> None:
    check(_with_strides(make_inputs(BY_NAME["mixed"].grown(8), "cuda")))


def _with_strides(inputs: Inputs) -> Inputs:
    """Lay q inside a fused projection, both caches inside one tensor, the table inside a wider."""
    tokens, heads, width = inputs.q.shape
    fused = torch.full((tokens, heads + 4, width), math.nan, dtype=inputs.q.dtype)
    fused = fused.to(inputs.q.device)
    fused[:, :heads] = inputs.q
    caches = torch.stack([inputs.k_cache, inputs.v_cache], dim=1)
    table = inputs.tensors["block_table"]
    assert table is not None
    wide = torch.cat([table, torch.full_like(table, -7)], dim=1)
    tensors = inputs.tensors | {"block_table": wide[:, : table.shape[1]]}
    return replace_inputs(inputs, fused[:, :heads], caches[:, 0], caches[:, 1], tensors)


def replace_inputs(
    inputs: Inputs, q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: dict[str, Tensor | None]
) -> Inputs:
    return Inputs(inputs.spec, q, k_cache, v_cache, tensors, inputs.window)


@interpreted
def test_merges_more_splits_than_one_tile_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "sm_count_of", lambda _: 132)  # 24 splits of 1,500 keys
    monkeypatch.setattr(paged_decode, "MERGE_TILE", 1)  # for each of four warps
    inputs = make_inputs(BY_NAME["decode_one_long_sequence"])
    table = inputs.tensors["block_table"]
    assert table is not None
    blocks = table[0].long()  # later keys have larger logits
    growing = torch.linspace(0.5, 3.0, len(blocks)).to(inputs.k_cache.dtype)
    inputs.k_cache[blocks] *= growing[:, None, None, None]
    check(inputs)


@interpreted
@pytest.mark.parametrize("name", ["decode_window", "mixed_everything"])
def test_blocks_before_the_window_are_never_looked_up(name: str) -> None:
    inputs = make_inputs(BY_NAME[name])
    before = launch(inputs)
    table = inputs.tensors["block_table"]
    assert table is not None
    for row, (run, length) in enumerate(
        zip(BY_NAME[name].runs, BY_NAME[name].lengths, strict=True)
    ):
        first_key = max(0, length - run - inputs.spec.window_left)
        freed = table[row, : first_key // inputs.spec.block_size]
        inputs.k_cache[freed.long()] = math.nan
        inputs.v_cache[freed.long()] = math.nan
        freed.fill_(-1)
    assert all(torch.equal(a, b) for a, b in zip(before, launch(inputs), strict=True))


def _rows_in_company(run: int, length: int, company: Case, device: str) -> tuple[Tensor, ...]:
    """Results of one sequence alone and beside `company`, both batch-invariant."""
    alone = Case("alone", (run,), (length,), company.heads, company.head_dim, sinks=company.sinks,
                 window=company.window, dtype=company.dtype, batch_invariant=True)  # fmt: skip
    crowd = replace(
        alone,
        runs=(*company.runs, run),
        lengths=(*company.lengths, length),
        padding=company.padding,
    )
    single, many = make_inputs(alone, device), make_inputs(crowd, device)
    begin = sum(company.runs)
    single.q[:] = many.q[begin : begin + run]
    single.k_cache, single.v_cache = many.k_cache, many.v_cache
    table, own = single.tensors["block_table"], many.tensors["block_table"]
    assert table is not None
    assert own is not None
    table[:] = own[-1:, : table.shape[1]]
    single.tensors["sinks"] = many.tensors["sinks"]
    o, lse = launch(single)
    many_o, many_lse = launch(many)
    return o, many_o[begin : begin + run], lse, many_lse[:, begin : begin + run]


COMPANY = [
    Case("other_tokens", (1, 1), (40, 700)),
    Case("drafts", (4, 2), (40, 3), sinks=True),
    Case("prompts", (60, 1, 0), (60, 300, 5), padding=2),
]


@interpreted
@pytest.mark.parametrize("company", COMPANY, ids=lambda case: case.name)
@pytest.mark.parametrize(("run", "length"), [(1, 500), (5, 90), (40, 70)])
def test_batch_invariance_is_bitwise(run: int, length: int, company: Case) -> None:
    alone, many, lse, many_lse = _rows_in_company(run, length, company, "cpu")
    assert torch.equal(alone, many)
    assert torch.equal(lse, many_lse)


def _last_row_alone(run: int, length: int, dtype: torch.dtype, window: int | None,
                    device: str, head_dim: int = 64) -> tuple[Tensor, ...]:  # fmt: skip
    """Results of a sequence's last token, computed alone and as the last of a chunk."""
    chunk = Case("chunk", (run, 3), (length, 50), head_dim=head_dim, dtype=dtype, window=window,
                 sinks=True, batch_invariant=True)  # fmt: skip
    many = make_inputs(chunk, device)
    single = make_inputs(replace(chunk, runs=(1, 3)), device)
    single.q[0], single.q[1:] = many.q[run - 1], many.q[run:]
    single.k_cache, single.v_cache, single.tensors = many.k_cache, many.v_cache, {
        **many.tensors, "cu_seqlens_q": single.tensors["cu_seqlens_q"]
    }  # fmt: skip
    (o, lse), (many_o, many_lse) = launch(single), launch(many)
    return o[0], many_o[run - 1], lse[:, 0], many_lse[:, run - 1]


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("run", "length", "window"), [(7, 300, None), (200, 260, None), (40, 300, 70)]
)
@pytest.mark.usefixtures("products_in_order")
def test_a_token_alone_has_the_bits_of_a_chunk(
    run: int, length: int, window: int | None, dtype: torch.dtype
) -> None:
    alone, many, lse, many_lse = _last_row_alone(run, length, dtype, window, "cpu")
    assert torch.equal(alone, many)
    assert torch.equal(lse, many_lse)


@interpreted
@pytest.mark.usefixtures("products_in_order")
def test_on_hopper_a_token_alone_has_the_bits_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that decode have a kernel of their own, which is left out beside whole runs."""
    monkeypatch.setattr(device, "arch_of", lambda _: 90)
    monkeypatch.setattr(device, "sm_count_of", lambda _: 1)  # filled by two sequences
    chunk = Case("chunk", (5, 5), (300, 77), dtype=torch.bfloat16, batch_invariant=True)
    many = make_inputs(chunk)
    single = make_inputs(replace(chunk, runs=(1, 1)))
    single.q[:] = many.q[4::5]
    single.k_cache, single.v_cache = many.k_cache, many.v_cache
    single.tensors["block_table"] = many.tensors["block_table"]
    mixed = make_inputs(replace(chunk, runs=(5, 1)))  # both kernels
    mixed.q[:5], mixed.q[5] = many.q[:5], many.q[9]
    mixed.k_cache, mixed.v_cache = many.k_cache, many.v_cache
    mixed.tensors["block_table"] = many.tensors["block_table"]
    works = [tiles.paged_work(x.spec, 90, 1) for x in (many, single, mixed)]
    assert [work.split_run for work in works] == [0, 1, 1]
    assert works[1].split_config == works[0].rows_config
    (o, lse), (many_o, many_lse), (mixed_o, _) = launch(single), launch(many), launch(mixed)
    assert torch.equal(o, many_o[4::5])
    assert torch.equal(lse, many_lse[:, 4::5])
    assert torch.equal(mixed_o[:5], many_o[:5])
    assert torch.equal(mixed_o[5], many_o[9])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("run", "length", "window"), [(7, 300, None), (200, 9000, None), (1000, 3000, 700)]
)
def test_a_token_alone_has_the_bits_of_a_chunk_on_a_gpu(
    run: int, length: int, window: int | None, dtype: torch.dtype
) -> None:
    alone, many, lse, many_lse = _last_row_alone(run, length, dtype, window, "cuda")
    assert torch.equal(alone, many)
    assert torch.equal(lse, many_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [192, 320, 512])
def test_a_token_alone_has_the_bits_of_a_chunk_in_wide_heads_on_a_gpu(head_dim: int) -> None:
    dtype = torch.bfloat16
    alone, many, lse, many_lse = _last_row_alone(200, 9000, dtype, None, "cuda", head_dim)
    assert torch.equal(alone, many)
    assert torch.equal(lse, many_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("company", COMPANY, ids=lambda case: case.name)
@pytest.mark.parametrize(("run", "length"), [(1, 9000), (5, 3000), (400, 700)])
def test_batch_invariance_is_bitwise_on_a_gpu(run: int, length: int, company: Case) -> None:
    alone, many, lse, many_lse = _rows_in_company(run, length, company.grown(8), "cuda")
    assert torch.equal(alone, many)
    assert torch.equal(lse, many_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["decode_ragged_batch_with_splits", "mixed"])
def test_repeats_are_bitwise_equal_on_a_gpu(name: str) -> None:
    inputs = make_inputs(BY_NAME[name].grown(16), "cuda")
    o, lse = launch(inputs)
    for _ in range(100):
        again_o, again_lse = launch(inputs)
        assert torch.equal(o, again_o)
        assert torch.equal(lse, again_lse)


@pytest.mark.gpu
def test_graph_replay_follows_new_lengths_tables_and_queries() -> None:
    case = Case("serving", (1, 1, 1, 1), (9000, 17, 2000, 300), (32, 8), 128, dtype=torch.bfloat16)
    inputs = make_inputs(case, "cuda")
    launch(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = launch(inputs)
    for lengths in ((9000, 17, 2000, 300), (5, 8000, 40, 1), (1, 1, 0, 9000)):
        fresh = make_inputs(replace(case, lengths=lengths), "cuda")
        table, new_table = inputs.tensors["block_table"], fresh.tensors["block_table"]
        seqlens, new_seqlens = inputs.tensors["seqlens_k"], fresh.tensors["seqlens_k"]
        assert table is not None
        assert new_table is not None
        assert seqlens is not None
        assert new_seqlens is not None
        used = min(len(inputs.k_cache), len(fresh.k_cache))
        inputs.k_cache[:used], inputs.v_cache[:used] = fresh.k_cache[:used], fresh.v_cache[:used]
        table.fill_(-1)
        table[:, : new_table.shape[1]] = new_table
        seqlens.copy_(new_seqlens)
        inputs.q.normal_()
        graph.replay()
        truth_o, truth_lse = expected(inputs, torch.float64)
        eager_o, eager_lse = expected(inputs, torch.bfloat16)
        assert_within_budget(o, truth_o, eager_o, name="o")
        assert_within_budget(lse, truth_lse, eager_lse, name="lse")


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("runs", [(1, 1), (300, 1)], ids=["decode", "mixed"])
def test_offsets_past_2_to_the_31_on_a_gpu(runs: tuple[int, ...]) -> None:
    case = Case("far", runs, (2000, 900), (32, 8), 128, dtype=torch.bfloat16)
    inputs = make_inputs(case, "cuda")
    near = launch(inputs)
    blocks, *slot = inputs.k_cache.shape
    far_blocks = 2**31 // (slot[0] * slot[1] * slot[2]) + blocks
    caches = [torch.empty(far_blocks, *slot, dtype=case.dtype, device="cuda") for _ in range(2)]
    caches[0][-blocks:], caches[1][-blocks:] = inputs.k_cache, inputs.v_cache
    table = inputs.tensors["block_table"]
    assert table is not None
    table += far_blocks - blocks
    far = launch(Inputs(inputs.spec, inputs.q, caches[0], caches[1], inputs.tensors, None))
    assert all(torch.equal(a, b) for a, b in zip(near, far, strict=True))


def _spec(**changes: object) -> PagedSpec:
    return serving_spec(**{"max_blocks": 512, **changes})


def test_launched_pairs_bound_the_splits_of_any_lengths() -> None:
    draw = random.Random(0)
    for _ in range(300):
        spec = _spec(
            num_seqs=draw.choice([1, 3, 16, 200]),
            num_kv_heads=draw.choice([1, 8, 32]),
            max_blocks=draw.choice([1, 20, 600, 9000]),
            window_left=draw.choice([-1, -1, 0, 700]),
            batch_invariant=draw.random() < 0.3,
        )
        config = tiles.paged_split_config(spec, 1, 90)
        plan = tiles.plan_splits(spec, config, 1, 132)
        longest = spec.max_blocks * spec.block_size
        lengths = [
            draw.choice([0, 1, longest, draw.randrange(longest + 1)]) for _ in range(spec.num_seqs)
        ]
        counts = []
        for length in lengths:
            first = max(0, length - 1 - spec.window_left) // config.tile_n
            first = first if spec.window_left >= 0 else 0
            counts.append(max(1, -(-length // config.tile_n) - first))
        split_tiles = plan.split_tiles
        if not plan.fixed:
            split_tiles = max(split_tiles, -(-sum(counts) // plan.target_pairs))
        splits = [-(-count // split_tiles) for count in counts]
        assert sum(splits) <= plan.num_pairs
        assert not plan.alone or max(splits) == 1


@interpreted
@pytest.mark.parametrize("window_left", [-1, 300])
def test_a_plan_deals_every_tile_out_once(window_left: int) -> None:
    draw = random.Random(window_left)
    for num_seqs in (1, 5):
        lengths = [draw.choice([0, 1, 64, 700, draw.randrange(9000)]) for _ in range(num_seqs)]
        spec = _spec(num_seqs=num_seqs, num_kv_heads=2, max_blocks=600, window_left=window_left)
        work = tiles.planned_work(spec, 90, 4)
        config, plan = work.split_config, work.split_plan
        assert plan.weighed
        records = torch.full((plan.num_pairs, 8), -1, dtype=torch.int32)
        paged_attention.launch_plan(
            launch_now, torch.tensor(lengths, dtype=torch.int32),
            torch.arange(num_seqs + 1, dtype=torch.int32),
            records, plan=plan, tile_n=config.tile_n, max_run=1, window_left=window_left,
            num_tokens=num_seqs, max_keys=spec.max_blocks * spec.block_size,
        )  # fmt: skip
        used = [record for record in records.tolist() if record[7] > 0]
        assert all(record[7] == 0 for record in records[len(used) :].tolist())
        for seq, length in enumerate(lengths):
            own = [record for record in used if record[0] == seq]
            seen_from = max(0, length - 1 - window_left) if window_left >= 0 else 0
            edges = [record[4] for record in own] + [own[-1][5]]
            assert edges[0] == seen_from // config.tile_n
            assert edges[-1] == max(edges[0], -(-length // config.tile_n))
            assert [record[5] for record in own] == edges[1:]
            assert {tuple(record[1:4]) for record in own} == {(seq, 1, length)}
            assert {tuple(record[6:]) for record in own} == {(used.index(own[0]), len(own))}


@pytest.mark.parametrize(
    ("num_seqs", "is_whole"), [(24, False), (29, False), (30, True), (33, True), (34, False)]
)
def test_sequences_that_fill_an_h200_once_are_planned_whole(num_seqs: int, is_whole: bool) -> None:
    spec = _spec(num_seqs=num_seqs, num_tokens=num_seqs)
    planned = tiles.planned_work(spec, 90, 132)
    asked = tiles.WHOLE_PROGRAMS, tiles.WHOLE_TILE_N, tiles.WHOLE_STAGES
    config = planned.split_config
    found = planned.split_plan.target_pairs * 8 / 132, config.tile_n, config.num_stages
    assert (found == asked) == is_whole
    assert tiles.paged_work(spec, 90, 132).split_config.tile_n == 32  # without a plan, as before
    for other in ({"cache_dtype": torch.int8}, {"head_dim": 64, "v_head_dim": 64}):
        changed = tiles.planned_work(replace(spec, **other), 90, 132)
        assert (
            changed.split_config == tiles.paged_work(replace(spec, **other), 90, 132).split_config
        )
    assert (
        tiles.planned_work(spec, 80, 132).split_config
        == tiles.paged_work(spec, 80, 132).split_config
    )


@pytest.mark.parametrize(
    ("num_seqs", "arch", "dtype", "is_long"),
    [
        (1, 90, torch.bfloat16, True),
        (2, 90, torch.bfloat16, False),
        (1, 80, torch.bfloat16, False),
        (1, 90, torch.float32, False),
    ],
)
def test_one_sequence_on_hopper_has_longer_steps(num_seqs, arch, dtype, is_long) -> None:
    spec = PagedSpec(
        "cuda", dtype, dtype, num_seqs, num_seqs, 1, 16, 8, 128, 128, 16, max_blocks=128
    )
    config = tiles.planned_work(spec, arch, 132).split_config
    asked = tiles.paged_split_config(spec, 1, arch)
    if is_long:
        assert (config.tile_n, config.num_stages) == (tiles.WHOLE_TILE_N, tiles.WHOLE_STAGES)
        assert config.tile_n > asked.tile_n
    else:
        assert config == asked


def test_plan_fills_the_device_and_leaves_short_sequences_whole() -> None:
    config = tiles.paged_split_config(_spec(), 1, 90)
    plan = tiles.plan_splits(_spec(num_seqs=1, max_blocks=8192), config, 1, 132)
    assert plan.num_pairs * 8 >= 132
    assert not plan.alone
    assert tiles.plan_splits(_spec(max_blocks=8), config, 1, 132).alone


@pytest.mark.parametrize("arch", [80, 90])
def test_invariant_work_depends_on_a_sequence_alone(arch: int) -> None:
    few = tiles.paged_work(
        _spec(batch_invariant=True, num_seqs=2, max_seqlen_q=3, num_tokens=5), arch, 132
    )
    many = tiles.paged_work(
        _spec(batch_invariant=True, num_seqs=90, max_seqlen_q=700, num_tokens=9000), arch, 132
    )
    assert few.split_run == many.split_run == int(arch == 90)
    assert few.rows_config == many.rows_config is not None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "dtype of q must be"),
        ({"cache_dtype": torch.float8_e5m2}, "dtype of the cache must be"),
        ({"head_dim": 577}, "head_dim must be at most 576, got 577"),
        ({"v_head_dim": 576}, "v_head_dim must be at most 512, got 576"),
    ],
)
def test_refusals_say_why(changes: dict[str, object], reason: str) -> None:
    assert reason in (paged_attention.why_not(_spec(**changes)) or "")


def test_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert paged_attention.why_not(_spec(device_type="cpu")) == "needs a CUDA device, got cpu"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert paged_attention.why_not(_spec(device_type="cpu")) is None
