"""What a test leaves on a GPU is given back when it ends, what failed in it included."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch

from tests import card


class Item:
    """A test that has one mark."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def get_closest_marker(self, name: str) -> str | None:
        return name if name == self.mark else None


@pytest.mark.parametrize(
    ("mark", "kept_bytes", "is_given_back"),
    [("large", 1, True), ("large", 0, False), ("gpu", 1 << 30, False), ("gpu", 1 << 31, True)],
)
def test_tensors_of_a_failure_are_given_back(monkeypatch, mark, kept_bytes, is_given_back):
    given_back = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: kept_bytes)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(watched() is None))
    for name in ("last_exc", "last_traceback", "last_type", "last_value"):
        monkeypatch.setitem(vars(sys), name, None)  # and as it was afterwards

    def failing():
        tensor = torch.zeros(3)
        reference = weakref.ref(tensor)
        raise ValueError(reference)

    with card.turn_of(Item(mark)):
        try:
            failing()
        except ValueError as error:  # as pytest leaves it to a debugger
            (watched,) = error.args
            sys.last_value, sys.last_traceback = error, error.__traceback__
    gc.collect(1)  # what is young: all that other tests have made took 0.4 s of a core
    assert given_back == [True] * is_given_back
    assert (watched() is None) == is_given_back
