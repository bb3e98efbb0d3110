"""How fast a server answers: requests over HTTP as users send them, and what each of them saw.

    tilewise bench serve --url http://127.0.0.1:8000 --num-prompts 200 --request-rate 8 --burst 4
    tilewise bench serve --trace conv.csv --speed 2 --simulate --machine this.json --plot found.png
    tilewise bench serve --turns 4 --think-s 1 --shared-words 100     conversations
    tilewise bench serve --direct --concurrency 64      the packaged model, with and without HTTP

What is sent and when is in `workload`. --simulate serves what was sent, when it was sent, in
virtual time as well, by the clock of the server's own steps, and sets the two beside one another.
The first request of all is left out. The last line is JSON, on a terminal only with --json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any

from tilewise.bench.report import format_table, write
from tilewise.bench.serving.client import Answer, ask, load, summary
from tilewise.bench.serving.probe import Alone, probe
from tilewise.bench.trace import fitting, ids_within, read_trace
from tilewise.bench.workload import (
    Asked,
    arriving,
    conversations,
    drawn_prompts,
    of_trace,
    with_keys,
)
from tilewise.flags import Parser

__all__ = ["main"]

EVENTS = 10_000  # of a trace, that one answer has at most
PROBES = 5
WARMING = {"prompt": [1, 2, 3, 4] * 16, "max_tokens": 8, "ignore_eos": True}
BOUNDED = ("ttft", "tpot", "itl", "e2e")


def _asked(options: argparse.Namespace) -> list[Asked]:
    drawn = {
        "words": options.words,
        "shared_words": options.shared_words,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
    }
    count = options.num_prompts
    if options.trace:
        longest = options.max_model_len or _longest(options)
        requests = read_trace(options.trace)
        requests = fitting(requests, longest, len(requests) if count is None else count)
        if not requests:
            raise ValueError(f"--trace must have a request of at most {longest:,} tokens")
        first = requests[0].seconds
        asked = of_trace(
            requests,
            ids_within(options.vocab_size),
            temperature=options.temperature,
            speed=options.speed,
        )
        asked = [_sooner(one, first / options.speed) for one in asked]
    elif options.turns > 1:
        asked = conversations(count or 16, options.turns, think_s=options.think_s, **drawn)
    else:
        asked = drawn_prompts(count or 64, **drawn)
    if options.request_rate is not None:
        asked = arriving(
            asked,
            options.request_rate,
            burstiness=options.burstiness,
            burst=options.burst,
            seed=options.seed,
        )
    elif options.concurrency is not None:
        asked = [_at_once(one) for one in asked]
    return with_keys(asked, options.api_key)


def _sooner(one: Asked, seconds: float) -> Asked:
    """Return a request that is sent `seconds` seconds sooner."""
    assert one.seconds is not None
    return Asked(one.body, one.seconds - seconds)


def _at_once(one: Asked) -> Asked:
    return Asked(one.body, None, one.key, one.follows, one.think_s)


def _call(options: argparse.Namespace, path: str, body: Any = None) -> Any:
    """Return the parsed JSON of a route of the server that is no stream, called with POST if there
    is a body.

    Raises:
        ValueError: there is no server, or it lacks the route or refuses the key.
    """
    headers = {"Content-Type": "application/json"}
    if options.api_key[0]:
        headers["Authorization"] = f"Bearer {options.api_key[0]}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(options.url.rstrip("/") + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise ValueError(f"--url must be of a server with {path}, got {error}") from None
    except OSError as error:
        said = str(getattr(error, "reason", error)).lower()
        raise ValueError(
            f"there is no server at {options.url} ({said}): tilewise serve starts one, --url "
            "gives the address of another"
        ) from None


def _events(options: argparse.Namespace, since: int) -> tuple[list[dict[str, Any]], int] | None:
    """Return the events of a server's trace from number `since` on, and the next event's number.

    Returns None if the server has no trace, or does not show it to this key.
    """
    events: list[dict[str, Any]] = []
    while True:
        try:
            told = _call(options, f"/v1/trace?since={since}&limit={EVENTS}")
            more, since = told["data"], told["next"]
        except (ValueError, KeyError, TypeError):
            return None
        events += more
        if len(more) < EVENTS:
            return events, since


def _named(asked: Sequence[Asked]) -> list[Asked]:
    """Return the requests with a request_id each, by which the server's trace names them."""
    run = f"{time.time_ns():x}"
    return [
        replace(one, body={**one.body, "request_id": f"bench-{run}-{number}"})
        for number, one in enumerate(asked)
    ]


