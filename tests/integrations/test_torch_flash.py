"""tilewise below torch's dispatcher: the registry, and every operator on CPU tensors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.integrations import torch_flash
from tilewise.integrations.torch_flash import flash_forward, register_flash_attention
from tilewise.reference import standard
from tilewise.testing import make_paged_cache, make_qkv

ATEN = torch.ops.aten
SDPA = "aten::_scaled_dot_product_flash_attention"


@pytest.fixture
def on_cpu():
    """Run the same functions behind the CPU's key, where this machine can call them."""
    activation = torch_flash._Activation("CPU")
    yield
    activation.remove()
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(SDPA, "CPU")


def _plain(q, k, v, visible=None, softmax_scale=None):
    """Attention by torch's mathematics, (B, S, H, D)."""
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)),
            attn_mask=visible,
            scale=softmax_scale,
            enable_gqa=True,
        ).transpose(1, 2)


def _corner(seqlen_q: int, seqlen_k: int, left: int | None = None) -> torch.Tensor:
    """Causal from the bottom right corner, as flash attention means it."""
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
    return visible if left is None else visible.triu(seqlen_k - seqlen_q - left)


def _assert_same(run, want, leaves):
    do = torch.randn_like(want)
    torch.testing.assert_close(run, want, rtol=1e-5, atol=1e-5)
    for got, expected in zip(
        torch.autograd.grad(run, leaves, do), torch.autograd.grad(want, leaves, do), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


class TestRegistry:
    def test_activates_and_restores(self):
        register_flash_attention()
        assert "tilewise" in torch.nn.attention.list_flash_attention_impls()
        assert torch.nn.attention.current_flash_attention_impl() is None
        had_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(SDPA, "CUDA")
        torch.nn.attention.activate_flash_attention_impl("tilewise")
        assert torch.nn.attention.current_flash_attention_impl() == "tilewise"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(SDPA, "CUDA")
        torch.nn.attention.restore_flash_attention_impl()
        assert torch.nn.attention.current_flash_attention_impl() is None
        assert torch._C._dispatch_has_kernel_for_dispatch_key(SDPA, "CUDA") == had_kernel

    def test_takes_a_name(self):
        register_flash_attention("tilewise_elsewhere")
        assert "tilewise_elsewhere" in torch.nn.attention.list_flash_attention_impls()

    def test_torch_without_a_registry_is_refused(self, monkeypatch):
        monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
        with pytest.raises(UnsupportedError, match=r"torch must be at least 2\.11"):
            register_flash_attention()


@pytest.mark.usefixtures("on_cpu")
class TestDispatched:
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_sdpa_with_torchs_autograd(self, is_causal):
        leaves = [t.requires_grad_() for t in make_qkv(2, 7, 9, 4, 2, 16)]
        q, k, v = (t.transpose(1, 2) for t in leaves)
        o, *_ = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=0.3)
        assert type(o.grad_fn).__name__ == "ScaledDotProductFlashAttentionBackward0"
        want = _plain(*leaves, _corner(7, 9) if is_causal else None, 0.3).transpose(1, 2)
        _assert_same(o, want, leaves)

    @pytest.mark.parametrize("transposed", [False, True])
    def test_results_are_laid_out_as_compiled_graphs_expect(self, transposed):
        q, k, v = (t.transpose(1, 2) for t in make_qkv(2, 7, 9, 4, 4, 16))
        if not transposed:
            q = q.contiguous()
        q.requires_grad_()
        o, *_ = ATEN._scaled_dot_product_flash_attention(q, k, v)
        assert o.stride() == torch.empty_like(q).stride()
        run = torch.compile(
            lambda *t: ATEN._scaled_dot_product_flash_attention(*t)[0],
            backend="aot_eager",
            fullgraph=True,
        )
        torch.testing.assert_close(run(q, k, v), o)

    def test_dropout_is_the_same_in_both_directions(self):
        leaves = [t.requires_grad_() for t in make_qkv(2, 24, 24, 4, 2, 16)]
        torch.manual_seed(5)
        q, k, v = (t.transpose(1, 2) for t in leaves)
        results = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.25, True)
        seed = results[6].view(torch.int64)
        want = ops.attention(*leaves, causal=True, dropout_p=0.25, seed=seed).transpose(1, 2)
        _assert_same(results[0], want, leaves)

    def test_dropout_has_the_scale_of_the_probability_as_given(self):
        tensors = [x.double().requires_grad_() for x in make_qkv(2, 24, 24, 2, 2, 16)]
        q, k, v = tensors
        o, lse, state, unused, _ = ATEN._flash_attention_forward(
            q, k, v, None, None, 24, 24, 0.01, False, False
        )
        seed = state.view(torch.int64)
        keep = ops.dropout_keep_mask((2, 2, 24, 24), dropout_p=0.01, seed=seed)
        want = standard.attention(q, k, v, keep_mask=keep, dropout_p=0.01)
        torch.testing.assert_close(o, want)
        do = torch.randn_like(o)
        found = ATEN._flash_attention_backward(
            do, q, k, v, o, lse, None, None, 24, 24, 0.01, False, state, unused
        )
        for have, expected in zip(found, torch.autograd.grad(want, tensors, do), strict=True):
            torch.testing.assert_close(have, expected)

    def test_dense_with_window_and_key_lengths(self):
        q, k, v = make_qkv(2, 5, 9, 4, 2, 16)
        lengths = torch.tensor([9, 6], dtype=torch.int32)
        o, lse, *_ = ATEN._flash_attention_forward(
            q, k, v, None, None, 5, 9, 0.0, True, False, window_size_left=2, seqused_k=lengths
        )
        for row, length in enumerate(lengths.tolist()):
            want = _plain(
                q[row, None], k[row, None, :length], v[row, None, :length], _corner(5, length, 2)
            )
            torch.testing.assert_close(o[row, None], want)
        assert lse.shape == (2, 4, 5)

    def test_packed_with_its_gradient(self):
        lengths_q, lengths_k = [5, 1, 8], [5, 7, 11]
        cu_q, cu_k = (
            torch.tensor([0, *n], dtype=torch.int32).cumsum(0).int() for n in (lengths_q, lengths_k)
        )
        q, k, v = (t[0] for t in make_qkv(1, 14, 23, 4, 2, 16))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        options = {"window_size_left": 4, "window_size_right": 0}
        o, lse, *_ = ATEN._flash_attention_forward(
            q, k, v, cu_q, cu_k, 8, 11, 0.0, True, False, **options
        )
        want = torch.cat(
            [
                _plain(a[None], b[None], c[None], _corner(len(a), len(b), 4))[0]
                for a, b, c in zip(
                    q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True
                )
            ]
        )
        _assert_same(o, want, leaves)
        if not hasattr(ATEN, "_flash_attention_forward_no_dropout_inplace"):
            return  # torch 2.11 has no such operator
        into = torch.empty_like(q)
        again = ATEN._flash_attention_forward_no_dropout_inplace(
            into, q, k, v, cu_q, cu_k, 8, 11, 0.0, True, False, **options
        )
        assert torch.equal(into, o.detach())
        assert torch.equal(again, lse)

    def test_varlen_attn_of_torch(self):
        varlen = pytest.importorskip("torch.nn.attention.varlen")
        cu = torch.tensor([0, 4, 10], dtype=torch.int32)
        q, k, v = (t[0] for t in make_qkv(1, 10, 10, 4, 4, 16))
        got = varlen.varlen_attn(q, k, v, cu, cu, 6, 6, window_size=(-1, 0))
        want = ops.attention_varlen(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=6, max_seqlen_k=6, causal=True
        )
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("splits", [None, 1])
def test_paged_keys(splits):
    k_cache, v_cache, table, lengths = make_paged_cache([9, 17], 8, 2, 16)
    cu = torch.tensor([0, 3, 4], dtype=torch.int32)
    q = torch.randn(4, 4, 16)
    options = {"seqused_k": lengths, "block_table": table, "num_splits": splits}
    o, lse, *_ = flash_forward(
        q, k_cache, v_cache, cu, None, 3, 17, 0.0, True, False, window_size_left=6, **options
    )
    want, want_lse = ops.paged_attention(
        q,
        k_cache,
        v_cache,
        block_table=table,
        seqlens_k=lengths,
        cu_seqlens_q=cu,
        max_seqlen_q=3,
        window=7,
        batch_invariant=splits == 1,
        return_lse=True,
    )
    assert torch.equal(o, want)
    assert torch.equal(lse, want_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_torch_sends_its_flash_calls_here(monkeypatch, compiled):
    calls = []
    for name in ("attention", "attention_bwd"):
        original = getattr(torch_flash, name)

        def counted(*args, _original=original, _name=name, **kwargs):
            calls.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(torch_flash, name, counted)
    tensors = [t.transpose(1, 2).half().cuda() for t in make_qkv(2, 300, 300, 8, 2, 64)]
    do = torch.randn_like(tensors[0])

    def run(*qkv):
        return functional.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)

    def results(run, *leaves):
        leaves = [t.detach().requires_grad_() for t in leaves]
        o = run(*leaves)
        return [o.detach(), *torch.autograd.grad(o, leaves, do.to(o.dtype))]

    with sdpa_kernel(SDPBackend.MATH):
        want = results(run, *(t.float() for t in tensors))
    register_flash_attention()
    torch.nn.attention.activate_flash_attention_impl("tilewise")
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            got = results(torch.compile(run, fullgraph=True) if compiled else run, *tensors)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert calls == ["attention", "attention_bwd"]
    for result, expected in zip(got, want, strict=True):
        torch.testing.assert_close(result.float(), expected, rtol=2e-2, atol=2e-2)


