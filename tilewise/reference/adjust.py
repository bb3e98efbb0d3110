"""Biases, masks and penalties of logits, applied token by token in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["adjust_logits", "penalised"]


def penalised(
    logit: float,
    *,
    in_prompt: bool,
    count: int,
    repetition: float,
    frequency: float,
    presence: float,
) -> float:
    """Return the logit of a token after penalties.

    The logit of a token that occurs in the prompt or the output is first divided by `repetition` if
    the logit is positive, and multiplied by it otherwise (Keskar et al., 2019). A token generated
    `count` times then loses count * frequency, and presence once (the OpenAI API).
    """
    if in_prompt or count:
        logit = logit / repetition if logit > 0 else logit * repetition
    return logit - count * frequency - (count > 0) * presence


def adjust_logits(
    logits: Tensor,
    rows: Tensor,
    mask: Tensor | None = None,
    mask_of: Tensor | None = None,
    bias_rows: Tensor | None = None,
    bias_ids: Tensor | None = None,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    counts_of: Tensor | None = None,
    penalties: Tensor | None = None,
) -> Tensor:
    """Return a copy of logits (R, V) in float64, adjusted as `ops.adjust_logits` does.

    First bias is added at (bias_rows, bias_ids). Then in each row of `rows` tokens whose bit in the
    row's mask is 0 become -inf, and with counts every logit is replaced by `penalised`.

    Args:
        rows: the rows with a mask or penalties.
        mask, mask_of: the masks, int32 words of 32 tokens each, and for each of `rows` the index of
            its mask, -1 for none.
        bias_rows, bias_ids, bias: the row, the token and the value of each bias.
        counts, counts_of: counts of each token, twice its number in the output plus 1 if it is in
            the prompt, and for each of `rows` the index of its counts, -1 for none.
        penalties: repetition, frequency and presence of each of `rows`.
    """
    after = logits.double().clone()
    if bias_rows is not None:
        assert bias_ids is not None
        assert bias is not None
        for row, token, value in zip(
            bias_rows.tolist(), bias_ids.tolist(), bias.tolist(), strict=True
        ):
            after[row, token] += value
    for index, row in enumerate(rows.tolist()):
        values = after[row].tolist()
        words = [] if mask is None or mask_of is None else mask[int(mask_of[index])].tolist()
        if mask_of is not None and int(mask_of[index]) >= 0:
            values = [
                x if words[token // 32] >> (token % 32) & 1 else -math.inf
                for token, x in enumerate(values)
            ]
        if counts is not None and counts_of is not None and int(counts_of[index]) >= 0:
            assert penalties is not None
            repetition, frequency, presence = penalties[index].tolist()
            seen = counts[int(counts_of[index])].tolist()
            values = [
                penalised(
                    x,
                    in_prompt=bool(word & 1),
                    count=word >> 1,
                    repetition=repetition,
                    frequency=frequency,
                    presence=presence,
                )
                for x, word in zip(values, seen, strict=True)
            ]
        after[row] = torch.tensor(values, dtype=torch.float64)
    return after
