"""Tokens are drawn from the documented distribution, and a sample never feels its neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tilewise.engine.batch import BROKEN, Batch, ScheduledSequence
from tilewise.engine.request import SamplingParams
from tilewise.engine.steps import sampler
from tilewise.engine.steps.sampler import sample, truncate
from tilewise.reference.sampling import target_distribution

GREEDY = SamplingParams(temperature=0.0)


def row(sampling, seeds=(0,), num_generated=0):
    return ScheduledSequence(0, (1,), 0, (0,), len(seeds), sampling, tuple(seeds), num_generated)


def draw(logits, *rows):
    return [[t.token_id for t in tokens] for tokens in sample(logits, Batch(rows))]


def truncated(logits, temperature=1.0, **options):
    """`truncate` with the arguments of the oracle."""
    kept = truncate(
        (logits.double() / temperature).softmax(-1), [SamplingParams(**options)] * len(logits)
    )
    return kept / kept.sum(-1, keepdim=True)


def test_greedy_is_the_first_of_the_largest():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert draw(logits, row(GREEDY), row(GREEDY)) == [[1], [0]]


def test_numbers_beyond_those_of_float32_mean_what_they_say():
    logits = torch.randn(1, 997, generator=torch.Generator().manual_seed(5))
    least = SamplingParams(top_p=1e-60)  # the most likely token alone
    assert draw(logits, row(least)) == [[int(logits.argmax())]]
    logits[:, 8:] = -torch.inf  # as a structured output masks
    hottest = SamplingParams(temperature=1e300)
    drawn = [draw(logits, row(hottest, seeds=(seed,)))[0][0] for seed in range(60)]
    assert set(drawn) == set(range(8))


def test_sequences_that_do_not_sample_get_an_empty_list():
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    idle = ScheduledSequence(0, (1,), 0, (0,), 0, SamplingParams())
    assert draw(logits, idle, row(GREEDY), idle, row(GREEDY)) == [[], [1], [], [0]]
    assert draw(torch.zeros(0, 2), idle) == [[]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.5, "top_k": 7},
        {"top_k": 1},
        {"top_k": 10_000},
        {"top_k": -1, "top_p": 0.6},
        {"top_p": 1e-9},
        {"top_p": 0.9, "top_k": 20},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 0.7, "top_k": 30, "top_p": 0.8, "min_p": 0.05},
    ],
)
@pytest.mark.parametrize("has_ties", [False, True])
def test_truncation_keeps_exactly_what_the_oracle_keeps(options, has_ties):
    logits = torch.randn(40, 101, generator=torch.Generator().manual_seed(3)) * 2
    if has_ties:
        logits = logits.round()
    want = target_distribution(logits, **options)
    got = truncated(logits, **options)
    assert torch.equal(got > 0, want > 0)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def test_rows_are_truncated_each_by_its_own_rule():
    logits = torch.randn(4, 50).double()
    rules = ({"top_k": 5}, {"top_p": 0.5}, {}, {"min_p": 0.3})
    got = truncate(logits.softmax(-1), [SamplingParams(**rule) for rule in rules])
    for row_of, wanted, rule in zip(got, logits, rules, strict=True):
        assert torch.equal(row_of > 0, target_distribution(wanted, **rule) > 0)


@pytest.mark.parametrize(
    "options", [{"top_p": 0.5}, {"top_p": 0.99}, {"top_k": 3}, {"top_k": 40, "top_p": 0.9}]
)
@pytest.mark.parametrize("has_ties", [False, True])
def test_looking_at_few_candidates_first_changes_nothing(monkeypatch, options, has_ties):
    logits = torch.randn(60, 101, generator=torch.Generator().manual_seed(4)) * 2
    if has_ties:
        logits = logits.round()
    wanted = truncated(logits, **options)
    monkeypatch.setattr("tilewise.engine.steps.sampler.CANDIDATES", 8)
    assert torch.equal(truncated(logits, **options), wanted)
    assert torch.equal(wanted > 0, target_distribution(logits, **options) > 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0, "top_k": 6},
        {"top_p": 0.7},
        {"min_p": 0.1, "temperature": 1.3},
    ],
)
def test_frequencies_are_those_of_the_target_distribution(options):
    vocab, draws = 12, 40_000
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(1)) * 1.5
    target = target_distribution(logits[0], **options)
    [tokens] = draw(logits, row(SamplingParams(**options), seeds=range(draws)))
    counts = torch.bincount(torch.tensor(tokens), minlength=vocab).double()
    kept = target > 0
    assert counts[~kept].sum() == 0
    expected = target[kept] * draws
    chi_square = float(((counts[kept] - expected) ** 2 / expected).sum())
    # Wilson and Hilferty's approximation of the 99.99th percentile of chi-square
    degrees = int(kept.sum()) - 1
    bound = degrees * (1 - 2 / (9 * degrees) + 3.719 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert chi_square < bound


def test_a_sample_is_independent_of_its_batch():
    logits = torch.randn(6, 500) * 3
    rows = [
        row(SamplingParams(top_p=0.9), seeds=(11,), num_generated=4),
        row(GREEDY),
        row(SamplingParams(temperature=0.7, top_k=40), seeds=(12,), num_generated=9),
        row(SamplingParams(n=3, min_p=0.02), seeds=(13, 14, 15)),
        row(SamplingParams(logprobs=2), seeds=(16,)),
        row(SamplingParams(temperature=5.0), seeds=(11,), num_generated=4),
    ]
    together = draw(logits, *rows)
    alone = [draw(logits[i : i + 1], r)[0] for i, r in enumerate(rows)]
    assert together == alone
    order = [5, 3, 0, 4, 2, 1]
    assert draw(logits[order], *(rows[i] for i in order)) == [together[i] for i in order]


def test_many_rows_are_drawn_in_slices_of_bounded_memory(monkeypatch):
    logits = torch.randn(9, 64)
    rows = [row(SamplingParams(top_k=9, n=2), seeds=(i, 99 - i)) for i in range(9)]
    whole = draw(logits, *rows)
    monkeypatch.setitem(sampler.MAX_ELEMENTS, "cpu", 130)  # two rows at a time
    assert draw(logits, *rows) == whole


def test_samples_of_one_row_are_those_of_their_seeds():
    logits = torch.randn(1, 300)
    params = SamplingParams(n=4)
    [together] = draw(logits, row(params, seeds=(5, 6, 7, 8)))
    assert together == [draw(logits, row(params, seeds=(s,)))[0][0] for s in (5, 6, 7, 8)]
    assert len(set(together)) > 1


def test_the_counter_moves_the_draw_on():
    logits = torch.zeros(1, 1000)
    tokens = [draw(logits, row(SamplingParams(), num_generated=i))[0][0] for i in range(20)]
    assert len(set(tokens)) > 15


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6])
def test_tiny_temperatures_are_greedy_and_finite(temperature):
    logits = torch.tensor([[1.0, 3.0, 2.999, -1e4]])
    params = SamplingParams(temperature=temperature)
    assert draw(logits, row(params, seeds=range(10))) == [[1] * 10]


def test_forbidden_tokens_are_never_drawn():
    logits = torch.full((1, 5), -torch.inf)
    logits[0, 3] = -80.0
    [tokens] = draw(logits, row(SamplingParams(temperature=2.0), seeds=range(200)))
    assert set(tokens) == {3}


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (1 - 2.0**-53, 3)])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(monkeypatch, u, token):
    monkeypatch.setattr(sampler, "uniforms", lambda seeds, counters: np.full(len(seeds), u))
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, 0.0, -torch.inf]])
    assert draw(logits, row(SamplingParams(n=2), seeds=(0, 1))) == [[token, token]]


@pytest.mark.parametrize("options", [{}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.02}])
def test_one_draw_a_row_is_that_of_several(options):
    """Of rows that draw one token a compiled op draws it, of others torch: by the same rule."""
    torch.manual_seed(4)
    logits = 3 * torch.randn(40, 500)
    params = [SamplingParams(temperature=0.5 + i / 20, n=2, **options) for i in range(40)]
    seeds = [3**i for i in range(40)]  # beyond 64 bits: the low ones count
    pairs = list(enumerate(zip(params, seeds, strict=True)))
    one = [row(p, seeds=(s,), num_generated=i) for i, (p, s) in pairs]
    two = [row(p, seeds=(s, 1), num_generated=i) for i, (p, s) in pairs]
    greedy = row(GREEDY)  # among them one that draws nothing
    first = draw(torch.cat([logits, logits[:1]]), *one, greedy)
    assert [tokens[0] for tokens in draw(logits, *two)] == [tokens[0] for tokens in first[:-1]]
    assert first[-1] == [int(logits[0].argmax())]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(top_p=0.9), SamplingParams(top_k=2, logprobs=3)]
)
def test_a_row_that_is_not_finite_says_so_and_no_other_notices(bad, params):
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    rows = [row(params, (seed,)) for seed in range(4)]
    rows[2] = row(params, (7, 8, 9))
    whole = sample(logits, Batch(tuple(rows)))
    logits[2, 5] = logits[0, 1] = bad
    got = sample(logits, Batch(tuple(rows)))
    assert got == [[BROKEN], whole[1], [BROKEN] * 3, whole[3]]
    assert sample(logits[:1], Batch((rows[0],))) == [[BROKEN]]


def test_logprobs_are_of_the_untouched_distribution():
    logits = torch.randn(4, 30)
    params = SamplingParams(temperature=0.5, top_k=2, logprobs=3)
    rows = [
        row(params, seeds=(1,)),
        row(SamplingParams(), seeds=(2,)),
        row(SamplingParams(n=2, logprobs=0), seeds=(3, 4)),
        row(SamplingParams(temperature=0.0, logprobs=1)),
    ]
    first, silent, two, greedy = sample(logits, Batch(tuple(rows)))
    want = logits.log_softmax(-1)
    [token] = first
    assert token.logprob == pytest.approx(want[0, token.token_id].item())
    top = want[0].topk(3)
    assert [i for i, _ in token.top_logprobs] == top.indices.tolist()
    assert [value for _, value in token.top_logprobs] == pytest.approx(top.values.tolist())
    assert silent[0].logprob is None
    assert all(t.logprob == pytest.approx(want[2, t.token_id].item()) for t in two)
    assert two[0].top_logprobs == ()
    assert greedy[0].top_logprobs == ((greedy[0].token_id, greedy[0].logprob),)


def test_more_logprobs_than_tokens_are_all_of_them():
    [[token]] = sample(torch.randn(1, 4), Batch((row(SamplingParams(logprobs=20)),)))
    assert len(token.top_logprobs) == 4
