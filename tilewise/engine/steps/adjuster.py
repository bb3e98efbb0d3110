"""What requests ask of their logits, followed for every sequence of a runner.

A row is changed by one op (`ops.adjust_logits`), and only in steps that have such a row. What a
step sends is what depends on the tokens so far: which of them may come next, as a bit mask, the
biases, and the penalties. The counts of tokens that penalties need stay on the device, a row of the
vocabulary for each sequence that has them: the host sends what it learned since the last step, and
a token that only the device knows is counted there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise import ops
from tilewise.engine.batch import PENDING, Asked, Batch, SampledToken, ScheduledSequence
from tilewise.engine.request import NO_TOKEN
from tilewise.engine.sampling_options import Matcher
from tilewise.engine.steps.inputs import send
from tilewise.errors import RequestError
from tilewise.ops.adjust_logits import words_of

__all__ = ["Adjuster", "put_errors"]

T = TypeVar("T", bound=np.generic)

FIRST_SLOTS = 8  # sequences that counts are kept for at first; doubled when more come
END_WITHIN = 32  # last tokens of a structured text, in which it is looked how it can be closed
ALL_ALLOWED = np.uint32(0xFFFFFFFF)


@dataclass(slots=True)
class _State:
    """The state by which the logits of one sequence are changed.

    Attributes:
        slot: the sequence's row of `Adjuster.counts`; -1 without penalties.
        num_counted: generated tokens that are counted, or that the device was told to count.
        allowed: bits, in words, of the tokens that may ever be drawn; None for all.
        ends: tokens that may not be drawn before min_tokens.
        endings: pairs (all but the last token, the last token) of each bad word, by the token
            before its last one.
        bias_ids, bias: the tokens of logit_bias and what is added to each.
        matcher: the matcher of the request's structure, which has accepted num_accepted generated
            tokens.
    """

    slot: int = -1
    num_counted: int = 0
    allowed: NDArray[np.uint32] | None = None
    ends: tuple[int, ...] = ()
    endings: dict[int, list[tuple[tuple[int, ...], int]]] | None = None
    bias_ids: NDArray[np.int64] | None = None
    bias: NDArray[np.float32] | None = None
    matcher: Matcher | None = None
    num_accepted: int = 0


class Adjuster:
    """Changes the logits of the sequences whose requests ask for biases, penalties or limits.

    Args:
        device: the device of the logits.

    Attributes:
        counts: (slots, V) int32, the counts of tokens that penalties need, see `ops.adjust_logits`;
            None before a sequence has penalties.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counts: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all sequences and free their rows of counts; the tensor of counts is kept."""
        self._states: dict[int, _State] = {}
        self._free = list(range(0 if self.counts is None else len(self.counts)))

    def follow(self, batch: Batch, asks: bool) -> bool:
        """Forget the sequences that left; return whether this batch has logits to change.

        Logits are to be changed where a sequence that draws tokens asks for biases, penalties or
        limits. Every batch of a runner passes here, in order.

        Args:
            batch: the batch of the step.
            asks: True if a request of the batch asks for more than tokens, see `Batch.asks`.
        """
        if self._states:
            for seq_id in batch.left:
                state = self._states.pop(seq_id, None)
                if state is not None and state.slot >= 0:
                    self._free.append(state.slot)
        return asks and any(
            run.asked is not None and run.asked.adjusts and run.num_samples > 0
            for run in batch.sequences
        )

    def adjust(
        self,
        logits: Tensor,
        sequences: Sequence[ScheduledSequence],
        rows: Sequence[int],
        *,
        tokens: Tensor | None = None,
        token_rows: Sequence[int] = (),
    ) -> dict[int, Exception]:
        """Change the logits of sequences that ask for it, in place, before tokens are drawn.

        The counts of sequences with penalties are brought up to date as well.

        Args:
            logits: (R, V) float32.
            sequences: the sequences of the batch that `follow` took last.
            rows: the row of logits of each sequence; any number for a sequence that draws nothing.
            tokens: int64, on the device, the last tokens of sequences for which the batch says
                PENDING.
            token_rows: the place in `tokens` of each sequence.

        Returns:
            The exceptions of sequences that could not be adjusted, by place among `sequences`: a
            grammar or a logits processor failed, or no token is left to draw. Tokens may not be
            drawn from these rows. Only KeyboardInterrupt is raised.
        """
        vocab, errors = logits.shape[1], dict[int, Exception]()
        step = _Step(vocab)
        for place, run in enumerate(sequences):
            asked = run.asked
            if asked is None or not asked.adjusts or run.num_samples == 0:
                continue
            try:
                state = self._state_of(run, asked, vocab, step)
                known, is_pending = _tokens_of(run, asked)
                self._process(logits, rows[place], run, known, asked)
                self._add(step, state, run, rows[place], known, asked)
            except KeyboardInterrupt:
                raise
            except Exception as error:
                errors[place] = error
                continue
            except BaseException as error:  # as is, it would end the requests of all
                errors[place] = _as_exception(error)
                continue
            if state.slot >= 0:
                first = asked.num_prompt_tokens + state.num_counted
                step.count(state.slot * vocab, known[first:])
                state.num_counted = len(known) - asked.num_prompt_tokens
                if is_pending:
                    step.pending.append((state.slot * vocab, token_rows[place]))
                    state.num_counted += 1
        self._run(logits, step, tokens)
        return errors

    def _state_of(self, run: ScheduledSequence, asked: Asked, vocab: int, step: _Step) -> _State:
        state = self._states.get(run.seq_id)
        if state is not None:
            return state
        sampling = run.sampling
        state = _State()
        words = [word for word in asked.bad_word_ids if len(word) == 1]
        if sampling.allowed_token_ids or words:
            state.allowed = _all_bits(vocab)
            if sampling.allowed_token_ids:
                state.allowed = np.zeros(words_of(vocab), np.uint32)
                _set_bits(state.allowed, np.fromiter(sampling.allowed_token_ids, np.int64))
            _clear_bits(state.allowed, [word[0] for word in words])
        if sampling.min_tokens:
            state.ends = tuple(i for i in asked.end_ids if i != NO_TOKEN and i < vocab)
        for word in asked.bad_word_ids:
            if len(word) > 1:
                state.endings = state.endings or {}
                state.endings.setdefault(word[-2], []).append((word[:-1], word[-1]))
        if sampling.logit_bias:
            state.bias_ids = np.fromiter(sampling.logit_bias, np.int64)
            state.bias = np.fromiter(sampling.logit_bias.values(), np.float32)
        if asked.new_matcher is not None:
            state.matcher = asked.new_matcher()
        if sampling.has_penalties:
            if not self._free:
                self._grow(vocab)
            state.slot = self._free.pop()
            step.begin(state.slot, vocab, asked)
            state.num_counted = len(asked.token_ids) - asked.num_prompt_tokens
        self._states[run.seq_id] = state
        return state

    def _grow(self, vocab: int) -> None:
        have = 0 if self.counts is None else len(self.counts)
        size = max(FIRST_SLOTS, 2 * have)
        wider = torch.zeros((size, vocab), dtype=torch.int32, device=self.device)
        if self.counts is not None:
            wider[:have] = self.counts
        self.counts = wider
        self._free += range(have, size)

    def _process(
        self, logits: Tensor, row: int, run: ScheduledSequence, known: Sequence[int], asked: Asked
    ) -> None:
        """Replace a row of logits by the result of the request's logits processors, if it has any.

        Each processor is called with the list of prompt tokens, the list of generated tokens and
        the logits (V,) that the one before has returned.

        Raises:
            ValueError: a processor returns anything but a tensor of V logits.
        """
        processors = run.sampling.logits_processors
        if not processors:
            return
        prompt, output = known[: asked.num_prompt_tokens], known[asked.num_prompt_tokens :]
        changed = logits[row].clone()
        for processor in processors:
            changed = processor(list(prompt), list(output), changed)
            if not isinstance(changed, Tensor) or changed.shape != logits.shape[1:]:
                got = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed)
                raise ValueError(
                    f"a logits processor must return a tensor of {logits.shape[1]} logits, "
                    f"got {got}"
                )
        logits[row] = changed.to(logits.dtype)

    def _add(
        self,
        step: _Step,
        state: _State,
        run: ScheduledSequence,
        row: int,
        known: Sequence[int],
        asked: Asked,
    ) -> None:
        """Add the mask, biases and penalties of one row of logits to the data of the step.

        The request's matcher accepts the new tokens first, so that its mask is that of the next
        one.

        Raises:
            RequestError: the mask leaves no token to draw.
        """
        words, sampling = state.allowed, run.sampling
        forbidden: list[int] = []
        if run.num_generated < sampling.min_tokens:
            forbidden += state.ends
        if state.endings is not None and len(known) > asked.num_prompt_tokens:
            for head, last in state.endings.get(known[-1], ()):
                first = len(known) - len(head)
                if first >= asked.num_prompt_tokens and tuple(known[first:]) == head:
                    forbidden.append(last)
        if state.matcher is not None:
            for token in known[asked.num_prompt_tokens + state.num_accepted :]:
                state.matcher.accept(token)
                state.num_accepted += 1
            mask = np.zeros(step.num_words, np.int32)
            state.matcher.fill_mask(mask)
            most = sampling.max_tokens  # None is up to the end of the context
            if most is not None and most - run.num_generated <= END_WITHIN:
                state.matcher.end_within(mask, most - run.num_generated)
            words = mask.view(np.uint32) if words is None else mask.view(np.uint32) & words
        if forbidden:
            words = _all_bits(step.vocab) if words is None else words.copy()
            _clear_bits(words, forbidden)
        if words is not None:
            if not words.any():
                raise RequestError(
                    "what a request allows must leave a token to draw, got none after "
                    f"{len(known) - asked.num_prompt_tokens} tokens"
                )
            step.masks.append(words)
        step.rows.append(row)
        step.mask_of.append(-1 if words is None else len(step.masks) - 1)
        step.counts_of.append(state.slot)
        step.penalties.append(
            (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        )
        if state.bias_ids is not None and state.bias is not None:
            step.bias_rows.append(np.full(len(state.bias), row, np.int64))
            step.bias_ids.append(state.bias_ids)
            step.biases.append(state.bias)

    def _run(self, logits: Tensor, step: _Step, tokens: Tensor | None) -> None:
        """Send all changes of a step to the device in one copy, update the counts and change the
        logits."""
        if not step.rows and not step.cleared:
            return
        pending = np.array(step.pending, np.int64).reshape(-1, 2)
        (
            rows,
            cleared,
            places,
            at,
            token_rows,
            bias_rows,
            bias_ids,
            values,
            mask_of,
            counts_of,
            penalties,
            bias,
            mask,
        ) = send(
            (
                np.array(step.rows, np.int64),
                np.array(step.cleared, np.int64),
                _joined(step.places, np.int64),
                pending[:, 0].copy(),
                pending[:, 1].copy(),
                _joined(step.bias_rows, np.int64),
                _joined(step.bias_ids, np.int64),
                _joined(step.values, np.int32),
                np.array(step.mask_of, np.int32),
                np.array(step.counts_of, np.int32),
                np.array(step.penalties, np.float32).view(np.int32).ravel(),
                _joined(step.biases, np.float32).view(np.int32),
                _joined(step.masks, np.uint32).view(np.int32),
            ),
            self.device,
        )
        has_counts = self.counts is not None and max(step.counts_of, default=-1) >= 0
        if self.counts is not None:
            if len(cleared):
                self.counts.index_fill_(0, cleared, 0)
            flat = self.counts.view(-1)
            if len(places):
                flat.index_add_(0, places, values)
            if len(at):
                assert tokens is not None, "only the device knows this token"
                at = at + tokens.index_select(0, token_rows)
                flat.index_add_(0, at, torch.full_like(at, 2, dtype=torch.int32))
        ops.adjust_logits(
            logits,
            rows,
            mask=mask.view(-1, step.num_words) if step.masks else None,
            mask_of=mask_of if step.masks else None,
            bias_rows=bias_rows if step.biases else None,
            bias_ids=bias_ids if step.biases else None,
            bias=bias.view(torch.float32) if step.biases else None,
            counts=self.counts if has_counts else None,
            counts_of=counts_of if has_counts else None,
            penalties=penalties.view(torch.float32).view(-1, 3) if has_counts else None,
        )


def _as_exception(error: BaseException) -> Exception:
    """Return the error with which one request ends after its logits processor or grammar failed.

    `error` may be an exit, a cancelled task, or a panic of a library in Rust.
    """
    found = RuntimeError(
        f"what a request does to its logits must raise Exceptions only, got {error!r}"
    )
    found.__cause__ = error
    return found


def put_errors(samples: list[list[SampledToken]], errors: dict[int, Exception]) -> None:
    """Replace tokens of sequences whose logits could not be adjusted by NO_TOKEN and the error.

    Args:
        samples: the tokens of each sequence, which are changed in place.
        errors: the exceptions by place among the sequences, see `Adjuster.adjust`.
    """
    for place, error in errors.items():
        samples[place] = [SampledToken(NO_TOKEN, error=error)] * len(samples[place])


class _Step:
    """The changes of logits and counts that one step collects on the host, then sends in one copy.

    Attributes:
        rows, mask_of, counts_of, penalties, masks, bias_rows, bias_ids, biases: the arguments of
            `adjust_logits`.
        cleared: slots of counts that begin anew; they become 0 before anything is added.
        places, values: the places in the flat counts, and the numbers that are added there: 1 for
            each distinct token of a prompt, 2 for each generated token.
        pending: (first place of a slot, row of `tokens`) for each generated token whose id only the
            device knows; the device adds 2 to that token's count.
    """

    def __init__(self, vocab: int) -> None:
        self.vocab, self.num_words = vocab, words_of(vocab)
        self.rows: list[int] = []
        self.mask_of: list[int] = []
        self.counts_of: list[int] = []
        self.penalties: list[tuple[float, float, float]] = []
        self.masks: list[NDArray[np.uint32]] = []
        self.bias_rows: list[NDArray[np.int64]] = []
        self.bias_ids: list[NDArray[np.int64]] = []
        self.biases: list[NDArray[np.float32]] = []
        self.cleared: list[int] = []
        self.places: list[NDArray[np.int64]] = []
        self.values: list[NDArray[np.int32]] = []
        self.pending: list[tuple[int, int]] = []

    def begin(self, slot: int, vocab: int, asked: Asked) -> None:
        """Begin the counts of a sequence that is new, or came back after it lost its blocks.

        The slot is cleared, each distinct prompt token counts 1 and each generated token 2.

        Args:
            slot: the sequence's row of the counts.
            vocab: the size of the vocabulary, V.
            asked: the facts about the sequence, with its tokens.
        """
        self.cleared.append(slot)
        whole = np.array(asked.token_ids, np.int64)
        prompt = np.unique(whole[: asked.num_prompt_tokens])
        self.places.append(prompt + slot * vocab)
        self.values.append(np.ones(len(prompt), np.int32))
        self.count(slot * vocab, whole[asked.num_prompt_tokens :].tolist())

    def count(self, first: int, tokens: Sequence[int]) -> None:
        """Note that each of `tokens` was generated, for the slot that begins at `first` of flat
        counts.

        Each adds 2 to its count.
        """
        if tokens:
            self.places.append(np.array(tokens, np.int64) + first)
            self.values.append(np.full(len(tokens), 2, np.int32))


def _tokens_of(run: ScheduledSequence, asked: Asked) -> tuple[Sequence[int], bool]:
    """Return the known tokens of a sequence, prompt included, and whether one more is PENDING.

    The tokens go up to the end of the run. The run's last token may have been drawn in a step that
    is not recorded yet. Then it is PENDING and not among the known ones, unless the runner knows
    its id already and has put that in its place.
    """
    known = asked.token_ids
    if run.start + len(run.token_ids) == len(known):
        return known, False
    last = run.token_ids[-1]
    return (known, True) if last == PENDING else ([*known, last], False)


def _all_bits(vocab: int) -> NDArray[np.uint32]:
    """Return words that allow every token, and no bit behind the last one."""
    words = np.full(words_of(vocab), ALL_ALLOWED)
    words[-1] >>= np.uint32(-vocab % 32)
    return words


def _set_bits(words: NDArray[np.uint32], ids: NDArray[np.int64]) -> None:
    np.bitwise_or.at(words, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))


def _clear_bits(words: NDArray[np.uint32], ids: Sequence[int]) -> None:
    for i in ids:
        words[i >> 5] &= ~(np.uint32(1) << np.uint32(i & 31))


def _joined(parts: Sequence[NDArray[T]], dtype: type[T]) -> NDArray[T]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
