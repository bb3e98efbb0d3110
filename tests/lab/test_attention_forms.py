"""The list of forms of attention names what there is, and a form leaves nothing behind."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from lab import attention_forms as forms
from tilewise.kernels.gluon.backward import plan as bwd_plan
from tilewise.kernels.gluon.forward.kernel import Tile

DOCUMENT = tomllib.loads(Path("lab/attention_forms.toml").read_text())


@pytest.mark.parametrize("name", DOCUMENT["forms"])
def test_every_constant_of_a_form_exists(name: str) -> None:
    for module, constants in DOCUMENT["forms"][name].items():
        if module == "peer":
            assert constants == "fa4"
            continue
        if module == "tile":
            assert constants.keys() <= set(Tile._fields)
            continue
        for constant, value in constants.items():
            now = getattr(importlib.import_module(module), constant)
            assert type(now) is type(value)
            assert now != value, constant


def test_rows_compare_forms_that_there_are() -> None:
    cases = forms.cases_of(DOCUMENT, None)
    assert {name for _, names in cases for name in names} == set(DOCUMENT["forms"])
    assert all(names[0] == "base" for _, names in cases)
    assert forms.cases_of(DOCUMENT, ["short"])[0][0].name == "backward d64 n512 causal plain"


def test_forms_of_another_head_dim_are_left_out() -> None:
    for case, names in forms.cases_of(DOCUMENT, None):
        assert all("@" not in name or name.endswith(f"@{case.d}") for name in names)


def test_forms_that_differ_by_numbers_are_compiled_once() -> None:
    case, names = next(iter(forms.cases_of(DOCUMENT, ["ordered"])))
    assert case.feature == "deterministic"
    own = forms.with_code_of_their_own(names, DOCUMENT["forms"])
    assert own == ["base", "one_sender"]


def test_a_form_is_taken_back() -> None:
    form = {"tilewise.kernels.gluon.backward.plan": {"DROPPING_STAGES": 3}, "tile": {"keys": 64}}
    before = bwd_plan.DROPPING_STAGES
    with forms.applied(form) as tile:
        assert bwd_plan.DROPPING_STAGES == 3
        assert tile == {"keys": 64}
    assert before == bwd_plan.DROPPING_STAGES


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "TOKENS", 64)
    monkeypatch.setattr(forms, "CHANNELS", 128)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    runs = forms.Runs(forms.Case("backward", 64, 32, True, "plain"), "cpu")
    with pytest.raises(ModuleNotFoundError):
        runs.add("fa4", DOCUMENT["forms"]["fa4"])
    assert "fa4" not in runs.calls
    assert forms.with_code_of_their_own(["fa4"], DOCUMENT["forms"]) == []


def test_flops_are_the_papers() -> None:
    case = forms.Case("backward", 64, 1024, True, "plain")
    assert case.tera == pytest.approx(2.5 * 4 * 16384 * 1024 * 2048 / 2 / 1e12)


def test_a_case_has_the_tensors_of_its_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "TOKENS", 64)
    monkeypatch.setattr(forms, "CHANNELS", 128)
    inputs = forms.Inputs(forms.Case("forward", 64, 32, True, "own bias"), "cpu")
    bias = inputs.tensors(inputs.spec).bias
    assert bias is not None
    assert bias.shape == (2, 2, 32, 32)
    assert inputs.tensors(inputs.plain).bias is None
    drops = forms.Inputs(forms.Case("forward", 64, 32, True, "dropout"), "cpu")
    assert torch.is_tensor(drops.tensors(drops.spec).philox)
    assert drops.spec.dropout_threshold > 0


def test_forms_without_ways_and_with_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of lists, as TOML has it, is as good as one of `Way`."""
    monkeypatch.setattr(torch, "randn", lambda size, generator, **more: torch.empty(size, **more))
    spec, found = forms.Inputs(forms.Case("backward", 64, 1024, True, "plain"), "cpu").spec, {}
    for name in ("base", "closed", "behind1"):
        with forms.applied(DOCUMENT["forms"][name]):
            variant = bwd_plan.variant_of(spec)
            turns = bwd_plan.turns_of(spec, variant, 1, 132)
            found[name] = turns.each, turns.behind, variant.passes_by
    assert found == {"base": (2, 2, True), "closed": (1, 2, False), "behind1": (2, 1, True)}
