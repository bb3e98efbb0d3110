"""flash_attn_with_kvcache(): every way to store, append and rotate, against a walk by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.integrations.flash_attn_oracle import KVCacheCase, draw, expected
from tests.waits import waits_are_errors
from tilewise.integrations.flash_attn import flash_attn_with_kvcache
from tilewise.integrations.flash_attn.pages import row_blocks
from tilewise.ops import dispatch
from tilewise.testing import assert_within_budget

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CAUSAL = {"causal": True}

CASES = [
    KVCacheCase("decode"),
    KVCacheCase("read_only", new=None),
    KVCacheCase("empty_cache_then_one", seqlens=(0, 5)),
    KVCacheCase("chunk_causal", seqlen_q=5, new=5, options=CAUSAL),
    KVCacheCase("chunk_sees_all", seqlen_q=5, new=5),
    KVCacheCase("more_queries_than_new", seqlen_q=6, new=2, options=CAUSAL),
    KVCacheCase("more_queries_than_keys", seqlens=(1, 3), seqlen_q=6, new=1, options=CAUSAL),
    KVCacheCase("fills_the_cache", seqlens=(0, 92), seqlen_q=4, new=4, options=CAUSAL),
    KVCacheCase("odd_capacity", capacity=77, seqlen_q=3, new=3, options=CAUSAL),
    KVCacheCase("mha", num_kv_heads=4),
    KVCacheCase("mqa", num_kv_heads=1, seqlen_q=3, new=3, options=CAUSAL),
    KVCacheCase("gqa_3", num_q_heads=6),
    KVCacheCase("page_1", block_size=1),
    KVCacheCase("page_16", block_size=16, seqlen_q=3, new=3, options=CAUSAL),
    KVCacheCase("page_24", block_size=24, seqlens=(23, 47), seqlen_q=2, new=2, options=CAUSAL),
    KVCacheCase("page_24_sees_all", block_size=24, seqlens=(23, 47), seqlen_q=2, new=2),
    KVCacheCase("page_256", block_size=256, seqlens=(255, 300), capacity=512),
    KVCacheCase("batch_idx", batch_idx=(3, 1)),
    KVCacheCase("batch_idx_sees_all", batch_idx=(2, 0), seqlen_q=3, new=3),
    KVCacheCase("leftpad", leftpad=(5, 69)),
    KVCacheCase("leftpad_chunk", leftpad=(36, 0), seqlen_q=4, new=4, options=CAUSAL),
    KVCacheCase("leftpad_sees_all", leftpad=(3, 0), seqlen_q=4, new=2, batch_idx=(1, 2)),
    KVCacheCase("rotary_pairs", seqlen_q=3, new=3, rotary_dim=64, options=CAUSAL),
    KVCacheCase("rotary_halves", seqlen_q=3, new=3, rotary_dim=64, interleaved=False),
    KVCacheCase("rotary_part_of_a_head", seqlen_q=2, new=3, rotary_dim=32, block_size=16),
    KVCacheCase(
        "rotary_halves_in_a_window",
        seqlen_q=3,
        new=3,
        rotary_dim=16,
        interleaved=False,
        leftpad=(2, 9),
        options={"window_size": (20, 2)},
    ),
    KVCacheCase("window_left", seqlen_q=4, new=4, options={"window_size": (9, 0)}),
    KVCacheCase("window_both_sides", seqlen_q=4, new=4, options={"window_size": (9, 1)}),
    KVCacheCase("window_right_of_one_query", options={"window_size": (-1, 3)}),
    KVCacheCase("softcap", seqlen_q=2, new=2, options={"softcap": 5.0, "causal": True}),
    KVCacheCase("alibi", alibi="heads"),
    KVCacheCase("alibi_of_each_sequence", alibi="batch", seqlen_q=2, new=2, block_size=16),
    KVCacheCase("alibi_after_leftpad", alibi="batch", leftpad=(4, 11), options=CAUSAL),
    KVCacheCase("head_dim_80", head_dim=80, rotary_dim=32, seqlen_q=2, new=2, options=CAUSAL),
    KVCacheCase("head_dim_59", head_dim=59, rotary_dim=48, seqlen_q=2, new=2, options=CAUSAL),
    KVCacheCase("head_dim_59_paged", head_dim=59, block_size=16),
    KVCacheCase("value_narrower", head_dim=64, v_head_dim=32, block_size=16),
    KVCacheCase("own_scale", options={"softmax_scale": 0.5}),
    KVCacheCase("one_split", options={"num_splits": 1}),
    KVCacheCase("many_splits", options={"num_splits": 7}),
]


def _check(case: KVCacheCase, dtype: torch.dtype, place: str) -> None:
    drawn = draw(case, dtype, place)
    want = expected(case, drawn)
    given = drawn.arguments
    out, lse = flash_attn_with_kvcache(
        **given,
        rotary_interleaved=case.interleaved,
        return_softmax_lse=True,
        **case.options,
    )
    assert out.shape == want["o_truth"].shape
    assert lse.dtype == torch.float32
    assert torch.equal(given["v_cache"].cpu().isnan(), want["v_cache"].isnan())
    assert torch.equal(given["v_cache"].cpu().nan_to_num(7), want["v_cache"].nan_to_num(7))
    torch.testing.assert_close(
        given["k_cache"].cpu(), want["k_cache"], equal_nan=True, rtol=1e-2, atol=1e-3
    )
    assert_within_budget(out, want["o_truth"], want["o_eager"], name="out")
    assert_within_budget(lse, want["lse_truth"], want["lse_eager"], name="lse")


class TestCases:
    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_output_and_cache_equal_the_walk(self, case, place):
        _check(case, torch.bfloat16, place)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_each_dtype(self, dtype):
        case = next(c for c in CASES if c.name == "rotary_part_of_a_head")
        _check(case, dtype, "cpu")

    @pytest.mark.parametrize(
        "name", ["decode", "leftpad_chunk", "page_24", "chunk_sees_all", "rotary_pairs"]
    )
    def test_gpu_kernels_in_the_interpreter(self, name, monkeypatch):
        monkeypatch.setattr(dispatch, "_AUTOMATIC", {"cpu": ("triton",)})
        dispatch.choose.cache_clear()
        case = replace(next(c for c in CASES if c.name == name), head_dim=32)
        case = replace(case, rotary_dim=min(case.rotary_dim, 32))
        try:
            _check(case, torch.float32, "cpu")
        finally:
            dispatch.choose.cache_clear()

    @pytest.mark.slow
    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("seed", range(100))
    def test_any_combination(self, seed, place):
        _check(_random_case(seed), torch.bfloat16, place)

    @pytest.mark.gpu
    @pytest.mark.parametrize("name", ["decode", "page_16", "leftpad_sees_all", "rotary_pairs"])
    def test_nothing_waits_for_the_device(self, name):
        case = next(c for c in CASES if c.name == name)
        _check(case, torch.bfloat16, "cuda")  # compiled by now
        given = draw(case, torch.bfloat16, "cuda").arguments
        with waits_are_errors():
            flash_attn_with_kvcache(**given, **case.options)


def _random_case(seed: int) -> KVCacheCase:
    choose = random.Random(seed).choice
    seqlen_q, new = choose([1, 2, 7]), choose([None, 1, 2, 5])
    capacity = choose([48, 96, 144])
    room = capacity - (new or 0) - seqlen_q
    seqlens = tuple(choose(range(room)) for _ in range(choose([1, 2, 3])))
    block_size = choose([None, None, 1, 16, 24, 48])
    in_rows = block_size is None
    num_kv_heads, head_dim = choose([1, 2, 3]), choose([32, 40, 59, 64, 128])
    return KVCacheCase(
        f"random_{seed}",
        seqlens=seqlens,
        capacity=capacity,
        seqlen_q=seqlen_q,
        new=new,
        num_q_heads=num_kv_heads * choose([1, 2, 4]),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=choose([None, None, 48]),
        block_size=block_size,
        batch_idx=choose([None, tuple(range(len(seqlens)))[::-1]]) if in_rows else None,
        leftpad=choose([None, tuple(n // 3 for n in seqlens)]) if in_rows else None,
        alibi=choose([None, None, "heads", "batch"]),
        rotary_dim=0 if new is None else choose([0, 16, 32]),
        interleaved=choose([True, False]),
        options={
            "causal": choose([True, False]),
            "window_size": choose([(-1, -1), (9, 0), (20, 3), (-1, 2)]),
            "softcap": choose([0.0, 0.0, 4.0]),
            "num_splits": choose([0, 1, 3]),
        },
    )


def _cache(rows: int = 3, capacity: int = 64, heads: int = 2, dim: int = 32) -> torch.Tensor:
    return torch.randn(rows, capacity, heads, dim)


def _strided(cache: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers in another order of memory."""
    rows, capacity, heads, dim = cache.shape
    if layout == "heads_first":
        view = cache.new_full((rows, heads, capacity, dim), float("nan")).transpose(1, 2)
    elif layout == "part_of_longer_rows":
        view = cache.new_full((rows, capacity + 32, heads, dim), float("nan"))[:, 3 : 3 + capacity]
    elif layout == "beside_its_twin":
        view = cache.new_full((rows, capacity, 2, heads, dim), float("nan"))[:, :, 1]
    elif layout == "rows_apart_by_no_whole_token":
        view = cache.new_full((rows, capacity * heads * dim + 8), float("nan"))[:, 8:]
        view = view.unflatten(1, (capacity, heads, dim))
    else:
        view = cache.new_full((capacity, rows, heads, dim), float("nan")).transpose(0, 1)
    return view.copy_(cache)


