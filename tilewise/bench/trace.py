"""Traces of requests: when each came, how long its prompt was and its answer, and what it shares.

Three formats are read, told apart by their first line:

    Azure     CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens (public traces of 2023)
    Mooncake  JSONL with timestamp in milliseconds, input_length, output_length and hash_ids, one
              for each 512 tokens of the prompt; equal ids are equal tokens after equal tokens
    ours      JSONL with seconds, prompt (a count, or token ids) and output, and where wanted n,
              user, salt, priority and prefix ([name, tokens] that prompts of that name share)

A line that is none of its file's format is refused with its number. Requests without a token in or
out, which Azure's traces have, are left out.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

__all__ = [
    "HASHED_TOKENS",
    "TraceRequest",
    "drawn_trace",
    "fitting",
    "ids_within",
    "poisson",
    "prompt_ids",
    "read_trace",
    "with_prefix",
]

HASHED_TOKENS = 512  # of a prompt, for each of Mooncake's hash ids
# Token ids of prompts that share nothing begin here, above all hash ids and vocabularies.
FIRST_OWN = 1 << 28


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        seconds: the time of arrival, counted from the first request's.
        prompt, output: tokens, at least 1 each.
        n: samples of the prompt, each of `output` tokens.
        shared: (id, tokens) of the runs that the prompt begins with: prompts that begin with equal
            runs share them. What follows is the request's own.
        token_ids: the prompt itself, where the trace has it; () otherwise.
        user, salt, priority: as in `engine.request.Request`.
    """

    seconds: float
    prompt: int
    output: int
    n: int = 1
    shared: tuple[tuple[int, int], ...] = ()
    token_ids: tuple[int, ...] = ()
    user: str = ""
    salt: str = ""
    priority: int = 0


def read_trace(path: str) -> list[TraceRequest]:
    """Return the requests of a trace in the order of arrival, without those that have no token in
    or out; the first arrives at 0.

    Args:
        path: the path of a file in one of the three formats.

    Raises:
        ValueError: the file has other fields, or a line is malformed; the message has its number.
        OSError: the file cannot be read.
    """
    rows = _read_jsonl(path) if path.endswith(".jsonl") else _read_csv(path)
    requests = sorted(rows, key=lambda request: request.seconds)
    requests = [r for r in requests if r.prompt >= 1 and r.output >= 1]
    first = requests[0].seconds if requests else 0.0
    return [replace(request, seconds=request.seconds - first) for request in requests]


def _read_csv(path: str) -> list[TraceRequest]:
    names = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    found = []
    with Path(path).open(newline="") as file:
        reader = csv.DictReader(file)
        header = reader.fieldnames or []
        if not set(names) <= set(header):
            raise ValueError(
                f"{path} must have the fields {', '.join(names)}, "
                f"got {', '.join(header) or 'nothing'}"
            )
        for line in reader:
            try:
                when, prompt, output = (line[name] for name in names)
                found.append(TraceRequest(_clock(when), _count(prompt), _count(output)))
            except (TypeError, ValueError, AttributeError) as error:
                raise _malformed(path, reader.line_num, error) from None
    return found


def _read_jsonl(path: str) -> list[TraceRequest]:
    found: list[TraceRequest] = []
    parse: Callable[[Mapping[str, Any]], TraceRequest] | None = None
    with Path(path).open() as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise TypeError(f"an object is wanted, got {type(row).__name__}")
                if parse is None:
                    parse = _format(path, row)
                found.append(parse(row))
            except _WrongFields:
                raise
            except (TypeError, ValueError, KeyError) as error:
                raise _malformed(path, number, error) from None
    if parse is None:
        raise ValueError(f"{path} must have the fields {' or '.join(_FIELDS)}, got nothing")
    return found


class _WrongFields(ValueError):
    pass


_FIELDS = {
    "timestamp, input_length, output_length": ("timestamp", "input_length", "output_length"),
    "seconds, prompt, output": ("seconds", "prompt", "output"),
}


def _format(path: str, row: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], TraceRequest]:
    mooncake, ours = _FIELDS.values()
    if set(mooncake) <= set(row):
        return _mooncake
    if set(ours) <= set(row):
        return _ours
    raise _WrongFields(
        f"{path} must have the fields {' or '.join(_FIELDS)}, got {', '.join(row) or 'nothing'}"
    )


def _malformed(path: str, number: int, error: Exception) -> ValueError:
    what = f"no {error.args[0]}" if isinstance(error, KeyError) else str(error)
    return ValueError(f"{path}, line {number} must be a request, got {what}")


