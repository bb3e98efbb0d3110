"""The trace: whoever follows it knows every table and every count; it is bounded and cheap."""

from __future__ import annotations

import json
import random
import threading

import numpy as np
import pytest

from tests.engine.test_engine import GREEDY, build_engine, prompt_of
from tilewise.cli import main
from tilewise.engine.config import PromptLookup
from tilewise.engine.record.replay import KNOWN, NOBODY, SEVERAL, Pool, replay
from tilewise.engine.record.replay_plot import summary
from tilewise.engine.record.trace import FIELDS, MAX_ENDED, Trace, read_trace, write_trace
from tilewise.engine.request import FinishReason, Request, SamplingParams
from tilewise.engine.scheduling.beams import BeamSearchParams
from tilewise.engine.scheduling.explanation import MOST_NAMED
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.errors import RequestError


def follow(pool, engine, number):
    """Bring a pool up to date; returns the number of the next event."""
    for event in engine.trace(number):
        pool.take(event)
        number = event["number"] + 1
    return number


def assert_same(pool, engine):
    scheduler, allocator = engine.scheduler, engine.scheduler.tables.allocator
    blocks = range(allocator.num_blocks)
    assert pool.counts == [allocator.ref_count(b) for b in blocks]
    assert pool.known == {b for b in blocks if allocator.is_cached(b)}
    tables = {s.seq_id: s.block_ids for s in scheduler.roster.live.values() if s.block_ids}
    assert pool.tables == tables
    for seq_id in tables:
        number = pool.request_of[seq_id]
        assert pool.names[number] == scheduler.roster.live[seq_id].request.request_id


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_events_say_who_holds_every_block(overlap, seed):
    follow_everything(random.Random(seed), overlap, seed, searches=False)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_events_tell_of_beams_and_guesses(overlap, seed):
    follow_everything(random.Random(seed), overlap, seed, searches=True)


def follow_everything(draw, overlap, seed, *, searches):
    """Run random requests, and compare what the trace says with what is, after each step."""
    more = {}
    if searches:
        more["speculative"] = PromptLookup(min_ngram=1, num_tokens=6, is_adaptive=False)
    engine = build_engine(
        num_blocks=draw.choice([12, 20, 40]),
        overlap=overlap,
        max_num_seqs=6,
        max_num_batched_tokens=draw.choice([7, 64]),
        enable_prefix_caching=seed != 3,
        **more,
    )
    stem, pool, number, kinds = prompt_of(30, seed), Pool(), 0, set()
    waiting = [
        Request(
            str(i),
            [*stem[: draw.randrange(25)], *prompt_of(draw.randrange(1, 6), i)],
            BeamSearchParams(draw.choice([2, 3, 5]), max_tokens=draw.randrange(1, 14))
            if searches and i % 2
            else SamplingParams(n=draw.choice([1, 1, 3]), seed=i, max_tokens=draw.randrange(1, 14)),
            salt=draw.choice(["", "", "other"]),
        )
        for i in range(40)
    ]
    while waiting or engine.has_unfinished():
        if waiting and draw.random() < 0.5:
            try:
                engine.add_request(waiting.pop())
            except RequestError:
                continue
        engine.step()
        live = list(engine.scheduler.roster.requests)
        if live and draw.random() < 0.05:
            engine.abort(draw.choice(live))
        if live and draw.random() < 0.05:
            engine.finish(draw.choice(live), 0, FinishReason.STOP)
        if live and draw.random() < 0.02:
            with engine.lock:
                engine.scheduler.fail(draw.choice(live), FloatingPointError())
        kinds |= {event["kind"] for event in engine.trace(number)}
        number = follow(pool, engine, number)
        assert_same(pool, engine)
    engine.step()  # one may be unfinished, of requests that failed from outside
    number = follow(pool, engine, number)
    assert_same(pool, engine)
    assert pool.counts == [0] * engine.scheduler.limits.num_blocks
    assert kinds >= {"arrive", "admit", "schedule", "fork", "extend", "copy", "free", "finish"}
    assert seed == 3 or ("cut" in kinds) == searches
    if seed != 3:
        assert kinds >= {"register", "evict"}
        assert engine.scheduler.reset_prefix_cache()
        follow(pool, engine, number)
        assert_same(pool, engine)


