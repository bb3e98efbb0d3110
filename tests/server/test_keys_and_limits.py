"""Keys: who may ask for what, and what stays secret; the queue: how much, and when to come back."""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import replace

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving, wait_for
from tilewise.server import limits as server_limits
from tilewise.server.errors import ApiError
from tilewise.server.keys import ANYBODY, Caller, KeyRing, hash_of, new_key, read_keys
from tilewise.server.limits import RATE_WINDOW_S, Queue, RequestLimits
from tilewise.server.messages import messages_router
from tilewise.server.routes import MOST_EXPLAINED, admin_router

ALICE = Caller("alice", priority=2, group="team", max_requests=2, max_prompt_tokens=50)
BOB = Caller("bob", tokens_per_minute=100)
ROOT = Caller("root", admin=True)
KEYS = {hash_of("key-of-alice"): ALICE, hash_of("key-of-bob"): BOB, hash_of("key-of-root"): ROOT}


@pytest.fixture(scope="module")
def running():
    with serving(keys=KEYS, routers=lambda service: [admin_router(service)]) as server:
        yield server


def ask(running, key=None, method="POST", path="/v1/completions", **body):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    content = {"prompt": "Once", "max_tokens": 2, **body} if path == "/v1/completions" else body
    return httpx.request(
        method, f"{running.url}{path}", json=content if method == "POST" else None, headers=headers
    )


def test_every_route_but_two_needs_a_key(running):
    told = ask(running, "key-of-alice", "GET", "/openapi.json").json()["paths"]
    paths = {"/openapi.json", *told}
    assert {"/metrics", "/v1/trace", "/pause", "/tokenize", "/openapi.json"} <= paths
    for path in (*paths, "/", "/nowhere"):
        for method in ("GET", "POST"):
            status = ask(running, None, method, path).status_code
            if path in ("/health", "/ready"):
                assert status in (200, 405)
            else:
                assert status == 401, (path, method)
    wrong = ask(running, "key-of-alicf")
    assert wrong.status_code == 401
    assert wrong.json()["error"]["code"] == "invalid_api_key"
    assert wrong.headers["www-authenticate"] == "Bearer"
    assert ask(running, "KEY-OF-ALICE").status_code == 401
    assert ask(running, "key-of-alice").status_code == 200


def test_a_key_may_come_as_anthropics_clients_send_it(running):
    answer = httpx.post(
        f"{running.url}/v1/completions",
        json={"prompt": "x", "max_tokens": 1},
        headers={"x-api-key": "key-of-bob"},
    )
    assert answer.status_code == 200


def test_administration_needs_an_administrators_key(running):
    for method, path in (
        ("POST", "/pause"), ("POST", "/resume"), ("POST", "/abort"),
        ("POST", "/reset_prefix_cache"), ("GET", "/v1/trace"),
    ):  # fmt: skip
        assert ask(running, "key-of-alice", method, path).status_code == 403
    trace = ask(running, "key-of-root", "GET", "/v1/trace?since=3&limit=4").json()
    assert [event["number"] for event in trace["data"]] == [3, 4, 5, 6]
    assert trace["next"] == 7
    for query in ("since=x", "limit=0", "limit=99999"):
        wrong = ask(running, "key-of-root", "GET", f"/v1/trace?{query}")
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == query.split("=")[0]
    assert ask(running, "key-of-root", "POST", "/pause").json() == {"paused": True}
    assert running.engine.is_held
    assert ask(running, "key-of-root", "POST", "/resume").json() == {"paused": False}


def test_keys_are_in_no_log_answer_or_metric(running, caplog):
    caplog.set_level(logging.DEBUG)
    texts = [ask(running, "key-of-alice").text, ask(running, "secret-wrong-key").text]
    texts += [ask(running, "key-of-root", "GET", p).text for p in ("/metrics", "/v1/usage")]
    texts.append(caplog.text)
    for secret in ("key-of-alice", "secret-wrong-key", hash_of("key-of-alice")[7:]):
        assert not [text for text in texts if secret in text]
    assert '"key": "alice"' in caplog.text


def test_a_keys_identity_salts_the_cache_and_names_the_user(running):
    def seen(key, **body):
        assert ask(running, key, **body).status_code == 200
        return running.engine.seen[-1]["request"]

    salts = {
        seen("key-of-alice").salt,
        seen("key-of-bob").salt,
        seen("key-of-root").salt,
        seen("key-of-bob", cache_salt="x").salt,
        seen("key-of-bob", cache_salt="alice").salt,
    }
    assert len(salts) == 5
    assert seen("key-of-bob", user="mallory").user == "bob"
    # A request of a key may let others go first, but push in front of nobody.
    assert seen("key-of-alice", priority=3).priority == 5
    assert seen("key-of-alice", priority=-9).priority == 2


