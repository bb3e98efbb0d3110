"""Attention of AlphaFold's kind against the formulas that DeepSpeed and cuEquivariance print."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.errors import UnsupportedError
from tilewise.integrations.evoformer import DS4Sci_EvoformerAttention, triangle_attention
from tilewise.testing import accumulator_scales, assert_within_budget

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def formula(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor | None, scale=None) -> Tensor:
    """softmax(scale q k^T + biases) v, heads before tokens, as eager PyTorch computes it."""
    s = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    for bias in biases:
        if bias is not None:
            s = s + bias.to(s.dtype)
    return torch.softmax(s.float() if s.dtype.itemsize < 4 else s, dim=-1).to(v.dtype) @ v


def drawn(*shape, dtype, seed, requires_grad=True):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return values.requires_grad_(requires_grad)


def results(function, tensors, do):
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in tensors]
    o = function(*leaves)
    wanted = [x for x in leaves if x.requires_grad]
    return [o.detach(), *torch.autograd.grad(o, wanted, do.to(o.dtype))]


def compare(ours, eager, tensors, do, names):
    """Hold a function's results and gradients to the error of eager PyTorch."""
    truth = results(
        eager, [x.double() if x.is_floating_point() else x for x in tensors], do.double()
    )
    q, k, v = (x.detach().flatten(0, -4).movedim(-3, -2) for x in tensors[:3])
    bounds = accumulator_scales(q, k, v, do, q.shape[-1] ** -0.5)
    for name, ours_, truth_, eager_ in zip(
        names, results(ours, tensors, do), truth, results(eager, tensors, do), strict=True
    ):
        assert ours_.dtype == eager_.dtype
        assert_within_budget(ours_, truth_, eager_, name=name, scale=bounds.get(name, 0.0))


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(-2, -3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize("has_pairs", [True, False])
def test_deepspeeds_function_is_its_formula_with_every_gradient(dtype, has_keys, has_pairs):
    batch, rows, tokens, heads, dim = 2, 3, 37, 4, 32
    q, k, v = (drawn(batch, rows, tokens, heads, dim, dtype=dtype, seed=i) for i in range(3))
    beside, names = [], ["o", "dq", "dk", "dv"]
    if has_keys:
        beside.append(drawn(batch, rows, 1, 1, tokens, dtype=dtype, seed=3))
        names.append("dbias")
    if has_pairs:
        beside.append(drawn(batch, 1, heads, tokens, tokens, dtype=dtype, seed=4))
        names.append("dbias")

    def ours(q, k, v, *biases):
        given = list(biases) if has_keys or not has_pairs else [None, *biases]
        return DS4Sci_EvoformerAttention(q, k, v, given)

    def eager(q, k, v, *biases):
        return heads_first(formula(*map(heads_first, (q, k, v)), *biases))

    do = drawn(*q.shape, dtype=dtype, seed=5, requires_grad=False)
    compare(ours, eager, [q, k, v, *beside], do, names)


def test_a_float32_bias_beside_16_bits_keeps_its_bits():
    q, k, v = (drawn(1, 2, 20, 2, 32, dtype=torch.bfloat16, seed=i) for i in range(3))
    keys = drawn(1, 2, 1, 1, 20, dtype=torch.float32, seed=3)
    with torch.no_grad():
        keys.mul_(30)  # bfloat16 would round each by up to 0.125

    def exact(x: Tensor) -> Tensor:
        s = heads_first(q).double() @ heads_first(k).double().mT * 32**-0.5 + x.double()
        return heads_first(torch.softmax(s, -1) @ heads_first(v).double())

    o = DS4Sci_EvoformerAttention(q, k, v, [keys])
    torch.testing.assert_close(o.double(), exact(keys), atol=0.02, rtol=0.01)
    rounded = exact(keys.bfloat16())
    assert (o - exact(keys)).abs().max() < (rounded - exact(keys)).abs().max() / 4
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    [got] = torch.autograd.grad(o, keys, do.to(o.dtype))
    [wanted] = torch.autograd.grad(exact(keys), keys, do.double())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [-1e9, -math.inf, -61440.0])
