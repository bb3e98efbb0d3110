"""What must hold for any attention whatever its numbers: laws, drawn by hypothesis."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewise import masks, ops

BACKENDS = [
    pytest.param("cpu", "cpu", id="cpu"),
    pytest.param("triton", "cpu", id="triton-interpreted"),
    pytest.param("triton", "cuda", id="triton", marks=pytest.mark.gpu),
]
LAW = settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
LENGTHS = st.integers(1, 90)
SEEDS = st.integers(0, 2**20)


def _draw(seed, place, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(place) for shape in shapes]


def _close(got, want):
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("backend", "place"), BACKENDS)
class TestLaws:
    @LAW
    @given(seqlen_q=LENGTHS, seqlen_k=LENGTHS, seed=SEEDS)
    def test_the_order_of_the_keys_does_not_matter(self, backend, place, seqlen_q, seqlen_k, seed):
        q, k, v = _draw(seed, place, (1, seqlen_q, 2, 16), *[(1, seqlen_k, 1, 16)] * 2)
        order = torch.randperm(seqlen_k).to(place)
        o, lse = ops.attention(q, k, v, return_lse=True, backend=backend)
        moved = ops.attention(q, k[:, order], v[:, order], return_lse=True, backend=backend)
        _close(moved, (o, lse))

    @LAW
    @given(seqlen_q=LENGTHS, seqlen_k=LENGTHS, cut=st.floats(0, 1), seed=SEEDS)
    def test_split_keys_merge_into_the_whole(self, backend, place, seqlen_q, seqlen_k, cut, seed):
        q, k, v = _draw(seed, place, (2, seqlen_q, 2, 16), *[(2, seqlen_k, 2, 16)] * 2)
        at = round(cut * seqlen_k)
        whole = ops.attention(q, k, v, return_lse=True, backend=backend)
        parts = [
            ops.attention(q, k[:, keys], v[:, keys], return_lse=True, backend=backend)
            for keys in (slice(None, at), slice(at, None))
        ]
        _close(ops.merge_states(*parts[0], *parts[1], backend=backend), whole)

    @LAW
    @given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=3), seed=SEEDS)
    def test_packing_equals_padding(self, backend, place, lengths, seed):
        longest, total = max(lengths), sum(lengths)
        q, k, v = _draw(seed, place, *[(total, 2, 16)] * 3)
        cu = torch.tensor([0, *lengths], device=place).cumsum(0).int()
        packed = ops.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            backend=backend,
        )
        padded = [
            torch.stack(
                [
                    torch.nn.functional.pad(part, (0, 0, 0, 0, 0, longest - len(part)), value=3.0)
                    for part in t.split(lengths)
                ]
            )
            for t in (q, k, v)
        ]
        o = ops.attention(*padded, seqlens_k=cu.diff(), backend=backend)
        _close(packed, torch.cat([o[b, :length] for b, length in enumerate(lengths)]))

    @LAW
    @given(seqlen_q=LENGTHS, seqlen_k=LENGTHS, seed=SEEDS)
    def test_a_window_as_long_as_the_keys_is_causal(self, backend, place, seqlen_q, seqlen_k, seed):
        q, k, v = _draw(seed, place, (1, seqlen_q, 2, 16), *[(1, seqlen_k, 2, 16)] * 2)
        causal = ops.attention(q, k, v, causal=True, backend=backend)
        assert torch.equal(ops.attention(q, k, v, window=seqlen_k, backend=backend), causal)

    @LAW
    @given(seqlen_q=LENGTHS, seqlen_k=LENGTHS, density=st.floats(0, 1), seed=SEEDS)
    def test_a_bias_of_minus_infinity_is_a_mask(
        self, backend, place, seqlen_q, seqlen_k, density, seed
    ):
        tensors = _draw(seed, place, (1, seqlen_q, 2, 16), *[(1, seqlen_k, 2, 16)] * 2)
        visible = torch.rand(seqlen_q, seqlen_k) < density
        bias = torch.zeros(seqlen_q, seqlen_k).masked_fill_(~visible, -torch.inf).to(place)
        results = []
        for option in ({"bias": bias}, {"mask": masks.dense(visible.to(place))}):
            leaves = [t.clone().requires_grad_() for t in tensors]
            o, lse = ops.attention(*leaves, **option, return_lse=True, backend=backend)
            grads = torch.autograd.grad(o.square().sum(), leaves)
            results.append([o.detach(), lse.detach(), *grads])
        _close(results[0], results[1])

    @LAW
    @given(seqlen=LENGTHS, shift=st.floats(-100, 100), seed=SEEDS)
    def test_a_constant_bias_moves_only_lse(self, backend, place, seqlen, shift, seed):
        q, k, v = _draw(seed, place, *[(1, seqlen, 2, 16)] * 3)
        o, lse = ops.attention(q, k, v, return_lse=True, backend=backend)
        bias = torch.full((1, 1), shift, device=place)
        moved, moved_lse = ops.attention(q, k, v, bias=bias, return_lse=True, backend=backend)
        torch.testing.assert_close(moved, o, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(moved_lse, lse + shift, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("sign", [1.0, -1.0])
    def test_large_logits_stay_finite_at_every_length_of_the_last_tile(self, backend, place, sign):
        """Logits of +-120 for each Sk modulo a tile of 32: exp never meets its bare argument."""
        lengths = range(1, 34) if backend == "cpu" or place == "cuda" else (1, 31, 32, 33)
        q = torch.full((1, 3, 1, 16), 30.0, device=place)
        for seqlen_k in lengths:
            k = torch.full((1, seqlen_k, 1, 16), sign, device=place)
            v = torch.ones_like(k)
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            o, lse = ops.attention(*leaves, return_lse=True, backend=backend)
            _close(o.detach(), torch.ones_like(q))
            want = 120.0 * sign + torch.tensor(float(seqlen_k)).log()
            _close(lse.detach().cpu(), want.expand(1, 1, 3))
            for gradient in torch.autograd.grad(o.sum(), leaves):
                assert bool(gradient.isfinite().all())
