"""Measure what a server adds to the steps of its engine, by requests to an idle server.

A machine's profile describes the engine called directly. Over HTTP four things take longer: a step,
because the event loop needs the interpreter and a core; each stream of a step, because its token is
written; each token of a prompt, because it is parsed and tokenised; and each request, because
of its connection and of wake-ups. Four numbers of seconds, fitted to uncached prompts of several
lengths, first one after the other and then several at once.

While other streams run, a new request competes with their steps for cores and the interpreter, so
its delay varies: single prompts that are sent while a few streams run give a sample. Most of the
delay is in the step that computes the prompt, and all streams wait for it: the time for which they
stood still tells how much. The rest is the request's own. In virtual time a step with a prompt
beside others takes a stall from that sample, and a request that arrives while others run a rest; a
request that arrives alone takes the fixed delay.
"""

from __future__ import annotations

import asyncio
import random
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from tilewise.bench.trace import TraceRequest

if TYPE_CHECKING:
    from tilewise.bench.simulate import Setting
    from tilewise.cost import StepSeconds, StepWork

__all__ = ["Alone", "Server", "alone", "lengths", "predicted", "probe"]

# Of an answer to one alone, as many as users ask for: with 16 the steps that follow a prompt, which
# are slower, were many, and a step took 0.2 to 2.3 ms more in nine runs against one server.
NEW_TOKENS = 64
CROWD, CROWD_TOKENS = 16, 64  # requests at once, and tokens of each answer
BESIDE, ROUNDS = 4, 8  # running streams, and prompts sent meanwhile, by length and repetition
# After so many seconds no more are sent than of prompts alone: long prompts take long.
MOST_S = 20.0
MOST_PIECES = 4  # steps that compute the longest of these prompts
TOGETHER_S = 2e-3  # between events that one step brought to several streams
APART_S = 0.05  # longest pause between two of them: they then arrive at any place of a step


@dataclass(frozen=True, slots=True)
class Alone:
    """A measured request of a probe, or the medians of several alike.

    Attributes:
        prompt_tokens: length of its prompt.
        ttft, tpot: seconds to its first token, and from token to token.
        streams: number of requests that were sent together; 1 is a single one.
        running: number of streams that were already running.
        stalls: seconds that the running streams' last event, last two events ... took before the
            request's first token came, medians over these streams; () if they are not known.
    """

    prompt_tokens: int
    ttft: float
    tpot: float
    streams: int = 1
    running: int = 0
    stalls: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Server:
    """The seconds that a server adds to the steps of its engine.

    Attributes:
        setting: the setting of the engine, with a profile to which step_s, sequence_s and token_s
            are added.
        step_s, sequence_s, token_s: the seconds of each step, each sequence of a step, each prompt
            token.
        request_s: the seconds of each request before its first token, if nothing else runs.
        beside_s: the same while others run: measured values, in no order.
        stalls: the seconds, ascending, by which several steps that computed a prompt beside others
            took longer than in the setting, by lengths of prompts, ascending.
    """

    setting: Setting
    step_s: float
    sequence_s: float
    token_s: float
    request_s: float
    beside_s: tuple[float, ...] = ()
    stalls: tuple[tuple[int, tuple[float, ...]], ...] = ()

    def clock(
        self, cost: Callable[[StepWork], StepSeconds], draw: random.Random
    ) -> Callable[[StepWork], StepSeconds]:
        """Return a clock like `cost` that adds a stall, drawn from those measured, to each step
        that has a prompt beside other sequences.

        Beside fewer sequences than were measured the stall is less, in proportion: they want less
        of the cores.

        Args:
            cost: the clock of the engine without a server.
            draw: the generator that chooses the stalls.
        """

        def slower(work: StepWork) -> StepSeconds:
            seconds = cost(work)
            if not self.stalls or not work.pairs or work.sequences == 1:
                return seconds
            more = self._stall(work.tokens - work.sequences + 1, draw.random())
            more *= min(1.0, (work.sequences - 1) / BESIDE)
            return seconds._replace(device=max(0.0, seconds.device + more))

        return slower

    def _stall(self, tokens: int, share: float) -> float:
        """Return the quantile `share` of the stalls of a prompt of `tokens` tokens, in seconds,
        interpolated between the next measured lengths."""
        at = [(n, values[int(share * len(values))]) for n, values in self.stalls]
        longest, last = at[-1]
        if tokens >= longest:  # it competes for as much longer as it takes
            return last * tokens / longest
        place = next(i for i, (n, _) in enumerate(at) if n > tokens)
        if place == 0:
            return at[0][1]
        (low, first), (high, second) = at[place - 1], at[place]
        return first + (second - first) * (tokens - low) / (high - low)


