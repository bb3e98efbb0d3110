"""The Hopper forward pass against float64, on a GPU; why it refuses and how it is cut, anywhere."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.attention_problem import (
    BRAIN,
    CAUSAL,
    HALF,
    SINGLE,
    Call,
    Problem,
    expected,
    make_problem,
)
from tests.kernels.planned import hopper_forward
from tilewise.kernels.gluon.forward import launch as kernels
from tilewise.kernels.gluon.forward.variant import choice
from tilewise.kernels.spec import AttentionSpec
from tilewise.reference import dropout
from tilewise.testing import accumulator_scales, assert_within_budget

D64, D96, D128, D192, D256 = ((width, width) for width in (64, 96, 128, 192, 256))
LATENT = (192, 128)
LENGTHS = ((2000, 2000), (1, 1), (0, 0), (513, 513), (64, 1500), (300, 40), (77, 0))
CASES = {
    "whole_tiles": Call(512, 512, (2, 2), D128, 2, BRAIN),
    "no_tile_whole": Call(330, 277, (2, 2), D128, 2, BRAIN),
    "one_query": Call(1, 300, (2, 2), D128, 1, BRAIN, CAUSAL),
    "one_key": Call(300, 1, (2, 2), D128, 1, BRAIN),
    "causal": Call(1024, 1024, (4, 4), D128, 2, BRAIN, CAUSAL),
    "causal_float16": Call(1000, 1000, (4, 4), D128, 2, HALF, CAUSAL),
    "causal_fewer_queries": Call(200, 700, (2, 2), D128, 1, BRAIN, CAUSAL),
    "causal_fewer_keys": Call(700, 200, (2, 2), D128, 1, BRAIN, CAUSAL),
    "more_tiles_than_ctas": Call(1024, 1024, (16, 4), D128, 4, BRAIN, CAUSAL),
    "grouped_by_five": Call(500, 500, (10, 2), D128, 1, BRAIN, CAUSAL),
    "d64": Call(700, 900, (3, 3), D64, 2, BRAIN),
    "d64_long": Call(2304, 2304, (3, 3), D64, 1, BRAIN),
    "d64_causal": Call(900, 900, (3, 3), D64, 2, HALF, CAUSAL),
    "d64_causal_long": Call(4160, 4160, (1, 1), D64, 1, BRAIN, CAUSAL),
    "d40": Call(300, 400, (2, 2), (40, 40), 2, HALF),
    "d96": Call(600, 700, (2, 2), D96, 2, BRAIN, CAUSAL),
    "d96_full": Call(600, 700, (2, 2), D96, 1, HALF),
    "d256": Call(700, 900, (2, 2), D256, 2, BRAIN),
    "d256_causal": Call(900, 900, (2, 2), D256, 2, HALF, CAUSAL),
    "latent": Call(900, 900, (2, 2), LATENT, 2, BRAIN, CAUSAL),
    "latent_full": Call(640, 1000, (2, 2), LATENT, 1, BRAIN),
    "d192": Call(500, 500, (2, 2), D192, 1, BRAIN, CAUSAL),
    "d64_values_128": Call(500, 500, (2, 2), (64, 128), 1, BRAIN, CAUSAL),
    "d256_values_64": Call(500, 500, (2, 2), (256, 64), 1, BRAIN),
    "d72_values_200": Call(300, 300, (2, 2), (72, 200), 1, BRAIN),
    "window": Call(1500, 1500, (2, 2), D128, 1, BRAIN, (511, 0)),
    "window_narrow": Call(700, 700, (2, 2), D128, 1, BRAIN, (30, 0)),
    "window_of_the_own_key": Call(300, 300, (2, 2), D64, 1, BRAIN, (0, 0)),
    "window_both": Call(900, 1100, (2, 2), D64, 1, BRAIN, (200, 117)),
    "window_right_only": Call(600, 600, (2, 2), D128, 1, BRAIN, (-1, 20)),
    "window_left_only": Call(600, 800, (2, 2), D128, 1, BRAIN, (150, -1)),
    "window_d256": Call(900, 900, (2, 2), D256, 1, BRAIN, (300, 10)),
    "window_fewer_keys": Call(900, 500, (2, 2), D128, 1, BRAIN, (100, 50)),
    "softcap": Call(700, 700, (4, 2), D128, 1, BRAIN, CAUSAL, softcap=20.0),
    "softcap_float16": Call(700, 700, (4, 2), D128, 1, HALF, CAUSAL, softcap=20.0),
    "softcap_small": Call(500, 500, (2, 2), D64, 1, BRAIN, softcap=1.5),
    "softcap_small_float16": Call(500, 500, (2, 2), D64, 1, HALF, softcap=1.5),
    "alibi": Call(600, 900, (4, 2), D128, 1, BRAIN, CAUSAL, alibi="heads"),
    "alibi_both_sides": Call(500, 400, (4, 4), D64, 2, HALF, alibi="sequences"),
    "sinks": Call(600, 600, (4, 2), D128, 2, BRAIN, CAUSAL, sinks=True),
    "sinks_in_empty_rows": Call(500, 200, (4, 2), D128, 1, BRAIN, CAUSAL, sinks=True),
    "negative_scale": Call(400, 400, (2, 2), D128, 1, BRAIN, CAUSAL, scale=-0.1),
    "zero_scale": Call(400, 400, (2, 2), D64, 1, BRAIN, scale=0.0),
    "bias": Call(300, 410, (4, 2), D128, 2, BRAIN, bias=(2, 4, 300, 410)),
    "bias_even": Call(256, 512, (4, 2), D128, 2, BRAIN, bias=(1, 4, 256, 512)),
    "bias_shared_d64": Call(300, 416, (4, 2), D64, 3, BRAIN, CAUSAL, bias=(1, 4, 300, 416)),
    "bias_d128_causal": Call(333, 456, (4, 2), D128, 2, HALF, CAUSAL, bias=(4, 333, 456)),
    "bias_of_keys": Call(300, 410, (4, 2), D128, 2, BRAIN, bias=(2, 1, 1, 410)),
    "bias_of_queries_d64": Call(300, 410, (4, 2), D64, 1, HALF, bias=(1, 4, 300, 1)),
    "bias_single": Call(300, 410, (2, 2), D256, 1, BRAIN, bias=(410,), bias_dtype=SINGLE),
    "key_lengths": Call(600, 600, (2, 2), D128, 4, BRAIN, seqlens_k=(0, 1, 377, 600)),
    "key_lengths_causal": Call(
        300, 600, (2, 2), D64, 4, BRAIN, CAUSAL, seqlens_k=(0, 1, 377, 600)
    ),
    "mask": Call(700, 900, (2, 2), D128, 2, BRAIN, mask=(2, 1), mask_tile=(128, 128)),
    "mask_64": Call(700, 900, (4, 2), D128, 1, BRAIN, mask=(1, 4), mask_tile=(128, 64)),
    "mask_d64": Call(700, 900, (2, 2), D64, 1, HALF, mask=(1, 1), mask_tile=(128, 128)),
    "mask_d256": Call(500, 600, (2, 2), D256, 1, BRAIN, mask=(1, 1), mask_tile=(128, 128)),
    "mask_ruled": Call(
        700, 700, (2, 2), D128, 2, BRAIN, (300, 0), mask=(1, 2), mask_tile=(128, 128),
        seqlens_k=(650, 500), sinks=True,
    ),
    "mask_packed": Call(
        heads=(2, 2), dims=D128, dtype=BRAIN, window=CAUSAL, lengths=((330, 300), (64, 390)),
        mask=(2, 1), mask_tile=(128, 128),
    ),
    "dropout": Call(500, 600, (4, 2), D128, 2, BRAIN, dropout_p=0.2),
    "dropout_causal_d64": Call(500, 500, (2, 2), D64, 1, HALF, CAUSAL, dropout_p=0.5),
    "dropout_d256": Call(400, 400, (2, 2), D256, 1, BRAIN, dropout_p=0.1),
    "packed": Call(heads=(8, 2), dims=D128, dtype=BRAIN, lengths=LENGTHS),
    "packed_causal": Call(heads=(8, 2), dims=D128, dtype=BRAIN, window=CAUSAL, lengths=LENGTHS),
    "packed_d64": Call(heads=(2, 2), dims=D64, dtype=HALF, window=CAUSAL, lengths=LENGTHS),
    "packed_d64_long": Call(
        heads=(1, 1), dims=D64, dtype=BRAIN, window=CAUSAL, lengths=((4500, 4500), (100, 150))
    ),
    "packed_d256": Call(heads=(2, 2), dims=D256, dtype=BRAIN, window=CAUSAL, lengths=LENGTHS),
    "packed_d96": Call(heads=(3, 3), dims=D96, dtype=BRAIN, lengths=LENGTHS),
    "packed_latent": Call(heads=(2, 2), dims=LATENT, dtype=BRAIN, window=CAUSAL, lengths=LENGTHS),
    "packed_window": Call(heads=(2, 2), dims=D128, dtype=BRAIN, window=(200, 9), lengths=LENGTHS),
    "every_feature": Call(
        590, 720, (4, 2), D128, 2, BRAIN, (260, 5), softcap=8.0, alibi="heads", sinks=True,
        seqlens_k=(700, 145), bias=(1, 4, 590, 720), dropout_p=0.2,
    ),
    "every_feature_masked_d64": Call(
        390, 520, (4, 2), (48, 24), 2, HALF, (260, 5), softcap=8.0, alibi="sequences", sinks=True,
        seqlens_k=(500, 145), bias=(4, 1, 520), dropout_p=0.2, mask=(2, 4), mask_tile=(128, 64),
    ),
    "every_feature_packed": Call(
        heads=(4, 2), dims=D128, dtype=BRAIN, lengths=((330, 300), (64, 390), (0, 20)),
        window=(170, 0), softcap=8.0, alibi="sequences", sinks=True, dropout_p=0.1,
        bias=(3, 1, 330, 390),
    ),
    "every_feature_packed_d256": Call(
        heads=(4, 1), dims=D256, dtype=BRAIN, lengths=((330, 300), (64, 390)), window=(170, 3),
        softcap=8.0, alibi="heads", sinks=True, dropout_p=0.1,
    ),
}  # fmt: skip


def launched(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel on a problem."""
    p = problem
    assert kernels.why_not_fwd(p.spec) is None
    return hopper_forward(p.q, p.k, p.v, p.spec, **p.tensors)


