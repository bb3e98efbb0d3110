"""The end of a structured text whose tokens are used up: its strings and brackets are closed.

A schema may have strings and lists of any length, which a model may write until its last token;
what is there then is no JSON. So with the last tokens it is looked which characters make the text
whole: those that close, and the least that a schema asks for beside. When there are just as many
tokens left, these are all that may be drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Closers"]

_CLOSING = (b"}", b"]", b'"')
_OTHERS = (b":", b",", b"0")  # before a value that is missing, and one that many schemas take
MOST_FORCED = 16  # tokens that may come next where a text goes on in one way, such as a name
_IN_STRING = (b'"', b"\\")  # what a token may hold that ends a string, or begins an escape
MOST_TRIED = 24  # characters at one step
SPARE = 8  # tokens before the last moment, so that no other one makes the end longer than that


class Closers:
    """Narrows the masks of a structured text so that its strings and brackets are closed in time.

    Args:
        decode: a function from token ids to their bytes.
        vocab_size: the number of tokens, which is that of the columns of the logits.
    """

    def __init__(self, decode: Callable[[list[int]], bytes], vocab_size: int) -> None:
        self._decode = decode
        self._ids: dict[bytes, int] = {}
        stays = np.zeros(-(-vocab_size // 32) * 32, bool)
        for token in range(vocab_size):
            data = decode([token])
            if data in _CLOSING or data in _OTHERS:
                self._ids.setdefault(data, token)
            stays[token] = not any(mark in data for mark in _IN_STRING) and _is_text(data)
        self._stays = np.packbits(stays, bitorder="little").view(np.int32)

    def narrow(self, state: Any, words: NDArray[np.int32], left: int) -> None:
        """Narrow a mask so that a text is whole after `left` tokens, if it can be.

        A shortest end of the text is searched. The mask stays as it is if none is found or if more
        than 8 tokens are left beyond it. While some are, a string may go on with tokens that do not
        end it; else only the first token of the end is allowed.

        Args:
            state: an llguidance matcher, which stays as it is.
            words: the mask of the tokens that may be drawn next, one bit each, changed in place.
            left: the number of tokens that are left, the next one included.
        """
        end = self._end(state, left, [MOST_TRIED])
        if not end or left > len(end) + SPARE:
            return
        if left > len(end) and self._is_in_string(state):
            kept = words & self._stays[: len(words)]
            if kept.any():
                words[:] = kept
                return
        words[:] = 0
        words[end[0] // 32] = np.uint32(1 << end[0] % 32).astype(np.int32)

    def _is_in_string(self, state: Any) -> bool:
        """Return whether the text is within a string: only there may }, ] and " each come next."""
        return len(self._valid(state, _CLOSING)) == len(_CLOSING)

    def _valid(self, state: Any, pieces: Sequence[bytes]) -> list[int]:
        ids = [self._ids[piece] for piece in pieces if piece in self._ids]
        return [token for token in ids if state.validate_tokens([token]) == 1]

    def _end(self, state: Any, most: int, left: list[int]) -> list[int] | None:
        """Return at most `most` tokens that complete a text by its grammar, found depth first.

        Args:
            state: the matcher of the grammar, which stays as it is.
            most: the largest number of tokens.
            left: a list of one number, the tokens that may still be tried; it is lowered in place.

        Returns:
            The tokens, [] for a complete text; None if no end was found.
        """
        if state.is_accepting():
            return []
        if most == 0 or left[0] <= 0:
            return None
        valid = self._valid(state, _CLOSING)
        if len(valid) == len(_CLOSING):
            valid = valid[-1:]
        else:
            valid += self._valid(state, _OTHERS)
        for token in valid or self._forced(state):
            left[0] -= 1
            after = state.deep_copy()
            after.consume_token(token)
            rest = self._end(after, most - 1, left)
            if rest is not None:
                return [token, *rest]
        return None

    def _forced(self, state: Any) -> list[int]:
        """Return a list of the longest token, in bytes, that may come next; [] if more than 16
        tokens may."""
        words = np.frombuffer(state.deep_copy().compute_bitmask(), np.uint8)
        ids = np.flatnonzero(np.unpackbits(words, bitorder="little"))
        if not 0 < len(ids) <= MOST_FORCED:
            return []
        return [max(map(int, ids), key=lambda token: len(self._decode([token])))]


def _is_text(data: bytes) -> bool:
    """Return whether bytes are whole UTF-8 characters; within a character nothing can be closed."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
