"""Engines take turns, failures keep their place, and rows say what the times mean."""

from __future__ import annotations

import contextlib

import pytest

from tilewise.bench.engines import measure, workloads
from tilewise.bench.engines.process import EngineFailed
from tilewise.bench.engines.roof import Roof
from tilewise.bench.engines.shapes import SHAPES, read_sizes

ROOF = Roof(read_sizes(SHAPES["llama-0.4b"]), 30e9, 400e9)


class Fake:
    """An engine's process whose answers have made-up times."""

    def __init__(self, name, step, calls, fails_at=None):
        self.name, self.step, self.calls, self.fails_at = name, step, calls, fails_at

    def ask(self, request, timeout):
        self.calls.append((self.name, max(request["new_tokens"])))
        if len(self.calls) == self.fails_at:
            raise EngineFailed("out of memory")
        seconds = 0.5 + self.step * (max(request["new_tokens"]) - 1)
        return {"seconds": seconds, "ids": [[1] * n for n in request["new_tokens"]]}


def bench(tmp_path, **changes):
    settings = {"json_path": None, "folder": tmp_path, "repeats": 2, "timeout": 1.0}
    return measure.Bench({}, **(settings | changes))


def test_engines_take_turns_and_their_time_is_split_into_prefill_and_decode(tmp_path):
    calls = []
    workload = workloads.fixed(4, 16, 11, vocab_size=100)
    competitors = [measure.Competitor(name, name, {}) for name in ("tilewise", "vllm")]
    processes = [
        (competitors[0], Fake("ours", 0.01, calls)),
        (competitors[1], Fake("theirs", 0.02, calls)),
    ]
    found = bench(tmp_path)._turns(workload, processes)
    turn = [("ours", 1), ("ours", 11), ("theirs", 1), ("theirs", 11)]
    assert calls == [("ours", 8), ("theirs", 8), *turn, *turn]
    row = measure.summary(workload, found["tilewise"], ROOF)
    assert row["prefill tok/s"] == pytest.approx(4 * 16 / 0.5)
    assert row["ms a step"] == pytest.approx(10.0)
    assert row["decode tok/s"] == pytest.approx(400.0)
    assert row["output tok/s"] == pytest.approx(44 / 0.6)
    assert row["% of roof"] == pytest.approx(100 * ROOF.step(4, 4 * (16 + 5.5)) / 0.01)


def test_an_engine_that_fails_keeps_its_place_and_disturbs_no_other(tmp_path):
    calls, others = [], []
    workload = workloads.fixed(1, 4, 9, vocab_size=100)
    processes = [
        (measure.Competitor("tilewise", "tilewise", {}), Fake("ours", 0.01, calls, fails_at=2)),
        (measure.Competitor("vllm", "vllm", {}), Fake("theirs", 0.02, others)),
    ]
    found = bench(tmp_path)._turns(workload, processes)
    assert str(found["tilewise"]) == "out of memory"
    assert len(calls) == 2
    assert len(found["vllm"]) == 2


def test_nothing_begins_when_the_seconds_are_over_and_what_was_measured_stays(tmp_path):
    timed = bench(tmp_path, seconds=1000.0, timeout=5000.0)
    assert not timed.is_over
    assert 999 < timed.timeout <= 1000
    calls = []
    process = Fake("tilewise", 0.01, calls)
    competitor = measure.Competitor("tilewise", "tilewise", {})
    workload = workloads.fixed(2, 8, 4, vocab_size=100)

    def over_after(count):
        return lambda self: len(calls) >= count

    class Over(measure.Bench):
        is_over = property(over_after(3))  # after a warm-up and one turn of two runs

    short = Over({}, json_path=None, folder=tmp_path, repeats=5, timeout=1.0)
    found = short._turns(workload, [(competitor, process)])
    assert len(found["tilewise"]) == 1
    session = measure.Session("story", None, [workload], [competitor], None)
    short._started = lambda *_: contextlib.nullcontext([(competitor, process)])
    short._run_together(session, [competitor])
    assert [row["error"] for row in short.rows] == ["not measured: no time was left"]


def test_a_prompt_alone_has_no_decode():
    workload = workloads.fixed(1, 64, 1, vocab_size=100)
    row = measure.summary(workload, [{"first": 0.2}, {"first": 0.1}, {"first": 0.3}], ROOF)
    assert row["prefill tok/s"] == pytest.approx(320.0)
    assert row["spread %"] == pytest.approx(100.0)
    assert "ms a step" not in row
    assert "output tok/s" not in row


def test_a_whole_run_is_compared_with_its_own_roof():
    workload = workloads.nano(requests=4, shortest=2, longest=5, vocab_size=50)
    row = measure.summary(workload, [{"whole": 2.0}, {"whole": 4.0}], ROOF)
    assert row["output tok/s"] == pytest.approx(workload.tokens_out / 3.0)
    assert row["% of roof"] == pytest.approx(100 * ROOF.whole(workload) / 3.0)


def test_tokens_agree_up_to_the_first_difference_of_a_row():
    assert measure.agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]) == 6 / 8


def test_ours_is_compared_with_the_best_peer_of_the_same_threads():
    shared = {"shape": "s", "workload": "fixed", "batch": 1, "tokens in": 1, "tokens out": 9}
    rows = [
        shared | {"engine": "tilewise", "threads": 1, "decode tok/s": 30.0},
        shared | {"engine": "llamacpp f16", "threads": 1, "decode tok/s": 10.0},
        shared | {"engine": "llamacpp bf16", "threads": 1, "decode tok/s": 20.0},
        shared | {"engine": "llamacpp bf16", "threads": 2, "decode tok/s": 90.0},
        shared | {"engine": "vllm", "threads": 1, "error": "no GPU"},
    ]
    measure.compare(rows)
    assert rows[0]["x best peer"] == pytest.approx(1.5)
    assert not any("x best peer" in row for row in rows[1:])