def _mooncake(row: Mapping[str, Any]) -> TraceRequest:
    prompt = _count(row["input_length"])
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(map(_is_count, ids)):
        raise ValueError(f"hash_ids {ids!r}")
    if ids and len(ids) != -(-prompt // HASHED_TOKENS):
        raise ValueError(f"{len(ids)} hash_ids for {prompt} tokens")
    if ids and max(ids) >= FIRST_OWN:
        raise ValueError(f"a hash id of {max(ids)}, {FIRST_OWN} or more")
    shared = tuple((i, HASHED_TOKENS) for i in ids[:-1])
    if ids:
        shared += ((ids[-1], prompt - HASHED_TOKENS * (len(ids) - 1)),)
    seconds = _seconds(row["timestamp"]) / 1000
    return TraceRequest(seconds, prompt, _count(row["output_length"]), shared=shared)


def _ours(row: Mapping[str, Any]) -> TraceRequest:
    known = {"seconds", "prompt", "output", "n", "user", "salt", "priority", "prefix"}
    if not set(row) <= known:
        raise ValueError(f"the unknown field {sorted(set(row) - known)[0]}")
    prompt, ids = row["prompt"], ()
    if isinstance(prompt, list):
        if not all(map(_is_count, prompt)) or max(prompt, default=0) >= 1 << 31:
            raise ValueError("a prompt that is no list of token ids")
        ids, prompt = tuple(prompt), len(prompt)
    texts = {name: row.get(name, "") for name in ("user", "salt")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("a user or salt that is no string")
    priority, n = row.get("priority", 0), row.get("n", 1)
    if not isinstance(priority, int) or not _is_count(n) or n < 1:
        raise ValueError(f"n {n!r} and priority {priority!r}")
    shared = _prefix(row.get("prefix"), _count(prompt)) if not ids else ()
    return TraceRequest(
        _seconds(row["seconds"]),
        _count(prompt),
        _count(row["output"]),
        n,
        shared,
        ids,
        texts["user"],
        texts["salt"],
        priority,
    )


def _prefix(prefix: Any, prompt: int) -> tuple[tuple[int, int], ...]:
    if prefix is None:
        return ()
    is_pair = isinstance(prefix, list) and len(prefix) == 2
    if not is_pair or not isinstance(prefix[0], str) or not _is_count(prefix[1]):
        raise ValueError(f"a prefix {prefix!r} that is no [name, tokens]")
    if prefix[1] > prompt:
        raise ValueError(f"a prefix of {prefix[1]} tokens in a prompt of {prompt}")
    return ((_id_of(prefix[0]), prefix[1]),)


def _id_of(name: str) -> int:
    """Return the id, of 24 bits, of a shared prefix by its name, the same in every process."""
    return int.from_bytes(random.Random(name).randbytes(3), "little")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _count(value: Any) -> int:
    number = int(value) if isinstance(value, str) else value
    if not _is_count(number):
        raise ValueError(f"{value!r} for a number of tokens")
    return int(number)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} for a time")
    return float(value)


def _clock(text: str) -> float:
    # Seven digits of a second; datetime reads six.
    return datetime.fromisoformat(text[:26]).timestamp()


def prompt_ids(request: TraceRequest, number: int) -> list[int]:
    """Return token ids for a prompt: equal where the trace says that prompts share, else its own.

    A shared run is its id again and again: a cached block is found after the block before it only,
    so that equal tokens in other places are never taken for one another.

    Args:
        number: the number of the request in its trace; requests of other numbers have other tokens.
    """
    if request.token_ids:
        return list(request.token_ids)
    ids: list[int] = []
    for shared, count in request.shared:
        ids += [shared] * count
    return ids + [FIRST_OWN + number] * (request.prompt - len(ids))


def ids_within(vocab_size: int) -> Callable[[TraceRequest, int], list[int]]:
    """Return a function like `prompt_ids` whose random ids are below vocab_size.

    The tokens that prompts share are drawn from a generator seeded by the id of the shared run, the
    others from one seeded by the number of the request. Ids that the trace has are returned as they
    are.
    """

    def ids_of(request: TraceRequest, number: int) -> list[int]:
        if request.token_ids:
            return list(request.token_ids)
        ids: list[int] = []
        for shared, count in request.shared:
            rng = random.Random(f"shared {shared}")
            ids += [rng.randrange(vocab_size) for _ in range(count)]
        rng = random.Random(number)
        return ids + [rng.randrange(vocab_size) for _ in range(request.prompt - len(ids))]

    return ids_of


def drawn_trace(count: int, seed: int = 0) -> list[TraceRequest]:
    """Draw requests like those of a chat: log-normal lengths, medians 1,020 and 129, five a second.

    The medians are those of Azure's conversation trace of 2023.
    """
    rng = random.Random(seed)
    when, requests = 0.0, []
    for _ in range(count):
        prompt, output = (
            max(1, round(median * math.exp(spread * rng.gauss(0, 1))))
            for median, spread in ((1020, 0.9), (129, 0.9))
        )
        requests.append(TraceRequest(when, prompt, output))
        when += rng.expovariate(5.0)
    return requests


def fitting(requests: Sequence[TraceRequest], max_len: int, count: int) -> list[TraceRequest]:
    """Return the first `count` requests of at most max_len tokens, prompt and answer together."""
    return [r for r in requests if r.prompt + r.output <= max_len][:count]


def poisson(requests: Sequence[TraceRequest], rate: float, seed: int = 0) -> list[TraceRequest]:
    """Return the same requests with arrivals of a Poisson process of `rate` a second.

    Raises:
        ValueError: rate is not above 0.
    """
    if not 0 < rate < math.inf:
        raise ValueError(f"rate must be finite and above 0, got {rate}")
    return list(_arrivals(requests, rate, random.Random(seed)))


def _arrivals(
    requests: Sequence[TraceRequest], rate: float, rng: random.Random
) -> Iterator[TraceRequest]:
    when = 0.0
    for request in requests:
        yield replace(request, seconds=when)
        when += rng.expovariate(rate)


def with_prefix(requests: Sequence[TraceRequest], tokens: int) -> list[TraceRequest]:
    """Return the same requests, each prompt after `tokens` tokens that all have in common.

    Raises:
        ValueError: tokens is not 0, and the trace has the prompts themselves.
    """
    if tokens == 0:
        return list(requests)
    common = ((FIRST_OWN - 1, tokens),)
    if any(request.token_ids for request in requests):
        raise ValueError(f"prefix must be 0 for prompts that are token ids, got {tokens}")
    return [replace(r, prompt=r.prompt + tokens, shared=common + r.shared) for r in requests]
