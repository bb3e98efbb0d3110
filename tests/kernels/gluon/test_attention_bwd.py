"""Hopper's backward kernels against float64, on a GPU; o and lse come from the portable forward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.attention_problem import (
    BRAIN,
    CAUSAL,
    HALF,
    Call,
    Problem,
    assert_right,
    make_problem,
)
from tilewise.kernels import device as facts
from tilewise.kernels.gluon.backward import plan

pytestmark = pytest.mark.gpu

D64, D128, D256 = (64, 64), (128, 128), (256, 256)
CASES = {
    "plain_d128": Call(256, 256, (2, 2), D128, dtype=BRAIN),
    "plain_d64": Call(256, 256, (2, 2), D64, dtype=BRAIN),
    "causal_d128": Call(512, 512, (2, 2), D128, 2, BRAIN, CAUSAL),
    "causal_d64": Call(512, 512, (2, 2), D64, 2, HALF, CAUSAL),
    "padded_d96": Call(300, 300, (2, 2), (96, 96), 2, BRAIN, CAUSAL),
    "padded_d16": Call(200, 300, (2, 1), (16, 16), 2, HALF, CAUSAL),
    "padded_d40_24": Call(200, 300, (2, 2), (40, 24), 2, HALF),
    "wider_values": Call(200, 300, (2, 2), (64, 128), 2, BRAIN, CAUSAL),
    "tails_d128": Call(200, 333, (4, 2), D128, dtype=BRAIN, window=CAUSAL),
    "tails_d64": Call(333, 200, (4, 2), D64, dtype=BRAIN, window=CAUSAL),
    "tails_full_d128": Call(333, 200, (4, 2), D128, 2, HALF),
    "tails_full_d64": Call(130, 77, (2, 2), D64, 2, BRAIN),
    "fewer_keys_leave_empty_rows": Call(384, 100, (2, 2), D128, dtype=BRAIN, window=CAUSAL),
    "one_query": Call(1, 300, (2, 2), D128, dtype=BRAIN, window=CAUSAL),
    "one_key": Call(300, 1, (2, 2), D64, dtype=BRAIN),
    "groups_of_3_d128": Call(400, 400, (6, 2), D128, 2, BRAIN, CAUSAL),
    "groups_of_8_d64": Call(400, 333, (8, 1), D64, 2, BRAIN, CAUSAL),
    "groups_of_8_full_d128": Call(256, 384, (8, 1), D128, 1, BRAIN),
    "window_d128": Call(1000, 1000, (4, 2), D128, 1, BRAIN, (200, 0)),
    "window_d64": Call(1000, 1000, (4, 2), D64, 1, BRAIN, (200, 0)),
    "window_on_both_sides": Call(700, 500, (4, 2), D128, 1, BRAIN, (40, 17)),
    "window_on_both_sides_d64": Call(700, 500, (4, 2), D64, 1, BRAIN, (40, 170)),
    "window_to_the_right_only": Call(300, 400, (2, 2), D128, 1, BRAIN, (-1, 20)),
    "window_to_the_left_only": Call(300, 400, (2, 2), D64, 1, BRAIN, (20, -1)),
    "window_to_the_left_only_d128": Call(300, 400, (2, 2), D128, 1, BRAIN, (20, -1)),
    "window_of_the_own_key": Call(300, 300, (2, 2), D128, 1, BRAIN, (0, 0)),
    "sinks": Call(400, 200, (4, 2), D128, 2, BRAIN, CAUSAL, sinks=True),
    "key_lengths_d128": Call(400, 400, (4, 2), D128, 4, BRAIN, CAUSAL, seqlens_k=(0, 1, 77, 400)),
    "key_lengths_d64": Call(400, 400, (4, 2), D64, 4, BRAIN, seqlens_k=(0, 1, 177, 400)),
    "key_lengths_window": Call(
        400, 400, (4, 2), D128, 3, BRAIN, (100, 5), seqlens_k=(0, 177, 400), sinks=True
    ),
    "packed_d128": Call(
        heads=(4, 2), dims=D128, dtype=BRAIN, window=CAUSAL,
        lengths=((130, 130), (0, 50), (64, 64), (7, 0), (40, 450), (513, 513)),
    ),
    "packed_d64": Call(
        heads=(4, 2), dims=D64, dtype=BRAIN, window=CAUSAL,
        lengths=((130, 130), (0, 50), (64, 64), (7, 0), (40, 450), (513, 513)),
    ),
    "packed_full": Call(
        heads=(4, 4), dims=D128, dtype=HALF, lengths=((300, 130), (1, 1), (128, 256), (129, 127))
    ),
    "packed_full_d64": Call(
        heads=(4, 4), dims=D64, dtype=HALF, lengths=((300, 130), (1, 1), (128, 256), (129, 127))
    ),
    "packed_window_sinks": Call(
        heads=(6, 2), dims=(96, 96), dtype=BRAIN, window=(70, 0), sinks=True,
        lengths=((330, 300), (64, 190)),
    ),
    "softcap_d128": Call(300, 400, (4, 2), D128, 1, BRAIN, CAUSAL, softcap=3.0),
    "softcap_d64": Call(300, 400, (4, 2), D64, 1, HALF, softcap=3.0),
    "softcap_packed": Call(
        heads=(4, 2), dims=D128, dtype=BRAIN, window=CAUSAL, softcap=5.0,
        lengths=((330, 300), (64, 190)),
    ),
    "alibi_d128": Call(300, 400, (4, 2), D128, 2, BRAIN, CAUSAL, alibi="heads"),
    "alibi_d64": Call(300, 400, (4, 2), D64, 2, BRAIN, alibi="sequences"),
    "bias_d128": Call(300, 400, (4, 2), D128, 2, BRAIN, CAUSAL, bias=(2, 4, 300, 400)),
    "bias_d64": Call(300, 400, (2, 2), D64, 2, HALF, bias=(2, 300, 400)),
    "bias_shared": Call(300, 400, (4, 2), D64, 3, BRAIN, bias=(1, 4, 300, 400)),
    "bias_narrow": Call(300, 400, (4, 4), (40, 32), 3, BRAIN, bias=(1, 4, 300, 400)),
    "bias_half": Call(300, 400, (4, 2), (24, 32), 2, HALF, CAUSAL, bias=(1, 4, 300, 400)),
    "bias_of_keys": Call(300, 400, (4, 2), D128, 2, BRAIN, bias=(2, 1, 1, 400)),
    "bias_packed": Call(
        heads=(4, 2), dims=D64, dtype=BRAIN, bias=(2, 4, 330, 300), lengths=((330, 300), (64, 190))
    ),
    "dropout_d128": Call(300, 400, (4, 2), D128, 2, BRAIN, CAUSAL, dropout_p=0.2),
    "dropout_d64": Call(300, 400, (4, 2), D64, 2, HALF, dropout_p=0.5),
    "dropout_packed": Call(
        heads=(4, 2), dims=D128, dtype=BRAIN, dropout_p=0.1, lengths=((330, 300), (64, 190))
    ),
    "dropout_of_everything": Call(100, 100, (2, 2), D128, 1, BRAIN, dropout_p=1.0),
    "mask_d128": Call(500, 700, (4, 2), D128, 2, BRAIN, mask=(1, 1), mask_tile=(128, 128)),
    "mask_d64": Call(500, 700, (4, 2), D64, 2, BRAIN, mask=(2, 1), mask_tile=(128, 128)),
    "mask_of_heads": Call(300, 300, (4, 2), D128, 2, BRAIN, mask=(2, 4), mask_tile=(128, 128)),
    "mask_of_heads_alone": Call(300, 300, (2, 2), D64, 2, BRAIN, mask=(1, 2), mask_tile=(128, 128)),
    "mask_window": Call(500, 700, (4, 2), D128, 2, BRAIN, (200, 30), mask=(1, 1),
                        mask_tile=(128, 128), seqlens_k=(700, 300)),
    "mask_packed": Call(
        heads=(4, 2), dims=D64, dtype=BRAIN, mask=(2, 1), mask_tile=(128, 128), window=CAUSAL,
        lengths=((330, 300), (64, 190)),
    ),
    "mixed_d128": Call(
        400, 300, (4, 2), D128, 2, BRAIN, (150, 5), softcap=8.0, alibi="heads", sinks=True,
        dropout_p=0.1, mask=(1, 1), mask_tile=(128, 128), seqlens_k=(300, 45),
    ),
    "mixed_d64": Call(
        400, 300, (4, 2), D64, 2, HALF, CAUSAL, softcap=8.0, alibi="sequences", sinks=True,
        dropout_p=0.1, bias=(2, 4, 400, 300),
    ),
    "wide_d256": Call(300, 333, (2, 2), D256, 2, BRAIN),
    "wide_causal": Call(500, 500, (4, 2), D256, 2, BRAIN, CAUSAL),
    "wide_fewer_keys": Call(500, 200, (4, 2), D256, 1, HALF, CAUSAL, sinks=True),
    "wide_192_128": Call(300, 500, (4, 2), (192, 128), 2, BRAIN, CAUSAL),
    "wide_window": Call(500, 600, (4, 2), D256, 1, BRAIN, (100, 7), softcap=5.0, alibi="heads"),
    "wide_key_lengths": Call(300, 400, (4, 2), D256, 3, BRAIN, CAUSAL, seqlens_k=(0, 77, 400)),
    "wide_packed": Call(
        heads=(4, 2), dims=D256, dtype=BRAIN, window=CAUSAL,
        lengths=((130, 130), (0, 50), (64, 64), (7, 0), (40, 450), (513, 513)),
    ),
    "wide_packed_full": Call(
        heads=(4, 2), dims=(192, 128), dtype=HALF, softcap=5.0,
        lengths=((300, 130), (1, 1), (128, 256), (129, 127)),
    ),
    "wide_bias": Call(300, 400, (4, 2), D256, 2, BRAIN, CAUSAL, bias=(2, 4, 300, 400)),
    "wide_bias_of_odd_rows": Call(300, 333, (2, 2), D256, 2, HALF, bias=(2, 300, 333)),
    "wide_bias_of_keys": Call(300, 400, (4, 2), (192, 128), 2, BRAIN, bias=(2, 1, 1, 400)),
    "wide_bias_float32": Call(
        300, 400, (4, 2), D256, 1, BRAIN, CAUSAL, bias=(4, 300, 400), bias_dtype=torch.float32
    ),
    "wide_dropout": Call(300, 400, (4, 2), D256, 2, BRAIN, CAUSAL, dropout_p=0.2),
    "wide_dropout_packed": Call(
        heads=(4, 2), dims=(192, 128), dtype=HALF, dropout_p=0.5, lengths=((330, 300), (64, 190))
    ),
    "wide_window_160_96": Call(
        400, 300, (4, 2), (160, 96), 2, HALF, (100, 7), sinks=True, seqlens_k=(300, 77)
    ),
    "wide_dropout_of_everything": Call(100, 100, (2, 2), D256, 1, BRAIN, dropout_p=1.0),
    "wide_mask": Call(500, 700, (4, 2), D256, 2, BRAIN, mask=(1, 1), mask_tile=(128, 128)),
    "wide_mask_causal": Call(
        500, 700, (4, 2), (192, 128), 2, BRAIN, CAUSAL, mask=(2, 1), mask_tile=(128, 128)
    ),
    "wide_mask_of_heads": Call(300, 300, (4, 2), D256, 2, HALF, mask=(2, 4), mask_tile=(128, 128)),
    "wide_mask_window": Call(
        500, 700, (4, 2), D256, 2, BRAIN, (200, 30), mask=(1, 1), mask_tile=(128, 128),
        seqlens_k=(700, 300),
    ),
    "wide_mask_packed": Call(
        heads=(4, 2), dims=D256, dtype=BRAIN, mask=(2, 1), mask_tile=(128, 128), window=CAUSAL,
        lengths=((330, 300), (64, 190)),
    ),
    "wide_mixed": Call(
        400, 300, (4, 2), D256, 2, BRAIN, (150, 5), softcap=8.0, alibi="heads", sinks=True,
        dropout_p=0.1, mask=(1, 1), mask_tile=(128, 128), seqlens_k=(300, 45),
    ),
    "wide_mixed_packed": Call(
        heads=(4, 2), dims=(192, 128), dtype=HALF, window=(150, 5), softcap=8.0, alibi="heads",
        dropout_p=0.1, mask=(2, 1), mask_tile=(128, 128), bias=(2, 4, 330, 300),
        lengths=((330, 300), (64, 190)),
    ),
    "negative_scale": Call(200, 300, (2, 2), D128, 1, BRAIN, CAUSAL, scale=-0.1),
    "zero_scale": Call(200, 300, (2, 2), D64, 1, BRAIN, CAUSAL, scale=0.0),
    "full_2k": Call(2048, 2048, (8, 2), D128, 2, BRAIN),
    "full_2k_d64": Call(2048, 2048, (8, 8), D64, 2, BRAIN),
    "full_long_keys": Call(200, 3000, (2, 2), D128, 1, BRAIN),
    "causal_2k": Call(2048, 2048, (8, 2), D128, 2, BRAIN, CAUSAL),
    # Heads enough that CTAs do prepost for one another.
    "many_heads": Call(256, 256, (32, 32), D128, 16, BRAIN),
    "many_heads_d64": Call(256, 300, (32, 32), D64, 16, BRAIN),
    "many_heads_causal": Call(300, 300, (32, 32), D128, 16, BRAIN, CAUSAL),
    "many_heads_causal_d64": Call(300, 300, (64, 32), D64, 16, HALF, CAUSAL),
    "many_heads_window": Call(500, 500, (32, 32), (96, 80), 16, BRAIN, (100, 0)),
    "many_heads_packed": Call(
        heads=(64, 64), dims=D128, dtype=BRAIN, window=CAUSAL,
        lengths=((130, 130), (0, 50), (64, 64), (7, 0), (40, 450), (513, 513)),
    ),
    "causal_2k_d64": Call(2000, 2000, (8, 8), D64, 2, HALF, CAUSAL),
}  # fmt: skip
# Calls that `plan.WAYS` names, of so many heads that most CTAs take several tiles of keys where
# any do (test_turns.py).
WAYS = {
    "causal_512_d64": Call(512, 512, (20, 20), D64, 2, BRAIN, CAUSAL),
    "causal_tail_d64": Call(260, 260, (20, 20), D64, 3, HALF, CAUSAL, sinks=True),
    "causal_groups_512_d64": Call(512, 512, (40, 20), D64, 10, BRAIN, CAUSAL),
    "causal_1k_d64": Call(1024, 1024, (20, 20), D64, 5, BRAIN, CAUSAL),
    "causal_uneven_d64": Call(1000, 1000, (20, 20), D64, 5, BRAIN, CAUSAL),
    "causal_few_queries_d64": Call(300, 1000, (20, 20), D64, 5, HALF, CAUSAL),
    "causal_many_queries_d64": Call(1000, 700, (20, 20), D64, 7, BRAIN, CAUSAL),
    "causal_narrow_values": Call(1000, 1000, (20, 20), (56, 40), 5, BRAIN, CAUSAL),
    "causal_groups_d64": Call(1024, 1024, (40, 20), D64, 5, BRAIN, CAUSAL),
    "window_to_the_right_d64": Call(1000, 1000, (20, 20), D64, 5, BRAIN, (-1, 70)),
    "full_512_d64": Call(512, 512, (20, 20), D64, 5, BRAIN),
    "full_uneven_d64": Call(700, 1000, (20, 20), D64, 2, HALF),
    "full_groups_d64": Call(1024, 1024, (66, 33), D64, 1, BRAIN),
    "full_2k_d64": Call(2048, 2048, (20, 20), D64, 1, BRAIN),
    "full_8k_few_queries_d128": Call(400, 8448, (5, 5), D128, 1, BRAIN),
    "full_8k_uneven_d128": Call(300, 8430, (5, 5), D128, 1, HALF),
    "full_8k_groups_d128": Call(200, 8192, (12, 6), D128, 1, BRAIN),
    "full_8k_d128": Call(8192, 8192, (5, 5), D128, 1, BRAIN),
}


def gradients(problem: Problem, **changes: Any) -> dict[str, Tensor]:
    """Run the portable forward pass and Hopper's backward pass."""
    from tests.kernels.planned import forward, hopper_backward
    from tilewise.kernels.gluon.backward import launch as hopper
    from tilewise.kernels.triton.attention import plan as portable

    p = problem
    spec = p.spec._replace(**changes)
    assert hopper.why_not_bwd(spec) is None, hopper.why_not_bwd(spec)
    o, lse = forward(portable, p.q, p.k, p.v, spec, **p.tensors)
    dq, dk, dv, dbias, dsinks = hopper_backward(
        p.do, p.dlse, p.q, p.k, p.v, o, lse, spec, **p.tensors
    )
    results = {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "dsinks": dsinks}
    return {name: result for name, result in results.items() if result is not None}