def test_salts_of_different_callers_never_collide():
    callers = [
        Caller("a"),
        Caller("a:"),
        Caller("1:a"),
        Caller("b", group="a"),
        Caller("c", group=""),
    ]
    salts = [
        caller.salt(asked) for caller in callers for asked in (None, "a", ":", "1:a:", "key:1:a:")
    ]
    assert len(set(salts)) == len(salts)
    assert Caller("x", group="t").salt("s") == Caller("y", group="t").salt("s")
    assert ANYBODY.salt(None) == ""


def test_a_keys_own_limits(running):
    long = ask(running, "key-of-alice", prompt=[5] * 51)
    assert long.status_code == 400
    assert "at most 50 tokens, as this key may ask, got 51" in long.json()["error"]["message"]
    assert ask(running, "key-of-root", prompt=[5] * 51).status_code == 200
    running.engine.is_held = True
    threads = [threading.Thread(target=ask, args=(running, "key-of-alice")) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(running.engine.live) == 2)
    third = ask(running, "key-of-alice")
    assert third.status_code == 429
    assert int(third.headers["retry-after"]) >= 1
    running.engine.is_held = False
    for thread in threads:
        thread.join()
    assert ask(running, "key-of-alice").status_code == 200


def test_tokens_a_minute_count_prompts_and_answers():
    with serving(keys=KEYS) as running:
        assert ask(running, "key-of-bob", prompt=[5] * 60, max_tokens=30).status_code == 200
        refused = ask(running, "key-of-bob", prompt=[5] * 20)
        assert refused.status_code == 429
        assert "at most 100 a minute, got 110" in refused.json()["error"]["message"]
        assert 50 <= int(refused.headers["retry-after"]) <= 60
        never = ask(running, "key-of-bob", prompt=[5] * 101)
        assert never.status_code == 400


def test_usage_is_told_for_each_key(running):
    before = ask(running, "key-of-alice", "GET", "/v1/usage").json()["data"]
    assert [account["key"] for account in before] == ["alice"]
    ask(running, "key-of-alice", prompt=[5] * 7, max_tokens=3)
    ask(running, "key-of-alice", prompt=[5] * 99)
    [after] = ask(running, "key-of-alice", "GET", "/v1/usage").json()["data"]
    assert after["prompt_tokens"] - before[0]["prompt_tokens"] == 7
    assert after["generated_tokens"] - before[0]["generated_tokens"] == 3
    assert after["refused"] - before[0]["refused"] == 1
    everybody = ask(running, "key-of-root", "GET", "/v1/usage").json()["data"]
    assert {"alice", "root"} <= {account["key"] for account in everybody}


def test_a_request_is_explained_to_its_own_key_only():
    with serving(keys=KEYS, routers=lambda s: [admin_router(s)]) as running:
        running.engine.is_held = True
        thread = threading.Thread(target=ask, args=(running, "key-of-alice"))
        thread.start()
        wait_for(lambda: running.engine.live)
        [job] = running.bridge.jobs
        for key, status in (("alice", 200), ("bob", 404), ("root", 200)):
            answer = ask(running, f"key-of-{key}", "GET", f"/v1/explain/{job}")
            assert answer.status_code == status
            # Several at once: what has ended, or is another key's, is left out.
            path = f"/v1/explain?request_id={job}&request_id=cmpl-gone&request_id={job}"
            told = ask(running, f"key-of-{key}", "GET", path).json()["data"]
            assert [one["request_id"] for one in told] == ([job] if status == 200 else [])
        many = "&".join(["request_id=x"] * (MOST_EXPLAINED + 1))
        answer = ask(running, "key-of-root", "GET", f"/v1/explain?{many}")
        assert answer.status_code == 400
        assert "at most 64 times, got 65" in answer.text
        body = {"request_ids": [job, "cmpl-unknown"]}
        running.engine.is_held = False
        thread.join()
        assert ask(running, "key-of-root", "POST", "/abort", **body).json() == {"aborted": []}


