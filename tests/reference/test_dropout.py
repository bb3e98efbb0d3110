"""The rule of dropout: which byte decides, how many are kept, and that bytes are independent."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from tilewise import ops
from tilewise.kernels.spec import AttentionSpec
from tilewise.reference.dropout import dropout_rate, dropout_threshold, keep_mask

LOW = 0xFFFFFFFF
SEED, OFFSET = -(2**61) + 12345, 2**33 + 77


def words_of(counter: tuple[int, ...], seed: int) -> list[int]:
    """Philox4x32-7 of the paper in Python's integers."""
    c = list(counter)
    k = [seed & LOW, seed >> 32 & LOW]
    for _ in range(7):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [b >> 32 ^ c[1] ^ k[0], b & LOW, a >> 32 ^ c[3] ^ k[1], a & LOW]
        k = [(k[0] + 0x9E3779B9) & LOW, (k[1] + 0xBB67AE85) & LOW]
    return c


@pytest.mark.parametrize("place", [(0, 0, 0, 0), (1, 2, 30, 37), (0, 1, 9, 95), (1, 0, 16, 31)])
def test_a_decision_is_the_documented_byte(place: tuple[int, int, int, int]) -> None:
    b, h, i, j = place
    byte = 0
    for half in (0, 1):
        words = words_of((j // 32, 2 * i + half, b * 3 + h, OFFSET & LOW), SEED)
        for at, word in enumerate(words):
            byte |= (word >> j % 32 & 1) << (4 * half + at)
    for threshold in {1, byte or 1, min(byte + 1, 255), 255}:
        keep = keep_mask(torch.tensor([SEED, OFFSET]), (2, 3, 31, 97), threshold / 256)
        assert bool(keep[place]) == (byte >= threshold)


def test_a_part_of_the_mask_is_that_part() -> None:
    philox = torch.tensor([SEED, OFFSET])
    whole = keep_mask(philox, (2, 3, 40, 200), 0.3)
    part = keep_mask(
        philox, (1, 2, 11, 70), 0.3, first_query=20, first_key=96, first_head=4
    )  # fmt: skip
    assert torch.equal(part[0], whole[1, 1:3, 20:31, 96:166])


@pytest.mark.parametrize(
    ("dropout_p", "threshold"),
    [
        (0.0, 0), (0, 0), (1e-12, 1), (2**-16, 1), (1 / 256, 1), (1.49 / 256, 1), (1.51 / 256, 2),
        (0.1, 26), (0.5, 128), (254.4 / 256, 254), (1 - 2**-16, 255), (1.0, 256), (1, 256),
    ],
)  # fmt: skip
def test_only_0_and_1_drop_nothing_and_everything(dropout_p: float, threshold: int) -> None:
    assert dropout_threshold(dropout_p) == threshold
    assert dropout_rate(dropout_p) == threshold / 256
    spec = AttentionSpec("cpu", torch.float32, 1, 1, 1, 1, 1, 8, 8, dropout_p=dropout_p)
    assert spec.dropout_threshold == threshold
    assert spec.dropout_scale == (256 / (256 - threshold) if threshold < 256 else 0.0)


SIZE = 1024


@pytest.mark.parametrize("dropout_p", [1e-4, 0.1, 0.5, 0.9, 0.9999])
def test_what_is_kept_is_kept_as_often_as_the_scale_says(dropout_p: float) -> None:
    keep = ops.dropout_keep_mask((1, 2, SIZE, SIZE // 2), dropout_p=dropout_p, seed=3).double()
    rate = dropout_rate(dropout_p)
    spec = AttentionSpec("cpu", torch.float32, 1, 1, 1, 1, 1, 8, 8, dropout_p=dropout_p)
    deviation = math.sqrt(rate * (1 - rate) / keep.numel())
    assert abs(keep.mean() - (1 - rate)) < 4 * deviation
    # Unbiased: kept ones times the scale are 1 on average, of every key of 32 and every row of 16.
    scaled = (keep * spec.dropout_scale).reshape(2, SIZE // 16, 16, SIZE // 64, 32)
    spread = deviation * spec.dropout_scale
    assert (scaled.mean((0, 1, 2, 3)) - 1).abs().max() < 5 * spread * math.sqrt(32)
    assert (scaled.mean((0, 1, 3, 4)) - 1).abs().max() < 5 * spread * math.sqrt(16)


@functools.cache
def mask_of_two_heads(dropout_p: float) -> torch.Tensor:
    return ops.dropout_keep_mask((1, 2, SIZE // 2, SIZE // 2), dropout_p=dropout_p, seed=(5, 9))


# Neighbours in a word, in the next word, in the next row, eight rows on, of another head.
STEPS = [(0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 8), (0, 0, 0, 32), (0, 0, 1, 0), (0, 0, 8, 0),
         (0, 0, 1, 1), (0, 1, 0, 0)]  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.7])
def test_decisions_of_neighbours_are_independent(
    dropout_p: float, step: tuple[int, int, int, int]
) -> None:
    z = mask_of_two_heads(dropout_p).double() - (1 - dropout_rate(dropout_p))
    here = z[tuple(slice(0, n - at) for n, at in zip(z.shape, step, strict=True))]
    there = z[tuple(slice(at, None) for at in step)]
    variance = dropout_rate(dropout_p) * (1 - dropout_rate(dropout_p))
    correlation = (here * there).mean() / variance
    assert abs(correlation) < 4.5 / math.sqrt(here.numel())


def test_eight_bits_of_a_byte_are_independent() -> None:
    """Thresholds apart, each of the 256 bytes comes as often as any other."""
    philox = torch.tensor([11, 0])
    kept = torch.stack([keep_mask(philox, (1, 1, 128, 128), t / 256) for t in range(1, 256)])
    counts = torch.bincount(kept.sum(0).flatten(), minlength=256).double()
    chi = ((counts - 64) ** 2 / 64).sum()
    assert abs(chi - 255) < 4.5 * math.sqrt(2 * 255)


def test_seeds_offsets_and_heads_have_masks_of_their_own() -> None:
    shape = (2, 2, 64, 64)
    masks = [
        ops.dropout_keep_mask(shape, dropout_p=0.5, seed=seed)
        for seed in ((1, 0), (1, 1), (2, 0), (1 + 2**32, 0), (-1, 0))
    ]
    parts = [part for mask in masks for part in mask.flatten(0, 1)]
    for index, left in enumerate(parts):
        for right in parts[index + 1 :]:
            assert abs((left == right).double().mean() - 0.5) < 5 * 0.5 / 64
