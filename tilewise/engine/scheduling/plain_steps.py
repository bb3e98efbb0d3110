"""Steps of sequences that ask for nothing but their next token: what is done for each is short.

A step may have thousands of them, and the host has less than the device takes for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq

from tilewise.engine.batch import PENDING, Batch, SampledToken, ScheduledSequence, TokenEvent
from tilewise.engine.request import Sequence
from tilewise.engine.scheduling.results import Results
from tilewise.engine.tables.block_tables import BlockTables

__all__ = ["append_to_all", "describe_all", "shape_of"]


def describe_all(
    runs: list[tuple[Sequence, int]],
    describe: Callable[[Sequence, int], ScheduledSequence],
    is_short: bool,
) -> tuple[tuple[ScheduledSequence, ...], bool]:
    """Return the runs of sequences, and whether all are what `Batch.is_plain` says.

    Args:
        runs: sequences, and how many of their next tokens each runs.
        describe: the long way, for those of which anything is special.
        is_short: no sequence has drafts.
    """
    described: list[ScheduledSequence] = []
    is_plain, new = is_short, tuple.__new__
    for seq, n in runs:
        start, known, drawn = seq.num_scheduled_tokens, len(seq.token_ids), seq.num_pending
        request = seq.request
        if not (
            is_short
            and n == 1
            and request.is_plain
            and known > seq.num_prompt_tokens
            and start + 1 == known + drawn
            and seq.places is None
            and not seq.is_stepwise
        ):
            described.append(describe(seq, n))
            is_plain = False
            continue
        blocks, told = seq.block_ids, seq.num_told_blocks
        seq.num_scheduled_tokens = start + 1
        seq.num_pending = drawn + 1
        seq.num_told_blocks = len(blocks)
        token_ids = (PENDING,) if drawn else (seq.token_ids[start],)
        described.append(
            new(ScheduledSequence, (
                seq.seq_id, token_ids, start, blocks, 1, request.row_sampling, (seq.seed,),
                known + drawn - seq.num_prompt_tokens, told, None, False, 0, (), (), (),
            ))
        )  # fmt: skip
    return tuple(described), is_plain


def shape_of(batch: Batch, samples: Seq[Seq[SampledToken]]) -> tuple[bool, bool]:
    """Return whether samples are as many as a step draws, and whether it is plain, too."""
    if len(samples) != len(batch.sequences):
        return False, False
    if batch.is_plain and set(map(len, samples)) == {1}:
        return True, True
    fits = all(
        run.num_samples <= len(drawn) <= run.num_samples + run.num_drafts
        for run, drawn in zip(batch.sequences, samples, strict=True)
    )
    return fits, False


def append_to_all(
    runs: Iterable[tuple[ScheduledSequence, int, Seq[SampledToken]]],
    live: Mapping[int, Sequence],
    results: Results,
    tables: BlockTables,
    events: list[TokenEvent],
) -> None:
    """Add the tokens of a plain step, of whose sequences few end.

    Args:
        runs: of each sequence its run, how often it had been preempted then, and its token.
        live: unfinished sequences by seq_id.
        results: takes the tokens that end a sequence.
        tables: is told of blocks that are full.
        events: what happened is added to these.
    """
    block_size, register, is_told = tables.block_size, tables.register, tables.prefix is not None
    new = tuple.__new__
    for run, preemptions, (token,) in runs:
        seq = live.get(run.seq_id)
        if seq is None or seq.num_preemptions != preemptions:
            continue
        computed = seq.num_computed_tokens = seq.num_computed_tokens + 1
        # Who came back from main memory may have several full blocks that nobody is told of yet.
        if is_told and computed >= (seq.num_registered_blocks + 1) * block_size:
            register(seq)
        seq.num_pending -= 1
        request, token_ids = seq.request, seq.token_ids
        if token.token_id in request.end_ids or len(token_ids) + 1 >= seq.max_len:
            results.append(seq, token, events)
            continue
        token_ids.append(token.token_id)
        cached = seq.num_cached_tokens
        events.append(
            new(TokenEvent, (request.request_id, seq.index, token, None, None, cached, None))
        )
