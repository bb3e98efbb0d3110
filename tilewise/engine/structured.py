"""Text that follows a schema, a regular expression, a choice or a grammar, by llguidance.

A description is compiled once, after a trial in another process (`trials`), and every sample starts
from a copy of what came out. Time and memory are bounded by counts: of symbols of a grammar, of
states of its lexer, of work in one step.

Source: https://github.com/guidance-ai/llguidance, the library; Earley, 1970, and derivatives of
regular expressions (Brzozowski, 1964), which it works by.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.engine.closing import Closers
from tilewise.engine.sampling_options import StructuredOutputs
from tilewise.engine.trials import LONGEST_ERROR, Trials, grammar_of, limits_of, refusal_of
from tilewise.errors import RequestError

__all__ = ["GrammarMatcher", "Grammars"]

MAX_KEPT = 128  # compiled descriptions


class GrammarMatcher:
    """The state of one sample: a `sampling_options.Matcher`.

    Args:
        state: an llguidance matcher of its own.
        closers: the tokens that end a text for which too few tokens are left.

    Every method raises RuntimeError where the library gives up, with its reason; RequestError where
    it is the description that cannot be followed, as always in fill_mask.
    """

    def __init__(self, state: Any, closers: Closers) -> None:
        self._state, self._closers = state, closers

    def accept(self, token_id: int) -> None:
        """Advance the state by one token, which the last mask allowed."""
        self._state.consume_token(token_id)
        self._check("a token")

    def fill_mask(self, words: NDArray[np.int32]) -> None:
        """Write into `words` which tokens may come next: bit t % 32 of word t // 32 is 1 if token t
        may."""
        mask = np.frombuffer(self._state.compute_bitmask(), np.int32)
        if self._state.is_error():
            # It compiles lazily: one without an end, or too large, is found out here.
            raise self._refusal()
        count = min(len(mask), len(words))
        words[:count], words[count:] = mask[:count], 0

    def end_within(self, words: NDArray[np.int32], left: int) -> None:
        """Forbid the tokens after which a text could not be closed within the limit.

        The mask stays as it is while the limit is far, or if no way to close the text is found.

        Args:
            words: the mask, as `fill_mask` has written it; changed in place.
            left: the tokens that may still be generated, the next one included.
        """
        self._closers.narrow(self._state, words, left)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` calls of `accept`."""
        self._state.rollback(num_tokens)
        self._check("a rollback")

    def copy(self) -> GrammarMatcher:
        """Return an independent matcher in the same state."""
        return GrammarMatcher(self._state.deep_copy(), self._closers)

    def _check(self, what: str) -> None:
        if not self._state.is_error():
            return
        # What no mask allowed is a mistake here; all else is a count that the description exceeds.
        if "doesn't satisfy the grammar" not in self._error():
            raise self._refusal()
        raise RuntimeError(f"the grammar failed at {what}: {self._error()}")

    def _refusal(self) -> RequestError:
        return RequestError(
            f"the grammar must be one that can be followed, got an error: {self._error()}"
        )

    def _error(self) -> str:
        return " ".join(str(self._state.get_error()).split())[:LONGEST_ERROR]


class Grammars:
    """Compiles descriptions for one tokenizer, in bounded time and memory.

    Threads may share it.

    Args:
        tokenizer_json: the tokenizer, as the `tokenizers` library writes it.
        vocab_size: the number of tokens that a mask has bits for.
        end_ids: tokens that end a text; at least one.

    Raises:
        ImportError: llguidance is not installed.
        ValueError: the library cannot read the tokenizer.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ImportError(
                "structured output needs the package llguidance: pip install 'tilewise[structured]'"
            ) from error
        self._library: Any = llguidance
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer_json, n_vocab=vocab_size, eos_token=list(end_ids)
        )
        self._closers = Closers(self._tokenizer.decode_bytes, vocab_size)
        self._limits = limits_of(llguidance)
        self._trials = Trials(tokenizer_json, vocab_size, end_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[str, str, str | None], GrammarMatcher] = OrderedDict()

    def compile(
        self, outputs: StructuredOutputs, *, user: str = "", is_tried: bool = False
    ) -> GrammarMatcher:
        """Return a matcher at its beginning; equal descriptions are compiled once.

        The caller waits meanwhile, so it must not be the engine's thread.

        Args:
            user: the user of the request, see `trials.Trials`.
            is_tried: True if another process has compiled it.

        Raises:
            RequestError: the description is wrong, or takes too much time or memory.
            QueueFullError: requests of others compile for long, or this user's time is spent.
        """
        key = outputs.kind, outputs.description, outputs.lead
        with self._lock:
            known = self._compiled.get(key)
            if known is not None:
                self._compiled.move_to_end(key)
                return known.copy()
        if is_tried:
            matcher = self._compile(*key)
        else:
            with self._trials.passed(outputs.kind, outputs.description, user, outputs.lead):
                matcher = self._compile(*key)
        with self._lock:
            self._compiled[key] = matcher
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        return matcher.copy()

    def _compile(self, kind: str, description: str, lead: str | None) -> GrammarMatcher:
        try:
            grammar = grammar_of(self._library, kind, description, lead)
        except ValueError as error:
            raise refusal_of(kind, str(error)) from None
        state = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if state.is_error():
            raise refusal_of(kind, state.get_error())
        return GrammarMatcher(state, self._closers)
