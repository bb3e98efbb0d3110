"""From token ids to text, one token at a time: whole characters only, and no part of a stop string.

A token may end inside a UTF-8 character, a decoder may drop the space before its first token, and
a stop string may begin in one token and end in another. So a token is decoded together with the
few before it, and what could still change or still become a stop string is held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

__all__ = ["Detokenizer", "StopAutomaton", "StopMatcher", "TextStream"]

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
    """Turns the token ids of one sample into text as they come, by O(1) decoded tokens a token.

    The window is [context | new]: the text of the context has been returned, and ends between
    characters. New text is what decode(context + new) adds; once it ends between characters, new
    becomes the context. (The prefix-offset technique of incremental decoding.)

    Args:
        decode: a function from ids to text, such as `decode` of a `tokenizers` tokenizer.
        special_ids: tokens without text.
        prompt_token_ids: the prompt's tokens, by whose end the first token's leading space is
            decided.
        open_end: a function from a text to the number of its last characters that `decode` may
            change when more tokens come, besides incomplete UTF-8; None if there are no such
            characters.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        special_ids: frozenset[int] = frozenset(),
        prompt_token_ids: Sequence[int] = (),
        *,
        open_end: Callable[[str], int] | None = None,
    ) -> None:
        self._decode = decode
        self._special_ids = special_ids
        self._open_end = open_end
        tail = [t for t in prompt_token_ids[-PROMPT_CONTEXT:] if t not in special_ids]
        self._window = self._from_a_character(tail)
        self._num_context = len(self._window)
        self._text = decode(self._window)
        self._shown = self._text[: len(self._text) - self._unfinished(self._text)]
        self._is_begun = False  # else what is unfinished is the prompt's

    def push(self, token_id: int) -> str:
        """Take one token and return the text that is certain now, often one word, maybe empty."""
        if token_id in self._special_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        unfinished = self._unfinished(text)
        if text == self._text and not unfinished:
            self._window.pop()  # a token without text, such as a padding id of the vocabulary
            return ""
        self._is_begun = True
        delta = self._advance(text, len(text) - unfinished)
        if delta and not unfinished:
            self._keep(self._window[self._num_context :], unfinished)
        elif len(self._window) > MAX_WINDOW:
            self._keep(self._window[-KEPT_WINDOW:], unfinished)
        return delta

    def flush(self) -> str:
        """Return the text that was held back; an unfinished character becomes replacement
        characters."""
        if not self._is_begun:
            return ""
        delta = self._text[len(self._shown) :]
        self._shown = self._text
        return delta

    def _unfinished(self, text: str) -> int:
        return max(_unfinished(text), 0 if self._open_end is None else self._open_end(text))

    def _from_a_character(self, tokens: list[int]) -> list[int]:
        """Return the tokens without the first ones that begin inside a character, which would
        decode to replacement characters; [] if no token begins with a character."""
        for start in range(len(tokens)):
            text = self._decode(tokens[start:])
            if REPLACEMENT not in text[: len(text) - _unfinished(text)]:
                return tokens[start:]
        return []

    def _advance(self, text: str, certain: int) -> str:
        """Set the window's text and return the part of it that has not been returned before.

        Args:
            text: the text of the window.
            certain: the number of its first characters that later tokens cannot change.
        """
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
        """Make `tokens` the whole window; do nothing if they have no text.

        Args:
            unfinished: the number of characters at the end of their text that later tokens may
                change.
        """
        text = self._decode(tokens)
        if text:
            self._window, self._text = tokens, text
            self._num_context = 0 if unfinished else len(tokens)
            self._shown = text[: max(len(text) - unfinished, 0)]


def _unfinished(text: str) -> int:
    """Return how many replacement characters at the end later bytes may still turn into a
    character: 3 at most."""
    return min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_UNFINISHED)


