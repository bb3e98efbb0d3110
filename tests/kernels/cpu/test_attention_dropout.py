"""Dropout on the CPU: the mask bit for bit, values and gradients, a probability of 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.attention_oracle import assert_agree
from tilewise import masks, ops
from tilewise.ops.attention.dropout import dropout_keep_mask

B, SQ, SK, HQ, HK, D, DV = 2, 70, 290, 6, 2, 16, 24
SEED = (-(2**62) - 12345, 2**31 + 7)  # all four words matter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("dropout_p", [2**-16, 0.1, 0.5, 1 - 2**-16, 1.0])
def test_the_mask_is_bit_for_bit_the_documented_one(dropout_p: float, dtype: torch.dtype) -> None:
    q, k = torch.randn(B, SQ, HQ, D).to(dtype), torch.randn(B, SK, HK, D).to(dtype)
    v = torch.eye(SK).expand(B, HK, SK, SK).transpose(1, 2).to(dtype).requires_grad_()
    o = ops.attention(q, k, v, dropout_p=dropout_p, seed=SEED, backend="cpu")
    want = dropout_keep_mask((B, HQ, SQ, SK), dropout_p=dropout_p, seed=SEED)
    assert torch.equal(o.transpose(1, 2) != 0, want)
    # With do = the unit vectors of the queries, dv holds p of each, the heads of a group apart.
    for head in range(3):
        do = torch.zeros(B, SQ, HQ, SK).to(dtype)
        do[:, :, head :: HQ // HK, :SQ] = torch.eye(SQ).view(1, SQ, 1, SQ).to(dtype)
        (dv,) = torch.autograd.grad(o, v, do, retain_graph=True)
        seen = want[:, head :: HQ // HK]
        assert torch.equal(dv[..., :SQ].permute(0, 2, 3, 1) != 0, seen)


VISIBLE = torch.rand(1, HQ, SQ, SK, generator=torch.Generator().manual_seed(3)) < 0.4
LENGTHS = torch.tensor([100, 290], dtype=torch.int32)
CASES: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"causal": True},
    "window and key lengths": {"window": (90, 10), "seqlens_k": LENGTHS},
    "softcap": {"softcap": 3.0, "softmax_scale": 0.5},
    "mask": {"mask": masks.dense(VISIBLE, tile=(64, 64))},
}


def draw(dtype: torch.dtype, packed: bool = False) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    lead_q, lead_k = ((B * SQ,), (B * SK,)) if packed else ((B, SQ), (B, SK))
    shapes = {"q": (*lead_q, HQ, D), "k": (*lead_k, HK, D), "v": (*lead_k, HK, DV)}
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    tensors |= {"bias": torch.randn(HQ, SQ, SK).to(dtype), "sinks": torch.randn(HQ)}
    dlse = torch.randn((HQ, B * SQ) if packed else (B, HQ, SQ))
    return tensors, torch.randn(*lead_q, HQ, DV).to(dtype), dlse


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in CASES]
    + [("alone", torch.bfloat16), ("mask", torch.bfloat16), ("causal", torch.float32)],
)
def test_values_and_gradients_agree(name: str, dtype: torch.dtype) -> None:
    keep = dropout_keep_mask((B, HQ, SQ, SK), dropout_p=0.25, seed=SEED)
    options = CASES[name] | {"dropout_p": 0.25}
    reference = {"keep_mask": keep} | ({"mask": VISIBLE} if name == "mask" else {})
    assert_agree(*draw(dtype), options | {"seed": SEED}, reference)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_a_packed_sequence_counts_its_own_rows_and_keys(dtype: torch.dtype) -> None:
    keep = dropout_keep_mask((B, HQ, SQ, SK), dropout_p=0.5, seed=SEED)
    edges_q, edges_k = torch.tensor([0, 70, 133]), torch.tensor([0, 290, 480])
    options = {
        "cu_seqlens_q": edges_q.int(), "cu_seqlens_k": edges_k.int(), "max_seqlen_q": SQ,
        "max_seqlen_k": SK, "causal": True, "dropout_p": 0.5,
    }  # fmt: skip
    assert_agree(*draw(dtype, packed=True), options | {"seed": SEED}, {"keep_mask": keep})


def test_a_probability_of_one_drops_everything_but_the_sum() -> None:
    q, k, v = (torch.randn(1, 100, 2, 16, requires_grad=True) for _ in range(3))
    o, lse = ops.attention(q, k, v, dropout_p=1.0, seed=0, return_lse=True, backend="cpu")
    plain = ops.attention(q, k, v, return_lse=True, backend="cpu")[1]
    assert bool((o == 0).all())
    assert torch.equal(lse, plain)
    for gradient in torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True):
        assert bool((gradient == 0).all())
    for got, want in zip(
        torch.autograd.grad(lse.sum(), (q, k)), torch.autograd.grad(plain.sum(), (q, k)),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(got, want)