LAYOUTS = [
    "heads_first",
    "part_of_longer_rows",
    "beside_its_twin",
    "rows_apart_by_no_whole_token",
    "tokens_first",
]


class TestLayouts:
    @pytest.mark.parametrize("leftpad", [None, (4, 17)])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_any_strides_give_the_same_and_are_written_in_place(self, layout, leftpad):
        k_cache, v_cache = _cache(), _cache()
        q, k, v = torch.randn(2, 2, 4, 32), torch.randn(2, 2, 2, 32), torch.randn(2, 2, 2, 32)
        options = {"causal": True, "cache_seqlens": torch.tensor([19, 62], dtype=torch.int32)}
        options["cache_batch_idx"] = torch.tensor([2, 0], dtype=torch.int32)
        if leftpad is not None:
            options["cache_leftpad"] = torch.tensor(leftpad, dtype=torch.int32)
        other = [_strided(cache, layout) for cache in (k_cache, v_cache)]
        want = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options)
        got = flash_attn_with_kvcache(q, *other, k, v, **options)
        torch.testing.assert_close(got, want)
        assert torch.equal(other[0], k_cache)
        assert torch.equal(other[1], v_cache)
        assert torch.equal(k_cache[2, 19:21], k[0])
        assert torch.equal(v_cache[0, 62:], v[1])

    @pytest.mark.parametrize("single", [False, True])
    @pytest.mark.parametrize("layout", ["contiguous", *LAYOUTS])
    @pytest.mark.parametrize("capacity", [1, 48, 64, 77])
    def test_blocks_are_slices_of_rows(self, layout, single, capacity):
        cache = _cache(capacity=capacity)
        view = cache if layout == "contiguous" else _strided(cache, layout)
        blocks = row_blocks(view, view, single=single)
        if blocks is None:
            assert capacity == 1 or layout in ("rows_apart_by_no_whole_token", "tokens_first")
            return
        assert blocks.k.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
        size = blocks.k.shape[1]
        assert size == 1 or not single
        if layout == "contiguous" and capacity == 48:
            assert size == (1 if single else 16)
        for row in range(3):
            first = row * blocks.period // size
            found = blocks.k[first : first + capacity // size].flatten(0, 1)
            assert torch.equal(found, cache[row])

    def test_a_cache_without_rows_or_room(self):
        q = torch.randn(2, 3, 4, 32)
        nothing = torch.randn(2, 0, 2, 32)
        out, lse = flash_attn_with_kvcache(q, nothing, nothing, return_softmax_lse=True)
        assert torch.equal(out, torch.zeros_like(q))
        assert bool(lse.isneginf().all())
        none = flash_attn_with_kvcache(q[:0], _cache(rows=0), _cache(rows=0))
        assert none.shape == (0, 3, 4, 32)


class TestMeaning:
    def test_an_int_is_the_length_of_every_sequence(self):
        q, k_cache, v_cache = torch.randn(3, 1, 4, 32), _cache(), _cache()
        lengths = torch.full((3,), 21, dtype=torch.int32)
        want = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths)
        assert torch.equal(flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=21), want)
        full = torch.full((3,), 64, dtype=torch.int32)
        want = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=full)
        assert torch.equal(flash_attn_with_kvcache(q, k_cache, v_cache), want)

    def test_an_int_is_the_length_of_every_paged_sequence(self):
        q, pages = torch.randn(3, 1, 4, 32), _cache(rows=11, capacity=8)
        table = torch.randperm(11)[:6].view(3, 2).int()
        lengths = torch.full((3,), 13, dtype=torch.int32)
        want = flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, block_table=table)
        got = flash_attn_with_kvcache(q, pages, pages, cache_seqlens=13, block_table=table)
        assert torch.equal(got, want)

    @pytest.mark.parametrize("paged", [False, True])
    def test_tokens_past_the_capacity_touch_nothing(self, paged):
        k_cache, v_cache = _cache(rows=4, capacity=16), _cache(rows=4, capacity=16)
        before = k_cache.clone()
        q, k = torch.randn(2, 3, 4, 32), torch.randn(2, 3, 2, 32)
        lengths = torch.tensor([15, 5], dtype=torch.int32)
        table = torch.tensor([[1], [3]], dtype=torch.int32) if paged else None
        out = flash_attn_with_kvcache(
            q, k_cache, v_cache, k, k, cache_seqlens=lengths, block_table=table
        )
        rows = [1, 3] if paged else [0, 1]
        before[rows[0], 15], before[rows[1], 5:8] = k[0, 0], k[1]
        assert torch.equal(k_cache, before)
        assert bool(out.isfinite().all())

    def test_no_gradient_flows(self):
        q = torch.randn(2, 1, 4, 32, requires_grad=True)
        k = torch.randn(2, 1, 2, 32, requires_grad=True)
        out = flash_attn_with_kvcache(q, _cache(), _cache(), k, k, cache_seqlens=3)
        assert not out.requires_grad

    def test_one_split_keeps_the_bits_of_a_sequence(self):
        q, k_cache, v_cache = torch.randn(3, 1, 4, 32), _cache(), _cache()
        lengths = torch.tensor([64, 3, 40], dtype=torch.int32)
        together = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, num_splits=1)
        alone = flash_attn_with_kvcache(
            q[2:], k_cache[2:], v_cache[2:], cache_seqlens=lengths[2:], num_splits=1
        )
        assert torch.equal(alone[0], together[2])

    @pytest.mark.parametrize(
        ("name", "dynamic"), [("leftpad_chunk", None), ("rotary_part_of_a_head", True)]
    )
    def test_it_compiles_into_one_graph(self, name, dynamic):
        torch.compiler.reset()
        case = next(c for c in CASES if c.name == name)
        eager, traced = (draw(case, torch.float32, "cpu").arguments for _ in range(2))
        want = flash_attn_with_kvcache(**eager, **case.options)
        compiled = torch.compile(
            flash_attn_with_kvcache, fullgraph=True, backend="aot_eager", dynamic=dynamic
        )
        torch.testing.assert_close(compiled(**traced, **case.options), want)
        assert torch.equal(traced["k_cache"].nan_to_num(7), eager["k_cache"].nan_to_num(7))


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


