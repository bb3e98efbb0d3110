"""Tokens drawn from shares of the vocabulary are those drawn from the whole."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.distributed.thread_group import ThreadGroup, on_ranks
from tilewise.distributed.shards import VocabularyHead, vocabulary_rows
from tilewise.engine.batch import Batch, ScheduledSequence
from tilewise.engine.request import SamplingParams
from tilewise.engine.steps.sampler import sample
from tilewise.engine.tensor_parallel import drawing
from tilewise.engine.tensor_parallel.drawing import draw_from_shares

RULES = {
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 1.7},
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 1e-3},
    "few": {"temperature": 0.9, "top_k": 7},
    "one": {"temperature": 0.9, "top_k": 1},
    "nucleus": {"temperature": 0.6, "top_p": 0.8},
    "wide_nucleus": {"temperature": 3.0, "top_p": 0.999},
    "few_of_a_nucleus": {"temperature": 1.1, "top_k": 20, "top_p": 0.7},
    "likely": {"temperature": 1.0, "min_p": 0.05},
    "all_rules": {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "many": {"temperature": 1.0, "top_k": 290},  # more than candidates are sent
    "all": {"temperature": 1.0, "top_k": 100_000},  # more than there are
}


def _batch(params, samples=1):
    sequences = tuple(
        ScheduledSequence(
            seq_id=i, token_ids=(1,), start=0, block_ids=(0,), sampling=sampling,
            num_samples=samples, seeds=tuple(range(7 * i, 7 * i + samples)),
            num_generated=3 * i,
        )
        for i, sampling in enumerate(params)
    )  # fmt: skip
    return Batch(sequences)


def _logits(vocab, count, seed=0):
    """Rows as a model has them, not yet as wide as the sharpest."""
    generator = torch.Generator().manual_seed(seed)
    rows = 3 * torch.randn(count, vocab, generator=generator)
    return rows + 6 * (torch.rand(count, vocab, generator=generator) > 0.99)


def _head(group, vocab):
    return VocabularyHead(torch.nn.Linear(1, 1, bias=False), vocab, group)


def _from_shares(logits, batch, size):
    def work(group):
        first, end = vocabulary_rows(logits.shape[1], group.rank, size)
        return draw_from_shares(_head(group, logits.shape[1]), logits[:, first:end], batch)

    found = on_ranks(size, work)
    assert all(other == found[0] for other in found)
    return found[0]


def _ids(samples):
    return [[token.token_id for token in own] for own in samples]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("vocab", [101, 1000])  # of 101 two of four ranks have none
@pytest.mark.parametrize("samples", [1, 3])
def test_all_rules_in_one_step(vocab, size, samples):
    params = [SamplingParams(**rule) for rule in RULES.values()] * 12
    logits = _logits(vocab, len(params))
    batch = _batch(params, samples)
    assert _ids(_from_shares(logits, batch, size)) == _ids(sample(logits.clone(), batch))


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_alone(rule):
    params = [SamplingParams(**RULES[rule])] * 40
    logits, batch = _logits(700, 40, seed=1), _batch(params)
    assert _ids(_from_shares(logits, batch, 2)) == _ids(sample(logits.clone(), batch))


@pytest.mark.parametrize("rule", ["plain", "few", "nucleus", "all_rules", "likely"])
def test_equal_logits_stand_or_fall_together(rule):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(-3, 4, (40, 900), generator=generator).float()
    logits[:20] = torch.randint(0, 2, (20, 900), generator=generator).float() * 20
    batch = _batch([SamplingParams(**RULES[rule])] * 40)
    assert _ids(_from_shares(logits, batch, 4)) == _ids(sample(logits.clone(), batch))


def test_equal_logits_at_the_bound_of_top_k_count_for_the_nucleus():
    logits = torch.zeros(20, 700)
    logits[:, 100:600] = 1.0
    logits[:, 10], logits[:, 11] = 5.0, 4.0
    # With all 500 that are third the two before them have a tenth; with one of them 0.99.
    batch = _batch([SamplingParams(temperature=1.0, top_k=3, top_p=0.9)] * 20)
    got = _ids(_from_shares(logits, batch, 2))
    assert got == _ids(sample(logits.clone(), batch))
    assert any(100 <= token < 600 for (token,) in got)


def test_forbidden_tokens_are_not_drawn_and_broken_rows_harm_no_other():
    names = ["plain", "few", "nucleus", "greedy", "plain", "few", "wide_nucleus"]
    logits = _logits(300, len(names), seed=2)
    logits[0, 64:] = -torch.inf  # a whole share
    logits[1, :290] = -torch.inf  # of the candidates three are none
    logits[2, 5], logits[3, 299], logits[4] = torch.nan, torch.inf, -torch.inf
    logits[5, 1:] = -torch.inf
    batch = _batch([SamplingParams(**RULES[name]) for name in names])
    got = _ids(_from_shares(logits, batch, 2))
    assert got == _ids(sample(logits.clone(), batch))
    assert got[0][0] < 64
    assert got[1][0] >= 290
    assert got[5] == [0]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("samples", [1, 2])
def test_log_probabilities(size, samples):
    params = [
        SamplingParams(**rule, logprobs=count)
        for rule, count in zip(RULES.values(), itertools.cycle([None, 0, 5, 20]), strict=False)
    ]
    logits = _logits(250, len(params), seed=4)
    logits[2, 40:200] = 12.0  # equal ones: the lower ids
    logits[6, :128] = -torch.inf  # two shares of four have no token
    batch = _batch(params, samples)
    want, got = sample(logits.clone(), batch), _from_shares(logits, batch, size)
    assert _ids(got) == _ids(want)
    for mine, theirs in zip(itertools.chain(*got), itertools.chain(*want), strict=True):
        assert (mine.logprob is None) == (theirs.logprob is None)
        if mine.logprob is None:
            continue
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [i for i, _ in mine.top_logprobs] == [i for i, _ in theirs.top_logprobs]
        assert [x for _, x in mine.top_logprobs] == pytest.approx(
            [x for _, x in theirs.top_logprobs], abs=1e-5
        )


@pytest.mark.parametrize("rule", ["greedy", "plain"])
def test_log_probabilities_of_the_tokens_alone(rule):
    logits = _logits(250, 3, seed=8)
    batch = _batch([SamplingParams(**RULES[rule], logprobs=0)] * 3)
    want, got = sample(logits.clone(), batch), _from_shares(logits, batch, 2)
    assert _ids(got) == _ids(want)
    for (mine,), (theirs,) in zip(got, want, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert mine.top_logprobs == theirs.top_logprobs == ()


def test_more_alternatives_than_a_share_has_tokens():
    """Beams ask for many; where a share has fewer, forbidden tokens of the next one follow."""

    class Many(SamplingParams):
        most_logprobs = 2**31

    logits = _logits(96, 2, seed=9)
    logits[1, 3:95] = -torch.inf
    batch = _batch([Many(temperature=0.0, logprobs=80)] * 2)
    want, got = sample(logits.clone(), batch), _from_shares(logits, batch, 2)
    assert _ids(got) == _ids(want)
    for (mine,), (theirs,) in zip(got, want, strict=True):
        assert [i for i, _ in mine.top_logprobs] == [i for i, _ in theirs.top_logprobs]


def test_rows_whose_candidates_do_not_reach_are_gathered(monkeypatch):
    asked = []
    whole = VocabularyHead.whole

    def counted(self, logits):
        asked.append(len(logits))
        return whole(self, logits)

    monkeypatch.setattr(VocabularyHead, "whole", counted)
    names = ["plain", "few", "nucleus", "wide_nucleus", "many"]
    logits = _logits(1000, len(names), seed=5)
    batch = _batch([SamplingParams(**RULES[name]) for name in names])
    assert _ids(_from_shares(logits, batch, 2)) == _ids(sample(logits.clone(), batch))
    assert asked == [2, 2]  # by both ranks: of wide_nucleus and many

    asked.clear()
    names = ["plain", "few", "nucleus", "likely"]
    batch = _batch([SamplingParams(**RULES[name]) for name in names])
    _from_shares(logits[:4], batch, 2)
    assert asked == []


def test_only_numbers_travel(monkeypatch):
    """What is sent does not grow with the vocabulary."""
    sent = []
    stack = ThreadGroup.stack

    def counted(self, x):
        if self.rank == 0:
            sent.append(x.numel())
        return stack(self, x)

    monkeypatch.setattr(ThreadGroup, "stack", counted)
    params = [SamplingParams(**RULES[name], logprobs=2) for name in ("plain", "few", "likely")]
    totals = []
    for vocab in (2_000, 20_000):
        sent.clear()
        _from_shares(_logits(vocab, 3), _batch(params), 2)
        totals.append(sum(sent))
    assert totals[0] == totals[1] < 3 * 40
    assert len(sent) == 5


def test_no_row_draws_nothing():
    batch = _batch([SamplingParams()], samples=0)
    assert _from_shares(torch.zeros(0, 101), batch, 2) == [[]]


def test_candidates_are_as_many_as_a_top_k_may_be():
    assert RULES["many"]["top_k"] > drawing.MOST > RULES["all_rules"]["top_k"]
