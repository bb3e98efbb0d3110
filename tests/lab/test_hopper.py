"""The Hopper bench: what it measures, and that nothing wrong or refused gets a number."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.lab.scripts import load
from tilewise import ops
from tilewise.bench import peers
from tilewise.bench.problem import Problem
from tilewise.bench.roofline import Ceilings
from tilewise.bench.timing import Timing

hopper = load("hopper")
CEILINGS = Ceilings("cpu", "none", "0", 1e12, 1e9, 1e9)
SMALL = Problem("dense", 2, 48, 2, 2, 32, 32, ("tilewise", "sdpa_math"), True, ops=hopper._OPS)


@pytest.fixture
def called(monkeypatch):
    """Names of what was timed; each call runs once and takes 2 ms."""
    names = []

    def timed(calls, *, rounds):
        for name, call in calls.items():
            call()
            names.append(name)
        return {name: Timing(2e-3, 1e-3, 3e-3, rounds) for name in calls}

    monkeypatch.setattr(hopper, "time_together", timed)
    monkeypatch.setattr(peers.ops, "attention", partial(ops.attention, backend="reference"))
    return names


def test_each_table_is_measured_in_groups_that_belong_together():
    groups = hopper.groups(list(hopper.TABLES))
    dense = [group for group in groups if group[0].table == "dense"]
    assert len(dense) == 18
    assert all(len(group) == 1 for group in dense)
    beside_plain = [group for group in groups if group[0].table == "features"][1:]
    assert len(beside_plain) == len(hopper._FEATURES) - 1
    assert all(group[0].feature == "plain" for group in beside_plain)
    assert {problem.batch * problem.seqlen for group in dense for problem in group} == {16384}


def test_rows_have_times_and_speeds(called):
    rows = hopper.measure([SMALL], CEILINGS, 4, device="cpu")
    assert [(row["op"], row["peer"]) for row in rows] == [
        (op, peer) for op in ("forward", "backward") for peer in SMALL.peers
    ]
    for row in rows:
        assert row["ms"] == 2.0
        assert row["spread"] == 1.0
        assert row["TFLOP/s"] == pytest.approx(SMALL.flops(row["op"]) / 2e-3 / 1e12)
    assert len(called) == 4


def test_a_wrong_result_gets_no_number(called, monkeypatch):
    wrong = peers.PEERS["tilewise"]

    def doubled(case):
        run = wrong(case)
        return replace(run, function=lambda q, k, v: 2 * run.function(q, k, v))

    monkeypatch.setitem(peers.PEERS, "tilewise", doubled)
    rows = hopper.measure([SMALL], CEILINGS, 4, device="cpu")
    found = {(row["op"], row["peer"]): row for row in rows}
    for op in hopper._OPS:
        assert "ms" not in found[op, "tilewise"]
        assert "wrong result" in found[op, "tilewise"]["error"]
        assert "ms" in found[op, "sdpa_math"]


def test_an_absent_peer_says_so(called):
    rows = hopper.measure([replace(SMALL, peers=("tilewise", "fa3"))], CEILINGS, 4, device="cpu")
    found = {(row["op"], row["peer"]): row for row in rows}
    assert "flash_attn_interface" in found["forward", "fa3"]["error"]
    assert "ms" in found["forward", "tilewise"]
