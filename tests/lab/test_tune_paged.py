"""The tuner of the paged kernels checks what it times, and keeps to its budget."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.lab.scripts import load
from tilewise.kernels.device import interpreting
from tilewise.kernels.tiles import paged as tiles
from tilewise.kernels.tiles.paged import TileConfig

tune_paged = load("tune_paged")
Candidate, Case = tune_paged.Candidate, tune_paged.Case
pytestmark = pytest.mark.skipif(not interpreting(), reason="kernels are compiled here")
DECODE = Case(2, 4, 2, 300, head_dim=64)
ROWS = Case(2, 2, 1, 60, run=40, head_dim=64)


@pytest.fixture
def few_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_paged, "DECODE_TILES", ((16, 64, 4, 2), (16, 32, 4, 3)))
    monkeypatch.setattr(tune_paged, "ROWS_TILES", ((64, 32, 4, 2),))
    monkeypatch.setattr(tune_paged, "SWEPT_TILES", 1)


@pytest.mark.usefixtures("few_tiles")
def test_every_candidate_is_right_and_the_shipped_one_comes_first() -> None:
    rows = tune_paged.tune([DECODE, ROWS], torch.float32, "cpu", 600, 1 << 18)
    assert all("wrong" not in row for row in rows)
    decode = [row for row in rows if row["case"] == DECODE.name]
    spec = tune_paged.spec_of(DECODE, torch.float32, "cpu")
    assert decode[0]["tile_n"] == tiles.paged_split_config(spec, 1, 90).tile_n
    assert len({(row["tile_n"], row["num_stages"]) for row in decode}) == 3
    assert len({row["num_pairs"] for row in decode}) > 1
    assert [row["tile_m"] for row in rows if row["case"] == ROWS.name] == [
        tiles.paged_rows_config(spec, 90).tile_m,
        64,
    ]


@pytest.mark.parametrize("cache", ["int8", "float8_e4m3fn"])
def test_wide_heads_have_tiles_of_their_own(monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    monkeypatch.setattr(tune_paged, "WIDE_DECODE_TILES", ((16, 64, 4, 2),))
    monkeypatch.setattr(tune_paged, "SWEPT_TILES", 0)
    case = Case(2, 4, 2, 100, head_dim=272, v_head_dim=64, cache=cache)
    rows = tune_paged.tune([case], torch.bfloat16, "cpu", 600, 1 << 18)
    assert all("wrong" not in row for row in rows)
    assert [row["tile_n"] for row in rows] == [32, 64]
    assert case.cache_values == 2 * 100 * 2 * (272 + 64)


@pytest.mark.usefixtures("few_tiles")
def test_one_candidate_per_case_when_the_budget_is_spent() -> None:
    rows = tune_paged.tune([DECODE, ROWS], torch.float32, "cpu", 0, 1 << 18)
    assert [row["case"] for row in rows] == [DECODE.name, ROWS.name]


def test_a_wrong_result_gets_no_time() -> None:
    inputs = tune_paged.make_inputs(DECODE, torch.float32, "cpu", 1 << 18)
    inputs.truth += 1
    inputs.eager += 1
    plan = tiles.plan_splits(inputs.spec, TileConfig(16, 64, 4, 2), 1, 4)
    row = tune_paged.measure(DECODE, inputs, Candidate("any", TileConfig(16, 64, 4, 2), plan))
    assert "error must be at most" in row["wrong"]
    assert "us" not in row


def test_a_refused_configuration_says_why() -> None:
    inputs = tune_paged.make_inputs(DECODE, torch.float32, "cpu", 1 << 18)
    plan = tiles.plan_splits(inputs.spec, TileConfig(16, 48, 4, 2), 1, 4)
    row = tune_paged.measure(DECODE, inputs, Candidate("any", TileConfig(16, 48, 4, 2), plan))
    assert "power of 2" in row["wrong"]


def test_flops_count_visible_pairs() -> None:
    assert Case(1, 2, 1, 5, run=3, head_dim=8).flops == 4 * 2 * 8 * (3 + 4 + 5)