async def _idle(options: argparse.Namespace) -> list[Alone]:
    """Send probes to the server before the load, and return what they took, see `probe`."""

    def one(body: dict[str, Any], begun: float, times: list[float]) -> Awaitable[Answer]:
        return ask(options.url, body, options.api_key[0], begun, times=times)

    longest = options.max_model_len or _longest(options)
    probes = PROBES if options.probes is None else options.probes
    return await probe(one, longest, options.vocab_size, probes)


def _longest(options: argparse.Namespace) -> int:
    length = _call(options, "/v1/models")["data"][0].get("max_model_len")
    if not length:
        raise ValueError("--max-model-len must be given for a server that does not tell it")
    return int(length)


def _simulated(
    options: argparse.Namespace,
    answers: Sequence[Answer],
    idle: Sequence[Alone],
    events: Sequence[dict[str, Any]],
) -> tuple[dict[str, Any], list[Any]]:
    from tilewise.bench.serving.virtual import simulated

    def ids_of(prompt: str) -> list[int]:
        return list(_call(options, "/tokenize", {"prompt": prompt})["tokens"])

    longest = options.max_model_len or _longest(options)
    return simulated(options, answers, idle, events=events, ids_of=ids_of, longest=longest)


def _bounds(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in BOUNDED or not value.replace(".", "", 1).isdecimal():
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(BOUNDED)} with :MILLISECONDS, got {text!r}"
        )
    return name, float(value)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tilewise bench serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of any server with /v1/completions")
    add("--api-key", nargs="+", default=[""], help="of users, or of the requests in turn")
    add("--goodput", type=_bounds, nargs="+", default=[], metavar="ttft:MS")
    add("--json", metavar="FILE", help="write the document, and what each request saw, there")
    add("--plot", metavar="FILE", help="draw it, as PNG")
    add = parser.add_argument_group("what is sent").add_argument
    add("--trace", metavar="FILE", help="Azure's CSV, Mooncake's or our JSONL: requests that fit")
    add("--max-model-len", type=int, metavar="N", help="(default: what the server tells)")
    add("--vocab-size", type=int, default=4096, metavar="N", help="ids of a trace's prompts")
    add("--num-prompts", type=int, metavar="N", help="64; of conversations 16; of a trace all")
    add("--words", type=int, default=24, help="of each prompt, or turn")
    add("--shared-words", type=int, default=0, help="with which all prompts begin")
    add("--turns", type=int, default=1, help="of each conversation")
    add("--think-s", type=float, default=0.0, help="mean, between an answer and the next turn")
    add("--max-tokens", type=int, default=64)
    add("--temperature", type=float, default=1.0)
    add("--seed", type=int, default=0)
    add = parser.add_argument_group("when").add_argument
    add("--request-rate", type=float, help="a second (default: a trace's times, else all at once)")
    add("--burstiness", type=float, default=1.0, help="1 is a Poisson process, less is burstier")
    add("--burst", type=int, default=1, metavar="N", help="requests that come at once")
    add("--speed", type=float, default=1.0, help="seconds of a trace that go by in one")
    add("--concurrency", type=int, help="requests under way at most; without a rate a closed loop")
    add = parser.add_argument_group("beside it in virtual time").add_argument
    add("--simulate", action="store_true", help="serve what was sent by tilewise simulate, too")
    add("--machine", metavar="FILE", help="a profile by tilewise bench machine")
    add(
        "--probes",
        type=int,
        metavar="N",
        help="in place of the server's own steps, which its trace tells (by default, where it may "
        "be read): requests of each of three lengths to the idle server before, some at once, and "
        "eight times as many beside running streams (20 s, where they take longer), which tell "
        f"what HTTP adds to a step, a prompt and a request ({PROBES}, where there is no trace); "
        "0: nothing is added",
    )
    add("--gpu", default="cpu", help="a known profile (default: cpu)")
    add("--dtype", default="float32", help="of the products")
    add("--slots", type=int, metavar="N", help="tokens that the server's cache holds")
    add("--max-num-seqs", type=int, default=256, metavar="N")
    add("--max-batched-tokens", type=int, default=2048, metavar="N", help="of a step")
    add = parser.add_argument_group("a server of its own").add_argument
    add("--direct", action="store_true", help="start a server, beside the engine without one")
    add("--model", default="story", help="with --direct or --simulate")
    add("--repeats", type=int, default=3, help="with --direct; the best counts")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tilewise bench serve`: send the load, and print what the requests saw.

    Returns the exit status: 0, 1 if a request failed, 2 for a wrong option.
    """
    options = _parser().parse_args(argv)
    try:
        return _run(options)
    except ValueError as error:
        print(f"tilewise bench serve: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.speed <= 0 or options.turns < 1:
        raise ValueError("--speed must be above 0 and --turns at least 1")
    if options.direct and (options.trace or options.turns > 1 or options.simulate):
        raise ValueError("--direct must stand without --trace, --turns and --simulate")
    asked = _asked(options)
    answers: list[Answer] = []
    virtual: list[Any] = []
    if options.direct:
        from tilewise.bench.serving.direct import direct

        found = direct(options, [_at_once(one) for one in asked])
    else:
        idle: list[Alone] = []
        events: list[dict[str, Any]] = []
        traced = None
        if options.simulate and options.probes is None and asked:
            traced = _events(options, 0)
        if traced is None and options.simulate and options.probes != 0:
            idle = asyncio.run(_idle(options))
        elif asked:
            # The first request of a process takes what none after it does.
            asyncio.run(load(options.url, [Asked({**WARMING}, key=asked[0].key)]))
            print("left out: one request beforehand, which warms the server up", file=sys.stderr)
        if traced is not None:
            traced = _events(options, traced[1]) or traced
            asked = _named(asked)
        answers = asyncio.run(load(options.url, asked, concurrency=options.concurrency))
        found = summary(answers, dict(options.goodput))
        if traced is not None:
            events = (_events(options, traced[1]) or ([], 0))[0]
        for answer in answers:
            if answer.error:
                print(f"failed: {answer.error[:200]}", file=sys.stderr)
                break
        if options.simulate and found["failed"] < found["requests"]:
            found["simulated"], virtual = _simulated(options, answers, idle, events)
            if traced is not None and "steps_of_the_server" not in found["simulated"]:
                print(
                    "the trace tells of too few steps: the clock is the profile's, without HTTP; "
                    f"--probes {PROBES} asks the server what HTTP adds",
                    file=sys.stderr,
                )
    _print(found)
    if options.json:
        write({**found, "answers": [_told(a, answers) for a in answers]}, options.json)
    if options.plot and any(a.times for a in answers):
        from tilewise.bench.serving.plot import draw

        draw(answers, virtual, options.plot)
    if options.json or not sys.stdout.isatty():
        print(json.dumps(found))
    return 0 if not found.get("failed") else 1


def _print(found: dict[str, Any]) -> None:
    for name, value in found.items():
        if name == "simulated":
            rows = [
                {"": kind, **row}
                for kind, row in value.items()
                if kind in ("predicted", "measured", "error %")
            ]
            print(f"in virtual time, {value['machine']}:")
            if steps := value.get("steps_of_the_server"):
                pace, off = steps["pace of a window"], steps["error of a step %"]
                print(
                    f"by {steps['steps']} steps of the server, each foreseen from other windows of "
                    f"{steps['window_s']:.3g} s: half of them within {off['p50']:.0f} %, the "
                    f"windows {pace['least']:.2f} to {pace['most']:.2f} times as long"
                )
            if added := value.get("added_by_the_server"):
                beside = sorted(added["beside_s"]) or [added["request_s"]]
                told = {n: s for n, s in added.items() if n not in ("beside_s", "stalls")}
                told |= {f"beside_s p{p}": beside[len(beside) * p // 100] for p in (50, 90)}
                told |= {f"stall of {n}": s[len(s) // 2] for n, s in added["stalls"]}
                print("  ".join(f"{name} {1e3 * s:.4f} ms" for name, s in told.items()) + " added")
            print(format_table(rows, list(rows[0])))
        elif isinstance(value, dict):
            text = "  ".join(f"{key} {number:10.2f}" for key, number in value.items())
            print(f"{name:<26}{text} ms")
        else:
            print(f"{name:<26}{value:,.3f}".rstrip("0").rstrip("."))


def _told(answer: Answer, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the times and token counts of one answer, without its API key and text.

    Times are seconds from the first request of all.
    """
    started = min(a.begun for a in answers)
    keys = sorted({a.key for a in answers})
    return {
        "begun": answer.begun - started,
        "first": answer.times[0] - started if answer.times else None,
        "last": answer.times[-1] - started if answer.times else None,
        "events": len(answer.times),
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "tokens": answer.num_tokens,
        "key": keys.index(answer.key),
        "error": answer.error,
    }


if __name__ == "__main__":
    sys.exit(main())
