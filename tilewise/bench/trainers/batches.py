"""The batches that all ways of a row train on: the same tokens in the same order.

A decoder's batch is B rows of N tokens, without padding. A BERT's is B texts of their own lengths;
a trainer that pads gets them in B rows of N, one that packs gets them end to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise.training.corpus import END, MASKED, Corpus
from tilewise.training.decoder import Documents
from tilewise.training.loss import IGNORED
from tilewise.training.packing import Batch, Packer

__all__ = ["Padded", "decoder_batches", "masked_batches", "open_corpus", "pack_masked"]

_SHARE = 0.15  # of the tokens are predicted
_RANDOM_DOCUMENTS = 4000
_MEAN_LENGTH, _SPREAD = 5.0, 0.8  # of the logarithm: 205 tokens on average


@dataclass(frozen=True, slots=True)
class Padded:
    """A batch of B texts in rows of N tokens, padded at their ends, for a masked language model.

    Attributes:
        ids, labels: int64 (B, N); a label is -100 where nothing is predicted.
        mask: int64 (B, N), 1 at tokens and 0 at padding.
        lengths: tokens of each text.
    """

    ids: Tensor
    labels: Tensor
    mask: Tensor
    lengths: tuple[int, ...]


def open_corpus(folder: str | None, words: int, *, longest: int | None, seed: int) -> Corpus:
    """Return the corpus of a prepared folder; without one, draw random tokens in documents of
    random lengths.

    Args:
        folder: the folder, see `training.corpus.prepare`; None draws.
        words: the size of the vocabulary of a drawn corpus.
        longest: the largest length of a drawn masked model's texts; None is a decoder's corpus.
        seed: the seed of a drawn corpus.
    """
    if folder is not None:
        return Corpus.open(Path(folder))
    rng = np.random.default_rng(seed)
    special = len(MASKED) if longest is not None else 1
    lengths = rng.lognormal(_MEAN_LENGTH, _SPREAD, _RANDOM_DOCUMENTS).astype(int) + 8
    if longest is not None:
        lengths = np.minimum(lengths, longest)
    parts = [rng.integers(special, words, size, dtype=np.int64) for size in lengths]
    for part in parts:
        part[0] = 1 if longest is not None else 0
        part[-1] = 2 if longest is not None else part[-1]
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    tokens = np.concatenate([*parts, np.zeros(1, np.int64)])
    names = MASKED if longest is not None else (END,)
    return Corpus(tokens, starts, words, {name: i for i, name in enumerate(names)})


def decoder_batches(
    corpus: Corpus, rows: int, length: int, count: int, *, packed: bool, seed: int
) -> list[Batch]:
    """Return `count` batches of `rows` rows of `length` tokens, or of as many tokens in packed
    documents, on the CPU.

    The last place of a row has no target: transformers, which shifts its labels, has none there.
    """
    packer = Packer(
        corpus,
        np.arange(len(corpus)),
        tokens=rows * length,
        context=length,
        seed=seed,
        is_rows=not packed,
    )
    batches = [packer.batch() for _ in range(count)]
    if not packed:
        for batch in batches:
            batch.targets[:, -1] = IGNORED
    return batches


def masked_batches(
    corpus: Corpus, rows: int, length: int, count: int, *, words: int, seed: int
) -> list[Padded]:
    """Return `count` batches for masked language models, padded to `length`, on the CPU.

    As in BERT a share of the tokens is to be predicted: 80 % of those become [MASK], 10 % a random
    token and 10 % stay.

    Args:
        corpus: the texts; longer ones are cut.
        rows: the texts of a batch.
        words: the size of the vocabulary from which random tokens are drawn.
        seed: the seed of the order of texts and of the masks.
    """
    rng = np.random.default_rng(seed)
    pad, mask = corpus.special["[PAD]"], corpus.special["[MASK]"]
    special = np.array(sorted(corpus.special.values()))
    order = np.resize(rng.permutation(len(corpus)), rows * count)
    batches = []
    for batch in order.reshape(count, rows):
        ids = np.full((rows, length), pad, np.int64)
        sizes = []
        for row, index in enumerate(batch):
            first, last = (int(x) for x in corpus.starts[index : index + 2])
            size = min(length, last - first)
            ids[row, :size] = corpus.tokens[first : first + size]
            sizes.append(size)
        present = np.arange(length) < np.array(sizes)[:, None]
        chosen = present & ~np.isin(ids, special) & (rng.random(ids.shape) < _SHARE)
        labels = np.where(chosen, ids, IGNORED)
        draw = rng.random(ids.shape)
        ids = np.where(chosen & (draw < 0.8), mask, ids)
        random = rng.integers(0, words, ids.shape)
        ids = np.where(chosen & (draw >= 0.8) & (draw < 0.9), random, ids)
        inputs, wanted, mask_of = map(torch.from_numpy, (ids, labels, present.astype(np.int64)))
        batches.append(Padded(inputs, wanted, mask_of, tuple(sizes)))
    return batches


def pack_masked(batches: list[Padded]) -> list[Batch]:
    """Return each batch with its texts end to end, without padding; all get the shape of the
    largest.

    A smaller batch is filled up with texts of zeros, of which nothing is predicted.
    """
    tokens = _round_up(max(sum(batch.lengths) for batch in batches), 128)
    places = max(int((batch.labels != IGNORED).sum()) for batch in batches)
    places = min(_round_up(places, 128), tokens)
    longest = max(max(batch.lengths) for batch in batches)
    # What fills a batch up is cut as the texts are.
    most = max(
        len(batch.lengths) + -(-(tokens - sum(batch.lengths)) // longest) for batch in batches
    )
    return [_pack(batch, tokens, places, longest, most) for batch in batches]


def _pack(batch: Padded, tokens: int, places: int, longest: int, most: int) -> Batch:
    present = batch.mask.bool()
    ids, labels = torch.zeros(tokens, dtype=torch.int64), torch.full((tokens,), IGNORED)
    real = sum(batch.lengths)
    ids[:real], labels[:real] = batch.ids[present], batch.labels[present]
    lengths, rest = list(batch.lengths), tokens - real
    while rest > 0:
        lengths.append(min(rest, longest))
        rest -= lengths[-1]
    positions = torch.cat([torch.arange(size) for size in lengths])
    cu_seqlens = torch.full((most + 1,), tokens, dtype=torch.int32)
    cu_seqlens[: len(lengths) + 1] = torch.tensor([0, *np.cumsum(lengths).tolist()])
    wanted = (labels != IGNORED).nonzero().flatten()
    spare = (labels == IGNORED).nonzero().flatten()[: places - len(wanted)]
    chosen = torch.cat([wanted, spare])
    state: dict[str, Any] = {}
    return Batch(
        ids,
        labels[chosen],
        positions,
        Documents(cu_seqlens, longest),
        chosen,
        len(batch.lengths),
        sum(size * size for size in batch.lengths),
        state,
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
