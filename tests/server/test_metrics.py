"""Metrics: every name that documents and board use is told, and counts what it says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.engine.record.ages import Ages, Histogram
from tilewise.engine.request import Request, SamplingParams
from tilewise.server.metrics import Metrics

DOCS = Path(__file__).parents[2] / "docs" / "reference"
NAME = re.compile(r"tilewise:[a-z0-9_]+")


@pytest.fixture(scope="module")
def llm():
    made = LLM("story", device="cpu", num_blocks=40, max_num_seqs=32)  # samples are preempted
    yield made
    made.close()


@pytest.fixture(scope="module")
def told(llm):
    """(name, labels) -> value of all samples, after requests that preempt one another."""
    with serving(AsyncLLM(llm), loop=llm.loop) as running:
        url = f"{running.url}/v1/completions"
        body = {"prompt": "Once upon a time " * 8, "max_tokens": 40, "n": 24, "seed": 3}
        for _ in range(2):
            assert httpx.post(url, json=body, timeout=120).status_code == 200
        assert httpx.post(url, json={"prompt": "x", "max_tokens": 0}).status_code == 400
        assert httpx.post(url, json={"prompt": [1] * 5000}).status_code == 400
        families = text_string_to_metric_families(httpx.get(f"{running.url}/metrics").text)
        usage = httpx.get(f"{running.url}/v1/usage").json()["data"][0]
        samples = [sample for family in families for sample in family.samples]
    values = {}
    for sample in samples:
        values[sample.name] = values.get(sample.name, 0) + sample.value
    return samples, values, usage


def queries(board):
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


def known_names(samples):
    known = {sample.name for sample in samples}
    # Counters with labels are told from their first count on.
    return known | {"tilewise:dropped_streams_total", "tilewise:prompt_cached_tokens_total"}


def test_every_metric_of_the_board_is_told(told):
    samples, _, _ = told
    board = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    found = [(title, name) for title, text in queries(board) for name in NAME.findall(text)]
    assert len(found) > 40
    unknown = [pair for pair in found if pair[1] not in known_names(samples)]
    assert not unknown


def test_labels_of_the_boards_queries_are_those_of_the_metrics(told):
    samples, _, _ = told
    labels = {}
    for sample in samples:
        labels.setdefault(sample.name, set()).update(sample.labels)
    labels["tilewise:dropped_streams_total"] = {"model_name", "reason"}
    labels["tilewise:prompt_cached_tokens_total"] = {"model_name", "key"}
    board = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    for title, text in queries(board):
        asked = {
            part.strip() for by in re.findall(r"by \(([^)]*)\)", text) for part in by.split(",")
        }
        asked |= set(re.findall(r"\{(\w+)=~", text))
        for name in NAME.findall(text):
            assert asked <= labels[name], (title, name)


def test_the_board_is_one_that_grafana_imports():
    board = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    assert board["id"] is None
    assert board["schemaVersion"] >= 36
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    places = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & places, panel["title"]
        places |= cells
        for number, target in enumerate(panel.get("targets", [])):
            assert target["refId"] == "ABC"[number]
            assert target["expr"].count("(") == target["expr"].count(")")
            assert target["datasource"]["uid"] == "${datasource}"


def test_the_documents_name_every_metric_and_no_other(told):
    samples, _, _ = told
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    documented = set(NAME.findall(text))
    endings = ("_bucket", "_sum", "_count")
    known = set()
    for name in known_names(samples):
        if not name.endswith("_created"):
            base = next((name.removesuffix(e) for e in endings if name.endswith(e)), name)
            known.add(base)
    assert documented - known == set()
    assert known - documented == set()


def test_counts_add_up(told):
    samples, values, usage = told
    assert values["tilewise:num_preemptions_total"] > 0
    assert values["tilewise:recomputed_tokens_total"] > 0
    assert usage["preemptions"] > 0
    assert values["tilewise:request_preemptions_total"] == usage["preemptions"]
    steps = values["tilewise:iteration_tokens_total_sum"]
    stepped = values["tilewise:prefill_step_tokens_total"]
    assert steps == stepped + values["tilewise:decode_step_tokens_total"]
    for name in ("queue", "prefill", "decode", "inference"):
        assert values[f"tilewise:request_{name}_time_seconds_count"] == 2
    whole = values["tilewise:e2e_request_latency_seconds_sum"]
    parts = values["tilewise:request_queue_time_seconds_sum"]
    parts += values["tilewise:request_inference_time_seconds_sum"]
    assert 0.5 * whole < parts <= whole
    assert values["tilewise:kv_block_lifetime_seconds_count"] > 0
    lifetime = values["tilewise:kv_block_lifetime_seconds_sum"]
    assert values["tilewise:kv_block_idle_before_evict_seconds_sum"] <= lifetime
    reasons = {s.labels["reason"] for s in samples if s.name.endswith("waiting_by_reason")}
    assert reasons == {"swapped", "preempted", "seats", "adapters", "blocks", "budget", "behind"}


def test_waiting_is_told_by_reason(llm):
    with serving(AsyncLLM(llm), loop=llm.loop) as running:
        reasons = llm.loop.call(lambda: llm.engine.stats().scheduler.waiting_by_reason)
        assert set(reasons.values()) == {0}
        llm.loop.pause()
        for i in range(3):
            request = Request(f"r{i}", [5] * 8, SamplingParams(max_tokens=2))
            llm.loop.call(lambda request=request: llm.engine.add_request(request))
        reasons = llm.engine.stats().scheduler.waiting_by_reason
        assert (reasons["budget"], reasons["behind"]) == (1, 2)
        for i in range(3):
            llm.loop.call(lambda i=i: llm.engine.abort(f"r{i}"))
        llm.loop.resume()
        assert httpx.get(f"{running.url}/health").status_code == 200


def test_steps_stopped_for_newcomers_are_counted():
    fake = FakeEngine()
    for number, seconds in ((0, 0.0), (3, 0.125)):
        stats = replace(fake.stats(), num_stopped_steps=number, stopped_seconds=seconds)
        metrics = Metrics("story", lambda stats=stats: stats)
        metrics.look()
        text = metrics.text().decode()
        found = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
        assert found["tilewise:stopped_steps_total"] == number
        assert found["tilewise:stopped_step_seconds_total"] == seconds


def test_a_histogram_puts_values_into_their_buckets():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.add(value)
    assert histogram.read().counts == (2, 2, 1)
    assert histogram.read().total == 14.0


def test_ages_are_from_the_times_of_events():
    ages = Ages()
    take = ages.handlers
    take["register"](1.0, 7, 0, (2,), (2,))
    take["free"](3.0, (2,))
    take["admit"](4.5, 8, "a", 0, (2, 3), 1)  # found after 1.5 s
    take["free"](5.0, (2, 3))
    take["evict"](9.0, 2)  # idle for 4 s, findable for 8
    take["evict"](9.0, 3)  # never findable: it is no eviction of a prefix
    assert (ages.reuse_gap.read().total, sum(ages.reuse_gap.read().counts)) == (1.5, 1)
    assert (ages.lifetime.read().total, sum(ages.lifetime.read().counts)) == (8.0, 1)
    assert ages.idle.read().total == 4.0
    take["register"](10.0, 9, 0, (1,), (1,))
    take["reset"](11.0)
    take["evict"](12.0, 1)
    assert sum(ages.lifetime.read().counts) == 1


@pytest.mark.parametrize("more", [
    {"use_beam_search": True}, {"use_beam_search": True, "n": 3}, {"best_of": 3, "temperature": 1},
])  # fmt: skip
def test_what_is_told_at_its_end_has_no_time_to_its_first_token(llm, caplog, more):
    """Such a request took all its time to its first token, and none for the others."""
    caplog.set_level("INFO", "tilewise.server")
    with serving(AsyncLLM(llm), loop=llm.loop) as running:
        url = f"{running.url}/v1/completions"
        body = {"prompt": "Once upon a time", "max_tokens": 6}
        assert httpx.post(url, json={**body, **more}, timeout=120).status_code == 200
        line = json.loads(caplog.records[-1].message)
        assert (line["first_token_s"], line["status"]) == (None, 200)
        assert httpx.post(url, json=body, timeout=120).status_code == 200
        assert json.loads(caplog.records[-1].message)["first_token_s"] is not None
        text = httpx.get(f"{running.url}/metrics").text
    counts = dict(re.findall(r"tilewise:(\w+_seconds_count)\S* (\S+)", text))
    assert counts["e2e_request_latency_seconds_count"] == "2.0"
    for name in ("time_to_first_token", "request_prefill_time", "request_decode_time",
                 "request_time_per_output_token"):  # fmt: skip
        assert counts[f"{name}_seconds_count"] == "1.0"
