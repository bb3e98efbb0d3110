"""attention() and attention_varlen() on every backend over the same named cases."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from tests.ops.cases import (
    ATTENTION_CASES,
    AttentionCase,
    draw,
    draw_visible,
    keyword_arguments,
)
from tilewise import masks, ops
from tilewise.errors import UnsupportedError
from tilewise.integrations.torch_sdpa import scaled_dot_product_attention
from tilewise.kernels import device
from tilewise.reference import standard
from tilewise.reference.dropout import dropout_rate
from tilewise.testing import accumulator_scales, assert_within_budget

BACKENDS = [
    pytest.param("reference", "cpu", id="reference"),
    pytest.param("cpu", "cpu", id="cpu"),
    pytest.param("triton", "cpu", id="triton-interpreted"),
    pytest.param("triton", "cuda", id="triton", marks=pytest.mark.gpu),
    pytest.param("gluon", "cuda", id="gluon", marks=pytest.mark.gpu),
]
METADATA = ("alibi_slopes", "seqlens_k")
# Masks of 64 x 64 tiles and heads wider than 256 are for the portable kernels.
REFUSED_BY_GLUON = {
    "mask",
    "mask_per_head",
    "mask_with_causal_and_lengths",
    "everything",
    "head_dim_64_value_512",
    "head_dim_512",
    "head_dim_576_value_512",
}


def _dtype_of(backend: str) -> torch.dtype:
    """The dtype of tests that are not about one: Hopper's kernels have no float32."""
    return torch.bfloat16 if backend == "gluon" else torch.float32


def _draw(backend: str, place: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=place).to(_dtype_of(backend))


def _results(run, tensors: dict[str, Tensor], grads: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Run with fresh leaves; return o, lse and the gradient of every differentiable tensor."""
    leaves = {
        name: t if name in METADATA else t.detach().clone().requires_grad_()
        for name, t in tensors.items()
    }
    o, lse = run(**leaves, return_lse=True)
    seen = lse.isfinite()
    loss = (o * grads[0].to(o.dtype)).sum() + torch.where(
        seen, lse * grads[1].to(lse.dtype), 0
    ).sum()
    wanted = [t for name, t in leaves.items() if name not in METADATA]
    names = [f"d{name}" for name in leaves if name not in METADATA]
    computed = torch.autograd.grad(loss, wanted)
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(names, computed, strict=True))}


def _oracle_options(case: AttentionCase, place: str) -> dict:
    """Return a case's mask and dropout as the oracle takes them: bool matrices."""
    options: dict = {}
    visible = draw_visible(case)
    if visible is not None:
        options["mask"] = visible.to(place)
    if case.dropout_p > 0:
        shape = (case.batch, case.num_q_heads, case.seqlen_q, case.seqlen_k)
        options["keep_mask"] = ops.dropout_keep_mask(
            shape, dropout_p=case.dropout_p, seed=(11, 3), device=place
        )
        options["dropout_p"] = dropout_rate(case.dropout_p)
    return options


def _assert_case(case: AttentionCase, dtype: torch.dtype, backend: str, place: str) -> None:
    tensors = draw(case, dtype, place)
    o_shape = (*tensors["q"].shape[:-1], tensors["v"].shape[-1])
    lse_shape = (case.batch, case.num_q_heads, case.seqlen_q)
    grads = (torch.randn(o_shape, device=place), torch.randn(lse_shape, device=place))
    doubles = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}

    def oracle(**t):
        return standard.attention(**t, **case.options, **_oracle_options(case, place))

    def ours(**t):
        return ops.attention(**t, **keyword_arguments(case, place), backend=backend)

    truth, eager = _results(oracle, doubles, grads), _results(oracle, tensors, grads)
    got = _results(ours, tensors, grads)
    q, k, v = (tensors[name] for name in "qkv")
    scale = case.options.get("softmax_scale", case.head_dim**-0.5)
    scales = accumulator_scales(q, k, v, grads[0], scale)
    for name, result in got.items():
        assert_within_budget(
            result, truth[name], eager[name], name=name, scale=scales.get(name, 0.0)
        )


