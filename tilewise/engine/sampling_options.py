"""What SamplingParams asks of logits beside temperature and truncation: rules and bounds. No torch.

Each option is checked by itself here, where its request is made. What depends on the model, such as
the size of its vocabulary, `engine.options` checks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tilewise.errors import is_integer, is_number, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "Matcher",
    "StructuredOutputs",
    "check_allowed",
    "check_bad_words",
    "check_biases",
    "check_lengths",
    "check_penalties",
    "check_processors",
]

MAX_BIASES = 1024
MAX_ALLOWED_IDS = 1 << 17
MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH = 256, 1024
MAX_PROCESSORS = 16
SMALLEST_PENALTY = 1e-6  # of repetition, and the inverse at most: logits stay finite in float32
MAX_PENALTY, MAX_BIAS = 2.0, 100.0  # the OpenAI API's
# Characters of a schema, an expression or a grammar, and of all choices together.
MAX_GRAMMAR_LENGTH = 1 << 16
MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """A description of the texts that may be generated, in one of four forms; names are vLLM's.

    Attributes:
        json: a JSON schema, as text or as a dict; {} is any JSON.
        regex: a regular expression for the whole text, without look-around and back references.
        choice: at most 1024 texts, of which it is one.
        grammar: a context-free grammar in Lark's syntax (start rule `start`) or llama.cpp's GBNF
            (start rule `root`).
        lead: the text before the part that is described, such as reasoning: a grammar in Lark's
            syntax (start rule `start`) in which `@text` stands for the described part.

    A description has at most 65,536 characters.

    Raises:
        TypeError: a value is not of its type; the message names it.
        ValueError: not exactly one is given, or it is empty or too long.

    Example:
        >>> params = SamplingParams(structured=StructuredOutputs(choice=["yes", "no"]))
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    lead: str | None = None

    def __post_init__(self) -> None:
        names = ("json", "regex", "choice", "grammar")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            got = ", ".join(given) or "none"
            raise ValueError(f"structured must have one of json, regex, choice, grammar, got {got}")
        for name in ("regex", "grammar", "lead"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} must be a str, got {shown(value)}")
        if self.json is not None and not isinstance(self.json, (str, Mapping)):
            raise TypeError(f"json must be a str or a dict, got {type(self.json).__name__}")
        if self.choice is not None:
            _check_texts("choice", self.choice, MAX_CHOICES, MAX_GRAMMAR_LENGTH)
        length = len(self.description)
        if not 0 < length <= MAX_GRAMMAR_LENGTH:
            raise ValueError(
                f"{self.kind} must have 1 ... {MAX_GRAMMAR_LENGTH} characters, got {length}"
            )

    @property
    def kind(self) -> str:
        """The name of the form that is given: "json", "regex", "choice" or "grammar"."""
        names = ("json", "regex", "choice", "grammar")
        return next(name for name in names if getattr(self, name) is not None)

    @property
    def description(self) -> str:
        """The description as one text, equal for equal ones: a schema or choices as JSON.

        Raises:
            ValueError: json is a text that is not JSON, or holds what JSON has no word for.
        """
        if self.json is not None:
            try:
                schema = json.loads(self.json) if isinstance(self.json, str) else self.json
                return json.dumps(schema)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(
                    f"json must be a JSON schema, got one that fails: {error}"
                ) from None
        if self.choice is not None:
            return json.dumps(list(self.choice), ensure_ascii=False)
        return self.regex or self.grammar or ""