def test_a_decode_step_notes_itself_and_the_blocks_it_begins():
    engine = build_engine(
        num_blocks=400, block_size=16, max_num_seqs=64, max_num_batched_tokens=2000
    )
    params = SamplingParams(temperature=0.0, max_tokens=64)
    for i in range(64):
        engine.add_request(Request(str(i), [i, *prompt_of(19, i)], params))
    engine.step()
    before = engine.scheduler.trace.num_noted
    for _ in range(16):  # each sequence begins one block and fills one
        engine.step()
    noted = engine.trace(before)
    assert len(noted) == 16 + 64 + 64
    [first, *_] = noted
    assert first["kind"] == "schedule"
    assert (first["num_sequences"], first["num_tokens"], first["prompts"]) == (64, 64, ())


def test_the_ring_is_bounded_by_what_its_events_hold():
    trace = Trace(10, 4, capacity=1000)
    for i in range(500):
        trace.note("free", tuple(range(i % 50)))
        assert sum(8 + len(e["blocks"]) for e in trace.since(1) if e["kind"] == "free") <= 1000
    assert trace.since(0)[-1]["number"] == 500
    assert [e["number"] for e in trace.since(498)] == [498, 499, 500]
    assert trace.since(501) == []
    numbers = [e["number"] for e in trace.since(0)]
    assert numbers == list(range(numbers[0], 501))


def test_numbers_go_on_when_the_engine_restarts():
    engine = build_engine()
    engine.add_request(Request("a", prompt_of(5, 1), GREEDY))
    engine.step()
    before = engine.trace()
    old = engine.scheduler
    engine.restart(Scheduler(64, 4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=100))
    after = engine.trace()
    assert after[: len(before)] == before
    assert after[len(before)]["kind"] == "pool"
    assert [e["number"] for e in after] == list(range(len(after)))
    assert engine.trace(len(before)) == after[len(before) :]
    assert engine.explain("a")["state"] == "finished"
    assert old is not engine.scheduler
    pool = Pool()
    follow(pool, engine, 0)
    assert_same(pool, engine)


def test_another_thread_may_ask_while_steps_run():
    engine = build_engine(num_blocks=30, overlap=True)
    stop, asked = threading.Event(), []

    def ask():
        number = 0
        while not stop.is_set():
            events = engine.trace(number)
            assert [e["number"] for e in events] == list(range(number, number + len(events)))
            number += len(events)
            asked.append(engine.explain("7")["state"])
            engine.stats()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for i in range(30):
            engine.add_request(Request(str(i), prompt_of(7, i), GREEDY))
        while engine.has_unfinished():
            engine.step()
    finally:
        stop.set()
        thread.join()
    assert set(asked) <= {"unknown", "waiting", "running", "finished"}
    assert len(asked) > 3


def test_explain_says_behind_whom_a_request_waits_and_since_when():
    now = [100.0]
    engine = build_engine(num_blocks=64, max_num_seqs=2)
    engine.scheduler.trace.clock = lambda: now[0]
    for i in range(25):
        engine.add_request(Request(str(i), prompt_of(5, i), GREEDY))
        now[0] += 1
    engine.step()
    running, first, last = (engine.explain(i) for i in ("0", "2", "24"))
    assert running["state"] == "running"
    assert running["behind"] == []
    assert (running["since_s"], running["age_s"]) == (0, 25)
    assert (first["state"], first["waits_for"]) == ("waiting", "waiting: all 2 seats are taken")
    assert first["behind"] == ["0", "1"]
    assert last["behind"] == [str(i) for i in range(2, 2 + MOST_NAMED)]
    assert last["num_behind"] == 22
    assert (last["since_s"], last["age_s"]) == (1, 1)
    assert engine.explain("none") == {"request_id": "none", "state": "unknown"}
    engine.abort("0")
    now[0] += 5
    ended = engine.explain("0")
    assert (ended["state"], ended["finish_reasons"]) == ("finished", ["abort"])
    assert (ended["since_s"], ended["age_s"], ended["waits_for"]) == (5, 25, None)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_explain_counts_what_preemption_has_cost(enable_prefix_caching):
    engine = build_engine(num_blocks=8, enable_prefix_caching=enable_prefix_caching)
    for i in range(4):
        engine.add_request(Request(str(i), prompt_of(9, i), GREEDY))
    computed = 0
    while engine.has_unfinished():
        engine.step()
    for event in engine.trace():
        computed += event.get("num_tokens", 0) if event["kind"] == "schedule" else 0
    found = [engine.explain(str(i)) for i in range(4)]
    stats = engine.stats().scheduler
    assert sum(f["num_preemptions"] for f in found) == stats.num_preemptions > 0
    # every prompt, and every generated token but the last, and what was lost
    assert computed == 4 * (9 + 11) + sum(f["num_tokens_lost"] for f in found)