def assert_right(
    problem: Problem, results: tuple[torch.Tensor, torch.Tensor] | None = None
) -> None:
    """Judge o and lse, computed here unless given, by the error budget."""
    results = launched(problem) if results is None else results
    truth = expected(problem, torch.float64)
    eager = expected(problem, problem.call.dtype)
    kept = problem.spec.dropout_scale if problem.philox is not None else 1.0
    scales = accumulator_scales(
        problem.q, problem.k, problem.v, problem.do * kept, abs(problem.spec.softmax_scale)
    )
    for name, result in zip(("o", "lse"), results, strict=True):
        assert result.dtype == (SINGLE if name == "lse" else problem.call.dtype)
        assert_within_budget(
            result, truth[name], eager[name], name=name, scale=scales.get(name, 0.0)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_forward_matches_float64(name: str) -> None:
    assert_right(make_problem(CASES[name], "cuda"))


def slices_of_one_projection() -> None:
    problem = make_problem(replace(CASES["causal"], seqlen_q=500, seqlen_k=500), "cuda")
    qkv = torch.stack([problem.q, problem.k, problem.v], dim=2)  # (B, S, 3, H, D)
    problem.q, problem.k, problem.v = qkv.unbind(2)
    assert not problem.q.is_contiguous()
    assert_right(problem)


def heads_before_rows() -> None:
    problem = make_problem(CASES["grouped_by_five"], "cuda")
    problem.q, problem.k, problem.v = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in (problem.q, problem.k, problem.v)
    )
    assert_right(problem)


