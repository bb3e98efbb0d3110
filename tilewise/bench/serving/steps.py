"""A clock made of a server's own steps, and the same requests in virtual time by it. No torch.

A machine's pace changes within a minute, by a factor of two where others use it, so what an idle
server took before does not tell what its steps take under a load. /v1/trace does: it has when each
step was scheduled and what was in it. From there to the next is a whole step as it was, with HTTP
and its clients on the same cores. A profile is fitted to these steps as to those of
`bench machine`, and a step in virtual time takes what the profile says, times by how much one of
the steps most like it was off.

So that nothing is foreseen from itself, the run is cut into windows of WINDOW_S. The steps of every
second one, and what requests in it took to the engine and back, give the clock of the others.
"""

from __future__ import annotations

import random
import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from tilewise.bench.fit import MeasuredStep, fit_device
from tilewise.bench.simulate import Setting, arrivals_of, new_engine
from tilewise.cost import StepCost, StepSeconds, StepWork
from tilewise.engine.virtual import Timing

if TYPE_CHECKING:
    from tilewise.bench.trace import TraceRequest

__all__ = ["Request", "Seen", "ServedStep", "foreseen", "steps_of"]

WINDOW_S = 1.0
AT_ONCE_S = 5e-4  # from the end of a step to a request that has waited for it
TIGHT_S = 4e-3  # a step that is as short leaves little doubt when a request came
LEAST_PROMPTS = 8  # steps with prompts that each half must have
MOST_FITTED = 400  # steps with prompts, and without, that a profile is fitted to
# Steps with prompts (True) and without: how many of the windows beside are enough, and of how many
# of these, the nearest in size, one is drawn.
ENOUGH = {True: 6, False: 50}
LIKE = {True: 3, False: 15}
DRAWS = 5  # runs in virtual time, whose median counts


@dataclass(frozen=True, slots=True)
class ServedStep:
    """A step of a server's engine, as the server's trace tells of it.

    Attributes:
        begun: the time at which it was scheduled, by the server's clock.
        work: the work of the step.
        seconds: the seconds to its end.
    """

    begun: float
    work: StepWork
    seconds: float


@dataclass(frozen=True, slots=True)
class Seen:
    """The times of a request in the engine of a server, by the server's clock.

    Attributes:
        earliest, noted: the bounds of its arrival; they differ if it came during a step.
        ready: the end of the step that computed the last of the request's prompt.
    """

    earliest: float
    noted: float
    ready: float


@dataclass(frozen=True, slots=True)
class Request:
    """A request that the client sent and that was answered.

    Attributes:
        name: the request's id in the server's trace.
        sent: the request that was sent, and its time.
        ttft: seconds to its first token.
    """

    name: str
    sent: TraceRequest
    ttft: float


def steps_of(
    events: Sequence[Mapping[str, Any]], block_size: int
) -> tuple[list[ServedStep], dict[str, Seen]]:
    """Return the steps of which a server's trace tells, in order, and the times of requests in the
    engine, by their ids.

    A step whose content the trace does not tell, since its beginning is forgotten or prompts came
    out of the prefix cache in parts of a block, is left out.

    Args:
        events: the events of /v1/trace, of an engine with steps that do not overlap.
        block_size: tokens of a block.
    """
    steps: list[ServedStep] = []
    came: dict[str, tuple[float, float, int]] = {}  # earliest, noted; the prompt's tokens
    ready: dict[str, Seen] = {}
    unready: dict[int, str] = {}  # the requests of sequences that have not drawn
    counted = _Counted()
    computed, wanted = counted.computed, counted.wanted
    drawn: dict[int, int] = {}  # of those that lost their place
    last: tuple[float, StepWork | None] | None = None
    ended = begun_last = 0.0  # of the last step that has

    def end(when: float) -> None:
        nonlocal last, ended, begun_last
        if last is None:
            return
        begun, work = last
        ended, begun_last = when, begun
        if work is not None:
            steps.append(ServedStep(begun, work, when - begun))
        for seq in [s for s in unready if computed[s] >= wanted[s]]:
            name = unready.pop(seq)
            ready.setdefault(name, Seen(*came[name][:2], when))
        last = None

    for event in events:
        kind, when = event.get("kind"), event.get("time", 0.0)
        if kind == "arrive":
            # The engine takes requests in between two steps.
            earliest = when
            if last is not None:
                earliest = last[0]
            elif when - ended < AT_ONCE_S:
                earliest = begun_last
            came[event["request_id"]] = earliest, when, event["num_tokens"]
        elif kind == "admit" and event["request_id"] in came:
            seq, name = event["seq_id"], event["request_id"]
            unready[seq] = name
            computed[seq] = max(0, event["num_found"]) * block_size
            # Who comes back computes again what was drawn before.
            wanted[seq] = max(came[name][2], drawn.pop(seq, 0))
        elif kind == "finish":
            seq = event["seq_id"]
            if len(computed) <= 1:  # the engine may stand still now
                end(when)
            computed.pop(seq, None)
            unready.pop(seq, None)
        elif kind == "preempt":
            seq = event["seq_id"]
            if seq in computed:
                drawn[seq] = max(wanted[seq], computed.pop(seq) + 1)
                unready.pop(seq, None)
        elif kind == "schedule":
            end(when)
            pairs = event["prompts"]
            runs = dict(zip(pairs[::2], pairs[1::2], strict=True))
            last = when, counted.work(event, runs)
    return steps, ready


