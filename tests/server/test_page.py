"""The page: its headers, who may see what, and that its events add up to the engine's own state."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import threading
import time

import httpx
import pytest

import tilewise
from tests.server.serving import serving, wait_for
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.engine.record.replay import Pool
from tilewise.server import live, page
from tilewise.server.keys import Caller, hash_of
from tilewise.server.live import live_router
from tilewise.server.routes import admin_router

KEYS = {hash_of("key-of-alice"): Caller("alice"), hash_of("key-of-root"): Caller("r", admin=True)}


def routers(service):
    return [admin_router(service), live_router(service)]


@pytest.fixture(scope="module")
def locked():
    with serving(keys=KEYS, routers=routers) as server:
        yield server


@pytest.fixture(scope="module")
def llm():
    # Few blocks, so that sequences are preempted and cached blocks evicted.
    made = LLM("story", device="cpu", num_blocks=24, max_num_seqs=6, swap_space_gib=0.01)
    yield made
    made.close()


@pytest.fixture(scope="module")
def running(llm):
    with serving(AsyncLLM(llm), loop=llm.loop, routers=routers) as server:
        yield server


def get(server, path, key=None, **more):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{server.url}{path}", headers=headers, timeout=20, **more)


def scripts_of(text):
    return re.findall(r"<script>(.*?)</script>", text, re.DOTALL)


def allowed(answer):
    policy = answer.headers["content-security-policy"]
    return dict(part.strip().split(" ", 1) for part in policy.split(";"))


def hash_in_policy(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_page_runs_what_is_inside_it_and_asks_nobody_else(running):
    answer = get(running, "/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    policy = allowed(answer)
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert not re.search(r"https?:|\*", answer.headers["content-security-policy"])
    [script] = scripts_of(answer.text)
    [style] = re.findall(r"<style>(.*?)</style>", answer.text, re.DOTALL)
    assert hash_in_policy(script) in policy["script-src"]
    assert hash_in_policy(style) in policy["style-src"]
    # The policy would stop these in silence.
    assert not re.search(r"\s(style|on[a-z]+)=", answer.text[: answer.text.index("<script>")])
    assert not re.search(r"(src|href)=\"(?!#|data:)|https?://|url\(", answer.text)


def test_what_is_seen_has_a_name_for_those_who_do_not_see(running):
    text = get(running, "/").text
    text = text[: text.index("<script>")]
    assert '<html lang="en">' in text
    assert 'name="viewport" content="width=device-width' in text
    for tag in re.findall(r"<(?:canvas|svg)[^>]*>", text):
        assert "aria-label=" in tag or 'aria-hidden="true"' in tag
    assert 'tabindex="0"' in re.search(r"<canvas[^>]*>", text)[0]
    labelled = set(re.findall(r'<label[^>]* for="([^"]+)"', text))
    for tag in re.findall(
        r"<(?:input|textarea|select)[^>]*>", re.sub(r"<label>.*?</label>", "", text)
    ):
        name = re.search(r'id="([^"]+)"', tag)[1]
        assert name in labelled or "aria-label=" in tag, tag
    ids = re.findall(r'id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    asked = set(re.findall(r'\$\("([a-z-]+)"\)', page.page().decode()))
    assert asked <= set(ids), "the script asks for elements that are there"
    style = page.page().decode()
    assert "prefers-color-scheme: dark" in style
    assert "@media (max-width:" in style


def test_without_a_key_the_page_is_a_form_for_it(locked):
    for key in (None, "key-of-nobody"):
        answer = get(locked, "/", key)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert 'type="password"' in answer.text
        assert "Playground" not in answer.text
        [script] = scripts_of(answer.text)
        assert hash_in_policy(script) in allowed(answer)["script-src"]
    # The page is written into the form's document, whose policy stays.
    inside = get(locked, "/", "key-of-alice")
    assert inside.status_code == 200
    assert hash_in_policy(scripts_of(inside.text)[0]) in allowed(answer)["script-src"]
    # A key in the address is none.
    assert get(locked, "/?key=key-of-root").status_code == 401
    assert get(locked, "/?api_key=key-of-root").status_code == 401
    other = httpx.post(f"{locked.url}/")
    assert other.status_code == 401
    assert other.headers["content-type"] == "application/json"


def test_both_documents_bring_their_icon(locked):
    """A browser asks for /favicon.ico where a page names none, which is a 404 in its console."""
    for answer in (get(locked, "/"), get(locked, "/", "key-of-alice")):
        icon = re.search(
            r'<link rel="icon" href="data:image/svg\+xml;base64,([^"]+)">', answer.text
        )
        assert base64.b64decode(icon[1]).startswith(b"<svg ")
        assert allowed(answer)["img-src"] == "data:"


def test_the_head_is_told_to_every_key_and_to_none_without(locked, llm, running):
    assert get(locked, "/v1/server").status_code == 401
    told = get(locked, "/v1/server", "key-of-alice").json()
    assert (told["model"], told["version"]) == ("story", tilewise.__version__)
    told = get(running, "/v1/server").json()
    assert told["devices"] == llm.devices == "cpu"
    assert told["uptime_s"] > 0


def test_events_are_for_administrators(locked):
    assert get(locked, "/v1/events").status_code == 401
    refused = get(locked, "/v1/events", "key-of-alice")
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "admin_key_needed"
    # The fake engine has no picture of a cache.
    assert get(locked, "/v1/events", "key-of-root").status_code == 501


class Follower(threading.Thread):
    """Reads /v1/events and keeps what they add up to."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.url, self.messages, self.times = url, [], []
        self.pool, self.next, self.is_done = Pool(), None, False
        self.error = None
        self.start()

    def run(self):
        try:
            with httpx.stream("GET", f"{self.url}/v1/events", timeout=30) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                kind = None
                for line in answer.iter_lines():
                    if line.startswith("event: "):
                        kind = line[7:]
                    elif line.startswith("data: "):
                        self.times.append(time.monotonic())
                        self.take(kind, json.loads(line[6:]))
                    if self.is_done:
                        return
        except BaseException as error:
            self.error = error

    def take(self, kind, data):
        self.messages.append((kind, data))
        if kind == "picture":
            self.pool = loaded(data)
            self.next = data["next"]
            return
        assert [e["number"] for e in data] == list(range(self.next, self.next + len(data)))
        for event in data:
            self.pool.take(event)
        self.next += len(data)


