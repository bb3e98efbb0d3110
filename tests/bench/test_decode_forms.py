"""benchmarks/decode_forms.py: its forms are of constants that there are."""

from __future__ import annotations

import importlib
import tomllib

import pytest

from tests.bench.scripts import ROOT, load

pytest.importorskip("triton")

decode_forms = load("decode_forms")
FORMS = tomllib.loads((ROOT / "benchmarks" / "step_forms.toml").read_text())


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_applied_and_taken_back(name):
    def values():
        return {
            (module, constant): getattr(importlib.import_module(module), constant)
            for module, constants in FORMS[name].items()
            for constant in constants
        }

    before = values()
    with decode_forms.applied(FORMS[name]):
        for (module, constant), value in values().items():
            assert value == FORMS[name][module][constant]
            assert type(value) is type(before[module, constant])
    assert values() == before
