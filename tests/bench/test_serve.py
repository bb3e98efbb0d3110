"""The load generator: what it counts, and that it counts it over real sockets."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving
from tilewise.bench.serve import Answer, load, main, summary
from tilewise.server.keys import Caller, hash_of


def test_a_summary_counts_what_requests_saw():
    answers = [
        Answer("a", 0.0, times=[1.0, 2.0, 3.0], num_tokens=3, ended=3.0),
        Answer("b", 1.0, times=[1.5, 1.75], num_tokens=1, ended=2.0),
        Answer("b", 1.0, error="HTTP/1.1 503", ended=1.1),
    ]
    found = summary(answers, {"ttft": 600.0})
    assert (found["requests"], found["failed"]) == (3, 1)
    assert found["seconds"] == 3.0
    assert found["tokens_per_second"] == pytest.approx(4 / 3)
    assert found["ttft"]["p50"] == 1000.0
    assert found["ttft"]["mean"] == 750.0
    assert found["itl"]["p99"] == 1000.0
    assert found["goodput"] == pytest.approx(1 / 3)
    assert found["jain"] == pytest.approx((3 + 1) ** 2 / (2 * (9 + 1)))
    assert summary([answers[2]]) == {"requests": 1, "failed": 1}


def test_it_loads_a_server_with_keys_in_turn_at_a_rate():
    keys = {hash_of("key-one"): Caller("one"), hash_of("key-two"): Caller("two")}
    with serving(FakeEngine(step_s=0.001), keys=keys) as running:
        bodies = [{"prompt": f"A {i}", "max_tokens": 5} for i in range(20)]
        answers = asyncio.run(
            load(running.url, bodies, rate=100.0, burstiness=0.5, keys=["key-one", "key-two"])
        )
        found = summary(answers)
        assert found["failed"] == 0
        assert found["jain"] == pytest.approx(1.0)
        assert all(a.num_tokens == 5 and 1 <= len(a.times) <= 5 for a in answers)
        refused = asyncio.run(load(running.url, bodies[:1], rate=None, keys=["wrong"]))
        assert "401" in refused[0].error
        usage = running.bridge.ledger
        assert usage.of("one")["requests"] == usage.of("two")["requests"] == 10


def test_its_last_line_is_json_and_failures_are_its_exit_code(capsys):
    with serving() as running:
        arguments = ["--url", running.url, "--num-prompts", "4", "--max-tokens", "3"]
        assert main([*arguments, "--concurrency", "2", "--goodput", "ttft:9999"]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert found["requests"] == 4
        assert found["goodput"] > 0
    assert main(arguments) == 1
    assert "failed" in capsys.readouterr().err
