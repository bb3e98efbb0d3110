"""The bench of decoding gives numbers to right results only, and lists what it promises."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.lab.scripts import load
from tilewise.bench.roofline import Ceilings

paged = load("paged")
CEILINGS = Ceilings("cpu", "a processor", torch.__version__, 1e12, 1e10, 1e10)
SMALL = paged.Case("small", (70, 70), 4, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_ours_is_right_in_every_cache(dtype: torch.dtype) -> None:
    rows = paged.measure(replace(SMALL, dtype=dtype), paged.OURS, CEILINGS, 1, "cpu")
    assert [(row["peer"], row["error"]) for row in rows] == [(peer, None) for peer in paged.OURS]


def test_peers_that_do_not_apply_have_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "find_spec", lambda name: None)
    peers = ("sdpa_contiguous", "fa3")
    assert [row["peer"] for row in paged.measure(SMALL, peers, CEILINGS, 1, "cpu")] == [peers[0]]
    mixed = replace(SMALL, lengths=(70, 20))
    assert paged.measure(mixed, peers, CEILINGS, 1, "cpu") == []


def test_wrong_results_and_refusals_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(inputs: paged.Inputs) -> paged.Call:
        return lambda index: torch.zeros_like(inputs.q)

    def refusing(inputs: paged.Inputs) -> paged.Call:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setitem(paged.PEERS, "wrong", wrong)
    monkeypatch.setitem(paged.PEERS, "refusing", refusing)
    rows = paged.measure(SMALL, ("wrong", "refusing"), CEILINGS, 1, "cpu")
    assert [row["error"] for row in rows] == [
        "wrong by 1.0e+00",
        "RuntimeError: no kernel for this",
    ]
    assert not any("us" in row for row in rows)


def test_wide_heads_are_measured_over_every_cache() -> None:
    cases = [case for _, case in paged.cases_of(("wide",))]
    assert {case.head_dim for case in cases} == {512}
    assert len({(case.lengths, case.num_q_heads, case.num_kv_heads) for case in cases}) == 9
    assert len(cases) == 3 * 9
    wide = replace(SMALL, head_dim=40)
    assert paged.Inputs(wide, 1, "cpu").num_bytes == 2 * 140 * 2 * 40 * 2
    rows = paged.measure(wide, paged.OURS, CEILINGS, 1, "cpu")
    assert [row["error"] for row in rows] == [None, None]


def test_every_block_size_reads_the_same_keys() -> None:
    cases = [case for table, case in paged.cases_of(("blocks",))]
    assert {case.lengths for case in cases} == {(4096,) * 64}
    assert [case.block_size for case in cases] == [4096, 1, 2, 4, 8, 16, 32, 64, 128, 256]


def test_the_plot_is_drawn_from_the_rows_of_a_result(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = Path(__file__).resolve().parents[2] / "lab" / "plots" / "decode_plots.py"
    spec = importlib.util.spec_from_file_location("decode_plots", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    row = {"table": "decode", "case": "one", "peer": "tilewise", "asked": "3 TB/s", "TB/s": 2.0}
    rows = [row | {"us": 1.0}, row | {"peer": "fa3", "error": "refused"}]
    for size in (4096, 16, 1):
        rows.append({"table": "blocks", "peer": "tilewise", "block_size": size, "us": 1.0})
    document = {"rows": rows, "ceilings": {"read_bytes": 4e12}}
    (tmp_path / "result.json").write_text(json.dumps(document))
    module.draw(tmp_path / "result.json", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
