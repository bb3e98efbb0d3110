"""The options of an engine and the terms of a request, each declared once. No torch.

The metadata of a field of `EngineConfig` hold what its value is, which values it may have and which
flag sets it. Made of them are: the signature and the docstring of `LLM`, the flags of the command
line with their help, the variables and the entries of `--config`, the table in
docs/reference/options.md, and the checks.
"""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

from tilewise.errors import RequestError, is_integer, is_number, shown
from tilewise.flags import Flag
from tilewise.keywords import unknown_keyword

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "GRAPHS",
    "LEAST_MAX_RANK",
    "MODEL_IMPLS",
    "NO_TERMS",
    "POLICIES",
    "PREEMPTIONS",
    "VICTIMS",
    "DraftModel",
    "EngineConfig",
    "Modules",
    "Option",
    "OwnHead",
    "PromptLookup",
    "RequestTerms",
    "Terms",
    "check_name",
    "check_policy",
    "check_preemption",
    "documented",
    "engine_flags",
    "option",
    "options_of",
]

C = TypeVar("C", bound=type)

PREEMPTIONS = ("auto", "recompute", "swap")
VICTIMS = ("newest", "cheapest")
POLICIES = ("fcfs", "priority", "fair")
GRAPHS = ("auto", "lazy", "off")
MODEL_IMPLS = ("auto", "tilewise", "transformers")

MAX_RANK = 512  # of an adapter: that of `models.adapters`, whose file imports torch
LEAST_MAX_RANK = 16  # the largest rank of an adapter, where neither option nor file says more
MAX_NAME = 1024  # characters of a request's id, user or salt

MAX_DRAFTS = 16  # of a step; the chance that one more is right falls with each
MAX_BRANCHES = 4  # continuations that a tree of guesses is made of


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Options of drafts by prompt lookup: tokens that followed an earlier copy of the last few
    tokens.

    Attributes:
        num_tokens: the number of guesses a step, 1 to 16.
        max_ngram: the largest number of last tokens that are searched for in the text before; long
            ones are tried first.
        min_ngram: the smallest number of last tokens that are searched for.
        is_adaptive: True turns guesses off where they cost more than they give.
        num_branches: places of an n-gram whose continuations are guessed at once, the last ones
            first, 1 to 4: with more than 1, guesses are a tree of at most 16 rows (`draft_trees`).
            Not with batch invariance, as the rows of a branch add keys in another order, nor for
            layers with a window or with latents.

    Raises:
        TypeError: a value is not of its type.
        ValueError: a value is outside its range; the message names it.

    Example:
        >>> llm = LLM("story", speculative=PromptLookup(num_tokens=6))
    """

    num_tokens: int = 4
    max_ngram: int = 4
    min_ngram: int = 2
    is_adaptive: bool = True
    num_branches: int = 1

    def __post_init__(self) -> None:
        _check_guesses(self.num_tokens, self.is_adaptive)
        _check_count("num_branches", self.num_branches, MAX_BRANCHES)
        _check_count("max_ngram", self.max_ngram, MAX_DRAFTS)
        _check_count("min_ngram", self.min_ngram, MAX_DRAFTS)
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram and max_ngram must be in 1 ... {MAX_DRAFTS}, in this order, "
                f"got {self.min_ngram} and {self.max_ngram}"
            )


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Options of guesses by a smaller model with the same vocabulary, which runs on the model's
    device.

    Attributes:
        model: a checkpoint directory, a hub name, or "story".
        num_tokens: the number of guesses a step, 1 to 16.
        dtype: the dtype of the smaller model's parameters; "auto" is the checkpoint's own.
        is_adaptive: True turns guesses off where they cost more than they give.

    Raises:
        TypeError: a value is not of its type.
        ValueError: num_tokens is outside its range.
    """

    model: str | Path
    num_tokens: int = 4
    dtype: str = "auto"
    is_adaptive: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | Path):
            got = shown(self.model)
            raise TypeError(f"model must be a directory, a hub name or 'story', got {got}")
        _check_guesses(self.num_tokens, self.is_adaptive)


