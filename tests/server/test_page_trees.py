"""The page's prefix trees, its order of eviction and its tokens, run by node against the engine."""

from __future__ import annotations

import json
import shutil
import subprocess

import httpx
import pytest

from tests.server.serving import serving
from tests.server.test_page import ask, load, scripts_of
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.server import page
from tilewise.server.keys import Caller, hash_of
from tilewise.server.live import live_router
from tilewise.server.routes import admin_router

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


@pytest.fixture(scope="module")
def llm():
    made = LLM("story", device="cpu", num_blocks=70, max_num_seqs=8)
    yield made
    made.close()


def routers(service):
    return [admin_router(service), live_router(service)]


@pytest.fixture(scope="module")
def running(llm):
    with serving(AsyncLLM(llm), loop=llm.loop, routers=routers) as server:
        yield server


def run(folder, program, **data):
    (folder / "page.cjs").write_text(scripts_of(page.page().decode())[0])
    (folder / "data.json").write_text(json.dumps(data))
    (folder / "run.cjs").write_text(
        "const { Pool, Shown, CACHED } = require('./page.cjs');"
        "const data = require('./data.json');" + program
    )
    done = subprocess.run(
        ["node", "run.cjs"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("begins_late", [False, True])
def test_trees_and_order_are_the_engines(llm, running, tmp_path, begins_late):
    if begins_late:  # its picture has trees already
        for thread in load(running, 6):
            thread.join(60)
    picture = llm.loop.call(llm.engine.picture)
    for thread in load(running, 8):
        thread.join(60)
    for _ in range(2):  # prompts that share a long beginning
        ask(running, "The dog and the cat were friends. " * 8, max_tokens=20, n=3)
    events = llm.engine.trace(picture["next"])
    last = llm.loop.call(llm.engine.picture)
    assert len(last["order"]) > 20
    assert any(parent >= 0 for parent in last["parents"])
    told = run(
        tmp_path,
        "const pool = new Pool(); pool.load(data.picture);"
        "for (const e of data.events) pool.take(e);"
        "pool.grade();"
        "const grove = pool.grove(1000);"
        "console.log(JSON.stringify({ order: [...pool.evictionOrder()], budget: pool.budget,"
        " levels: [...pool.evictionOrder()].map((b) => pool.level[b]),"
        " places: [...pool.evictionOrder()].map((b) => pool.evictionPlace(b)),"
        " parents: data.last.known.map((b) => pool.parent[b]), grove }));",
        picture=picture,
        events=events,
        last=last,
    )
    assert told["order"] == last["order"]
    assert told["levels"] == sorted(told["levels"])
    assert (told["levels"][0], told["levels"][-1]) == (0, 11)
    count = len(last["order"])
    assert told["places"] == [[i + 1, count] for i in range(count)]
    assert told["parents"] == last["parents"]
    assert told["budget"] == last["budget"] == 2048
    grove = told["grove"]
    cells = {cell["block"]: cell for cell in grove["cells"]}
    assert sorted(cells) == last["known"]
    assert len({(c["row"], c["depth"]) for c in grove["cells"]}) == len(cells)
    assert grove["trees"] == last["parents"].count(-1)
    assert grove["longest"] == 1 + max(c["depth"] for c in grove["cells"])
    for block, parent in zip(last["known"], last["parents"], strict=True):
        cell = cells[block]
        assert cell["depth"] == (0 if parent < 0 else cells[parent]["depth"] + 1)
        if parent >= 0:
            row = cell["row"] if cell["up"] < 0 else cell["up"]
            assert row == cells[parent]["row"]


def test_a_hundred_thousand_blocks_have_trees_and_an_order(tmp_path):
    told = run(
        tmp_path,
        "const n = 100000, pool = new Pool(); pool.clear(n, 16);"
        "for (let b = 0; b < n; b++) { pool.known[b] = 1; pool.idleSince[b] = (b * 7919) % n;"
        "  pool.parent[b] = b % 40 === 0 ? -1 : b % 40 === 10 ? b - 5 : b - 1; }"
        "pool.grade(); const grove = pool.grove(240);"
        "const levels = [...pool.evictionOrder()].map((b) => pool.level[b]);"
        "console.log(JSON.stringify({ isSorted: levels.every((l, i) => !i || levels[i - 1] <= l),"
        "  first: levels[0], last: levels[n - 1], grove: { ...grove, cells: grove.cells.length },"
        "  lastRow: grove.cells.at(-1).row }));",
    )
    assert told["isSorted"]
    assert (told["first"], told["last"]) == (0, 11)
    # Of 2,500 trees of 40 blocks: a branch leaves each after six blocks, so that two rows are one.
    assert told["grove"] == {"cells": 120 * 40, "rows": 5000, "longest": 36, "count": 100_000,
                             "trees": 2500}  # fmt: skip
    assert told["lastRow"] == 239


def test_tokens_are_shown_when_the_text_has_them(tmp_path):
    events = [
        ["", [["bytes:\\xc3", -1.0]]],
        ["é", [["bytes:\\xa9", -0.5]]],
        ["", [[" is", -0.1], [" he", -2.0]]],  # held back: it may become a stop string
        [" is here", [["re", -0.2], ["<|endoftext|>", -0.3]]],
        [" then", []],
    ]
    told = run(
        tmp_path,
        "const shown = new Shown(); const found = [];"
        "for (const [text, tokens] of data.events)"
        "  found.push(...shown.take(text, tokens.map(([text, own]) => ({ text, own }))));"
        "const pairs = found.map(([piece, token]) => [piece, token.own]);"
        "console.log(JSON.stringify([pairs, shown.rest()]));",
        events=events,
    )
    assert told[0] == [["é", -0.5], [" is", -0.1], [" he", -2.0], ["re", -0.2]]
    assert told[1] == " then"


def test_a_blocks_tokens_are_told_to_its_own_key_alone(llm):
    callers = {
        hash_of("key-of-alice"): Caller(name="alice"),
        hash_of("key-of-root"): Caller(name="root", admin=True),
    }
    path = "/v1/explain/cmpl-mine?sample=0&first=0&last=3"
    for shows, told_to_root in ((False, None), (True, ["<|endoftext|>", "Once", " upon"])):
        with serving(
            AsyncLLM(llm), loop=llm.loop, routers=routers, keys=callers, shows_text=shows
        ) as running:
            url = f"{running.url}/v1/completions"
            body = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True,
                    "stream": True, "request_id": "mine"}  # fmt: skip
            mine = {"authorization": "Bearer key-of-alice"}
            with httpx.stream("POST", url, json=body, headers=mine) as answer:
                lines = answer.iter_lines()  # held: letting go of it closes the connection
                next(lines)
                llm.loop.pause()  # so that it is there while it is asked about
                own = httpx.get(running.url + path, headers=mine).json()
                root = {"authorization": "Bearer key-of-root"}
                other = httpx.get(running.url + path, headers=root).json()
                llm.loop.resume()
            assert own["prompts"][0]["tokens"] == ["<|endoftext|>", "Once", " upon"]
            assert other["prompts"][0]["tokens"] == told_to_root
