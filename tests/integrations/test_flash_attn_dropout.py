"""Dropout through flash-attn's functions: its seed, its gradient, and what S_dmask tells of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tilewise.integrations import flash_attn
from tilewise.ops import call as memory
from tilewise.ops import dispatch
from tilewise.reference import standard
from tilewise.testing import accumulator_scales, assert_within_budget

P = 0.17


@pytest.fixture(
    params=[
        pytest.param(("reference", "cpu"), id="reference"),
        pytest.param(("cpu", "cpu"), id="cpu"),
        pytest.param(("triton", "cuda"), id="triton", marks=pytest.mark.gpu),
    ]
)
def place(request, monkeypatch):
    """The device of a test, on which one backend computes."""
    backend, device = request.param
    monkeypatch.setattr(dispatch, "_AUTOMATIC", {device: (backend,)})
    monkeypatch.setattr(memory, "_memory", memory._Memory())
    return device


def _qkv(*, seqlen_q: int = 40, seqlen_k: int = 150, heads_k: int = 2, dim: int = 64, place="cpu"):
    shapes = ((2, seqlen_q, 4, dim), (2, seqlen_k, heads_k, dim), (2, seqlen_k, heads_k, dim))
    return [torch.randn(shape).bfloat16().to(place) for shape in shapes]


def _steps(dim: int) -> int:
    """Keys of a step of flash-attn's kernel with dropout."""
    return {32: 128, 64: 64, 96: 64, 128: 32, 256: 64}[dim]


def _probabilities(marks: Tensor, s: Tensor, keys: int) -> Tensor:
    """Undo the scale of S_dmask as flash-attn's tests do: by steps, from right to left."""
    lse = torch.logsumexp(s, -1, keepdim=True)
    parts, largest = [], torch.full_like(lse, float("-inf"))
    for logits, mark in reversed(
        list(zip(s.split(keys, -1), marks.abs().split(keys, -1), strict=True))
    ):
        largest = torch.maximum(largest, logits.amax(-1, keepdim=True))
        factor = torch.where(largest.isfinite(), torch.exp(largest - lse), 0)
        parts.append(mark * factor)
    return torch.cat(parts[::-1], -1)


def _logits(q: Tensor, k: Tensor, *, causal: bool = False, window=(-1, -1)) -> Tensor:
    visible = standard.visible_keys(q, k, causal=causal, window=window)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * q.shape[-1] ** -0.5
    return torch.where(visible, s, float("-inf"))


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (60, 3)},
    "softcap": {"softcap": 3.0, "causal": True},
}


@pytest.mark.parametrize("p", [0.25, 0.17, 0.1, 0.01, 0.001, 0.9999])
def test_the_scale_is_that_of_the_probability_as_given(p):
    """The rate in use is a multiple of 1/256, and 0.001 becomes four times as much."""
    tensors = [torch.randn(2, n, 2, 16, dtype=torch.float64) for n in (24, 40, 40)]
    do = torch.randn_like(tensors[0])

    def results(attend):
        leaves = [x.clone().requires_grad_() for x in tensors]
        o = attend(*leaves)
        return o, *torch.autograd.grad(o, leaves, do)

    def dense(q, k, v):
        out, _, marks[0] = flash_attn.flash_attn_func(q, k, v, p, return_attn_probs=True)
        return out

    def packed(q, k, v):
        edges = [torch.arange(0, 2 * n + 1, n, dtype=torch.int32) for n in (24, 40)]
        out, _, marks[0] = flash_attn.flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (q, k, v)), *edges, 24, 40, p, return_attn_probs=True
        )
        return out.view(2, 24, 2, 16)

    marks = [torch.empty(0)]  # of the last call
    for attend in (dense, packed):
        found = results(attend)
        want = results(
            lambda q, k, v: standard.attention(q, k, v, keep_mask=marks[0] >= 0, dropout_p=p)
        )
        for have, expected in zip(found, want, strict=True):
            torch.testing.assert_close(have, expected, rtol=1e-9, atol=1e-9)


