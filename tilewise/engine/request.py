"""What a user asks for, and the state of each token stream that answers it. No torch."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from tilewise.engine.sampling_options import (
    Matcher,
    StructuredOutputs,
    check_allowed,
    check_bad_words,
    check_biases,
    check_lengths,
    check_penalties,
    check_processors,
)
from tilewise.errors import is_integer, is_number, shown

__all__ = [
    "MOST_LOGPROBS",
    "NO_TOKEN",
    "Adapted",
    "FinishReason",
    "Request",
    "SamplingParams",
    "Sequence",
]

MOST_LOGPROBS = 20  # as many as the OpenAI API gives
NO_TOKEN = -2  # in place of a token of which the logits were not finite
MAX_N = 1024  # samples per request: more is a denial of service, not a workload
# Of stop strings, of characters of each, of stop tokens: every step of every thread waits for them.
MAX_STOPS, MAX_STOP_LENGTH, MAX_STOP_IDS = 64, 1024, 1024
# The largest number of float32, and the smallest with all its bits.
LARGEST, SMALLEST = 3.4028234663852886e38, 1.1754943508222875e-38


class FinishReason(enum.StrEnum):
    """Why a sequence ended: "stop" and "length" as in the OpenAI API, the others are Tilewise's
    own."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the model's context is used up
    ABORT = "abort"  # cancelled by the caller
    ERROR = "error"  # it failed, and nothing else did
    DEADLINE = "deadline"  # its time was over


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to turn logits into tokens; names and defaults are those that vLLM users know.

    Attributes:
        n: samples to draw for the prompt, 1 to 1024. Greedy decoding allows only 1.
        temperature: the number by which logits are divided; 0 is greedy (argmax).
        top_p: keep the smallest set of tokens whose probability reaches top_p, in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
        max_tokens: new tokens at most; None is up to the model's context.
        seed: a number that makes the samples reproducible whatever else is in the batch; None draws
            one.
        stop: strings that end the text, at most 64 of at most 1024 characters; they are not part
            of the output.
        stop_token_ids: at most 1024 token ids that end the text, beside the model's own end token.
        ignore_eos: True to keep going past the model's end token.
        logprobs: report the log-probability of each token and of this many best ones, of the
            model's own distribution: before everything below, and before temperature.
        prompt_logprobs: the same for each token of the prompt but the first.
        repetition_penalty: in [1e-6, 1e6]; divides the positive logits of tokens that prompt or
            output have, and multiplies the others; 1 is none.
        frequency_penalty: in [-2, 2]; taken from a token's logit for each time the output has it.
        presence_penalty: in [-2, 2]; taken once if the output has the token.
        logit_bias: {token id: bias in [-100, 100]} of at most 1024 tokens, added to their logits.
        allowed_token_ids: the only tokens that may be drawn, at most 131,072.
        bad_words: at most 256 texts of at most 1024 characters; the token that would complete one
            of them in the output is not drawn. A word is looked for with and without a space
            before it.
        min_tokens: no end token is drawn, and no stop string looked for, before min_tokens tokens.
        logits_processors: at most 16 functions (prompt ids, output ids, logits of one row (V,)
            float32) -> logits (V,), called in order on the engine's thread before all of the above.
        structured: the text follows a JSON schema, a regular expression, a choice or a grammar.
        include_stop_str_in_output: True if the text keeps the stop string, or stop token, that
            ended it.
        skip_special_tokens: True if special tokens have no text.
        reasoning: (opening, closing): in a text that begins with the first, "" in any, stop strings
            are looked for behind the second only.
        best_of: samples to draw, of which the n with the highest cumulative log-probability are
            returned, the best first; n to 1024, None draws n.

    The order is vLLM's, but for functions of the caller, which come first: logits_processors,
    logit_bias, then what may not be drawn (allowed_token_ids, bad_words, min_tokens, structured),
    repetition, frequency and presence penalty, temperature, top_k, top_p, min_p.

    Raises:
        TypeError: a value is not of its type; the message names it.
        ValueError: a value is outside its range; the message names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    bad_words: list[str] | tuple[str, ...] | None = None
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logits_processors: list[Callable[..., Any]] | tuple[Callable[..., Any], ...] | None = None
    structured: StructuredOutputs | None = None
    best_of: int | None = None
    reasoning: tuple[str, str] | list[str] | None = None
    most_logprobs: ClassVar[int] = MOST_LOGPROBS

    def __post_init__(self) -> None:
        self._check_types()
        self._check_options()
        is_greedy = self.temperature == 0
        rules: list[tuple[bool, str, object]] = [
            (1 <= self.n <= MAX_N, f"n must be in 1 ... {MAX_N}", self.n),
            (
                0 <= self.temperature < float("inf"),
                "temperature must be finite and at least 0",
                self.temperature,
            ),
            (0 < self.top_p <= 1, "top_p must be in (0, 1]", self.top_p),
            (
                -1 <= self.top_k < 1 << 31,
                "top_k must be -1, 0 or a count below 2^31",
                self.top_k,
            ),
            (0 <= self.min_p <= 1, "min_p must be in [0, 1]", self.min_p),
            (
                self.logprobs is None or 0 <= self.logprobs <= self.most_logprobs,
                f"logprobs must be in 0 ... {self.most_logprobs}",
                self.logprobs,
            ),
            (
                self.best_of in (None, 1) or not is_greedy,
                "best_of must be 1 when temperature is 0 (greedy)",
                self.best_of,
            ),
            (
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MOST_LOGPROBS,
                f"prompt_logprobs must be in 0 ... {MOST_LOGPROBS}",
                self.prompt_logprobs,
            ),
            (
                self.n == 1 or not is_greedy,
                "n must be 1 when temperature is 0 (greedy)",
                self.n,
            ),
        ]
        for holds, rule, value in rules:
            if not holds:
                raise ValueError(f"{rule}, got {shown(value)}")
        if self.best_of is not None and not self.n <= self.best_of <= MAX_N:
            raise ValueError(
                f"best_of must be in n ... {MAX_N}, got {shown(self.best_of)} for n of {self.n}"
            )
        stops = self.stop_strings
        if "" in stops:
            raise ValueError("stop must not hold an empty string")
        if (longest := max(map(len, stops), default=0)) > MAX_STOP_LENGTH:
            raise ValueError(
                f"stop must be of at most {MAX_STOP_LENGTH} characters, got one of {longest}"
            )

    def _check_types(self) -> None:
        """Raise TypeError for values that would fail, or be misunderstood, deep inside a step."""
        maybe = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "best_of")
        for name in ("n", "top_k", "min_tokens", *maybe):
            value = getattr(self, name)
            may_be_none = name in maybe
            if not (is_integer(value) or (value is None and may_be_none)):
                kind = "an integer or None" if may_be_none else "an integer"
                raise TypeError(f"{name} must be {kind}, got {shown(value)}")
        numbers = ("temperature", "top_p", "min_p")
        penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        for name in (*numbers, *penalties):
            value = getattr(self, name)
            if not is_number(value):
                raise TypeError(f"{name} must be a number, got {shown(value)}")
        if not isinstance(self.ignore_eos, bool):  # "false" would be true
            raise TypeError(f"ignore_eos must be a bool, got {shown(self.ignore_eos)}")
        self._check_stops()

    def _check_options(self) -> None:
        """Check penalties, lengths, biases, allowed tokens, bad words and structured outputs.

        Raises:
            TypeError: a value is of another type.
            ValueError: a value is out of its range.
        """
        check_penalties(self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        check_lengths(self.min_tokens, self.max_tokens)
        for name in ("include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {shown(getattr(self, name))}")
        if self.logit_bias is not None:
            check_biases(self.logit_bias)
        if self.allowed_token_ids is not None:
            check_allowed(self.allowed_token_ids)
        if self.bad_words is not None:
            check_bad_words(self.bad_words)
        if self.logits_processors is not None:
            check_processors(self.logits_processors)
        if self.structured is not None and not isinstance(self.structured, StructuredOutputs):
            raise TypeError(
                f"structured must be StructuredOutputs, got {type(self.structured).__name__}"
            )

    def _check_stops(self) -> None:
        many = (list, tuple, set, frozenset)
        stops = () if self.stop is None or isinstance(self.stop, str) else self.stop
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        # How many there are before each of them is looked at.
        if isinstance(stops, many) and len(stops) > MAX_STOPS:
            raise ValueError(f"stop must be at most {MAX_STOPS} strings, got {len(stops)}")
        if isinstance(ids, many) and len(ids) > MAX_STOP_IDS:
            raise ValueError(f"stop_token_ids must be at most {MAX_STOP_IDS} ids, got {len(ids)}")
        if not isinstance(stops, many) or not all(isinstance(s, str) for s in stops):
            raise TypeError(f"stop must be a str or a list of them, got {shown(self.stop)}")
        if not isinstance(ids, many) or not all(map(is_integer, ids)):
            raise TypeError(f"stop_token_ids must be a list of integers, got {shown(ids)}")
        marks = self.reasoning
        if marks is not None and (
            not isinstance(marks, (list, tuple))
            or len(marks) != 2
            or not all(isinstance(mark, str) for mark in marks)
            or not marks[1]
        ):
            raise TypeError(
                f"reasoning must be two marks, the second not empty, got {shown(marks)}"
            )
        if min(ids, default=0) < 0:  # no token has it, and it would count from the end of a mask
            raise ValueError(f"stop_token_ids must be 0 or more, got {shown(min(ids))}")

    @property
    def num_samples(self) -> int:
        """The number of samples that are drawn for a request: best_of, or n without it."""
        return self.n if self.best_of is None else self.best_of

    def for_rows(self, end_ids: frozenset[int]) -> SamplingParams:
        """Return the parameters that a runner gets for each row of logits.

        They are `self`, but with logprobs of 0, so that log-probabilities are computed, where the
        best of several samples are chosen by them.

        Args:
            end_ids: tokens that end a sample of the request.
        """
        if self.num_samples == self.n or self.logprobs is not None:
            return self
        return replace(self, logprobs=0)

    @property
    def greedy(self) -> bool:
        """Whether each token is the argmax: the temperature is 0."""
        return self.temperature == 0

    @property
    def float32_rule(self) -> tuple[float, float, float]:
        """Temperature, top_p and min_p as ops take them, in float32.

        They are kept in float32's range: a smaller top_p would keep no token, and a larger
        temperature would be an infinity.
        """
        return min(self.temperature, LARGEST), max(self.top_p, SMALLEST), self.min_p

    @property
    def has_penalties(self) -> bool:
        """Whether a presence, frequency or repetition penalty changes logits."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, empty when there are none."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class Adapted(Protocol):
    """An adapter that a request uses, such as `engine.adapters.LoadedAdapter`.

    The request's reference keeps the adapter in main memory.
    """

    @property
    def number(self) -> int:
        """The number of this loading of the adapter, at least 1; no other adapter of the process
        has it."""
        ...

    @property
    def weights(self) -> Any:
        """The tensors of the adapter, of a type that the runner knows."""
        ...

    @property
    def fingerprint(self) -> str:
        """The digest of the adapter: adapters that change a model differently have different
        digests."""
        ...


@dataclass(slots=True)
class Request:
    """One accepted prompt and how to continue it.

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: at least one token.
        sampling: see SamplingParams.
        salt: prefix-cache namespace; requests with different salts never share blocks.
        user: the user of the request, where users are to get equal shares.
        priority: lower runs earlier, where the order is by priority.
        deadline_s: seconds from its arrival until it must have ended; None is for ever.
        max_queue_s: seconds from its arrival until it must have begun to run; None is for ever.
        eos_token_ids: the model's own end tokens.
        bad_word_ids: the token ids of sampling.bad_words, in every form that is looked for.
        new_matcher: a function that returns the state of sampling.structured before the first
            token.
        pooling: the function of the prompt's hidden states that is wanted, one of
            `embedding.POOLINGS`, or None.
        token_type_ids: the types of its prompt's tokens; empty if all are 0.
        adapter: the adapter of the model's weights; None for the model itself. `salt` tells it
            from others.
        drawn_seed: the seed of its first sample, for a request that repeats another's draws; None
            is what sampling.seed or its arrival gives.
        stop_ids: the ids in sampling.stop_token_ids.
        end_ids: tokens that end a sample: those asked for, the model's unless ignored, NO_TOKEN.
            A structured text always ends with the model's.
        adjusts: True if something of sampling changes logits before tokens are drawn from them.
        needs_tokens: True if what is asked of the logits depends on all tokens before, which the
            host must know.
        row_sampling: the sampling options of each row of the request's logits.
        is_plain: True if nothing is asked but tokens, by temperature and truncation.

    Raises:
        ValueError: sampling has bad_words or structured, and what is made of them is missing.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    salt: str = ""
    user: str = ""
    priority: int = 0
    deadline_s: float | None = None
    max_queue_s: float | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    new_matcher: Callable[[], Matcher] | None = None
    pooling: str | None = None
    token_type_ids: tuple[int, ...] = ()
    adapter: Adapted | None = None
    drawn_seed: int | None = None
    stop_ids: frozenset[int] = field(init=False, repr=False)
    end_ids: frozenset[int] = field(init=False, repr=False)
    adjusts: bool = field(init=False, repr=False)
    needs_tokens: bool = field(init=False, repr=False)
    row_sampling: SamplingParams = field(init=False, repr=False)
    is_plain: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.stop_ids = frozenset(self.sampling.stop_token_ids or ())
        sampling = self.sampling
        is_structured = sampling.structured is not None
        ends = () if sampling.ignore_eos and not is_structured else self.eos_token_ids
        self.end_ids = self.stop_ids.union(ends, (NO_TOKEN,))
        if sampling.bad_words and not self.bad_word_ids:
            raise ValueError("bad_word_ids must be given for sampling.bad_words, got none")
        if is_structured and self.new_matcher is None:
            raise ValueError("new_matcher must be given for sampling.structured, got None")
        has_long_words = any(len(word) > 1 for word in self.bad_word_ids)
        self.needs_tokens = bool(
            has_long_words or self.new_matcher is not None or sampling.logits_processors
        )
        self.adjusts = bool(
            self.needs_tokens
            or self.bad_word_ids
            or sampling.has_penalties
            or sampling.logit_bias
            or sampling.allowed_token_ids
            or sampling.min_tokens
        )
        self.row_sampling = self.sampling.for_rows(self.end_ids)
        self.is_plain = not (
            self.adjusts
            or self.row_sampling.logprobs is not None
            or sampling.prompt_logprobs is not None
            or self.pooling is not None
        )


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One token stream of a request: the only mutable state of a generation.

    A request starts as one sequence; when its whole prompt is computed and n > 1, the scheduler
    forks n - 1 more that share its blocks.

    Attributes:
        seq_id: unique in the engine's life.
        index: the number of the sample of its request, 0 ... n - 1.
        token_ids: prompt and generated tokens.
        num_prompt_tokens: the number of token_ids that are the prompt.
        num_computed_tokens: the number of tokens with keys and values in the cache, by finished
            steps.
        num_scheduled_tokens: the same number when the unfinished steps are done, too.
        num_pending: tokens that unfinished steps draw for it.
        max_len: tokens, prompt and generated, at which it ends.
        shares_tail: True if samples of its request may hold its last block, too, though it is not
            full.
        block_ids: cache blocks in order of position; owned by reference count.
        num_registered_blocks: the number of leading blocks that are full and known to the prefix
            cache.
        is_doubtful: True if it holds blocks that a failed request had, too: none of its blocks
            enters the prefix cache any more.
        num_told_blocks: the number of leading blocks that a batch has named and that have not
            changed since.
        ended: samples of its request that have ended before it forks, and why.
        num_cached_tokens: prompt tokens that the prefix cache had at first admission, or that an
            older request computed just before this one would have.
        num_preemptions: the number of times that the sequence's blocks were taken away.
        finish_reason: the reason why the sequence ended; None while it lives.
        stop_reason: the stop token id or stop string that ended it, when one did.
        seed: the seed of this sample's random numbers.
        rank: the place in the order of sequences, see `engine.scheduling.order`.
        was_admitted: True if it has held blocks, or its parent has.
        arrival_time: the time at which its request came, on the scheduler's clock.
        swap_slots: blocks in main memory that keep what it had computed when it was swapped out.
        other_swap_slots: the same of the other groups of layers; in any of them -1 stands for what
            its window has passed.
        num_swapped_tokens: the number of tokens in the swapped blocks.
        is_stepwise: True if its next run needs the results of its last, so that no unfinished step
            may be beside it.
    """

    seq_id: int
    request: Request
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    seed: int = 0
    max_len: int = 0
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_pending: int = 0
    shares_tail: bool = False
    block_ids: list[int] = field(default_factory=list)
    num_registered_blocks: int = 0
    is_doubtful: bool = False
    num_told_blocks: int = 0
    ended: dict[int, tuple[FinishReason, int | str | None]] = field(default_factory=dict)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    is_stepwise: bool = False
    rank: tuple[int, int, int] = (0, 0, 0)
    was_admitted: bool = False
    arrival_time: float = 0.0
    swap_slots: list[int] = field(default_factory=list)
    other_swap_slots: list[list[int]] = field(default_factory=list)
    num_swapped_tokens: int = 0

    @property
    def scores_prompt(self) -> bool:
        """Whether the request asks for results of all prompt positions, and has no new token yet.

        Results of all positions are log-probabilities of the prompt, or hidden states with a
        pooling other than "last". Once the sequence has a new token, its prompt has been computed.
        """
        request = self.request
        is_wanted = request.sampling.prompt_logprobs is not None or request.pooling not in (
            None,
            "last",
        )
        return is_wanted and len(self.token_ids) == self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and generated."""
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens, as a new list."""
        return self.token_ids[self.num_prompt_tokens :]
