"""Which replica a request goes to: kept beginnings against work, what is evicted, who leaves."""

from __future__ import annotations

import random

import pytest

from tilewise.cluster.router import Asked, PrefixRouter, RoundRobin


def asked(name: str, pieces: int = 4, own: int = 0, output: int | None = 10) -> Asked:
    """Return a prompt of pieces of 64 tokens that all prompts of that name begin with."""
    chain = tuple(hash((name, i)) for i in range(pieces))
    return Asked(chain, 64, 64 * pieces + own, output)


@pytest.fixture
def router():
    router = PrefixRouter()
    for name in "abc":
        router.join(name)
    return router


def send(router, ticket, what, among=None):
    name = router.choose(what, among)
    router.sent(ticket, what, name)
    return name


def test_a_beginning_goes_where_it_is_kept(router):
    first = send(router, 1, asked("x"))
    router.ended(1)
    others = {send(router, i, asked(f"other {i}")) for i in (2, 3)}
    assert others == {"a", "b", "c"} - {first}
    for i in (2, 3):
        router.ended(i)
    for i in range(4, 9):
        assert send(router, i, asked("x", own=30)) == first
        router.ended(i)
    assert router.kept(asked("x", own=30), first) == 256


def test_work_outweighs_a_beginning_and_is_weighed_in_tokens(router):
    # 256 tokens are kept; an answer of 10 counts 20, and computing 30 more until it begins.
    first = send(router, 0, asked("x"))
    router.ended(0)
    places = []
    for i in range(1, 20):
        places.append(send(router, i, asked("x", own=30)))
        router.answers(i)
    # 13 answers of 20 are 260 tokens of work: more than the 256 that another would compute.
    assert places[:13] == [first] * 13
    assert places[13] != first
    assert router.kept(asked("x"), places[13]) == 256  # and is kept there now


def test_a_longer_kept_beginning_wins(router):
    router.sent(0, asked("x", 2), "b")
    router.ended(0)
    router.sent(1, asked("x", 6), "c")
    router.ended(1)
    assert router.kept(asked("x", 8), "b") == 128
    assert router.kept(asked("x", 8), "c") == 384
    assert router.choose(asked("x", 8)) == "c"
    assert router.choose(asked("x", 8), ["a", "b"]) == "b"


def test_an_answer_that_begins_and_ends_is_work_that_is_done(router):
    router.sent("t", asked("x", own=44, output=50), "a")
    assert router.work("a") == 300 + 2 * 50
    router.answers("t")
    assert router.work("a") == 100
    router.answers("t")
    router.ended("t", 50)
    router.ended("t", 50)
    assert router.work("a") == 0


def test_the_length_of_answers_is_learnt_where_requests_do_not_say(router):
    for i in range(400):
        router.sent(i, asked("x", output=None), "a")
        router.ended(i, 20)
    assert router.mean_output == pytest.approx(20, abs=1)
    router.sent("t", asked("y", 1, output=None), "b")
    assert router.work("b") == pytest.approx(64 + 2 * router.mean_output)


def test_the_least_recently_sent_is_forgotten_first(router):
    router.join("a", 64 * 6)
    for ticket, name in enumerate("xy"):
        router.sent(ticket, asked(name, 3), "a")
    router.sent(2, asked("x", 3), "a")
    router.sent(3, asked("z", 2), "a")  # takes the ends of y first
    assert [router.kept(asked(n, 3), "a") for n in "xyz"] == [192, 64, 128]
    router.join("a", 64)  # it keeps less now
    assert router.kept(asked("z", 2), "a") == 64
    with pytest.raises(ValueError, match="capacity must be at least 1 token, got 0"):
        router.join("d", 0)


def test_who_leaves_is_not_chosen_and_its_beginnings_are_gone(router):
    router.sent(1, asked("x"), "b")
    router.leave("b")
    router.leave("b")
    assert router.choose(asked("x")) == "a"
    router.answers(1)
    router.ended(1)  # it ended elsewhere, or not at all
    router.join("b")
    assert router.kept(asked("x"), "b") == 0
    assert router.work("b") == 0
    for name in "abc":
        router.leave(name)
    assert router.choose(asked("x")) is None


def test_what_is_wrong_is_said(router):
    router.sent(1, asked("x"), "a")
    with pytest.raises(ValueError, match="ticket must be a request's own, got 1 again"):
        router.sent(1, asked("x"), "a")
    with pytest.raises(ValueError, match="name must be one of a, b, c, got 'd'"):
        router.sent(2, asked("x"), "d")
    with pytest.raises(ValueError, match="output_weight must be finite"):
        PrefixRouter(output_weight=-1)


def test_any_run_of_events_leaves_sums_that_are_right():
    """Work is that of the unfinished; a piece's holders are those that keep it."""
    draw = random.Random(3)
    router, live, number = PrefixRouter(), {}, 0
    for _ in range(4000):
        what = draw.random()
        if what < 0.05:
            router.join(draw.choice("abcde"), draw.randint(1, 2000))
        elif what < 0.07:
            name = draw.choice("abcde")
            router.leave(name)
            live = {t: n for t, n in live.items() if n != name}
        elif what < 0.55 and router.names:
            number += 1
            one = asked(draw.choice("uvwxyz"), draw.randint(0, 9), draw.randint(0, 99))
            live[number] = send(router, number, one)
        elif live:
            ticket = draw.choice(list(live))
            if draw.random() < 0.5:
                router.answers(ticket)
            else:
                router.ended(ticket, draw.randint(1, 40))
                del live[ticket]
        for name in router.names:
            replica = router._replicas[name]
            mine = [s for s in router._sent.values() if s.name == name]
            assert replica.work == pytest.approx(sum(s.prompt_work + s.output_work for s in mine))
            assert replica.kept_tokens == sum(replica.kept.values()) <= replica.capacity
    assert set(router._sent) == set(live)
    held = {(p, n) for n in router.names for p in router._replicas[n].kept}
    bits = {
        (p, router._by_number[i])
        for p, mask in router._holders.items()
        for i in range(mask.bit_length())
        if mask >> i & 1
    }
    assert held == bits


def test_turns_go_around_whoever_comes_and_leaves():
    router = RoundRobin()
    assert router.choose(asked("x")) is None
    for name in "aab":
        router.join(name)
    assert [send(router, i, asked("x")) for i in range(4)] == ["a", "b", "a", "b"]
    router.join("c")
    assert [send(router, i, asked("x")) for i in range(3)] == ["c", "a", "b"]
    router.leave("c")
    assert send(router, 9, asked("x"), ["b"]) == "b"
    router.answers(9)
    router.ended(9)
    assert router.names == ("a", "b")
