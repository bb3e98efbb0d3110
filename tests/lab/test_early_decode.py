"""Forms of a decode step that are timed beside one another: what they change, which is chosen."""

from __future__ import annotations

import pytest

from tests.lab.scripts import load
from tilewise.bench.engines.shapes import SHAPES, read_sizes
from tilewise.kernels import early
from tilewise.kernels.tiles import linear_rows, paged
from tilewise.kernels.triton.paged import decode

early_decode = load("early_decode")


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "llama-3-8b"])
def test_a_form_is_there_while_it_is_applied_and_gone_afterwards(shape):
    variants = early_decode.variants_of(read_sizes(SHAPES[shape]))
    assert next(iter(variants)) == "off"

    def state():
        return (
            early.CHOSEN, dict(linear_rows._TABLE), decode.KEYS_AHEAD, linear_rows.leaves_parts,
            paged.paged_split_config, paged.RESIDENT_PROGRAMS, paged.fills_whole,
            early.CHOSEN_LARGE,
        )  # fmt: skip

    before = state()
    for name, variant in variants.items():
        with early_decode.applied(variant):
            with early.launching():
                assert early.mode("norm") == variant.modes.get("norm", early.OFF), name
            for (outputs, channels), tile in variant.tiles.items():
                assert linear_rows.tile_of(outputs, channels) == tile
                assert linear_rows.stages_of(tile, 32, channels) >= 2
                leaves = linear_rows.leaves_parts(outputs, channels)
                assert leaves == (tile.parts > 1 and not variant.merges), name
        assert state() == before
    with pytest.raises(KeyError), early_decode.applied(variant):
        raise KeyError
    assert state() == before


def test_the_fastest_forms_are_taken_together():
    sizes = read_sizes(SHAPES["qwen3-0.6b"])
    variants = early_decode.variants_of(sizes)
    rows = {name: {"us": 100.0} for name in variants}
    assert early_decode.best_of(rows, variants, sizes) == variants["first"]
    rows |= {name: {"us": 90.0} for name in ("o 8/1", "128 keys", "norm after")}
    rows |= {"down 8/1": {"us": 110.0}, "qkv 1/1": {"error": "the time was over"}}
    best = early_decode.best_of(rows, variants, sizes)
    assert best.tiles == variants["o 8/1"].tiles
    assert (best.keys, best.modes["norm"], best.modes["rope"]) == (128, early.AFTER, early.FIRST)
