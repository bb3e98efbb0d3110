"""What computing again takes: a step's own time and one for each token, whatever was compiled."""

from __future__ import annotations

import pytest

from tilewise.engine.tables.rates import MOST_STEPS, Rates


def measured(steps, **settings):
    rates = Rates(prefill_tokens=1000.0, **settings)
    for tokens, seconds in steps:
        rates.note(tokens, seconds)
    return rates


def test_a_step_has_a_time_of_its_own():
    """6 ms a step and 4 us a token: short prompts do not make long ones look slow."""
    rates = measured([(n, 0.006 + 4e-6 * n) for n in (64, 64, 64, 70, 64, 1024, 100)])
    assert rates.recompute_seconds(64) == pytest.approx(0.006256)
    assert rates.recompute_seconds(4096) == pytest.approx(0.022384)


def test_long_prompts_are_several_steps():
    rates = measured([(10, 0.003), (20, 0.004)], max_step_tokens=100)
    assert rates.recompute_seconds(250) == pytest.approx(3 * 0.002 + 250 * 1e-4)


def test_what_was_compiled_says_nothing():
    steps = [(n, 0.001 + 1e-5 * n) for n in (10, 50, 90, 200, 300)]
    rates = measured([(40, 30.0), *steps, (250, 9.0)])
    assert rates.recompute_seconds(1000) == pytest.approx(0.011, rel=0.05)


def test_steps_of_one_size_leave_the_rate():
    assert measured([(64, 0.1)] * 5).recompute_seconds(500) == 0.5
    assert Rates().recompute_seconds(500) == 0.0


def test_no_time_is_below_zero_and_old_steps_are_forgotten():
    assert measured([(10, 0.5), (20, 0.1)]).recompute_seconds(30) == pytest.approx(0.3)
    steps = [(n, 1.0 * n) for n in range(1, 5)] + [(n, 0.001 * n) for n in range(1, MOST_STEPS + 1)]
    assert measured(steps).recompute_seconds(10) == pytest.approx(0.01)
