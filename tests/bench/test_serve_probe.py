"""What a server adds to its engine's steps, from requests alone."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving
from tilewise.bench.serve import main
from tilewise.bench.serving import probe as serve_probe
from tilewise.bench.serving.probe import (
    BESIDE,
    CROWD,
    CROWD_TOKENS,
    ROUNDS,
    TOGETHER_S,
    Alone,
    _stood_still,
    alone,
    lengths,
    predicted,
    predicted_beside,
    probe,
)
from tilewise.bench.serving.virtual import _add
from tilewise.bench.simulate import Setting, arrivals_of, model_sizes, new_engine
from tilewise.bench.trace import TraceRequest
from tilewise.cost import machine
from tilewise.engine.virtual import Timing


@pytest.fixture(scope="module")
def setting():
    sizes = model_sizes("story")
    return Setting(sizes, machine("cpu"), "float32", num_slots=16_384, budget=512, max_len=1024)


def test_lengths_are_those_that_fit():
    assert lengths(1024) == [16, 128, 512]
    assert lengths(40) == [5, 16, 20]
    assert lengths(17) == [2, 8, 9]


@pytest.mark.parametrize(
    "added",
    [(0.0, 0.0, 0.0, 0.0), (7e-4, 1e-4, 1.1e-5, 4e-3), (2e-4, 0.0, -2e-6, 1e-3)],
    ids=str,
)
def test_what_was_added_is_found_again(setting, added):
    step_s, sequence_s, token_s, request_s = added
    engine = replace(setting, machine=replace(setting.machine, token_s=3e-6))
    m = engine.machine
    changed = replace(
        m, step_s=m.step_s + step_s, step_sequence_s=m.step_sequence_s + sequence_s,
        token_s=m.token_s + token_s,
    )  # fmt: skip
    http = replace(engine, machine=changed)
    seen = []
    for length in lengths(1024):
        told = predicted(http, length)
        seen.append(Alone(length, told.ttft + request_s, told.tpot))
    seen.append(predicted(http, 16, CROWD))
    found = alone(engine, seen)
    assert found.step_s == pytest.approx(step_s, abs=1e-9)
    assert found.sequence_s == pytest.approx(sequence_s, abs=1e-9)
    assert found.token_s == pytest.approx(token_s, abs=1e-9)
    # Of the first token of a prompt nothing is counted.
    assert found.request_s == pytest.approx(request_s, abs=2e-5)
    assert found.setting.machine.token_s == pytest.approx(3e-6 + token_s, abs=1e-9)


def test_a_server_is_never_faster_than_nothing(setting):
    """A profile that is far too slow: no time becomes negative."""
    found = alone(setting, [Alone(16, 1e-6, 1e-6), Alone(512, 1e-6, 1e-6)])
    assert (found.step_s, found.request_s) == (0.0, 0.0)
    assert found.setting.machine.token_s >= 0


def test_it_asks_one_after_the_other_then_a_crowd_and_fails_aloud(monkeypatch):
    class Answer:
        error = None

        def __init__(self, begun, tokens):
            self.num_tokens = min(16, tokens)
            self.begun, self.times = begun, [begun + 0.5, begun + 2.0]

    bodies, under_way, most = [], [], []

    async def ask(body, begun, times):
        under_way.append(1)
        most.append(len(under_way))
        bodies.append(body)
        if body["max_tokens"] > CROWD_TOKENS:  # a stream: an event a second, one after 3
            times += [begun - 1e3 + s for s in (*range(500), *range(502, 3000))]
        try:
            await asyncio.sleep(0.001 if body["max_tokens"] > CROWD_TOKENS else 0)
        finally:
            under_way.pop()
        return Answer(begun, body["max_tokens"])

    with monkeypatch.context() as patch:
        patch.setattr(serve_probe, "MOST_S", -1.0)  # over at once, as with prompts that take long
        found = asyncio.run(probe(ask, 1024, 4096, 2))
    assert sum(one.running > 0 for one in found) == 2 * len(lengths(1024))
    bodies.clear()
    most.clear()
    found = asyncio.run(probe(ask, 1024, 4096, 2))
    times = pytest.approx(0.5), pytest.approx(0.1)
    beside = [
        Alone(n, *map(pytest.approx, (0.5, 1.5)), 1, BESIDE, pytest.approx((1.0, 2.0, 3.0, 4.0)))
        for n in (16, 128, 512)
    ]
    assert found == [
        *(Alone(n, *times) for n in (16, 128, 512)), Alone(16, *times, CROWD), *beside * 2 * ROUNDS
    ]  # fmt: skip
    streams = [b for b in bodies if b["max_tokens"] > CROWD_TOKENS]
    assert len(streams) >= BESIDE
    count = 3 * 3 + 2 * CROWD + 3 * 2 * ROUNDS
    assert len({tuple(b["prompt"]) for b in bodies}) == len(bodies), "none is cached"
    assert len(bodies) - len(streams) == count
    assert max(most[:9]) == 1
    assert max(most[: 9 + 2 * CROWD]) == CROWD
    assert max(most[9 + 2 * CROWD :]) <= BESIDE + 1
    assert not under_way, "what was left running was ended"
    Answer.error = "503"
    with pytest.raises(ValueError, match="must answer what it is asked first, got 503"):
        asyncio.run(probe(ask, 1024, 4096, 2))


def test_bench_serve_tells_what_the_server_adds(tmp_path, capsys):
    trace = tmp_path / "ours.jsonl"
    trace.write_text('{"seconds": 0, "prompt": 40, "output": 8}\n' * 3)
    with serving(FakeEngine(step_s=0.02)) as running:
        arguments = ["--url", running.url, "--trace", str(trace), "--simulate", "--probes", "1"]
        assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["simulated"]
    # The engine takes 20 ms a step, whatever the profile says of its steps.
    assert 0.01 < found["added_by_the_server"]["step_s"] < 0.2
    assert found["predicted"]["tpot p50"] > 0.01


def test_who_comes_beside_others_takes_what_was_seen_beside_streams(setting):
    quiet = [Alone(n, predicted(setting, n).ttft + 2e-3, predicted(setting, n).tpot)
             for n in lengths(1024)]  # fmt: skip
    without = {n: predicted_beside(setting, n) for n in lengths(1024)}
    assert without[16][0] > predicted(setting, 16).ttft, "it waits for a step, and shares one"
    assert without[16][1] < without[16][0], "of which the one with its prompt is a part"
    more = (3e-3, 5e-3, 40e-3)
    late = [Alone(n, without[n][0] + s, 0.0, 1, BESIDE)
            for n, s in zip(lengths(1024), more, strict=True)]  # fmt: skip
    found = alone(setting, [*quiet, *late])
    assert found.request_s == pytest.approx(2e-3, abs=1e-4)
    assert found.beside_s == pytest.approx(more, abs=1e-4)
    assert alone(setting, quiet).beside_s == alone(setting, quiet).stalls == ()
    # Streams that stood still meanwhile tell which part of it the step took.
    stood = (2e-3, -1e-3, 30e-3)
    late = [
        replace(m, stalls=(*others, without[m.prompt_tokens][1] + s))
        for m, s, others in zip(late, stood, ((), (), (9.0,)), strict=True)
    ]  # the longest comes in two pieces, of 508 tokens and of 4
    found = alone(setting, [*quiet, *late])
    assert found.beside_s == pytest.approx((1e-3, 6e-3, 10e-3), abs=2e-4)
    assert [n for n, _ in found.stalls] == [16, 128, 512]
    assert [s for _, [s] in found.stalls] == pytest.approx(stood, abs=2e-4)


@pytest.mark.parametrize("measured_beside", [1, 4])
def test_all_streams_wait_for_what_a_prompt_takes_longer(setting, monkeypatch, measured_beside):
    """What the first token of who comes takes longer is not this one's alone.

    Beside one stream it is a part of what it was beside several.
    """
    monkeypatch.setattr(serve_probe, "BESIDE", measured_beside)
    server = replace(alone(setting, [Alone(16, 1.0, 1e-3)]), stalls=((16, (0.05,)), (128, (0.1,))))
    requests = [TraceRequest(0.0, 16, 900, 1, token_ids=tuple(range(16)))]
    requests += [
        TraceRequest(0.02 + 0.2 * i, n, 2, 1, token_ids=tuple(range(100 * i, 100 * i + n)))
        for i, n in enumerate((16, 72, 128, 256), start=1)
    ]
    told = []
    for has_stalls in (False, True):
        engine = new_engine(setting)
        if has_stalls:
            engine.clock = server.clock(engine.clock, random.Random(0))
        told.append(engine.run(arrivals_of(requests)))
    without, found = told
    more = [f.first_token - w.first_token for f, w in zip(found, without, strict=True)]
    step = predicted(setting, 16).tpot
    for place, (late, stall) in enumerate(zip(more, (0.0, 0.05, 0.075, 0.1, 0.2), strict=True)):
        assert late == pytest.approx(stall / measured_beside, abs=2 * step), place
    last = found[0].last_token - without[0].last_token
    assert last == pytest.approx((0.05 + 0.075 + 0.1 + 0.2) / measured_beside, abs=0.01)


def test_streams_stood_still_for_the_last_events_before_a_first_token():
    streams = [[0.0, 1.0, 2.0, 7.0, 8.0], [0.5, 1.5, 2.5, 6.5, 20.0], [6.0], []]
    assert _stood_still(streams, 6.5) == (4.5, 5.5, 6.5)
    assert _stood_still(streams, 6.5 + TOGETHER_S / 2) == (4.5, 5.5, 6.5)
    assert _stood_still(streams[:1], 7.5) == (1.0, 6.0, 7.0, 8.0)
    assert _stood_still(streams[2:], 5.0) == ()


def test_a_request_beside_none_takes_what_one_alone_does(setting):
    server = replace(alone(setting, [Alone(16, 1.0, 1e-3)]), request_s=0.5, beside_s=(3.0, 3.0))
    timings = [
        Timing(str(i), arrival, 16, first_token=arrival + 0.1, last_token=last)
        for i, (arrival, last) in enumerate([(0.0, 4.0), (1.0, 2.0), (3.9, 4.1), (9.0, 9.5)])
    ]
    _add(timings, server)
    assert [t.first_token - t.arrival for t in timings] == pytest.approx([0.6, 3.1, 3.1, 0.6])
    assert timings[0].last_token == 4.5
