"""Dropout in the Triton attention kernels: the reference's mask, bit for bit, in every kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import planned
from tests.kernels.attention_problem import (
    BRAIN,
    CAUSAL,
    ON_CPU,
    ON_GPU,
    Call,
    assert_right,
    computed,
    everyday,
    make_problem,
)
from tilewise.kernels.triton.attention import plan as kernels
from tilewise.reference import dropout

CASES = {
    "plain": Call(50, 70, (2, 1), (16, 16), 2, dropout_p=0.3),
    "causal": Call(70, 50, (2, 1), (16, 16), dropout_p=0.1, window=CAUSAL, sinks=True),
    "with_everything": Call(
        36, 130, (2, 1), (16, 16), 2, dropout_p=0.5, mask=(1, 2), bias=(2, 1, 36, 130),
        seqlens_k=(90, 130), alibi="sequences", softcap=5.0, sinks=True, window=(100, 3),
    ),
    "packed": Call(
        heads=(2, 1), dims=(16, 16), lengths=((40, 70), (0, 9), (20, 36)), dropout_p=0.2,
        bias=(2, 1, 70),
    ),
    "bfloat16": Call(70, 70, (2, 1), (64, 32), dtype=BRAIN, dropout_p=0.2, window=CAUSAL),
    "wide_heads": Call(40, 70, (1, 1), (256, 256), dropout_p=0.2),
}  # fmt: skip
EVERYDAY = ("plain", "with_everything", "packed")
NAMES = everyday(CASES, EVERYDAY)


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
@pytest.mark.parametrize("name", NAMES)
def test_forward_and_gradients_match_float64(name: str, device: str) -> None:
    assert_right(make_problem(CASES[name], device))


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
class TestDropout:
    @pytest.mark.parametrize("dropout_p", [2**-16, 0.25, 1 - 2**-16])
    def test_the_mask_is_the_references_bit_for_bit(self, dropout_p: float, device: str) -> None:
        """Equal logits and v = 1 in one channel a key: o shows each probability on its own."""
        call = Call(40, 64, (2, 1), (16, 64), 2, dropout_p=dropout_p)
        problem = make_problem(call, device)
        problem.q.zero_()
        problem.v = torch.eye(64, device=device)[None, :, None].expand(2, 64, 1, 64).contiguous()
        o, _ = planned.forward(
            kernels, problem.q, problem.k, problem.v, problem.spec, **problem.tensors
        )
        keep = dropout.keep_mask(problem.philox, (2, 2, 40, 64), dropout_p)
        assert torch.equal(o.transpose(1, 2) != 0, keep)

    def test_the_transposed_mask_is_the_references_bit_for_bit(self, device: str) -> None:
        """dv of equal probabilities and one-hot do shows which of them were kept."""
        problem = make_problem(Call(64, 40, (1, 1), (16, 64), 2, dropout_p=0.25), device)
        problem.q.zero_()
        problem.do = torch.eye(64, device=device)[None, :, None].expand(2, 64, 1, 64).contiguous()
        dv = computed(problem)["dv"]  # (B, keys, 1, queries)
        keep = dropout.keep_mask(problem.philox, (2, 1, 64, 40), 0.25)
        assert torch.equal(dv[:, :, 0].transpose(1, 2) != 0, keep[:, 0])

    def test_everything_may_be_dropped(self, device: str) -> None:
        problem = make_problem(replace(CASES["plain"], dropout_p=1.0), device)
        results = computed(problem)
        problem.spec = problem.spec._replace(dropout_p=0.0)
        assert torch.equal(results["lse"], computed(problem)["lse"])
        for name in ("o", "dv"):
            assert not results[name].any(), name

    def test_tiles_do_not_change_the_mask(self, device: str) -> None:
        problem = make_problem(CASES["plain"], device)
        p = problem
        default = kernels.tile_config(p.spec, "fwd", 90)
        small = replace(default, tile_m=16, tile_n=64)
        results = [
            planned.forward(kernels, p.q, p.k, p.v, p.spec, **p.tensors, tiles={"fwd": tile})[0]
            for tile in (default, small)
        ]
        torch.testing.assert_close(*results)

    def test_seeds_and_offsets_change_the_mask(self, device: str) -> None:
        problem = make_problem(Call(20, 33, (1, 1), (16, 16), dropout_p=0.5), device)
        outputs = []
        for seed, offset in ((1, 0), (1, 1), (2, 0), (1 + 2**32, 0), (1, 2**32)):
            problem.philox = torch.tensor([seed, offset], device=device)
            p = problem
            outputs.append(planned.forward(kernels, p.q, p.k, p.v, p.spec, **p.tensors)[0])
        assert torch.equal(outputs[0], outputs[-1])  # the offset counts modulo 2**32
        for index, left in enumerate(outputs[:-1]):
            for right in outputs[index + 1 : -1]:
                assert not torch.equal(left, right)

    def test_runs_are_bitwise_equal(self, device: str) -> None:
        problem = make_problem(CASES["causal"], device)
        first, second = computed(problem), computed(problem)
        for name in first:
            assert torch.equal(first[name], second[name]), name
