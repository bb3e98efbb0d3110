"""What is sent, and when."""

from __future__ import annotations

import itertools
import statistics

import pytest

from tilewise.bench.trace import TraceRequest, ids_within
from tilewise.bench.workload import (
    Asked,
    arriving,
    conversations,
    drawn_prompts,
    of_trace,
    with_keys,
)

DRAWN = {"words": 5, "shared_words": 3, "max_tokens": 4, "temperature": 1.0}


def gaps(asked):
    times = [one.seconds for one in asked]
    return [b - a for a, b in itertools.pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_have_the_rate_and_the_spread_that_were_asked_for(burstiness):
    asked = arriving(drawn_prompts(4000, **DRAWN), 20.0, burstiness=burstiness, seed=1)
    found = gaps(asked)
    assert statistics.fmean(found) == pytest.approx(1 / 20, rel=0.1)
    # Of a gamma distribution: the variance is the squared mean over the shape.
    assert statistics.variance(found) == pytest.approx(1 / 400 / burstiness, rel=0.25)


def test_bursts_come_at_once_and_keep_the_rate():
    asked = arriving(drawn_prompts(3000, **DRAWN), 30.0, burst=10)
    found = gaps(asked)
    assert sum(gap == 0 for gap in found) == 2700
    assert asked[-1].seconds == pytest.approx(100, rel=0.2)
    again = arriving(drawn_prompts(3000, **DRAWN), 30.0, burst=10)
    assert again == asked
    for wrong in ({"rate": 0}, {"rate": 1, "burst": 0}, {"rate": 1, "burstiness": -1}):
        with pytest.raises(ValueError, match="must be finite and above 0"):
            arriving(asked, **wrong)


def test_prompts_begin_with_what_they_share():
    asked = drawn_prompts(5, **DRAWN)
    words = [one.body["prompt"].split() for one in asked]
    assert len({tuple(w[:3]) for w in words}) == 1
    assert len({tuple(w) for w in words}) == 5
    assert all(len(w) == 8 for w in words)


def test_turns_follow_their_own_conversation_and_have_its_key():
    asked = conversations(3, 4, **DRAWN, think_s=2.0)
    assert [one.follows for one in asked] == [None] * 3 + list(range(9))
    thinking = [one.think_s for one in asked[3:]]
    assert all(t > 0 for t in thinking)
    timed = arriving(asked, 1.0)
    assert [one.seconds is None for one in timed] == [False] * 3 + [True] * 9
    keyed = with_keys(timed, ["a", "b"])
    assert [one.key for one in keyed] == ["a", "b", "a"] * 4


def test_users_of_a_trace_keep_their_key():
    users = ["z", "a", "z", "m", ""]
    requests = [TraceRequest(float(i), 4, 2, user=user) for i, user in enumerate(users)]
    asked = of_trace(requests, ids_within(50), temperature=0.0, speed=2.0)
    assert [one.seconds for one in asked] == [0, 0.5, 1, 1.5, 2]
    assert all(0 <= t < 50 for one in asked for t in one.body["prompt"])
    keyed = with_keys(asked, ["one", "two"])
    assert keyed[0].key == keyed[2].key == "one"
    assert keyed[1].key == "one"
    assert keyed[3].key == "two"
    assert isinstance(keyed[4], Asked)
