"""memory_efficient_attention by xformers' names against its formula, for every mask."""

from __future__ import annotations

import pytest
import torch

from tilewise.errors import UnsupportedError
from tilewise.integrations import xformers_ops as xops

ATOL = 1e-5


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, requires_grad=True)


def formula(q, k, v, visible=None, bias=None, scale=None):
    """(B, M, H, K) attention with the scores in memory."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if bias is None else s + bias
    s = s if visible is None else s.masked_fill(~visible, float("-inf"))
    return (torch.softmax(s, -1).nan_to_num() @ v).transpose(1, 2)


def distance(queries, keys, offset=0):
    """How far key j lies to the left of query i."""
    return torch.arange(queries)[:, None] + offset - torch.arange(keys)


MASKS = {
    "none": (None, lambda d: d == d),
    "triangular": (xops.LowerTriangularMask(), None),
    "bottom_right": (xops.LowerTriangularFromBottomRightMask(), lambda d: d >= 0),
    "local": (
        xops.LowerTriangularFromBottomRightMask().make_local_attention(5),
        lambda d: (d >= 0) & (d < 5),
    ),
    "both_sides": (
        xops.LocalAttentionFromBottomRightMask(window_left=4, window_right=2),
        lambda d: (d <= 4) & (d >= -2),
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("queries", "keys"), [(20, 20), (9, 26), (26, 9)])
def test_masks_show_what_they_say_with_gradients(name, queries, keys):
    mask, rule = MASKS[name]
    q, k, v = drawn(2, queries, 3, 16), drawn(2, keys, 3, 16, seed=1), drawn(2, keys, 3, 16, seed=2)
    visible = distance(queries, keys) >= 0  # of the triangular one, from the top left
    if rule is not None:
        visible = rule(distance(queries, keys, keys - queries))
    truth = formula(q, k, v, visible)
    o = xops.memory_efficient_attention(q, k, v, mask)
    torch.testing.assert_close(o, truth, atol=ATOL, rtol=0)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(3))
    for ours, theirs in zip(
        torch.autograd.grad(o, (q, k, v), do), torch.autograd.grad(truth, (q, k, v), do),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(ours, theirs, atol=ATOL, rtol=0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(12, 12), (8, 16), (16, 8)])
def test_a_tensor_is_added_to_the_logits(is_causal, queries, keys):
    q, k, v = drawn(2, queries, 3, 16), drawn(2, keys, 3, 16, seed=1), drawn(2, keys, 3, 16, seed=2)
    bias = drawn(2, 3, queries, keys, seed=3)
    mask = xops.LowerTriangularMask().add_bias(bias) if is_causal else bias
    visible = distance(queries, keys) >= 0 if is_causal else None
    o = xops.memory_efficient_attention(q, k, v, mask, scale=0.5)
    truth = formula(q, k, v, visible, bias, 0.5)
    torch.testing.assert_close(o, truth, atol=ATOL, rtol=0)
    [ours] = torch.autograd.grad(o.sum() + (o * o).sum(), bias)
    [theirs] = torch.autograd.grad(truth.sum() + (truth * truth).sum(), bias)
    torch.testing.assert_close(ours, theirs, atol=ATOL, rtol=0)


def test_three_dims_are_one_head_and_five_are_groups():
    q, k = drawn(2, 10, 16), drawn(2, 14, 16, seed=1)
    o = xops.memory_efficient_attention(q, k, k)
    truth = formula(q[:, :, None], k[:, :, None], k[:, :, None])[:, :, 0]
    torch.testing.assert_close(o, truth, atol=ATOL, rtol=0)
    q, k = drawn(2, 10, 2, 3, 16), drawn(2, 14, 2, 1, 16, seed=1)
    o = xops.memory_efficient_attention(q, k.expand(2, 14, 2, 3, 16), k.expand(2, 14, 2, 3, 16))
    heads = k.expand(2, 14, 2, 3, 16).flatten(2, 3)
    truth = formula(q.flatten(2, 3), heads, heads).unflatten(2, (2, 3))
    torch.testing.assert_close(o, truth, atol=ATOL, rtol=0)
    own = drawn(2, 14, 2, 3, 16, seed=2)  # heads of their own in each group
    o = xops.memory_efficient_attention(q, own, own)
    truth = formula(q.flatten(2, 3), own.flatten(2, 3), own.flatten(2, 3)).unflatten(2, (2, 3))
    torch.testing.assert_close(o, truth, atol=ATOL, rtol=0)


@pytest.mark.parametrize("kind", ["whole", "causal", "bottom_right"])
def test_packed_sequences_attend_within_themselves(kind):
    parts = [drawn(1, n, 2, 16, seed=n) for n in (5, 11, 1)]
    mask, packed = xops.BlockDiagonalMask.from_tensor_list(parts)
    keys = packed
    if kind == "bottom_right":
        mask = xops.BlockDiagonalMask.from_seqlens([5, 11, 1], [7, 12, 4])
        keys = drawn(1, 23, 2, 16, seed=9)
        mask = mask.make_causal_from_bottomright()
    elif kind == "causal":
        mask = mask.make_causal()
    o = xops.memory_efficient_attention(packed, keys, keys, mask)
    edges = mask.k_seqinfo.seqstart_py
    for i, (part, got) in enumerate(zip(parts, mask.split(o), strict=True)):
        own = keys[:, edges[i] : edges[i + 1]]
        n, m = part.shape[1], own.shape[1]
        visible = None if kind == "whole" else distance(n, m, m - n) >= 0
        torch.testing.assert_close(got, formula(part, own, own, visible), atol=ATOL, rtol=0)


def test_padded_keys_are_a_cache_that_is_read_in_place():
    lengths, padding = [3, 8, 1], 8
    q = drawn(1, 6, 4, 16).detach()  # 2, 3 and 1 new tokens
    k = drawn(1, 24, 2, 16, seed=1).detach()
    for i, length in enumerate(lengths):
        k[0, i * padding + length : (i + 1) * padding] = float("nan")
    mask = xops.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([2, 3, 1], 8, lengths)
    o = xops.memory_efficient_attention(q, k, k, mask)
    for i, (begin, end) in enumerate([(0, 2), (2, 5), (5, 6)]):
        own = k[:, i * padding : i * padding + lengths[i]].repeat_interleave(2, dim=2)
        n = end - begin
        visible = distance(n, lengths[i], lengths[i] - n) >= 0
        truth = formula(q[:, begin:end], own, own, visible)
        torch.testing.assert_close(o[:, begin:end], truth, atol=ATOL, rtol=0)


def test_the_result_may_have_another_dtype_and_dropout_drops():
    q = drawn(1, 32, 2, 16)
    assert xops.memory_efficient_attention(q, q, q, output_dtype=torch.float64).dtype.itemsize == 8
    torch.manual_seed(0)
    dropped = xops.memory_efficient_attention(q, q, q, p=0.5)
    assert not torch.allclose(dropped, xops.memory_efficient_attention(q, q, q))


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda q: xops.memory_efficient_attention(q, q[0], q), ValueError, "3, 4 or 5 dims"),
        (
            lambda q: xops.memory_efficient_attention(q, q, q, xops.AttentionBias()),
            UnsupportedError,
            "attn_bias must be a tensor or a mask",
        ),
        (
            lambda q: xops.memory_efficient_attention(
                q, q, q, xops.BlockDiagonalMask.from_seqlens([4, 4])
            ),
            ValueError,
            r"packed tensors must have shape \(1, 8",
        ),
        (
            lambda q: xops.memory_efficient_attention(
                q, q, q, xops.BlockDiagonalMask.from_seqlens([4], [5]).make_causal()
            ),
            UnsupportedError,
            "as many keys as queries",
        ),
        (lambda q: xops.BlockDiagonalMask.from_seqlens([4], [5, 6]), ValueError, "kv_seqlen must"),
        (
            lambda q: xops.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([1], 4, [5]),
            ValueError,
            "kv_seqlen must be at most 4",
        ),
    ],
)
def test_what_is_refused(call, error, said):
    with pytest.raises(error, match=said):
        call(torch.zeros(2, 8, 2, 16))


def test_masks_of_xformers_itself_are_known_by_name():
    class LowerTriangularFromBottomRightMask:
        """As xformers' own, which is no class of ours."""

    q = drawn(1, 9, 2, 16)
    ours = xops.memory_efficient_attention(q, q, q, xops.LowerTriangularFromBottomRightMask())
    theirs = xops.memory_efficient_attention(q, q, q, LowerTriangularFromBottomRightMask())
    assert torch.equal(ours, theirs)
