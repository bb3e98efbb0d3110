"""What the scheduler hands to the runner, and what comes back. No torch.

schedule() -> Batch -> runner.submit() -> handle.result() -> list[list[SampledToken]] -> update()
           -> list[TokenEvent]

What is made for every token is no frozen dataclass, which takes three times as long to make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple, overload

from tilewise.engine.request import NO_TOKEN, Adapted, FinishReason, Request, SamplingParams
from tilewise.engine.sampling_options import Matcher

__all__ = [
    "BROKEN",
    "PENDING",
    "Asked",
    "Batch",
    "LaterRuns",
    "PlainDraws",
    "PlainEvents",
    "PlainTokens",
    "SampledToken",
    "ScheduledSequence",
    "ScoredToken",
    "StateMoves",
    "TokenEvent",
    "first_of",
    "why_undrawn",
]

# Stands for a token that an unfinished step draws: the runner knows it, the host does not yet.
PENDING = -1


class Asked(NamedTuple):
    """The facts about a sequence for the runner, if its logits are changed or its prompt is read.

    Attributes:
        adjusts: True if its logits are changed before tokens are drawn from them.
        token_ids: all known tokens, of the prompt and generated. It is the sequence's own list, not
            a copy: a runner reads it in submit() and not later.
        num_prompt_tokens: the number of these tokens that are the prompt.
        end_ids: tokens that end it.
        bad_word_ids, new_matcher, pooling, token_type_ids: see `Request`.
    """

    adjusts: bool
    token_ids: Sequence[int]
    num_prompt_tokens: int
    end_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    new_matcher: Callable[[], Matcher] | None = None
    pooling: str | None = None
    token_type_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, request: Request, token_ids: Sequence[int], num_prompt_tokens: int) -> Asked | None:
        """Return the facts of a sequence, or None if temperature and truncation are all that it
        asks for.

        They are returned if the request's logits are changed, or if prompt_logprobs or pooling are
        asked for.

        Args:
            request: the sequence's request.
            token_ids: the sequence's own list of tokens, which grows with it.
            num_prompt_tokens: the number of tokens of the prompt.
        """
        is_read = request.sampling.prompt_logprobs is not None or request.pooling is not None
        if not request.adjusts and not is_read:
            return None
        return cls(
            request.adjusts,
            token_ids,
            num_prompt_tokens,
            request.end_ids,
            request.bad_word_ids,
            request.new_matcher,
            request.pooling,
            request.token_type_ids,
        )


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
        asked: None for a sequence with nothing but temperature and truncation.
        is_chosen: True if the first token may be another than the runner has drawn for the sequence
            last.
        num_drafts: tokens at the end of token_ids that are guesses, to be verified. A token is
            drawn from the row of the one before the first of them and from each of theirs; the
            result is those that agree with the guesses, and the one after. DRAFT is a guess that
            the runner makes. num_samples is 1.
        draft_parents: the row of each draft's parent, 0 the token before the drafts; () where each
            comes after the one before, see `engine.scheduling.draft_trees`.
        known: all tokens of a sequence with drafts, these not included. Its own list, not a copy.
        others: block_ids and first_new_block for each group of layers beyond the first. A block id
            that the window has passed may name a block of another sequence by now, and is not read.
        adapter: the adapter of the request, whose products are added to the model's; None adds
            nothing.
        state_slot: the slot of its state in layers that keep one; -1 in a model without them.
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
    asked: Asked | None = None
    is_chosen: bool = False
    num_drafts: int = 0
    known: Sequence[int] = ()
    draft_parents: tuple[int, ...] = ()
    others: tuple[tuple[Sequence[int], int], ...] = ()
    adapter: Adapted | None = None
    state_slot: int = -1


class LaterRuns(Sequence[ScheduledSequence]):
    """The runs of a plain step with the same sequences as an earlier plain step, each one token per
    step further.

    Only such steps lie between the two. A runner that has followed them needs only these
    attributes; the runs themselves are made when they are first read, which must be in submit(), as
    block tables go on changing.

    Attributes:
        first: the runs of the earlier step, the very object that its batch has.
        number: steps since then, 1 and more.
        told: the place and first_new_block of each run with new blocks in its table.
        tokens: the token id that each run computes; None if the step before draws them.
    """

    __slots__ = ("_made", "first", "number", "tokens", "told")

    def __init__(
        self,
        first: tuple[ScheduledSequence, ...],
        number: int,
        told: Sequence[tuple[int, int]],
        tokens: Sequence[int] | None,
    ) -> None:
        """Describe a step, see the attributes."""
        self.first, self.number, self.told, self.tokens = first, number, told, tokens
        self._made: tuple[ScheduledSequence, ...] | None = None

    def run(self, place: int, first_new_block: int) -> ScheduledSequence:
        """Return the run at `place` of the earlier step, moved on to this step, with a
        first_new_block."""
        run, number = self.first[place], self.number
        return run._replace(
            token_ids=(PENDING,) if self.tokens is None else (self.tokens[place],),
            start=run.start + number,
            num_generated=run.num_generated + number,
            first_new_block=first_new_block,
        )

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self.first)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        """Yield the runs, all of which are made at the first call."""
        if self._made is None:
            told = dict(self.told)
            self._made = tuple(
                self.run(place, told.get(place, len(run.block_ids)))
                for place, run in enumerate(self.first)
            )
        return iter(self._made)

    @overload
    def __getitem__(self, place: int) -> ScheduledSequence: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[ScheduledSequence, ...]: ...
    def __getitem__(self, place: int | slice) -> ScheduledSequence | tuple[ScheduledSequence, ...]:
        """Return the run at an index, or a tuple of the runs of a slice."""
        return tuple(self)[place]


def first_of(runs: Sequence[ScheduledSequence]) -> tuple[Sequence[ScheduledSequence], int]:
    """Return the runs of the earlier step from which `LaterRuns` go on, and the number of steps
    since.

    For any other `runs` these are `runs` themselves and 0.
    """
    return (runs.first, runs.number) if isinstance(runs, LaterRuns) else (runs, 0)


class StateMoves(NamedTuple):
    """The copies that a step makes between slots of recurrent states and checkpoints of them.

    Attributes:
        restores: (checkpoint, slot, position): before the step and after swap_in the slot is set to
            the checkpoint, the state after `position` tokens of the sequence.
        forks: (slot, its copy), copied after the restores; no copy is a source.
        saves: (slot, checkpoint, position): after the step the slot's state after `position` tokens
            is copied to the checkpoint.
    """

    restores: tuple[tuple[int, int, int], ...] = ()
    forks: tuple[tuple[int, int], ...] = ()
    saves: tuple[tuple[int, int, int], ...] = ()

    def of_slots(self, slots: Set[int]) -> StateMoves:
        """Return the restores into, forks from and saves of the given slots of states, without all
        others."""
        return StateMoves(
            tuple(each for each in self.restores if each[1] in slots),
            tuple(each for each in self.forks if each[1] in slots),
            tuple(each for each in self.saves if each[0] in slots),
        )


NO_STATE_MOVES = StateMoves()


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, never empty, the oldest sequence first.

    Attributes:
        sequences: the runs to compute: a tuple, or `LaterRuns`.
        block_copies: (source, destination), done before anything is written; no source is a
            destination, so they have no order.
        left: seq_ids that lost their blocks since the batch before: they ended, or come back as if
            they were new.
        swap_out: (block, slot of main memory), copied to main memory before the step writes any
            block.
        swap_in: (slot, block), copied back after swap_out and before block_copies.
        other_copies: block_copies of the groups of layers beyond the first.
        other_moves: a pair (swap_out, swap_in) for each group of layers beyond the first.
        is_plain: True if every sequence runs the one token that it has drawn last, draws one, and
            asks for nothing but temperature and truncation. False may mean: not checked.
        states: the copies of states before and after the step.
    """

    sequences: Sequence[ScheduledSequence]
    block_copies: tuple[tuple[int, int], ...] = ()
    left: tuple[int, ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    other_copies: tuple[tuple[tuple[int, int], ...], ...] = ()
    other_moves: tuple[tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]], ...] = ()
    is_plain: bool = False
    states: StateMoves = NO_STATE_MOVES

    @property
    def is_moving(self) -> bool:
        """Whether a block of any group is swapped out to main memory or back in this step."""
        if self.swap_out or self.swap_in:
            return True
        return any(out or back for out, back in self.other_moves)

    @property
    def asks(self) -> bool:
        """Whether any sequence has an `Asked`: changed logits, prompt logprobs or pooling."""
        return not self.is_plain and any(s.asked is not None for s in self.sequences)

    @property
    def decodes(self) -> bool:
        """Whether every sequence runs one token and draws one."""
        return self.is_plain or all(
            s.num_samples == 1 and len(s.token_ids) == 1 for s in self.sequences
        )

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the step computes: rows T of its tensors."""
        if self.is_plain:
            return len(self.sequences)
        return sum(len(s.token_ids) for s in self.sequences)

    def part(self, sequences: Sequence[ScheduledSequence]) -> Batch:
        """Return a step of some of its sequences, with the block and state copies that these need.

        Block copies are kept if their destination is in a table of `sequences`. Swaps are kept
        whole; `left` is empty.

        Args:
            sequences: some of the runs, perhaps changed.
        """
        blocks = {block for s in sequences for block in s.block_ids}
        copies = tuple(pair for pair in self.block_copies if pair[1] in blocks)
        others = []
        for i, pairs in enumerate(self.other_copies):
            blocks = {block for s in sequences for block in s.others[i][0]} if pairs else set()
            others.append(tuple(pair for pair in pairs if pair[1] in blocks))
        return replace(
            self,
            sequences=tuple(sequences),
            block_copies=copies,
            left=(),
            other_copies=tuple(others),
            states=self.states.of_slots({s.state_slot for s in sequences}),
        )

    def of_group(self, group: int) -> Batch:
        """Return this step as one group of layers sees it: with its block tables, copies and swaps.

        The group is groups[group] of the cache's spec. Runs without tables of the group, as in a
        trial step, keep those of the first group. The group behind the last one is that of
        checkpoints of states, which no run lists.
        """
        if group == 0:
            return self
        runs = [
            s._replace(block_ids=s.others[group - 1][0], first_new_block=s.others[group - 1][1])
            if len(s.others) >= group
            else s
            for s in self.sequences
        ]
        copies = self.block_copies
        if self.other_copies or self.sequences[0].state_slot >= 0:
            copies = self.other_copies[group - 1] if len(self.other_copies) >= group else ()
        out, back = self.other_moves[group - 1] if self.other_moves else ((), ())
        return replace(self, sequences=tuple(runs), block_copies=copies, swap_out=out, swap_in=back)


# A token of a prompt, its log-probability, and the most likely tokens in its place with theirs.
ScoredToken = tuple[int, float, tuple[tuple[int, float], ...]]


class SampledToken(NamedTuple):
    """A drawn token; the log-probabilities are of the model's own distribution.

    So they are taken before penalties, biases and other changes of the logits, and before
    temperature and truncation. The token_id NO_TOKEN says that nothing was drawn: the logits were
    NaN or infinite, or `error` tells why.

    Attributes:
        prompt_logprobs: the scores of the prompt's tokens, with a sequence's first token if they
            were asked for; else None.
        error: the exception of a draw that failed, such as a grammar's; else None.
        prompt_state: the pooled hidden state of the prompt, with a sequence's first token if
            pooling was asked for; else None.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: tuple[ScoredToken, ...] | None = None
    error: Exception | None = None
    prompt_state: tuple[float, ...] | None = None


