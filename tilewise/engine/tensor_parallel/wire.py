"""Steps and results as plain data: what a parent tells its workers, and what they answer. No torch.

frame = 8 bytes of length, then JSON: a list whose first entry says what it is

A step tells of each sequence what the worker does not know yet: new tokens, new blocks, and what
was asked of it when it came. Of a plain step that goes on with all sequences of the one before only
new blocks are told: 256 rows are 30 bytes in place of 11 KB, and no row is made on either side.
Nothing is ever unpickled, and a worker calls no function that a frame names. JSON keeps 64-bit
integers and doubles to the bit.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from tilewise.engine.batch import (
    Asked,
    Batch,
    LaterRuns,
    PlainDraws,
    SampledToken,
    ScheduledSequence,
    StateMoves,
    first_of,
)
from tilewise.engine.request import Adapted, SamplingParams
from tilewise.engine.sampling_options import Matcher, StructuredOutputs

__all__ = [
    "BatchReader",
    "BatchWriter",
    "FrameReader",
    "encoded",
    "error_of",
    "named",
    "read_samples",
    "send",
    "write_samples",
]

Samples = list[list[SampledToken]]
_LENGTH = struct.Struct("<Q")
# What a runner reads of SamplingParams. Stop rules are the scheduler's.
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "logprobs",
    "prompt_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "max_tokens",
)
# Errors that keep their type on the way; any other becomes a RuntimeError that names it.
_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        FloatingPointError,
        ImportError,
        IndexError,
        MemoryError,
        NotImplementedError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    )
}


def send(to: socket.socket, message: Sequence[Any]) -> None:
    """Write one frame.

    Raises:
        OSError: the other side has gone.
    """
    to.sendall(encoded(message))


def encoded(message: Sequence[Any]) -> bytes:
    """Return the frame of a message, a list of plain data: 8 bytes of length, then JSON."""
    body = json.dumps(message, separators=(",", ":"), default=_plain).encode()
    return _LENGTH.pack(len(body)) + body


def _plain(value: Any) -> Any:
    """Return a number of numpy as Python's, for the JSON encoder."""
    return value.item()


class FrameReader:
    """Joins the bytes that a socket delivers to whole frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[list[Any]]:
        """Return the messages that `data` completes, in order, each a list that was sent as JSON.

        The bytes of an incomplete last frame are kept for the next call.
        """
        have, frames = self._bytes, []
        have += data
        while len(have) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(have)
            end = _LENGTH.size + length
            if len(have) < end:
                break
            frames.append(json.loads(have[_LENGTH.size : end]))
            del have[:end]
        return frames


def named(error: BaseException) -> tuple[str, str]:
    """Return an error as plain data: its type's name and its message."""
    return type(error).__name__, str(error)


def error_of(name: str, message: str) -> Exception:
    """Return the error of a worker, given the name of its type and its message.

    A type that is not of `_ERRORS` becomes a RuntimeError that names it.
    """
    kind = _ERRORS.get(name)
    return RuntimeError(f"{name}: {message}") if kind is None else kind(message)


class _Sampling(SamplingParams):
    """Sampling parameters that may ask for as many log-probabilities as a beam search needs."""

    most_logprobs: ClassVar[int] = 2**31


