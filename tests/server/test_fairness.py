"""Shares of keys over the real engine, counted in tokens: no clock has a say."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import httpx
import pytest

from tests.server.serving import serving, wait_for
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.server.command import _settings_of_keys
from tilewise.server.keys import Caller, hash_of

WEIGHTS = {"alice": 1.0, "bob": 3.0}
KEYS = {hash_of(f"key-of-{name}"): Caller(name=name, weight=w) for name, w in WEIGHTS.items()}
TOKENS = 10  # of an answer
PROMPT = "Once upon a time there was"


@pytest.fixture(scope="module")
def llm():
    made = LLM(
        "story", device="cpu", num_blocks=256, max_num_seqs=8, max_num_batched_tokens=64,
        scheduling_policy="fair", user_weights=WEIGHTS,
    )  # fmt: skip
    yield made
    made.close()


@pytest.fixture
def running(llm):
    with serving(AsyncLLM(llm), loop=llm.loop, keys=KEYS) as server:
        yield server


def ask(running, name, tokens=TOKENS, **more):
    return httpx.post(
        f"{running.url}/v1/completions",
        json={"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, **more},
        headers={"authorization": f"Bearer key-of-{name}"},
        timeout=120,
    )


def waiting(running, name):
    jobs = [job for job in list(running.bridge.jobs.values()) if job.caller.name == name]
    return sum(job.first_token is None for job in jobs)


def made(running, name):
    """Tokens that a key's requests were given so far: of those that ended, and that run."""
    ended = running.bridge.ledger.of(name)["generated_tokens"]
    jobs = [job for job in list(running.bridge.jobs.values()) if job.caller.name == name]
    return ended + sum(
        len(c.token_ids) for j in jobs for o in j.outputs.values() for c in o.outputs
    )


@contextmanager
def counting(llm, monkeypatch, count):
    """Let a paused engine draw more than `count` tokens and pause again; count what it draws.

    It stops itself: who only watches may look when no request waits any more. Yields a list of one
    number, tokens drawn so far, and by requests how many were when their first one came.
    """
    step, drawn, first, is_paused = llm.engine.step, [0], {}, threading.Event()

    def counted():
        events = step()
        for event in events:
            first.setdefault(event.request_id, drawn[0])
        drawn[0] += len(events)
        if drawn[0] > count and not is_paused.is_set():
            llm.loop.pause()
            is_paused.set()
        return events

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine, "step", counted)
        llm.loop.resume()
        assert is_paused.wait(120)
        yield drawn, first


def test_two_full_queues_get_tokens_by_their_weights(llm, running, monkeypatch):
    # As many for each as its share needs, and enough more that both still wait at the end.
    counts = {"alice": 60, "bob": 120}
    threads = [
        threading.Thread(target=ask, args=(running, name), kwargs={"seed": i}, daemon=True)
        for name, count in counts.items()
        for i in range(count)
    ]
    llm.loop.pause()
    for thread in threads:
        thread.start()
    wait_for(lambda: len(running.bridge.jobs) == sum(counts.values()), 60)
    wait_for(lambda: llm.loop.num_live == sum(counts.values()), 60)
    with counting(llm, monkeypatch, 1000) as (drawn, _):
        wait_for(lambda: made(running, "alice") + made(running, "bob") == drawn[0])
    assert waiting(running, "alice") > 0
    assert waiting(running, "bob") > 0
    share = made(running, "bob") / made(running, "alice")
    llm.loop.resume()
    for thread in threads:
        thread.join(120)
    assert 3 / 1.05 <= share <= 3 * 1.05


def test_one_who_asks_seldom_is_before_a_flood(llm, running, monkeypatch):
    flood = [threading.Thread(target=ask, args=(running, "bob"), daemon=True) for _ in range(60)]
    llm.loop.pause()
    for thread in flood:
        thread.start()
    wait_for(lambda: llm.loop.num_live == len(flood), 60)
    with counting(llm, monkeypatch, 50) as (drawn, first):
        num_live, before = llm.loop.num_live, drawn[0]
        answers = []
        seldom = threading.Thread(
            target=lambda: answers.append(ask(running, "alice", tokens=1, request_id="seldom"))
        )
        seldom.start()
        wait_for(lambda: llm.loop.num_live == num_live + 1)
        llm.loop.resume()
        for thread in (seldom, *flood):
            thread.join(120)
    [answer] = answers
    assert answer.status_code == 200
    passed = first[f"{answer.json()['id']}@alice"] - before
    # It runs when the first of the eight that run ends: after 8 answers at most, not after 60.
    assert passed < 8 * 2 * TOKENS


def test_weights_ask_for_the_fair_policy():
    assert _settings_of_keys(KEYS, None) == {
        "scheduling_policy": "fair", "user_weights": {"bob": 3.0},
    }  # fmt: skip
    assert _settings_of_keys(KEYS, "fair")["user_weights"] == {"bob": 3.0}
    equal = {hash_of("key-of-carol"): Caller(name="carol")}
    assert _settings_of_keys(equal, "priority") == {}
    with pytest.raises(ValueError, match="--scheduling-policy must be fair"):
        _settings_of_keys(KEYS, "fcfs")


def test_a_group_shares_prefixes_by_name_and_others_do_not(llm):
    callers = {
        hash_of("key-of-ann"): Caller(name="ann", group="team"),
        hash_of("key-of-ben"): Caller(name="ben", group="team"),
        hash_of("key-of-cid"): Caller(name="cid"),
        hash_of("key-of-team"): Caller(name="team"),  # a name is no group
    }
    prompt = "The little dog and the big cat were friends and played in the park. " * 4
    with serving(AsyncLLM(llm), loop=llm.loop, keys=callers) as running:

        def cached(name, **more):
            usage = ask(running, name, tokens=1, prompt=prompt, **more).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert cached("ann") == 0
        assert cached("ben") > 0
        assert cached("cid") == 0
        assert cached("cid") > 0
        assert cached("team") == 0
        assert cached("ben", cache_salt="own") == 0
        assert cached("ann", cache_salt="own") > 0
