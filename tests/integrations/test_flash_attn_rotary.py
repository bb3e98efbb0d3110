"""flash_attn.layers.rotary.apply_rotary_emb() against pairs turned one by one."""

from __future__ import annotations

import pytest
import torch

from tilewise.integrations.flash_attn.layers.rotary import apply_rotary_emb


def _turned(x, cos, sin, positions, interleaved):
    """Turn x (T, H, D), in float64, token by token; positions past the tables stay."""
    x, half = x.double().clone(), cos.shape[1]
    for token, position in enumerate(positions):
        if position >= cos.shape[0]:
            continue
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            c, s = cos[position, i].double(), sin[position, i].double()
            first, second = x[token, :, a].clone(), x[token, :, b].clone()
            x[token, :, a] = first * c - second * s
            x[token, :, b] = first * s + second * c
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, (2, 5)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_turns_each_token_by_its_position(packed, offsets, interleaved, inplace, dtype):
    lengths = [4, 6] if packed else [6, 6]
    angles = torch.randn(9, 4)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    x = torch.randn(sum(lengths), 3, 12).to(dtype)
    shifts = offsets if isinstance(offsets, tuple) else (offsets, offsets)
    positions = [
        i + shift for shift, length in zip(shifts, lengths, strict=True) for i in range(length)
    ]
    want = _turned(x, cos, sin, positions, interleaved)
    given = x.clone() if packed else x.clone().view(2, 6, 3, 12)
    options = {"interleaved": interleaved, "inplace": inplace}
    options["seqlen_offsets"] = torch.tensor(offsets) if isinstance(offsets, tuple) else offsets
    if packed:
        options |= {"cu_seqlens": torch.tensor([0, 4, 10], dtype=torch.int32), "max_seqlen": 6}
    got = apply_rotary_emb(given, cos, sin, **options)
    assert (got is given) == inplace
    assert got.shape == given.shape
    assert got.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(got.view(x.shape).double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("inplace", [False, True])
def test_the_gradient_turns_back(inplace):
    angles, x = torch.randn(6, 4), torch.randn(2, 6, 3, 12, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    got = apply_rotary_emb(leaf * 1, angles.cos(), angles.sin(), inplace=inplace)
    do = torch.randn_like(got)
    (grad,) = torch.autograd.grad(got, leaf, do)
    torch.testing.assert_close(grad, apply_rotary_emb(do, angles.cos(), -angles.sin()))


def _leaf(x):
    return x, x


def _view_of_a_leaf(x):
    return x, x[:, 1:]


def _one_of_several_views(x):
    return x, torch.stack([x, x + 1, x + 2], 2).unbind(2)[1]


def _part_of_a_split(x):
    return x, (x * 1).split([2, 1], 2)[0]


@pytest.mark.parametrize("made", [_leaf, _view_of_a_leaf, _one_of_several_views, _part_of_a_split])
@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place_where_torch_lets_no_graph_write(made, interleaved):
    angles = torch.randn(6, 4)
    cos, sin = angles.cos(), angles.sin()
    start = torch.randn(2, 6, 3, 12, dtype=torch.float64)
    leaf, given = made(start.clone().requires_grad_())
    other, same = made(start.clone().requires_grad_())
    want = apply_rotary_emb(same, cos, sin, interleaved=interleaved)
    before = given.data_ptr()
    got = apply_rotary_emb(given, cos, sin, interleaved=interleaved, inplace=True)
    assert got.data_ptr() == before
    assert torch.equal(got, want)
    assert torch.equal(given, want)  # x holds the result
    do = torch.randn_like(want)
    got.backward(do)
    want.backward(do)
    assert torch.equal(leaf.grad, other.grad)


def test_a_graph_that_needs_the_old_values_says_so():
    angles, x = torch.randn(6, 4), torch.randn(2, 6, 3, 12, requires_grad=True)
    square = x.square()  # its gradient needs x as it was
    apply_rotary_emb(x, angles.cos(), angles.sin(), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


def test_strided_channels():
    angles, x = torch.randn(6, 4), torch.randn(2, 12, 3, 6).transpose(1, 3)
    got = apply_rotary_emb(x, angles.cos(), angles.sin())
    assert torch.equal(got, apply_rotary_emb(x.contiguous(), angles.cos(), angles.sin()))


X, TABLE, CU = torch.zeros(2, 6, 3, 12), torch.zeros(6, 4), torch.tensor([0, 4, 6]).int()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X, TABLE[:5], TABLE[:5]), ValueError, "cos must have at least 6 rows, got 5"),
        ((X, TABLE, TABLE[:, :3]), ValueError, "sin must have shape"),
        ((X[0], TABLE, TABLE), ValueError, r"x must be \(B, S, H, D\)"),
        ((X[0], TABLE, TABLE, False, False, 0, CU), ValueError, "max_seqlen must be given"),
        ((X, TABLE, TABLE, False, False, torch.zeros(2)), TypeError, "seqlen_offsets must be int"),
        ((X, TABLE, TABLE, False, False, CU), ValueError, "seqlen_offsets must have shape"),
    ],
)
def test_refusals(arguments, error, message):
    with pytest.raises(error, match=message):
        apply_rotary_emb(*arguments)
