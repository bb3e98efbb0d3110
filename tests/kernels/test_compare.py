"""The comparison of runs in one launch counts, keeps and overwrites as torch's operators do."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.compare import TILE, compare
from tests.kernels.kernel_stress import Watch, bits, flat

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def first_results() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    o = torch.randn(3, 70, 4, 8, generator=generator).bfloat16()
    lse = torch.randn(3, 4, 70, generator=generator)
    lse[0, 1, :5] = -math.inf
    o[2, 3, 1, 5] = math.nan
    dq = torch.randn(2, 9, 5, generator=generator).half().transpose(0, 2)
    gaps = torch.randn(5, 12, generator=generator)[:, :7]
    results = {"o": o, "lse": lse, "dq": dq, "gaps": gaps}
    return {name: x.to(DEVICE) for name, x in results.items()}


def like(x: Tensor) -> Tensor:
    """Return a copy that lies in memory as x does, gaps included."""
    if flat(x) is not None:
        return x.clone()
    wide = torch.zeros(5, 12, device=x.device)
    wide[:, :7] = x
    return wide[:, :7]


def spoiled(run: int) -> dict[str, Tensor]:
    results = {name: like(x) for name, x in first_results().items()}
    if run == 2:
        results["lse"][2, 3, 69] += 1e-6
    if run == 3:
        results["o"][2, 69, 3, 7] = math.nan
        results["gaps"][4, 6] = 0.0
    if run == 4:
        results["dq"] *= 1.001  # within rounding
    if run == 5:
        results["dq"][4, 8, 1] = 1e4
    if run == 6:
        results["dq"][0, 0, 0] = math.nan
    return results


def test_kernels_and_operators_say_the_same() -> None:
    kernels = Watch(first_results(), frozenset({"dq"}))
    operators = Watch(first_results(), frozenset({"dq"}))
    for run in range(8):
        got, twin = spoiled(run), spoiled(run)
        kernels.look_in_kernels(got)
        operators.look_in_torch(twin)
        assert kernels.differing == operators.differing == [0, 0, 1, 2, 2, 3, 4, 4][run]
        for name, x in got.items():
            assert x.isnan().all(), name
            assert twin[name].isnan().all(), name
        for name, kept in kernels.kept.items():
            assert torch.equal(bits(kept), bits(operators.kept[name])), name
    assert [report["result"] for report in kernels.first()] == ["lse"]


@pytest.mark.parametrize("size", [1, TILE - 1, TILE, TILE + 1, 3 * TILE])
def test_the_last_element_is_compared_and_nothing_after_it_is_written(size: int) -> None:
    memory = torch.ones(size + 4, device=DEVICE)
    want, kept = torch.ones(size, device=DEVICE), torch.ones(size, device=DEVICE)
    state = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    compare(memory[:size], want, kept, None, state)
    assert state.tolist() == [0, 0]
    assert memory[:size].isnan().all()
    assert memory[size:].tolist() == [1.0] * 4
    memory.fill_(1.0)
    memory[size - 1] = 2.0
    compare(memory[:size], want, kept, None, state)
    assert state.tolist() == [0, 1]
    assert kept[size - 1] == 2.0
    assert kept[: size - 1].eq(1.0).all()


def test_bytes_are_refused() -> None:
    x = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    with pytest.raises(TypeError, match="floats of 2 or 4 bytes"):
        compare(x, x, x, None, x)
