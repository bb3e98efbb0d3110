"""The accuracy of 8-bit latents: why each part of a row has a scale of its own."""

from __future__ import annotations

import json

from tests.lab.scripts import load

latents = load("latents")


def test_one_scale_loses_the_latents_beside_larger_keys(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(latents, "TOKENS", 256)
    path = tmp_path / "errors.json"
    assert latents.main(["--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == rows
    assert len(rows) == 12
    for row in rows:
        assert row["bfloat16"] < row["bfloat16 keys"] <= row["two scales"] * 1.05
        if row["dtype"] == "int8" and row["k_rope / z"] == 16:
            assert row["one scale"] > 5 * row["two scales"]