def test_keys_neither_see_nor_take_one_anothers_ids():
    with serving(keys=KEYS, routers=lambda s: [admin_router(s)]) as running:
        running.engine.is_held = True
        found = {}

        def long(key):
            found[key] = ask(running, key, request_id="mine")

        keys = ("key-of-alice", "key-of-bob")
        threads = [threading.Thread(target=long, args=(key,)) for key in keys]
        for count, thread in enumerate(threads, 1):
            thread.start()
            wait_for(lambda count=count: len(running.engine.live) == count)
        again = ask(running, "key-of-bob", request_id="mine")
        assert (again.status_code, again.json()["error"]["param"]) == (400, "request_id")
        for key in (*keys, "key-of-root"):
            told = ask(running, key, "GET", "/v1/explain/cmpl-mine")
            assert told.status_code == 200
        for key, other in zip(keys, ("bob", "alice"), strict=True):
            for name in (f"cmpl-mine@{other}", f"cmpl-mine@{other}~1", "cmpl-other"):
                assert ask(running, key, "GET", f"/v1/explain/{name}").status_code == 404
        running.engine.is_held = False
        for thread in threads:
            thread.join()
        assert [found[key].json()["id"] for key in keys] == ["cmpl-mine"] * 2


def test_an_id_of_several_keys_is_ended_for_all_of_them():
    with serving(
        FakeEngine(step_s=0.01), keys=KEYS, routers=lambda s: [admin_router(s)]
    ) as running:
        found = []

        def long(key):
            found.append(ask(running, key, request_id="mine", max_tokens=900).json())

        threads = [
            threading.Thread(target=long, args=(f"key-of-{name}",)) for name in ("alice", "bob")
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(running.engine.live) == 2)
        body = {"request_ids": ["cmpl-mine"] * 3}
        told = ask(running, "key-of-root", "POST", "/abort", **body).json()
        assert told == {"aborted": ["cmpl-mine"] * 2}
        for thread in threads:
            thread.join(60)
        assert [answer["choices"][0]["finish_reason"] for answer in found] == ["abort"] * 2


def test_an_administrator_ends_requests():
    with serving(FakeEngine(step_s=0.01), routers=lambda s: [admin_router(s)]) as running:
        found = {}

        def long():
            found["answer"] = ask(running, max_tokens=900).json()

        thread = threading.Thread(target=long)
        thread.start()
        wait_for(lambda: running.engine.live)
        [job] = running.bridge.jobs
        assert ask(running, None, "POST", "/reset_prefix_cache").status_code == 409
        assert ask(running, None, "POST", "/abort", all=True).json() == {"aborted": [job]}
        thread.join(60)
        assert found["answer"]["choices"][0]["finish_reason"] == "abort"
        assert ask(running, None, "POST", "/abort").status_code == 400
        assert ask(running, None, "POST", "/reset_prefix_cache").json() == {"reset": True}


def test_a_full_queue_is_429_for_a_key_and_503_for_all():
    queue = Queue(max_requests=3, max_key_requests=2)
    keys = {hash_of(name): Caller(name) for name in ("first", "second", "third")}
    with serving(queue=queue, keys=keys) as running:
        running.engine.is_held = True
        names = ["first", "first", "second"]
        threads = [threading.Thread(target=ask, args=(running, name)) for name in names]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(running.engine.live) == 3)
        assert ask(running, "first").status_code == 429
        full = ask(running, "third")
        assert full.status_code == 503
        assert full.json()["error"]["code"] == "queue_full"
        assert full.headers["retry-after"]
        running.engine.is_held = False
        for thread in threads:
            thread.join()
        assert ask(running, "third").status_code == 200
        assert queue.num_live == queue.num_waiting == 0


def test_retry_after_is_of_the_measured_rate():
    now = [0.0]
    queue = Queue(max_requests=10, max_tokens=10_000, clock=lambda: now[0])
    caller = Caller("a")
    for _ in range(5):  # one request in 2 seconds leaves the queue
        ticket = queue.enter(caller, 10)
        now[0] += 2.0
        queue.begin(ticket)
    for _ in range(10):
        queue.enter(caller, 10)
    with pytest.raises(ApiError) as caught:
        queue.enter(caller, 10, requests=4)
    assert caught.value.status == 503
    assert 5 <= caught.value.retry_after_s <= 8  # four requests over, 5 in 8 seconds have left
    with pytest.raises(ApiError) as never:
        Queue(max_tokens=100).enter(caller, 101)
    assert never.value.status == 400


def test_a_queue_that_refuses_nobody_remembers_no_more_than_its_rate_needs():
    now = [0.0]
    queue = Queue(clock=lambda: now[0])
    for _ in range(1000):
        ticket = queue.enter(ALICE, 10)
        queue.begin(ticket)
        queue.end(ticket)
        now[0] += 1.0
    for load in (queue._all, *queue._keys.values()):
        assert len(load.departures) <= RATE_WINDOW_S + 1