def why_undrawn(token: SampledToken, request: Request) -> Exception:
    """Return the exception that ends a request whose drawn token is NO_TOKEN.

    The exception is the token's own error, else a FloatingPointError about logits that are not
    finite.
    """
    if token.error is not None:
        return token.error
    if request.adjusts:
        return FloatingPointError(
            "logits must be finite for one token at least, got none: the model's are NaN or "
            "infinite, or a logits processor leaves no token"
        )
    return FloatingPointError("logits must be finite, got NaN or infinity from the model")


# What a runner returns for each sample of a row of logits that is not finite.
BROKEN = SampledToken(NO_TOKEN)


class PlainTokens(dict[int, SampledToken]):
    """A memory of `SampledToken`s without log-probabilities, by token id.

    A look-up takes less time than making a token anew. It grows to the size of the vocabulary, with
    100 bytes for each token.
    """

    def __missing__(self, token_id: int) -> SampledToken:
        """Make, keep and return the token of an id that is asked for the first time."""
        token = self[token_id] = SampledToken(token_id)
        return token


_plain = PlainTokens()


class PlainDraws(Sequence[list[SampledToken]]):
    """The tokens that a plain step has drawn: one for each sequence, without log-probabilities.

    Attributes:
        ids: the ids of the drawn tokens.
    """

    __slots__ = ("ids",)

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    @property
    def tokens(self) -> list[SampledToken]:
        """The drawn token of each sequence, in the order of the batch."""
        return list(map(_plain.__getitem__, self.ids))

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.ids)

    def __iter__(self) -> Iterator[list[SampledToken]]:
        """Yield a list with the one drawn token of each sequence."""
        return iter([[token] for token in self.tokens])

    @overload
    def __getitem__(self, place: int) -> list[SampledToken]: ...
    @overload
    def __getitem__(self, place: slice) -> list[list[SampledToken]]: ...
    def __getitem__(self, place: int | slice) -> list[SampledToken] | list[list[SampledToken]]:
        """Return the tokens of the sequence at `place`, a list of one; for a slice, those lists."""
        if isinstance(place, slice):
            return [[_plain[token_id]] for token_id in self.ids[place]]
        return [_plain[self.ids[place]]]