def loaded(picture):
    pool = Pool()
    pool.take({"kind": "pool", "num_blocks": picture["num_blocks"]})
    for table in picture["tables"]:
        pool.take({"kind": "admit", "num_found": 0, **table})
    pool.counts = [0] * picture["num_blocks"]
    for block, owners in picture["counts"]:
        pool.counts[block] = owners
    pool.known = set(picture["known"])
    return pool


def state_of(llm):
    """What the engine itself holds, between two steps."""
    scheduler = llm.engine.scheduler
    pool = scheduler.tables.allocator
    blocks = range(scheduler.limits.num_blocks)
    return {
        "next": scheduler.trace.num_noted,
        "counts": [pool.ref_count(b) for b in blocks],
        "known": {b for b in blocks if pool.is_cached(b)},
        "tables": {s.seq_id: list(s.block_ids) for s in scheduler.roster.running},
    }


def ask(server, prompt, **more):
    body = {"prompt": prompt, "max_tokens": 90, "ignore_eos": True, "temperature": 1.0, **more}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def load(server, count=8):
    prompts = [f"Once upon a time there was a {'very ' * (i % 4)}little dog." for i in range(count)]
    threads = [
        threading.Thread(target=ask, args=(server, p), kwargs={"n": 1 + i % 3, "seed": i})
        for i, p in enumerate(prompts)
    ]
    server.engine.llm.loop.pause()  # so that all are there at once, and the blocks too few
    for thread in threads:
        thread.start()
    wait_for(lambda: len(server.bridge.jobs) == count)
    server.engine.llm.loop.resume()
    return threads


def caught_up(follower, llm):
    """Return the engine's state at an event that the follower has reached, too."""
    state = llm.loop.call(lambda: state_of(llm))
    wait_for(lambda: follower.next is not None and follower.next >= state["next"])
    return state


def same(follower, state):
    found = {k: v for k, v in follower.pool.tables.items() if v}
    assert follower.pool.counts == state["counts"]
    assert follower.pool.known == state["known"]
    assert found == state["tables"]


def test_events_add_up_to_the_tables_of_the_engine(llm, running):
    early = Follower(running.url)
    wait_for(lambda: early.messages)
    threads = load(running)
    wait_for(lambda: llm.engine.scheduler.roster.running)
    # One that comes in the midst begins with a picture of what it has missed.
    late = Follower(running.url)
    wait_for(lambda: late.messages)
    assert late.messages[0][0] == "picture"
    # In the midst: paused, so that the engine stands still while they are compared.
    llm.loop.pause()
    try:
        found = {}

        def have_met():
            found.update(llm.loop.call(lambda: state_of(llm)))
            return early.next == late.next == found["next"]

        wait_for(have_met)
        assert found["tables"]
        same(late, found)
        same(early, found)
    finally:
        llm.loop.resume()
    for thread in threads:
        thread.join(60)
    wait_for(lambda: not running.bridge.jobs)
    state = caught_up(early, llm)
    wait_for(lambda: late.next >= state["next"])
    kinds = {e["kind"] for kind, data in early.messages if kind == "events" for e in data}
    assert {"arrive", "admit", "fork", "copy", "preempt", "evict", "finish", "free"} <= kinds
    for follower in (early, late):
        assert follower.error is None
        assert follower.next == state["next"]
        same(follower, state)
        follower.is_done = True
    gaps = [b - a for a, b in zip(early.times, early.times[1:], strict=False)]
    assert len(early.times) <= 2 + (early.times[-1] - early.times[0]) / live.PERIOD_S * 1.2, gaps