def rows_off_the_vector_boundary() -> None:
    problem = make_problem(Call(170, 180, (2, 2), D64, 1, BRAIN), "cuda")
    for name in ("q", "k", "v"):
        wide = torch.nn.functional.pad(getattr(problem, name), (1, 2))
        setattr(problem, name, wide[..., 1:-2])
    assert_right(problem)


def expanded_keys() -> None:
    problem = make_problem(Call(170, 180, (2, 2), D64, 2, BRAIN), "cuda")
    problem.k = problem.k[:, :, :1].expand(2, 180, 2, 64)
    problem.v = problem.v[:1].expand(2, 180, 2, 64)
    assert_right(problem)


def strided_vectors() -> None:
    problem = make_problem(
        Call(
            260, 260, (2, 2), D64, 2, BRAIN, alibi="heads", sinks=True, seqlens_k=(260, 31)
        ),
        "cuda",
    )  # fmt: skip
    for name in ("alibi_slopes", "sinks", "seqlens_k"):
        vector = getattr(problem, name)
        setattr(problem, name, torch.stack([vector, -vector], dim=1)[:, 0])
    assert_right(problem)


def nan_past_the_lengths() -> None:
    for name in ("key_lengths", "key_lengths_causal"):
        problem = make_problem(CASES[name], "cuda")
        for row, length in enumerate(problem.call.seqlens_k):
            problem.k[row, length:] = math.nan
            problem.v[row, length:] = math.inf
        results = launched(problem)
        problem.k, problem.v = (x.nan_to_num(0.0, 0.0) for x in (problem.k, problem.v))
        assert_right(problem, results)