@pytest.mark.parametrize(("backend", "place"), BACKENDS)
class TestAttention:
    @pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
    def test_forward_and_every_gradient_keep_the_budget(self, case, backend, place):
        if backend == "gluon" and case.name in REFUSED_BY_GLUON:
            with pytest.raises(UnsupportedError, match="backend 'gluon' cannot run attention"):
                _assert_case(case, torch.bfloat16, backend, place)
            return
        dtype = torch.float32 if device.interpreting() else torch.bfloat16
        _assert_case(case, dtype, backend, place)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_each_dtype_keeps_the_budget(self, dtype, backend, place):
        if backend == "gluon" and dtype == torch.float32:
            pytest.skip("Hopper's kernels have no float32, and say so")
        case = next(c for c in ATTENTION_CASES if c.name == "gqa_4")
        _assert_case(case, dtype, backend, place)

    def test_fully_masked_rows_give_zero_and_minus_infinity(self, backend, place):
        q, k, v = (_draw(backend, place, 1, n, 2, 64) for n in (6, 2, 2))
        q.requires_grad_()
        o, lse = ops.attention(q, k, v, causal=True, return_lse=True, backend=backend)
        assert torch.equal(o[:, :4], torch.zeros_like(o[:, :4]))
        assert bool(lse[..., :4].isneginf().all())
        assert bool(lse[..., 4:].isfinite().all())
        o.sum().backward()
        assert torch.equal(q.grad[:, :4], torch.zeros_like(o[:, :4]))

    def test_no_keys_at_all(self, backend, place):
        q = _draw(backend, place, 2, 3, 2, 64).requires_grad_()
        k = _draw(backend, place, 2, 0, 2, 64)
        o, lse = ops.attention(q, k, k, return_lse=True, backend=backend)
        assert torch.equal(o, torch.zeros_like(o))
        assert bool(lse.isneginf().all())
        o.sum().backward()
        assert torch.equal(q.grad, torch.zeros_like(q))

    def test_no_queries_at_all(self, backend, place):
        q = _draw(backend, place, 2, 0, 2, 64)
        k = _draw(backend, place, 2, 5, 2, 64).requires_grad_()
        o, lse = ops.attention(q, k, k, return_lse=True, backend=backend)
        assert o.shape == (2, 0, 2, 64)
        assert lse.shape == (2, 2, 0)
        o.sum().backward()
        assert torch.equal(k.grad, torch.zeros_like(k))

    def test_strided_views_need_no_copy_and_give_the_same(self, backend, place):
        qkv = _draw(backend, place, 2, 3, 50, 2, 64).permute(0, 2, 1, 3, 4)
        q, k, v = qkv.unbind(2)
        want = ops.attention(
            q.contiguous(), k.contiguous(), v.contiguous(), causal=True, backend=backend
        )
        assert torch.equal(ops.attention(q, k, v, causal=True, backend=backend), want)

    def test_window_ends_at_its_last_key(self, backend, place):
        """window=3 is the query's own key and two before it: a fourth key changes nothing."""
        q, k, v = (_draw(backend, place, 1, 12, 1, 64) for _ in range(3))
        base = ops.attention(q, k, v, window=3, backend=backend)
        moved = k.clone()
        moved[:, 5] += 1.0
        changed = (ops.attention(q, moved, v, window=3, backend=backend) != base).any(-1).flatten()
        assert changed.nonzero().flatten().tolist() == [5, 6, 7]

    def test_causal_hides_what_a_window_shows_to_the_right(self, backend, place):
        q, k, v = (_draw(backend, place, 1, 9, 2, 64) for _ in range(3))
        causal = ops.attention(q, k, v, causal=True, window=(3, 2), backend=backend)
        assert torch.equal(causal, ops.attention(q, k, v, window=(3, 0), backend=backend))
        causal = ops.attention(q, k, v, causal=True, window=(None, 2), backend=backend)
        assert torch.equal(causal, ops.attention(q, k, v, causal=True, backend=backend))

    def test_a_scale_of_zero_weighs_all_visible_keys_alike(self, backend, place):
        q, k, v = (_draw(backend, place, 1, 40, 2, 64).requires_grad_() for _ in range(3))
        o, lse = ops.attention(
            q, k, v, causal=True, softmax_scale=0.0, return_lse=True, backend=backend
        )
        seen = torch.arange(1, 41, device=place)
        mean = v.detach().double().cumsum(1) / seen[:, None, None]
        assert_within_budget(o.detach(), mean, mean.to(o.dtype))
        torch.testing.assert_close(lse, seen.log().to(lse).expand_as(lse), rtol=1e-6, atol=1e-6)
        o.sum().backward()
        assert torch.equal(q.grad, torch.zeros_like(q))
        assert torch.equal(k.grad, torch.zeros_like(k))

    def test_two_runs_are_bitwise_equal(self, backend, place):
        runs = []
        for _ in range(2):
            leaves = [
                torch.randn(2, 60, 4, 64, generator=torch.Generator().manual_seed(i))
                .to(place, _dtype_of(backend))
                .requires_grad_()
                for i in range(3)
            ]
            o = ops.attention(*leaves, causal=True, deterministic=True, backend=backend)
            o.square().sum().backward()
            runs.append([o.detach(), *(t.grad for t in leaves)])
        for first, second in zip(*runs, strict=True):
            assert torch.equal(first, second)


