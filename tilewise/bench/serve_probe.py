"""What a server adds to the steps of its engine: asked while it is idle, one request at a time.

A machine's profile is of the engine called directly. Over HTTP a step takes longer, as the event
loop wants the interpreter and a core, a prompt is read and made into ids, and connections and
wake-ups take their time whatever is asked. Prompts of several lengths, none of which is cached,
tell these three: seconds of a step, of a token of a prompt, and of a request.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from tilewise.bench.trace import TraceRequest

if TYPE_CHECKING:
    from tilewise.bench.simulate import Setting

__all__ = ["Alone", "Server", "alone", "lengths", "probe"]

NEW_TOKENS = 16  # of each answer: 15 steps that only decode


@dataclass(frozen=True, slots=True)
class Alone:
    """A request alone on a server: tokens of its prompt, seconds to the first and between two."""

    prompt_tokens: int
    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Server:
    """What a server adds, in seconds.

    Attributes:
        setting: with a profile whose steps and tokens of prompts take so much longer.
        step_s, token_s: by which they do.
        request_s: of each request beside, before its first token.
    """

    setting: Setting
    step_s: float
    token_s: float
    request_s: float


def lengths(longest: int) -> list[int]:
    """Return the lengths of prompts to ask for: 16 tokens to half of the longest."""
    return sorted({max(1, min(n, longest - NEW_TOKENS)) for n in (16, longest // 8, longest // 2)})


async def probe(
    ask: Callable[[dict[str, Any], float], Awaitable[Any]],
    longest: int,
    vocab_size: int,
    repeats: int,
) -> list[Alone]:
    """Ask for each length so many times, one request after the other; return the medians.

    Args:
        ask: sends a body of /v1/completions and returns an `Answer`; when it begins.
        longest: tokens of a sequence.
        vocab_size: below which prompts' ids are drawn.

    Raises:
        ValueError: a request failed.
    """
    draw, found = random.Random(time.time_ns()), []  # else they are cached from the last time
    for length in lengths(longest):
        seen = []
        for _ in range(repeats + 1):  # the first one warms up
            ids = [draw.randrange(vocab_size) for _ in range(length)]
            body = {"prompt": ids, "max_tokens": NEW_TOKENS, "ignore_eos": True}
            answer = await ask(body, time.perf_counter())
            if answer.error is not None or not answer.times:
                raise ValueError(f"a server must answer when it is idle, got {answer.error}")
            between = (answer.times[-1] - answer.times[0]) / max(1, answer.num_tokens - 1)
            seen.append(Alone(length, answer.times[0] - answer.begun, between))
        ttft, tpot = (median(getattr(a, name) for a in seen[1:]) for name in ("ttft", "tpot"))
        found.append(Alone(length, ttft, tpot))
    return found


def _predicted(setting: Setting, length: int) -> Alone:
    from tilewise.bench.simulate import serve

    request = TraceRequest(0.0, length, NEW_TOKENS, 1, token_ids=tuple(range(length)))
    [timing] = serve([request], setting, "prefix").timings.values()
    between = (timing.last_token - timing.first_token) / (NEW_TOKENS - 1)
    return Alone(length, timing.first_token - timing.arrival, between)


def alone(setting: Setting, measured: Sequence[Alone]) -> Server:
    """Return a setting in which requests alone take what they took, and what that adds.

    The time between two tokens gives that of a step. What first tokens take beyond it is a line
    over the lengths of prompts: its slope is a token's, which can make a step shorter, too, where
    the profile has it longer; the rest is the request's, 0 at least.
    """
    machine = setting.machine
    step_s = max(0.0, median(m.tpot - _predicted(setting, m.prompt_tokens).tpot for m in measured))
    slower = replace(setting, machine=replace(machine, step_s=machine.step_s + step_s))
    x = [float(m.prompt_tokens) for m in measured]
    y = [m.ttft - _predicted(slower, m.prompt_tokens).ttft for m in measured]
    spread = sum((a - mean(x)) ** 2 for a in x)
    token_s = sum((a - mean(x)) * (b - mean(y)) for a, b in zip(x, y, strict=True))
    token_s = max(token_s / spread if spread else 0.0, -machine.token_s)
    request_s = max(0.0, mean(y) - token_s * mean(x))
    whole = replace(slower.machine, token_s=machine.token_s + token_s)
    return Server(replace(setting, machine=whole), step_s, token_s, request_s)
