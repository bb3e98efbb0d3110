"""lab/adapters.py: each case of the engine runs, and shapes are those of a layer's products."""

from __future__ import annotations

from argparse import Namespace

from tests.lab.scripts import load

adapters = load("adapters")


def test_each_case_has_a_rate():
    options = Namespace(
        device="cpu", shape="tiny", dtype="float32", rows=3, adapters=2, rank=16, prompt=8,
        tokens=6, turns=1,
    )  # fmt: skip
    rates = dict(adapters.engines(options))
    assert set(rates) == {"base", *adapters.WANTED}
    assert all(rate > 0 for rate in rates.values())


def test_layers_are_those_of_a_llama():
    layers = adapters.layers(Namespace(shape="llama-3-8b"))
    assert layers["qkv"] == (4096, (0, 4096, 5120, 6144))
    assert layers["gate_up"] == (4096, (0, 14336, 28672))
    assert layers["down"] == (14336, (0, 4096))
