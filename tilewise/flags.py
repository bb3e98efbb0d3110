"""Command-line flags: declare them, suggest known flags for unknown ones, phrase messages in flags.

Imports nothing heavy: the command line reads it before it knows the command.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Flag", "Parser", "add_flag", "as_typed", "flags_of", "hint", "unknown_argument"]

_LIKE = 0.65  # similarity of two names from which one is suggested for the other
_PARTS_OF_A_SUBJECT = 5  # "a, b and c"; a longer text before " must " is a sentence
# parameter names that are ordinary nouns in a message: a prompt may come from a file
_NOUNS = {"prompt"}


@dataclass(frozen=True, slots=True)
class Flag:
    """One option of the command line.

    Attributes:
        name: the attribute of the parsed options that has the value.
        kind: the type of the value; bool makes a pair of flags, --x and --no-x, list takes several
            texts.
        default: the value if the flag is not given; None may stand for a value that another part
            decides.
        text: one line of help.
        group: the heading under which the help lists the flag.
        metavar: the name of the value in the help.
        word: the name in a configuration file and, in capitals, of an environment variable; the
            flag has - for _. None is `name`.
        shown_default: the default that the help shows; None is `default`.
    """

    name: str
    kind: type
    default: Any
    text: str
    group: str
    metavar: str | None = None
    word: str | None = None
    shown_default: Any = None

    @property
    def key(self) -> str:
        """The name in a configuration file and, in capitals, of an environment variable."""
        return self.word or self.name

    @property
    def flag(self) -> str:
        """The long option on the command line, such as --max-model-len."""
        return "--" + self.key.replace("_", "-")


def add_flag(group: Any, flag: Flag, default: Any = argparse.SUPPRESS) -> None:
    """Add a flag to a parser or a group of one.

    Args:
        group: the parser or the group.
        flag: the flag to add.
        default: the value of the parsed options if the flag is not given; the parser's formatter
            then shows it in the help. With SUPPRESS the options lack a flag that is not given, and
            the help shows the flag's own default.
    """
    shown = flag.default if flag.shown_default is None else flag.shown_default
    is_shown = default == argparse.SUPPRESS and shown is not None and not isinstance(shown, bool)
    text = f"{flag.text} (default: {shown})" if is_shown else flag.text
    settings: dict[str, Any] = {
        "dest": flag.name,
        "default": default,
        "help": text.replace("%", "%%"),
    }
    if flag.kind is bool:
        settings["action"] = argparse.BooleanOptionalAction
    else:
        settings["type"] = str if flag.kind is list else flag.kind
        settings["metavar"] = flag.metavar
        if flag.kind is list:
            settings["nargs"] = "+"
    group.add_argument(flag.flag, **settings)


class Parser(argparse.ArgumentParser):
    """A parser that suggests a known option for an unknown one."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all arguments and return the options; an unknown one is reported with a suggestion,
        and exits with 2."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(unknown_argument(unknown, flags_of(self).values()))
        return options


def flags_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the longest option string of each destination of a parser, such as {"max_tokens":
    "--max-tokens"}."""
    found: dict[str, str] = {}
    for action in parser._actions:
        if action.option_strings:
            found.setdefault(action.dest, max(action.option_strings, key=len))
    return found


def hint(asked: str, known: Iterable[str]) -> str:
    """Return "; did you mean --flag?" for the most similar flag of `known`, or "" if none is
    similar to `asked`."""
    like = difflib.get_close_matches(asked, list(known), n=1, cutoff=_LIKE)
    return f"; did you mean {like[0]}?" if like else ""


def unknown_argument(unknown: Sequence[str], known: Iterable[str]) -> str:
    """Return a message about arguments that a parser does not know: about the first option, with
    the most similar one of `known`, or, without options, about all words."""
    for word in unknown:
        if word.startswith("-"):
            asked = word.split("=", 1)[0]
            return f"{asked} is not an option here{hint(asked, known)}"
    return f"nothing is expected here, got {' '.join(unknown)}"


def as_typed(sentence: str, parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """Return an error's message in the words of the command line.

    Names of parameters become flags: names with an underscore everywhere, the others where they are
    the subject of "must". Of a value that no flag gave, "got <value>" becomes "by default it is
    <value>".

    Args:
        sentence: the message of an error, "name must <rule>, got <value>".
        parser, options: the command's parser, and its result.

    Example:
        "top_p must be in (0, 1], got 2.0" becomes "--top-p must be in (0, 1], got 2.0".
    """
    flags = flags_of(parser)
    given = {n for n, x in vars(options).items() if n in flags and x != parser.get_default(n)}
    subject, must, rule = sentence.partition(" must ")
    parts = re.split(r"(,? and |,? or |, )", subject)
    named = [part for part in parts if part in flags]
    if must and named and len(parts) <= _PARTS_OF_A_SUBJECT:
        subject = "".join(part if part in _NOUNS else flags.get(part, part) for part in parts)
        body, got, value = rule.rpartition(", got ")
        if got and not set(named) & {*given, *_NOUNS}:
            rule = f"{body}; by default it is {value}"
    sentence = subject + must + rule
    for name in flags:
        if "_" in name:
            sentence = re.sub(rf"(?<![\w'\"./-]){name}(?![\w'\"./-])", flags[name], sentence)
    return sentence
