"""Recurrences and convolutions over sequences that ranks share, beside one device."""

from __future__ import annotations

import pytest
import torch

from tilewise.distributed import context_parallel_causal_conv1d, context_parallel_gated_delta
from tilewise.ops import causal_conv1d, gated_delta

KEY_HEADS, HEADS, K, V = 4, 8, 8, 12


def _own(x, rank, size, is_packed):
    return x.chunk(size, 0 if is_packed else 1)[rank]


def _beside_the_whole(run, run_whole, tensors, shared, rank, size, is_packed):
    """Return whether results have the bits of one device, and how far gradients are from its."""
    draw = torch.Generator().manual_seed(3)
    wholes = [x.clone().requires_grad_() for x in tensors]
    parts = [
        x.detach().clone() if i in shared else _own(x, rank, size, is_packed).clone()
        for i, x in enumerate(tensors)
    ]
    parts = [part.requires_grad_() for part in parts]
    want, got = run_whole(*wholes), run(*parts)
    do = torch.randn(want.shape, generator=draw, dtype=want.dtype)
    wanted = torch.autograd.grad(want, wholes, do)
    found = torch.autograd.grad(got, parts, _own(do, rank, size, is_packed))
    far = [
        (mine - _own(theirs, rank, size, is_packed)).abs().max().item()
        for i, (mine, theirs) in enumerate(zip(found, wanted, strict=True))
        if i not in shared
    ]
    sums = [found[i] for i in shared]
    for total in sums:
        torch.distributed.all_reduce(total)
    far += [(total - wanted[i]).abs().max().item() for i, total in zip(shared, sums, strict=True)]
    return [torch.equal(got, _own(want, rank, size, is_packed)), max(far)]


def delta(group, rank, size, *, tokens, edges=None, by_channel=False, dtype="float32"):
    """Compare the gated delta rule."""
    draw, kind = torch.Generator().manual_seed(7), getattr(torch, dtype)
    rows = (tokens,) if edges is not None else (2, tokens)

    def drawn(*shape):
        return torch.randn(*rows, *shape, generator=draw, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(drawn(KEY_HEADS, K), dim=-1) for _ in range(2))
    g = -torch.nn.functional.softplus(drawn(HEADS, K) if by_channel else drawn(HEADS))
    tensors = [x.to(kind) for x in (q, k, drawn(HEADS, V), g, drawn(HEADS).sigmoid())]
    whole = None if edges is None else torch.tensor(edges, dtype=torch.int32)
    return _beside_the_whole(
        lambda *x: context_parallel_gated_delta(*x, group=group, cu_seqlens=edges),
        lambda *x: gated_delta(*x, cu_seqlens=whole),
        tensors, (), rank, size, edges is not None,
    )  # fmt: skip


def convolution(group, rank, size, *, tokens, edges=None):
    """Compare a convolution with silu, whose weight all ranks have."""
    draw = torch.Generator().manual_seed(7)
    rows = (tokens,) if edges is not None else (2, tokens)
    shapes = ((*rows, 20), (20, 4), (20,))
    tensors = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    whole = None if edges is None else torch.tensor(edges, dtype=torch.int32)
    options = {"activation": "silu"}
    return _beside_the_whole(
        lambda *x: context_parallel_causal_conv1d(*x, group=group, cu_seqlens=edges, **options),
        lambda *x: causal_conv1d(*x, cu_seqlens=whole, **options),
        tensors, (1, 2), rank, size, edges is not None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("size", "values"),
    [
        (2, {"tokens": 128}),
        (4, {"tokens": 256, "by_channel": True}),
        (4, {"tokens": 256, "edges": [0, 64, 256]}),  # one that three ranks share, from their edges
        (2, {"tokens": 256, "edges": [0, 32, 64, 192, 256]}),
    ],
)
def test_a_shared_recurrence_has_the_bits_of_one_device(ranks, size, values):
    for is_equal, far in ranks.run(delta, size, **values):
        assert is_equal
        assert far < 2e-5


@pytest.mark.parametrize("edges", [None, [0, 3, 70, 71, 160], [0, 160]])
def test_parts_that_begin_anywhere_are_exact(ranks, edges):
    """In float64, as chunks of another rank begin elsewhere: gradients reach over all ranks."""
    for _, far in ranks.run(delta, 4, tokens=160, edges=edges, dtype="float64"):
        assert far < 1e-12


@pytest.mark.parametrize(
    ("tokens", "edges"), [(40, None), (40, [0, 9, 11, 40]), (8, None), (8, [0, 8])]
)
def test_a_shared_convolution_is_that_of_one_device(ranks, tokens, edges):
    """With four taps and two tokens a rank, a token is read two ranks later."""
    for is_equal, far in ranks.run(convolution, 4, tokens=tokens, edges=edges):
        assert is_equal
        assert far < 1e-12


def refused(group, rank, size, *, edges, heads):
    """Call with what one rank, or all, must refuse."""
    rows = torch.zeros(8, 2, 4)
    g = torch.zeros(8, heads[rank])
    v = torch.zeros(8, heads[rank], 4)
    context_parallel_gated_delta(rows, rows, v, g, g, group=group, cu_seqlens=edges)


@pytest.mark.parametrize(
    ("edges", "heads", "message"),
    [
        ([0, 4, 8], [2, 2], "cu_seqlens must ascend from 0 to T = 16, got [0, 4, 8]"),
        ([0, 16], [2, 4], "v must be of one shape and dtype on all ranks"),
    ],
)
def test_what_ranks_cannot_share_is_refused_on_all(ranks, edges, heads, message):
    for answer in ranks.run(refused, 2, edges=edges, heads=heads):
        assert answer["error"][0] == "ValueError"
        assert message in answer["error"][1]
