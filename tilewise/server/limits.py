"""Limits on what one request, one key and all keys together may ask for.

A request over a size limit is refused at once, with the limit and its value. A request for which
the queue has no room is told when to retry, from the rate at which the queue has moved.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from tilewise.engine.request import SamplingParams
from tilewise.server.bodies import SHORT, refuse_crowded
from tilewise.server.errors import ApiError, invalid
from tilewise.server.keys import Caller
from tilewise.server.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    TokenizeRequest,
)

__all__ = ["Queue", "RequestLimits", "Ticket", "refuse_long", "refuse_uncountable"]

# Seconds of departures from which the queue's rate is computed: long enough to contain several
# prompts of a slow machine, short enough to follow a change of load.
RATE_WINDOW_S = 30.0
LONGEST_RETRY_S = 600
CHARS_A_TOKEN = 16  # more than a text has on average: shorter texts are tokenised in one call
PIECE = 2**17  # characters of a text that are tokenised in one call
MINUTE_S = 60.0
# Fields whose lists the engine checks itself, and lists of token ids.
_COUNTED_ELSEWHERE = frozenset(
    {"stop", "stop_sequences", "stop_token_ids", "allowed_token_ids", "bad_words", "tokens"}
)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The largest sizes of one request, as a server allows them.

    Attributes:
        max_body_bytes: bytes of a body; 413 above.
        max_bodies_bytes: bytes of all bodies in memory together; 503 above.
        max_header_bytes: bytes of all headers together; 431 above.
        max_messages: messages of a chat, items of a response's input, and entries of other lists of
            objects.
        max_prompts: prompts of one completion request.
        max_samples: number of prompts times n.
        max_tools: tools of a chat.
        max_schema_bytes: bytes of a JSON schema, a grammar, a list of choices, or a tool's
            parameters.
        max_pattern: characters of a regular expression.
        max_bias: entries of logit_bias.
        max_prompt_logprobs: log-probabilities of prompts in an answer, counted again in each
            choice.
        max_prompt_tokens: tokens of a prompt; None for the model's context.
        max_counted_tokens: tokens of a text that is only counted or truncated; at least four times
            the model's context.
        max_timeout_s: seconds that a request may run; None for no limit.
    """

    max_body_bytes: int = 8 * 2**20
    max_bodies_bytes: int = 256 * 2**20
    max_header_bytes: int = 16 * 2**10
    max_messages: int = 4096
    max_prompts: int = 1024
    max_samples: int = 1024
    max_tools: int = 128
    max_schema_bytes: int = 64 * 2**10
    max_pattern: int = 4096
    max_bias: int = 1024
    max_prompt_logprobs: int = 2**20
    max_prompt_tokens: int | None = None
    max_counted_tokens: int = 2**20
    max_timeout_s: float | None = None

    def check_lists(self, request: BaseModel) -> None:
        """Refuse a body with a list that is too long, before any list is walked.

        Raises:
            ApiError: 400, with the limit and the value.
        """
        if isinstance(request, TokenizeRequest):
            _refuse_crowded_arguments(request.messages or ())
        for name, value in vars(request).items():
            if not isinstance(value, list) or name in _COUNTED_ELSEWHERE:
                continue
            if type(request).model_fields[name].annotation is Any:  # a list of ids or of prompts
                continue
            limit = self.max_tools if name == "tools" else self.max_messages
            unit = name if name in ("messages", "tools") else "entries"
            if len(value) > limit:
                raise invalid(
                    f"{name} must be at most {limit:,} {unit}, got {len(value):,}",
                    name,
                    code="too_many",
                )

    def check(self, request: GenerationRequest, num_prompts: int = 1) -> None:
        """Refuse a request that is too large before any work is done for it: its samples, messages,
        tools, schemas, patterns and biases.

        Args:
            request: the parsed body.
            num_prompts: number of prompts of a completion.

        Raises:
            ApiError: 400, with the limit and the value.
        """
        if isinstance(request, ChatRequest):
            _refuse_crowded_arguments(request.messages)
        n = max(request.n or 1, request.best_of or 1)
        counts: list[tuple[str, str, int, int]] = [
            ("n", "samples with those of all prompts", n * num_prompts, self.max_samples),
            ("logit_bias", "entries", len(request.logit_bias or ()), self.max_bias),
        ]
        if isinstance(request, ChatRequest):
            counts += [
                ("messages", "messages", len(request.messages), self.max_messages),
                ("tools", "tools", len(request.tools or ()), self.max_tools),
                ("tools", "bytes of JSON", _size(request.tools), self.max_schema_bytes),
            ]
        elif isinstance(request, CompletionRequest):
            counts.append(("prompt", "prompts", num_prompts, self.max_prompts))
        structured = request.structured_outputs or {}
        counts += [
            (
                "response_format",
                "bytes of JSON",
                _size(request.response_format),
                self.max_schema_bytes,
            ),
            ("structured_outputs", "bytes of JSON", _size(structured), self.max_schema_bytes),
            (
                "structured_outputs.regex",
                "characters",
                len(str(structured.get("regex") or "")),
                self.max_pattern,
            ),
        ]
        for name, unit, count, limit in counts:
            if count > limit:
                raise invalid(
                    f"{name} must be at most {limit:,} {unit}, got {count:,}", name, code="too_many"
                )

    def check_told(self, sampling: SamplingParams, tokens: int) -> None:
        """Refuse a request whose answer would have too many log-probabilities of prompts, of
        `tokens` tokens together, counted once for each sample.

        A client asks for them with one number: a small request could get an answer of half a
        gigabyte.

        Raises:
            ApiError: 400, with the limit and the value.
        """
        each = sampling.prompt_logprobs
        told = 0 if each is None else tokens * (each + 1) * sampling.n
        if told > self.max_prompt_logprobs:
            raise invalid(
                f"prompt_logprobs must be at most {self.max_prompt_logprobs:,} values, those of "
                f"all prompts and samples together, got {told:,}",
                "prompt_logprobs",
                code="too_many",
            )

    def longest_prompt(self, max_prompt_len: int) -> int:
        """Return the largest number of tokens of a prompt on this server; its key may allow fewer.

        Args:
            max_prompt_len: the largest number of tokens that the engine takes.
        """
        return min(max_prompt_len, self.max_prompt_tokens or max_prompt_len)

    def longest_count(self, max_model_len: int) -> int:
        """Return the largest number of tokens of a text that is only counted or truncated:
        `max_counted_tokens`, and at least four times the model's context."""
        return max(self.max_counted_tokens, 4 * max_model_len)

    def deadline_s(self, timeout: float | None) -> float | None:
        """Return the seconds that a request may take: its own `timeout`, at most `max_timeout_s`;
        None if it has neither."""
        if timeout is None or self.max_timeout_s is None:
            return self.max_timeout_s if timeout is None else timeout
        return min(timeout, self.max_timeout_s)


