"""launching_early: on Hopper alone, for this thread, and only inside of it."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from tilewise import ops
from tilewise.kernels import early

module = import_module("tilewise.ops.early")


@pytest.mark.parametrize(("arch", "mode"), [(80, early.OFF), (90, early.FIRST), (100, early.OFF)])
def test_kernels_begin_early_where_that_has_been_measured(arch, mode, monkeypatch):
    monkeypatch.setattr(module.device, "arch_of", lambda _: arch)
    with ops.launching_early(torch.device("cuda")):
        assert early.mode("attention") == mode
        with ops.launching_early(torch.device("cpu")):
            assert early.mode("attention") == mode
    assert early.mode("attention") == early.OFF


def test_large_weights_let_the_next_kernel_begin_later(monkeypatch):
    monkeypatch.setattr(module.device, "arch_of", lambda _: 90)
    for elements, modes in ((early.LARGE - 1, early.CHOSEN), (early.LARGE, early.CHOSEN_LARGE)):
        with ops.launching_early(torch.device("cuda"), largest_weight=elements):
            assert {kind: early.mode(kind) for kind in modes} == modes


def test_what_was_written_settles_where_kernels_begin_early(monkeypatch):
    launched = []
    monkeypatch.setattr(module.torch, "empty", lambda *_, **__: launched.append(1) or torch.ones(1))
    ops.settle(torch.device("cpu"))
    assert launched == []
    with early.launching():
        ops.settle(torch.device("cpu"))
    assert launched == [1]