@pytest.fixture(autouse=True)
def _only_on_hopper() -> None:
    if not torch.cuda.is_available() or facts.capability(0) != 90:
        pytest.skip("needs a Hopper GPU")


@pytest.mark.parametrize("name", CASES)
def test_gradients_match_float64(name: str) -> None:
    problem = make_problem(CASES[name], "cuda")
    assert_right(problem, gradients(problem))


REPRODUCIBLE = [
    "causal_2k", "causal_2k_d64", "full_2k", "full_2k_d64", "tails_d128", "tails_full_d128",
    "window_d128", "window_d64", "packed_d128", "packed_d64", "groups_of_3_d128", "wide_causal",
    "packed_full", "packed_full_d64", "window_to_the_left_only", "key_lengths_d64", "many_heads",
    "many_heads_causal", "mask_d128", "mask_d64", "mask_of_heads", "mask_window", "mask_packed",
    "mixed_d128", "dropout_packed", "bias_packed", "bias_narrow", "bias_half", "wide_mixed",
    "wide_bias", "wide_mask_of_heads",
]  # fmt: skip


@pytest.mark.parametrize("name", REPRODUCIBLE)
def test_reproducible_gradients_match_float64(name: str) -> None:
    problem = make_problem(CASES[name], "cuda")
    assert_right(problem, gradients(problem, deterministic=True))


