"""How many replicas queues, seats and caches ask for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tilewise.cluster.autoscale import TARGET, load_of, policy, wanted_replicas


@pytest.mark.parametrize(
    ("running", "waiting", "used", "load"),
    [(0, 0, 0.0, 0.0), (4, 0, 0.1, 0.5), (8, 8, 0.3, 2.0), (1, 0, 0.9, 0.9), (0, 0, 1.0, 1.0)],
)
def test_a_load_is_seats_or_cache_whichever_is_scarcer(running, waiting, used, load):
    assert load_of(running, waiting, 8, used) == load


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [([], 1), ([0.0, 0.0], 1), ([TARGET], 1), ([TARGET] * 3, 3), ([0.71], 2), ([3.0, 0.5], 5)],
)
def test_the_mean_is_brought_to_the_target(loads, wanted):
    assert wanted_replicas(loads) == wanted


def context(loads, current, least=1, most=8):
    return SimpleNamespace(
        aggregated_metrics={"load": dict(enumerate(loads))}, current_num_replicas=current,
        capacity_adjusted_min_replicas=least, capacity_adjusted_max_replicas=most,
    )  # fmt: skip


def test_bounds_hold_and_who_says_nothing_counts_as_it_should_be():
    assert policy(context([5.0], 1)) == (8, {})
    assert policy(context([0.0, 0.0], 2, least=2)) == (2, {})
    assert policy(context([2.0], 3)) == (5, {})  # 2 / 0.7 and two of which nothing is known
    nothing = context([], 3)
    nothing.aggregated_metrics = None
    assert policy(nothing) == (3, {})
