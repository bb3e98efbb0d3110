"""Text that follows a schema, a regular expression, a choice or a grammar, by llguidance.

A description is compiled once, on a thread of its own, and every sample starts from a copy of what
came out. Time and memory are bounded by counts: of symbols of a grammar, of states of its lexer, of
work in one step.

Source: https://github.com/guidance-ai/llguidance, the library; Earley, 1970, and derivatives of
regular expressions (Brzozowski, 1964), which it works by.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.engine.closing import Closers
from tilewise.engine.sampling_options import StructuredOutputs
from tilewise.errors import RequestError

__all__ = ["GrammarMatcher", "Grammars"]

COMPILE_SECONDS = 20.0  # a caller waits so long at most; what is compiled ends by the counts below
COMPILERS = 2  # descriptions compiled at a time
MAX_KEPT = 128  # compiled descriptions
# Between the tokens of JSON, where its schema says nothing else: a line's end and its indentation.
# With any amount, a weak model writes line ends until its tokens are used up.
WHITESPACE = r"\n? {0,16}"
# Where a text can go on in one way alone, llguidance walks that way to its end before it makes a
# mask, and no count bounds it: ((a{1000}){1000}){1000} held a step for 52 s of CPU time, and with
# it all requests. This stands behind a grammar, as of several such lines the last one counts.
UNFORCED = '\n%llguidance {"no_forcing": true}\n'
# Counts of llguidance: half a second of building a lexer (50,000 units a millisecond), 60,000
# symbols, 50,000 states of some 1.5 kB, and 14 ms (14,000 a millisecond) of work for one mask.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 25_000_000,
    "max_grammar_size": 60_000,
    "max_lexer_states": 50_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "verbose_errors": False,
}


class GrammarMatcher:
    """The state of one sample: a `sampling_options.Matcher`.

    Args:
        state: an llguidance matcher of its own.
        closers: what ends a text that its tokens do not suffice for.

    Every method raises RuntimeError where the library gives up, with its reason; fill_mask raises
    RequestError, for it is then the description that cannot be followed.
    """

    def __init__(self, state: Any, closers: Closers) -> None:
        self._state, self._closers = state, closers

    def accept(self, token_id: int) -> None:
        """Go on by one token, which the last mask allowed."""
        self._state.consume_token(token_id)
        self._check("a token")

    def fill_mask(self, words: NDArray[np.int32]) -> None:
        """Write which tokens may come next: bit t % 32 of word t // 32 for token t."""
        mask = np.frombuffer(self._state.compute_bitmask(), np.int32)
        if self._state.is_error():
            # It compiles lazily: one without an end, or too large, is found out here.
            raise RequestError(
                f"the grammar must be one that can be followed, got an error: {self._error()}"
            )
        count = min(len(mask), len(words))
        words[:count], words[count:] = mask[:count], 0

    def end_within(self, words: NDArray[np.int32], left: int) -> None:
        """Narrow a mask so that the text is whole after `left` tokens, if it can be."""
        self._closers.narrow(self._state, words, left)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""
        self._state.rollback(num_tokens)
        self._check("a rollback")

    def copy(self) -> GrammarMatcher:
        """Return a matcher in the same state that goes its own way."""
        return GrammarMatcher(self._state.deep_copy(), self._closers)

    def _check(self, what: str) -> None:
        if self._state.is_error():
            raise RuntimeError(f"the grammar failed at {what}: {self._error()}")

    def _error(self) -> str:
        return " ".join(str(self._state.get_error()).split())


class Grammars:
    """Compiles descriptions for one tokenizer, in bounded time and memory.

    Threads may share it.

    Args:
        tokenizer_json: the tokenizer, as the `tokenizers` library writes it.
        vocab_size: columns of the logits.
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
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._pool = ThreadPoolExecutor(COMPILERS, thread_name_prefix="tilewise-grammar")
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[str, str, str | None], GrammarMatcher] = OrderedDict()

    def compile(self, outputs: StructuredOutputs) -> GrammarMatcher:
        """Return a matcher at its beginning; equal descriptions are compiled once.

        The caller waits while another thread compiles, so it must not be the engine's.

        Raises:
            RequestError: the description is wrong, or takes too much time or memory.
        """
        key = outputs.kind, outputs.description, outputs.lead
        with self._lock:
            known = self._compiled.get(key)
            if known is not None:
                self._compiled.move_to_end(key)
                return known.copy()
        future = self._pool.submit(self._compile, *key)
        try:
            matcher = future.result(timeout=COMPILE_SECONDS)
        except FutureTimeout:
            future.cancel()
            raise RequestError(
                f"{outputs.kind} must compile within {COMPILE_SECONDS:g} s, got one that does not"
            ) from None
        with self._lock:
            self._compiled[key] = matcher
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        return matcher.copy()

    def _compile(self, kind: str, description: str, lead: str | None) -> GrammarMatcher:
        try:
            if kind == "choice":
                texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(description))
                grammar = "start: " + " | ".join(texts)
            elif kind == "json":
                made = self._library.LLMatcher.grammar_from_json_schema(
                    description, defaults={"whitespace_pattern": WHITESPACE}
                )
                [one] = json.loads(made)["grammars"]
                grammar = f"start: %json {json.dumps(one['json_schema'])}"
            else:
                grammar = self._library.grammar_from(kind, description)
                if kind == "regex":
                    [one] = json.loads(grammar)["grammars"]
                    grammar = one["lark_grammar"]
        except ValueError as error:
            raise RequestError(f"{kind} must compile, got an error: {error}") from None
        grammar += UNFORCED
        if lead is not None:
            grammar = _behind(lead, grammar)
        state = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if state.is_error():
            raise RequestError(f"{kind} must compile, got an error: {state.get_error()}")
        return GrammarMatcher(state, self._closers)


def _behind(lead: str, grammar: str) -> str:
    """Return a grammar that begins late: that of `lead`, in which `@text` is the other one."""
    parts = {"lead": lead + UNFORCED, "text": grammar}
    grammars = [{"name": name, "lark_grammar": part} for name, part in parts.items()]
    return json.dumps({"grammars": grammars})