@dataclass(frozen=True, slots=True)
class OwnHead:
    """Options of guesses by the checkpoint's own multi-token prediction head.

    Attributes:
        num_tokens: the number of guesses a step, 1 to 16; for each further guess the head is
            applied to its own output.
        is_adaptive: True turns guesses off where they cost more than they give.

    Raises:
        TypeError: a value is not of its type.
        ValueError: num_tokens is outside its range.
    """

    num_tokens: int = 1
    is_adaptive: bool = True

    def __post_init__(self) -> None:
        _check_guesses(self.num_tokens, self.is_adaptive)


def _check_guesses(num_tokens: object, is_adaptive: object) -> None:
    _check_count("num_tokens", num_tokens, MAX_DRAFTS)
    if not isinstance(is_adaptive, bool):
        raise TypeError(f"is_adaptive must be a bool, got {shown(is_adaptive)}")


def _check_count(name: str, value: object, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {shown(value)}")
    if not 1 <= value <= most:
        raise ValueError(f"{name} must be in 1 ... {most}, got {shown(value)}")


class Rule(Protocol):
    """The rule that the values of an option must obey.

    Attributes:
        kind: the type to which a text, from a flag or a file, is converted; None where no text can
            be a value.
        values: the range in words, for people; "" where there is no more to say than the type.
    """

    @property
    def kind(self) -> type | None:
        """The type to which a text, from a flag or a file, is converted; None where no text can be
        a value."""
        ...

    @property
    def values(self) -> str:
        """The range in words, for people; "" where the type says it all."""
        ...

    def check(self, name: str, value: Any) -> None:
        """Raise TypeError or ValueError, naming `name`, if `value` is not allowed."""
        ...


@dataclass(frozen=True, slots=True)
class Integer:
    """The rule that a value is an integer of Python or another library, but no bool.

    Attributes:
        least: the smallest integer that is allowed; None is no bound.
        or_none: True where None is a value, too.
    """

    least: int | None = None
    or_none: bool = False
    kind: type = int

    @property
    def values(self) -> str:
        """The range in words, for people; "" where the type says it all."""
        return "" if self.least is None else f"at least {self.least}"

    def check(self, name: str, value: Any) -> None:
        """Raise TypeError or ValueError, naming `name`, unless `value` is an integer of at least
        `least`."""
        if value is None and self.or_none:
            return
        if not is_integer(value):
            kind = "an integer or None" if self.or_none else "an integer"
            raise TypeError(f"{name} must be {kind}, got {shown(value)}")
        if self.least is not None and value < self.least:
            raise ValueError(f"{name} must be at least {self.least}, got {shown(value)}")


@dataclass(frozen=True, slots=True)
class Boolean:
    """The rule that a value is True or False.

    Attributes:
        or_none: True where None is a value, too.
    """

    or_none: bool = False
    kind: type = bool
    values: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raise TypeError, naming `name`, unless `value` is a bool, or None where that is
        allowed."""
        if not isinstance(value, bool) and not (value is None and self.or_none):
            kind = "True, False or None" if self.or_none else "True or False"
            raise TypeError(f"{name} must be {kind}, got {shown(value)}")


@dataclass(frozen=True, slots=True)
class Size:
    """The rule that a value is a finite number, 0 or more."""

    kind: type = float
    values: str = "finite and at least 0"

    def check(self, name: str, value: Any) -> None:
        """Raise TypeError or ValueError, naming `name`, unless `value` is finite and at least 0."""
        _check_finite(name, value)
        if value < 0:
            raise ValueError(f"{name} must be {self.values}, got {value}")


@dataclass(frozen=True, slots=True)
class Share:
    """The rule that a value is a number above 0 and at most 1."""

    kind: type = float
    values: str = "in (0, 1]"

    def check(self, name: str, value: Any) -> None:
        """Raise TypeError, naming `name`, for no number; ValueError for one that is not in
        (0, 1]."""
        _check_finite(name, value)
        if not 0 < value <= 1:
            raise ValueError(f"{name} must be {self.values}, got {shown(value)}")


def _check_finite(name: str, value: Any) -> None:
    if not is_number(value):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    if not -sys.float_info.max <= value <= sys.float_info.max:
        raise ValueError(f"{name} must be finite, got {shown(value)}")


@dataclass(frozen=True, slots=True)
class Part:
    """The rule that a value is a number in [0, 1]."""

    kind: type = float
    values: str = "in [0, 1]"

    def check(self, name: str, value: Any) -> None:
        """Raise TypeError or ValueError, naming `name`, unless `value` is a number in [0, 1]."""
        _check_finite(name, value)
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be {self.values}, got {shown(value)}")


@dataclass(frozen=True, slots=True)
class Choice:
    """The rule that a value is one of a few strings.

    Attributes:
        texts: the strings that are allowed.
        phrase: the words of an error message after "must be", strings included; "" for "one of"
            and all strings.
    """

    texts: tuple[str, ...]
    phrase: str = ""
    kind: type = str

    @property
    def values(self) -> str:
        """The allowed strings, with commas between them, for people."""
        return ", ".join(self.texts)

    def check(self, name: str, value: Any) -> None:
        """Raise TypeError or ValueError, naming `name`, unless `value` is one of the strings."""
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a str, got {shown(value)}")
        if value not in self.texts:
            phrase = self.phrase or f"one of {self.values}"
            raise ValueError(f"{name} must be {phrase}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Folder:
    """The rule that a value is a path as str or Path, or None."""

    kind: type = str
    values: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raise TypeError, naming `name`, unless `value` is a str, a Path or None; it need not
        exist."""
        if not isinstance(value, str | Path | None):
            raise TypeError(f"{name} must be a directory or None, got {shown(value)}")


@dataclass(frozen=True, slots=True)
class Name:
    """The rule of an option that accepts any value here: it is checked later, where names are
    known.

    Attributes:
        values: examples of names, for people.
    """

    values: str = ""
    kind: type = str

    def check(self, name: str, value: Any) -> None:
        """Accept any value."""


@dataclass(frozen=True, slots=True)
class Guesses:
    """The rule that a value is a `PromptLookup`, a `DraftModel`, an `OwnHead` or None."""

    kind: None = None
    values: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raise TypeError, naming `name`, unless `value` is of one of the classes of drafts or
        None."""
        if not isinstance(value, PromptLookup | DraftModel | OwnHead | None):
            raise TypeError(
                f"{name} must be PromptLookup, DraftModel, OwnHead or None, got {value!r}"
            )


@dataclass(frozen=True, slots=True)
class Weights:
    """The rule that a value is a dict of positive finite numbers by users' names, or None."""

    kind: None = None
    values: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raise TypeError or ValueError, naming `name`, unless `value` is such a dict or None."""
        if value is None:
            return
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a dict or None, got {shown(value)}")
        for user, weight in value.items():
            if not isinstance(user, str):
                raise TypeError(f"{name} must have users' names as keys, got {shown(user)}")
            if not is_number(weight):
                raise TypeError(f"{name} must have numbers as values, got {shown(weight)}")
            if not 0 < weight <= sys.float_info.max:
                raise ValueError(
                    f"{name} must be above 0 and finite, got {shown(weight)} for {shown(user)}"
                )


@dataclass(frozen=True, slots=True)
class Rank:
    """The rule that a value is the rank of an adapter, 1 to 512, or None."""

    kind: type = int
    values: str = f"1 ... {MAX_RANK}"

    def check(self, name: str, value: Any) -> None:
        """Raise TypeError or ValueError, naming `name`, unless `value` is in 1 ... 512 or None."""
        if value is None:
            return
        if not is_integer(value):
            raise TypeError(f"{name} must be an integer or None, got {shown(value)}")
        if not 1 <= value <= MAX_RANK:
            raise ValueError(f"{name} must be in {self.values}, got {shown(value)}")


@dataclass(frozen=True, slots=True)
class Modules:
    """The rule of an option that gives paths by name: a dict, a list of "name=path", or None."""

    kind: type = list
    values: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raise TypeError or ValueError, naming `name`, unless `value` gives paths by name or is
        None."""
        for key, path in self.pairs(name, value):
            if not isinstance(key, str) or not isinstance(path, str | Path):
                raise TypeError(f"{name} must be paths by names, got {shown(key)}: {shown(path)}")
            if not key or not str(path):
                raise ValueError(f"{name} must have a name and a path, got {key!r}={str(path)!r}")

    @staticmethod
    def pairs(name: str, value: Any) -> list[tuple[Any, Any]]:
        """Return the (name, path) pairs of a dict or of a list of "name=path"; [] for None.

        Raises:
            TypeError: the value is neither a dict nor a list of texts.
            ValueError: a text of the list has no "=", or two have one name.
        """
        if value is None:
            return []
        if isinstance(value, Mapping):
            return list(value.items())
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise TypeError(f"{name} must be a dict, a list of name=path or None, got {value!r}")
        pairs: list[tuple[Any, Any]] = []
        for text in value:
            key, equals, path = text.partition("=")
            if not equals:
                raise ValueError(f"{name} must be name=path, got {text!r}")
            if key in dict(pairs):
                raise ValueError(f"{name} must have each name once, got {key!r} twice")
            pairs.append((key, path))
        return pairs


@dataclass(frozen=True, slots=True)
class Option:
    """The description of an option, from the metadata of its field.

    Attributes:
        text: the description of the value, for one line of help.
        more: further sentences, for a docstring; "" where there is no more to say.
        rule: the rule that values must obey.
        flag: the flag without its dashes and with _ for -, which is also the name in a file and,
            in capitals, of a variable; None where there is no flag.
        metavar: the name of the value in the help; None for a bool.
    """

    text: str
    more: str
    rule: Rule
    flag: str | None
    metavar: str | None


def option(
    rule: Rule,
    text: str,
    more: str = "",
    *,
    flag: str | None = None,
    metavar: str | None = None,
) -> dict[str, Option]:
    """Return the metadata of a field of a config: {"option": an `Option`}.

    Args:
        rule: the rule that checks a value.
        text: the text of the flag's help.
        more: the text that only the documentation adds.
        flag: the flag without its dashes, with _ for -; None for no flag.
        metavar: the name of the value in the help; None for a bool.
    """
    return {"option": Option(text, more, rule, flag, metavar)}


@dataclass(frozen=True)
class EngineConfig:
    """The arguments of `LLM`; a value that is None or "auto" is decided when the engine is made.

    Raises:
        TypeError: a value is not of its type.
        ValueError: a value is out of its range, or two do not go together.
    """

    model: str | Path | nn.Module
    _: KW_ONLY
    tokenizer: str | Path | None = field(
        default=None,
        metadata=option(
            Folder(),
            "folder, or hub name, of the tokenizer's files",
            "None is the model's own folder; a model that lives in this process has none, and then "
            "prompts are token ids.",
        ),
    )
    dtype: str | torch.dtype = field(
        default="auto",
        metadata=option(
            Name(),
            "dtype of the parameters, e.g. bfloat16",
            '"auto" is the checkpoint\'s own.',
            flag="dtype",
            metavar="DTYPE",
        ),
    )
    device: str | torch.device = field(
        default="auto",
        metadata=option(
            Name("cpu, cuda, cuda:1 ..."),
            "device that computes",
            '"auto" is a GPU if there is one.',
            flag="device",
            metavar="NAME",
        ),
    )
    model_impl: str = field(
        default="auto",
        metadata=option(
            Choice(MODEL_IMPLS),
            "code that runs the layers of the model",
            '"tilewise" is a decoder of this package. "transformers" runs the modules of '
            'transformers with paged attention, see docs/guide/models.md. "auto" takes a decoder '
            "of this package where there is one for the checkpoint, and transformers elsewhere.",
            flag="model_impl",
            metavar="NAME",
        ),
    )
    score_tokens: str | None = field(
        default=None,
        metadata=option(
            Name(),
            "tokens whose logits score a pair, for a reranker that answers, e.g. yes,no",
            "The first one is that of a match; of two the score is the logarithm of their odds. "
            "None is what the files of sentence-transformers say, if anything.",
            flag="score_tokens",
            metavar="TEXTS",
        ),
    )
    pair_template: str | None = field(
        default=None,
        metadata=option(
            Name(),
            "text of a pair, with {query} and {document} in it",
            "None joins the two as the tokenizer does; with score_tokens it is Qwen3-Reranker's "
            "for a model of that class.",
            flag="pair_template",
            metavar="TEXT",
        ),
    )
    block_size: int = field(
        default=16,
        metadata=option(Integer(1), "tokens per cache block", flag="block_size", metavar="N"),
    )
    num_blocks: int | None = field(
        default=None,
        metadata=option(
            Integer(1, or_none=True),
            "cache blocks",
            "None is what max_num_seqs full contexts need, at most a quarter of the available "
            "main memory, or on a GPU what gpu_memory_utilization leaves. Where layers have "
            "different windows there are so many for each of them, and None splits the memory.",
            flag="num_blocks",
            metavar="N",
        ),
    )
    checkpoint_tokens: int | None = field(
        default=None,
        metadata=option(
            Integer(1, or_none=True),
            "tokens between two checkpoints of the states of a long text",
            "For models with layers that remember by a state; a prompt that begins as a text did "
            "goes on from the last checkpoint in what they share. None chooses by what a "
            "checkpoint takes beside the keys and values of so many tokens, 1,024 to 4,096.",
            flag="checkpoint_tokens",
            metavar="N",
        ),
    )
    num_checkpoints: int | None = field(
        default=None,
        metadata=option(
            Integer(0, or_none=True),
            "checkpoints of states in the cache",
            "None is one for each sequence that runs at once, and one for every checkpoint_tokens "
            "tokens of the cache. 0 keeps none, and finds no prefix.",
            flag="num_checkpoints",
            metavar="N",
        ),
    )
    kv_cache_dtype: str | torch.dtype = field(
        default="auto",
        metadata=option(
            Name("auto, float32, float16, bfloat16, int8, fp8_e4m3, int4"),
            "dtype of the cache",
            '"int8" and "fp8_e4m3" take half the memory of 16 bits, with a scale for each token '
            'and head; "int4" takes a quarter; "auto" is the dtype of the parameters.',
            flag="kv_cache_dtype",
            metavar="DTYPE",
        ),
    )
    weight_dtype: str = field(
        default="auto",
        metadata=option(
            Choice(("auto", "int8"), "auto or int8"),
            "form in which weights are held",
            '"auto" holds them as stored. "int8" holds the weights of projections, and of an '
            "embedding tied to the head, in half of bfloat16's memory: int8 with a scale for "
            "every 64 inputs, on a CPU only. It is read faster and changes the model a little: "
            "`nn.packed.quantisation_error(llm.model)` tells how far each weight is from what was"
            " stored.",
            flag="weight_dtype",
            metavar="DTYPE",
        ),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=option(
            Integer(or_none=True),
            "tokens of a sequence, prompt and generated text together",
            "None is the model's own limit.",
            flag="max_model_len",
            metavar="N",
        ),
    )
    max_num_seqs: int = field(
        default=256,
        metadata=option(Integer(1), "sequences that run at once", flag="max_num_seqs", metavar="N"),
    )
    max_num_batched_tokens: int | None = field(
        default=None,
        metadata=option(
            Integer(1, or_none=True),
            "tokens of one step",
            "A longer prompt is computed in chunks. None is 2,048 on a CPU, 8,192 on a GPU, and "
            "at least max_num_seqs.",
            flag="max_num_batched_tokens",
            metavar="N",
        ),
    )
    gpu_memory_utilization: float = field(
        default=0.9,
        metadata=option(
            Share(),
            "share of a GPU's memory for weights, temporaries and cache together",
            flag="gpu_memory_utilization",
            metavar="SHARE",
        ),
    )
    enable_prefix_caching: bool = field(
        default=True,
        metadata=option(
            Boolean(),
            "reuse of cached blocks: prompts that begin alike compute the common blocks once",
            flag="enable_prefix_caching",
        ),
    )
    scheduling_policy: str = field(
        default="fcfs",
        metadata=option(
            Choice(POLICIES),
            "order in which requests run",
            '"fcfs" is the order of arrival, "priority" runs the lowest priority first, "fair" '
            "gives every user who waits an equal share.",
            flag="scheduling_policy",
            metavar="NAME",
        ),
    )
    user_weights: Mapping[str, float] | None = field(
        default=None,
        metadata=option(
            Weights(),
            "shares of users under the policy fair",
            "A user who is not named has 1.",
        ),
    )
    long_prefill_token_threshold: int | None = field(
        default=None,
        metadata=option(
            Integer(1, or_none=True),
            "tokens of one prompt in one step",
            "Below max_num_batched_tokens, requests behind a long prompt start with it. None is "
            "no bound.",
            flag="long_prefill_token_threshold",
            metavar="N",
        ),
    )
    max_waiting_requests: int | None = field(
        default=None,
        metadata=option(
            Integer(or_none=True),
            "requests that may wait without having run",
            "One more ends with QueueFullError. The prompts of one call are that many requests. "
            "None is no bound.",
        ),
    )
    max_waiting_tokens: int | None = field(
        default=None,
        metadata=option(
            Integer(or_none=True),
            "tokens that the prompts of waiting requests may have together",
            "One request more ends with QueueFullError. None is no bound.",
        ),
    )
    preemption: str = field(
        default="auto",
        metadata=option(
            Choice(PREEMPTIONS),
            "way in which a sequence that must give its blocks back is continued later",
            '"recompute" computes its keys and values again, "swap" keeps them in main memory, '
            '"auto" does what measured rates say is faster.',
            flag="preemption",
            metavar="NAME",
        ),
    )
    victim: str = field(
        default="newest",
        metadata=option(
            Choice(VICTIMS),
            "sequence that must give its blocks back when there are none left",
            '"newest" is the last in order, "cheapest" the one that loses the fewest tokens for '
            "each block that becomes free.",
            flag="victim",
            metavar="NAME",
        ),
    )
    swap_space_gib: float = field(
        default=0.0,
        metadata=option(
            Size(),
            "main memory, in GiB, for caches that have no room on the device",
            "It holds what is swapped out and blocks of prefixes, which are found again there. 0 "
            "keeps nothing.",
            flag="swap_space",
            metavar="GIB",
        ),
    )
    offload_dir: str | Path | None = field(
        default=None,
        metadata=option(
            Folder(),
            "folder for cached blocks that main memory has no room for",
            "Any process with the same model finds them again, also later. All weights are read "
            "once to know the model.",
            flag="offload_dir",
            metavar="FOLDER",
        ),
    )
    offload_gib: float = field(
        default=16.0,
        metadata=option(
            Size(), "size of that folder at most, in GiB", flag="offload_gib", metavar="GIB"
        ),
    )
    seed: int = field(
        default=0,
        metadata=option(
            Integer(),
            "number from which requests without a seed draw theirs",
            flag="seed",
            metavar="N",
        ),
    )
    random_weights: bool = field(
        default=False,
        metadata=option(
            Boolean(),
            "weights that are drawn and not read, to measure a model's speed",
            "The directory then needs only a config.json.",
        ),
    )
    graphs: str = field(
        default="auto",
        metadata=option(
            Choice(GRAPHS),
            "use of CUDA graphs, on a GPU",
            "Decode steps, and of others all but attention, are CUDA graphs: captured before "
            'LLM() returns ("auto"), or but for a few sizes when they are first needed ("lazy"), '
            'in which case the first ones take long. "off" computes every step op by op, and none'
            " ahead.",
            flag="graphs",
            metavar="MODE",
        ),
    )
    batch_invariant: bool | None = field(
        default=None,
        metadata=option(
            Boolean(or_none=True),
            "independence of a request's bits from all others (default: on a CPU)",
            "A request has the same tokens and log-probabilities, to the bit, whatever runs in "
            "the same steps, however its prompt is cut, whether it is preempted and whatever the "
            "prefix cache has of it. None is True on a CPU and False on a GPU; see "
            "docs/design/batch-invariance.md.",
            flag="batch_invariant",
        ),
    )
    audit: float = field(
        default=0.0,
        metadata=option(
            Part(),
            "share of requests that are computed again, alone, when nothing else runs",
            "Their tokens and log-probabilities are compared to the bit; differences are logged "
            "and counted. Batch invariance is needed. See docs/guide/exact.md.",
            flag="audit",
            metavar="SHARE",
        ),
    )
    canary: float = field(
        default=0.0,
        metadata=option(
            Part(),
            "share of full cache blocks whose checksums are compared again and again",
            "Each step looks at one of them.",
            flag="canary",
            metavar="SHARE",
        ),
    )
    audit_stop: bool = field(
        default=False,
        metadata=option(
            Boolean(),
            "refusal of all requests after the first difference that audit or canary find",
            "Those that run end; then the engine does.",
            flag="audit_stop",
        ),
    )
    use_progress: bool | None = field(
        default=None,
        metadata=option(
            Boolean(or_none=True),
            "progress on stderr while a model is loaded, kernels compiled and graphs captured",
            "None writes a line over on a terminal, and elsewhere one now and then.",
        ),
    )
    speculative: PromptLookup | DraftModel | OwnHead | None = field(
        default=None,
        metadata=option(
            Guesses(),
            "guesser of several tokens of a sequence, which one step verifies",
            "PromptLookup(...), DraftModel(...) or OwnHead(...); what is generated stays the same.",
        ),
    )
    enable_lora: bool = field(
        default=False,
        metadata=option(
            Boolean(),
            "adapters of low rank (LoRA) beside the model, which requests name",
            "They are loaded at the start (lora_modules) or while requests run. See "
            "docs/guide/adapters.md.",
            flag="enable_lora",
        ),
    )
    lora_modules: Mapping[str, str | Path] | None = field(
        default=None,
        metadata=option(
            Modules(),
            "adapters that are loaded at the start, name=path, PEFT's folders or hub names",
            'A dict, or a list of "name=path".',
            flag="lora_modules",
            metavar="NAME=PATH",
        ),
    )
    max_loras: int = field(
        default=8,
        metadata=option(
            Integer(1),
            "different adapters of the sequences that run at once",
            "The device has memory for so many; requests for others wait. The ones that were used "
            "last stay there.",
            flag="max_loras",
            metavar="N",
        ),
    )
    max_cpu_loras: int | None = field(
        default=None,
        metadata=option(
            Integer(1, or_none=True),
            "adapters that stay in main memory while no request uses them",
            "The others are read again when a request names them. None keeps all.",
            flag="max_cpu_loras",
            metavar="N",
        ),
    )
    max_lora_rank: int | None = field(
        default=None,
        metadata=option(
            Rank(),
            "largest rank of an adapter",
            "The memory of the device for adapters grows with it. None is the largest of "
            f"lora_modules, at least {LEAST_MAX_RANK}.",
            flag="max_lora_rank",
            metavar="N",
        ),
    )
    tensor_parallel_size: int = field(
        default=1,
        metadata=option(
            Integer(),
            "processes that hold a shard of the model and of every cache block each",
            "They compute on as many GPUs or on the CPU; all share a GPU if `device` has a "
            "number. `model` then has the shape of the whole and no weights. See "
            "docs/guide/several-gpus.md.",
            flag="tensor_parallel_size",
            metavar="N",
        ),
    )

    def __post_init__(self) -> None:
        for name, said in options_of(type(self)).items():
            said.rule.check(name, getattr(self, name))
            if isinstance(said.rule, Integer) and getattr(self, name) is not None:
                # Those of other libraries are no int, and do not travel to other processes.
                object.__setattr__(self, name, int(getattr(self, name)))
        modules = Modules.pairs("lora_modules", self.lora_modules)
        if modules and not self.enable_lora:
            raise ValueError(f"enable_lora must be True with lora_modules, got {self.enable_lora}")
        if modules:
            object.__setattr__(self, "lora_modules", {n: str(path) for n, path in modules})
        if self.user_weights is not None:  # the caller's own may change later
            object.__setattr__(self, "user_weights", dict(self.user_weights))
        if self.offload_dir is not None and not (self.swap_space_gib and self.offload_gib):
            raise ValueError(
                "swap_space_gib and offload_gib must be above 0 with an offload_dir, as blocks "
                f"pass through main memory, got {self.swap_space_gib} and {self.offload_gib}"
            )
        check_preemption(self.preemption, self.victim, has_swap_space=self.swap_space_gib > 0)
        check_policy(self.scheduling_policy, self.user_weights)


class Terms(TypedDict, total=False):
    """The fields of `RequestTerms` as keywords, for type checkers."""

    user: str
    cache_salt: str
    lora_request: str
    priority: int
    deadline_s: float | None
    max_queue_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTerms:
    """The options of a request besides its prompt and its sampling.

    Attributes:
        user: the user whose request this is, where users are to get equal shares.
        cache_salt: the namespace of its cached blocks; requests with different salts share none.
        lora_request: the name of the adapter that it uses; "" is the model itself.
        priority: the rank where the order is by priority; lower runs earlier.
        deadline_s: seconds from its arrival until it must have ended; None is no bound.
        max_queue_s: seconds from its arrival until it must have begun to run; None is no bound.

    Raises:
        RequestError: a value is not of its type or out of its range; the message names it.
    """

    user: str = ""
    cache_salt: str = ""
    lora_request: str = ""
    priority: int = 0
    deadline_s: float | None = None
    max_queue_s: float | None = None

    def __post_init__(self) -> None:
        check_name("user", self.user)
        check_name("cache_salt", self.cache_salt)
        check_name("lora_request", self.lora_request)
        if not is_integer(self.priority):
            raise RequestError(f"priority must be an integer, got {shown(self.priority)}")
        _check_seconds("deadline_s", self.deadline_s)
        _check_seconds("max_queue_s", self.max_queue_s)

    @classmethod
    def given_to(cls, function: Callable[..., Any], terms: Terms) -> RequestTerms:
        """Return the terms that the caller of a public function passed as further keywords.

        Args:
            function: the public function, for the message.
            terms: the caller's keywords.

        Raises:
            TypeError: the function has no such keyword.
            RequestError: a value is wrong, see the class.
        """
        unknown = terms.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise unknown_keyword(function, sorted(unknown))
        return cls(**terms)


def check_name(name: str, value: object) -> None:
    """Raise RequestError, naming `name`, unless `value` is a str of at most 1,024 characters."""
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a str, got {type(value).__name__}")
    if len(value) > MAX_NAME:
        raise RequestError(f"{name} must be of at most {MAX_NAME} characters, got {len(value)}")


def _check_seconds(name: str, value: object) -> None:
    if value is None:
        return
    if not is_number(value):
        raise RequestError(f"{name} must be a number of seconds or None, got {shown(value)}")
    try:
        seconds = float(value)
    except OverflowError:  # of an integer
        seconds = math.inf
    if not 0 <= seconds < math.inf:
        raise RequestError(f"{name} must be finite and at least 0, got {seconds:g}")


NO_TERMS = RequestTerms()


def check_preemption(preemption: str, victim: str, *, has_swap_space: bool) -> None:
    """Raise ValueError unless both arguments are among the options' texts, TypeError if one is no
    str.

    "swap" is refused, too, without main memory to swap to.
    """
    Choice(PREEMPTIONS).check("preemption", preemption)
    Choice(VICTIMS).check("victim", victim)
    if preemption == "swap" and not has_swap_space:
        raise ValueError("preemption must be auto or recompute without swap space, got 'swap'")


def check_policy(policy: str, user_weights: Mapping[str, float] | None) -> None:
    """Raise ValueError for an unknown policy, or for user weights under a policy other than
    "fair"."""
    Choice(POLICIES).check("scheduling_policy", policy)
    if user_weights and policy != "fair":
        raise ValueError(f"user_weights must be None unless the policy is fair, got {policy!r}")


def options_of(config: type) -> dict[str, Option]:
    """Return the `Option` of each field of a config that has one, by the field's name."""
    return {
        each.name: each.metadata["option"] for each in fields(config) if "option" in each.metadata
    }


def engine_flags(
    names: Iterable[str] | None = None, config: type = EngineConfig
) -> tuple[Flag, ...]:
    """Return the flags that set an engine's options; fields without a flag are left out.

    Args:
        names: fields whose flags are wanted; None is all that have one.
        config: the class of the config.
    """
    chosen = None if names is None else frozenset(names)
    defaults = {each.name: each.default for each in fields(config)}
    flags = []
    for name, said in options_of(config).items():
        if said.flag is None or said.rule.kind is None or not (chosen is None or name in chosen):
            continue
        values = said.rule.values
        text = f"{said.text}: {values}" if said.rule.kind is str and values else said.text
        flags.append(
            Flag(
                name,
                said.rule.kind,
                None,
                text,
                "the engine",
                said.metavar,
                said.flag,
                shown_default=defaults[name],
            )
        )
    return tuple(flags)


def documented(config: type, mark: str = "<options>") -> Any:
    """Return a decorator that writes the options of a config into a docstring, in place of a mark.

    Args:
        config: the class of the config.
        mark: a line of the docstring, as far to the right as the names shall be.
    """

    def write(cls: C) -> C:
        if cls.__doc__ is not None:  # it is, under python -OO
            [before] = [line for line in cls.__doc__.splitlines() if line.strip() == mark]
            margin = before[: before.index(mark)]
            lines = [_described(name, said, margin) for name, said in options_of(config).items()]
            cls.__doc__ = cls.__doc__.replace(before, "\n".join(lines))
        return cls

    return write


def _described(name: str, said: Option, margin: str) -> str:
    values = f" ({said.rule.values})" if said.rule.values else ""
    text = f"{name}: {said.text}{values}. {said.more}".rstrip()
    return textwrap.fill(
        text, 100, initial_indent=margin, subsequent_indent=margin + "    ", break_on_hyphens=False
    )
