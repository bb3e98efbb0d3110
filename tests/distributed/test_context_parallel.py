"""ring_attention, gather_attention and ulysses_attention beside one device: results, refusals."""

from __future__ import annotations

import time

import pytest
import torch

from tests.covering import covering
from tilewise.distributed import (
    exchange,
    gather_attention,
    ring,
    ring_attention,
    shard_sequence,
    ulysses_attention,
)
from tilewise.distributed.ulysses import _packed
from tilewise.testing import accumulator_scales, budget_violation

FUNCTIONS = {
    "ring": ring_attention, "ulysses": ulysses_attention, "gather": gather_attention,
}  # fmt: skip
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


def gpu_of(rank):
    """Return a GPU of a rank's own, or that which ranks share."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def compare(group, rank, size, *, method, layout="zigzag", heads=(4, 2), tokens=48,
            dtype="float32", dims=(16, 16), batch=2, documents=None, window=None, causal=True,
            scale=0.3, on_gpu=False, twice=True, **options):  # fmt: skip
    """Compute a rank's part of all results; return how they break the budget, by name.

    Args:
        twice: whether they are computed again, and must be the same.
    """
    window = tuple(window) if isinstance(window, list) else window
    batch = 1 if documents else batch
    *inputs, do, dlse = _drawn(heads, tokens, dims, batch, getattr(torch, dtype))
    seen = _seen(tokens, causal, window, documents)

    def part(x, dim=1):
        own = shard_sequence(x, rank, size, dim=dim, layout=layout, cu_seqlens=documents)
        own = own.contiguous()
        return own.to(gpu_of(rank)) if on_gpu else own

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
    again = _differentiated(run, *mine) if twice else got
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


# Of 48 tokens: documents within a rank's piece, across all ranks, empty ones (at both ends, too),
# shorter than the pieces that they are dealt out in, and of no common divisor with them.
DEALT = {
    "one": {"documents": [0, 48]},
    "uneven": {"documents": [0, 5, 5, 29, 30, 48]},
    "empty_at_the_ends": {"documents": [0, 0, 0, 13, 37, 48, 48]},
    "single_tokens": {"documents": [0, 1, 2, 3, 20, 21, 47, 48]},
    "window": {"documents": [0, 20, 41, 48], "window": 6},
    "window_over_pieces": {"documents": [0, 31, 48], "window": 20},
    "window_both_sides": {"documents": [0, 17, 40, 48], "causal": False, "window": [5, 9]},
    "window_to_the_left": {"documents": [0, 17, 40, 48], "causal": False, "window": [4, None]},
    "plain": {"documents": [0, 2, 26, 48], "causal": False},
    "bfloat16": {"documents": [0, 7, 48], "dtype": "bfloat16"},
    # Rows that lie apart, in 16 bits, and so many parts a row that they are added up in float32.
    "window_of_bfloat16": {
        "documents": [0, 5, 5, 29, 40, 48],
        "causal": False,
        "window": [3, 2],
        "dtype": "bfloat16",
    },
    "float64": {"documents": [0, 7, 48], "dtype": "float64", "dims": (16, 24)},
    "odd": {"documents": [0, 9, 11, 36], "tokens": 36},  # that no zigzag of four ranks divides
}


SETTINGS = (("documents", 1), ("documents", 2), ("documents", 4), ("zigzag", 4), ("contiguous", 4))
# Every day each case meets each setting and each method, but not each of both.
EVERYDAY = covering(
    DEALT, SETTINGS, FUNCTIONS,
    where=lambda case, setting, method: case != "odd" or setting[0] == "documents",
)  # fmt: skip


def compare_all(group, rank, size, *, cases, **options):
    """Compare many cases in one go, the first one twice; return what breaks the budget, by case."""
    first = next(iter(cases))
    found = {
        name: compare(group, rank, size, **case, **options, twice=name == first)
        for name, case in cases.items()
    }
    return {name: why for name, why in found.items() if why}


@pytest.mark.parametrize("method", FUNCTIONS)
@pytest.mark.parametrize(("layout", "size"), SETTINGS)
@pytest.mark.parametrize("is_slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_documents_of_all_kinds_cross_ranks(ranks, is_slow, layout, size, method):
    cases = {
        name: case
        for name, case in DEALT.items()
        if ((name, (layout, size), method) not in EVERYDAY) == is_slow
        and (name != "odd" or layout == "documents")
    }
    assert cases
    values = {"cases": cases, "layout": layout, "method": method}
    assert ranks.run(compare_all, size, **values) == [{}] * size


def through_host(group, rank, size, **options):
    """Compare while every exchange first copies its tensors, as gloo's of a GPU do."""
    asked = []

    def goes_through_host(self, tensors):
        asked.append(size > 1 and len(asked) % 2 == 0)  # the copies themselves do not
        return asked[-1]

    whole, exchange.Exchange._goes_through_host = (
        exchange.Exchange._goes_through_host, goes_through_host,
    )  # fmt: skip
    try:
        return [compare(group, rank, size, **options), any(asked)]
    finally:
        exchange.Exchange._goes_through_host = whole