def lengths(longest: int) -> list[int]:
    """Return the lengths of a probe's prompts, ascending: 16 tokens to half of the longest
    sequence."""
    most = longest - new_tokens(longest)
    return sorted({max(1, min(n, most)) for n in (16, longest // 8, longest // 2)})


def new_tokens(longest: int) -> int:
    """Return the number of tokens of an answer to a probe that is sent alone, for a server whose
    longest sequence has `longest` tokens."""
    return max(2, min(NEW_TOKENS, longest // 2))


async def probe(
    ask: Callable[[dict[str, Any], float, list[float]], Awaitable[Any]],
    longest: int,
    vocab_size: int,
    repeats: int,
) -> list[Alone]:
    """Send prompts of each length one by one, then several at once, then while streams run.

    Args:
        ask: a function that sends a body of /v1/completions at a time and returns an `Answer`; its
            third argument is a list that gets the times of the answer's events as they come.
        longest: the tokens of the longest sequence, prompt and answer.
        vocab_size: the number above all ids of the prompts.
        repeats: the number of prompts of each length.

    Returns:
        One list: the median of each length, from short to long, that of the requests sent at once,
        and each of the requests sent while streams run.

    Raises:
        ValueError: a request failed.
    """
    draw = random.Random(time.time_ns())  # else they are cached from the last time
    found: list[Alone] = []

    times: list[list[float]] = [[] for _ in range(BESIDE)]  # of the events of each stream

    async def one(
        length: int, tokens: int, streams: int, running: int = 0, place: int | None = None
    ) -> Alone:
        ids = [draw.randrange(vocab_size) for _ in range(length)]
        body = {"prompt": ids, "max_tokens": tokens, "ignore_eos": True}
        told: list[float] = []
        if place is not None:
            times[place] = told
        answer = await ask(body, time.perf_counter(), told)
        if answer.error is not None or not answer.times:
            raise ValueError(f"a server must answer what it is asked first, got {answer.error}")
        between = (answer.times[-1] - answer.times[0]) / max(1, answer.num_tokens - 1)
        first = answer.times[0]
        stalls = _stood_still(times, first) if running else ()
        return Alone(length, first - answer.begun, between, streams, running, stalls)

    async def on_and_on(place: int) -> None:
        while True:
            shortest = found[0].prompt_tokens
            await one(shortest, longest - shortest, 1, place=place)

    for length in lengths(longest):
        # The first one warms up.
        seen = [await one(length, new_tokens(longest), 1) for _ in range(repeats + 1)]
        found.append(_median(seen[1:]))
    tokens = min(CROWD_TOKENS, longest - found[0].prompt_tokens)
    crowds = [
        await asyncio.gather(*(one(found[0].prompt_tokens, tokens, CROWD) for _ in range(CROWD)))
        for _ in range(2)
    ]
    streams = [asyncio.ensure_future(on_and_on(place)) for place in range(BESIDE)]
    try:
        await asyncio.sleep(APART_S)
        beside = []
        ends = time.perf_counter() + MOST_S
        for number in range(ROUNDS * repeats):
            if number >= repeats and time.perf_counter() > ends:
                break
            for length in lengths(longest):
                await asyncio.sleep(draw.uniform(0, APART_S))
                beside.append(await one(length, 2, 1, BESIDE))
    finally:
        for stream in streams:
            stream.cancel()
        ended = await asyncio.gather(*streams, return_exceptions=True)
    for error in ended:  # if a stream failed, the prompts were measured with too few running
        if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
            raise error
    return [*found, _median(crowds[1]), *beside]


def _stood_still(streams: Sequence[Sequence[float]], first: float) -> tuple[float, ...]:
    """Return the seconds that running streams took for their last event, their last two ... before
    a first token came, medians over the streams; see `Alone.stalls`.

    Args:
        streams: the times of the events of each running stream.
        first: the time at which another request's first token came, together with the last of the
            streams' events.
    """
    found = []
    places = [bisect_left(times, first - TOGETHER_S) for times in streams]
    for count in range(1, MOST_PIECES + 1):
        seen = [
            times[place] - times[place - count]
            for times, place in zip(streams, places, strict=True)
            if count <= place < len(times)
        ]
        if not seen:
            break
        found.append(median(seen))
    return tuple(found)


def _median(seen: Sequence[Alone]) -> Alone:
    ttft, tpot = (median(getattr(a, name) for a in seen) for name in ("ttft", "tpot"))
    return replace(seen[0], ttft=ttft, tpot=tpot)


def predicted(setting: Setting, length: int, streams: int = 1) -> Alone:
    """Return the times of requests of one length that are sent together, in virtual time by a
    setting's profile: the medians of `streams` requests."""
    from tilewise.bench.simulate import serve

    longest = setting.max_len or setting.sizes.max_len
    tokens = new_tokens(longest) if streams == 1 else min(CROWD_TOKENS, longest - length)
    requests = [
        TraceRequest(0.0, length, tokens, 1, token_ids=tuple(range(i, i + length)))
        for i in range(streams)
    ]
    return _median(
        [
            Alone(
                length,
                t.first_token - t.arrival,
                (t.last_token - t.first_token) / (tokens - 1),
                streams,
            )
            for t in serve(requests, setting, "prefix").timings.values()
        ]
    )


def predicted_beside(setting: Setting, length: int) -> tuple[float, float]:
    """Return the times of a prompt of `length` tokens in virtual time while BESIDE streams run.

    Returns:
        The seconds to its first token, and the seconds of the steps that compute it, medians of
        several prompts.
    """
    from tilewise.bench.simulate import serve

    longest, shortest = setting.max_len or setting.sizes.max_len, 16
    requests = [
        TraceRequest(0.0, shortest, longest - shortest, 1, token_ids=(i,) * shortest)
        for i in range(BESIDE)
    ]
    # When these run: of prompts after them, each when the one before has ended, at several places
    # of a step.
    begun = predicted(setting, shortest, BESIDE)
    gap = 2 * (predicted(setting, length).ttft + begun.tpot)
    last = begun.ttft + (longest - shortest) * begun.tpot
    count = max(1, min(20, int(0.8 * last / gap)))
    requests += [
        TraceRequest(
            begun.ttft + gap * (i + 0.618 * i % 1),
            length,
            2,
            1,
            token_ids=tuple(range(1000 + i, 1000 + i + length)),
        )
        for i in range(count)
    ]
    requests.sort(key=lambda request: request.seconds)
    engine = serve(requests, setting, "prefix")
    late = [t for t in engine.timings.values() if t.output_tokens == 2]
    ended = engine.steps.ended
    places = [bisect_left(ended, one.first_token) for one in late]
    pieces = _pieces(setting, length)
    stalls = [ended[place] - ended[place - pieces] for place in places]
    return median(t.first_token - t.arrival for t in late), median(stalls)


def _pieces(setting: Setting, length: int) -> int:
    """Return the number of steps in which a prompt of `length` tokens is computed beside BESIDE
    streams."""
    return -(-length // max(1, setting.budget - BESIDE))


def alone(setting: Setting, measured: Sequence[Alone]) -> Server:
    """Return the seconds that a server adds to a setting, such that the measured requests take in
    virtual time what they took.

    The time between two tokens gives that of a step; with many streams, of each of these. What
    first tokens take beyond it is a line over the lengths of prompts: its slope is a token's, which
    can make a step shorter, too, where the profile has it longer; the rest is the request's, 0 at
    least. What a step with a prompt beside streams takes beyond that is a stall, and what the first
    token then still takes is the request's where others run.

    Args:
        setting: the setting of the engine, with a machine's profile.
        measured: the result of `probe`.
    """
    machine = setting.machine
    quiet = [m for m in measured if not m.running]
    ones, crowds = ([m for m in quiet if (m.streams > 1) == many] for many in (False, True))
    step_s = max(0.0, median(m.tpot - predicted(setting, m.prompt_tokens).tpot for m in ones))
    slower = replace(setting, machine=replace(machine, step_s=machine.step_s + step_s))
    sequence_s = 0.0
    for crowd in crowds:
        more = crowd.tpot - predicted(slower, crowd.prompt_tokens, crowd.streams).tpot
        sequence_s = max(0.0, more / (crowd.streams - 1))
    step_s = max(0.0, step_s - sequence_s)  # of one stream it has been counted
    changed = replace(
        machine,
        step_s=machine.step_s + step_s,
        step_sequence_s=machine.step_sequence_s + sequence_s,
    )
    slower = replace(setting, machine=changed)
    x = [float(m.prompt_tokens) for m in ones]
    y = [m.ttft - predicted(slower, m.prompt_tokens).ttft for m in ones]
    spread = sum((a - mean(x)) ** 2 for a in x)
    token_s = sum((a - mean(x)) * (b - mean(y)) for a, b in zip(x, y, strict=True))
    token_s = max(token_s / spread if spread else 0.0, -machine.token_s)
    request_s = max(0.0, mean(y) - token_s * mean(x))
    whole = replace(setting, machine=replace(changed, token_s=machine.token_s + token_s))
    late = [m for m in measured if m.running]
    without = {n: predicted_beside(whole, n) for n in {m.prompt_tokens for m in late}}
    beside_s, stalls = [], dict[int, list[float]]()
    for m in late:
        ttft, stall = without[m.prompt_tokens]
        pieces, more = _pieces(setting, m.prompt_tokens), 0.0
        if pieces <= len(m.stalls):
            more = m.stalls[pieces - 1] - stall
            stalls.setdefault(m.prompt_tokens, []).append(more)
        beside_s.append(max(0.0, m.ttft - ttft - more))
    each = tuple((tokens, tuple(sorted(stalls[tokens]))) for tokens in sorted(stalls))
    return Server(whole, step_s, sequence_s, token_s, request_s, tuple(beside_s), each)
