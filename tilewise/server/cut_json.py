"""Complete JSON that was cut off: close its strings and brackets.

A model that runs out of tokens within a call leaves arguments that are the beginning of an object.
Clients send such a call back with the next turn, and templates read arguments as objects.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["completed"]

_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_HALF_A_PAIR = re.compile(r"(?<!\\)((?:\\\\)*)\\u[dD][89abAB][0-9a-fA-F]{2}$")
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LITERALS = ("true", "false", "null")
_SPACE = " \t\r\n"


def completed(text: str) -> Any:
    """Return the value of a JSON text, or of the beginning of one.

    Incomplete parts at the end (a key without its value, half an escape, a comma) are dropped; a
    string ends where it was cut, and open arrays and objects are closed.

    Raises:
        ValueError: the text is not the beginning of any JSON.

    Example:
        >>> completed('{"city": "Par')
        {'city': 'Par'}
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except ValueError:
        kept = _kept(text)
    try:
        return json.loads(kept)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _kept(text: str) -> str:
    """Return the complete part of a JSON text that was cut off, with the quotation mark and the
    brackets that close it appended.

    Raises:
        ValueError: the text is not the beginning of any JSON.
    """
    place, kept, open_ = 0, 0, list[str]()
    awaited = "value"
    while True:
        while place < len(text) and text[place] in _SPACE:
            place += 1
        if place == len(text):
            break
        char = text[place]
        if awaited in ("value", "key", "first value", "first key"):
            if awaited.startswith("first") and char == open_[-1]:
                open_.pop()
                place, awaited = place + 1, "comma"
            elif char == '"':
                found = _STRING.match(text, place)
                assert found is not None
                is_whole = text[found.end() : found.end() + 1] == '"'
                if not is_whole:
                    _check_cut(text, found.end())
                    if awaited.endswith("value"):
                        cut = _HALF_A_PAIR.sub(r"\1", found[0])
                        return f'{text[:place]}{cut}"{"".join(reversed(open_))}'
                    break
                place = found.end() + 1
                if awaited.endswith("key"):
                    awaited = "colon"
                    continue
                awaited = "comma"
            elif awaited.endswith("key"):
                raise ValueError(f"a key must begin at character {place}")
            elif char in "{[":
                open_.append("}" if char == "{" else "]")
                place, awaited = place + 1, "first key" if char == "{" else "first value"
            else:
                word = _WORD.match(text, place)
                if word is None:
                    raise ValueError(f"a value must begin at character {place}")
                if word.end() == len(text):
                    whole = _word_of(word[0])
                    if whole is None:
                        break
                    return text[:place] + whole + "".join(reversed(open_))
                if word[0] not in _LITERALS and not _NUMBER.fullmatch(word[0]):
                    raise ValueError(f"a value must begin at character {place}")
                place, awaited = word.end(), "comma"
        elif awaited == "colon":
            if char != ":":
                raise ValueError(f"a colon must stand at character {place}")
            place, awaited = place + 1, "value"
            continue
        elif open_ and char == ",":
            place, awaited = place + 1, "key" if open_[-1] == "}" else "value"
            continue
        elif open_ and char == open_[-1]:
            open_.pop()
            place += 1
        else:
            raise ValueError(f"nothing must stand at character {place}, got {char!r}")
        kept = place  # the brackets open here stay open until the next such place
    if not kept:
        raise ValueError("there is no value")
    return text[:kept] + "".join(reversed(open_))


def _check_cut(text: str, place: int) -> None:
    """Raise ValueError unless the text ends at `place`, or is cut off there within an escape.

    Args:
        text: a JSON text with a string that is not closed.
        place: the index behind the last character that the string may have.
    """
    rest = text[place:]
    if rest and not re.fullmatch(r"\\(?:u[0-9a-fA-F]{0,3})?", rest):
        raise ValueError(f"a string must not hold {rest[0]!r} at character {place}")


def _word_of(word: str) -> str | None:
    """Return the JSON number or literal for a word at the end of a text that was cut off.

    A literal is completed, "tr" to "true". A number loses an incomplete end, "1." becomes "1";
    None for "-", which has no digit yet.

    Raises:
        ValueError: the word is not the beginning of a number or literal.
    """
    if word[0].isalpha():
        return next((one for one in _LITERALS if one.startswith(word)), None) or _refuse(word)
    found = _NUMBER.match(word)
    if word != "-" and (
        found is None or not re.fullmatch(r"(?:\.|[eE][-+]?)?", word[found.end() :])
    ):
        _refuse(word)
    return None if found is None else found[0]


def _refuse(word: str) -> str:
    raise ValueError(f"a value must not be {word!r}")
