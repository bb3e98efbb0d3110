"""lab/steady_decode.py: parts of a steady step, over an engine without a model."""

from __future__ import annotations

import gc

import pytest

from tests.lab.scripts import load
from tilewise.bench.engines.busy import Span
from tilewise.engine.captured.decode_step import DecodeStep

steady_decode = load("steady_decode")


def test_the_parts_of_a_steady_step_are_inside_of_one_another(monkeypatch):
    monkeypatch.setattr(DecodeStep, "run", DecodeStep.run)  # it is replaced, and comes back
    threshold = gc.get_threshold()
    loop = steady_decode.empty_engine(8, prefix_caching=True)
    try:
        steps = steady_decode.Steps(loop, is_empty=True)
        for rows in (8, 3):
            found = loop.call(lambda rows=rows: steps.turn(rows, None))
            assert found["rows"] == rows
            medians = {name: values[1] for name, values in found.items() if type(values) is list}
            assert all(ms > 0 for ms in medians.values()), "every part runs in every step"
            parts = sum(medians[name] for name in ("schedule", "submit", "update", "deliver"))
            assert parts <= 1.2 * medians["step"]
            assert medians["take"] + medians["send"] <= 1.2 * medians["submit"]
        assert not loop.engine.has_unfinished()
        assert loop.engine.stats().scheduler.blocks_used == 0
    finally:
        loop.close()
        gc.set_threshold(*threshold)
        gc.unfreeze()


def test_the_busy_share_is_of_the_middle_and_counts_what_overlaps_once():
    spans = [Span(float(t), t + 8.0, True) for t in range(0, 1000, 10)]
    found = steady_decode.busy_between(spans)
    assert found["busy %"] == pytest.approx(80, abs=0.5)
    beside = sorted([*spans, *(Span(t + 4.0, t + 10.0, False) for t in range(0, 1000, 10))])
    assert steady_decode.busy_between(beside)["busy %"] == pytest.approx(100, abs=0.1)