def refuse_long(text: str, most: int, count: Callable[[str], int]) -> None:
    """Refuse a text of far more than `most` tokens before all of it is tokenised.

    Eight million letters may be as many tokens, which take a second for each million, and a
    gigabyte in all. So a beginning of the text is tokenised first, then one four times as long, and
    so on. A cut changes the tokens of the word that it divides, so a beginning is refused only if
    it has more than twice `most` tokens.

    Args:
        text: the text of a prompt.
        most: the largest number of tokens of a prompt.
        count: a function that returns the number of tokens of a text.

    Raises:
        ApiError: 400.
    """
    length = CHARS_A_TOKEN * most
    while length < len(text):
        found = count(text[:length])
        if found > 2 * most:
            raise ApiError(
                400,
                f"prompt must be at most {most:,} tokens, got {found:,} in the first "
                f"{length:,} of its {len(text):,} characters",
                param="prompt",
                code="context_length_exceeded",
            )
        length *= 4


def refuse_uncountable(text: str, most: int, count: Callable[[str], int]) -> None:
    """Refuse a text of more than `most` tokens before all of it is tokenised.

    A text that is only counted or truncated may be far longer than a prompt, since the client wants
    to know by how much it is too long. Its pieces are counted one after the other, so that eight
    million letters do not take a gigabyte.

    Args:
        text: a text of any length.
        most: the largest number of tokens of the text.
        count: a function that returns the number of tokens of a text.

    Raises:
        ApiError: 400.
    """
    # a character has at most four bytes, and each byte is at most one token
    if 4 * len(text) <= most:
        return
    found = 0
    for start in range(0, len(text), PIECE):
        found += count(text[start : start + PIECE])
        if found > most:
            raise ApiError(
                400,
                f"text must be at most {most:,} tokens to be counted, got {found:,} in the "
                f"first {start + PIECE:,} of its {len(text):,} characters",
                param="prompt",
                code="context_length_exceeded",
            )


