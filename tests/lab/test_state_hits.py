"""The measurement of hits of models with states, at small sizes."""

from __future__ import annotations

import json

from lab import state_hits


def test_prompts_that_are_alike_are_found_and_answered_alike(tmp_path):
    found = tmp_path / "found.json"
    small = ["--requests", "4", "--length", "200", "--tokens", "3"]
    state_hits.main([*small, "--hidden", "128", "--json", str(found)])
    rows = json.loads(found.read_text())["rows"]
    assert rows["none alike"]["hit_share"] == 0
    assert rows["90 % alike"]["hit_share"] > 0.25
