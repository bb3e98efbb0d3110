"""Hidden states of a prompt, pooled to one vector over its chunks: embeddings.

The states are those after the model's last norm, which its logits are made of. "last" takes the
state of the last token, which no cache ever has, and "cls" that of the first. "mean" adds all up
chunk by chunk, "weightedmean" the first once, the second twice and so on, and "max" takes the
largest of each channel; the scheduler lets such a sequence find nothing in the prefix cache, so
that every position of it is computed. The step that draws a sequence's first token hands over its
vector; the token is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.engine.batch import Batch, SampledToken

__all__ = ["Part", "Pooled", "Pooling", "Pools", "hand_over"]


@dataclass(slots=True)
class Pooling:
    """The vector of one prompt, as far as it is known.

    Attributes:
        kind: one of `embedding.POOLINGS`.
        sums: (first position, sum, or maximum for "max", of the hidden states of a chunk, (E,)
            float64 on the host).
        num_tokens: the number of tokens of the prompt.
    """

    kind: str
    num_tokens: int
    sums: list[tuple[int, Tensor]] = field(default_factory=list)

    def vector(self) -> tuple[float, ...]:
        """Return the pooled vector of a prompt all of whose chunks are computed."""
        chunks = torch.stack([vector for _, vector in self.sums])
        total = chunks.amax(dim=0) if self.kind == "max" else chunks.sum(dim=0)
        if self.kind == "mean":
            total = total / self.num_tokens
        elif self.kind == "weightedmean":
            total = total / (self.num_tokens * (self.num_tokens + 1) // 2)
        return tuple(total.tolist())


class Part(NamedTuple):
    """The rows of a step that are pooled for one prompt: the first row of the prompt for "cls", its
    last for "last", and for other kinds all rows of the chunk.

    Attributes:
        first, last: the rows first ... last - 1 of the step.
        start: the position of row `first` in the prompt.
        pooling: the pooling of the prompt; `Pooled.finish` appends the sum of the rows' states, or
            their maximum for "max".
    """

    first: int
    last: int
    start: int
    pooling: Pooling


class Pools:
    """The `Pooling` of each running sequence that asks for its hidden states, pooled to a vector.

    A runner passes each batch to `follow`, which says which rows to pool, and hands over the
    pooling of a prompt once it is whole.
    """

    def __init__(self) -> None:
        self._poolings: dict[int, Pooling] = {}

    def follow(self, batch: Batch, asks: bool) -> tuple[list[Part], dict[int, Pooling]]:
        """Forget the sequences that left; return the rows that this step pools, and the poolings to
        hand over.

        Every batch of a runner passes here, in order, and may pass again if its step fails: its
        parts then take the place of what was added from their first position on.

        Args:
            batch: the batch of the step.
            asks: True if a request of the batch asks for more than tokens, see `Batch.asks`.

        Returns:
            The parts of the step, and, by place among the sequences, the pooling of each prompt
            whose first token this step draws. Such a pooling is whole when the parts of all steps
            up to this one are finished.
        """
        if self._poolings:
            for seq_id in batch.left:
                self._poolings.pop(seq_id, None)
        parts, whole, row = list[Part](), dict[int, Pooling](), 0
        if not asks:
            return parts, whole
        for place, run in enumerate(batch.sequences):
            first, row = row, row + len(run.token_ids)
            asked = run.asked
            if asked is None or asked.pooling is None or run.num_generated > 0:
                continue
            pooling, new = self._poolings.get(run.seq_id), (asked.pooling, asked.num_prompt_tokens)
            # A scheduler that took the place of one that broke gives its numbers again.
            if pooling is None or (pooling.kind, pooling.num_tokens) != new:
                pooling = self._poolings[run.seq_id] = Pooling(*new)
            pooling.sums = [(at, vector) for at, vector in pooling.sums if at < run.start]
            if asked.pooling == "cls":
                if run.start == 0:
                    parts.append(Part(first, first + 1, 0, pooling))
            elif asked.pooling != "last":
                parts.append(Part(first, row, run.start, pooling))
            elif run.num_samples > 0:
                parts.append(Part(row - 1, row, asked.num_prompt_tokens - 1, pooling))
            if run.num_samples > 0:
                whole[place] = pooling
        return parts, whole


class Pooled:
    """The sums, or largest values, of a step's parts: on its device and, once read, on the host.

    Args:
        parts: see `Pools.follow`.
        states_of: a function that returns the states (n, E) of rows (n,) int64 of the step, valid
            until it is called again.
        device: the device of the step.

    Attributes:
        tensors: a list of one tensor, (parts, E) float64, on the device.
        host: the list of one tensor in main memory to which the caller copies the results.
    """

    def __init__(
        self, parts: Sequence[Part], states_of: Callable[[Tensor], Tensor], device: torch.device
    ) -> None:
        self.parts = parts
        sums = []
        for part in parts:
            rows = torch.arange(part.first, part.last, device=device)
            states = states_of(rows).double()
            if part.pooling.kind == "weightedmean":
                weights = rows - (part.first - part.start) + 1
                states = states * weights[:, None]
            sums.append(states.amax(dim=0) if part.pooling.kind == "max" else states.sum(dim=0))
        self.tensors = [torch.stack(sums)]
        self.host: list[Tensor] = []

    def finish(self) -> None:
        """Append the vectors that have reached the host to the poolings of their prompts, a vector
        for each part."""
        for part, vector in zip(self.parts, self.host[0], strict=True):
            part.pooling.sums.append((part.start, vector))


def hand_over(samples: list[list[SampledToken]], whole: dict[int, Pooling]) -> None:
    """Put the pooled vector of each prompt into the first token that was drawn after it, in place.

    Args:
        samples: the tokens of each sequence of the step.
        whole: the poolings by place among the sequences, see `Pools.follow`.
    """
    for place, pooling in whole.items():
        samples[place][0] = samples[place][0]._replace(prompt_state=pooling.vector())