def nan_outside_every_window() -> None:
    problem = make_problem(Call(300, 860, (2, 2), D128, 1, BRAIN, (20, 0)), "cuda")
    problem.k[:, :539] = math.nan  # the first query's window starts at key 560 - 20
    problem.v[:, :539] = math.nan
    results = launched(problem)
    problem.k, problem.v = (x.nan_to_num(0.0) for x in (problem.k, problem.v))
    assert_right(problem, results)


def nan_past_an_unaligned_diagonal() -> None:
    """Keys past the last one that any row of the last tile sees of a longer batch."""
    problem = make_problem(
        Call(heads=(2, 2), dims=D128, dtype=BRAIN, window=CAUSAL, lengths=((300, 300), (200, 200))),
        "cuda",
    )
    results = launched(problem)
    poisoned = make_problem(problem.call, "cuda")
    poisoned.k[300:], poisoned.v[300:] = math.nan, math.nan
    o, _ = launched(poisoned)
    assert torch.equal(o[:300], results[0][:300])


def nan_in_keys_that_a_mask_hides() -> None:
    problem = make_problem(CASES["mask"], "cuda")
    hidden = problem.visible.shape[-1] // 2  # random_mask hides this key from every row
    problem.k[:, hidden] = math.nan
    problem.v[:, hidden] = math.nan
    results = launched(problem)
    problem.k, problem.v = (x.nan_to_num(0.0) for x in (problem.k, problem.v))
    assert_right(problem, results)


def packed_rows_of_no_sequence() -> None:
    problem = make_problem(
        Call(heads=(2, 2), dims=D128, dtype=BRAIN, lengths=((150, 150), (130, 130))), "cuda"
    )
    problem.cu_seqlens_q[-1], problem.cu_seqlens_k[-1] = 270, 270
    o, lse = launched(problem)
    assert not o[270:].any()
    assert o[:270].isfinite().all()
    assert torch.all(lse[:, 270:] == -math.inf)
    assert lse[:, :270].isfinite().all()


def empty_sequences() -> None:
    for seqlen_q, seqlen_k in ((0, 40), (40, 0), (0, 0)):
        problem = make_problem(Call(seqlen_q, seqlen_k, (2, 2), D64, 1, BRAIN, CAUSAL), "cuda")
        o, lse = launched(problem)
        assert not o.any()
        assert torch.all(lse == -math.inf)
    o, lse = launched(make_problem(Call(dims=D64, dtype=BRAIN, lengths=((0, 0), (0, 0))), "cuda"))
    assert o.shape == (0, 2, 64)
    assert lse.shape == (2, 0)


