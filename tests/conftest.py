"""Shared test set-up: fixed seeds, Triton's interpreter on a CPU, NaN-poisoned allocations.

Processes that run tests side by side share the cores: with as many threads as there are cores in
each, they mostly wait for one another. Tests of threads ask for their number themselves.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

# Must be set before torch is imported; processes that tests start inherit it.
if (count := os.environ.get("PYTEST_XDIST_WORKER_COUNT")) is not None:
    share = max(1, (os.cpu_count() or 1) // int(count))
    os.environ.setdefault("OMP_NUM_THREADS", str(share))

import torch

# Must be set before triton is imported; on a machine with a GPU the kernels are compiled instead.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from torch.utils._python_dispatch import _disable_current_modes

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    from tests.kernels import interpreter

    interpreter.repair()

# torch remembers at the first use of a device context which functions make tensors; that must
# happen before the poison below puts its own function in place of torch.empty.
with torch.device("meta"):
    torch.empty(0)


def _called_from_tilewise() -> bool:
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name.startswith("tilewise.") and name != "tilewise.testing"


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """An output that a kernel forgets to write must show, so fresh float memory is NaN."""
    if tensor.is_floating_point() and tensor.device.type != "meta":
        if type(tensor) is not torch.Tensor:
            return tensor.fill_(float("nan"))
        with _disable_current_modes():  # who watches what the package does should not see it
            tensor.fill_(float("nan"))
    return tensor


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch.Tensor, "new_empty"),
    ):
        original = getattr(owner, name)

        def poisoned(*args, _original=original, **kwargs):
            tensor = _original(*args, **kwargs)
            if not torch.compiler.is_compiling() and _called_from_tilewise():
                return _poison(tensor)
            return tensor

        monkeypatch.setattr(owner, name, poisoned)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)