class BatchWriter:
    """Turns a runner's batches into messages that contain only what workers do not know yet.

    It remembers for each sequence what it has told. Every batch passes here, in order.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        # The runs and the number of the last step if it was plain, see `LaterRuns`, and the number
        # of the one that was told whole, from which the workers count.
        self._last: tuple[Sequence[ScheduledSequence], int] | None = None
        self._whole = 0

    def reset(self) -> None:
        """Forget all sequences, as the workers do."""
        self._known.clear()
        self._last = None

    def write(self, batch: Batch) -> list[Any]:
        """Return the message from which a `BatchReader` makes this batch again.

        Raises:
            ValueError: a request has logits processors, which cannot be sent.
        """
        runs, last = batch.sequences, self._last
        first, number = first_of(runs)
        goes_on = last is not None and last[0] is first and last[1] + 1 == number
        self._last = (first, number) if batch.is_plain else None
        if goes_on and isinstance(runs, LaterRuns) and not _is_more(batch):
            told = [(i, new, first[i].block_ids[new:]) for i, new in runs.told]
            return ["later", number - self._whole, told, runs.tokens]
        self._whole = number
        for seq_id in batch.left:
            self._known.pop(seq_id, None)
        rows = [self._row(run) for run in runs]
        return [
            rows,
            batch.block_copies,
            batch.left,
            batch.swap_out,
            batch.swap_in,
            batch.other_copies,
            batch.other_moves,
            batch.states,
            *([1] if batch.is_plain else []),
        ]

    def _row(self, run: ScheduledSequence) -> list[Any]:
        known, first, others = self._known.get(run.seq_id), run.first_new_block, run.others
        if known is None:
            known, first, others = _Known(), 0, tuple((blocks, 0) for blocks, _ in others)
            self._known[run.seq_id] = known
        news: dict[str, Any] = {}
        if known.adapter is not run.adapter:
            known.adapter = run.adapter
            news["adapter"] = 0 if run.adapter is None else run.adapter.number
        if known.sampling is not run.sampling:
            news["sampling"] = _sampling(run.sampling)
            known.sampling = run.sampling
        if known.seeds != run.seeds:
            known.seeds = run.seeds
            news["seeds"] = run.seeds
        if run.asked is not None:
            news["asked"] = self._asked(run, run.asked, known)
        return [
            run.seq_id,
            run.token_ids,
            run.start,
            first,
            run.block_ids[first:],
            run.num_samples,
            run.num_generated,
            run.is_chosen,
            run.num_drafts,
            run.draft_parents,
            news,
            [(new, blocks[new:]) for blocks, new in others],
            run.state_slot,
        ]

    def _asked(self, run: ScheduledSequence, asked: Asked, known: _Known) -> list[Any]:
        if run.is_chosen or len(asked.token_ids) < known.num_tokens:
            known.num_tokens = 0
        first, known.num_tokens = known.num_tokens, len(asked.token_ids)
        told: list[Any] = [first, asked.token_ids[first:]]
        if first == 0:
            told.append(
                [
                    asked.adjusts,
                    asked.num_prompt_tokens,
                    sorted(asked.end_ids),
                    asked.bad_word_ids,
                    asked.new_matcher is not None,
                    asked.pooling,
                ]
            )
        return told


def _is_more(batch: Batch) -> bool:
    """Return whether a batch says more than plain runs: left sequences, or blocks copied or
    moved."""
    copies = batch.block_copies or any(batch.other_copies) or any(batch.states)
    return bool(not batch.is_plain or batch.left or copies or batch.is_moving)


class _Known:
    __slots__ = ("adapter", "num_tokens", "sampling", "seeds")

    def __init__(self) -> None:
        self.adapter: Adapted | None = None
        self.sampling: SamplingParams | None = None
        self.seeds: tuple[int, ...] = ()
        self.num_tokens = 0


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    if sampling.logits_processors:
        raise ValueError(
            "logits_processors must be None where other processes draw the tokens, "
            f"got {len(sampling.logits_processors)}"
        )
    told = {name: getattr(sampling, name) for name in _SAMPLING}
    if sampling.logit_bias:
        told["logit_bias"] = list(sampling.logit_bias.items())
    if sampling.allowed_token_ids:
        told["allowed_token_ids"] = list(sampling.allowed_token_ids)
    structured = sampling.structured
    if structured is not None:
        fields = {name: getattr(structured, name) for name in structured.__dataclass_fields__}
        told["structured"] = {name: value for name, value in fields.items() if value is not None}
    return told


class BatchReader:
    """Makes batches again from the messages of a `BatchWriter`, on a worker, in their order.

    Args:
        new_matcher: a function from the description of a structured text to a function that starts
            a matcher of it.
        adapters: the adapters that were loaded, by number.
    """

    def __init__(
        self,
        new_matcher: Callable[[StructuredOutputs], Callable[[], Matcher]],
        adapters: Mapping[int, Adapted] | None = None,
    ) -> None:
        self._new_matcher = new_matcher
        self._adapters = {} if adapters is None else adapters
        self._told: dict[int, _Told] = {}
        self._first: tuple[ScheduledSequence, ...] = ()  # of the last step that was told whole

    def reset(self) -> None:
        """Forget all sequences."""
        self._told.clear()
        self._first = ()

    def read(self, message: Sequence[Any]) -> Batch:
        """Return the batch that a `BatchWriter` was given."""
        if message[0] == "later":
            return Batch(self._later(*message[1:]), is_plain=True)
        rows, copies, left, swap_out, swap_in, other_copies, other_moves, states, *plain = message
        for seq_id in left:
            self._told.pop(seq_id, None)
        self._first = ()  # where this fails, the next step goes on with none
        self._first = tuple(map(self._run, rows))
        return Batch(
            self._first,
            _pairs(copies),
            tuple(left),
            _pairs(swap_out),
            _pairs(swap_in),
            tuple(map(_pairs, other_copies)),
            tuple((_pairs(out), _pairs(back)) for out, back in other_moves),
            bool(plain),
            StateMoves(*(tuple(map(tuple, moves)) for moves in states)),
        )

    def _later(
        self, number: int, told: Sequence[tuple[int, int, list[int]]], tokens: Sequence[int] | None
    ) -> LaterRuns:
        """Return the runs of a later step of the sequences in the last full message.

        Args:
            number: the number of steps since that message.
            told: (place of the run, first new block, new blocks) where blocks are new.
            tokens: the tokens of the runs; None where the device has them.

        Raises:
            RuntimeError: the last full message could not be read.
        """
        if not self._first:
            raise RuntimeError("a step must go on with one that was read, got none")
        for place, new, blocks in told:
            self._told[self._first[place].seq_id].block_ids[new:] = blocks
        return LaterRuns(self._first, number, [(place, new) for place, new, _ in told], tokens)

    def _run(self, row: Sequence[Any]) -> ScheduledSequence:
        (
            seq_id,
            token_ids,
            start,
            first,
            blocks,
            num_samples,
            num_generated,
            is_chosen,
            num_drafts,
            draft_parents,
            news,
            others,
            state_slot,
        ) = row
        told = self._told.get(seq_id)
        if told is None:
            told = self._told[seq_id] = _Told()
        told.block_ids[first:] = blocks
        if len(told.others) < len(others):
            told.others = [[] for _ in others]
        for table, (new, blocks) in zip(told.others, others, strict=True):
            table[new:] = blocks
        if news:
            self._take(told, news)
        return ScheduledSequence(
            seq_id=seq_id,
            token_ids=tuple(token_ids),
            start=start,
            block_ids=told.block_ids,
            num_samples=num_samples,
            sampling=told.sampling,
            seeds=told.seeds,
            num_generated=num_generated,
            first_new_block=first,
            asked=told.asked,
            is_chosen=is_chosen,
            num_drafts=num_drafts,
            draft_parents=tuple(draft_parents),
            others=tuple((told.others[i], new) for i, (new, _) in enumerate(others)),
            adapter=told.adapter,
            state_slot=state_slot,
        )

    def _take(self, told: _Told, news: Mapping[str, Any]) -> None:
        if "sampling" in news:
            fields = dict(news["sampling"])
            if "logit_bias" in fields:
                fields["logit_bias"] = dict(fields["logit_bias"])
            if "structured" in fields:
                fields["structured"] = StructuredOutputs(**fields["structured"])
            told.sampling = _Sampling(**fields)
        if "adapter" in news:
            number = news["adapter"]
            told.adapter = self._adapters[number] if number else None
        if "seeds" in news:
            told.seeds = tuple(news["seeds"])
        if "asked" in news:
            first, tokens, *terms = news["asked"]
            told.token_ids[first:] = tokens
            if terms:
                adjusts, num_prompt_tokens, end_ids, words, has_matcher, pooling = terms[0]
                structured = told.sampling.structured
                told.asked = Asked(
                    adjusts,
                    told.token_ids,
                    num_prompt_tokens,
                    frozenset(end_ids),
                    tuple(map(tuple, words)),
                    self._new_matcher(structured) if has_matcher and structured else None,
                    pooling,
                )


class _Told:
    __slots__ = ("adapter", "asked", "block_ids", "others", "sampling", "seeds", "token_ids")

    def __init__(self) -> None:
        self.adapter: Adapted | None = None
        self.block_ids: list[int] = []
        self.others: list[list[int]] = []  # of groups of layers beyond the first
        self.sampling: SamplingParams = _Sampling()
        self.seeds: tuple[int, ...] = ()
        self.token_ids: list[int] = []
        self.asked: Asked | None = None


def _pairs(values: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((a, b) for a, b in values)


def write_samples(samples: Samples | PlainDraws) -> Any:
    """Return samples as JSON values; the inverse of `read_samples`."""
    if isinstance(samples, PlainDraws):
        return {"ids": samples.ids}
    return [[_token(t) for t in tokens] for tokens in samples]


def _token(token: SampledToken) -> Any:
    if token == SampledToken(token.token_id):
        return token.token_id
    error = None if token.error is None else named(token.error)
    return [
        token.token_id,
        token.logprob,
        token.top_logprobs,
        token.prompt_logprobs,
        error,
        token.prompt_state,
    ]


def read_samples(message: Any) -> Samples | PlainDraws:
    """Return the samples in a worker's answer, the inverse of `write_samples`.

    Args:
        message: JSON values: a dict with the list "ids", or a list of tokens for each sequence.

    Returns:
        `PlainDraws` from a dict: one token for each sequence, without log-probabilities. From a
        list, a list of `SampledToken` for each sequence.
    """
    if isinstance(message, dict):
        return PlainDraws(message["ids"])
    return [[_read_token(t) for t in tokens] for tokens in message]


def _read_token(told: Any) -> SampledToken:
    if isinstance(told, int):
        return SampledToken(told)
    token_id, logprob, top, prompt, error, state = told
    scored = None
    if prompt is not None:
        scored = tuple((i, value, _best(best)) for i, value, best in prompt)
    return SampledToken(
        token_id,
        logprob,
        _best(top),
        scored,
        None if error is None else error_of(*error),
        None if state is None else tuple(state),
    )


def _best(pairs: Sequence[Sequence[Any]]) -> tuple[tuple[int, float], ...]:
    return tuple((token, value) for token, value in pairs)