def minus_infinity_in_a_bias() -> None:
    call = Call(200, 300, (1, 1), D64, 1, BRAIN, bias=(1, 1, 200, 300))
    problem = make_problem(call, "cuda")
    hidden = torch.rand(problem.bias.shape, device="cuda") < 0.3
    hidden[:, :, :, :140] = True  # a whole block of keys
    hidden[:, :, 5] = True  # a row that sees nothing
    problem.bias.masked_fill_(hidden, -math.inf)
    assert_right(problem)


def nan_in_the_bias_of_hidden_keys() -> None:
    call = Call(130, 270, (2, 2), D64, 2, BRAIN, bias=(2, 1, 130, 270), seqlens_k=(40, 270))
    problem = make_problem(call, "cuda")
    problem.bias[0, :, :, 40:] = math.nan
    results = launched(problem)
    problem.bias = problem.bias.nan_to_num(0.0)
    assert_right(problem, results)


def dropout_bits_are_the_references() -> None:
    """Equal logits and v = 1 in one channel a key: o shows each probability on its own."""
    for dropout_p in (2**-16, 0.25, 1 - 2**-16):
        problem = make_problem(Call(140, 64, (2, 1), D64, 2, BRAIN, dropout_p=dropout_p), "cuda")
        problem.q.zero_()
        eye = torch.eye(64, device="cuda", dtype=BRAIN)
        problem.v = eye[None, :, None].expand(2, 64, 1, 64).contiguous()
        o, _ = launched(problem)
        keep = dropout.keep_mask(problem.philox, (2, 2, 140, 64), dropout_p)
        assert torch.equal(o.transpose(1, 2) != 0, keep)


def everything_dropped() -> None:
    problem = make_problem(replace(CASES["dropout"], dropout_p=1.0), "cuda")
    o, lse = launched(problem)
    problem.spec = problem.spec._replace(dropout_p=0.0)
    assert torch.equal(lse, launched(problem)[1])
    assert not o.any()


def logits_far_from_zero() -> None:
    for size in (-120.0, 120.0):
        problem = make_problem(Call(300, 301, (1, 1), D64, 1, BRAIN), "cuda")
        direction = torch.nn.functional.normalize(torch.randn(64, device="cuda"), dim=0)
        problem.q = (problem.q * 0.1 + 8 * direction * math.copysign(1.0, size)).to(BRAIN)
        problem.k = (problem.k * 0.1 + abs(size) * direction).to(BRAIN)
        assert_right(problem)


def a_sink_of_minus_infinity() -> None:
    problem = make_problem(CASES["sinks_in_empty_rows"], "cuda")
    problem.sinks.fill_(-math.inf)
    results = launched(problem)
    problem.sinks = None
    assert_right(problem, results)


def batch_stride_past_two_to_the_31() -> None:
    problem = make_problem(Call(100, 100, (1, 1), D64, 2, BRAIN), "cuda")
    step = (1 << 31) + 64
    memory = torch.empty(step + 100 * 64, dtype=BRAIN, device="cuda")
    view = memory.as_strided((2, 100, 1, 64), (step, 64, 64, 1))
    view.copy_(problem.k)
    problem.k = view
    assert_right(problem)


