"""`lab/context.py`: rows beside one device, and none for a wrong result."""

from __future__ import annotations

import json

import pytest
import torch

from lab import context
from tests.lab.spawned import spawn


@pytest.mark.parametrize("processes", ["warm", pytest.param("spawned", marks=pytest.mark.slow)])
def test_rows_of_two_processes(capsys, monkeypatch, processes):
    """Every day they have imported torch before."""
    if processes == "warm":
        monkeypatch.setattr(context.mp, "spawn", spawn)
    arguments = ["--device", "cpu", "--tokens", "32", "--heads", "4", "2", "--head-dim", "16",
                 "--dtype", "float32", "--repeats", "1"]  # fmt: skip
    assert context.main(arguments) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["method"] for row in document["rows"]] == [
        "ring", "gather", "ulysses", "torch",
    ]  # fmt: skip
    for row in document["rows"]:
        assert "error" not in row
        assert row["forward ms"] > 0
        assert row["x one device"] > 0


def test_rows_of_packed_documents(capsys, monkeypatch):
    monkeypatch.setattr(context.mp, "spawn", spawn)
    arguments = ["--device", "cpu", "--tokens", "32", "--heads", "4", "2", "--head-dim", "16",
                 "--dtype", "float32", "--repeats", "1", "--documents", "19", "3",
                 "--unchecked"]  # fmt: skip
    assert context.main(arguments) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    *rows, torchs = document["rows"]
    assert [row["method"] for row in rows] == ["ring", "gather", "ulysses"]
    for row in rows:
        assert "error" not in row
        assert row["layout"] in ("zigzag", "documents")
        assert row["x one device"] > 0
    assert torchs["error"] == "torch's context_parallel has no packed documents"
    assert not document["checked"]


def test_documents_fill_the_tokens_of_all_ranks():
    assert context._edges([5, 2], 16) == [0, 5, 7, 12, 14, 16]
    assert context._edges([16], 16) == [0, 16]


def test_a_wrong_result_has_no_numbers():
    right = tuple(torch.ones(1, 4, 2, 8) for _ in range(4))
    assert context._difference(right, right) is None
    wrong = (*right[:2], 1.1 * right[2], right[3])
    assert "dk must equal one device's" in context._difference(wrong, right)
    lost = (right[0] * torch.nan, *right[1:])
    assert "o must equal" in context._difference(lost, right)


def test_more_ranks_than_gpus_are_refused(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit):
        context.main(["--device", "cuda", "--ranks", "2"])
    assert "--ranks must be at most the GPUs, got 2" in capsys.readouterr().err


def test_rows_are_written_as_they_come_and_none_begins_when_time_is_over(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(context.mp, "spawn", spawn)
    arguments = ["--device", "cpu", "--tokens", "32", "--heads", "2", "2", "--head-dim", "16",
                 "--dtype", "float32", "--repeats", "1", "--methods", "ring", "ulysses",
                 "--seconds", "1e-9", "--json", str(tmp_path / "rows.json")]  # fmt: skip
    assert context.main(arguments) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["error"] for row in rows] == ["not measured: no time was left"] * 2
