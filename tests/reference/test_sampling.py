"""The target distribution, by hand and against the filters of transformers."""

from __future__ import annotations

import pytest
import torch

from tilewise.reference.sampling import target_distribution

F64 = torch.float64


def from_weights(*weights: float) -> torch.Tensor:
    return torch.tensor(weights, dtype=F64).log()


def assert_weights(got: torch.Tensor, *weights: float) -> None:
    want = torch.tensor(weights, dtype=F64)
    torch.testing.assert_close(got, want / want.sum())


def test_no_truncation_is_softmax():
    logits = torch.randn(3, 50)
    torch.testing.assert_close(target_distribution(logits), logits.double().softmax(-1))
    torch.testing.assert_close(
        target_distribution(logits, temperature=0.7), (logits.double() / 0.7).softmax(-1)
    )


def test_zero_temperature_is_the_first_argmax():
    got = target_distribution(torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]]), temperature=0)
    assert got.tolist() == [[0, 1, 0], [1, 0, 0]]


def test_tiny_temperature_does_not_overflow():
    got = target_distribution(torch.tensor([1.0, 50.0, 2.0]), temperature=1e-300)
    assert got.tolist() == [0, 1, 0]


def test_top_k_by_hand():
    logits = from_weights(1, 4, 2, 3)
    assert_weights(target_distribution(logits, top_k=2), 0, 4, 0, 3)
    assert_weights(target_distribution(logits, top_k=1), 0, 1, 0, 0)
    for everything in (-1, 0, 4, 9):
        assert_weights(target_distribution(logits, top_k=everything), 1, 4, 2, 3)


def test_top_p_by_hand():
    logits = from_weights(1, 4, 2, 3)
    assert_weights(target_distribution(logits, top_p=0.35), 0, 1, 0, 0)
    assert_weights(target_distribution(logits, top_p=0.45), 0, 4, 0, 3)
    assert_weights(target_distribution(logits, top_p=0.75), 0, 4, 2, 3)
    assert_weights(target_distribution(logits, top_p=1e-9), 0, 1, 0, 0)
    assert_weights(target_distribution(logits, top_p=1.0), 1, 4, 2, 3)


def test_min_p_by_hand():
    logits = from_weights(1, 4, 2, 3)
    assert_weights(target_distribution(logits, min_p=0.4), 0, 4, 2, 3)
    assert_weights(target_distribution(logits, min_p=0.6), 0, 4, 0, 3)
    assert_weights(target_distribution(logits, min_p=1.0), 0, 1, 0, 0)


def test_ties_stand_or_fall_together():
    logits = from_weights(2, 1, 2, 1, 2)
    assert_weights(target_distribution(logits, top_k=2), 1, 0, 1, 0, 1)
    assert_weights(target_distribution(logits, top_p=0.3), 1, 0, 1, 0, 1)
    assert_weights(target_distribution(logits, top_p=0.8), 2, 1, 2, 1, 2)
    assert_weights(target_distribution(torch.zeros(7), top_k=1), *[1] * 7)


def test_later_filters_see_what_the_earlier_left():
    """After top_k = 2 of (4, 3, 2, 1) the first has 4/7 > 0.5; of all four it would have 0.4."""
    logits = from_weights(4, 3, 2, 1)
    assert_weights(target_distribution(logits, top_p=0.5), 4, 3, 0, 0)
    assert_weights(target_distribution(logits, top_k=2, top_p=0.5), 1, 0, 0, 0)
    # min_p = 0.6 alone keeps (4, 3), of which 4/7 > 0.5: it must act after top_p.
    assert_weights(target_distribution(logits, top_p=0.5, min_p=0.6), 4, 3, 0, 0)


def test_forbidden_tokens_stay_forbidden():
    logits = torch.tensor([0.0, -torch.inf, 1.0])
    for options in ({}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.0}, {"temperature": 0}):
        assert target_distribution(logits, **options)[1] == 0


def test_rows_of_a_batch_are_independent_and_permutation_does_not_matter():
    logits = torch.randn(4, 30, dtype=F64).round(decimals=1)  # rounded, so that there are ties
    options = {"temperature": 0.8, "top_k": 12, "top_p": 0.8, "min_p": 0.05}
    got = target_distribution(logits, **options)
    order = torch.randperm(30)
    torch.testing.assert_close(target_distribution(logits[:, order], **options), got[:, order])
    for row in range(4):
        torch.testing.assert_close(target_distribution(logits[row], **options), got[row])


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_processors_of_transformers(seed):
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(3, 100, dtype=F64, generator=torch.Generator().manual_seed(seed)) * 3
    scores = logits
    for processor in (
        transformers.TemperatureLogitsWarper(0.8),
        transformers.TopKLogitsWarper(20),
        transformers.TopPLogitsWarper(0.85),
        transformers.MinPLogitsWarper(0.1),
    ):
        scores = processor(None, scores)
    got = target_distribution(logits, temperature=0.8, top_k=20, top_p=0.85, min_p=0.1)
    torch.testing.assert_close(got, scores.softmax(-1))