class TestDense:
    @pytest.mark.parametrize("name", CASES)
    def test_output_and_gradients_are_those_of_the_marked_pattern(self, name, place):
        options = CASES[name]
        tensors = _qkv(place=place)
        leaves = [t.clone().requires_grad_() for t in tensors]
        out, lse, marks = flash_attn.flash_attn_func(*leaves, P, return_attn_probs=True, **options)
        assert marks.shape == (2, 4, 40, 150)
        assert marks.dtype == out.dtype
        assert not marks.requires_grad
        do = torch.randn_like(out)
        got = {"o": out.detach(), **_gradients(out, leaves, do)}

        def oracle(dtype: torch.dtype) -> dict[str, Tensor]:
            leaves = [t.clone().to(dtype).requires_grad_() for t in tensors]
            o = standard.attention(
                *leaves,
                keep_mask=marks >= 0,
                dropout_p=P,
                causal=options.get("causal", False),
                window=options.get("window_size"),
                softcap=options.get("softcap", 0.0),
            )
            return {"o": o.detach(), **_gradients(o, leaves, do.to(dtype))}

        truth, eager = oracle(torch.float64), oracle(torch.bfloat16)
        scales = accumulator_scales(*tensors, do, 0.125)
        for part, result in got.items():
            assert_within_budget(
                result, truth[part], eager[part], name=part, scale=scales.get(part, 0.0)
            )
        _, plain, nothing = flash_attn.flash_attn_func(*tensors, return_attn_probs=True, **options)
        assert nothing.numel() == 0
        torch.testing.assert_close(lse, plain)  # which does not feel dropout

    @pytest.mark.parametrize("dim", [32, 96, 128, 256])
    def test_the_marks_hold_the_probabilities(self, dim, place):
        q, k, v = _qkv(dim=dim, place=place)
        _, lse, marks = flash_attn.flash_attn_func(q, k, v, P, causal=True, return_attn_probs=True)
        s = _logits(q, k, causal=True)
        found = _probabilities(marks.double(), s, _steps(dim))
        truth = torch.exp(s - lse.double().unsqueeze(-1))
        eager = truth.to(torch.bfloat16)
        assert_within_budget(found.to(torch.bfloat16), truth, eager)

    def test_every_dropped_key_is_marked_and_no_hidden_one(self, place):
        """Also where the weight would round to 0: large logits, wide spread."""
        q, k, v = _qkv(place=place)
        _, _, marks = flash_attn.flash_attn_func(
            q * 30, k, v, P, window_size=(40, 0), return_attn_probs=True
        )
        hidden = _logits(q, k, window=(40, 0)).isneginf()
        assert torch.equal(marks[hidden], torch.zeros_like(marks[hidden]))
        assert not bool(torch.signbit(marks[hidden]).any())
        assert bool((marks[~hidden] == 0).any())
        share = (marks[~hidden] < 0).double().mean().item()
        assert abs(share - P) < 0.02  # 5 standard deviations of 13,120 draws

    def test_the_generator_of_torch_decides(self, place):
        q, k, v = _qkv(place=place)

        def run() -> Tensor:
            return flash_attn.flash_attn_func(q, k, v, P)

        torch.manual_seed(3)
        first, second = run(), run()
        torch.manual_seed(3)
        assert torch.equal(run(), first)
        assert torch.equal(run(), second)
        assert not torch.equal(first, second)
        assert not torch.equal(first, flash_attn.flash_attn_func(q, k, v))

    def test_activation_checkpointing_repeats_it(self, place):
        qkv = torch.stack(_qkv(seqlen_k=40, heads_k=4, place=place), 2)

        def run(x: Tensor) -> Tensor:
            return flash_attn.flash_attn_qkvpacked_func(x, P, causal=True)

        grads = []
        for remember in (True, False):
            leaf = qkv.clone().requires_grad_()
            torch.manual_seed(5)
            out = run(leaf) if remember else checkpoint(run, leaf, use_reentrant=False)
            torch.rand(7, device=place)  # the generator moves on before the backward pass
            out.float().square().sum().backward()
            grads.append(leaf.grad)
        assert torch.equal(*grads)


def _gradients(out: Tensor, leaves: list[Tensor], do: Tensor) -> dict[str, Tensor]:
    grads = torch.autograd.grad(out, leaves, do)
    return dict(zip(("dq", "dk", "dv"), grads, strict=True))


@pytest.mark.parametrize("paged", [False, True])
def test_packed_sequences_are_marked_in_their_own_corner(paged, place):
    seqlens_q, seqlens_k = (17, 0, 9), (40, 5, 70)
    cu_q, cu_k = (
        torch.tensor([0, *seqlens], device=place).cumsum(0).int()
        for seqlens in (seqlens_q, seqlens_k)
    )
    q = torch.randn(26, 4, 64, device=place).bfloat16()
    k, v = (torch.randn(115, 2, 64, device=place).bfloat16() for _ in range(2))
    table = None
    keys, values = k, v
    if paged:
        table = torch.arange(15, dtype=torch.int32, device=place).view(3, 5)
        keys, values = (t.new_full((15, 16, 2, 64), float("nan")) for t in (k, v))
        for row, length in enumerate(seqlens_k):
            for pages, rows in ((keys, k), (values, v)):
                owned = pages[5 * row : 5 * row + 5].view(80, 2, 64)
                owned[:length] = rows[cu_k[row] : cu_k[row + 1]]
    out, lse, marks = flash_attn.flash_attn_varlen_func(
        q,
        keys,
        values,
        cu_q,
        cu_k,
        20,
        70,
        P,
        causal=True,
        return_attn_probs=True,
        block_table=table,
    )
    assert marks.shape == (3, 4, 20, 70)
    assert lse.shape == (4, 26)
    for row, (length_q, length_k) in enumerate(zip(seqlens_q, seqlens_k, strict=True)):
        rows, columns = slice(cu_q[row], cu_q[row + 1]), slice(cu_k[row], cu_k[row + 1])
        corner = marks[row : row + 1, :, :length_q, :length_k]
        if length_q:
            parts = [t.unsqueeze(0) for t in (q[rows], k[columns], v[columns])]
            options = {"keep_mask": corner >= 0, "dropout_p": P, "causal": True}
            truth = standard.attention(*(t.double() for t in parts), **options)
            eager = standard.attention(*parts, **options)
            assert_within_budget(out[rows].unsqueeze(0), truth, eager)
        rest = marks[row].clone()
        rest[:, :length_q, :length_k] = 0
        assert torch.equal(rest, torch.zeros_like(rest))


def test_all_dropped_is_zero(place):
    q, k, v = _qkv(place=place)
    out = flash_attn.flash_attn_func(q, k, v, 1.0)
    assert torch.equal(out, torch.zeros_like(out))


def test_probabilities_outside_zero_and_one_are_refused():
    q, k, v = _qkv()
    with pytest.raises(ValueError, match="dropout_p must lie in"):
        flash_attn.flash_attn_func(q, k, v, 1.5)