class StopAutomaton:
    """All stop strings of a request as one automaton, which its samples share.

    A state is the longest end of the text that begins a stop string. From one character to the next
    it grows by one, or falls back to shorter ends; falls are paid for by growth, so that a text
    costs its length, however many stop strings there are.

    Source: Aho and Corasick, "Efficient string matching", CACM 1975.

    Attributes:
        next_of: the states to which each state leads, by state and character.
        fallback: the longest proper end of each state's text that is a state, by state.
        depth: the number of characters of each state, by state.
        stop: the longest stop string with which each state's text ends, by state; None without.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.next_of: list[dict[str, int]] = [{}]
        self.fallback, self.depth = [0], [0]
        self.stop: list[str | None] = [None]
        for stop in stops:
            state = 0
            for char in stop:
                state = self.next_of[state].setdefault(char, len(self.next_of))
                if state == len(self.next_of):
                    self.next_of.append({})
                    self.fallback.append(0)
                    self.depth.append(0)
                    self.stop.append(None)
            self.stop[state] = stop
        waiting = deque([0])
        while waiting:  # shorter states first: a fallback is known before it is needed
            state = waiting.popleft()
            for char, longer in self.next_of[state].items():
                self.depth[longer] = self.depth[state] + 1
                if state:
                    self.fallback[longer] = self.step(self.fallback[state], char)
                self.stop[longer] = self.stop[longer] or self.stop[self.fallback[longer]]
                waiting.append(longer)

    def step(self, state: int, char: str) -> int:
        """Return the state after one more character; 0 is the state before any."""
        while state and char not in self.next_of[state]:
            state = self.fallback[state]
        return self.next_of[state].get(char, 0)


class StopMatcher:
    """Passes text on until a stop string is whole, and never any part of it.

    The string that is complete first wins, the longest of several that end together. Every
    character is looked at once, and the cut of the text into deltas makes no difference.

    Args:
        stops: the strings, or an automaton of them.
        includes_stop: True if the stop string that ends the text is passed on with it.
    """

    def __init__(
        self, stops: Sequence[str] | StopAutomaton, *, includes_stop: bool = False
    ) -> None:
        self._automaton = stops if isinstance(stops, StopAutomaton) else StopAutomaton(stops)
        self._includes_stop = includes_stop
        self._state = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; return the part that is now certain, and the stop string that is whole or
        None.

        After a stop string no more text may be pushed.
        """
        pending, automaton, state = self._held + text, self._automaton, self._state
        if len(automaton.next_of) == 1:
            return pending, None
        for end, char in enumerate(text, start=len(self._held) + 1):
            state = automaton.step(state, char)
            stop = automaton.stop[state]
            if stop is not None:
                self._held = ""
                return pending[: end - (0 if self._includes_stop else len(stop))], stop
        self._state = state
        shown = len(pending) - automaton.depth[state]
        self._held = pending[shown:]
        return pending[:shown], None

    def flush(self) -> str:
        """Return the text that was held back as a possible beginning of a stop string; no more
        text comes."""
        held, self._held = self._held, ""
        return held


class _Reasoning:
    """Finds where the answer begins in the text of a sample that may reason first.

    A text reasons if it begins with the opening mark; the answer begins behind the closing mark.

    Args:
        opening: the string with which a text that reasons begins, behind white space; "" if every
            text reasons.
        closing: the string that ends the reasoning.
    """

    def __init__(self, opening: str, closing: str) -> None:
        self._opening, self._closing = opening, closing
        self._is_open = not opening
        self._tail = ""  # may become a mark, of which it is the beginning

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text, and split all that is certain at the end of the reasoning.

        Returns:
            (reasoning, answer): the new text of the reasoning, and the first text of the answer,
                which is None until the answer begins. Text that may turn out to be a part of a mark
                is held back.
        """
        seen = self._tail + text
        if not self._is_open:
            begun = seen.lstrip()
            if not begun.startswith(self._opening):
                if not self._opening.startswith(begun):
                    return "", seen
                self._tail = seen
                return "", None
            self._is_open, self._tail = True, ""
            lead = len(seen) - len(begun) + len(self._opening)
            thought, answer = self.push(seen[lead:])
            return seen[:lead] + thought, answer
        end = seen.find(self._closing)
        if end < 0:
            self._tail = seen[max(0, len(seen) - len(self._closing) + 1) :]
            return text, None
        end += len(self._closing) - len(self._tail)
        return text[:end], text[end:]

    def flush(self) -> str:
        """Return the held text of a sample that ended before the opening mark was whole or ruled
        out."""
        return "" if self._is_open else self._tail


class TextStream:
    """The text of one sample: a Detokenizer followed by a StopMatcher.

    Args:
        detokenizer: the detokenizer of this sample.
        stops: strings that end the text, or an automaton of them.
        includes_stop: True if the text keeps the string that ended it.
        min_tokens: the first tokens, in whose text no stop string is looked for.
        reasoning: the strings that open and close reasoning, in which no stop string is looked for;
            None where there is no reasoning.

    Attributes:
        text: all text that was returned so far.
        stop: the stop string that ended the text; None before.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] | StopAutomaton = (),
        *,
        includes_stop: bool = False,
        min_tokens: int = 0,
        reasoning: Sequence[str] | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._reasoning = None if reasoning is None else _Reasoning(*reasoning)
        self._matcher = StopMatcher(stops, includes_stop=includes_stop)
        self._num_free = min_tokens
        self._parts: list[str] = []
        self.stop: str | None = None

    @property
    def text(self) -> str:
        """All text that push() and finish() have returned so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, token_id: int) -> str:
        """Take one token and return the new text that later tokens cannot change; "" after a stop
        string."""
        text = self._detokenizer.push(token_id)
        is_free = self._num_free > 0
        if is_free:
            self._num_free -= 1
        return self._pass(text, is_free)

    def finish(self) -> str:
        """Return the text that was held back, as no token follows; "" after a stop string.

        A stop string may still be found in it.
        """
        delta = self._pass(self._detokenizer.flush())
        if self.stop is None and self._reasoning is not None:
            told, self._reasoning = self._reasoning.flush(), None
            delta += self._pass(told)
        if self.stop is None:
            held = self._matcher.flush()
            self._parts.append(held)
            delta += held
        return delta

    def _pass(self, text: str, is_free: bool = False) -> str:
        if self.stop is not None or not text:
            return ""
        if self._reasoning is not None:
            thought, answer = self._reasoning.push(text)
            self._parts.append(thought)
            if answer is None:
                return thought
            self._reasoning = None
            return thought + self._pass(answer, is_free)
        if is_free:
            self._parts.append(text)
            return text
        delta, self.stop = self._matcher.push(text)
        self._parts.append(delta)
        return delta
