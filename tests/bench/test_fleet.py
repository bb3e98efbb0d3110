"""Several engines in virtual time: one is the engine itself, all requests end, routing is felt."""

from __future__ import annotations

import json
import random

import pytest

from tests.bench.test_simulate import SMALL, requests_of
from tilewise import cli
from tilewise.bench.fleet import Place, asked_of
from tilewise.bench.simulate import MODELS, Setting, report, report_fleet, serve, serve_fleet
from tilewise.bench.trace import TraceRequest, poisson
from tilewise.cost import machine


def test_one_replica_is_the_engine_itself():
    requests = requests_of(3)
    want = report(serve(requests, SMALL))
    fleet = serve_fleet(requests, SMALL, Place(1))
    assert list(fleet.engines[0].timings.values()) == list(serve(requests, SMALL).timings.values())
    told = report_fleet(fleet)
    assert told.pop("busiest") == 1
    assert told == pytest.approx(want)


@pytest.mark.parametrize("routing", ["prefix", "round-robin"])
def test_every_request_is_served_by_one_of_them(routing):
    requests = requests_of(5, 120)
    fleet = serve_fleet(requests, SMALL, Place(4, 1, routing))
    timings = [t for engine in fleet.engines for t in engine.timings.values()]
    assert sorted(t.request_id for t in timings) == sorted(map(str, range(120)))
    assert all(t.reason == "length" and t.first_token >= t.arrival for t in timings)
    assert sum(fleet.sent) == 120
    assert min(fleet.sent) > 10
    if routing == "round-robin":
        assert fleet.sent == [30] * 4
    else:  # what was told of the ends is all there is
        fleet._hear(float("inf"))
        assert [fleet.router.work(n) for n in fleet.router.names] == pytest.approx([0] * 4)


def documents(count, each, seed=1):
    """Return requests that begin with one of some documents of 512 tokens."""
    draw = random.Random(seed)
    names = [i % count for i in range(count * each)]
    draw.shuffle(names)
    return poisson([TraceRequest(0.0, 560, 8, shared=((n, 512),)) for n in names], 30.0, seed)


def test_beginnings_that_one_cache_cannot_hold_are_dealt_out():
    setting = Setting(
        MODELS["opt-13b"], machine("a100"), num_slots=1500, max_num_seqs=16, budget=1024,
        max_len=1024,
    )  # fmt: skip
    requests = documents(8, 20)
    told = {
        routing: report_fleet(serve_fleet(requests, setting, Place(4, 1, routing)))
        for routing in ("prefix", "round-robin")
    }
    assert told["prefix"]["hit %"] > 70
    assert told["round-robin"]["hit %"] < 50
    assert told["prefix"]["ttft p90"] < told["round-robin"]["ttft p90"]


def test_what_a_trace_shares_is_what_is_asked():
    one, other = documents(2, 1)
    assert asked_of(one).pieces != asked_of(other).pieces
    assert asked_of(one).prompt_tokens == 560
    assert asked_of(TraceRequest(0.0, 9, 1)).pieces == ()


def run(capsys, *argv):
    code = cli.main(["simulate", "--requests", "40", *argv])
    told = capsys.readouterr()
    return code, told


def test_rows_of_replicas_and_shards(capsys):
    code, told = run(capsys, "--model", "llama-70b", "--gpus", "8", "--tensor-parallel", "2", "4",
                     "--rates", "0.5", "--rates-per-gpu", "--requests-per-gpu", "6",
                     "--routing", "prefix", "round-robin")  # fmt: skip
    assert code == 0
    rows = json.loads(told.out.splitlines()[-1])["rows"]
    assert [(r["parallel"], r["replicas"], r["routing"]) for r in rows] == [
        (2, 4, "prefix"), (2, 4, "round-robin"), (4, 2, "prefix"), (4, 2, "round-robin"),
    ]  # fmt: skip
    assert {(r["gpus"], r["requests"], r["rate"]) for r in rows} == {(8, 48, 4.0)}
    assert rows[2]["slots"] > rows[0]["slots"]
    assert rows[2]["tpot p50"] < rows[0]["tpot p50"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--gpus", "2", "--tensor-parallel", "4"], "--gpus must be at least the 4 of a replica"),
        (["--gpus", "2", "--replicas", "2"], "--replicas must not be given with --gpus"),
        (["--requests-per-gpu", "4"], "--requests-per-gpu must come with --rates"),
        (["--requests-per-gpu", "0", "--rates", "1"], "--requests-per-gpu must be at least 1"),
        (["--tensor-parallel", "3"], "tensor_parallel must divide 32 query heads"),
    ],
)
def test_what_cannot_be_is_said(capsys, argv, message):
    code, told = run(capsys, *argv)
    assert code == 2
    assert message in told.err