NEW = {"k": torch.zeros(2, 1, 2, 32), "v": torch.zeros(2, 1, 2, 32)}
ROTARY = {"rotary_cos": torch.ones(64, 8), "rotary_sin": torch.ones(64, 8)}
TABLE = torch.zeros(2, 1, dtype=torch.int32)

REFUSALS = {
    "q_packed": ({"q": torch.zeros(2, 4, 32)}, ValueError, "q must be"),
    "cache_dtype": ({"k_cache": torch.zeros(3, 64, 2, 32).half()}, TypeError, "k_cache must have"),
    "cache_head_dim": ({"k_cache": torch.zeros(3, 64, 2, 16)}, ValueError, "head dim of q, 32"),
    "cache_pair": ({"v_cache": torch.zeros(3, 60, 2, 32)}, ValueError, "v_cache must have shape"),
    "cache_strides": (
        {"k_cache": torch.zeros(3, 64, 32, 2).transpose(2, 3)},
        ValueError,
        "k_cache must have stride 1",
    ),
    "few_rows": ({"k_cache": torch.zeros(1, 64, 2, 32)}, ValueError, "v_cache must have shape"),
    "few_rows_for_batch": ({"q": torch.zeros(4, 1, 4, 32)}, ValueError, "row for each of 4"),
    "heads": ({"q": torch.zeros(2, 1, 3, 32)}, ValueError, "multiple of key heads"),
    "k_alone": ({"k": NEW["k"], "cache_seqlens": 1}, ValueError, "v must be given with k"),
    "v_alone": ({"v": NEW["v"], "cache_seqlens": 1}, ValueError, "k must be given with v"),
    "no_seqlens": (NEW, ValueError, "cache_seqlens must be given with k and v"),
    "new_shape": (
        {**NEW, "v": torch.zeros(2, 2, 2, 32), "cache_seqlens": 1},
        ValueError,
        "v must have shape",
    ),
    "new_dtype": (
        {**NEW, "k": NEW["k"].half(), "cache_seqlens": 1},
        TypeError,
        "k must have dtype float32",
    ),
    "too_many_new": (
        {"k": torch.zeros(2, 65, 2, 32), "v": torch.zeros(2, 65, 2, 32), "cache_seqlens": 0},
        ValueError,
        "at most the 64 tokens",
    ),
    "seqlens_int": ({**NEW, "cache_seqlens": 64}, ValueError, r"lie in \[0, 63\]"),
    "seqlens_negative": ({"cache_seqlens": -1}, ValueError, r"lie in \[0, 64\]"),
    "seqlens_float": ({"cache_seqlens": 3.0}, TypeError, "int or an int32 tensor"),
    "seqlens_dtype": ({"cache_seqlens": torch.tensor([1, 2])}, TypeError, "dtype int32"),
    "seqlens_shape": ({"cache_seqlens": _int32(1, 2, 3)}, ValueError, r"shape \(2,\)"),
    "batch_idx_shape": ({"cache_batch_idx": _int32(1)}, ValueError, "cache_batch_idx"),
    "batch_idx_dtype": ({"cache_batch_idx": torch.tensor([1, 2])}, TypeError, "dtype int32"),
    "leftpad_shape": ({"cache_leftpad": _int32(1)}, ValueError, "cache_leftpad must have shape"),
    "idx_and_pages": (
        {"cache_batch_idx": _int32(1, 0), "block_table": TABLE},
        ValueError,
        "cache_batch_idx must be None with a block_table",
    ),
    "leftpad_and_pages": (
        {"cache_leftpad": _int32(1, 0), "block_table": TABLE},
        ValueError,
        "cache_leftpad must be None with a block_table",
    ),
    "table_dtype": ({"block_table": TABLE.long()}, TypeError, "block_table must have dtype int32"),
    "table_shape": ({"block_table": TABLE[:1]}, ValueError, "block_table must have shape"),
    "cos_alone": (
        {**NEW, "cache_seqlens": 1, "rotary_cos": ROTARY["rotary_cos"]},
        ValueError,
        "rotary_sin must be given with rotary_cos",
    ),
    "sin_alone": (
        {**NEW, "cache_seqlens": 1, "rotary_sin": ROTARY["rotary_sin"]},
        ValueError,
        "rotary_cos must be given with rotary_sin",
    ),
    "rotary_without_new": ({**ROTARY, "cache_seqlens": 1}, ValueError, "must come with new keys"),
    "rotary_too_wide": (
        {
            **NEW,
            "cache_seqlens": 1,
            "rotary_cos": torch.ones(64, 17),
            "rotary_sin": torch.ones(64, 17),
        },
        ValueError,
        "at most D / 2 = 16 columns",
    ),
    "rotary_too_short": (
        {
            **NEW,
            "cache_seqlens": 1,
            "rotary_cos": torch.ones(63, 8),
            "rotary_sin": torch.ones(63, 8),
        },
        ValueError,
        "each of 64 positions",
    ),
    "rotary_shapes": (
        {**NEW, **ROTARY, "cache_seqlens": 1, "rotary_sin": torch.ones(64, 4)},
        ValueError,
        "rotary_sin must have shape",
    ),
    "rotary_dtype": (
        {**NEW, **ROTARY, "cache_seqlens": 1, "rotary_cos": torch.ones(64, 8).int()},
        TypeError,
        "rotary_cos must be one of",
    ),
    "splits": ({"num_splits": 129}, ValueError, r"num_splits must lie in \[0, 128\]"),
    "window": ({"window_size": (1,)}, ValueError, r"window_size must be \(left, right\)"),
    "alibi_shape": ({"alibi_slopes": torch.ones(3)}, ValueError, "alibi_slopes must have shape"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_which_argument_breaks_which_rule(name):
    arguments, error, message = REFUSALS[name]
    given = {"q": torch.zeros(2, 1, 4, 32), "k_cache": _cache(), "v_cache": _cache(), **arguments}
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**given)


@pytest.mark.parametrize("name", ["cache_batch_idx", "cache_leftpad"])
@pytest.mark.parametrize("stray", [-1, 17])
def test_rows_outside_of_the_cache_are_refused(name, stray):
    q, cache = torch.randn(2, 1, 2, 8), torch.randn(2, 16, 2, 8)
    rows = {name: torch.tensor([0, stray], dtype=torch.int32)}
    with pytest.raises(ValueError, match=f"{name} must lie in"):
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=4, **rows)


def test_positions_past_the_tables_are_not_turned():
    """More queries than new keys end behind the capacity, as do lengths beyond it."""
    angles = torch.rand(16, 4)
    tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    wide = {name: torch.cat([x, x.new_zeros(8, 4)]) for name, x in tables.items()}
    wide["rotary_cos"][16:] = 1
    q, new, lengths = torch.randn(2, 6, 2, 8), torch.randn(2, 1, 2, 8), torch.tensor([15, 18])
    k, v = torch.randn(2, 16, 2, 8), torch.randn(2, 16, 2, 8)
    outs = [
        flash_attn_with_kvcache(
            q, k.clone(), v.clone(), new, new, **x, cache_seqlens=lengths.int(), causal=True
        )
        for x in (tables, wide)
    ]
    assert torch.equal(*outs)
