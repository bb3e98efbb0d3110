"""What a server was sent, served again in virtual time, and the two beside one another."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilewise.bench.serving.client import Answer
from tilewise.bench.serving.probe import Alone, Server, alone
from tilewise.bench.serving.steps import Request, foreseen
from tilewise.bench.simulate import Setting, arrivals_of, model_sizes, new_engine, of_timings
from tilewise.bench.trace import TraceRequest
from tilewise.cost import machine, read_machine
from tilewise.engine.virtual import Timing

__all__ = ["simulated"]

COMPARED = ("req/s", "tok/s", "ttft p50", "ttft p90", "tpot p50", "s/token")


def simulated(
    options: argparse.Namespace,
    answers: Sequence[Answer],
    idle: Sequence[Alone],
    *,
    events: Sequence[Mapping[str, Any]] = (),
    ids_of: Callable[[str], list[int]],
    longest: int,
) -> tuple[dict[str, Any], list[Any]]:
    """Serve the answered requests again in virtual time, each at the time at which it was sent.

    Args:
        options: the options of the command line.
        answers: the answers, with the requests that were sent and what the client saw.
        idle: the probes of the idle server, from which the time that a server adds is known; ()
            takes the times of the engine called directly.
        events: the events of the server's trace since before the requests were sent; then its own
            steps are the clock.
        ids_of: a function that tokenises a prompt that was sent as text.
        longest: the largest number of tokens of a sequence.

    Returns:
        {"predicted": ..., "measured": ..., "error %": ...} in the words of `tilewise simulate`, and
        the timing of each request in virtual time.

    Raises:
        ValueError: model or machine is unknown, or no request was answered.
    """
    good = sorted((a for a in answers if a.error is None and a.times), key=lambda a: a.begun)
    if not good:
        raise ValueError("requests must hold one that was answered, got none")
    started = good[0].begun
    requests, measured = [], []
    for number, answer in enumerate(good):
        when, ids = answer.begun - started, answer.prompt
        if isinstance(ids, str):
            ids = ids_of(ids)
        output = max(1, answer.num_tokens // answer.samples)
        requests.append(
            TraceRequest(
                when, len(ids), output, answer.samples, token_ids=tuple(ids), user=answer.key
            )
        )
        measured.append(
            Timing(
                str(number),
                when,
                len(ids),
                answer.samples,
                first_token=answer.times[0] - started,
                last_token=answer.times[-1] - started,
                output_tokens=answer.num_tokens,
                cached_tokens=answer.cached_tokens,
                reason="length",
            )
        )
    profile = read_machine(options.machine) if options.machine else machine(options.gpu)
    setting = Setting(
        model_sizes(options.model),
        profile,
        options.dtype,
        num_slots=options.slots,
        max_num_seqs=options.max_num_seqs,
        budget=options.max_batched_tokens,
        max_len=longest,
    )
    found, name = None, profile.name
    if events and not profile.overlaps_steps:
        served = [
            Request(f"cmpl-{a.request_id}", request, a.times[0] - a.begun)
            for a, request in zip(good, requests, strict=True)
        ]
        found = foreseen(setting, served, events, of_timings)
    if found is not None:
        predicted, virtual, told = found
        both, more = {"predicted": predicted}, {"steps_of_the_server": told}
        name = "by the server's own steps"
    else:
        virtual, added = _by_profile(setting, requests, idle)
        both, more = {"predicted": of_timings(virtual)}, {"added_by_the_server": added}
    both["measured"] = of_timings(measured)
    rows = {kind: {name: told[name] for name in COMPARED} for kind, told in both.items()}
    rows["error %"] = {
        name: 100 * (rows["predicted"][name] / value - 1) if value else None
        for name, value in rows["measured"].items()
    }
    return {"machine": name, **more, **rows}, virtual


def _by_profile(
    setting: Setting, requests: Sequence[TraceRequest], idle: Sequence[Alone]
) -> tuple[list[Timing], dict[str, Any]]:
    """Serve requests in virtual time by the setting's profile, and by the seconds that the server
    adds, found from `idle`.

    Returns:
        The timings of the requests, and the added seconds by name; {} if `idle` is empty.
    """
    added: dict[str, Any] = {}
    server = alone(setting, idle) if idle else None
    if server is not None:
        setting = server.setting
        names = ("step_s", "sequence_s", "token_s", "request_s", "beside_s", "stalls")
        added = {name: getattr(server, name) for name in names}
    engine = new_engine(setting)
    if server is not None:
        engine.clock = server.clock(engine.clock, random.Random(0))
    virtual = engine.run(arrivals_of(requests))
    if server is not None:
        _add(virtual, server)
    return virtual, added


def _add(timings: Sequence[Timing], server: Server) -> None:
    """Add the server's own seconds for each request to the times of its first and its last token.

    Args:
        timings: the times of requests in virtual time, in order of arrival; they are changed.
        server: the measured seconds of a request alone, and of requests beside others.
    """
    draw, busy_until = random.Random(0), 0.0
    for timing in timings:
        is_beside = timing.arrival < busy_until and server.beside_s
        busy_until = max(busy_until, timing.last_token)
        more = draw.choice(server.beside_s) if is_beside else server.request_s
        timing.first_token += more
        timing.last_token += more
