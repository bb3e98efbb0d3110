"""What the scheduler hands to the runner, and what comes back. No torch.

schedule() -> Batch -> inputs, runner, sampler -> list[list[SampledToken]] -> update()
           -> list[TokenEvent]
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.engine.request import FinishReason, SamplingParams

__all__ = ["Batch", "SampledToken", "ScheduledSequence", "TokenEvent"]


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A run of tokens of one sequence to compute in this step.

    Attributes:
        token_ids: the tokens to run, positions start ... start + len - 1.
        block_ids: cache blocks that cover positions 0 ... start + len - 1; a snapshot.
        num_samples: tokens to draw from the logits of the last row: 0 while the prompt is not yet
            whole, 1 normally, n at the step that completes a prompt of an n-sample request.
        seeds: one per sample.
        num_generated: tokens that each sample has drawn before; the random counter.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    num_samples: int
    sampling: SamplingParams
    seeds: tuple[int, ...] = ()
    num_generated: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, never empty, the oldest sequence first.

    Attributes:
        sequences: what to compute.
        block_copies: (source, destination), done before anything is written; no source is a
            destination, so they have no order.
    """

    sequences: tuple[ScheduledSequence, ...]
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the step, T."""
        return sum(len(s.token_ids) for s in self.sequences)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A drawn token; the log-probabilities are of the model's distribution before truncation."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What a step did for one sample of one request.

    Attributes:
        num_cached_tokens: prompt tokens that the prefix cache had when the request was admitted.
    """

    request_id: str
    index: int
    token: SampledToken
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