EDGES = (
    slices_of_one_projection, heads_before_rows, rows_off_the_vector_boundary, expanded_keys,
    strided_vectors, nan_past_the_lengths, nan_outside_every_window,
    nan_past_an_unaligned_diagonal, nan_in_keys_that_a_mask_hides, packed_rows_of_no_sequence,
    empty_sequences, minus_infinity_in_a_bias, nan_in_the_bias_of_hidden_keys,
    dropout_bits_are_the_references, everything_dropped, logits_far_from_zero,
    a_sink_of_minus_infinity, batch_stride_past_two_to_the_31,
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    "edge",
    [
        pytest.param(
            edge,
            marks=[pytest.mark.large] if edge is batch_stride_past_two_to_the_31 else [],
            id=edge.__name__,
        )
        for edge in EDGES
    ],
)
def test_edges(edge) -> None:
    edge()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["more_tiles_than_ctas", "whole_tiles", "packed_causal", "window", "mask", "d64_long"]
)
def test_a_thousand_runs_are_bitwise_equal(name: str) -> None:
    problem = make_problem(CASES[name], "cuda")
    o, lse = launched(problem)
    for _ in range(1000):
        again = launched(problem)
        assert torch.equal(o, again[0])
        assert torch.equal(lse, again[1])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cpu"}, "device must be cuda"),
        ({"dtype": torch.float32}, "dtype must be"),
        ({"head_dim": 264}, "head_dim must be a multiple of 8 from 8 to 256"),
        ({"head_dim": 60}, "head_dim must be a multiple of 8"),
        ({"v_head_dim": 4}, "v_head_dim must be"),
        ({"mask_tile": (64, 64)}, "mask tiles must have 128 queries"),
        ({"softcap": 5000.0}, "softcap must be at most"),
    ],
)
def test_refusals_name_their_reason(changes: dict[str, object], reason: str) -> None:
    spec = AttentionSpec("cuda", HALF, 1, 8, 8, 1, 1, 64, 64)
    assert kernels.why_not_fwd(spec) is None
    assert reason in kernels.why_not_fwd(spec._replace(**changes))


@pytest.mark.parametrize("width", [64, 128, 256])
def test_long_sequences_take_the_row_of_their_own_kind(width: int) -> None:
    spec = AttentionSpec("cuda", BRAIN, 1, 4096, 4096, 16, 16, width, width, window_right=0)
    long = spec._replace(max_seqlen_q=16384, max_seqlen_k=16384)
    tile, long_tile = kernels.tile_config_fwd(spec), kernels.tile_config_fwd(long)
    assert long_tile.warpgroups == (3 if width == 64 else 2)
    if width == 256:  # released together where that was measured to be faster
        tile = tile._replace(release_together=False)
    assert width == 64 or long_tile == tile


@pytest.mark.parametrize(
    ("width", "rows", "window_right", "short"),
    [
        (64, 1024, -1, True),  # five tiles of 192 rows and 64
        (64, 1152, -1, False),
        (64, 1100, -1, False),  # 140 rows are three warpgroups'
        (64, 16384, -1, False),  # in a fixed order
        (64, 1024, 0, False),
        (64, 16384, 0, True),
        (128, 1088, 0, True),
        (128, 1089, 0, False),
        (128, 1088, -1, False),  # in a fixed order
        (128, 33, -1, True),  # no other tile
        (256, 1088, 0, True),
        (256, 4096, 0, False),
    ],
)
def test_warpgroups_step_aside_where_time_is_won(
    width: int, rows: int, window_right: int, short: bool
) -> None:
    spec = AttentionSpec(
        "cuda", BRAIN, 2, rows, 16384, 4, 4, width, width, window_right=window_right
    )
    tile = kernels.tile_config_fwd(spec)
    assert choice(spec, tile, False, False)[0].short == short


def test_packed_sequences_may_end_anywhere() -> None:
    spec = AttentionSpec("cuda", BRAIN, 9, 4096, 4096, 4, 4, 128, 128, window_right=0)
    spec = spec._replace(is_varlen=True)
    assert choice(spec, kernels.tile_config_fwd(spec), False, False)[0].short
    long = spec._replace(max_seqlen_q=8192, head_dim=64, v_head_dim=64)  # three warpgroups
    assert not choice(long, kernels.tile_config_fwd(long), False, False)[0].short


@pytest.mark.parametrize("name", CASES)
def test_tiles_fit_shared_memory(name: str) -> None:
    spec = make_problem(replace(CASES[name], dtype=CASES[name].dtype), "cpu").spec
    tile = kernels.tile_config_fwd(spec)
    ring = tile.stages * tile.keys * (tile.d + tile.d_high + tile.dv)
    rows = tile.rows * (tile.d + tile.d_high + tile.o_columns)
    assert 2 * (ring + rows) + 512 <= 232448  # bytes of a CTA on Hopper
    assert tile.rows == 64 * tile.warpgroups
    assert spec.mask_tile is None or spec.mask_tile[1] % tile.keys == 0
