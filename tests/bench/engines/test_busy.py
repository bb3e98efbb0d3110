"""The busy share is the union of the device's spans over the later half of the decode."""

from __future__ import annotations

import gzip
import json

import pytest

from tilewise.bench.engines.busy import Span, busy_share, read_trace


def test_spans_that_overlap_count_once_and_gaps_do_not():
    # The prompts take 100 us, the decode goes on to 300: the steady part is 200 ... 300.
    spans = [Span(0, 100, True), Span(190, 220, True), Span(210, 230, True), Span(250, 300, False)]
    share, kernels = busy_share(spans, skip=100e-6)
    assert share == pytest.approx((30 + 50) / 100)
    assert kernels == 1  # one began before 200, one is a copy


def test_a_device_that_never_rests_is_busy_all_the_time():
    spans = [Span(at, at + 10, True) for at in range(0, 1000, 10)]
    assert busy_share(spans, skip=0.0) == (pytest.approx(1.0), 50)


@pytest.mark.parametrize("spans", [[], [Span(0, 10, True)]])
def test_a_run_without_a_decode_is_refused(spans):
    with pytest.raises(ValueError, match="spans must"):
        busy_share(spans, skip=1.0)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_gives_what_ran_on_the_device(tmp_path, name):
    events = [
        {"ph": "X", "cat": "kernel", "ts": 5.0, "dur": 2.0, "name": "b"},
        {"ph": "X", "cat": "cpu_op", "ts": 0.0, "dur": 9.0, "name": "aten::mm"},
        {"ph": "X", "cat": "gpu_memcpy", "ts": 1.0, "dur": 1.0, "name": "copy"},
        {"ph": "f", "cat": "kernel", "ts": 1.0, "name": "an arrow"},
    ]
    data = json.dumps({"traceEvents": events}).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert read_trace(path) == [Span(1.0, 2.0, False), Span(5.0, 7.0, True)]
