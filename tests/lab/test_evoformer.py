"""lab/evoformer.py: its check sees a wrong result, and its rows have every peer."""

from __future__ import annotations

import json
import sys

import pytest

from lab import evoformer

RIGHT = evoformer.DS4Sci_EvoformerAttention


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["evoformer.py", "--device", "cpu", *arguments])
    return evoformer.main()


def test_a_row_has_every_peer_and_is_written(monkeypatch, capsys, tmp_path, timed_once):
    file = tmp_path / "rows.json"
    peers = ("tilewise", "eager", "sdpa")
    assert run(monkeypatch, "--sizes", "24x2", "--peers", *peers, "--json", str(file)) == 0
    [row] = json.loads(file.read_text())["rows"]
    assert row["differ"] == []
    assert all(set(row["ms"][part]) == set(peers) for part in ("forward", "both"))
    assert "DIFFER" not in capsys.readouterr().out


@pytest.mark.parametrize("factor", [1.05, 0.9])
def test_a_wrong_result_is_seen(monkeypatch, factor):
    monkeypatch.setattr(
        evoformer, "DS4Sci_EvoformerAttention", lambda *given: factor * RIGHT(*given)
    )
    said = evoformer.violations(24, 2, "cpu")
    assert [line.split(":")[0] for line in said] == ["o", "dq", "dk", "dv", "dbias"]
