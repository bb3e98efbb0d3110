"""From token ids to text, one token at a time: whole characters only, and no part of a stop string.

A token may end inside a UTF-8 character, a decoder may drop the space before its first token, and
a stop string may begin in one token and end in another. So a token is decoded together with the
few before it, and what could still change or still become a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Detokenizer", "StopMatcher", "TextStream"]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that are not UTF-8
# An unfinished character is at most 3 bytes, which a decoder shows as at most 3 replacements.
MAX_UNFINISHED = 3
# Tokens of the prompt decoded before the first new one. Any visible token would do; some decode
# to nothing.
PROMPT_CONTEXT = 8
# Text that goes on ending inside a character is garbage or very odd tokens; UTF-8 finds its place
# again within one character, so 8 tokens of it are enough context, and the window stays short.
MAX_WINDOW, KEPT_WINDOW = 32, 8


class Detokenizer:
    """Turns the token ids of one sample into text as they come; O(1) decoded tokens per token.

    The window is [context | new]: context starts and ends between characters and is already out.
    New text is what decode(context + new) adds; once it ends between characters, new becomes the
    context. (The prefix-offset technique of incremental decoding.)

    Args:
        decode: ids to text, any decoder of the `tokenizers` library.
        special_ids: tokens without text.
        prompt_token_ids: the tokens before the first one, which decide about its leading space.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        special_ids: frozenset[int] = frozenset(),
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._special_ids = special_ids
        tail = [t for t in prompt_token_ids[-PROMPT_CONTEXT:] if t not in special_ids]
        self._window = self._from_a_character(tail)
        self._num_context = len(self._window)
        self._text = decode(self._window)
        self._shown = self._text[: len(self._text) - _unfinished(self._text)]

    def push(self, token_id: int) -> str:
        """Take one token and return the text that is certain now, often one word, maybe empty."""
        if token_id in self._special_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        unfinished = _unfinished(text)
        if text == self._text and not unfinished:
            self._window.pop()  # a token without text, such as a padding id of the vocabulary
            return ""
        delta = self._advance(text, len(text) - unfinished)
        if delta and not unfinished:
            self._keep(self._window[self._num_context :], unfinished)
        elif len(self._window) > MAX_WINDOW:
            self._keep(self._window[-KEPT_WINDOW:], unfinished)
        return delta

    def flush(self) -> str:
        """Return what was held back, an unfinished character as replacement characters."""
        delta = self._text[len(self._shown) :]
        self._shown = self._text
        return delta

    def _from_a_character(self, tokens: list[int]) -> list[int]:
        """Drop the first tokens while they begin inside a character, which spoils what follows."""
        for start in range(len(tokens)):
            text = self._decode(tokens[start:])
            if REPLACEMENT not in text[: len(text) - _unfinished(text)]:
                return tokens[start:]
        return []

    def _advance(self, text: str, certain: int) -> str:
        """Take the window's new text, of which `certain` characters are, and return what is new."""
        self._text = text
        # A decoder with byte fallback gives up a whole run of bytes until its last is there, and
        # with it characters that were shown before: wait for them to come back.
        if certain < len(text) and not text.startswith(self._shown):
            return ""
        delta = text[len(self._shown) : certain]
        if delta:
            self._shown = text[:certain]
        return delta

    def _keep(self, tokens: list[int], unfinished: int) -> None:
        """Make `tokens` the whole window, unless they show nothing by themselves."""
        text = self._decode(tokens)
        if text:
            self._window, self._text = tokens, text
            self._num_context = 0 if unfinished else len(tokens)
            self._shown = text[: max(len(text) - unfinished, 0)]


def _unfinished(text: str) -> int:
    """Count the replacement characters at the end that further bytes may still turn into one."""
    return min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_UNFINISHED)


class StopMatcher:
    """Passes text on until a stop string is whole, and never any part of it.

    The string that is complete first wins, the longest of several that end together. Each string
    is matched by the automaton of Knuth, Morris and Pratt (1977), so every character is looked at
    once and the cut of the text into deltas makes no difference.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _failure_table(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # how much of each stop the text ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; return the part that may be shown and the stop string it ran into."""
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            stop = self._advance(char)
            if stop is not None:
                self._held = ""
                return pending[: end - len(stop)], stop
        shown = len(pending) - max(self._matched, default=0)
        self._held = pending[shown:]
        return pending[:shown], None

    def flush(self) -> str:
        """Return the text that was held back: no more is coming, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        found: str | None = None
        for i, (stop, failure) in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != char:
                matched = failure[matched - 1]
            matched += stop[matched] == char
            self._matched[i] = matched
            if matched == len(stop) and (found is None or len(stop) > len(found)):
                found = stop
        return found


def _failure_table(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its end."""
    table = [0] * len(stop)
    matched = 0
    for i in range(1, len(stop)):
        while matched and stop[matched] != stop[i]:
            matched = table[matched - 1]
        matched += stop[matched] == stop[i]
        table[i] = matched
    return table


class TextStream:
    """The text of one sample: a Detokenizer followed by a StopMatcher.

    Attributes:
        text: everything returned so far.
        stop: the stop string that ended it, None before.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._parts: list[str] = []
        self.stop: str | None = None

    @property
    def text(self) -> str:
        """Everything returned so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, token_id: int) -> str:
        """Take one token and return the text that it makes certain."""
        return self._pass(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """Say that no token follows and return the text that was held back."""
        delta = self._pass(self._detokenizer.flush())
        if self.stop is None:
            held = self._matcher.flush()
            self._parts.append(held)
            delta += held
        return delta

    def _pass(self, text: str) -> str:
        if self.stop is not None or not text:
            return ""
        delta, self.stop = self._matcher.push(text)
        self._parts.append(delta)
        return delta