class _Counted:
    """The tokens of the sequences that run, as the events of a trace count them.

    Attributes:
        computed: the number of computed tokens of each sequence that runs.
        wanted: the number of tokens that must be computed before each sequence draws.
        last: the sequences of which the last step counted one token, and which did not draw.
    """

    def __init__(self) -> None:
        self.computed: dict[int, int] = {}
        self.wanted: dict[int, int] = {}
        self.last: set[int] = set()

    def work(self, event: Mapping[str, Any], runs: Mapping[int, int]) -> StepWork | None:
        """Count a step's tokens as computed, and return its work; None if that is not known.

        Args:
            event: the event of the step.
            runs: the number of tokens of each of its sequences that has more than one.
        """
        sequences = event["num_sequences"]
        others = [s for s in self.computed if s not in runs]
        of_one = [s for s in others if self.computed[s] >= self.wanted[s]]
        if len(of_one) + len(runs) < sequences == len(others) + len(runs):
            # Of a prompt one token was left for this step. If that seems to be so twice, the prompt
            # is computed, and a part of a block was found that the trace does not tell.
            for seq in self.last.intersection(others):
                self.computed[seq] = max(self.computed[seq], self.wanted[seq] + 1)
            of_one = others
        keys = pairs = logits = 0
        self.last.clear()
        for seq, n in [*runs.items(), *((s, 1) for s in of_one)]:
            if seq not in self.computed:
                continue
            start = self.computed[seq]
            self.computed[seq] = start + n
            keys += start + n
            if n > 1:
                pairs += n * start + n * (n + 1) // 2
            if self.computed[seq] >= self.wanted[seq]:
                logits += 1
            elif n == 1:
                self.last.add(seq)
        if len(of_one) + len(runs) != sequences or not runs.keys() <= self.computed.keys():
            return None
        is_decode = not runs and logits == sequences
        return StepWork(
            event["num_tokens"],
            sequences,
            logits,
            logits,
            keys,
            pairs,
            is_decode=is_decode,
            prompt_tokens=sum(runs.values()),
        )