# Sums of dq that nobody asked to be reproducible come in any order on Hopper; all else has one.
RACES = [
    ("triton", False, ("o", "dq", "dk", "dv", "dbias")),
    ("gluon", False, ("o", "dk", "dv", "dbias")),
    (None, True, ("o", "dq", "dk", "dv", "dbias")),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "deterministic", "equal"), RACES)
def test_two_hundred_runs_give_the_same_bits(backend, deterministic, equal):
    """A race between threads or programs would show as a bit that changes."""
    q, k, v, do = (torch.randn(2, 777, 8, 128, device="cuda").bfloat16() for _ in range(4))
    bias = torch.randn(1, 8, 777, 777, device="cuda")
    visible = torch.rand(777, 777, device="cuda") < 0.5
    options = {"mask": masks.dense(visible), "dropout_p": 0.1, "seed": 5, "causal": True}
    options |= {"deterministic": deterministic, "backend": backend}

    def run() -> dict[str, Tensor]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v, bias)]
        o = ops.attention(*leaves[:3], bias=leaves[3], **options)
        grads = torch.autograd.grad(o, leaves, do)
        return {"o": o.detach(), **dict(zip(("dq", "dk", "dv", "dbias"), grads, strict=True))}

    first = run()
    for _ in range(199):
        got = run()
        for name in equal:
            assert torch.equal(got[name], first[name]), name
        torch.testing.assert_close(got["dq"], first["dq"], rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_gpu_than_the_current_one():
    q, k, v = (torch.randn(1, 300, 4, 64, device="cuda:1", requires_grad=True) for _ in range(3))
    o = ops.attention(q, k, v, causal=True)
    o.sum().backward()
    want = ops.attention(*(t.detach().cpu() for t in (q, k, v)), causal=True)
    torch.testing.assert_close(o.detach().cpu(), want, rtol=1e-3, atol=1e-3)
    assert q.grad.device == q.device


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 4, 33, 1), (33, 1), (1,), ()], ids=str)
def test_a_bias_that_the_keys_share_has_no_gradient_in_any_dtype(shape, dtype):
    q, k, v, do = (torch.randn(2, 33, 4, 16, dtype=dtype) for _ in range(4))
    cu = torch.tensor([0, 20, 33], dtype=torch.int32)
    sizes = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 33, "max_seqlen_k": 33}
    bias = torch.randn(shape, requires_grad=True)
    o = ops.attention(q, k, v, bias=bias, causal=True)
    packed = ops.attention_varlen(q[0], k[0], v[0], bias=bias, **sizes)
    for result, direction in ((o, do), (packed, do[0])):
        (dbias,) = torch.autograd.grad(result, bias, direction)
        assert torch.equal(dbias, torch.zeros(shape))


