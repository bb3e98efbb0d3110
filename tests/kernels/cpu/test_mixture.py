"""A mixture of experts and a whole norm outside of a step: numerics, ties, NaN, other rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tilewise.ops import cpu_step
from tilewise.ops.panels import interleave, pack, why_not_pack
from tilewise.testing import assert_within_budget

pytestmark = pytest.mark.skipif(
    why_not_pack(torch.empty(2, 2)) is not None, reason="needs an x86 CPU"
)
WIDTH, INNER, COUNT = 20, 12, 5


def mixture_of(**fields):
    """Experts of random weights, and a function of one row and expert, in float64."""
    draw = torch.Generator().manual_seed(2)
    up = torch.randn(COUNT, 2 * INNER, WIDTH, generator=draw) / WIDTH**0.5
    down = torch.randn(COUNT, WIDTH, INNER, generator=draw) / INNER**0.5

    def compute(row, expert):
        gate, other = (up[expert].double() @ row.double()).chunk(2)
        return down[expert].double() @ (F.silu(gate) * other)

    panels = [pack(*interleave(weight, None)) for weight in up], [pack(weight) for weight in down]
    return cpu_step.Mixture(*panels, 2, **fields), compute


def test_the_first_of_equal_experts_are_chosen():
    mixture, compute = mixture_of()
    x, logits = torch.randn(3, WIDTH), torch.zeros(3, COUNT)
    logits[1, 4], logits[2] = 1.0, torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0])
    y = cpu_step.mix(x, logits, mixture)
    share = 1.0 / (1.0 + torch.tensor(-1.0).double().exp())
    expected = [
        [(0, 0.5), (1, 0.5)],
        [(4, float(share)), (0, float(1 - share))],
        [(1, 0.5), (3, 0.5)],
    ]
    for row, found, parts in zip(x, y, expected, strict=True):
        exact = sum(weight * compute(row, expert) for expert, weight in parts)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


def test_a_rows_bits_depend_on_no_other_row():
    mixture, _ = mixture_of(
        scores="sigmoid", correction_bias=lambda: torch.linspace(-0.2, 0.3, COUNT)
    )
    x, logits = torch.randn(70, WIDTH), torch.randn(70, COUNT)
    together = cpu_step.mix(x, logits, mixture)
    for i in (0, 33, 69):
        assert torch.equal(cpu_step.mix(x[i : i + 1], logits[i : i + 1], mixture)[0], together[i])
    assert cpu_step.mix(x[:0], logits[:0], mixture).shape == (0, WIDTH)


def test_what_is_not_finite_stays_in_its_row():
    mixture, _ = mixture_of()
    x, logits = torch.randn(4, WIDTH), torch.randn(4, COUNT)
    clean = cpu_step.mix(x, logits, mixture)
    logits[1, 3] = float("nan")
    x[2, 5] = float("inf")
    y = cpu_step.mix(x, logits, mixture)
    assert not y[1].isfinite().any()
    assert not y[2].isfinite().any()
    assert torch.equal(y[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize("dim", [1, 7, 52, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_are_within_the_budget_of_float64(dim, dtype):
    x = (torch.randn(9, 3, dim) * 3 + 1).to(dtype)
    weight, bias = torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)
    layer = cpu_step.normalise(x, weight, bias, 1e-5, 0.0, centres=True)
    wide = [t.double() for t in (weight, bias)]
    exact = F.layer_norm(x.double(), (dim,), *wide, 1e-5)
    assert_within_budget(layer, exact, F.layer_norm(x, (dim,), weight, bias, 1e-5))
    shifted = cpu_step.normalise(x, weight, None, 1e-5, 1.0, centres=False)
    exact = F.rms_norm(x.double(), (dim,), 1 + wide[0], 1e-5)
    eager = F.rms_norm(x.float(), (dim,), 1 + weight.float(), 1e-5).to(dtype)
    assert_within_budget(shifted, exact, eager)
    some = cpu_step.normalise(x[4:5], weight, bias, 1e-5, 0.0, centres=True)
    assert torch.equal(some, layer[4:5])
