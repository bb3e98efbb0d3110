"""Read values as Python and Gemma write them, and tell them as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from json.encoder import encode_basestring

from tilewise.server.calls.reading import SPACE, CallText, NotACall, Reader

__all__ = ["PYTHON", "Dialect", "as_json", "escaped", "value"]

MOST_DEPTH = 64
_WORDS = {
    "True": "true",
    "true": "true",
    "False": "false",
    "false": "false",
    "None": "null",
    "null": "null",
}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
# Digits may be in one place of it only: a long text that is none takes time by its length.
_LOOSE = re.compile(r"[-+]?(?:[0-9_]+(?:\.[0-9_]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_ESCAPES = {
    "n": "\\n",
    "t": "\\t",
    "r": "\\r",
    "b": "\\b",
    "f": "\\f",
    "a": "\\u0007",
    "v": "\\u000b",
    "0": "\\u0000",
    "\\": "\\\\",
    "'": "'",
    '"': '\\"',
    "/": "/",
    "\n": "",
}
_HEX = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class Dialect:
    """The way in which a model writes the values of a call's arguments, beside Python's notation.

    Attributes:
        quote: a mark around strings without escapes; "" for none.
        has_bare: True if other words than those of constants are strings, as models write them.
    """

    quote: str = ""
    has_bare: bool = True


PYTHON = Dialect()
_STRICT = Dialect(has_bare=False)


def escaped(text: str) -> str:
    """Return text as it stands within a JSON string, without the quotation marks."""
    return encode_basestring(text)[1:-1]


def as_json(text: str) -> str | None:
    """Return the JSON text of a list, tuple or dict in Python's notation; None if `text` is not one
    such value alone, or has words without quotes."""
    found: list[str] = []
    reader = value(CallText({}), found.append, _STRICT)
    left = iter(text)
    try:
        next(reader)
        for char in left:
            reader.send(char)
    except NotACall:
        return None
    except StopIteration:
        return None if "".join(left).strip(SPACE) else "".join(found)
    reader.close()
    return None


def value(
    text: CallText, tell: Callable[[str], None], dialect: Dialect, depth: int = 0
) -> Reader[None]:
    """Read one value from `text` and tell it as JSON; the comma or bracket behind it is given back
    to be read again.

    Args:
        text: the source of characters.
        tell: a function that is called with each piece of the value's JSON text.
        dialect: the way in which the model writes values.
        depth: the number of lists and objects around the value.

    Raises:
        NotACall: what follows is no value, or one that is nested too deep.
    """
    if depth > MOST_DEPTH:
        raise NotACall
    char = yield from text.after_space()
    if dialect.quote and char == dialect.quote[0]:
        text.give_back(char)
        if (yield from text.match(dialect.quote)) is not None:
            yield from _plain_string(text, tell, dialect.quote)
            return
        char = yield from text.take()
    if char in "\"'":
        yield from _string(text, tell, char)
    elif char == "{":
        yield from _items(text, tell, dialect, depth, "}")
    elif char in "[(":
        yield from _items(text, tell, dialect, depth, "]" if char == "[" else ")")
    else:
        text.give_back(char)
        yield from _bare(text, tell, dialect)


def _items(
    text: CallText, tell: Callable[[str], None], dialect: Dialect, depth: int, close: str
) -> Reader[None]:
    is_object = close == "}"
    tell("{" if is_object else "[")
    count = 0
    while True:
        char = yield from text.after_space()
        if char == close:
            break
        if count:
            if char != ",":
                text.fail(char)
            char = yield from text.after_space()
            if char == close:  # a comma may stand behind the last item
                break
        text.give_back(char)
        tell(", " if count else "")
        if is_object:
            yield from _key(text, tell, dialect)
        yield from value(text, tell, dialect, depth + 1)
        count += 1
    tell("}" if is_object else "]")


def _key(text: CallText, tell: Callable[[str], None], dialect: Dialect) -> Reader[None]:
    char = yield from text.after_space()
    text.give_back(char)
    if char in "\"'" or (dialect.quote and char == dialect.quote[0]):
        yield from value(text, tell, dialect)
        char = yield from text.after_space()
        if char != ":":
            text.fail(char)
    elif not dialect.has_bare:
        raise NotACall
    else:
        name = yield from text.until(":", most=256)
        yield from text.take()
        tell(f'"{escaped(name.strip())}"')
    tell(": ")


def _plain_string(text: CallText, tell: Callable[[str], None], quote: str) -> Reader[None]:
    """Read a string without escapes up to its closing mark `quote`, and tell it as JSON."""
    tell('"')
    held = ""
    while True:
        held += yield from text.take()
        while held and not quote.startswith(held):
            tell(escaped(held[0]))
            held = held[1:]
        if held == quote:
            break
    tell('"')


def _string(text: CallText, tell: Callable[[str], None], quote: str) -> Reader[None]:
    """Read a string of Python or JSON after its opening `quote`, which may be one of three, and
    tell it as JSON."""
    tell('"')
    char = yield from text.take()
    is_long = False
    if char == quote:
        char = yield from text.take()
        if char != quote:
            text.give_back(char)
            tell('"')
            return
        is_long = True
        char = yield from text.take()
    run = 0
    while True:
        if char == quote:
            run += 1
            if not is_long or run == 3:
                break
        else:
            tell('\\"' * run if quote == '"' else "'" * run)
            run = 0
            if char == "\\":
                yield from _escape(text, tell)
            else:
                tell(escaped(char))
        char = yield from text.take()
    tell('"')


def _escape(text: CallText, tell: Callable[[str], None]) -> Reader[None]:
    char = yield from text.take()
    if char in _ESCAPES:
        tell(_ESCAPES[char])
        return
    digits = ""
    while char in _HEX and len(digits) < _HEX[char]:
        digit = yield from text.take()
        if digit not in "0123456789abcdefABCDEF":
            text.give_back(digit)
            break
        digits += digit
    if char not in _HEX or len(digits) < _HEX[char]:
        tell("\\\\" + escaped(char + digits))
    elif char == "U":
        code = int(digits, 16)
        tell(escaped(chr(code)) if code < 0x110000 else "\\\\U" + digits)
    else:
        tell("\\u" + digits.rjust(4, "0"))


def _bare(text: CallText, tell: Callable[[str], None], dialect: Dialect) -> Reader[None]:
    """Read a constant, a number, or, where the dialect has them, a string without quotes, and tell
    it as JSON.

    Raises:
        NotACall: there is no such value.
    """
    found: list[str] = []  # it is told when it is whole: the beginning of a number is another one
    while True:
        char = yield from text.take()
        if char in ",)]}\n":
            text.give_back(char)
            break
        found.append(char)
    written = "".join(found).strip(SPACE)
    if written in _WORDS:
        tell(_WORDS[written])
    elif _NUMBER.fullmatch(written):
        tell(written)
    elif _LOOSE.fullmatch(written):
        tell(_number(written))
    elif not written or not dialect.has_bare:
        raise NotACall
    else:
        tell(f'"{escaped(written)}"')


def _number(written: str) -> str:
    """Return the JSON of a number that only Python writes so, such as 1_000, +1 or .5; a JSON
    string if the text is no finite number."""
    plain = written.replace("_", "")
    try:
        return str(int(plain))
    except ValueError:
        pass
    try:
        found = json.dumps(float(plain))
    except ValueError:
        return f'"{escaped(written)}"'
    return found if found[-1].isdigit() else f'"{escaped(written)}"'