def test_explain_tells_the_cached_share_of_a_prompt():
    engine = build_engine()
    shared = prompt_of(21, 7)
    for name, tail in (("a", [1, 2]), ("b", [3, 4, 5])):
        engine.add_request(Request(name, [*shared, *tail], GREEDY))
        engine.step()
        live = engine.explain(name)
        while engine.has_unfinished():
            engine.step()
        ended = engine.explain(name)
        assert live["num_cached_tokens"] == ended["num_cached_tokens"] == (21 if name == "b" else 0)
        assert ended["cached_share"] == ended["num_cached_tokens"] / len([*shared, *tail])


def test_requests_that_ended_are_remembered_for_a_while_and_ids_may_come_again():
    engine = build_engine()
    short = SamplingParams(temperature=0.0, max_tokens=1)
    for name in [*map(str, range(MAX_ENDED)), "5", "new"]:
        engine.add_request(Request(name, [1, 2], short))
        while engine.has_unfinished():
            engine.step()
    trace = engine.scheduler.trace
    assert len(trace._accounts) == len(trace._ended) == MAX_ENDED
    assert engine.explain("0")["state"] == "unknown"
    for name in ("1", "5", "6", "new"):
        assert engine.explain(name)["finish_reasons"] == ["length"]


def recorded():
    engine = build_engine(num_blocks=16)
    for i in range(8):
        params = SamplingParams(n=1 + 2 * (i % 2), seed=i, max_tokens=8)
        engine.add_request(Request(f"r{i}", [*prompt_of(9, 0), i], params))
    while engine.has_unfinished():
        engine.step()
    return engine.trace()


def test_a_file_holds_what_was_traced(tmp_path):
    events = recorded()
    write_trace(tmp_path / "t.jsonl", events)
    read = list(read_trace(tmp_path / "t.jsonl"))
    assert [e["kind"] for e in read] == [e["kind"] for e in events]
    for event, want in zip(read, events, strict=True):
        assert set(event) == {"number", "time", "kind", *FIELDS[event["kind"]]}
        for name, value in want.items():
            assert event[name] == (list(value) if isinstance(value, tuple) else value)
    for bad in ("{", "[]", '{"kind": "odd"}', '{"number": 1, "time": 0, "kind": "free"}'):
        _refuses(tmp_path, bad.encode())


def _refuses(folder, line):
    first = (folder / "t.jsonl").read_bytes().splitlines()[0]
    (folder / "bad.jsonl").write_bytes(first + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match="one event a line, line 2 is none"):
        list(read_trace(folder / "bad.jsonl"))