CU = torch.tensor([0, 3], dtype=torch.int32)
REFUSALS = {
    "debug mask": ((None, None, 3, 3, 0.0, False, True), {}, "return_debug_mask must be False"),
    "lengths of packed keys": (
        (CU, CU, 3, 3, 0.0, False, False),
        {"seqused_k": CU[1:]},
        "cum_seq_k must be given, and seqused_k not",
    ),
    "packed queries alone": ((CU, None, 3, 3, 0.0, False, False), {}, "got cum_seq_k=None"),
    "pages without lengths": (
        (CU, None, 3, 3, 0.0, True, False),
        {"block_table": CU[None]},
        "cum_seq_q and seqused_k must come with",
    ),
    "pages without starts": (
        (None, None, 3, 3, 0.0, True, False),
        {"block_table": CU[None], "seqused_k": CU[1:]},
        "cum_seq_q and seqused_k must come with",
    ),
    "pages seen both ways": (
        (CU, None, 3, 3, 0.0, False, False),
        {"block_table": CU[None], "seqused_k": CU[1:]},
        "is_causal must be set with a block_table",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    positional, options, message = REFUSALS[name]
    q = torch.zeros(3, 2, 16)
    with pytest.raises(UnsupportedError, match=message):
        flash_forward(q, q, q, *positional, **options)
