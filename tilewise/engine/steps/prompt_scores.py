"""Log-probabilities of a prompt's own tokens, collected over its chunks.

The row of position p says how likely the token at p + 1 was. A chunk scores what its rows predict
of the prompt; the step that draws a sequence's first token hands over all of it. The scheduler lets
such a sequence find nothing in the prefix cache, so that every position of it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import ops
from tilewise.engine.batch import Batch, SampledToken, ScoredToken
from tilewise.engine.request import MOST_LOGPROBS

__all__ = ["Chunk", "PromptScores", "finish", "hand_over", "score"]

# Logits that are scored at a time: 64 MiB of float32 on a CPU, 256 MiB on a GPU.
MAX_SCORED = {"cpu": 2**24, "cuda": 2**26}
Triple = tuple[Tensor, Tensor, Tensor]  # of `ops.token_logprobs`


class Chunk(NamedTuple):
    """The part of one prompt that a step scores.

    Attributes:
        first, last: rows of the step, the last one not included.
        targets: the token of the prompt that follows each of these rows, and is scored.
        num_best: the number of most likely tokens that are wanted beside each target.
        scores: the scores of the sequence so far, to which `finish` adds.
    """

    first: int
    last: int
    targets: tuple[int, ...]
    num_best: int
    scores: list[ScoredToken]


class PromptScores:
    """Follows the sequences of a runner whose prompts are scored."""

    def __init__(self) -> None:
        self._scores: dict[int, list[ScoredToken]] = {}

    def follow(self, batch: Batch, asks: bool) -> tuple[list[Chunk], dict[int, list[ScoredToken]]]:
        """Forget the sequences that left; return the chunks that this step scores, and scores to
        hand over.

        Every batch of a runner passes here, in order, and may pass again if its step fails: what a
        run scores then takes the place of what was scored from its first position on. So a runner
        that is reset keeps what earlier steps have scored, which is not computed again.

        Args:
            batch: the batch of the step.
            asks: True if a request of the batch asks for more than tokens, see `Batch.asks`.

        Returns:
            The chunks of the step, and, by place among the sequences, the scores of each prompt
            whose first token this step draws. Such scores are whole when the chunks of all steps up
            to this one are finished.
        """
        if self._scores:
            for seq_id in batch.left:
                self._scores.pop(seq_id, None)
        chunks, whole, row = list[Chunk](), dict[int, list[ScoredToken]](), 0
        if not asks:
            return chunks, whole
        for place, run in enumerate(batch.sequences):
            first, row = row, row + len(run.token_ids)
            count, asked = run.sampling.prompt_logprobs, run.asked
            if count is None or asked is None or run.num_generated > 0:
                continue  # later its prompt is computed again, but was scored before
            scores = self._scores.setdefault(run.seq_id, [])
            del scores[run.start :]
            last = min(row, first + asked.num_prompt_tokens - 1 - run.start)
            if first < last:
                after = run.start + 1
                targets = tuple(asked.token_ids[after : after + last - first])
                chunks.append(Chunk(first, last, targets, count, scores))
            if run.num_samples > 0:
                whole[place] = scores
        return chunks, whole


def score(
    chunks: Sequence[Chunk], logits_of: Callable[[Tensor], Tensor], vocab: int, device: torch.device
) -> list[Triple]:
    """Compute the log-probabilities of chunks, some rows at a time.

    Args:
        chunks: see `PromptScores.follow`.
        logits_of: a function that returns the logits (n, V) float32 of rows (n,) int64 of the step,
            valid until it is called again.
        vocab: the size of the vocabulary, V.
        device: the device of the step.

    Returns:
        The results for the rows of all chunks, in parts of consecutive rows. A part has the
        log-probabilities of the targets, and the ids and log-probabilities of the most likely
        tokens.
    """
    rows = torch.tensor([r for c in chunks for r in range(c.first, c.last)], dtype=torch.int64)
    targets = torch.tensor([t for c in chunks for t in c.targets], dtype=torch.int64)
    if device.type == "cuda":
        rows, targets = (x.pin_memory().to(device, non_blocking=True) for x in (rows, targets))
    most = min(MOST_LOGPROBS, vocab)
    step = max(MAX_SCORED[device.type] // vocab // 4, 1) * 4  # so that all parts begin aligned
    parts = []
    for first in range(0, len(rows), step):
        some = slice(first, first + step)
        parts.append(ops.token_logprobs(logits_of(rows[some]), targets[some], most))
    return parts


def finish(chunks: Sequence[Chunk], parts: Sequence[Triple]) -> None:
    """Add the results of `score`, which have reached the host, to the scores of their sequences."""
    columns = [x.tolist() for part in parts for x in part]
    own = [value for column in columns[0::3] for value in column]
    ids = [row for column in columns[1::3] for row in column]
    values = [row for column in columns[2::3] for row in column]
    at = 0
    for chunk in chunks:
        for token in chunk.targets:
            best = tuple(zip(ids[at][: chunk.num_best], values[at][: chunk.num_best], strict=True))
            chunk.scores.append((token, own[at], best))
            at += 1


def hand_over(samples: list[list[SampledToken]], whole: dict[int, list[ScoredToken]]) -> None:
    """Put the scores of each prompt into the first token that was drawn after it, in place.

    Args:
        samples: the tokens of each sequence of the step.
        whole: the scores by place among the sequences, see `PromptScores.follow`.
    """
    for place, scores in whole.items():
        first = samples[place][0]
        samples[place][0] = first._replace(prompt_logprobs=tuple(scores))