@pytest.mark.parametrize(
    "line",
    [
        b"\xff",
        b"[" * 100_000,
        b'{"number": 1, "time": 0, "kind": []}',
        b'{"number": 1, "time": 1e999, "kind": "reset"}',
        b'{"number": 1, "time": "now", "kind": "reset"}',
        b'{"number": true, "time": 0, "kind": "reset"}',
        b'{"number": 1, "time": 0, "kind": "pool", "num_blocks": 0, "block_size": 16}',
        b'{"number": 1, "time": 0, "kind": "pool", "num_blocks": 99999999, "block_size": 16}',
        b'{"number": 1, "time": 0, "kind": "free", "blocks": 3}',
        b'{"number": 1, "time": 0, "kind": "free", "blocks": [99999999999]}',
        b'{"number": 1, "time": 0, "kind": "free", "blocks": ["x"]}',
        b'{"number": 1, "time": 0, "kind": "evict", "block": [1]}',
        b'{"number": 1, "time": 0, "kind": "copy", "seq_id": 1, "place": 9999999999, "source": 1, '
        b'"block": 2}',
        b'{"number": 1, "time": 0, "kind": "extend", "seq_id": {}, "blocks": [1]}',
        b'{"number": 1, "time": 0, "kind": "register", "seq_id": 1, "place": 0, "blocks": [1], '
        b'"kept": [1, 2]}',
    ],
)
def test_a_line_that_is_no_event_is_named_whatever_is_wrong_with_it(tmp_path, line):
    write_trace(tmp_path / "t.jsonl", recorded()[:3])
    _refuses(tmp_path, line)


def test_any_line_of_a_trace_that_is_changed_is_refused_or_replayed(tmp_path):
    lines, rng = [], random.Random(7)
    write_trace(tmp_path / "t.jsonl", recorded())
    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    values = [None, True, -1, 0, 5, 2**30, 1.5, "x", [], [1], ["x"], {}, [[1]], 1e308]
    for _ in range(300):
        some = [json.loads(line) for line in rng.sample(lines, 12)]
        event = rng.choice(some)
        event[rng.choice(list(event))] = rng.choice(values)
        (tmp_path / "u.jsonl").write_text("\n".join(map(json.dumps, some)))
        refused = None
        try:
            replay(read_trace(tmp_path / "u.jsonl"))
        except ValueError as error:
            refused = str(error)
        assert refused is None or "one event a line" in refused


def test_a_replay_ends_with_nothing_used_and_counts_what_happened():
    events = recorded()
    timeline = replay(events, num_columns=50)
    assert timeline.owners.shape == (16, 50)
    assert set(np.unique(timeline.owners[:, -1])) <= {NOBODY, KNOWN}
    assert (timeline.owners == SEVERAL).any()
    assert timeline.waiting[-1] == 0
    assert timeline.waiting.max() > 0
    for kind in ("copy", "preempt", "evict"):
        assert timeline.happened[kind].sum() == sum(e["kind"] == kind for e in events)
    hits = sum(e["num_found"] for e in events if e["kind"] == "admit")
    hits += sum(len(e["blocks"]) for e in events if e["kind"] == "hit")
    assert timeline.happened["hit"].sum() == hits > 0
    assert timeline.num_tokens.sum() == sum(e.get("num_tokens", 0) for e in events[1:]) - sum(
        e["num_tokens"] for e in events if e["kind"] == "arrive"
    )
    assert timeline.names == [f"r{i}" for i in range(8)]
    assert summary(timeline).startswith("8 requests, ")


def test_a_replay_may_begin_in_the_middle():
    events = recorded()
    for first in (1, 5, len(events) // 2, len(events) - 1):
        timeline = replay(events[first:])
        assert (timeline.owners >= KNOWN).all()
    with pytest.raises(ValueError, match="at least one, got none"):
        replay([])


def test_the_command_draws_a_picture(tmp_path, capsys):
    write_trace(tmp_path / "t.jsonl", recorded())
    assert main(["replay", str(tmp_path / "t.jsonl")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("8 requests, ")
    assert out[1] == str(tmp_path / "t.png")
    from matplotlib.image import imread

    picture = imread(tmp_path / "t.png")
    assert picture.shape[0] > 600
    assert picture.shape[2] == 4
    colours = (255 * picture).astype(np.uint8).reshape(-1).view(np.uint32)  # four bytes each
    assert len(np.unique(colours)) > 50
    assert main(["replay", str(tmp_path / "none.jsonl")]) == 2
