"""Calls that nobody thought of: features, sizes and lengths drawn at random, against float64.

The tables of cases beside this file are chosen by hand, a few features each; a mistake where two
meet that nobody put together shows here. A seed names its call, so a failure can be repeated.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels import planned
from tests.kernels.attention_problem import (
    BRAIN,
    HALF,
    SINGLE,
    Call,
    Problem,
    expected,
    make_problem,
)
from tests.kernels.gluon.test_mla import check as check_latents
from tests.kernels.planned import latent
from tests.kernels.triton import test_mla as latents
from tests.kernels.triton import test_paged as paged
from tilewise.kernels.cpu.attention import plan as cpu
from tilewise.kernels.gluon.attention import plan as gluon
from tilewise.kernels.gluon.latent import plan as mla_decode
from tilewise.kernels.triton.attention import plan as portable
from tilewise.testing import accumulator_scales, assert_within_budget

pytestmark = pytest.mark.slow

WIDTHS = [
    (64, 64), (128, 128), (128, 128), (96, 96), (256, 256), (192, 128), (40, 40), (80, 80),
    (64, 128), (128, 64), (160, 160), (72, 200), (8, 8), (248, 256), (112, 96),
]  # fmt: skip
HEADS = [(1, 1), (2, 2), (4, 2), (8, 1), (6, 2), (10, 2), (16, 16), (12, 4)]
WINDOWS = [(-1, -1), (-1, 0), (-1, 0), (-1, 0), (100, 0), (0, 0), (40, 170), (300, -1), (-1, 33)]


def draw_call(seed: int) -> Call:
    """Draw a dense or a packed call."""
    draw = random.Random(seed)

    def length() -> int:
        return draw.choice([0, 1, draw.randint(2, 130), draw.randint(100, 1200), 128, 512])

    heads = draw.choice(HEADS)
    options: dict[str, Any] = {
        "heads": heads,
        "dims": draw.choice(WIDTHS),
        "dtype": draw.choice([BRAIN, HALF]),
        "window": draw.choice(WINDOWS),
        "softcap": draw.choice([0.0, 0.0, 0.0, 4.0, 30.0]),
        "alibi": draw.choice([None, None, None, "heads", "sequences"]),
        "sinks": draw.random() < 0.25,
        "dropout_p": draw.choice([0.0, 0.0, 0.0, 0.1, 0.6]),
    }
    if draw.random() < 0.4:
        lengths = tuple((length(), length()) for _ in range(draw.randint(1, 7)))
        options["lengths"] = lengths
        batch, seqlen_q, seqlen_k = len(lengths), *(max(p[i] for p in lengths) for i in (0, 1))
    else:
        batch, seqlen_q, seqlen_k = draw.randint(1, 3), length(), length()
        options |= {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        if draw.random() < 0.3:
            options["seqlens_k"] = tuple(draw.randint(0, seqlen_k) for _ in range(batch))
    if seqlen_q > 0 and seqlen_k > 0:
        if draw.random() < 0.25:
            options["mask"] = (draw.choice([1, batch]), draw.choice([1, heads[0]]))
            options["mask_tile"] = draw.choice([(128, 128), (128, 128), (64, 64), (128, 64)])
        if draw.random() < 0.2:
            shapes = [(batch, heads[0], seqlen_q, seqlen_k), (seqlen_k,), (heads[0], seqlen_q, 1)]
            options["bias"] = draw.choice(shapes)
            options["bias_dtype"] = draw.choice([None, torch.float32])
    return Call(**options)


def peers_of(problem: Problem) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the truth, and a peer whose gradients may also err by what rounding o does to delta.

    Where gradients cancel, as in a row with one key, eager autograd is exact and no attention by
    recomputation is: it reads delta off o as the caller got it. A wrong delta is a wrong dlse.
    """
    truth, eager = (expected(problem, dtype) for dtype in (torch.float64, problem.call.dtype))
    rounded = truth["o"].to(problem.call.dtype).double() - truth["o"]
    delta = (problem.do.double() * rounded).sum(-1).transpose(-1, -2)
    shifted = expected(replace(problem, dlse=problem.dlse.double() - delta), torch.float64)
    peer = {
        name: truth[name] + (eager[name] - truth[name]).abs() + (shifted[name] - truth[name]).abs()
        for name in truth.keys() - {"o", "lse"}
    }
    return truth, peer | {name: eager[name] for name in ("o", "lse")}


