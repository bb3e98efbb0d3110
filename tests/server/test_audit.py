"""Audit and canary of a server: counted in metrics, and the end of a server that wants it."""

from __future__ import annotations

import time

import httpx

from tests.server.serving import serving, wait_for
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.engine.steps.cpu_step import CompiledRunner
from tilewise.server.command import checked

SETTINGS = {"device": "cpu", "dtype": "float32", "num_blocks": 64, "block_size": 4}
ASK = {"model": "story", "prompt": "Once upon a time there was", "max_tokens": 12}


def metric(running, name):
    text = httpx.get(f"{running.url}/metrics", timeout=60).text
    lines = [line for line in text.splitlines() if line.startswith(f"tilewise:{name}_total")]
    return float(lines[0].split()[-1])


def test_audits_are_counted():
    with (
        LLM("story", **SETTINGS, audit=1.0, canary=1.0) as llm,
        serving(AsyncLLM(llm), loop=llm.loop) as running,
    ):
        for _ in range(3):
            answer = httpx.post(f"{running.url}/v1/completions", json=ASK, timeout=60)
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["logprobs"] is None
        wait_for(lambda: metric(running, "audited_requests") == 3)
        assert metric(running, "audited_requests_different") == 0
        assert metric(running, "canary_blocks_checked") > 0
        assert metric(running, "canary_blocks_broken") == 0


def test_a_server_that_stops_at_a_difference_is_unhealthy_afterwards(monkeypatch):
    real, calls = CompiledRunner.decode_inputs, [0]

    def wrong(self, batch):
        arrays = real(self, batch)
        if arrays is not None:
            calls[0] += 1
            if calls[0] == 4:
                arrays.rows.ids[0] = 77
        return arrays

    monkeypatch.setattr(CompiledRunner, "decode_inputs", wrong)
    with (
        LLM("story", **SETTINGS, audit=1.0, audit_stop=True) as llm,
        serving(AsyncLLM(llm), loop=llm.loop) as running,
    ):
        answer = httpx.post(f"{running.url}/v1/completions", json=ASK, timeout=60)
        assert answer.status_code == 200, "what ran before has ended"
        wait_for(lambda: not llm.loop.is_alive)
        time.sleep(0.05)
        assert httpx.get(f"{running.url}/health", timeout=60).status_code == 503
        refused = httpx.post(f"{running.url}/v1/completions", json=ASK, timeout=60)
        assert refused.status_code in (500, 503)


def test_the_flags_are_options_of_the_engine():
    options, _ = checked({"audit": 0.02, "canary": 0.1, "audit_stop": True})
    assert (options["audit"], options["canary"], options["audit_stop"]) == (0.02, 0.1, True)
    options, _ = checked({})
    assert [options[name] for name in ("audit", "canary", "audit_stop")] == [None, None, None]