def test_who_has_missed_what_the_ring_forgot_gets_a_new_picture(llm, running, monkeypatch):
    follower = Follower(running.url)
    wait_for(lambda: follower.messages)
    trace = llm.engine.scheduler.trace
    monkeypatch.setattr(trace, "capacity", 64)  # less than a tenth of a second notes
    for thread in load(running, 6):
        thread.join(60)
    state = caught_up(follower, llm)
    assert sum(kind == "picture" for kind, _ in follower.messages) > 1
    assert follower.error is None
    same(follower, state)
    follower.is_done = True


def test_events_hold_no_text(llm, running):
    secret = "xylophone zebra"
    follower = Follower(running.url)
    wait_for(lambda: follower.messages)
    text = ask(running, secret, max_tokens=8).json()["choices"][0]["text"]
    ids = llm.tokenizer.encode(secret)
    caught_up(follower, llm)
    told = json.dumps(follower.messages)
    assert secret not in told
    assert not text.strip() or text.strip() not in told
    assert json.dumps(ids)[1:-1] not in told
    follower.is_done = True


def test_streams_of_events_are_counted(running, monkeypatch):
    def is_refused():
        with httpx.stream("GET", f"{running.url}/v1/events", timeout=20) as answer:
            return answer.status_code == 429

    wait_for(lambda: not is_refused())
    monkeypatch.setattr(live, "MOST_STREAMS", 0)
    assert is_refused()
    monkeypatch.setattr(live, "MOST_STREAMS", 16)
    assert not is_refused()


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_a_block_keeps_its_cell_while_it_is_shown(tmp_path):
    (tmp_path / "page.cjs").write_text(scripts_of(page.page().decode())[0])
    (tmp_path / "run.cjs").write_text(
        "const { Pool, View } = require('./page.cjs');"
        "const pool = new Pool(), view = new View(), told = [];"
        "pool.load({ num_blocks: 5000, block_size: 16, requests: [], counts: [[7, 1], [4000, 1]],"
        "  known: [9], order: [9], tables: [], waiting: [] });"
        "const see = (changed) => told.push([...view.cells], changed);"
        "for (const mode of ['all', 'kept', 'used']) {"
        "  view.mode = mode; view.fill(pool); told.push(view.cells.length); }"
        "see([]);"
        "pool.dirty.clear(); pool.own([20]); see(view.take(pool, pool.dirty));"
        "pool.dirty.clear(); pool.free([7]); see(view.take(pool, pool.dirty));"
        "pool.dirty.clear(); pool.own([30]); see(view.take(pool, pool.dirty));"
        "view.fill(pool); told.push([...view.cells]);"
        "console.log(JSON.stringify(told));"
    )
    done = subprocess.run(
        ["node", "run.cjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [
        5000, 3, 2,
        [7, 4000], [],
        [7, 4000, 20], [2],
        [-1, 4000, 20], [0],  # the others stay where they are
        [30, 4000, 20], [0],
        [20, 30, 4000],
    ]  # fmt: skip


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_the_scripts_bookkeeping_is_that_of_replay(llm, running, tmp_path):
    picture = llm.loop.call(llm.engine.picture)
    for thread in load(running, 8):
        thread.join(60)
    events = llm.engine.trace(picture["next"])
    pool = loaded(picture)
    for event in events:
        pool.take(event)
    (tmp_path / "trace.json").write_text(json.dumps({"picture": picture, "events": events}))
    (tmp_path / "page.cjs").write_text(scripts_of(page.page().decode())[0])
    (tmp_path / "run.cjs").write_text(
        "const { Pool } = require('./page.cjs');"
        "const { picture, events } = require('./trace.json');"
        "const pool = new Pool(); pool.load(picture);"
        "let other = null;"
        "events.forEach((e, i) => { pool.take(e);"
        "  if (i === events.length >> 1) other = pool.copy();"
        "  else if (other) other.take(e); });"
        "const told = (p) => ({ counts: [...p.counts], used: p.used,"
        "  known: [...p.known.keys()].filter((b) => p.known[b]),"
        "  tables: Object.fromEntries([...p.tables].filter(([, t]) => t.length)),"
        "  holders: Array.from({ length: p.numBlocks }, (_, b) => (p.holders[b] ?? []).length),"
        "  waiting: p.waiting.size });"
        "console.log(JSON.stringify([told(pool), told(other)]));"
    )
    done = subprocess.run(
        ["node", "run.cjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for told in json.loads(done.stdout):
        assert told["counts"] == pool.counts
        assert set(told["known"]) == pool.known
        assert told["used"] == sum(count > 0 for count in pool.counts)
        assert told["tables"] == {str(k): v for k, v in pool.tables.items() if v}
        held = [0] * pool.num_blocks
        for table in pool.tables.values():
            for block in table:
                held[block] += 1
        assert told["holders"] == held
        assert told["waiting"] == 0
