"""The counting memory counts what it says."""

from __future__ import annotations

import pytest
import torch

from tilewise.reference.memory import Memory


def test_loads_and_stores_count_elements():
    memory = Memory(a=torch.arange(12.0).view(3, 4))
    tile = memory.load("a", slice(0, 2), slice(1, 3))
    assert tile.tolist() == [[1, 2], [5, 6]]
    memory.store("a", -tile, slice(1, 3), slice(0, 2))
    assert (memory.loads, memory.stores, memory.accesses) == (4, 4, 8)
    assert memory["a"].tolist() == [[0, 1, 2, 3], [-1, -2, 6, 7], [-5, -6, 10, 11]]


def test_a_tile_is_a_copy():
    memory = Memory(a=torch.zeros(2, 2))
    memory.load("a").add_(1)
    assert not memory["a"].any()


def test_initial_values_cost_stores_and_outputs_are_not_extra():
    memory = Memory(a=torch.zeros(2, 2))
    memory.alloc("extra", 3, 2)
    assert memory["extra"].isnan().all()
    memory.alloc("o", 5, 5, fill=0.0, output=True)
    assert (memory.stores, memory.peak_extra) == (25, 6)
    memory.alloc("extra", 1, 1)
    memory.alloc("more", 2, 1)
    assert memory.peak_extra == 6


def test_sram_peak_is_the_most_at_once():
    memory = Memory(a=torch.zeros(4, 4))
    memory.load("a", slice(0, 2))
    memory.keep("s", torch.zeros(3, 3))
    memory.keep("s", torch.zeros(1, 1))
    memory.drop("a")
    memory.load("a")
    assert memory.peak_sram == 17
    with pytest.raises(KeyError):
        memory.drop("unknown")


def test_a_store_of_the_wrong_shape_is_refused():
    memory = Memory(a=torch.zeros(2, 2))
    with pytest.raises(AssertionError):
        memory.store("a", torch.zeros(1, 2))
