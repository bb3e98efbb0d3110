"""ring_attention and ulysses_attention beside one device: results, gradients, refusals."""

from __future__ import annotations

import time

import pytest
import torch

from tilewise.distributed import ring_attention, shard_sequence, ulysses_attention
from tilewise.testing import accumulator_scales, budget_violation

FUNCTIONS = {"ring": ring_attention, "ulysses": ulysses_attention}
NAMES = ("o", "lse", "dq", "dk", "dv")


def _eager(q, k, v, seen, scale):
    """Attention over the whole sequence by the book: o (B, S, Hq, Dv), lse (B, Hq, S)."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(t.transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    s = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    return (s.softmax(-1) @ v).transpose(1, 2), s.logsumexp(-1)


def _seen(tokens, causal, window, documents):
    left, right = (window - 1, 0) if isinstance(window, int) else window or (None, None)
    right = 0 if causal else right
    distance = torch.arange(tokens)[None, :] - torch.arange(tokens)[:, None]
    seen = torch.ones(tokens, tokens, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    if documents is not None:
        number = torch.bucketize(torch.arange(tokens), torch.tensor(documents[1:]), right=True)
        seen &= number[:, None] == number[None, :]
    return seen


def _differentiated(run, leaves, do, dlse):
    leaves = [t.detach().requires_grad_() for t in leaves]
    o, lse = run(*leaves)
    grads = torch.autograd.grad((o, lse), leaves, (do.to(o.dtype), dlse.to(lse.dtype)))
    return [t.detach() for t in (o, lse, *grads)]


def _drawn(heads, tokens, dims, batch, dtype):
    generator = torch.Generator().manual_seed(tokens + heads[0])
    shapes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]), (heads[0], dims[1])]
    q, k, v, do = (torch.randn(batch, tokens, *s, generator=generator).to(dtype) for s in shapes)
    return q, k, v, do, torch.randn(batch, heads[0], tokens, generator=generator)


def compare(group, rank, size, *, method, layout="zigzag", heads=(4, 2), tokens=48,
            dtype="float32", dims=(16, 16), batch=2, documents=None, window=None, causal=True,
            scale=0.3, on_gpu=False, **options):  # fmt: skip
    """Compute a rank's part of all results; return how they break the budget, by name."""
    window = tuple(window) if isinstance(window, list) else window
    batch = 1 if documents else batch
    *inputs, do, dlse = _drawn(heads, tokens, dims, batch, getattr(torch, dtype))
    seen = _seen(tokens, causal, window, documents)

    def part(x, dim=1):
        own = shard_sequence(x, rank, size, dim=dim, layout=layout).contiguous()
        return own.to(f"cuda:{rank}") if on_gpu else own

    def run(q, k, v):
        if documents:
            q, k, v = (t.squeeze(0) for t in (q, k, v))
        o, lse = FUNCTIONS[method](
            q, k, v, group=group, causal=causal, window=window, softmax_scale=scale,
            cu_seqlens=documents, layout=layout, return_lse=True, **options,
        )  # fmt: skip
        return (o.unsqueeze(0), lse.unsqueeze(0)) if documents else (o, lse)

    mine = (*map(part, inputs),), part(do), part(dlse, 2)
    got = _differentiated(run, *mine)
    again = _differentiated(run, *mine)
    if not all(torch.equal(a, b) for a, b in zip(got, again, strict=True)):
        return {"all": "must be the same twice"}
    truth, eager = (
        _differentiated(lambda *t: _eager(*t, seen, scale), [t.to(kind) for t in inputs],
                        do.to(kind), dlse.to(kind))
        for kind in (torch.float64, getattr(torch, dtype))
    )  # fmt: skip
    scales = accumulator_scales(*inputs, do, scale)
    found = {}
    for name, actual, want, plain in zip(NAMES, got, truth, eager, strict=True):
        want, plain = (part(t, 2 if name == "lse" else 1) for t in (want, plain))
        why = budget_violation(actual, want, plain, scale=scales[name])
        if why is not None:
            found[name] = why
    return found


