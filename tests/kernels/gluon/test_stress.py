"""Runs of one call give the same bits, however often: a short form of lab/stress_kernels.py.

On a GPU two minutes in all, where the kernels are compiled; how results are compared is tested
anywhere.
"""

from __future__ import annotations

import time

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import kernel_stress
from tests.kernels.kernel_stress import Prepared, stress

SECONDS = 110.0  # for all, from the first case on; what is left is shared by the cases left
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


class Clock:
    """Shares a time among the cases that are left, however long those before have taken."""

    def __init__(self, seconds: float, cases: int) -> None:
        self._left, self._cases = seconds, cases

    def share(self) -> float:
        """Return the seconds of the next case."""
        share = max(0.0, self._left) / max(1, self._cases)
        self._cases -= 1
        return share

    def took(self, seconds: float) -> None:
        """Say how long a case has taken, compiling and comparing with float64 included."""
        self._left -= seconds


def test_the_time_left_is_shared_by_the_cases_left() -> None:
    clock = Clock(100.0, 4)
    assert clock.share() == 25.0
    clock.took(40.0)
    assert clock.share() == 20.0
    clock.took(80.0)
    assert (clock.share(), clock.share()) == (0.0, 0.0)


@pytest.fixture(scope="module")
def clock(request: pytest.FixtureRequest) -> Clock:
    cases = [
        item
        for item in request.session.items
        if item.path == request.path and item.name.startswith("test_every_run")
    ]
    return Clock(SECONDS, len(cases))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_every_run_gives_the_same(name: str, clock: Clock) -> None:
    begin = time.perf_counter()
    share = clock.share()
    prepared = dict(kernel_stress.gpu_cases())[name]()
    want = kernel_stress.first_run(prepared)
    captured = kernel_stress.Captured(prepared, want)
    prepared_in = time.perf_counter() - begin
    found = captured.stress(name, share - prepared_in, most_runs=1 << 60)
    clock.took(time.perf_counter() - begin)
    assert found.differing == 0, found
    assert found.runs > 100