class TokenEvent(NamedTuple):
    """The result of a step for one sample of one request.

    Attributes:
        request_id: the name of the request.
        index: the number of the sample in the request.
        token: the token that was drawn; None if the sample has ended by an error.
        finish_reason: the reason why the sample ended; None if it goes on.
        stop_reason: the token id or text that ended a sample whose finish_reason is "stop"; else
            None.
        num_cached_tokens: prompt tokens that the prefix cache had when the request was admitted.
        error: the reason of the failure, where finish_reason is "error".
    """

    request_id: str
    index: int  # type: ignore[assignment]  # a tuple has a method of that name
    token: SampledToken | None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: Exception | None = None


class PlainEvents(Sequence[TokenEvent]):
    """The token events of a plain step in which no sample ended, made when they are first read.

    Attributes:
        request_ids, indices, cached: lists of each event's request, sample and number of cached
            prompt tokens. The events of another step may have the same lists: do not change them.
        draws: the drawn token of each event.
    """

    __slots__ = ("_made", "cached", "draws", "indices", "request_ids")

    def __init__(
        self, request_ids: list[str], indices: list[int], cached: list[int], draws: PlainDraws
    ) -> None:
        self.request_ids, self.indices, self.cached = request_ids, indices, cached
        self.draws = draws
        self._made: list[TokenEvent] | None = None

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self.request_ids)

    def __iter__(self) -> Iterator[TokenEvent]:
        """Yield the events, all of which are made at the first call."""
        if self._made is None:
            columns = self.request_ids, self.indices, self.draws.tokens, self.cached
            self._made = [
                TokenEvent(request_id, index, token, None, None, cached)
                for request_id, index, token, cached in zip(*columns, strict=True)
            ]
        return iter(self._made)

    @overload
    def __getitem__(self, place: int) -> TokenEvent: ...
    @overload
    def __getitem__(self, place: slice) -> list[TokenEvent]: ...
    def __getitem__(self, place: int | slice) -> TokenEvent | list[TokenEvent]:
        """Return the event at an index, or a list of the events of a slice."""
        return list(self)[place]
