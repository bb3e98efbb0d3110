"""What `tilewise bench serve` sends, and when: drawn prompts, traces, conversations.

Arrivals are a Poisson process, a gamma process of another burstiness, bursts, those of a trace, or
none: a closed loop then sends the next request when one ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewise.bench.trace import TraceRequest

__all__ = ["Asked", "arriving", "conversations", "drawn_prompts", "of_trace", "with_keys"]

WORDS = (
    "once",
    "upon",
    "a",
    "time",
    "there",
    "was",
    "little",
    "girl",
    "boy",
    "dog",
    "cat",
    "frog",
    "liked",
    "to",
    "play",
    "in",
    "the",
    "park",
    "with",
    "her",
    "friend",
    "and",
    "one",
    "day",
    "they",
    "found",
    "big",
    "red",
    "ball",
    "under",
    "old",
    "tree",
    "near",
    "river",
    "who",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request to send.

    Attributes:
        body: the body of /v1/completions, without the fields of a stream.
        seconds: the time at which the request is sent, counted from the begin; None sends it as
            soon as fewer requests are under way than may be at once.
        key: the API key.
        follows: place in the list of the request whose prompt and answer come before this prompt;
            this request is sent when that one has ended. None for a first turn.
        think_s: seconds between that end and this request.
    """

    body: dict[str, Any]
    seconds: float | None = None
    key: str = ""
    follows: int | None = None
    think_s: float = 0.0


def drawn_prompts(
    count: int, *, words: int, shared_words: int, max_tokens: int, temperature: float, seed: int = 0
) -> list[Asked]:
    """Draw `count` requests without times; their prompts are `shared_words` words, the same in all,
    and `words` words of their own."""
    draw = random.Random(seed)
    shared = _words(draw, shared_words)
    return [
        Asked(_body(" ".join([*shared, *_words(draw, words)]), max_tokens, temperature, number))
        for number in range(count)
    ]


def conversations(
    count: int,
    turns: int,
    *,
    words: int,
    shared_words: int,
    max_tokens: int,
    temperature: float,
    think_s: float,
    seed: int = 0,
) -> list[Asked]:
    """Draw requests that make conversations: a turn's prompt is all that was said before it, which
    the client adds, and `words` new words.

    Args:
        count: conversations, all of which begin with the same `shared_words`.
        turns: the number of turns of each conversation.
        think_s: mean seconds between an answer and the next turn, exponentially distributed.

    Returns:
        The first turns of all, then the second ones, and so on.
    """
    draw = random.Random(seed)
    shared = _words(draw, shared_words)
    asked: list[Asked] = []
    for turn in range(turns):
        for number in range(count):
            new = _words(draw, words)
            text = " ".join([*shared, *new] if turn == 0 else ["", *new])
            body = _body(text, max_tokens, temperature, turn * count + number)
            if turn == 0:
                asked.append(Asked(body))
                continue
            think = draw.expovariate(1 / think_s) if think_s > 0 else 0.0
            asked.append(Asked(body, follows=(turn - 1) * count + number, think_s=think))
    return asked


def of_trace(
    requests: Sequence[TraceRequest],
    ids_of: Callable[[TraceRequest, int], list[int]],
    *,
    temperature: float,
    speed: float = 1.0,
) -> list[Asked]:
    """Return a trace's requests as requests to send, at the trace's times, with prompts of token
    ids.

    Args:
        requests: the requests of the trace.
        ids_of: a function from a request and its number to the token ids of its prompt.
        speed: the number of the trace's seconds that go by in one second.
    """
    asked = []
    for number, request in enumerate(requests):
        body = _body(ids_of(request, number), request.output, temperature, number)
        more: dict[str, Any] = {
            "n": request.n if request.n > 1 else None,
            "priority": request.priority or None,
            "cache_salt": request.salt or None,
            "user": request.user or None,
        }
        body |= {name: value for name, value in more.items() if value is not None}
        asked.append(Asked(body, request.seconds / speed))
    return asked


def arriving(
    asked: Sequence[Asked], rate: float, *, burstiness: float = 1.0, burst: int = 1, seed: int = 0
) -> list[Asked]:
    """Return the same requests with random times of arrival, `rate` a second on average.

    The first request arrives at 0. A request that follows another has no time of its own: its
    `seconds` are None.

    Args:
        burstiness: shape of the gamma distribution of intervals; 1 is a Poisson process, less is
            burstier.
        burst: requests that come at once; intervals are `burst` times longer.
        seed: the seed of the intervals.

    Raises:
        ValueError: rate, burstiness or burst is not finite and above 0.
    """
    for name, value in (("rate", rate), ("burstiness", burstiness), ("burst", burst)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be finite and above 0, got {value}")
    draw, when, found = random.Random(seed), 0.0, []
    place = 0
    for one in asked:
        if one.follows is not None:
            found.append(replace(one, seconds=None))
            continue
        if place and place % burst == 0:
            when += draw.gammavariate(burstiness, burst / (rate * burstiness))
        place += 1
        found.append(replace(one, seconds=when))
    return found


def with_keys(asked: Sequence[Asked], keys: Sequence[str]) -> list[Asked]:
    """Return the requests, each with one of the API keys.

    The requests of a user share a key; requests without a user get the keys in turn. A later turn
    of a conversation has the key of its first one.
    """
    users = sorted({str(one.body["user"]) for one in asked if "user" in one.body})
    found: list[Asked] = []
    for number, one in enumerate(asked):
        if one.follows is not None:
            key = found[one.follows].key
        elif "user" in one.body:
            key = keys[users.index(str(one.body["user"])) % len(keys)]
        else:
            key = keys[number % len(keys)]
        found.append(replace(one, key=key))
    return found


def _words(draw: random.Random, count: int) -> list[str]:
    return [draw.choice(WORDS) for _ in range(count)]


def _body(
    prompt: str | list[int], max_tokens: int, temperature: float, seed: int
) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "ignore_eos": True,
    }
