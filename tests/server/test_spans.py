"""Spans of requests, in a collector's place; and that nothing is imported without them."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving, wait_for
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.server import spans as spans_module
from tilewise.server.spans import Spans, open_spans

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collector():
    """(exporter, Spans): what was written lies in the exporter."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter, Spans(provider, "story")


def written(exporter, count):
    wait_for(lambda: len(exporter.get_finished_spans()) >= count)
    spans = exporter.get_finished_spans()
    assert len(spans) == count
    return {span.name: span for span in spans}


def test_a_request_is_a_span_of_its_clients_trace_with_its_phases(collector):
    exporter, spans = collector
    llm = LLM("story", device="cpu", num_blocks=64, max_num_seqs=4)
    with serving(AsyncLLM(llm), loop=llm.loop, bridge_options={"spans": spans}) as running:
        body = {"prompt": "Once upon a time", "max_tokens": 5, "n": 2, "request_id": "one"}
        answer = httpx.post(
            f"{running.url}/v1/completions", json=body, headers={"traceparent": PARENT}
        ).json()
        found = written(exporter, 4)
    llm.close()
    request = found["request"]
    assert format(request.context.trace_id, "032x") == PARENT.split("-")[1]
    assert format(request.parent.span_id, "016x") == PARENT.split("-")[2]
    attributes = request.attributes
    assert attributes["gen_ai.request.id"] == answer["id"] == "cmpl-one"
    assert attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    reasons = [choice["finish_reason"] for choice in answer["choices"]]
    assert list(attributes["gen_ai.response.finish_reasons"]) == reasons
    phases = [found[name] for name in ("queue", "prefill", "decode")]
    for phase in phases:
        assert phase.parent.span_id == request.context.span_id
        assert request.start_time <= phase.start_time <= phase.end_time <= request.end_time
    for before, after in pairwise(phases):
        assert before.end_time == after.start_time
    assert phases[1].attributes["tilewise.tokens"] == answer["usage"]["prompt_tokens"]


def test_a_request_that_fails_or_is_refused_says_so(collector):
    exporter, spans = collector
    with serving(bridge_options={"spans": spans}) as running:
        running.engine.fails_at = 1
        body = {"prompt": "Once", "max_tokens": 5}
        assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 500
        failed = written(exporter, 1)["request"]
        assert not failed.status.is_ok
        assert failed.status.description == "engine_error"
        assert failed.parent is None
        exporter.clear()
        long = {"prompt": [1] * 5000}
        httpx.post(f"{running.url}/v1/completions", json=long, headers={"traceparent": "nonsense"})
        refused = written(exporter, 1)["request"]
        assert refused.attributes["tilewise.reason"] == "context_length_exceeded"


def test_spans_reach_a_collector_over_http(collector):
    import http.server
    import threading

    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel")
    bodies = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        spans = open_spans(f"http://127.0.0.1:{server.server_port}/v1/traces", "story")
        with serving(bridge_options={"spans": spans}) as running:
            body = {"prompt": "Once", "max_tokens": 3, "request_id": "seen"}
            httpx.post(f"{running.url}/v1/completions", json=body)
        wait_for(lambda: bodies)  # the end of the server sends what is left
        server.shutdown()
    assert b"cmpl-seen" in b"".join(bodies)


def test_the_endpoint_and_the_missing_package_are_named(monkeypatch):
    with pytest.raises(ValueError, match="must begin with http"):
        open_spans("localhost:4317", "story")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    for name in [n for n in sys.modules if n.startswith("opentelemetry.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=r"pip install 'tilewise\[otel\]'"):
        open_spans("http://localhost:4318/v1/traces", "story")


def test_nothing_of_it_is_imported_without_being_asked_for():
    # Others import the interface alone where it is installed.
    code = (
        "import sys, tilewise.server.command\n"
        "parts = ('opentelemetry.sdk', 'opentelemetry.exporter')\n"
        "print(any(name.startswith(parts) for name in sys.modules))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"
    assert spans_module.__doc__


def test_a_line_of_the_log_tells_all_of_a_request(caplog):
    caplog.set_level("INFO", "tilewise.server")
    with serving(FakeEngine()) as running:
        body = {"prompt": "Once", "max_tokens": 3, "request_id": "told"}
        httpx.post(f"{running.url}/v1/completions", json=body)
        wait_for(lambda: "cmpl-told" in caplog.text)
    [line] = [json.loads(r.message) for r in caplog.records if "cmpl-told" in r.message]
    assert set(line) == {
        "request", "key", "prompt_tokens", "cached_tokens", "tokens", "preemptions",
        "recomputed_tokens", "queued_s", "first_token_s", "seconds", "status", "reason",
    }  # fmt: skip
    assert (line["tokens"], line["reason"], line["status"]) == (3, "length", 200)