def judge(problem: Problem, kernels: ModuleType) -> None:
    """Run both directions and judge what they give by the error budget."""
    p = problem
    o, lse = planned.forward(kernels, p.q, p.k, p.v, p.spec, **p.tensors)
    gradients = planned.backward(kernels, p.do, p.dlse, p.q, p.k, p.v, o, lse, p.spec, **p.tensors)
    results = {"o": o, "lse": lse} | dict(
        zip(("dq", "dk", "dv", "dbias", "dsinks"), gradients, strict=True)
    )
    truth, peer = peers_of(problem)
    kept = p.spec.dropout_scale if p.philox is not None else 1.0
    scales = accumulator_scales(p.q, p.k, p.v, p.do * kept, p.spec.softmax_scale)
    assert {name for name, x in results.items() if x is not None} == truth.keys()
    # In float32 nothing hides that thousands of rows are added to dv one after the other.
    usual = 4.0 if problem.call.dtype == SINGLE else 2.0
    for name, want in truth.items():
        # As in `attention_problem`, for o.
        factor = max(3.0, usual) if name in ("dbias", "dsinks") else usual
        assert_within_budget(
            results[name], want, peer[name], name=name, factor=factor, scale=scales.get(name, 0.0)
        )


def draw_problem(seed: int, device: str, *dtypes: torch.dtype) -> Problem:
    """Draw a call and its tensors, a third of them with reproducible gradients."""
    call = draw_call(seed)
    if dtypes:
        call = replace(call, dtype=dtypes[seed % len(dtypes)])
    torch.manual_seed(seed)
    problem = make_problem(call, device)
    problem.spec = problem.spec._replace(deterministic=seed % 3 == 0)
    return problem


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(120))
def test_attention_and_its_gradients(seed: int) -> None:
    problem = draw_problem(seed, "cuda")
    judge(problem, gluon if planned.refusal(gluon, problem.spec) is None else portable)


@pytest.mark.parametrize("seed", range(40))
def test_attention_and_its_gradients_on_a_cpu(seed: int) -> None:
    judge(draw_problem(seed, "cpu", SINGLE, BRAIN, HALF), cpu)


def draw_batch(seed: int) -> paged.Case:
    """Draw new tokens over a paged cache."""
    draw = random.Random(seed)
    short = draw.random() < 0.5
    runs, lengths = [], []
    for _ in range(draw.choice([1, 2, 3, 9, 70])):
        run = draw.choice([0, 1, 1, 1, draw.randint(2, 8), 1 if short else draw.randint(9, 400)])
        history = draw.choice([0, 1, draw.randint(2, 200), draw.randint(100, 3000), 256])
        runs.append(run)
        lengths.append(draw.choice([run + history, run + history, run + history, history]))
    runs[-1] = max(1, runs[-1])
    head_dim, v_head_dim = draw.choice(WIDTHS)
    dtype = draw.choice([BRAIN, HALF, torch.float32])
    return paged.Case(
        str(seed), tuple(runs), tuple(lengths), draw.choice([*HEADS, (32, 8), (28, 4)]),
        head_dim, v_head_dim, draw.choice([1, 3, 8, 16, 16, 32, 64, 256]), dtype,
        draw.choice([None, None, HALF]), draw.choice([None, None, 1, 100, 700]),
        draw.choice([0.0, 0.0, 5.0]), draw.random() < 0.2, draw.random() < 0.2,
        draw.choice([0, 0, 5]), draw.random() < 0.2,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(80))
def test_paged_attention(seed: int) -> None:
    torch.manual_seed(seed)
    paged.check(paged.make_inputs(draw_batch(seed), "cuda"))


def draw_latents(seed: int) -> latents.Case:
    """Draw new tokens over cached latents, most of DeepSeek's widths."""
    draw = random.Random(seed)
    runs = tuple(
        draw.choice([0, 1, 1, draw.randint(2, 8)]) for _ in range(draw.choice([1, 2, 9, 40]))
    )
    runs = (*runs, draw.choice([1, 1, 5, 30]))
    lengths = tuple(
        draw.choice([run, run + draw.randint(0, 300), run + draw.randint(64, 5000)]) for run in runs
    )
    dtype = draw.choice([BRAIN, BRAIN, HALF])
    return latents.Case(
        str(seed), runs, lengths, draw.choice([1, 3, 16, 24, 40, 64, 128]),
        draw.choice([(512, 64)] * 4 + [(128, 32)]), draw.choice([1, 16, 32, 48, 64, 64, 64, 128]),
        dtype, padding=draw.choice([0, 3]),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_latent_attention(seed: int) -> None:
    torch.manual_seed(seed)
    inputs = latents.make_inputs(draw_latents(seed), "cuda")
    if mla_decode.why_not(inputs.spec) is None:
        o, lse = latent(
            mla_decode, inputs.q_latent, inputs.q_rope, inputs.cache, inputs.spec, **inputs.tensors
        )
        check_latents(inputs, o, lse)
    else:
        latents.check(inputs)
