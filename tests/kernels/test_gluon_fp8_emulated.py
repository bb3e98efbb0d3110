"""Hopper's e4m3 forward pass against float64 of the same e4m3 numbers, in the emulator."""

from __future__ import annotations

import zlib
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.attention_problem import BRAIN, CAUSAL, Call, expected, make_problem
from tests.kernels.gluon_emulator import emulated
from tilewise.kernels import device
from tilewise.kernels.gluon import attention_fp8

E4M3 = torch.float8_e4m3fn
# Probabilities are rounded to e4m3, by 2**-4 of themselves at most; the errors of a row's keys are
# independent, so that a row of o is off by far less than its largest value times that.
ERROR_OF_P = 2.0**-4
LSE_ERROR = 1e-5  # float32 sums of exact products
CASES = {
    "full": Call(256, 300, dims=(128, 128), dtype=BRAIN),
    "causal_d64": Call(200, 330, (4, 2), (64, 64), 2, BRAIN, CAUSAL),
    "window": Call(300, 330, (2, 2), (128, 128), 1, BRAIN, (100, 20)),
    "wide_heads": Call(130, 200, (2, 1), (256, 256), 1, BRAIN, CAUSAL),
    "fewer_keys": Call(300, 70, (2, 1), (64, 64), 1, BRAIN, CAUSAL),
    "key_lengths": Call(130, 140, batch=4, seqlens_k=(0, 1, 77, 140), window=CAUSAL, dtype=BRAIN),
}


def judge(call: Call, seed: int, num_sms: int = 3) -> None:
    """Run a call on e4m3 tensors with scales, and judge o and lse."""
    problem = make_problem(call, "cpu")
    spec = problem.spec
    q, k, v = (x.float().to(E4M3) for x in (problem.q, problem.k, problem.v))
    heads = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
    scales = tuple(torch.rand(spec.batch, number) + 0.5 for number in heads)
    counter = torch.zeros(1, dtype=torch.int32)
    with (
        mock.patch.object(device, "sm_count_of", return_value=num_sms),
        mock.patch.object(attention_fp8, "_counter", return_value=counter),
        emulated(seed, resident=num_sms) as kernels,
    ):
        o, lse = attention_fp8.launch_fwd(q, k, v, spec, scales=scales, seqlens_k=problem.seqlens_k)
    assert kernels
    assert counter.item() == 0
    problem.q, problem.k, problem.v = (
        x.double() * scale[:, None, :, None].double()
        for x, scale in zip((q, k, v), scales, strict=True)
    )
    truth = expected(problem, torch.float64)
    assert torch.equal(lse.isinf(), truth["lse"].isinf())
    assert torch.equal(o.double()[truth["o"] == 0], truth["o"][truth["o"] == 0])
    assert (o.double() - truth["o"]).abs().max() <= ERROR_OF_P * truth["o"].abs().max()
    finite = truth["lse"].isfinite()
    assert (lse.double() - truth["lse"])[finite].abs().max() <= LSE_ERROR


@pytest.mark.parametrize("name", CASES)
def test_e4m3_matches_float64(name: str) -> None:
    judge(CASES[name], zlib.crc32(name.encode()))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CASES)
def test_every_schedule_gives_the_same(name: str, seed: int) -> None:
    judge(CASES[name], seed, num_sms=1 + seed)
