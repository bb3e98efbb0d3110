"""The oracle against torch's SDPA, a loop over rows, autograd, and numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tilewise.reference.standard import (
    attention,
    attention_backward,
    attention_varlen,
    resolve_window,
    visible_keys,
)
from tilewise.testing import make_qkv

F64 = torch.float64
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def sees(i: int, j: int, seqlen_q: int, seqlen_k: int, causal: bool, window: object) -> bool:
    """Say the rule of section 4 of the design in words: bottom-right aligned, w includes self."""
    own = i + seqlen_k - seqlen_q
    if not 0 <= j < seqlen_k or (causal and j > own):
        return False
    if isinstance(window, int):
        return own - window < j <= own
    left, right = window if isinstance(window, tuple) else (None, None)
    too_far_left = left not in (None, -1) and j < own - left
    too_far_right = right not in (None, -1) and j > own + right
    return not too_far_left and not too_far_right


def row_by_row(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """Compute attention of each row from a list of the keys it sees, with the math module."""
    batch, seqlen_q, num_heads, head_dim = q.shape
    group_size = num_heads // k.shape[2]
    scale = options.get("softmax_scale") or head_dim**-0.5
    softcap = options.get("softcap", 0.0)
    o = torch.zeros(batch, seqlen_q, num_heads, v.shape[3], dtype=F64)
    lse = torch.full((batch, num_heads, seqlen_q), -math.inf, dtype=F64)
    full = (batch, num_heads, seqlen_q, k.shape[1])
    bias, mask, keep = (
        None if options.get(name) is None else options[name].expand(full)
        for name in ("bias", "mask", "keep_mask")
    )
    for b in range(batch):
        length = k.shape[1] if "seqlens_k" not in options else int(options["seqlens_k"][b])
        for h in range(num_heads):
            for i in range(seqlen_q):
                weights, values = [], []
                for j in range(length):
                    causal, window = options.get("causal", False), options.get("window")
                    if not sees(i, j, seqlen_q, length, causal, window):
                        continue
                    if mask is not None and not mask[b, h, i, j]:
                        continue
                    s = scale * float(q[b, i, h] @ k[b, j, h // group_size])
                    s = softcap * math.tanh(s / softcap) if softcap else s
                    s += 0.0 if bias is None else float(bias[b, h, i, j])
                    if options.get("alibi_slopes") is not None:
                        s -= float(options["alibi_slopes"][h]) * abs(i + length - seqlen_q - j)
                    kept = 1.0
                    if keep is not None:
                        kept = float(keep[b, h, i, j]) / (1 - options["dropout_p"])
                    weights.append(math.exp(s))
                    values.append(kept * v[b, j, h // group_size])
                total = sum(weights)
                if options.get("sinks") is not None:
                    total += math.exp(float(options["sinks"][h]))
                if total > 0:
                    lse[b, h, i] = math.log(total)
                for weight, value in zip(weights, values, strict=True):
                    o[b, i, h] += weight / total * value
    return o, lse


def tensors(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


HEADS, BATCH, SQ, SK = 4, 2, 5, 7
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "causal_more_queries_than_keys": {"causal": True, "shape": (BATCH, 7, 4)},
    "window_of_one": {"window": 1},
    "window_of_three": {"window": 3},
    "window_left_only": {"window": (2, None)},
    "window_right_only": {"window": (-1, 1)},
    "window_both_sides": {"window": (1, 2)},
    "window_with_causal_ignores_right": {"window": (2, 2), "causal": True},
    "window_that_empties_rows": {"window": (0, 0), "shape": (BATCH, 9, 3)},
    "own_scale": {"softmax_scale": 0.3},
    "softcap": {"softcap": 1.5},
    "softcap_causal_sinks": {"softcap": 0.7, "causal": True, "sinks": tensors(1, HEADS)},
    "bias_full": {"bias": tensors(2, BATCH, HEADS, SQ, SK)},
    "bias_over_keys_only": {"bias": tensors(3, 1, 1, 1, SK), "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 2.0]), "causal": True},
    "alibi_both_sides": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 2.0])},
    "sinks": {"sinks": tensors(4, HEADS)},
    "sinks_with_empty_rows": {"sinks": tensors(5, HEADS), "causal": True, "shape": (BATCH, 6, 3)},
    "mask_per_head": {"mask": tensors(6, 1, HEADS, SQ, SK) > 0},
    "mask_that_empties_rows": {"mask": (torch.arange(SQ) > 1).view(1, 1, SQ, 1)},
    "seqlens_k": {"seqlens_k": torch.tensor([3, 7]), "causal": True},
    "seqlens_k_of_zero": {"seqlens_k": torch.tensor([0, 6])},
    "seqlens_k_with_window_and_alibi": {
        "seqlens_k": torch.tensor([2, 6]),
        "window": 2,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 2.0]),
    },
    "dropout": {"keep_mask": tensors(7, BATCH, HEADS, SQ, SK) > -0.5, "dropout_p": 0.3},
    "multi_query": {"num_kv_heads": 1, "causal": True},
    "multi_head": {"num_kv_heads": HEADS},
    "one_query": {"shape": (BATCH, 1, 9), "causal": True},
    "one_key": {"shape": (1, 3, 1)},
    "no_keys": {"shape": (1, 3, 0), "sinks": tensors(8, HEADS)},
    "wide_values": {"v_head_dim": 11, "causal": True},
    "everything": {
        "window": (3, 1),
        "softcap": 2.0,
        "softmax_scale": 0.4,
        "bias": tensors(9, 1, HEADS, SQ, 1),
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 2.0]),
        "sinks": tensors(10, HEADS),
        "mask": tensors(11, BATCH, 1, SQ, SK) > -1,
        "seqlens_k": torch.tensor([7, 2]),
        "keep_mask": tensors(12, BATCH, HEADS, SQ, SK) > -1,
        "dropout_p": 0.1,
    },
}


def build(name: str) -> tuple[Tensor, Tensor, Tensor, dict]:
    options = dict(CASES[name])
    shape = options.pop("shape", (BATCH, SQ, SK))
    num_kv_heads = options.pop("num_kv_heads", 2)
    v_head_dim = options.pop("v_head_dim", None)
    qkv = make_qkv(*shape, HEADS, num_kv_heads, 6, v_head_dim=v_head_dim, dtype=F64)
    return *qkv, options


@pytest.mark.parametrize("name", CASES)
def test_equals_a_loop_over_the_visible_keys(name):
    q, k, v, options = build(name)
    o, lse = attention(q, k, v, return_lse=True, **options)
    want_o, want_lse = row_by_row(q, k, v, **options)
    torch.testing.assert_close(o, want_o, **EXACT)
    torch.testing.assert_close(lse, want_lse, **EXACT)


@pytest.mark.parametrize("name", CASES)
def test_printed_backward_equals_autograd(name):
    q, k, v, options = build(name)
    leaves = {"q": q, "k": k, "v": v} | {
        key: options[key] for key in ("bias", "sinks") if key in options
    }
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in leaves.items()}
    options = {key: leaves.get(key, value) for key, value in options.items()}
    o, lse = attention(leaves["q"], leaves["k"], leaves["v"], return_lse=True, **options)
    do, dlse = tensors(20, *o.shape), tensors(21, *lse.shape)
    torch.autograd.backward([o, lse], [do, dlse])
    with torch.no_grad():
        got = attention_backward(do, leaves["q"], leaves["k"], leaves["v"], dlse=dlse, **options)
    for key, gradient in zip(("q", "k", "v", "bias", "sinks"), got, strict=True):
        assert (gradient is None) == (key not in leaves), key
        if gradient is not None:
            torch.testing.assert_close(gradient, leaves[key].grad, **EXACT, msg=f"d{key}")


@pytest.mark.parametrize("name", ["causal", "softcap_causal_sinks", "window_that_empties_rows"])
def test_gradcheck(name):
    q, k, v, options = build(name)
    sinks = options.pop("sinks", tensors(30, HEADS))
    bias = tensors(31, 1, HEADS, 1, k.shape[1])

    def call(q, k, v, bias, sinks):
        return attention(q, k, v, bias=bias, sinks=sinks, return_lse=True, **options)

    inputs = tuple(t.requires_grad_() for t in (q, k, v, bias, sinks))
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_torch_sdpa(causal, num_kv_heads):
    q, k, v = make_qkv(2, 6, 6, 4, num_kv_heads, 8, dtype=F64)
    want = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
    )
    got = attention(q, k, v, causal=causal)
    torch.testing.assert_close(got, want.transpose(1, 2), **EXACT)


def test_equals_torch_sdpa_with_a_mask_and_a_scale():
    q, k, v = make_qkv(2, 5, 7, 4, 4, 8, dtype=F64)
    mask = tensors(1, 2, 1, 5, 7) > -0.5
    mask[..., 0] = True
    want = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, scale=0.7
    )
    got = attention(q, k, v, mask=mask, softmax_scale=0.7)
    torch.testing.assert_close(got, want.transpose(1, 2), **EXACT)


def test_a_sink_is_one_more_key_whose_value_is_zero():
    q, k, v = make_qkv(2, 5, 7, 4, 4, 8, dtype=F64)
    sinks = tensors(1, 4)
    bias = torch.cat([torch.zeros(4, 5, 7, dtype=F64), sinks.view(4, 1, 1).expand(4, 5, 1)], -1)
    nothing = torch.zeros(2, 1, 4, 8, dtype=F64)
    want = scaled_dot_product_attention(
        q.transpose(1, 2),
        torch.cat([k, nothing], 1).transpose(1, 2),
        torch.cat([v, nothing], 1).transpose(1, 2),
        attn_mask=bias.unsqueeze(0),
    )
    torch.testing.assert_close(attention(q, k, v, sinks=sinks), want.transpose(1, 2), **EXACT)


def test_three_tokens_by_hand():
    """Scores log 1, log 2, log 3 make weights 1/6, 2/6, 3/6 of the values 6, 12, 18."""
    q = torch.ones(1, 3, 1, 1, dtype=F64)
    k = torch.tensor([1.0, 2.0, 3.0], dtype=F64).log().view(1, 3, 1, 1)
    v = torch.tensor([6.0, 12.0, 18.0], dtype=F64).view(1, 3, 1, 1)
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    want = [6.0, (1 * 6 + 2 * 12) / 3, (1 * 6 + 2 * 12 + 3 * 18) / 6]
    torch.testing.assert_close(o.flatten(), torch.tensor(want, dtype=F64), **EXACT)
    torch.testing.assert_close(lse.exp().flatten(), torch.tensor([1.0, 3, 6], dtype=F64), **EXACT)
    # u = o do; ds = p (dp - u); the last row: p = 1/6, 1/3, 1/2, dp - u = -8, -2, 4.
    do = torch.tensor([0.0, 0.0, 1.0], dtype=F64).view(1, 3, 1, 1)
    dq, dk, dv, dbias, dsinks = attention_backward(do, q, k, v, causal=True)
    want_ds = torch.tensor([-8 / 6, -2 / 3, 2.0], dtype=F64)
    torch.testing.assert_close(dk.flatten(), want_ds, **EXACT)
    torch.testing.assert_close(dq.flatten()[2], want_ds @ k.flatten(), **EXACT)
    torch.testing.assert_close(dv.flatten(), torch.tensor([1 / 6, 1 / 3, 1 / 2], dtype=F64))
    assert dbias is None
    assert dsinks is None


def test_visibility_by_hand():
    q, k = torch.zeros(1, 2, 1, 1), torch.zeros(1, 4, 1, 1)
    rows = visible_keys(q, k, causal=True).int()[0, 0].tolist()
    assert rows == [[1, 1, 1, 0], [1, 1, 1, 1]]
    rows = visible_keys(q, k, window=2).int()[0, 0].tolist()
    assert rows == [[0, 1, 1, 0], [0, 0, 1, 1]]
    rows = visible_keys(q, k, causal=True, seqlens_k=torch.tensor([3])).int()[0, 0].tolist()
    assert rows == [[1, 1, 0, 0], [1, 1, 1, 0]]


@pytest.mark.parametrize(
    ("causal", "window", "resolved"),
    [
        (False, None, (-1, -1)),
        (True, None, (-1, 0)),
        (False, 1, (0, 0)),
        (False, 4, (3, 0)),
        (False, (2, None), (2, -1)),
        (False, (None, -1), (-1, -1)),
        (True, (5, 3), (5, 0)),
    ],
)
def test_windows_resolve_to_a_left_and_a_right(causal, window, resolved):
    assert resolve_window(causal, window) == resolved


def test_empty_rows_are_zero_with_zero_gradients():
    q, k, v = make_qkv(1, 6, 3, 2, 1, 4, dtype=F64, requires_grad=True)
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    assert bool((o[:, :3] == 0).all())
    assert bool((lse[:, :, :3] == -math.inf).all())
    o.sum().backward()
    assert bool((q.grad[:, :3] == 0).all())
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v))
    assert bool(q.grad[:, 4:].any())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["future", "past_seqlen", "hidden_by_mask"])
def test_unseen_keys_cannot_leak(where, poison):
    clean = make_qkv(2, 6, 6, 4, 2, 8, dtype=F64)
    options = {
        "future": {"causal": True},
        "past_seqlen": {"seqlens_k": torch.tensor([4, 5])},
        "hidden_by_mask": {"mask": (torch.arange(6) != 3).expand(6, 6)},
    }[where]
    hidden, unharmed = {
        "future": ((slice(None), slice(4, 5)), slice(0, 4)),
        "past_seqlen": ((slice(None), slice(5, 6)), slice(None)),
        "hidden_by_mask": ((slice(None), slice(3, 4)), slice(None)),
    }[where]
    dirty = [x.clone() for x in clean]
    dirty[1][hidden], dirty[2][hidden] = poison, poison
    do = tensors(1, 2, 6, 4, 8)
    do[:, [i for i in range(6) if i not in range(6)[unharmed]]] = 0
    results = []
    for inputs in (clean, dirty):
        leaves = [x.clone().requires_grad_() for x in inputs]
        o, lse = attention(*leaves, return_lse=True, **options)
        rows = range(6)[unharmed]
        used = (o[:, rows] * do[:, rows]).sum() + lse[..., rows].sum()
        used.backward()
        results.append([o[:, rows], lse[..., rows], leaves[0].grad[:, rows]])
        printed = attention_backward(do, *inputs, **options)
        results[-1].append(printed[0][:, rows])
        if where != "future":
            results[-1] += [leaves[1].grad, leaves[2].grad, printed[1], printed[2]]
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, **EXACT)


def test_seen_nan_is_not_hidden():
    q, k, v = make_qkv(1, 4, 4, 1, 1, 4, dtype=F64)
    v[0, 2] = math.nan
    o = attention(q, k, v, causal=True)
    assert bool(o[0, :2].isfinite().all())
    assert bool(o[0, 2:].isnan().all())


def test_minus_infinity_in_the_bias_hides_a_key():
    q, k, v = make_qkv(1, 4, 4, 2, 2, 4, dtype=F64, requires_grad=True)
    hidden = torch.tensor([[0, 0, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]]).bool()
    bias = torch.zeros(4, 4, dtype=F64).masked_fill(hidden, -math.inf)
    o, lse = attention(q, k, v, bias=bias, return_lse=True)
    want, want_lse = attention(q, k, v, mask=~hidden, return_lse=True)
    torch.testing.assert_close(o, want, **EXACT)
    torch.testing.assert_close(lse, want_lse, **EXACT)
    o.sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v))


def test_large_scores_do_not_overflow():
    q, k, v = make_qkv(1, 3, 5, 1, 1, 4, dtype=F64)
    o, lse = attention(1e4 * q, k, v, return_lse=True)
    assert bool(o.isfinite().all())
    assert float(lse.abs().max()) > 1e3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_computes_in_the_dtype_of_its_inputs(dtype):
    q, k, v = make_qkv(1, 5, 5, 2, 1, 8, dtype=dtype)
    o, lse = attention(q, k, v, causal=True, softcap=5.0, sinks=torch.zeros(2), return_lse=True)
    assert o.dtype == dtype
    assert lse.dtype == torch.float32
    truth = attention(
        *(x.double() for x in (q, k, v)), causal=True, softcap=5.0, sinks=torch.zeros(2)
    )
    error = float((o.double() - truth).abs().max())
    assert 0 < error < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["causal", "window", "everything"])
def test_varlen_equals_each_sequence_alone(name):
    options = {
        "causal": {"causal": True},
        "window": {"window": (2, 1)},
        "everything": {
            "causal": True,
            "bias": tensors(1, 4, 1, 5, 7),
            "mask": tensors(2, 1, 4, 5, 7) > -1,
            "sinks": tensors(3, 4),
            "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 2.0]),
            "softcap": 3.0,
            "keep_mask": tensors(4, 4, 4, 5, 7) > -1,
            "dropout_p": 0.2,
        },
    }[name]
    lengths_q, lengths_k = [3, 0, 5, 2], [4, 2, 7, 0]
    q, k, v = make_qkv(1, 10 + 1, 13, 4, 2, 6, dtype=F64)  # one row of q belongs to nobody
    cu_seqlens_q, cu_seqlens_k = torch.tensor([0, 3, 3, 8, 10]), torch.tensor([0, 4, 6, 13, 13])
    o, lse = attention_varlen(
        q[0],
        k[0],
        v[0],
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        return_lse=True,
        **options,
    )
    assert o.shape == (11, 4, 6)
    assert lse.shape == (4, 11)
    assert bool((o[10:] == 0).all())
    assert bool((lse[:, 10:] == -math.inf).all())
    for b, (n, m) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        keys = slice(int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1]))
        own = {
            key: x[(b if x.shape[0] > 1 else 0) :][:1, :, :n, :m]
            if key in ("bias", "mask", "keep_mask")
            else x
            for key, x in options.items()
        }
        want, want_lse = row_by_row(q[:, rows], k[:, keys], v[:, keys], **own)
        torch.testing.assert_close(o[rows], want[0], **EXACT)
        torch.testing.assert_close(lse[:, rows], want_lse[0], **EXACT)


def test_varlen_seqlens_k_shortens_a_sequence():
    q, k, v = make_qkv(1, 4, 9, 2, 2, 4, dtype=F64)
    k[0, 3:5], v[0, 3:5] = math.nan, math.nan
    o = attention_varlen(
        q[0],
        k[0],
        v[0],
        cu_seqlens_q=torch.tensor([0, 2, 4]),
        cu_seqlens_k=torch.tensor([0, 5, 9]),
        seqlens_k=torch.tensor([3, 4]),
        causal=True,
    )
    want = attention(q[:, :2], k[:, :3], v[:, :3], causal=True)
    torch.testing.assert_close(o[:2], want[0], **EXACT)
    want = attention(q[:, 2:], k[:, 5:], v[:, 5:], causal=True)
    torch.testing.assert_close(o[2:], want[0], **EXACT)
