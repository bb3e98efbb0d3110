"""Packed attention on the CPU with a bias and slopes of its own for each sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels import planned
from tilewise import ops
from tilewise.integrations.flash_attn import flash_attn_varlen_func
from tilewise.kernels.cpu.attention import plan as cpu
from tilewise.kernels.spec import AttentionSpec
from tilewise.reference import standard
from tilewise.testing import accumulator_scales, assert_within_budget

LENGTHS = [(70, 70), (0, 5), (1, 130), (67, 40), (3, 0)]
MAX_Q, MAX_K = 80, 140  # more than the longest sequence: a launcher must not count on equality
HQ, HK, D, DV = 4, 2, 32, 24

BIASES = {
    "of each sequence": (len(LENGTHS), HQ, MAX_Q, MAX_K),
    "of heads": (1, HQ, MAX_Q, MAX_K),
    "of positions": (MAX_Q, MAX_K),
    "of keys": (len(LENGTHS), 1, 1, MAX_K),
    "of queries": (HQ, MAX_Q, 1),
}


def edges_of(side: int) -> Tensor:
    lengths = torch.tensor([0, *(pair[side] for pair in LENGTHS)])
    return lengths.cumsum(0).to(torch.int32)


def spec_of(dtype: torch.dtype) -> AttentionSpec:
    return AttentionSpec(
        "cpu", dtype, len(LENGTHS), MAX_Q, MAX_K, HQ, HK, D, DV, window_right=0,
        softmax_scale=D**-0.5, is_varlen=True, has_bias=True, needs_dbias=True, has_alibi=True,
    )  # fmt: skip


def by_autograd(tensors: dict[str, Tensor], do: Tensor, dlse: Tensor, slopes: Tensor):
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    o, lse = standard.attention_varlen(
        **leaves, cu_seqlens_q=edges_of(0), cu_seqlens_k=edges_of(1), causal=True,
        alibi_slopes=slopes, return_lse=True,
    )  # fmt: skip
    seen = lse.isfinite()
    loss = (o * do).sum() + torch.where(seen, lse * dlse, 0.0).sum()
    return {"o": o, "lse": lse} | dict(
        zip(("dq", "dk", "dv", "dbias"), torch.autograd.grad(loss, leaves.values()), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", BIASES)
def test_bias_and_slopes_count_from_the_start_of_a_sequence(name: str, dtype: torch.dtype) -> None:
    total_q, total_k = (sum(side) for side in zip(*LENGTHS, strict=True))
    tensors = {
        "q": torch.randn(total_q, HQ, D), "k": torch.randn(total_k, HK, D),
        "v": torch.randn(total_k, HK, DV), "bias": torch.randn(BIASES[name]),
    }  # fmt: skip
    tensors = {key: tensor.to(dtype) for key, tensor in tensors.items()}
    slopes = torch.rand(len(LENGTHS), HQ) * 0.2
    do, dlse = torch.randn(total_q, HQ, DV).to(dtype), torch.randn(HQ, total_q)
    q, k, v, bias = tensors.values()
    extra = {"cu_seqlens_q": edges_of(0), "cu_seqlens_k": edges_of(1), "alibi_slopes": slopes,
             "bias": bias}  # fmt: skip
    o, lse = planned.forward(cpu, q, k, v, spec_of(dtype), **extra)
    grads = planned.backward(cpu, do, dlse.to(lse), q, k, v, o, lse, spec_of(dtype), **extra)
    assert grads[4] is None
    actual = dict(zip(("o", "lse", "dq", "dk", "dv", "dbias"), (o, lse, *grads[:4]), strict=True))
    doubles = {key: tensor.double() for key, tensor in tensors.items()}
    truth = by_autograd(doubles, do.double(), dlse.double(), slopes.double())
    eager = by_autograd(tensors, do, dlse, slopes)
    scales = accumulator_scales(q, k, v, do, D**-0.5)
    scales["dbias"] = do.double().norm(dim=-1).max().item() * v.double().norm(dim=-1).max().item()
    for key, value in actual.items():
        if dtype == torch.float64:
            torch.testing.assert_close(value, truth[key], rtol=0, atol=1e-10)
        else:
            assert_within_budget(value, truth[key], eager[key], name=key, scale=scales[key])


def test_gradient_of_the_bias_only_when_wanted() -> None:
    total_q, total_k = (sum(side) for side in zip(*LENGTHS, strict=True))
    q, k, v = torch.randn(total_q, HQ, D), torch.randn(total_k, HK, D), torch.randn(total_k, HK, DV)
    extra = {"cu_seqlens_q": edges_of(0), "cu_seqlens_k": edges_of(1),
             "bias": torch.randn(MAX_Q, MAX_K)}  # fmt: skip
    spec = spec_of(q.dtype)._replace(has_alibi=False)
    o, lse = planned.forward(cpu, q, k, v, spec, **extra)
    do = torch.randn_like(o)
    with_it = planned.backward(cpu, do, None, q, k, v, o, lse, spec, **extra)
    without = planned.backward(
        cpu, do, None, q, k, v, o, lse, spec._replace(needs_dbias=False), **extra
    )  # fmt: skip
    assert with_it[3] is not None
    assert with_it[3].shape == (MAX_Q, MAX_K)
    assert without[3] is None
    for one, other in zip(with_it[1:3], without[1:3], strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(with_it[0], without[0])


@pytest.mark.parametrize(
    ("name", "edges", "rule"),
    [
        ("cu_seqlens_k", [0, 5, 9], "rise from 0 to at most 8"),
        ("cu_seqlens_q", [0, 5, 9], "rise from 0 to at most 8"),
        ("cu_seqlens_k", [0, 7, 3], "rise from 0 to at most 8"),
        ("cu_seqlens_k", [-1, 3, 8], "rise from 0 to at most 8"),
        ("cu_seqlens_q", [2, 3, 8], "rise from 0 to at most 8"),
    ],
)
def test_sequences_outside_of_memory_are_refused(name, edges, rule):
    x = torch.randn(8, 2, 16)
    whole = torch.tensor([0, 3, 8], dtype=torch.int32)
    given = {"cu_seqlens_q": whole, "cu_seqlens_k": whole}
    given[name] = torch.tensor(edges, dtype=torch.int32)
    for backend in (None, "cpu", "reference"):
        with pytest.raises(ValueError, match=f"{name} must {rule}, got"):
            ops.attention_varlen(x, x, x, **given, max_seqlen_q=9, max_seqlen_k=9, backend=backend)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_a_bias_covers_the_longest_sequence(name):
    """Its rows lie one after the other: those of longer sequences lie in other memory."""
    x, edges = torch.randn(8, 2, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
    given = {"cu_seqlens_q": edges, "cu_seqlens_k": edges, "max_seqlen_q": 5, "max_seqlen_k": 5}
    given[name] = 4
    bias = torch.randn(2, 2, given["max_seqlen_q"], given["max_seqlen_k"])
    with pytest.raises(ValueError, match=f"{name} must be at least 5, the longest .*got 4"):
        ops.attention_varlen(x, x, x, **given, bias=bias)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize("most", [0, 1, 4])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout_p": 0.5}], ids=str)
def test_a_sequence_is_not_longer_than_the_call_says(options, most, name):
    """A GPU sizes its grid by it and leaves the rest of a sequence out; a CPU took no notice."""
    x, edges = torch.randn(8, 2, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
    given = {"cu_seqlens_q": edges, "cu_seqlens_k": edges, "max_seqlen_q": 5, "max_seqlen_k": 5}
    for backend in (None, "reference"):
        ops.attention_varlen(x, x, x, **given, **options, backend=backend)
        wrong = given | {name: most}
        with pytest.raises(ValueError, match=f"{name} must be at least 5, .*got {most}"):
            ops.attention_varlen(x, x, x, **wrong, **options, backend=backend)
    numbers = {"max_seqlen_q": 5, "max_seqlen_k": 5, name: most}
    with pytest.raises(ValueError, match=f"{name} must be at least 5, .*got {most}"):
        flash_attn_varlen_func(x, x, x, edges, edges, **numbers)


@pytest.mark.parametrize("lengths", [[9, 3], [3, -1]])
def test_lengths_outside_of_memory_are_refused(lengths):
    x = torch.randn(2, 8, 2, 16)
    seqlens_k = torch.tensor(lengths, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"seqlens_k must lie in \[0, 8\], got"):
        ops.attention(x, x, x, seqlens_k=seqlens_k)
