"""The bench of latent attention: rows have speeds, and nothing wrong gets a number."""

from __future__ import annotations

import pytest
import torch

from tests.lab.scripts import load
from tilewise.bench.roofline import Ceilings
from tilewise.bench.timing import Timing

mla = load("mla")
CEILINGS = Ceilings("cpu", "none", "0", 1e12, 1e9, 1e9)
SHAPE = mla.Shape(4, 2, 128)


@pytest.fixture(autouse=True)
def timed(monkeypatch):
    """Each call runs once, by the book, and takes 2 ms."""

    def together(calls, *, rounds):
        for call in calls.values():
            call()
        return {name: Timing(2e-3, 1e-3, 3e-3, rounds) for name in calls}

    right = mla.tilewise
    monkeypatch.setattr(mla, "time_together", together)
    monkeypatch.setattr(
        mla, "tilewise", lambda step, cache, scale, _=None: right(step, cache, scale, "reference")
    )


def test_rows_have_speeds():
    rows = mla.measure(SHAPE, CEILINGS, 4, device="cpu")
    assert [row["dtype"] for row in rows] == ["bfloat16", "float8_e4m3fn", "int8"]
    for row, row_bytes in zip(rows, (1152, 576 + 8, 576 + 8), strict=True):
        assert row["bytes"] == 2 * 128 * row_bytes
        assert row["TB/s"] == pytest.approx(row["bytes"] / 2e-3 / 1e12)
        assert row["TFLOP/s"] == pytest.approx(2 * 2 * 4 * 128 * (576 + 512) / 2e-3 / 1e12)


def test_a_peer_is_measured_where_it_can_be_imported(monkeypatch):
    def peer(step):
        return lambda: mla.tilewise(step, step.cache, None)

    monkeypatch.setattr(mla, "flash_mla", peer)
    rows = mla.measure(SHAPE, CEILINGS, 4, device="cpu")
    assert [row["peer"] for row in rows][:2] == ["tilewise", "flash_mla"]
    assert all(row["x flash_mla"] == 1.0 for row in rows)


def test_a_wrong_result_gets_no_number(monkeypatch):
    right = mla.tilewise

    def wrong(step, cache, scale, backend=None):
        o = right(step, cache, scale, backend)
        return o * 1.05 if cache.dtype == torch.int8 else o

    monkeypatch.setattr(mla, "tilewise", wrong)
    rows = mla.measure(SHAPE, CEILINGS, 4, device="cpu")
    assert "wrong result" in rows[-1]["error"]
    assert "ms" not in rows[-1]
    assert all("ms" in row for row in rows[:-1])
