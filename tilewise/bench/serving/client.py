"""A client of a server's streams, and what each of its requests saw.

It is a few lines over a socket: what is measured should be the server.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any
from urllib.parse import urlsplit

from tilewise.bench.workload import Asked

__all__ = ["Answer", "ask", "load", "summary"]

PERCENTS = (50, 90, 95, 99)
_CHOICES = (b'"choices":[{', b'"choices": [{')  # of an event with text, as servers write it


@dataclass(slots=True)
class Answer:
    """The answer to one request, with its times: seconds of time.perf_counter.

    Attributes:
        key: the API key that the request had.
        begun: the time at which the request was due.
        prompt: the prompt that was sent.
        samples: the number of samples of the prompt.
        times: the times of each event that brought text.
        num_tokens: the number of tokens of all samples together.
        prompt_tokens, cached_tokens: as the server counted them.
        text: the text of the first sample, where it was asked for.
        request_id: the id that was asked for, if one was.
        ended: the time at which the answer was whole.
        error: the reason of a failure; None without one.
    """

    key: str
    begun: float
    prompt: str | list[int] = ""
    samples: int = 1
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    request_id: str = ""
    ended: float = 0.0
    error: str | None = None


async def ask(
    url: str,
    body: dict[str, Any],
    key: str,
    begun: float,
    *,
    wants_text: bool = False,
    times: list[float] | None = None,
) -> Answer:
    """Send one request for a stream and read the stream to its end.

    A failure is the `error` of the answer, and is not raised.

    Args:
        url: the address of the server, without /v1.
        body: the body of /v1/completions, without the fields of a stream.
        key: the API key; "" for none.
        begun: the time at which the request was due, of time.perf_counter.
        wants_text: True to keep the text of the first sample.
        times: the list to which the time of each event is added as it comes; None makes one.
    """
    answer = Answer(
        key, begun, body["prompt"], body.get("n", 1), request_id=body.get("request_id", "")
    )
    if times is not None:
        answer.times = times
    parts = urlsplit(url)
    host, tls = parts.hostname or "127.0.0.1", parts.scheme == "https"
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    head = [
        f"POST {parts.path}/v1/completions HTTP/1.1",
        f"Host: {host}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    if key:
        head.append(f"Authorization: Bearer {key}")
    loop = asyncio.get_running_loop()
    reader = _Reader(answer, loop.create_future(), wants_text)
    try:
        transport, _ = await loop.create_connection(
            lambda: reader,
            host,
            parts.port or (443 if tls else 80),
            ssl=ssl.create_default_context() if tls else None,
        )
        try:
            transport.write("\r\n".join([*head, "", content]).encode())
            await reader.ended
        finally:
            transport.close()
    except (OSError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.perf_counter()
    if answer.error is None and not answer.num_tokens:
        answer.error = "the stream ended without a count of its tokens"
    return answer


class _Reader(asyncio.Protocol):
    """The asyncio protocol of one answer: it notes the times of a stream's events and reads no more
    of them than is measured.

    Streams over asyncio's readers took 0.02 ms an event, as much as a server has for a token.

    Attributes:
        ended: a future that gets its result when the connection has been closed.
    """

    def __init__(self, answer: Answer, ended: asyncio.Future[None], wants_text: bool) -> None:
        self.ended = ended
        self._answer, self._wants_text = answer, wants_text
        self._is_ok: bool | None = None
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        """Note in the answer the time of each event with text in the lines that are complete with
        `data`, and its counts, text or error."""
        data = self._rest + data
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        lines = data[:end]
        if self._is_ok is None and lines:
            status = lines[: lines.index(b"\n")]
            self._is_ok = b" 200 " in status
            if not self._is_ok:
                self._answer.error = status.decode().strip()
        if not self._is_ok:
            return
        count = sum(map(lines.count, _CHOICES))
        if count:
            self._answer.times += [time.perf_counter()] * count
        if self._wants_text or b'"completion_tokens"' in lines or b'data: {"error"' in lines:
            for line in lines.split(b"\n"):
                try:
                    self._take(line)
                except ValueError as error:  # no JSON, or not of a completion
                    self._answer.error = f"{type(error).__name__}: {error}"

    def _take(self, line: bytes) -> None:
        if line.startswith(b'data: {"error"'):
            self._answer.error = line.decode().strip()
        elif self._wants_text and any(begin in line for begin in _CHOICES):
            choice = json.loads(line[6:])["choices"][0]
            self._answer.text += choice["text"] if choice["index"] == 0 else ""
        if b'"completion_tokens"' in line:
            _count(self._answer, json.loads(line[6:])["usage"])

    def connection_lost(self, exc: Exception | None) -> None:
        """Set `ended`, as the server has closed the connection; without any answer that is its
        error."""
        if not self.ended.done():
            if self._is_ok is None:
                self._answer.error = "closed"
            self.ended.set_result(None)


def _count(answer: Answer, usage: dict[str, Any]) -> None:
    answer.num_tokens = usage["completion_tokens"]
    answer.prompt_tokens = usage.get("prompt_tokens", 0)
    answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def load(url: str, asked: Sequence[Asked], *, concurrency: int | None = None) -> list[Answer]:
    """Send requests at their times, and return their answers in the order of `asked`.

    Args:
        url: the address of the server.
        asked: the requests to send, with their times.
        concurrency: the largest number of requests under way; None is no bound. The times of a
            request that has to wait for that count from when it should have been sent.
    """
    seats = asyncio.Semaphore(concurrency or max(1, len(asked)))
    followed = {one.follows for one in asked}
    started = time.perf_counter()
    tasks: list[asyncio.Task[Answer]] = []

    async def one(place: int) -> Answer:
        request, body, begun = asked[place], asked[place].body, None
        if request.follows is not None:
            before = await tasks[request.follows]
            if before.error is not None:
                now = time.perf_counter()
                return Answer(request.key, now, ended=now, error="the turn before it failed")
            await asyncio.sleep(request.think_s)
            begun = time.perf_counter()
            body = {**body, "prompt": f"{before.prompt}{before.text}{body['prompt']}"}
        elif request.seconds is not None:
            # A client that is late in sending is the client's fault, not the user's.
            begun = started + request.seconds
            await asyncio.sleep(max(0.0, begun - time.perf_counter()))
        async with seats:
            return await ask(
                url, body, request.key, begun or time.perf_counter(), wants_text=place in followed
            )

    for place in range(len(asked)):
        tasks.append(asyncio.create_task(one(place)))
    return list(await asyncio.gather(*tasks))


def summary(answers: Sequence[Answer], goodput: dict[str, float] | None = None) -> dict[str, Any]:
    """Return the statistics of answers: rates, percentiles in milliseconds, goodput and fairness.

    TTFT is the time from when a request should have been sent to its first text, TPOT the mean time
    between two tokens of a sample, ITL each time between two events, E2E the time until the end of
    the answer. Fairness is Jain's index sum(x)^2 / (n sum(x^2)) of the tokens of each API key: 1
    for equal shares, 1/n if one key has all (Jain, Chiu and Hawe 1984).

    Args:
        goodput: bounds in milliseconds of "ttft", "tpot", "itl" (its mean) and "e2e"; goodput is
            the rate of requests that keep all of them. None leaves it out.
    """
    good = [a for a in answers if a.error is None and a.times]
    found: dict[str, Any] = {"requests": len(answers), "failed": len(answers) - len(good)}
    if not good:
        return found
    seconds = max(a.ended for a in good) - min(a.begun for a in good)
    made, prompts = sum(a.num_tokens for a in good), sum(a.prompt_tokens for a in good)
    found["seconds"] = seconds
    found["requests_per_second"] = len(good) / seconds
    found["tokens_per_second"] = made / seconds
    found["total_tokens_per_second"] = (made + prompts) / seconds
    if prompts:
        found["cached_share"] = sum(a.cached_tokens for a in good) / prompts
    of_each = [_times_of(a) for a in good]
    values = {name: [one[name] for one in of_each] for name in ("ttft", "tpot", "e2e")}
    values["itl"] = [
        1e3 * (b - a) for one in good for a, b in zip(one.times, one.times[1:], strict=False)
    ]
    for name, measured in values.items():
        ranked = sorted(measured) or [0.0]
        found[name] = {
            "mean": mean(ranked),
            **{f"p{p}": ranked[min(len(ranked) - 1, len(ranked) * p // 100)] for p in PERCENTS},
        }
    if goodput:
        within = [all(one[name] <= bound for name, bound in goodput.items()) for one in of_each]
        found["goodput"] = sum(within) / seconds
        found["goodput_share"] = sum(within) / len(answers)
    keys = {a.key for a in answers}
    if len(keys) > 1:
        shares = [sum(a.num_tokens for a in good if a.key == key) for key in keys]
        found["jain"] = sum(shares) ** 2 / (len(shares) * sum(s * s for s in shares))
    return found


def _times_of(answer: Answer) -> dict[str, float]:
    between = answer.times[-1] - answer.times[0]
    return {
        "ttft": 1e3 * (answer.times[0] - answer.begun),
        "tpot": 1e3 * between / max(1.0, answer.num_tokens / answer.samples - 1),
        "itl": 1e3 * between / max(1, len(answer.times) - 1),
        "e2e": 1e3 * (answer.ended - answer.begun),
    }
