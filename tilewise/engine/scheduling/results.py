"""Apply the results of a step to sequences: they grow, fork, end or fail. No torch.

Whatever ends a sequence is handled here: an end token, its length, a text with a stop string, a
deadline, an abort, a failure, a finished search.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from tilewise.engine.batch import SampledToken, TokenEvent, why_undrawn
from tilewise.engine.request import NO_TOKEN, FinishReason, Sequence
from tilewise.engine.scheduling.beams import Beams
from tilewise.engine.scheduling.preemption import Preemption
from tilewise.engine.scheduling.roster import Roster
from tilewise.engine.tables.block_tables import BlockTables

__all__ = ["Results"]


class Results:
    """Add the results of a step to sequences and end them; `Scheduler` states what its methods
    promise.

    Args:
        roster: the unfinished sequences.
        tables: the block tables of the sequences.
        beams: the beam searches.
        preemption: the record of sequences that lost their blocks, to which those that end are
            added.
    """

    def __init__(
        self, roster: Roster, tables: BlockTables, beams: Beams, preemption: Preemption
    ) -> None:
        self.roster, self.tables = roster, tables
        self.beams, self.preemption = beams, preemption

    def append(self, seq: Sequence, token: SampledToken, events: list[TokenEvent]) -> None:
        """Add the next token of a sequence, and an event to `events`; the token may end the
        sequence.

        A token that could not be drawn (NO_TOKEN) fails the whole request instead.
        """
        seq.token_ids.append(token.token_id)
        request, reason, stop_reason = seq.request, None, None
        if token.token_id in request.end_ids or len(seq.token_ids) >= seq.max_len:
            if token.token_id == NO_TOKEN:
                seq.token_ids.pop()
                events += self._fail_undrawn(seq, token)
                return
            reason, stop_reason = _why_finished(seq, token.token_id)
            self._finish(seq, reason, stop_reason)
        events.append(
            TokenEvent(
                request.request_id, seq.index, token, reason, stop_reason, seq.num_cached_tokens
            )
        )

    def append_all(
        self, seq: Sequence, tokens: Seq[SampledToken], events: list[TokenEvent]
    ) -> None:
        """Add tokens of a sequence, and their events to `events`, until one of them ends it."""
        for token in tokens:
            if seq.finish_reason is None:
                self.append(seq, token, events)

    def fork(
        self,
        seq: Sequence,
        seeds: tuple[int, ...],
        drawn: Seq[SampledToken],
        events: list[TokenEvent],
    ) -> None:
        """Fork a request into its samples once its prompt is computed, and add the first token of
        each.

        Samples that were ended before the fork end now. A token that could not be drawn fails the
        request.

        Args:
            seq: the sequence of the prompt.
            seeds: the seed of each sample.
            drawn: the first token of each sample.
            events: the list of events, to be extended.
        """
        if drawn[0].token_id == NO_TOKEN:  # all are drawn from one row of logits
            events += self._fail_undrawn(seq, drawn[0])
            return
        children = self.roster.fork(seq, seeds)
        for child in children:
            child.num_cached_tokens, child.is_stepwise = seq.num_cached_tokens, seq.is_stepwise
            self.tables.fork(seq, child)
            self.tables.trace.note("fork", seq.seq_id, child.seq_id, child.index)
        for sample, token in zip((seq, *children), drawn, strict=True):
            if sample.index in seq.ended:
                self._finish(sample, *seq.ended[sample.index])
            else:
                self.append(sample, token, events)

    def take_row(self, seq: Sequence, row: SampledToken, events: list[TokenEvent]) -> None:
        """Take the log-probabilities of a beam's next token; events of a search that ends go to
        `events`.

        A row that could not be drawn from fails the request.
        """
        if row.token_id == NO_TOKEN:
            events += self._fail_undrawn(seq, row)
            return
        found, gone = self.beams.take(seq, row)
        self.preemption.left += gone
        if found:
            self.end(seq.request.request_id, FinishReason.STOP, None)
        events += found

    def finish(
        self, request_id: str, index: int, reason: FinishReason, stop_reason: int | str | None
    ) -> bool:
        """End one sample of a request from outside; return whether it was unfinished until now,
        False also where there is no such request or sample.

        A sample that has not forked yet ends at the fork. A beam search is ended as a whole.

        Args:
            index: the number of the sample.
            reason, stop_reason: the reason to report.
        """
        family = self.roster.requests.get(request_id, ())
        if request_id in self.beams.searches:  # a search without beams is over
            return self.end(request_id, reason, stop_reason)
        if family and len(family) < family[0].request.sampling.num_samples:
            return self._finish_early(family[0], index, reason, stop_reason)
        for seq in family:
            if seq.index == index and seq.finish_reason is None:
                self._finish(seq, reason, stop_reason)
                return True
        return False

    def end(self, request_id: str, reason: FinishReason, stop_reason: int | str | None) -> bool:
        """End all unfinished sequences of a request, and release their blocks, without an event;
        return whether there were any, False also for an unknown request.

        Args:
            request_id: the id of the request.
            reason, stop_reason: the reason to report, and the token or text that stopped it or
                None.
        """
        unfinished = self.roster.unfinished(request_id)
        for seq in unfinished:
            self._finish(seq, reason, stop_reason)
        return bool(unfinished)

    def end_all(
        self, request_id: str, reason: FinishReason, error: Exception | None
    ) -> list[TokenEvent]:
        """End all samples of a request; return an event for each, those not forked yet included."""
        family = self.roster.requests[request_id]
        first, num_samples = family[0], family[0].request.sampling.num_samples
        indices = [s.index for s in family if s.finish_reason is None]
        if len(family) < num_samples:
            indices = [i for i in range(num_samples) if i not in first.ended]
        self.end(request_id, reason, None)
        return [
            TokenEvent(request_id, i, None, reason, None, first.num_cached_tokens, error)
            for i in indices
        ]

    def fail(self, request_id: str, error: Exception, *, is_damaged: bool) -> list[TokenEvent]:
        """End all samples of a request with an error.

        Args:
            is_damaged: True if the request may have spoilt its blocks: the prefix cache forgets
                them.

        Returns:
            The events of its samples; none for a request that is not running or waiting.
        """
        if not self.roster.unfinished(request_id):
            return []
        if is_damaged:
            family = self.roster.requests[request_id]
            self.tables.forget(family, self.roster.running)
            self.preemption.forget(family)
        return self.end_all(request_id, FinishReason.ERROR, error)

    def _fail_undrawn(self, seq: Sequence, token: SampledToken) -> list[TokenEvent]:
        """Fail the request of a token that could not be drawn; return the events of its samples."""
        error = why_undrawn(token, seq.request)
        return self.fail(seq.request.request_id, error, is_damaged=token.error is None)

    def _finish_early(
        self, seq: Sequence, index: int, reason: FinishReason, stop_reason: int | str | None
    ) -> bool:
        """End one sample of a request that has not forked yet; return whether it was unfinished.

        The sample ends at the fork; if all samples are ended so, the request ends now.
        """
        num_samples = seq.request.sampling.num_samples
        if index in seq.ended or not 0 <= index < num_samples:
            return False
        seq.ended[index] = reason, stop_reason
        if len(seq.ended) == num_samples:
            self._finish(seq, *seq.ended[seq.index])
        return True

    def _finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        seq.finish_reason = reason
        seq.stop_reason = stop_reason
        self.roster.remove(seq)
        is_last = seq.request.request_id not in self.roster.requests
        if is_last:
            self.beams.end(seq.request.request_id)
        self.tables.trace.finish(seq, is_last)
        if seq.block_ids:
            self.preemption.left.append(seq.seq_id)
        self.tables.drop_swapped(seq)
        self.tables.release(seq)
        if not self.roster.requests:
            self.tables.cancel_transfers()


def _why_finished(seq: Sequence, token_id: int) -> tuple[FinishReason, int | None]:
    if token_id in seq.request.stop_ids:
        return FinishReason.STOP, token_id
    if token_id in seq.request.end_ids:
        return FinishReason.STOP, None
    return FinishReason.LENGTH, None