@pytest.mark.parametrize("name", REPRODUCIBLE)
def test_two_hundred_runs_are_bitwise_equal(name: str) -> None:
    problem = make_problem(CASES[name], "cuda")
    first = gradients(problem, deterministic=True)
    for _ in range(200):
        again = gradients(problem, deterministic=True)
        for gradient in ("dq", "dk", "dv"):
            assert torch.equal(again[gradient], first[gradient]), gradient


@pytest.mark.large
@pytest.mark.parametrize("name", WAYS)
def test_calls_that_have_a_way_of_their_own(name: str) -> None:
    problem = make_problem(WAYS[name], "cuda")
    variant = plan.variant_of(problem.spec)
    assert variant.several or variant.passes_by
    first = gradients(problem)
    assert_right(problem, first)
    for _ in range(100):
        again = gradients(problem)
        assert torch.equal(again["dk"], first["dk"])
        assert torch.equal(again["dv"], first["dv"])


@pytest.mark.parametrize("name", ["causal_2k", "causal_2k_d64"])
def test_dk_and_dv_are_bitwise_equal_in_a_thousand_runs(name: str) -> None:
    problem = make_problem(CASES[name], "cuda")
    first = gradients(problem)
    for _ in range(1000):
        again = gradients(problem)
        assert torch.equal(again["dk"], first["dk"])
        assert torch.equal(again["dv"], first["dv"])


