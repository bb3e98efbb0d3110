"""lab/recurrent.py: its check of bits sees a difference, and its lines have both sides."""

from __future__ import annotations

import pytest
import torch

from lab import recurrent


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(recurrent.SHAPES, "delta", ((1, 2, 16, 16), True))
    monkeypatch.setitem(recurrent.SHAPES, "mamba", ((1, 2, 16, 16), False))


@pytest.mark.parametrize("shape", ["delta", "mamba"])
def test_a_difference_of_bits_is_seen(shape, monkeypatch):
    assert recurrent.has_one_set_of_bits(shape, "cpu")
    right = recurrent.whole
    monkeypatch.setattr(recurrent, "whole", lambda *x: torch.nextafter(right(*x), right(*x) + 1))
    assert not recurrent.has_one_set_of_bits(shape, "cpu")


def test_prompts_and_steps_run_beside_the_peer():
    pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    calls = recurrent.prompt_calls("delta", [20, 3], "cpu")
    assert list(calls) == ["ours", "ours with backward", "peer", "peer with backward"]
    for call in calls.values():
        call()
    rows = recurrent.draw("delta", 3, "cpu")
    peer = recurrent.peer_step_of("cpu", True, rows)
    assert peer is not None
    assert peer()[0].shape == (3, 1, 2, 16)
    assert (
        recurrent.stepper(rows, recurrent.slots_of("delta", 3, "cpu"), 7, True)().isfinite().all()
    )