@pytest.mark.parametrize("method", FUNCTIONS)
def test_tensors_may_go_through_main_memory(ranks, method):
    for documents in (None, [0, 5, 29, 48]):
        answers = ranks.run(through_host, 2, method=method, documents=documents)
        assert answers == [[{}, True]] * 2


def merged_in_both_ways(group, rank, size, *, dtype, **options):
    """Attend with parts as they come and in float32; say whether the bits are the same."""
    q, k, v, _, _ = _drawn((4, 2), 48, (16, 24), 2, getattr(torch, dtype))
    if "cu_seqlens" in options:
        q, k, v = (t[0] for t in (q, k, v))
    along = {"dim": 0 if q.dim() == 3 else 1, "cu_seqlens": options.get("cu_seqlens"),
             "layout": options.get("layout", "zigzag")}  # fmt: skip
    parts = [shard_sequence(t, rank, size, **along) for t in (q, k, v)]
    options["group"] = group
    found, once = [], ring._is_merged_once
    try:
        for rule in (once, lambda _: False):
            asked = []
            ring._is_merged_once = lambda problem, rule=rule, asked=asked: (
                asked.append(rule(problem)) or asked[-1]
            )
            found.append([*ring_attention(*parts, return_lse=True, **options), asked])
    finally:
        ring._is_merged_once = once
    (o, lse, is_once), (wide_o, wide_lse, _) = found
    return [is_once, torch.equal(o, wide_o) and torch.equal(lse, wide_lse)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize(
    ("size", "is_once", "options"),
    [
        (2, True, {"causal": True}),
        (2, True, {}),
        (2, True, {"causal": True, "layout": "documents", "cu_seqlens": [0, 5, 5, 29, 48]}),
        (4, True, {"window": 5, "layout": "contiguous"}),
        (4, False, {"causal": True}),
    ],
)
def test_parts_that_are_merged_once_stay_in_their_dtype(ranks, size, is_once, options, dtype):
    answers = ranks.run(merged_in_both_ways, size, dtype=dtype, **options)
    assert [same for _, same in answers] == [True] * size
    assert all([is_once] in (once, [True]) for once, _ in answers)
    assert [is_once] in [once for once, _ in answers]


def unused(group, rank, size, *, method):
    """Differentiate only the first rank's results; the others' must help, and get their share."""
    q, k, v, do, _ = _drawn((4, 2), 16, (16, 16), 1, torch.float32)
    parts = [shard_sequence(t, rank, size).requires_grad_() for t in (q, k, v)]
    o = FUNCTIONS[method](*parts, group=group, causal=True, softmax_scale=0.3)
    weight = shard_sequence(do, rank, size) if rank == 0 else torch.zeros_like(o)
    got = torch.autograd.grad((o * weight).sum(), parts)
    whole = [t.requires_grad_() for t in (q, k, v)]
    o, _ = _eager(*whole, _seen(16, True, None, None), 0.3)
    want = torch.autograd.grad((shard_sequence(o, 0, size) * shard_sequence(do, 0, size)).sum(),
                               whole)  # fmt: skip
    return [
        float((a - shard_sequence(b, rank, size)).abs().max())
        for a, b in zip(got, want, strict=True)
    ]


@pytest.mark.parametrize("method", FUNCTIONS)
def test_gradients_reach_ranks_whose_results_are_not_used(ranks, method):
    for errors in ranks.run(unused, 2, method=method):
        assert max(errors) < 1e-5


@pytest.mark.parametrize("method", FUNCTIONS)
def test_no_token_is_no_result(ranks, method):
    assert ranks.run(nothing, 2, method=method) == [[[0, 4, 16], [4, 0]]] * 2


def nothing(group, rank, size, *, method):
    q = torch.zeros(0, 4, 16)
    o, lse = FUNCTIONS[method](
        q, q, q, group=group, cu_seqlens=[0, 0, 0], causal=True, return_lse=True
    )
    return [list(o.shape), list(lse.shape)]


def no_batch(group, rank, size, *, method):
    q, k, v = (torch.zeros(0, 8, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    o, lse = FUNCTIONS[method](q, k, v, group=group, causal=True, return_lse=True)
    grads = torch.autograd.grad(o.sum() + lse.sum(), (q, k, v))
    return [list(t.shape) for t in (o, lse, *grads)]


@pytest.mark.parametrize("method", FUNCTIONS)
def test_no_sequence_is_no_result(ranks, method):
    want = [[0, 8, 4, 16], [0, 4, 8], [0, 8, 4, 16], [0, 8, 2, 16], [0, 8, 2, 16]]
    assert ranks.run(no_batch, 2, method=method) == [want] * 2


@pytest.mark.parametrize("method", FUNCTIONS)
def test_one_rank_is_attention(ranks, method):
    assert ranks.run(compare, 1, method=method) == [{}]


def test_a_ring_takes_head_counts_that_ranks_do_not_divide(ranks):
    assert ranks.run(compare, 4, method="ring", heads=(3, 1)) == [{}] * 4


def refused(
    group, rank, size, *, method, tokens=None, heads=None, options=None, packed=False, on_gpu=False
):
    """Call with arguments that differ by rank; return the error and the seconds it took."""
    count = (tokens or [8] * size)[rank]
    q = torch.zeros(1, count, (heads or [4] * size)[rank], 16)
    k = torch.zeros(1, count, 2, 16)
    if packed:
        q, k = q[0], k[0]
    if on_gpu:
        q, k = (t.to(gpu_of(rank), torch.bfloat16) for t in (q, k))
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
         "refused on [0]|layout must be one of zigzag, contiguous, documents, got 'spiral'"),
        ({"tokens": [7, 7]}, "a rank's tokens must be even with the zigzag layout, got 7"),
        ({"options": [{"window": 0}] * 2}, "window must be at least 1, got 0"),
        ({"options": [{"cu_seqlens": [0, 16]}] * 2}, "q must be (T / N, H, D) with cu_seqlens"),
        ({"options": [{"window": [3, 4, 5]}, {}]}, "window must be None, a count or (left, right), "
         "got [3, 4, 5]|refused on [0]"),
        ({"options": [{"softmax_scale": "x"}, {}]}, "softmax_scale must be a number, got 'x'|"
         "refused on [0]"),
        ({"options": [{}, {"backend": "metal"}]}, "got 'metal'|refused on [1]"),
        ({"options": [{"deterministic": True}, {}]}, "must be the same on all ranks"),
        ({"options": [{"layout": "documents"}] * 2}, "layout must be zigzag or contiguous without "
         "cu_seqlens, got 'documents'"),
        ({"options": [{"cu_seqlens": [0, 16]}, {"cu_seqlens": ["x"]}], "packed": True},
         "cu_seqlens must be whole numbers, got ['x']|refused on [1]"),
        ({"options": [{"cu_seqlens": [0, 16]}, {"cu_seqlens": [float("inf")]}], "packed": True},
         "cu_seqlens must be whole numbers, got [inf]|refused on [1]"),
        ({"options": [{"cu_seqlens": [0, 9, 16]}, {"cu_seqlens": [0, 8, 16]}], "packed": True},
         "must be the same on all ranks"),
        ({"options": [{"cu_seqlens": [0, 9, 4, 16]}, {"cu_seqlens": [0, 16]}], "packed": True},
         "cu_seqlens must ascend from 0 to the 16 tokens of all ranks, got [0, 9, 4, 16] ... 16|"
         "refused on [0]"),
        ({"options": [{"cu_seqlens": []}, {"cu_seqlens": [0, 16]}], "packed": True},
         "cu_seqlens must ascend from 0 to the 16 tokens of all ranks, got [] ... None|refused on "
         "[0]"),
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


def no_channel(group, rank, size, *, method):
    q = torch.zeros(1, 8, 4, 16 if rank else 0)
    try:
        FUNCTIONS[method](q, q, q, group=group)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("method", FUNCTIONS)
def test_no_channel_is_told_on_every_rank(ranks, method):
    assert ranks.run(no_channel, 2, method=method) == [
        "q must have at least one channel, got shape (1, 8, 4, 0)",
        "arguments must be right on every rank, got them refused on [0]",
    ]


def no_tensor(group, rank, size, *, method):
    q = torch.zeros(1, 8, 4, 16)
    try:
        FUNCTIONS[method](q, q if rank else None, q, group=group)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("method", FUNCTIONS)
def test_what_is_no_tensor_is_told_on_every_rank(ranks, method):
    assert ranks.run(no_tensor, 2, method=method) == [
        "k must be a tensor, got NoneType",
        "arguments must be right on every rank, got them refused on [0]",
    ]


def test_without_ranks_the_group_is_asked_for():
    q = torch.zeros(1, 8, 4, 16)
    with pytest.raises(ValueError, match="group must be a process group"):
        ring_attention(q, q, q)


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x.movedim(2, 0), lambda x: x[:, :, :, 4:12].movedim(1, 0), lambda x: x[:0],
        lambda x: x[:, :, :, 2:10].movedim(2, 0), lambda x: x[..., :6].movedim(2, 0),
        lambda x: x.transpose(2, 3), lambda x: x[:, :, :, ::2], lambda x: x.flatten()[3:].view(-1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_copies_by_words_are_those_by_numbers(cut, dtype):
    """Parts that begin, end or step within a word are copied number by number."""
    x = cut(torch.randn(3, 5, 4, 16).to(dtype))
    packed = _packed(x)
    assert packed.is_contiguous()
    assert torch.equal(packed, x)