def test_keys_past_their_length_may_hold_nan() -> None:
    problem = make_problem(CASES["key_lengths_d128"], "cuda")
    for row, length in enumerate(problem.call.seqlens_k):
        problem.k[row, length:] = math.nan
        problem.v[row, length:] = math.inf
    results = gradients(problem)
    problem.k, problem.v = (x.nan_to_num(0.0, 0.0) for x in (problem.k, problem.v))
    assert_right(problem, results)


@pytest.mark.parametrize(
    "name", ["packed_d128", "packed_d64", "packed_full", "wide_packed", "wide_packed_full"]
)
def test_a_sequence_of_nan_leaves_its_neighbours_alone(name: str) -> None:
    clean, dirty = (make_problem(CASES[name], "cuda") for _ in range(2))
    queries, keys = (sum(pair[i] for pair in clean.call.lengths[:2]) for i in (0, 1))
    last_q, last_k = (clean.call.lengths[2][i] for i in (0, 1))
    for name, begin, count in (("q", queries, last_q), ("do", queries, last_q),
                               ("k", keys, last_k), ("v", keys, last_k)):  # fmt: skip
        tensor = getattr(clean, name).clone()
        setattr(clean, name, tensor)
        dirty_tensor = tensor.clone()
        dirty_tensor[begin : begin + count] = math.nan
        setattr(dirty, name, dirty_tensor)
    dirty.dlse = clean.dlse
    good, bad = gradients(clean), gradients(dirty)
    for name, begin, count in (("dq", queries, last_q), ("dk", keys, last_k), ("dv", keys, last_k)):
        for part in (slice(0, begin), slice(begin + count, None)):
            assert bad[name][part].isfinite().all(), name
            torch.testing.assert_close(bad[name][part], good[name][part], rtol=0.02, atol=0.02)