@pytest.mark.parametrize("letter", ["x", "once upon a time ", "\U0001f600", " "])
def test_a_text_of_millions_of_letters_is_refused_by_its_beginning(monkeypatch, letter):
    counted = []
    with serving() as running:
        tokenizer = running.engine.tokenizer
        for name in ("encode", "encode_plain"):
            real = getattr(tokenizer, name)

            def seen(text, real=real, **asked):
                counted.append(len(text))
                return real(text, **asked)

            monkeypatch.setattr(tokenizer, name, seen)
        text = letter * (2_000_000 // len(letter))
        chat = [{"role": "user", "content": text}]
        for path, body in (
            ("/v1/completions", {"prompt": text}),
            ("/v1/completions", {"prompt": ["Once", text], "stream": True}),
            ("/v1/chat/completions", {"messages": chat}),
        ):
            answer = httpx.post(f"{running.url}{path}", json=body, timeout=60)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert "must be at most 1,023 tokens, got" in answer.text
        assert max(counted) <= 16 * 1023 + 100
        # What is only counted, or cut, may be far longer.
        counted.clear()
        told = httpx.post(f"{running.url}/tokenize", json={"prompt": text[:50_000]}, timeout=60)
        assert told.json()["count"] == len(told.json()["tokens"]) > 1023
        cut = {"prompt": text[:50_000], "truncate_prompt_tokens": 5, "max_tokens": 1}
        answer = httpx.post(f"{running.url}/v1/completions", json=cut, timeout=60)
        assert answer.json()["usage"]["prompt_tokens"] == 5
        assert counted == [50_000] * 2


@pytest.mark.parametrize(
    ("letter", "most"),
    [("x", 2**16), ("\U0001f600", 2**16), pytest.param("x", 2**20, marks=pytest.mark.slow)],
)
def test_a_text_of_millions_of_tokens_is_not_counted(monkeypatch, letter, most):
    """Eight million letters took /tokenize nine seconds and a gigabyte.

    To count a million tokens takes a second of a core: every day 65,536 are the most.
    """
    counted, piece = [], min(server_limits.PIECE, most // 2)
    monkeypatch.setattr(server_limits, "PIECE", piece)
    assert RequestLimits().max_counted_tokens == 2**20
    limits = RequestLimits(max_counted_tokens=most)
    with serving(limits=limits, routers=lambda service: [messages_router(service)]) as running:
        tokenizer = running.engine.tokenizer
        for name in ("encode", "encode_plain"):
            real = getattr(tokenizer, name)

            def seen(text, real=real, **asked):
                counted.append(len(text))
                return real(text, **asked)

            monkeypatch.setattr(tokenizer, name, seen)
        text = letter * (most * 3 // 2)
        chat = [{"role": "user", "content": text}]
        for path, body in (
            ("/tokenize", {"prompt": text}),
            ("/tokenize", {"messages": chat}),
            ("/v1/messages/count_tokens", {"model": "story", "messages": chat}),
            ("/v1/completions", {"prompt": text, "truncate_prompt_tokens": 5}),
        ):
            answer = httpx.post(f"{running.url}{path}", json=body, timeout=60)
            assert answer.status_code == 400
            found = re.search(
                r"text must be at most ([\d,]+) tokens to be counted, got ([\d,]+)", answer.text
            )
            told, seen_first = (int(number.replace(",", "")) for number in found.groups())
            assert told == most < seen_first < 3 * most
        assert max(counted) == piece
        counted.clear()
        # Words have fewer tokens than letters: twice as many characters are counted.
        words = {"prompt": "once upon a time " * (most // 6)}
        told = httpx.post(f"{running.url}/tokenize", json=words, timeout=60).json()
        assert told["count"] == len(tokenizer.encode(words["prompt"])) > most // 2


def test_a_text_that_is_little_beyond_the_context_is_told_its_tokens():
    with serving() as running:
        for count in (1023, 1024, 2000):
            body = {"prompt": "x " * (count // 2), "max_tokens": 1}
            tokens = len(running.engine.tokenizer.encode(body["prompt"]))
            answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == (200 if tokens <= 1023 else 400)
            if tokens > 1023:
                assert f"got {tokens:,}" in answer.text


def test_what_can_never_be_served_is_400_while_its_key_is_at_its_limit():
    """To tell it to come again would be to refuse it for ever."""
    caller = Caller("busy", max_requests=1, tokens_per_minute=50)
    keys = {hash_of("key-of-busy"): caller}
    impossible = (
        {"prompt": [5] * 2000},  # beyond the context
        {"prompt": [5] * 51},  # beyond its tokens a minute
        {"prompt": [99_999]},
        {"prompt": [-1]},
        {"prompt": ["a", "b"]},  # two at once
    )
    with serving(queue=Queue(max_key_requests=1), keys=keys) as running:
        running.engine.limits = replace(running.engine.limits, num_blocks=4)
        running.engine.is_held = True
        waiting = threading.Thread(target=ask, args=(running, "key-of-busy"))
        waiting.start()
        wait_for(lambda: running.engine.live)
        assert ask(running, "key-of-busy").status_code == 429
        for body in (*impossible, {"prompt": [5], "max_tokens": 200}):  # beyond the cache
            answer = ask(running, "key-of-busy", **body)
            assert answer.status_code == 400, (body, answer.text)
        running.engine.is_held = False
        waiting.join()
    full = Queue(max_requests=2, max_tokens=100, max_key_tokens=50)
    full.enter(Caller("other"), 50, requests=2)
    for tokens, requests in ((101, 1), (51, 1), (1, 3)):
        with pytest.raises(ApiError) as caught:
            full.enter(Caller("a"), tokens, requests)
        assert caught.value.status == 400
    with pytest.raises(ApiError) as caught:
        full.enter(Caller("a"), 1)
    assert caught.value.status == 503


def test_tickets_are_given_back_once():
    queue = Queue()
    ticket = queue.enter(BOB, 10)
    assert (queue.num_waiting, queue.num_live) == (1, 1)
    queue.begin(ticket)
    queue.begin(ticket)
    assert (queue.num_waiting, queue.num_live) == (0, 1)
    queue.end(ticket)
    queue.end(ticket)
    assert (queue.num_waiting, queue.num_live) == (0, 0)
    queue.end(queue.enter(BOB, 10))
    assert (queue.num_waiting, queue.num_live) == (0, 0)


def test_a_ring_finds_keys_and_nothing_else():
    ring = KeyRing(KEYS)
    assert ring.find("key-of-bob") is BOB
    for wrong in ("", "key-of-bo", "key-of-bob ", hash_of("key-of-bob"), "\x00", "\udc80"):
        assert ring.find(wrong) is None
    assert len({new_key() for _ in range(10)}) == 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "must hold tables"),
        ("", "must hold tables"),
        ("[keys.a]", "hash of key 'a' must be"),
        ('[keys.a]\nhash = "my-secret"', "hash of key 'a' must be"),
        (f'[keys.a]\nhash = "{hash_of("")}"', "of a key of at least 8 characters"),
        (f'[keys.a]\nhash = "{hash_of(chr(10))}"', "of a key of at least 8 characters"),
        ('[keys.a]\nhash = "H"\nwieght = 2', "got 'wieght'"),
        ('[keys.a]\nhash = "H"\nweight = 0', "weight of key 'a' must be above 0"),
        ('[keys.a]\nhash = "H"\npriority = true', "priority of key 'a' must be int"),
        ('[keys.a]\nhash = "H"\n[keys.b]\nhash = "H"', "each key once"),
        ("[keys", "must be TOML"),
        ("x = " + "[" * 5000, "must be TOML"),
        ('[keys.a]\nhash = "H"\npriority = ' + "1" * 5000, "must be TOML"),
        ('[keys.a]\nhash = "H"\npriority = -' + "1" * 400, "priority of key 'a' must be below"),
        ('[keys.a]\nhash = "H"\nweight = nan', "weight of key 'a' must be above 0, got nan"),
        ('[keys.a]\nhash = "H"\nweight = inf', "weight of key 'a' must be below 2.53, got inf"),
        ('[keys.a]\nhash = "H"\nmax_requests = 1979-05-27', "max_requests of key 'a' must be int"),
    ],
)
def test_a_wrong_keys_file_is_refused_without_repeating_secrets(tmp_path, text, message):
    path = tmp_path / "keys.toml"
    path.write_text(text.replace('"H"', f'"{hash_of("x")}"'))
    with pytest.raises(ValueError, match=message) as caught:
        read_keys(path)
    assert "my-secret" not in str(caught.value)


def test_a_keys_file_says_everything_of_a_key(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(
        f'[keys.a]\nhash = "{hash_of("x")}"\npriority = -1\nweight = 2.5\ntokens_per_minute = 5\n'
        'max_requests = 6\nmax_prompt_tokens = 7\ngroup = "g"\nadmin = true\n'
    )
    assert read_keys(path) == {hash_of("x"): Caller("a", -1, 2.5, 5, 6, 7, "g", True)}