class _Half:
    """A clock made of the steps of every second window, which predicts those of the other windows.

    Args:
        setting: the setting of the server's engine.
        steps: the steps, each with the number of its window.
        ways: the seconds that requests in these windows took to the engine and back, of `_ways`.
    """

    def __init__(
        self, setting: Setting, steps: Sequence[tuple[int, ServedStep]], ways: list[float]
    ) -> None:
        self.ways = ways
        # The whole step is the device's here.
        start = replace(
            setting.machine,
            step_s=0.0,
            step_sequence_s=0.0,
            token_s=0.0,
            update_s=0.0,
            update_sequence_s=0.0,
        )
        some = [
            one
            for kind in (True, False)
            for one in _some([(w, s) for w, s in steps if bool(s.work.pairs) == kind])
        ]
        # What a step's parts weigh, at one pace for all windows; then again at that of each.
        pace = dict.fromkeys((window for window, _ in steps), 1.0)
        for _ in range(2):
            told = [MeasuredStep(s.work, 0.0, 0.0, s.seconds / pace[w], 0.0) for w, s in some]
            machine = fit_device(start, setting.sizes, told, dtype=setting.dtype)
            self.cost = StepCost(setting.sizes, machine, dtype=setting.dtype)
            pace = _pace(steps, self.cost)
        # By kind and window: sizes, and by how much the profile was off.
        self._off: dict[tuple[bool, int], list[tuple[int, float]]] = {}
        for window, step in steps:
            off = self._off.setdefault((bool(step.work.pairs), window), [])
            off.append((_size(step.work), step.seconds / self.cost.device(step.work)))
        self._beside: dict[tuple[bool, int], list[tuple[int, float]]] = {}

    def seconds(self, work: StepWork, window: int, draw: random.Random) -> float:
        """Return the seconds of a step with this work in a window of the other half: those of the
        fitted cost model, times by how much one of the most similar steps nearby was off.

        Args:
            work: the work of the step.
            window: the number of the window.
            draw: the generator that chooses the similar step.
        """
        kind = bool(work.pairs)
        off = self._beside.get((kind, window))
        if off is None:
            off = self._beside[kind, window] = self._nearest(kind, window)
        count = LIKE[kind]
        place = bisect_left(off, (_size(work), 0.0)) - count // 2
        begin = max(0, min(place, len(off) - count))
        like = off[begin : begin + count]
        return self.cost.device(work) * (draw.choice(like)[1] if like else 1.0)

    def _nearest(self, kind: bool, window: int) -> list[tuple[int, float]]:
        """Return (size, by how much the model was off) of the steps of a kind in the windows
        nearest to `window`, ascending by size.

        These are the windows on both sides, and further ones until there are `ENOUGH` steps.

        Args:
            kind: True for steps with prompts, False for steps without.
            window: the number of the window.
        """
        found: list[tuple[int, float]] = []
        windows = sorted((abs(w - window), w) for k, w in self._off if k == kind)
        for distance, group in groupby(windows, key=itemgetter(0)):
            if distance > 1 and len(found) >= ENOUGH[kind]:
                break
            for _, near in group:
                found += self._off[kind, near]
        return sorted(found)


def _size(work: StepWork) -> int:
    """Return the number by which steps of one kind are compared: tokens of prompts, or the keys of
    decoding rows."""
    return work.tokens - work.sequences if work.pairs else work.keys