def _refuse_crowded_arguments(messages: Iterable[dict[str, Any]]) -> None:
    """Refuse a chat's messages if the arguments of a call in them, a text of JSON, would take long
    to parse.

    Raises:
        ApiError: 400, as of `refuse_crowded`.
    """
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            text = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(text, str) and len(text) > SHORT:
                refuse_crowded(text.encode("utf-8", "surrogatepass"))


def _size(value: Any) -> int:
    return len(json.dumps(value)) if value else 0


@dataclass(eq=False, slots=True)
class Ticket:
    """The place of one HTTP request in the queue, from its acceptance to its end.

    Attributes:
        caller: the owner of the request's key.
        tokens: number of the prompts' tokens together.
        requests: number of prompts, each of which counts as a request.
        has_begun: True once it has its first token, and so waits no more.
        has_ended: True once it has ended.
    """

    caller: Caller
    tokens: int
    requests: int
    has_begun: bool = False
    has_ended: bool = False


@dataclass(slots=True)
class _Load:
    """The requests and tokens that one caller, or all together, have in the server now.

    Attributes:
        waiting, waiting_tokens: the requests without a first token, and their prompt tokens.
        live: number of requests that have not ended.
        departures: (time, requests, prompt tokens) of those that got a first token lately.
        spent: (time, tokens) of the tokens that count against a key's tokens a minute.
        spent_tokens: number of tokens in `spent`.
    """

    waiting: int = 0
    waiting_tokens: int = 0
    live: int = 0
    departures: deque[tuple[float, int, int]] = field(default_factory=deque)
    spent: deque[tuple[float, int]] = field(default_factory=deque)
    spent_tokens: int = 0


