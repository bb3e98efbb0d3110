"""Log-probabilities that samples of a step on a device ask for: which, of which rows, read where.

A step of a search asks for them in every step. The numbers of its rows are sent once, since the
same few rows come again and again, and results are read to memory that is used in turn: a steady
step allocates nothing on the host for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise import ops
from tilewise.engine.batch import SampledToken, ScheduledSequence
from tilewise.engine.request import MOST_LOGPROBS
from tilewise.engine.steps.sampler import most_likely

__all__ = ["Asking", "FoundLogprobs", "Logprobs", "StepLogprobs"]

MOST_SENT = 64  # lists of rows that stay on the device
Logprobs = tuple[Tensor, Tensor, Tensor]


class StepLogprobs:
    """The log-probabilities that the steps of a runner compute, and their buffers.

    Args:
        max_num_seqs: rows of a decode step at most.
        device: the device of the steps.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.device = device
        self._most_rows = max_num_seqs
        self._numbers: dict[tuple[int, ...], Tensor] = {}
        self._rooms: dict[int, list[Tensor]] = {}

    def asking(self, samplers: Sequence[ScheduledSequence], rows: Sequence[int]) -> Asking | None:
        """Return the samples that ask for log-probabilities, sorted by row; None if no sample does.

        `rows` holds the row of each of `samplers`.
        """
        asking = [i for i, s in enumerate(samplers) if s.sampling.logprobs is not None]
        if not asking:
            return None
        # A search has the same few rows step after step, handed from beam to beam.
        asking.sort(key=lambda i: rows[i])
        most = max(samplers[i].sampling.logprobs or 0 for i in asking)
        return Asking(asking, self.sent(tuple(rows[i] for i in asking)), most)

    def sent(self, numbers: tuple[int, ...]) -> Tensor:
        """Return numbers as an int64 tensor on the device; recently sent ones are not copied
        again."""
        found = self._numbers.get(numbers)
        if found is None:
            found = torch.from_numpy(np.array(numbers, np.int64))
            if self.device.type == "cuda":
                found = found.pin_memory().to(self.device, non_blocking=True)
            if len(self._numbers) >= MOST_SENT:
                self._numbers.clear()
            self._numbers[numbers] = found
        return found

    def room_of(self, found: list[Tensor], place: int) -> list[Tensor]:
        """Return host memory, pinned on a GPU, to which log-probabilities of a decode step are
        copied.

        Args:
            found: the tensors on the device, whose shapes and dtypes the result has.
            place: the step's place in the ring of steps. A later step at this place gets the same
                memory, whose contents have been read by then.
        """
        kept = self._rooms.get(place, [])
        if [(x.dtype, x.shape[1:]) for x in kept] != [(x.dtype, x.shape[1:]) for x in found]:
            shapes = [(self._most_rows, *x.shape[1:]) for x in found]
            kept = self._rooms[place] = [
                torch.empty(shape, dtype=x.dtype, pin_memory=self.device.type == "cuda")
                for shape, x in zip(shapes, found, strict=True)
            ]
        return [room[: len(x)] for room, x in zip(kept, found, strict=True)]


class Asking(NamedTuple):
    """Samples that ask for log-probabilities.

    `ops.token_logprobs` gives at most MOST_LOGPROBS alternatives. Samples that ask for more, as
    wide beam searches do, have theirs from torch, which rounds in another way; bits of other
    samples do not depend on them.

    Attributes:
        places: the numbers of the samples among all samples of the step, in the order of their
            rows.
        rows: (n,) int64, on the device, the row of logits of each.
        most: the most alternatives that one of them asks for.
    """

    places: list[int]
    rows: Tensor
    most: int

    def found_in(self, logits: Tensor, tokens: Tensor) -> FoundLogprobs:
        """Compute the log-probabilities of these samples.

        Args:
            logits: the model's logits, a row for each of these samples.
            tokens: the drawn token of each of these samples.
        """
        logits, vocab = logits.float(), logits.shape[1]
        most = min(MOST_LOGPROBS, vocab)  # one number, so that one kernel is compiled
        found = [*ops.token_logprobs(logits, tokens, most)]
        if self.most > MOST_LOGPROBS:
            logprobs = logits.log_softmax(dim=-1)
            top, ids = most_likely(logprobs, min(self.most, vocab))
            own = logprobs.gather(-1, tokens[:, None])[:, 0]
            found += [own, ids.contiguous(), top.contiguous()]
        return FoundLogprobs(self.places, found)


class FoundLogprobs:
    """Log-probabilities of the samples `asking`, on the device and, once read, on the host.

    `found` has three tensors of all these samples: the log-probability of the drawn token, and ids
    and log-probabilities of the most likely ones. Where a sample asks for more than MOST_LOGPROBS,
    three more with more columns follow, likewise of all samples.
    """

    def __init__(self, asking: list[int], found: list[Tensor]) -> None:
        self.asking, self.tensors = asking, found
        self.host: list[Tensor] = []

    def attach(self, samplers: Sequence[ScheduledSequence], tokens: list[SampledToken]) -> None:
        """Replace the tokens of the samples `asking` in `tokens` by tokens with log-probabilities.

        The numbers are read from `host`, to which the caller has copied them. `samplers` are the
        runs of all samples of the step.
        """
        found = [x.tolist() for x in self.host]
        for row, i in enumerate(self.asking):
            kept = samplers[i].sampling.logprobs or 0
            own, ids, best = found[3:] if kept > MOST_LOGPROBS else found[:3]
            alternatives = tuple(zip(ids[row][:kept], best[row][:kept], strict=True))
            tokens[i] = SampledToken(tokens[i].token_id, own[row], alternatives)
