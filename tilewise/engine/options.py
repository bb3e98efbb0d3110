"""What the engine needs of SamplingParams, for one model: ids checked, words encoded, grammars."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from tilewise.engine.request import SamplingParams
from tilewise.engine.sampling_options import Matcher, StructuredOutputs
from tilewise.engine.structured import GrammarMatcher, Grammars
from tilewise.engine.tokenizer import Tokenizer
from tilewise.errors import RequestError

__all__ = ["Options"]


class Options:
    """Turns SamplingParams into what a `Request` of one model needs; on the threads of the callers.

    Args:
        tokenizer: the model's tokenizer; None if its directory holds none.
        vocab_size: the number of columns of the logits.
        end_ids: the model's own end tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, end_ids: Sequence[int]
    ) -> None:
        self.tokenizer, self.vocab_size, self.end_ids = tokenizer, vocab_size, tuple(end_ids)
        self._grammars: Grammars | None = None
        self._lock = threading.Lock()

    def prepare(self, sampling: SamplingParams, user: str = "") -> dict[str, Any]:
        """Return the arguments of `Request` that follow from `sampling`.

        Raises:
            ImportError: `sampling` asks for structured text, and llguidance is not installed.
            RequestError: an option does not suit the model; the message names it.
        """
        self._check_ids("allowed_token_ids", sampling.allowed_token_ids or ())
        self._check_ids("logit_bias", sampling.logit_bias or ())
        for name in ("stop_strings", "bad_words", "structured"):
            if getattr(sampling, name) and self.tokenizer is None:
                name = "stop" if name == "stop_strings" else name
                raise RequestError(f"{name} must be None for a model without tokenizer, got one")
        found: dict[str, Any] = {}
        if sampling.bad_words:
            found["bad_word_ids"] = self._bad_word_ids(sampling.bad_words)
        if sampling.structured is not None:
            found["new_matcher"] = self.start_of(sampling.structured, user=user)
        return found

    def _check_ids(self, name: str, ids: Any) -> None:
        worst = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if worst is not None:
            raise RequestError(
                f"{name} must be of tokens in 0 ... {self.vocab_size - 1}, got {worst}"
            )

    def _bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each word, both without and with a space before it, without
        duplicates.

        Raises:
            RequestError: no word has any token.
        """
        assert self.tokenizer is not None
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(" "), " " + word.lstrip(" ")):
                ids = self.tokenizer.encode_plain(text)
                if ids:
                    found[tuple(ids)] = None
        if not found:
            raise RequestError(f"bad_words must have tokens, got {list(words)!r}")
        return tuple(found)

    def start_of(
        self, outputs: StructuredOutputs, *, user: str = "", is_tried: bool = False
    ) -> Any:
        """Compile a description of structured output; return a function that makes a new matcher
        each time.

        Args:
            outputs: the user's description.
            user: the user, whose compiled grammars are counted.
            is_tried: True if another process has compiled it already, so that it is known to be
                harmless.

        Raises:
            RequestError: the model has no end token, or the description cannot be compiled.
        """
        assert self.tokenizer is not None
        if not self.end_ids:
            raise RequestError("structured must be None for a model without end token, got one")
        with self._lock:
            if self._grammars is None:
                # Files may declare tokens for which the model has no logits.
                size = max(self.vocab_size, self.tokenizer.num_ids)
                self._grammars = Grammars(self.tokenizer.to_json(), size, self.end_ids)
        start: GrammarMatcher = self._grammars.compile(outputs, user=user, is_tried=is_tried)

        def new_matcher() -> Matcher:
            return start.copy()

        return new_matcher
