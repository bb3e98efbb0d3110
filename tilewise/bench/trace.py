"""Traces of requests: when each came, how long its prompt was and its answer."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        seconds: its arrival, counted from the first one's.
        prompt, output: tokens, at least 1 each.
    """

    seconds: float
    prompt: int
    output: int


def read_trace(path: str) -> list[TraceRequest]:
    """Read a trace in the order of arrival.

    Args:
        path: a CSV file with the columns TIMESTAMP, ContextTokens and GeneratedTokens (Azure's
            public LLM inference traces, 2023), or a .jsonl file with timestamp in milliseconds,
            input_length and output_length (Mooncake's).

    Raises:
        ValueError: the file has other columns.
    """
    if path.endswith(".jsonl"):
        names = ("timestamp", "input_length", "output_length")
        lines = [json.loads(line) for line in Path(path).read_text().splitlines() if line]
    else:
        names = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
        with Path(path).open(newline="") as file:
            lines = list(csv.DictReader(file))
    if not lines or not set(names) <= set(lines[0]):
        found = ", ".join(lines[0]) if lines else "nothing"
        raise ValueError(f"{path} must have the fields {', '.join(names)}, got {found}")
    when, prompt, output = names
    rows = sorted((_seconds(x[when]), int(x[prompt]), int(x[output])) for x in lines)
    rows = [row for row in rows if min(row[1:]) >= 1]
    return [TraceRequest(row[0] - rows[0][0], *row[1:]) for row in rows]


def _seconds(timestamp: str | float) -> float:
    if isinstance(timestamp, str):
        # Seven digits of a second; datetime reads six.
        return datetime.fromisoformat(timestamp[:26]).timestamp()
    return timestamp / 1000


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
