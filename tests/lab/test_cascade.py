"""The bench of shared prefixes checks what it times, and says how the peers compare."""

from __future__ import annotations

import json

import pytest

from tests.lab.scripts import load

cascade = load("cascade")
Case = cascade.Case
SMALL = Case(3, 4, 2, 128, 20)


def test_every_sequence_shares_the_prefix_alone():
    inputs = cascade.make_inputs(SMALL, "cpu")
    assert inputs.shared.skipped.tolist() == [128] * 3
    assert inputs.shared.saved_tokens == 2 * 128
    table = inputs.metadata["block_table"]
    assert len(table[:, 8:].unique()) == 3 * 2


def test_the_run_ends_with_its_document(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(cascade.CASES, "cpu", (SMALL, Case(2, 4, 2, 128, 16, run=5, tree=True)))
    monkeypatch.setattr(cascade, "SECONDS", 0.01)
    assert cascade.main(["--device", "cpu", "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert rows == json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["peer"] for row in rows] == [
        "tilewise_shared", "tilewise", "sdpa_contiguous", "tilewise_shared", "tilewise",
    ]  # fmt: skip
    assert not [row for row in rows if "error" in row]
    assert rows[1]["times shared"] == pytest.approx(rows[1]["ms"] / rows[0]["ms"])


def test_a_wrong_result_gets_no_time(monkeypatch):
    monkeypatch.setattr(cascade, "SECONDS", 0.01)
    calls_of = cascade.calls_of

    def wrong(*arguments):
        calls = calls_of(*arguments)
        return calls | {"tilewise": lambda: calls["tilewise"]() + 1}

    monkeypatch.setattr(cascade, "calls_of", wrong)
    rows = cascade.measure(SMALL, "cpu")
    assert ["ms" in row for row in rows] == [True, False, True]
    assert "error must be at most" in rows[1]["error"]