CASES = {
    "plain": {"causal": False},
    "causal": {},
    "window": {"window": 7},
    "window_as_wide_as_a_chunk": {"window": 13},
    "window_of_one": {"window": 1},
    "window_both_sides": {"causal": False, "window": [9, 14]},
    "window_to_the_right": {"causal": False, "window": [None, 3]},
    "wide_values": {"dims": (16, 24)},
    "odd_chunks": {"tokens": 40, "batch": 1},
    "float64": {"dtype": "float64"},
    "bfloat16": {"dtype": "bfloat16"},
    "documents": {"documents": [0, 5, 5, 29, 30, 48]},
    "documents_with_window": {"documents": [0, 20, 41, 48], "window": 6},
    "documents_plain": {"documents": [0, 2, 48], "causal": False},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("method", FUNCTIONS)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(ranks, case, method):
    assert ranks.run(compare, 2, method=method, **CASES[case]) == [{}] * 2


@pytest.mark.parametrize("method", FUNCTIONS)
@pytest.mark.parametrize(
    "case", ["plain", "causal", "window", "bfloat16", "documents", "documents_with_window"]
)
def test_four_ranks_share_key_heads(ranks, case, method):
    assert ranks.run(compare, 4, method=method, **CASES[case]) == [{}] * 4


@pytest.mark.parametrize("method", FUNCTIONS)
@pytest.mark.parametrize("heads", [(8, 1), (8, 8), (12, 3)], ids=str)
def test_head_counts(ranks, heads, method):
    assert ranks.run(compare, 4, method=method, heads=heads) == [{}] * 4


@pytest.mark.parametrize("method", FUNCTIONS)
@pytest.mark.parametrize("case", ["causal", "window", "documents"])
def test_contiguous_layout(ranks, case, method):
    options = {**CASES[case], "layout": "contiguous"}
    assert ranks.run(compare, 2, method=method, **options) == [{}] * 2


@pytest.mark.parametrize("method", FUNCTIONS)
def test_one_rank_is_attention(ranks, method):
    assert ranks.run(compare, 1, method=method) == [{}]


def test_a_ring_takes_head_counts_that_ranks_do_not_divide(ranks):
    assert ranks.run(compare, 4, method="ring", heads=(3, 1)) == [{}] * 4


def refused(group, rank, size, *, method, tokens=None, heads=None, options=None):
    """Call with arguments that differ by rank; return the error and the seconds it took."""
    count = (tokens or [8] * size)[rank]
    q = torch.zeros(1, count, (heads or [4] * size)[rank], 16)
    k = torch.zeros(1, count, 2, 16)
    started = time.monotonic()
    try:
        FUNCTIONS[method](q, k, k, group=group, **(options or [{}] * size)[rank])
    except ValueError as error:
        return [str(error), time.monotonic() - started]
    return ["nothing", 0.0]


@pytest.mark.parametrize("method", FUNCTIONS)
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokens": [8, 10]}, "q must be of one shape and dtype on all ranks, got "
         "(1, 8, 4, 16) float32 on rank 0, (1, 10, 4, 16) float32 on rank 1"),
        ({"options": [{}, {"causal": True}]}, "must be the same on all ranks, got others on rank"),
        ({"options": [{"layout": "spiral"}, {}]}, "arguments must be right on every rank, got them "
         "refused on [0]|layout must be one of zigzag, contiguous, got 'spiral'"),
        ({"tokens": [7, 7]}, "a rank's tokens must be even with the zigzag layout, got 7"),
        ({"options": [{"window": 0}] * 2}, "window must be at least 1, got 0"),
        ({"options": [{"cu_seqlens": [0, 16]}] * 2}, "q must be (T / N, H, D) with cu_seqlens"),
        ({"heads": [5, 5]}, "q a multiple of them, got (1, 8, 5, 16), (1, 8, 2, 16)"),
    ],
)  # fmt: skip
def test_ranks_that_disagree_are_told_on_every_rank(ranks, values, message, method):
    for text, seconds in ranks.run(refused, 2, method=method, **values):
        assert any(part in text for part in message.split("|")), text
        assert seconds < 5


def test_ulysses_refuses_heads_that_it_cannot_deal_out(ranks):
    values = {"tokens": [8] * 4, "heads": [6] * 4}
    for text, _ in ranks.run(refused, 4, method="ulysses", **values):
        assert text == "q must have a multiple of 4 heads for 4 ranks, got 6"


def test_without_ranks_the_group_is_asked_for():
    q = torch.zeros(1, 8, 4, 16)
    with pytest.raises(ValueError, match="group must be a process group"):
        ring_attention(q, q, q)