def test_masks_hide_keys_and_a_row_without_keys_is_finite(dtype, masked):
    q, k, v = (drawn(1, 3, 20, 2, 32, dtype=dtype, seed=i) for i in range(3))
    pairs = drawn(1, 1, 2, 20, 20, dtype=dtype, seed=3)
    keys = torch.zeros(1, 3, 1, 1, 20)
    keys[0, 0, ..., 7:] = masked
    keys[0, 1] = masked
    o = DS4Sci_EvoformerAttention(q, k, v, [keys.to(dtype), pairs])
    seen = DS4Sci_EvoformerAttention(
        q[:, :1], k[:, :1, :7], v[:, :1, :7], [None, pairs[..., :7].contiguous()]
    )
    tolerance = 1e-12 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(o[:, :1], seen, atol=tolerance, rtol=tolerance)
    unmasked = DS4Sci_EvoformerAttention(q, k, v, [None, pairs])
    torch.testing.assert_close(o[:, 1:], unmasked[:, 1:], atol=0.02, rtol=0.02)
    grads = torch.autograd.grad(o.sum(), (q, k, v, pairs))
    assert all(bool(g.isfinite().all()) for g in grads)
    assert bool((grads[1][0, 0, 7:] == 0).all())
    assert bool((grads[2][0, 0, 7:] == 0).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(24, 24), (9, 33)])
@pytest.mark.parametrize("has_mask", [True, False])
def test_cuequivariances_function_is_its_formula_with_every_gradient(
    dtype, queries, keys, has_mask
):
    batch, rows, heads, dim = 2, 3, 2, 32
    q = drawn(batch, rows, heads, queries, dim, dtype=dtype, seed=0)
    k, v = (drawn(batch, rows, heads, keys, dim, dtype=dtype, seed=i) for i in (1, 2))
    bias = drawn(batch, 1, heads, queries, keys, dtype=dtype, seed=3)
    mask = torch.rand(batch, rows, 1, 1, keys, generator=torch.Generator().manual_seed(4)) < 0.7
    mask[..., 0] = True

    def ours(q, k, v, bias):
        return triangle_attention(q, k, v, bias, mask if has_mask else None, 0.3)

    def eager(q, k, v, bias):
        hidden = torch.where(mask, 0.0, -math.inf) if has_mask else None
        return formula(q, k, v, bias, hidden, scale=0.3)

    do = drawn(*q.shape, dtype=dtype, seed=5, requires_grad=False)
    compare(ours, eager, [q, k, v, bias], do, ["o", "dq", "dk", "dv", "dbias"])


def test_one_batch_may_be_left_out_and_the_mask_may_be_numbers():
    q, k, v = (drawn(3, 2, 20, 16, dtype=torch.float32, seed=i) for i in range(3))
    bias = drawn(1, 2, 20, 20, dtype=torch.float32, seed=3)
    mask = (torch.arange(20) < 11).float().expand(3, 1, 1, 20)
    whole = triangle_attention(*(x[None] for x in (q, k, v, bias, mask.bool())))
    assert torch.equal(triangle_attention(q, k, v, bias, mask), whole[0])


def test_key_lengths_are_masks_of_the_first_keys():
    q, k, v = (drawn(2, 3, 2, 20, 16, dtype=torch.float32, seed=i) for i in range(3))
    bias = drawn(2, 1, 2, 20, 20, dtype=torch.float32, seed=3)
    lengths = torch.tensor([[20, 7, 1], [3, 0, 12]], dtype=torch.int32)
    mask = torch.arange(20) < lengths[..., None, None, None]
    o = triangle_attention(q, k, v, bias, kv_lengths=lengths[..., None, None, None])
    masked = triangle_attention(q, k, v, bias, mask)
    some = lengths > 0
    torch.testing.assert_close(o[some], masked[some])
    assert bool((o[1, 1] == 0).all())


def test_no_rows_and_no_batches_are_no_error():
    empty = torch.zeros(0, 4, 2, 8, 32)
    assert triangle_attention(empty, empty, empty, torch.zeros(0, 1, 2, 8, 8)).shape == empty.shape
    empty = torch.zeros(1, 0, 8, 2, 32)
    pairs = torch.zeros(1, 1, 2, 8, 8)
    assert DS4Sci_EvoformerAttention(empty, empty, empty, [None, pairs]).shape == empty.shape