class Matcher(Protocol):
    """The state of one sample's grammar; if one of the methods raises, the request ends."""

    def accept(self, token_id: int) -> None:
        """Advance the state by one token, which the last mask allowed."""
        ...

    def fill_mask(self, words: NDArray[np.int32]) -> None:
        """Write into `words` which tokens may come next: bit t % 32 of word t // 32 is 1 if token t
        may."""
        ...

    def end_within(self, words: NDArray[np.int32], left: int) -> None:
        """Narrow a mask in place, near the limit, so that a text can be whole within `left` tokens.

        The next token is one of them. The mask stays as it is if no way to close the text is found.
        """
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` calls of `accept`."""
        ...


def check_penalties(presence: float, frequency: float, repetition: float) -> None:
    """Refuse penalties outside their ranges.

    Raises:
        ValueError: the message names the penalty.
    """
    for name, value in (("presence_penalty", presence), ("frequency_penalty", frequency)):
        if not -MAX_PENALTY <= value <= MAX_PENALTY:
            raise ValueError(f"{name} must be in [-2, 2], got {shown(value)}")
    if not SMALLEST_PENALTY <= repetition <= 1 / SMALLEST_PENALTY:
        raise ValueError(
            f"repetition_penalty must be in {SMALLEST_PENALTY:g} ... {1 / SMALLEST_PENALTY:g}, "
            f"got {shown(repetition)}"
        )


def check_lengths(min_tokens: int, max_tokens: int | None) -> None:
    """Refuse lengths of a text that it cannot have.

    Raises:
        ValueError: max_tokens is below 1, or min_tokens below 0 or above max_tokens.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {shown(max_tokens)}")
    if min_tokens < 0 or min_tokens > (max_tokens or min_tokens):
        raise ValueError(
            f"min_tokens must be in 0 ... max_tokens ({shown(max_tokens)}), got {shown(min_tokens)}"
        )


def check_biases(biases: object) -> None:
    """Refuse a logit_bias that is not {token id: bias in [-100, 100]}.

    Raises:
        TypeError: logit_bias is no dict, or has other keys or values.
        ValueError: logit_bias has too many tokens, or a bias is outside its range.
    """
    if not isinstance(biases, Mapping):
        raise TypeError(f"logit_bias must be a dict, got {type(biases).__name__}")
    if len(biases) > MAX_BIASES:
        raise ValueError(f"logit_bias must be of at most {MAX_BIASES} tokens, got {len(biases)}")
    for token, bias in biases.items():
        if not is_integer(token):
            raise TypeError(f"logit_bias must have integers as keys, got {shown(token)}")
        if not is_number(bias):
            raise TypeError(f"logit_bias must have numbers as values, got {shown(bias)}")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(
                f"logit_bias must be in [-100, 100], got {shown(bias)} for token {shown(token)}"
            )


def check_allowed(ids: object) -> None:
    """Refuse allowed_token_ids that are not a list, tuple, set or range of integers.

    Raises:
        TypeError: allowed_token_ids is none of these, or an entry is no integer.
        ValueError: allowed_token_ids is empty or has more than MAX_ALLOWED_IDS entries.
    """
    if not isinstance(ids, (list, tuple, set, frozenset, range)):
        raise TypeError(f"allowed_token_ids must be a list of integers, got {shown(ids)}")
    if not 1 <= len(ids) <= MAX_ALLOWED_IDS:
        raise ValueError(f"allowed_token_ids must be 1 ... {MAX_ALLOWED_IDS} ids, got {len(ids)}")
    for i in ids:
        if not is_integer(i):
            raise TypeError(
                f"allowed_token_ids must be a list of integers, got one that is {shown(i)}"
            )


def check_processors(processors: object) -> None:
    """Refuse logits_processors that are not a list of functions.

    Raises:
        TypeError: logits_processors is no list, or an entry is no function.
        ValueError: logits_processors is too long.
    """
    if not isinstance(processors, (list, tuple)):
        raise TypeError(f"logits_processors must be a list, got {type(processors).__name__}")
    if len(processors) > MAX_PROCESSORS:
        raise ValueError(
            f"logits_processors must be at most {MAX_PROCESSORS} functions, got {len(processors)}"
        )
    for processor in processors:
        if not callable(processor):
            raise TypeError(f"logits_processors must be functions, got {shown(processor)}")


def check_bad_words(words: list[str] | tuple[str, ...]) -> None:
    """Refuse bad_words that are not texts with at least one character besides spaces.

    Raises:
        TypeError: bad_words is no list, tuple or set, or holds something that is no str.
        ValueError: bad_words has more than MAX_BAD_WORDS texts, or a text is empty, only spaces,
            or longer than MAX_BAD_WORD_LENGTH characters.
    """
    _check_texts("bad_words", words, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
    if not all(word.lstrip(" ") for word in words):
        raise ValueError("bad_words must not hold an empty word")


def _check_texts(name: str, texts: object, most: int, longest: int) -> None:
    many = (list, tuple, set, frozenset)
    if isinstance(texts, many) and len(texts) > most:
        raise ValueError(f"{name} must be at most {most} texts, got {len(texts)}")
    if not isinstance(texts, many) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name} must be a list of str, got {shown(texts)}")
    found: Iterable[str] = texts
    length = max(map(len, found), default=0)
    if length > longest:
        raise ValueError(f"{name} must be of at most {longest} characters, got one of {length}")
    if name == "choice" and not texts:
        raise ValueError("choice must hold at least 1 text, got 0")