def _some(steps: list[tuple[int, ServedStep]]) -> list[tuple[int, ServedStep]]:
    """Return at most MOST_FITTED of the steps, spread evenly over their sizes."""
    steps = sorted(steps, key=lambda one: _size(one[1].work))
    stride = -(-len(steps) // MOST_FITTED) or 1
    return steps[::stride]


def _pace(steps: Sequence[tuple[int, ServedStep]], cost: StepCost) -> dict[int, float]:
    """Return for each window, by its number, the seconds of its steps over those that `cost`
    predicts."""
    taken, thought = dict[int, float](), dict[int, float]()
    for window, step in steps:
        taken[window] = taken.get(window, 0.0) + step.seconds
        thought[window] = thought.get(window, 0.0) + cost.device(step.work)
    return {window: taken[window] / thought[window] for window in taken}


def foreseen(
    setting: Setting,
    requests: Sequence[Request],
    events: Sequence[Mapping[str, Any]],
    told: Callable[[list[Timing]], dict[str, Any]],
) -> tuple[dict[str, Any], list[Timing], dict[str, Any]] | None:
    """Serve a server's requests again in virtual time, by the clock of its own steps.

    Args:
        setting: the setting of the server's engine; only the peaks of its profile count, as the
            other times are fitted to the server's steps.
        requests: the requests that were answered, in the order in which they were sent.
        events: the events of the server's trace since before the first of them.
        told: a function that computes numbers from the timings of requests.

    Returns:
        Medians of `told` over DRAWS runs, the timings of the first run, and what was measured of
        the server; or None where the trace tells too little of either half.
    """
    steps, ready = steps_of(events, setting.block_size)
    known = [(one, ready[one.name]) for one in requests if one.name in ready]
    if not known:
        return None
    # The server may have another clock than the client.
    begin = statistics.median(seen.noted - one.sent.seconds for one, seen in known)
    whole = requests[-1].sent.seconds + WINDOW_S
    window = min(WINDOW_S, whole / 8)

    def place(seconds: float) -> int:
        return int(max(0.0, seconds) // window)

    ways: tuple[list[float], list[float]] = ([], [])
    spent = _ways([(one.ttft, seen) for one, seen in known])
    for (one, _), way in zip(known, spent, strict=True):
        ways[place(one.sent.seconds) % 2].append(way)
    own: tuple[list[tuple[int, ServedStep]], list[tuple[int, ServedStep]]] = ([], [])
    for step in steps:
        number = place(step.begun - begin)
        own[number % 2].append((number, step))
    if any(sum(bool(s.work.pairs) for _, s in some) < LEAST_PROMPTS for some in own):
        return None
    if not all(ways):
        return None
    halves = [_Half(setting, own[k], ways[k]) for k in (0, 1)]
    runs = [_run(setting, requests, halves, place, random.Random(seed)) for seed in range(DRAWS)]
    rows = [told(run) for run in runs]
    medians = {
        name: statistics.median(row[name] for row in rows) if rows[0][name] is not None else None
        for name in rows[0]
    }
    return medians, runs[0], _measured([*own[0], *own[1]], halves, window, ways)


def _ways(seen: Sequence[tuple[float, Seen]]) -> list[float]:
    """Return for each request the seconds of its way to the engine and of its first token's way
    back, together.

    A request that arrives during a step is noted when the step ends, and virtual time makes it wait
    for that, too. Where the time of its way is not known, the median of others is taken, as far as
    the measured times allow.

    Args:
        seen: the measured TTFT of each request, and its times in the engine.
    """
    most = [max(0.0, ttft - (one.ready - one.noted)) for ttft, one in seen]
    slack = [one.noted - one.earliest for _, one in seen]
    known = [m - min(m, s) / 2 for m, s in zip(most, slack, strict=True) if s < TIGHT_S]
    usual = statistics.median(known) if known else 0.0
    return [
        m - min(m, s) / 2 if s < TIGHT_S else min(m, max(usual, m - s))
        for m, s in zip(most, slack, strict=True)
    ]


def _run(
    setting: Setting,
    requests: Sequence[Request],
    halves: Sequence[_Half],
    place: Callable[[float], int],
    draw: random.Random,
) -> list[Timing]:
    """Serve requests in virtual time, each window by the clock of the other half, and return their
    timings in the order of `requests`.

    Args:
        setting: the setting of the server's engine.
        requests: the requests that were answered.
        halves: the clocks of the even and of the odd windows.
        place: a function from seconds since the first request to the number of a window.
        draw: the generator that chooses similar steps and ways to the engine.
    """
    ways = [draw.choice(halves[1 - place(one.sent.seconds) % 2].ways) for one in requests]
    late = [
        replace(r.sent, seconds=r.sent.seconds + w) for r, w in zip(requests, ways, strict=True)
    ]
    order = sorted(range(len(late)), key=lambda number: late[number].seconds)
    engine = new_engine(setting)

    def clock(work: StepWork) -> StepSeconds:
        window = place(engine.now)
        seconds = halves[1 - window % 2].seconds(work, window, draw)
        return StepSeconds(0.0, 0.0, seconds, 0.0)

    engine.clock = clock
    timings = engine.run(arrivals_of([late[number] for number in order]))
    for number, timing in zip(order, timings, strict=True):
        timing.arrival = requests[number].sent.seconds
    return [timing for _, timing in sorted(zip(order, timings, strict=True), key=lambda p: p[0])]


def _measured(
    steps: Sequence[tuple[int, ServedStep]],
    halves: Sequence[_Half],
    window: float,
    ways: tuple[list[float], list[float]],
) -> dict[str, Any]:
    """Return the row about the server's steps: their number, the errors of their predictions by the
    other half's clock, the pace of the windows, and the seconds of requests' ways."""
    off = sorted(
        abs(halves[1 - number % 2].cost.device(step.work) / step.seconds - 1)
        for number, step in steps
    )
    # By one clock for all windows: what is left is the machine's.
    pace = sorted(_pace(steps, halves[0].cost).values())
    way = sorted([*ways[0], *ways[1]])
    return {
        "steps": len(steps),
        "window_s": window,
        "error of a step %": {f"p{p}": 100 * off[len(off) * p // 100] for p in (50, 90)},
        "pace of a window": {"least": pace[0], "median": statistics.median(pace), "most": pace[-1]},
        "way_s": {f"p{p}": way[len(way) * p // 100] for p in (50, 90)},
    }
