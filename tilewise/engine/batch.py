"""What the scheduler hands to the runner, and what comes back. No torch.

schedule() -> Batch -> runner.submit() -> handle.result() -> list[list[SampledToken]] -> update()
           -> list[TokenEvent]

What is made for every token is no frozen dataclass, which takes three times as long to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tilewise.engine.request import NO_TOKEN, FinishReason, SamplingParams

__all__ = ["BROKEN", "PENDING", "Batch", "SampledToken", "ScheduledSequence", "TokenEvent"]

# Stands for a token that an unfinished step draws: the runner knows it, the host does not yet.
PENDING = -1


class ScheduledSequence(NamedTuple):
    """A run of tokens of one sequence to compute in this step.

    Attributes:
        token_ids: the tokens to run, positions start ... start + len - 1. PENDING alone is the
            token that the step before has drawn for this sequence.
        block_ids: cache blocks that cover positions 0 ... start + len - 1, and perhaps more. It is
            the sequence's own table, not a copy: a runner reads it in submit() and not later.
        num_samples: tokens to draw from the logits of the last row: 0 while the prompt is not yet
            whole, 1 normally, n at the step that completes a prompt of an n-sample request.
        seeds: one per sample.
        num_generated: tokens that each sample has drawn before; the random counter.
        first_new_block: block_ids before this index are what the last batch with this sequence
            said; 0 for a sequence that came since, or came back.
        is_chosen: the first token may be another than the runner has drawn for the sequence last.
        num_drafts: tokens at the end of token_ids that are guesses, to be verified. A token is
            drawn from the row of the one before the first of them and from each of theirs; the
            result is those that agree with the guesses, and the one after. DRAFT is a guess that
            the runner makes. num_samples is 1.
        known: all tokens of a sequence with drafts, these not included. Its own list, not a copy.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    start: int
    block_ids: Sequence[int]
    num_samples: int
    sampling: SamplingParams
    seeds: tuple[int, ...] = ()
    num_generated: int = 0
    first_new_block: int = 0
    is_chosen: bool = False
    num_drafts: int = 0
    known: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, never empty, the oldest sequence first.

    Attributes:
        sequences: what to compute.
        block_copies: (source, destination), done before anything is written; no source is a
            destination, so they have no order.
        left: seq_ids that lost their blocks since the batch before: they ended, or come back as if
            they were new.
    """

    sequences: tuple[ScheduledSequence, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    left: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the step, T."""
        return sum(len(s.token_ids) for s in self.sequences)


class SampledToken(NamedTuple):
    """A drawn token; the log-probabilities are of the model's distribution before truncation.

    The token_id NO_TOKEN says that the logits were NaN or infinite, and that nothing was drawn.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


# What a runner returns for each sample of a row of logits that is not finite.
BROKEN = SampledToken(NO_TOKEN)


@dataclass(slots=True)
class TokenEvent:
    """What a step did for one sample of one request.

    Attributes:
        token: what was drawn; None if the sample has ended by an error.
        error: why, where finish_reason is "error".
        num_cached_tokens: prompt tokens that the prefix cache had when the request was admitted.
    """

    request_id: str
    index: int
    token: SampledToken | None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: Exception | None = None