class Queue:
    """Bound how many requests and prompt tokens wait, for each key and in all.

    A request waits from its acceptance until its first token. The limits of each key in the keys
    file, on requests at once and on tokens a minute, hold besides.

    Args:
        max_requests: the largest number of requests that wait in all; 503 above.
        max_tokens: the largest number of prompt tokens that wait in all; 503 above.
        max_key_requests: the largest number of requests that wait for one key; 429 above.
        max_key_tokens: the largest number of prompt tokens that wait for one key; 429 above.
        clock: a function that returns the time in seconds, for the tokens of a minute and for the
            time after which a refused client may ask again.
    """

    def __init__(
        self,
        *,
        max_requests: int = 2048,
        max_tokens: int = 16 * 2**20,
        max_key_requests: int = 1024,
        max_key_tokens: int = 8 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bounds = (max_requests, max_tokens)
        self._key_bounds = (max_key_requests, max_key_tokens)
        self._clock = clock
        self._all = _Load()
        self._keys: dict[str, _Load] = {}

    @property
    def num_waiting(self) -> int:
        """Number of accepted prompts that have no first token yet."""
        return self._all.waiting

    @property
    def num_live(self) -> int:
        """Number of accepted prompts that have not ended."""
        return self._all.live

    def enter(self, caller: Caller, tokens: int, requests: int = 1) -> Ticket:
        """Accept an HTTP request of `requests` prompts with `tokens` tokens together; return its
        ticket.

        The tokens count against the key's tokens a minute.

        Raises:
            ApiError: 400, it would be too much for an empty queue; 429, the key has too much in the
                queue, at once or in this minute; 503, all keys together have too much in the queue.
        """
        self._check_possible(caller, tokens, requests)
        load = self._keys.setdefault(caller.name, _Load())
        now = self._clock()
        self._check_key(caller, load, tokens, requests, now)
        self._check_bounds("its queue", 429, self._key_bounds, load, tokens, requests, now)
        self._check_bounds("the queue", 503, self._bounds, self._all, tokens, requests, now)
        for one in (load, self._all):
            one.waiting += requests
            one.waiting_tokens += tokens
            one.live += requests
        self.spend(caller, tokens)
        return Ticket(caller, tokens, requests)

    def begin(self, ticket: Ticket) -> None:
        """Record that a request has its first token, and so waits no more; later calls do
        nothing."""
        if not ticket.has_begun:
            ticket.has_begun = True
            self._leave(ticket, is_served=True)

    def end(self, ticket: Ticket) -> None:
        """Record the end of a request, whether it had its first token or not; later calls do
        nothing."""
        if ticket.has_ended:
            return
        ticket.has_ended = True
        if not ticket.has_begun:
            ticket.has_begun = True
            self._leave(ticket, is_served=False)
        for load in (self._keys[ticket.caller.name], self._all):
            load.live -= ticket.requests

    def spend(self, caller: Caller, tokens: int) -> None:
        """Count prompt or generated tokens against a key's tokens a minute, if it has such a
        limit."""
        if caller.tokens_per_minute is not None:
            load = self._keys.setdefault(caller.name, _Load())
            load.spent.append((self._clock(), tokens))
            load.spent_tokens += tokens

    def _leave(self, ticket: Ticket, is_served: bool) -> None:
        now = self._clock()
        for load in (self._keys[ticket.caller.name], self._all):
            load.waiting -= ticket.requests
            load.waiting_tokens -= ticket.tokens
            if is_served:
                load.departures.append((now, ticket.requests, ticket.tokens))
                _forget(load, now)

    def _check_possible(self, caller: Caller, tokens: int, requests: int) -> None:
        """Refuse a request with an error 400 if it could not enter even an empty queue: waiting
        would not help."""
        a_minute = caller.tokens_per_minute
        if a_minute is not None and tokens > a_minute:
            raise invalid(
                f"prompt must be at most the {a_minute:,} tokens a minute of this key, got "
                f"{tokens:,}",
                "prompt",
                code="context_length_exceeded",
            )
        at_once = caller.max_requests
        bounds = [("requests", requests, at_once, "that this key may have at once")]
        for whose, (most, most_tokens) in (
            ("its queue", self._key_bounds),
            ("the queue", self._bounds),
        ):
            bounds += [
                ("requests", requests, most, f"that {whose} holds"),
                ("prompt tokens", tokens, most_tokens, f"that {whose} holds"),
            ]
        for name, value, bound, which in bounds:
            if bound is not None and value > bound:
                raise invalid(
                    f"{name} of a request must be at most the {bound:,} {which}, got {value:,}",
                    code="too_many",
                )

    def _check_key(
        self, caller: Caller, load: _Load, tokens: int, requests: int, now: float
    ) -> None:
        if caller.max_requests is not None and load.live + requests > caller.max_requests:
            raise ApiError(
                429,
                f"requests of this key must be at most {caller.max_requests} at once, got "
                f"{load.live + requests}",
                code="rate_limit_exceeded",
                retry_after_s=self._retry(load, requests, 0, now),
            )
        limit = caller.tokens_per_minute
        if limit is None:
            return
        while load.spent and load.spent[0][0] <= now - MINUTE_S:
            load.spent_tokens -= load.spent.popleft()[1]
        if load.spent_tokens + tokens > limit:
            excess, wait = load.spent_tokens + tokens - limit, MINUTE_S
            for then, count in load.spent:
                excess -= count
                if excess <= 0:
                    wait = then + MINUTE_S - now
                    break
            raise ApiError(
                429,
                f"tokens of this key must be at most {limit:,} a minute, got "
                f"{load.spent_tokens + tokens:,}",
                code="rate_limit_exceeded",
                retry_after_s=max(1, math.ceil(wait)),
            )

    def _check_bounds(
        self,
        whose: str,
        status: int,
        bounds: tuple[int, int],
        load: _Load,
        tokens: int,
        requests: int,
        now: float,
    ) -> None:
        names = ("requests", "prompt tokens")
        found = (load.waiting + requests, load.waiting_tokens + tokens)
        for name, bound, value in zip(names, bounds, found, strict=True):
            if value > bound:
                excess = (max(0, found[0] - bounds[0]), max(0, found[1] - bounds[1]))
                raise ApiError(
                    status,
                    f"{name} in {whose} must be at most {bound:,}, got {value:,}",
                    code="queue_full" if status == 503 else "rate_limit_exceeded",
                    retry_after_s=self._retry(load, *excess, now),
                )

    def _retry(self, load: _Load, requests: int, tokens: int, now: float) -> int:
        """Return the seconds until as many as `requests` and `tokens` have begun to run, at the
        rate of the last half minute, as a Retry-After header: 1 to 600.

        Without a departure in this time it is 30 while requests wait, else 1.
        """
        _forget(load, now)
        if not load.departures:
            return 1 if load.waiting == 0 else int(RATE_WINDOW_S)
        since = max(1e-3, now - load.departures[0][0])
        rates = [sum(d[i] for d in load.departures) / since for i in (1, 2)]
        waits = [
            amount / rate for amount, rate in zip((requests, tokens), rates, strict=True) if rate
        ]
        return min(LONGEST_RETRY_S, max(1, math.ceil(max(waits, default=1))))


def _forget(load: _Load, now: float) -> None:
    """Drop the departures that are older than `RATE_WINDOW_S` seconds at the time `now`."""
    while load.departures and load.departures[0][0] < now - RATE_WINDOW_S:
        load.departures.popleft()
