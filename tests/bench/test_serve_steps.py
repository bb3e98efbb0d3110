"""A server's own steps as a clock: what a trace tells of them, and what is foreseen by it."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving
from tilewise.bench.serve import main
from tilewise.bench.serving import probe
from tilewise.bench.serving import steps as serve_steps
from tilewise.bench.serving.steps import Request, foreseen, steps_of
from tilewise.bench.simulate import Setting, arrivals_of, model_sizes, new_engine, of_timings
from tilewise.bench.trace import TraceRequest
from tilewise.cost import machine
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.engine.record.trace import Trace
from tilewise.engine.virtual import work_of
from tilewise.server.routes import admin_router


@pytest.fixture(scope="module")
def setting():
    sizes = model_sizes("story")
    return Setting(sizes, machine("cpu"), "float32", num_slots=16_384, budget=256, max_len=1024)


def requests_of(count, rate, seed=0, prompt=(5, 400), output=(1, 60)):
    draw, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(TraceRequest(now, draw.randint(*prompt), draw.randint(*output)))
        now += draw.expovariate(rate)
    return found


def traced(setting, requests, pace=lambda now: 1.0, scheduler_options=None, way=0.0, watch=None):
    """Serve in virtual time by a clock of this pace; return what became of them and the trace."""
    options = {"enable_prefix_caching": False, **(scheduler_options or {})}
    engine = new_engine(replace(setting, scheduler_options=options))
    own, engine.watch = engine.clock, watch
    trace = engine.scheduler.trace
    trace.clock = lambda: 1000.0 + engine.now  # a server's clock is not the client's

    def clock(work):
        seconds = own(work)
        return seconds._replace(device=seconds.device * pace(engine.now))

    engine.clock = clock
    late = [replace(one, seconds=one.seconds + way) for one in requests]
    timings = engine.run(arrivals_of(late))
    for timing in timings:
        timing.arrival -= way
    return timings, trace.since(0), engine


@pytest.mark.parametrize(
    ("slots", "options"),
    [
        (16_384, {}),
        (1088, {}),
        (16_384, {"max_num_batched_tokens": 48}),
        (2048, {"max_num_seqs": 3}),
    ],
    ids=["plain", "preempted", "chunks", "queued"],
)
def test_a_trace_tells_each_step_as_it_was(setting, slots, options):
    batches = []
    small = replace(setting, num_slots=slots)
    _, events, engine = traced(
        small, requests_of(60, 40.0, output=(1, 200)), scheduler_options=options,
        watch=lambda batch: batches.append(work_of(batch, 16)),
    )  # fmt: skip
    assert isinstance(engine.scheduler.trace, Trace)
    steps, ready = steps_of(events, 16)
    assert [s.work for s in steps] == batches
    # The last token of a step is taken in when it ends, and the next one is scheduled then.
    ends = [1000.0 + end for end in engine.steps.ended]
    assert [s.begun + s.seconds for s in steps] == pytest.approx(ends, abs=1e-3)
    assert len(ready) == 60
    if slots == 1088:
        assert sum(event["kind"] == "preempt" for event in events) > 3


def test_of_what_the_trace_has_forgotten_no_step_is_told(setting):
    _, events, _ = traced(setting, requests_of(40, 4.0))
    steps, _ = steps_of(events, 16)
    some, ready = steps_of(events[len(events) // 2 :], 16)
    assert 0 < len(some) < len(steps)
    assert steps[-len(some) :] == some or set(some) < set(steps)
    assert 0 < len(ready) < 40
    assert steps_of([{"number": 3}], 16) == ([], {})


def test_a_prompt_found_in_part_is_known_from_its_second_token_on():
    def event(kind, when, **more):
        return {"kind": kind, "time": when, **more}

    events = [
        event("arrive", 1.0, request_id="a", num_tokens=40),
        # 16 of a whole block and 7 inside the next one were found: 17 are computed.
        event("admit", 1.0, seq_id=0, request_id="a", num_found=1),
        event("schedule", 1.0, num_sequences=1, num_tokens=17, prompts=[0, 17]),
        event("schedule", 1.5, num_sequences=1, num_tokens=1, prompts=[]),
        event("schedule", 1.6, num_sequences=1, num_tokens=1, prompts=[]),
        event("finish", 1.75, seq_id=0, request_id="a", reason="length"),
    ]
    steps, _ = steps_of(events, 16)
    assert [s.seconds for s in steps] == pytest.approx([0.5, 0.1, 0.15])
    assert steps[2].work.keys == 42
    assert steps[2].work.is_decode


# Every day a machine that is not the profile's: one that is has no pace to be told.
@pytest.mark.parametrize(
    "pace", [3.0, *(pytest.param(p, marks=pytest.mark.slow) for p in (0.5, 1.0))]
)
def test_the_pace_of_a_machine_is_that_of_its_steps(setting, pace):
    """What an idle server or another minute would tell is off by that factor."""
    requests = requests_of(80, 5.0 / pace)
    timings, events, _ = traced(setting, requests, lambda now: pace, way=0.004)
    measured = of_timings(timings)
    answered = [
        Request(t.request_id, sent, t.first_token - t.arrival)
        for sent, t in zip(requests, timings, strict=True)
    ]
    # Only the peaks of the profile count, not what it has of this machine.
    known = replace(setting, scheduler_options={"enable_prefix_caching": False})
    predicted, virtual, told = foreseen(known, answered, events, of_timings)
    for name in ("tok/s", "ttft p50", "ttft p90", "tpot p50"):
        assert predicted[name] == pytest.approx(measured[name], rel=0.02), name
    assert len(virtual) == 80
    assert told["error of a step %"]["p90"] < 8
    assert told["way_s"]["p50"] == pytest.approx(0.004, abs=1e-3)


def test_a_window_is_foreseen_from_the_others(setting, monkeypatch):
    """Every second window is three times as slow: each is foreseen by the other ones' clock."""
    monkeypatch.setattr(serve_steps, "WINDOW_S", 2.0)
    requests = requests_of(100, 4.0)
    timings, events, _ = traced(setting, requests, lambda now: 3.0 if int(now // 2) % 2 else 1.0)
    answered = [
        Request(t.request_id, sent, t.first_token - t.arrival)
        for sent, t in zip(requests, timings, strict=True)
    ]
    known = replace(setting, scheduler_options={"enable_prefix_caching": False})
    _, virtual, told = foreseen(known, answered, events, of_timings)
    pace = told["pace of a window"]
    assert pace["most"] / pace["least"] == pytest.approx(3.0, rel=0.2)

    def mean(some, odd):
        seen = [t.first_token - t.arrival for t in some if int(t.arrival // 2) % 2 == odd]
        return sum(seen) / len(seen)

    assert mean(virtual, 0) > 1.8 * mean(timings, 0)
    assert mean(virtual, 1) < mean(timings, 1) / 1.8


def test_a_machine_that_slows_down_is_foreseen_from_the_windows_beside(setting):
    """In the middle of a run all takes twice as long, as when somebody else comes."""
    requests = requests_of(120, 2.0)
    middle = requests[60].seconds
    timings, events, _ = traced(setting, requests, lambda now: 2.0 if now > middle else 1.0)
    answered = [
        Request(t.request_id, sent, t.first_token - t.arrival)
        for sent, t in zip(requests, timings, strict=True)
    ]
    known = replace(setting, scheduler_options={"enable_prefix_caching": False})
    _, virtual, _ = foreseen(known, answered, events, of_timings)
    for some in (slice(5, 55), slice(65, 115)):
        seen, thought = (
            [t.last_token - t.arrival for t in run[some]] for run in (timings, virtual)
        )
        assert sum(thought) == pytest.approx(sum(seen), rel=0.08)


def test_of_too_few_steps_nothing_is_foreseen(setting):
    timings, events, _ = traced(setting, requests_of(5, 5.0))
    answered = [Request(t.request_id, TraceRequest(t.arrival, 5, 5), 0.1) for t in timings]
    assert foreseen(setting, answered, events, of_timings) is None
    assert foreseen(setting, answered, [], of_timings) is None


@pytest.mark.parametrize("has_trace", [True, False])
def test_bench_serve_reads_the_trace_where_there_is_one(tmp_path, capsys, monkeypatch, has_trace):
    monkeypatch.setattr(probe, "ROUNDS", 1)  # of what is asked where there is none
    trace = tmp_path / "ours.jsonl"
    trace.write_text('{"seconds": 0, "prompt": 40, "output": 8}\n' * 3)
    with serving(
        FakeEngine(step_s=0.001), routers=lambda service: [admin_router(service)] * has_trace
    ) as running:
        arguments = ["--url", running.url, "--trace", str(trace), "--simulate"]
        assert main(arguments) == 0
        count = len(running.engine.seen)
        names = [seen["request"].request_id for seen in running.engine.seen]
    out, err = capsys.readouterr()
    found = json.loads(out.splitlines()[-1])["simulated"]
    assert "steps_of_the_server" not in found, "the fake one tells of no steps"
    assert bool(found["added_by_the_server"]) != has_trace, "else it is asked for what HTTP adds"
    assert ("too few steps" in err) == has_trace
    assert any("bench-" in name for name in names) == has_trace
    assert (count < 10) == has_trace


def test_bench_serve_foresees_a_server_by_its_own_steps(tmp_path, capsys):
    llm = LLM("story", max_num_seqs=8, enable_prefix_caching=False, num_blocks=256)
    trace = tmp_path / "ours.jsonl"
    rows = ({"seconds": i / 20, "prompt": 20 + i, "output": 8} for i in range(60))
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = tmp_path / "found.json"
    with serving(
        AsyncLLM(llm), loop=llm.loop, routers=lambda service: [admin_router(service)]
    ) as running:
        arguments = ["--url", running.url, "--trace", str(trace), "--simulate"]
        assert main([*arguments, "--json", str(document)]) == 0
    llm.close()
    out, _ = capsys.readouterr()
    found = json.loads(document.read_text())["simulated"]
    told = found["steps_of_the_server"]
    assert told["steps"] >= 60 * 8 / 8
    assert "steps of the server" in out
    # A busy machine serves later than its steps tell; the last request is sent after 2.95 s.
    assert 0.7 * found["measured"]["tok/s"] <= found["predicted"]["tok/s"] <= 60 * 8 / 2.95
