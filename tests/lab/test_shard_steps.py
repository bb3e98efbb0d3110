"""lab/shard_steps.py: one rank's rows, and ways that there are none of."""

from __future__ import annotations

import json
import sys

import pytest

from tests.kernels import interpreter
from tests.lab.scripts import load

shard_steps = load("shard_steps")
ONE = ["--ranks", "1", "--device", "cpu", "--shape", "story", "--layers", "1", "--batch", "1"]


def test_one_rank_writes_its_rows(monkeypatch, tmp_path, capsys):
    pytest.importorskip("triton")
    interpreter.repair()
    path = tmp_path / "rows.json"
    more = ["--context", "32", "--rounds", "1", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["shard_steps", *ONE, *more])
    shard_steps.main()
    [row] = json.loads(path.read_text())["rows"]
    assert (row["way"], row["ranks"], row["batch"], row["difference"]) == ("before", 1, 1, 0.0)
    assert row["ms"] > 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == [row]


def test_what_one_rank_has_no_rows_of_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["shard_steps", *ONE, "--ways", "alone", "flags"])
    with pytest.raises(SystemExit):
        shard_steps.main()
    told = "--ways must have before for one rank, got alone flags"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "size", "why", "ways"), [
    (["before", "inbox", "alone"], 1, None, ["before"]),
    (["inbox", "alone"], 2, None, ["inbox", "alone"]),
    (["before", "flags", "alone"], 2, "no GPU", ["before", "alone"]),
])  # fmt: skip
def test_ranks_have_the_ways_that_their_memory_allows(asked, size, why, ways):
    assert shard_steps.ways_of(asked, size, why) == ways


def test_ranks_without_an_inbox_say_why_they_have_no_rows():
    with pytest.raises(ValueError, match="before or alone, got inbox flags, as there .* no GPU"):
        shard_steps.ways_of(["inbox", "flags"], 2, "there is no GPU")
