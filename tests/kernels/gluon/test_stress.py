"""Runs of one call give the same bits, however often: a short form of benchmarks/stress_kernels.py.

On a GPU two minutes in all; how results are compared is tested anywhere.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import kernel_stress
from tests.kernels.kernel_stress import Prepared, stress

SECONDS = 4.0  # a case
SHORT = (
    "forward/packed_causal", "forward/packed_short", "forward/packed_short_d64",
    "forward/packed_short_d256", "forward/packed_short_latent", "forward/more_tiles_than_ctas",
    "forward/every_feature", "backward/packed_short", "backward/window_d128",
    "backward_in_order/packed_short", "backward_in_order/mask_d128", "backward/wide_causal",
    "few/causal", "8_bits/short", "8_bits/short_d256", "paged_int8/decode", "paged_e4m3/drafts",
    "latents/more_items_than_shares", "latents/small_blocks",
    "latents_of_8_bits/more_items_than_shares", "triton/packed_short",
    "triton_paged/decode", "triton_latents/576_and_512",
)  # fmt: skip


def sums(values: list[float]) -> Prepared:
    """Give these values in turn, with something that is never written twice."""
    turn = iter(range(1 << 30))

    def run() -> dict[str, torch.Tensor]:
        value = values[next(turn) % len(values)]
        o = torch.ones(3, 4)
        o[1, 2] = value
        return {"o": o, "lse": torch.zeros(3)}

    return Prepared(run)


def test_a_difference_is_counted_and_shown() -> None:
    found = stress("case", sums([1.0] * 9 + [1.5]), seconds=60, most_runs=100)
    assert (found.runs, found.differing, found.graph) == (100, 10, False)
    [report] = found.first
    assert report["result"] == "o"
    assert report["elements"] == 1
    assert report["largest"] == 0.5
    assert [axis["first"] for axis in report["where"]] == [[1], [2]]


def test_equal_runs_are_equal_nan_or_not() -> None:
    for value in (1.0, float("nan"), float("-inf")):
        found = stress("case", sums([value]), seconds=60, most_runs=20)
        assert (found.differing, found.first) == (0, [])


def test_nan_is_a_difference_and_not_zero_from_minus_zero_alone() -> None:
    for other in (float("nan"), 1.0 + 2**-23):
        found = stress("case", sums([1.0, other]), seconds=60, most_runs=20)
        assert found.differing == 10


def test_sums_in_another_order_may_differ_a_little() -> None:
    def rounded(values: list[float]) -> Prepared:
        return Prepared(sums(values).run, frozenset({"o"}))

    assert stress("case", rounded([1.0, 1.001]), seconds=60, most_runs=20).differing == 0
    assert stress("case", rounded([1.0, 1.2]), seconds=60, most_runs=20).differing == 10
    assert stress("case", rounded([1.0, float("nan")]), seconds=60, most_runs=20).differing == 10


def test_what_a_run_does_not_write_is_seen() -> None:
    memory = torch.ones(4)
    turn = iter(range(1 << 30))

    def run() -> dict[str, torch.Tensor]:
        memory[: 3 if next(turn) > 1 else 4] = 1.0  # the last one is left as it was
        return {"o": memory}

    assert stress("case", Prepared(run), seconds=60, most_runs=5).differing > 0


def test_the_cases_have_names_of_their_own() -> None:
    names = [name for name, _ in kernel_stress.gpu_cases()]
    assert len(set(names)) == len(names)
    assert set(SHORT) <= set(names)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_every_run_gives_the_same(name: str) -> None:
    cases = dict(kernel_stress.gpu_cases())
    found = stress(name, cases[name](), SECONDS)
    assert found.differing == 0, found
    assert found.runs > 100
