"""Dense calls of few queries on the paged kernels: against float64, and when they are chosen."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.attention_problem import BRAIN, CAUSAL, HALF, Call, Problem, make_problem
from tests.kernels.gluon.problem import assert_forward_right
from tests.kernels.planned import tensors_of
from tilewise.kernels import plan
from tilewise.kernels.device import interpreting
from tilewise.kernels.gluon.attention import split_kv as attention_few
from tilewise.kernels.host.memory import launches
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.spec import AttentionSpec

INTERPRETED = pytest.mark.skipif(not interpreting(), reason="kernels are compiled here")
WHERE = pytest.mark.parametrize(
    "where",
    [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)],
)
CASES = {
    "one_query": Call(1, 256, (8, 2), (64, 64), 2, BRAIN),
    "one_query_many_keys": Call(1, 1500, (2, 2), (128, 128), 1, HALF),
    "causal": Call(5, 300, (4, 1), (64, 64), 1, BRAIN, CAUSAL),
    "causal_many_rows": Call(40, 256, (6, 2), (64, 64), 2, HALF, CAUSAL),
    "full": Call(5, 272, (4, 1), (64, 64), 2, BRAIN),
    "full_many_rows": Call(70, 190, (2, 2), (64, 64), 1, BRAIN),
    "more_queries_than_keys": Call(140 // 2, 48, (2, 1), (64, 64), 2, BRAIN, CAUSAL),
    "wide": Call(3, 256, (4, 2), (256, 128), 1, BRAIN),
    "key_lengths": Call(3, 160, (4, 2), (64, 64), 4, BRAIN, CAUSAL, seqlens_k=(0, 1, 77, 160)),
    "key_lengths_full": Call(3, 160, (4, 2), (64, 64), 4, HALF, seqlens_k=(0, 1, 77, 160)),
    "sinks": Call(4, 300, (4, 2), (64, 64), 1, BRAIN, CAUSAL, sinks=True),
    "sinks_full": Call(9, 300, (4, 2), (64, 64), 1, BRAIN, sinks=True),
    "softcap": Call(4, 256, (4, 2), (64, 64), 2, BRAIN, softcap=5.0),
}  # fmt: skip


def launched(problem: Problem) -> dict[str, torch.Tensor]:
    blocks = attention_few.blocks_of(problem.k, problem.v)
    assert blocks is not None
    tensors = tensors_of(problem.q, problem.k, problem.v, **problem.tensors)
    maker = Maker(plan.Call.of(problem.spec, tensors))
    results = attention_few.add_split_kv(maker, problem.spec, maker.tensors, blocks)
    o, lse = maker.finish(results).run(*tensors)
    return {"o": o, "lse": lse}


@WHERE
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name: str, where: str) -> None:
    problem = make_problem(CASES[name], where)
    assert_forward_right(problem, launched(problem))


@WHERE
def test_lengths_beyond_the_keys_are_cut(where: str) -> None:
    call = Call(3, 140, (4, 2), (64, 64), 1, BRAIN, seqlens_k=(140,))
    problem = make_problem(call, where)
    whole = launched(problem)["o"]
    problem.seqlens_k = torch.full_like(problem.seqlens_k, 2**31 - 1)
    assert torch.equal(launched(problem)["o"], whole)


@WHERE
def test_a_batch_may_be_cut_out_of_a_longer_one(where: str) -> None:
    problem = make_problem(Call(2, 200, (4, 2), (64, 64), 3, BRAIN, CAUSAL), where)
    for name in ("k", "v"):
        x = getattr(problem, name)
        longer = torch.full((3, 256, 2, 64), float("nan"), dtype=x.dtype, device=x.device)
        longer[:, :200] = x
        setattr(problem, name, longer[:, :200])
    assert attention_few.blocks_of(problem.k, problem.v) == (128, 2)
    assert_forward_right(problem, launched(problem))


@WHERE
def test_heads_may_come_before_rows(where: str) -> None:
    problem = make_problem(Call(2, 256, (4, 2), (64, 64), 2, BRAIN), where)
    problem.q, problem.k, problem.v = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in (problem.q, problem.k, problem.v)
    )
    assert_forward_right(problem, launched(problem))


class TestBlocks:
    def test_are_the_largest_that_sequences_consist_of(self) -> None:
        for length, size in ((256, 128), (192, 64), (1040, 16)):
            k = torch.empty(2, length, 4, 64)
            assert attention_few.blocks_of(k, k) == (size, length // size)

    def test_of_one_sequence_need_not_fit(self) -> None:
        k = torch.empty(1, 1001, 4, 64)
        assert attention_few.blocks_of(k, k) == (128, 0)

    def test_there_are_none_where_sequences_start_in_the_middle_of_one(self) -> None:
        k, v = torch.empty(2, 1001, 4, 64), torch.empty(2, 256, 4, 64)
        assert attention_few.blocks_of(k, k) is None
        assert attention_few.blocks_of(v, v[:, ::2]) is None
        assert attention_few.blocks_of(v.transpose(2, 3), v) is None


class TestMetadata:
    """Tensors that say that a batch of equal sequences is a paged one; they are made seldom."""

    @pytest.fixture(autouse=True)
    def nothing_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launches, "tensors", {})

    @pytest.mark.parametrize("keys", [1, 127, 128, 129, 1000, 1023, 1024, 1025, 5000])
    def test_says_where_keys_are_and_how_many(self, keys: int) -> None:
        blocks = attention_few.Blocks(128, 40)
        cpu = torch.device("cpu")
        table, lengths, starts = attention_few._metadata(3, 4, keys, blocks, cpu)
        used = -(-keys // 128)
        assert (table[:, :used] == torch.arange(3)[:, None] * 40 + torch.arange(used)).all()
        assert lengths.tolist() == [keys] * 3
        assert starts.tolist() == [0, 4, 8, 12]
        assert all(x.dtype == torch.int32 for x in (table, lengths, starts))
        assert lengths.is_contiguous()
        assert lengths.data_ptr() % 16 == 0

    def test_a_growing_cache_needs_few(self) -> None:
        blocks = attention_few.Blocks(128, 0)
        for keys in range(4000, 4200):
            attention_few._metadata(1, 1, keys, blocks, torch.device("cpu"))
        assert len(launches.tensors) == 5  # two tables, two runs of lengths


SPEC = AttentionSpec("cuda", BRAIN, 1, 1, 65536, 64, 8, 128, 128)


class TestChoice:
    @pytest.mark.parametrize("window_right", [-1, 0])
    @pytest.mark.parametrize("rows", [1, 4, 16])
    def test_few_rows_over_long_keys_are_split(self, rows: int, window_right: int) -> None:
        spec = SPEC._replace(max_seqlen_q=rows, window_right=window_right)
        assert attention_few.is_faster(spec, 132)
        assert attention_few.is_faster(spec._replace(batch=16, max_seqlen_k=8192), 132)
        assert attention_few.is_faster(spec._replace(max_seqlen_k=8192), 132)

    @pytest.mark.parametrize(
        "changes",
        [
            {"max_seqlen_q": 129},
            {"max_seqlen_q": 0},
            {"max_seqlen_k": 100},
            {"batch": 16, "num_q_heads": 16, "num_kv_heads": 16},  # limited by memory either way
            {"batch": 16, "max_seqlen_q": 64},  # rows enough for tiles
            {"max_seqlen_k": 2048},  # shorter than the host takes to launch two kernels
            {"is_varlen": True},
            {"has_bias": True},
            {"has_alibi": True},
            {"mask_tile": (128, 128)},
            {"dropout_p": 0.1},
            {"window_left": 1000},
            {"window_right": 3},
        ],
    )
    def test_others_are_not(self, changes: dict[str, object]) -> None:
        assert not attention_few.is_faster(SPEC._replace(**changes), 132)

    def test_tiles_are_those_of_the_kernel_that_runs(self) -> None:
        one = attention_few.tile_config_split_kv(SPEC, 90, 132)
        many = attention_few.tile_config_split_kv(SPEC._replace(max_seqlen_q=64), 90, 132)
        assert (one.tile_m, many.tile_m) == (16, 128)