def test_a_column_of_bias_has_the_same_gradient_packed_and_padded():
    lengths, longest = [5, 0, 9, 1], 9
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    sizes = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    sizes |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    q, k, v = (torch.randn(15, 4, 8, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(4, 4, longest, 1, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(4, dtype=torch.float64)
    do, dlse = torch.randn_like(q), torch.randn(4, 15, dtype=torch.float64)
    options = {"bias": bias, "sinks": sinks, "return_lse": True}
    results = ops.attention_varlen(q, k, v, **sizes, **options)
    (got,) = torch.autograd.grad(results, bias, (do, dlse))
    full = torch.zeros(4, 4, longest, longest, dtype=torch.float64, requires_grad=True)
    results = ops.attention_varlen(q, k, v, **sizes, **options | {"bias": bias.detach() + full})
    (want,) = torch.autograd.grad(results, full, (do, dlse))
    torch.testing.assert_close(got, want.sum(-1, keepdim=True))
    assert bool((got[0, :, :5] != 0).all())


VARLEN_CASES = {
    "ragged": ([5, 70, 1], [5, 70, 1], {"causal": True}),
    "empty_sequences": ([0, 9, 0, 4], [3, 9, 0, 20], {"causal": True}),
    "cross_lengths": ([17, 3], [40, 66], {}),
    "window": ([64, 90], [64, 90], {"window": 11}),
    "softcap": ([33], [50], {"softcap": 3.0, "causal": True}),
}


@pytest.mark.parametrize(("backend", "place"), BACKENDS)
class TestAttentionVarlen:
    @pytest.mark.parametrize("name", VARLEN_CASES)
    def test_packed_sequences_keep_the_budget(self, name, backend, place):
        lengths_q, lengths_k, options = VARLEN_CASES[name]
        dtype = torch.float32 if device.interpreting() else torch.bfloat16
        cu_q, cu_k = (
            torch.tensor([0, *lengths], device=place).cumsum(0).int()
            for lengths in (lengths_q, lengths_k)
        )
        tensors = {
            "q": torch.randn(sum(lengths_q), 4, 64).to(place, dtype),
            "k": torch.randn(sum(lengths_k), 2, 64).to(place, dtype),
            "v": torch.randn(sum(lengths_k), 2, 64).to(place, dtype),
        }
        grads = (torch.randn(sum(lengths_q), 4, 64), torch.randn(4, sum(lengths_q)))
        grads = tuple(g.to(place) for g in grads)
        packing = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}

        def oracle(**t):
            return standard.attention_varlen(**t, **packing, **options)

        def ours(**t):
            sizes = {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}
            return ops.attention_varlen(**t, **packing, **sizes, **options, backend=backend)

        doubles = {n: t.double() for n, t in tensors.items()}
        truth, eager = _results(oracle, doubles, grads), _results(oracle, tensors, grads)
        scales = accumulator_scales(*tensors.values(), grads[0], 64**-0.5)
        for key, result in _results(ours, tensors, grads).items():
            assert_within_budget(
                result, truth[key], eager[key], name=key, scale=scales.get(key, 0.0)
            )

    def test_a_packed_sequence_equals_itself_alone(self, backend, place):
        q, k, v = (_draw(backend, place, 90, 2, 64) for _ in range(3))
        cu = torch.tensor([0, 30, 90], dtype=torch.int32, device=place)
        packed = ops.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            max_seqlen_q=60,
            max_seqlen_k=60,
            causal=True,
            backend=backend,
        )
        alone = ops.attention(
            q[None, 30:], k[None, 30:], v[None, 30:], causal=True, backend=backend
        )
        torch.testing.assert_close(packed[30:], alone[0])

    def test_no_tokens_at_all(self, backend, place):
        q = _draw(backend, place, 0, 2, 64)
        cu = torch.zeros(3, dtype=torch.int32, device=place)
        o = ops.attention_varlen(
            q,
            q,
            q,
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            max_seqlen_q=0,
            max_seqlen_k=0,
            backend=backend,
        )
        assert o.shape == (0, 2, 64)


class TestLayout:
    """Tensors of torch's (B, H, S, D) give what has the right shape, and other numbers."""

    @pytest.mark.parametrize(("heads", "tokens"), [(3, 16), (8, 128)])
    def test_more_heads_than_tokens_are_told_once_where_the_call_stands(self, heads, tokens):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("default")  # Python's own
            for causal in (False, True):
                for more in (0, 1):
                    q = torch.randn(1, heads + more, tokens, 8)
                    ops.attention(q, q, q, causal=causal)
        assert [each.filename for each in told] == [__file__]
        assert "give q.transpose(1, 2)" in str(told[0].message)

    @pytest.mark.parametrize(
        ("q", "k"),
        [
            ((1, 1, 32, 8), (1, 1, 32, 8)),  # a first token
            ((1, 1, 32, 8), (1, 40, 32, 8)),  # a step with a cache
            ((1, 5, 32, 8), (1, 5, 8, 8)),  # grouped heads
            ((1, 32, 32, 8), (1, 32, 32, 8)),
        ],
    )
    def test_calls_that_torchs_layout_would_not_give_are_not(self, q, k):
        k = torch.randn(k)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ops.attention(torch.randn(q), k, k)

    def test_nor_are_the_librarys_own_modules(self):
        q = torch.randn(1, 16, 3, 8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaled_dot_product_attention(q, q, q)