def test_rows_share_the_bias_of_pairs_without_a_copy(monkeypatch):
    seen = []

    def attention(q, k, v, **options):
        seen.append((q, options["bias"]))
        return v

    monkeypatch.setattr("tilewise.integrations.evoformer.attention", attention)
    q = torch.zeros(1, 5, 16, 2, 32)
    pairs = torch.zeros(1, 1, 2, 16, 16)
    DS4Sci_EvoformerAttention(q, q, q, [torch.zeros(1, 5, 1, 1, 16), pairs])
    [(wide, bias)] = seen
    assert wide.shape == (5, 16, 2, 40)
    assert bias.shape == (1, 2, 16, 16)
    assert bias.data_ptr() == pairs.data_ptr()


class Watch(TorchDispatchMode):
    """Notes what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def watched(batch):
    """Return the names of torch's operations in a forward pass, and in a backward pass."""
    q, k, v = (drawn(batch, 3, 20, 2, 32, dtype=torch.float32, seed=i) for i in range(3))
    pairs = drawn(batch, 1, 2, 20, 20, dtype=torch.float32, seed=3)
    mask = torch.zeros(batch, 3, 1, 1, 20)
    with Watch() as forward:
        o = DS4Sci_EvoformerAttention(q, k, v, [mask, pairs])
    with Watch() as backward:
        torch.autograd.grad(o, (q, k, v, pairs), torch.ones_like(o))
    return forward.names, backward.names


def test_a_batch_of_one_copies_nothing_but_what_gets_more_channels():
    forward, backward = watched(1)
    views = {"view", "_unsafe_view", "slice", "squeeze", "unsqueeze", "alias", "detach"}
    assert set(forward) - views == {"key_bias_channels", "attention_fwd"}
    assert set(backward) - views - {"ones_like"} == {"attention_bwd"}


def test_gradients_of_several_batches_are_put_together_once():
    _, backward = watched(3)
    assert backward.count("stack") == 4
    assert not {"zeros", "new_zeros", "add", "select_backward", "copy_"} & set(backward)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda q, b: DS4Sci_EvoformerAttention(q, q, q, [b, b, b]), ValueError, "at most 2"),
        (lambda q, b: DS4Sci_EvoformerAttention(q[0, 0], q, q, []), ValueError, "4 dims or more"),
        (lambda q, b: DS4Sci_EvoformerAttention(q, q, q, [b]), ValueError, r"biases\[0\] must"),
        (lambda q, b: DS4Sci_EvoformerAttention(q, q, q, [None, q]), ValueError, r"biases\[1\]"),
        (lambda q, b: triangle_attention(q, q, q, q), ValueError, "bias must have shape"),
        (lambda q, b: triangle_attention(q[0, 0], q, q, b), ValueError, "4 or 5 dims"),
        (
            lambda q, b: triangle_attention(q, q, q, b, return_aux=True),
            UnsupportedError,
            "return_aux",
        ),
        (lambda q, b: triangle_attention(q, q, q, b, mask=q), ValueError, "mask must have shape"),
        (
            lambda q, b: triangle_attention(q, q, q, b, mask=q, kv_lengths=q),
            ValueError,
            "mask must be None when kv_lengths",
        ),
        (lambda q, b: triangle_attention(q, q, q, b, None, -1.0), ValueError, "scale must be"),
    ],
)
def test_what_is_refused(call, error, said):
    q = torch.zeros(1, 3, 2, 20, 16)
    with pytest.raises(error, match=said):
        call(q, torch.zeros(1, 1, 2, 20, 20))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [32, 24])
def test_on_a_gpu_both_biases_and_all_gradients_are_right(dtype, dim):
    batch, rows, tokens, heads = 1, 7, 150, 4
    shape = (batch, rows, tokens, heads, dim)
    q, k, v = (
        drawn(*shape, dtype=dtype, seed=i).detach().cuda().requires_grad_() for i in range(3)
    )
    keys = drawn(batch, rows, 1, 1, tokens, dtype=dtype, seed=3).detach().cuda()
    keys[:, 2:, ..., 90:] = -math.inf
    pairs = drawn(batch, 1, heads, tokens, tokens, dtype=dtype, seed=4).detach().cuda()
    do = drawn(*shape, dtype=dtype, seed=5).detach().cuda()
    tensors = [q, k, v, keys.requires_grad_(), pairs.requires_grad_()]
    compare(
        lambda q, k, v, *biases: DS4Sci_EvoformerAttention(q, k, v, biases),
        lambda q, k, v, *biases: heads_first(formula(*map(heads_first, (q, k, v)), *biases)),
        tensors,
        do,
        ["o", "dq", "dk", "dv", "dbias", "dbias"],
    )
