"""Guesses of a head of the model itself, from its hidden states.

The head has a row for each position p: the hidden state of p and the token of p + 1. It keeps keys
for them under the model's block ids, in a storage of its own. A step leaves the hidden states of
its right rows; those of a prompt are computed at once, the others with the first guess of the next
step. Further guesses apply the head to what it has put out. Their keys are written again when the
states are the model's. Wrong contents cost accepted guesses, never a token, for the model verifies
each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import Batch, ScheduledSequence
from tilewise.engine.scheduling.speculative import DRAFT
from tilewise.engine.steps.inputs import ModelInputs
from tilewise.engine.steps.runner import Samples
from tilewise.engine.steps.verifying import VerifyingRunner
from tilewise.models.multi_token_head import MultiTokenHead
from tilewise.nn.context import AttentionContext

__all__ = ["HeadGuesser"]


class _HeadRunner(VerifyingRunner):
    """Runs the head, and keeps the hidden states of rows that are drawn from."""

    last: Tensor  # (R, E)

    def __init__(self, head: MultiTokenHead, storage: KVStorage, **settings: Any) -> None:
        super().__init__(head, storage, **settings)
        self.head = head
        width = head.config.hidden_size
        self._previous = torch.zeros(len(self.ids), width, dtype=head.dtype, device=self.device)

    def forward_of(self, rows: int, ctx: AttentionContext) -> Callable[[], Tensor]:
        """Return a function that computes the head's hidden states of the first `rows` rows of the
        buffers.

        Before it runs, the function gives the head the model's hidden states that these rows need.
        """
        forward, previous = super().forward_of(rows, ctx), self._previous[:rows]

        def compute() -> Tensor:
            self.head.previous = previous
            return forward()

        return compute

    def _write(self, inputs: ModelInputs, count: int, width: int) -> Tensor | None:
        places = super()._write(inputs, count, width)
        self.put(self._previous, self.head.previous, places)
        return places

    def _forward(self, inputs: ModelInputs) -> Tensor:
        logits = super()._forward(inputs)
        assert self._hidden is not None
        self.last = self._hidden.index_select(0, inputs.logits_rows)
        return logits


class HeadGuesser:
    """Guesses the next tokens of a batch by a multi-token head of the model (MTP).

    Args:
        head: the head, over the embedding and the output head of the model.
        storage: the cache of the head, of one layer and as many blocks as the model's.
        max_num_seqs, max_model_len, num_drafts: see `VerifyingRunner`.
        has_graphs: whether guesses are made by CUDA graphs.
        batch_invariant: see `ModelRunner`.
    """

    def __init__(
        self,
        head: MultiTokenHead,
        storage: KVStorage,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_drafts: int,
        has_graphs: bool,
        batch_invariant: bool,
    ) -> None:
        self.head = head
        self.draft = _HeadRunner(
            head,
            storage,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_drafts=num_drafts,
            batch_invariant=batch_invariant,
            pads=has_graphs,
        )
        # Of a sequence: a position, and the hidden states of it and of those behind it, which the
        # head has not seen.
        self._unseen: dict[int, tuple[int, Tensor]] = {}
        self._left: list[int] = []

    def reset(self) -> None:
        """Forget all sequences, here and in the runner of the head."""
        self._unseen, self._left = {}, []
        self.draft.reset()

    def guess(self, batch: Batch) -> Batch:
        """Return a batch with guesses in place of DRAFT.

        The first guess follows from the model's hidden states that `note` has kept, further ones
        from those of the head. A sequence without such a state gets token 0 for its guesses. The
        batch's blocks are copied in the head's cache first.
        """
        if batch.block_copies:
            pairs = torch.tensor(batch.block_copies, dtype=torch.int64)
            self.draft.copy(pairs.to(self.draft.device))
        for seq_id in batch.left:
            self._unseen.pop(seq_id, None)
        self._left += batch.left
        asking = [run for run in batch.sequences if DRAFT in run.token_ids]
        guesses: dict[int, list[int]] = {run.seq_id: [] for run in asking}
        states: dict[int, Tensor] = {}
        for i in range(max((run.num_drafts for run in asking), default=0)):
            runs, rows = [], []
            for run in asking:
                found = self._unseen.get(run.seq_id) if i == 0 else None
                if i == 0 and found is not None and found[0] + len(found[1]) == run.start:
                    first, state = found
                    tokens = (*run.known[first + 1 : run.start], run.token_ids[0])
                elif 0 < i < run.num_drafts and run.seq_id in states:
                    first, state = run.start - 1 + i, states[run.seq_id]
                    tokens = (guesses[run.seq_id][-1],)
                else:
                    continue
                rows.append(state)
                runs.append(
                    run._replace(token_ids=tokens, start=first, num_generated=run.num_generated + i)
                )
            if not runs:
                break
            drawn = self._submit(runs, rows)
            for run, samples, state in zip(runs, drawn, self.draft.last, strict=True):
                guesses[run.seq_id].append(max(samples[0].token_id, 0))
                states[run.seq_id] = state[None]
        return replace(
            batch,
            sequences=tuple(
                run._replace(token_ids=(run.token_ids[0], *_filled(guesses[run.seq_id], run)))
                if run.seq_id in guesses
                else run
                for run in batch.sequences
            ),
        )

    def note(self, batch: Batch, samples: Samples, states_of: Callable[[Tensor], Tensor]) -> None:
        """Take the model's hidden states of a step that has ended.

        The head computes those of prompts at once, to fill its cache. Those of other runs are kept
        for the next call of `guess`, without the rows of guesses that were wrong.

        Args:
            batch: the step, with its guesses.
            samples: the tokens that each run has drawn: its right guesses and one more.
            states_of: a function that returns the hidden states (n, E) of rows (n,) int64.
        """
        total = sum(len(run.token_ids) for run in batch.sequences)
        hidden = states_of(torch.arange(total, device=self.draft.device)).clone()
        first_row, runs, rows = 0, [], []
        for run, drawn in zip(batch.sequences, samples, strict=True):
            count = len(run.token_ids) if run.num_drafts == 0 else len(drawn)
            own = hidden[first_row : first_row + count]
            first_row += len(run.token_ids)
            start, before = run.start, self._unseen.get(run.seq_id)
            is_next = before is not None and before[0] + len(before[1]) == start
            if count == 1 or run.num_drafts > 0:
                # The tokens behind unseen states are in `known` when guesses are asked for.
                if is_next and before is not None and run.num_drafts == 0:
                    start, own = before[0], torch.cat((before[1], own))
                self._unseen[run.seq_id] = start, own.clone()
                continue
            tokens = run.token_ids[1:]
            states = own[:-1]
            if is_next and before is not None and len(before[1]) == 1:
                start, tokens = start - 1, run.token_ids
                states = torch.cat((before[1], states))
            runs.append(run._replace(token_ids=tokens, start=start, num_samples=0, seeds=()))
            rows.append(states)
            self._unseen[run.seq_id] = run.start + count - 1, own[-1:].clone()
        if runs:
            self._submit(runs, rows)

    def _submit(self, runs: list[ScheduledSequence], rows: list[Tensor]) -> Samples:
        left, self._left = tuple(self._left), []
        plain = tuple(
            run._replace(first_new_block=0, num_drafts=0, known=(), others=(), asked=None)
            for run in runs
        )
        self.head.previous = torch.cat(rows)
        return self.draft.submit(Batch(plain, (), left)).result()


def _filled(guesses: list[int], run: ScheduledSequence) -> list[int]:
    """Return the guesses, filled up with token 0 to the number of drafts of the run.

    Guesses are lacking where the head had no hidden state of the sequence.
    """
    return [*guesses, *[0] * (run.num_drafts - len(guesses))]
