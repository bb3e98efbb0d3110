"""Batches hold every token once, without padding, and go on where they stopped."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pytest
import torch

from tests.training.small import WORDS, make_corpus, make_packer
from tilewise.training.corpus import Corpus
from tilewise.training.packing import mask_batch, prefetch


def pieces_of(batch):
    """The ids and targets of each document of a packed batch."""
    cu_seqlens = batch.documents.cu_seqlens.tolist()
    assert cu_seqlens[0] == 0
    assert cu_seqlens[-1] == len(batch.ids)
    for first, last in pairwise(cu_seqlens):
        if last > first:
            yield batch.ids[first:last], batch.targets[first:last], batch.positions[first:last]


def test_an_epoch_shows_every_token_once_with_its_successor():
    corpus = make_corpus()
    packer = make_packer(corpus, tokens=128, context=32)
    total = len(corpus.tokens) - 1
    seen = []
    while packer.epoch == 0:
        batch = packer.batch()
        assert sum(len(ids) for ids, _, _ in pieces_of(batch)) == 128
        assert batch.count == len(list(pieces_of(batch)))
        assert batch.pairs == sum(len(ids) ** 2 for ids, _, _ in pieces_of(batch))
        for ids, targets, positions in pieces_of(batch):
            assert len(ids) <= 32
            assert positions.tolist() == list(range(len(ids)))
            assert torch.equal(ids[1:], targets[:-1])
            seen.extend(ids.tolist())
    assert sorted(seen[:total]) == sorted(corpus.tokens[:total].tolist())


def test_the_last_token_of_a_document_predicts_its_end():
    corpus = Corpus.of_ids([[7, 8, 9]] * 3, 10, 0)
    batch = make_packer(corpus, tokens=12, context=8).batch()
    assert [ids.tolist() for ids, _, _ in pieces_of(batch)] == [[0, 7, 8, 9]] * 3
    assert [targets.tolist() for _, targets, _ in pieces_of(batch)] == [[7, 8, 9, 0]] * 3


def test_a_state_gives_the_batches_that_followed_it():
    packer = make_packer()
    for _ in range(7):
        state = packer.batch().state
    after = [packer.batch() for _ in range(9)]  # into the next epoch
    again = make_packer()
    again.load_state(state)
    for batch in after:
        other = again.batch()
        assert torch.equal(batch.ids, other.ids)
        assert torch.equal(batch.documents.cu_seqlens, other.documents.cu_seqlens)
        assert batch.state == other.state


def test_all_batches_have_one_shape_until_more_documents_come_than_expected():
    packer = make_packer()
    shapes = {packer.batch().documents.cu_seqlens.shape for _ in range(20)}
    assert len(shapes) == 1
    short = Corpus.of_ids([[1] * 400, *([[1]] * 300)], 2, 0)
    packer = make_packer(short, tokens=64, context=512)
    packer.capacity = 8
    batches = [packer.batch() for _ in range(8)]
    assert max(batch.count for batch in batches) >= 32
    for batch in batches:
        assert len(batch.documents.cu_seqlens) == 1 + batch.state["capacity"]
        assert batch.state["capacity"] in (8, 16, 32, 64)


def test_rows_are_cut_from_the_joined_documents():
    batch = make_packer(tokens=256, context=64, is_rows=True).batch()
    assert batch.ids.shape == batch.targets.shape == (4, 64)
    assert torch.equal(batch.ids.flatten()[1:], batch.targets.flatten()[:-1])
    assert batch.positions is None
    assert batch.documents is None
    assert batch.pairs == 4 * 64 * 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens must be positive, got 0"),
        ({"context": -1}, "context must be positive, got -1"),
        ({"tokens": 100, "is_rows": True}, "tokens must be a multiple of context 64 for rows"),
    ],
)
def test_impossible_batches_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_packer(**options)


def test_masks_hide_and_predict_the_same_number_of_tokens_each_time():
    packer = make_packer(make_corpus(400), tokens=2048)
    special = frozenset((0, 1))
    options = {"share": 0.15, "mask": 3, "words": WORDS, "special": special, "seed": 5}
    kinds = np.zeros(3)
    for _ in range(10):
        batch = packer.batch()
        masked = mask_batch(batch, **options)
        assert len(masked.places) == int(0.15 * 2048)
        assert torch.equal(masked.targets, batch.ids[masked.places])
        assert not set(masked.targets.tolist()) & special
        changed = (masked.ids != batch.ids).nonzero().flatten()
        assert set(changed.tolist()) <= set(masked.places.tolist())
        now = masked.ids[masked.places]
        kinds += [(now == 3).sum(), (now == masked.targets).sum(), 0]
        assert torch.equal(mask_batch(batch, **options).ids, masked.ids)
    assert 0.76 < kinds[0] / (10 * 307) < 0.84
    assert 0.07 < kinds[1] / (10 * 307) < 0.14


def test_a_masked_batch_of_special_tokens_has_no_targets():
    batch = make_packer(Corpus.of_ids([[0] * 30], 4, 0), tokens=16, context=16).batch()
    masked = mask_batch(batch, share=0.5, mask=3, words=4, special=frozenset((0,)), seed=0)
    assert masked.targets.tolist() == [-100] * 8
    assert torch.equal(masked.ids, batch.ids)


def test_prefetching_changes_nothing():
    plain, threaded = make_packer(), prefetch(iter(make_packer()), torch.device("cpu"))
    for got in islice(threaded, 12):
        expected = plain.batch()
        assert torch.equal(got.ids, expected.ids)
        assert got.state == expected.state
    threaded.close()


def test_an_error_of_the_thread_is_raised_where_batches_are_asked_for():
    def broken():
        yield make_packer().batch()
        raise OSError("the disk is gone")

    batches = prefetch(broken(), torch.device("cpu"))
    next(batches)
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


def test_a_finite_source_ends():
    packer = make_packer()
    assert len(list(prefetch(islice(iter(packer), 3), torch.device("cpu")))) == 3
