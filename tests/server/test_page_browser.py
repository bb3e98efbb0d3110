"""The page in Chromium: what is seen in the map is what the engine did, by mouse and by keyboard.

Needs playwright (the extra `clients`) and a Chromium in PATH; not one of playwright's own.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import time

import httpx
import pytest

from tests.server.serving import serving, wait_for
from tests.server.test_page import KEYS, ask, state_of
from tilewise import __version__
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.engine.record.replay import Pool
from tilewise.server.live import live_router
from tilewise.server.routes import admin_router

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
NUM_BLOCKS = 24


def routers(service):
    return [admin_router(service), live_router(service)]


@pytest.fixture(scope="module")
def browser():
    sync = pytest.importorskip("playwright.sync_api", reason="pip install 'tilewise[clients]'")
    if CHROMIUM is None:
        pytest.skip("needs chromium in PATH")
    with sync.sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield made
        made.close()


@pytest.fixture(scope="module")
def llm():
    # Few blocks, so that sequences are preempted and cached blocks evicted.
    made = LLM("story", device="cpu", num_blocks=NUM_BLOCKS, max_num_seqs=6, swap_space_gib=0.01)
    yield made
    made.close()


@pytest.fixture(scope="module")
def running(llm):
    with serving(AsyncLLM(llm), loop=llm.loop, routers=routers) as server:
        yield server


@pytest.fixture
def page(browser, running):
    made = browser.new_page(viewport={"width": 1100, "height": 800})
    problems = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on("console", lambda line: problems.append(line.text) if is_wrong(line) else None)
    made.goto(running.url)
    until(made, "document.getElementById('status').textContent === 'live'")
    yield made
    made.close()
    assert not problems


def is_wrong(line):
    return line.type == "error"  # a 404 is one: of an icon, of a request that has ended


def until(page, condition):
    """Wait for a condition; wait_for_function would eval(), which the page's policy forbids."""
    wait_for(lambda: page.wait_for_timeout(20) or page.evaluate(condition))


def load(running, llm, count=7):
    """Send requests that fork, share, preempt one another and evict; return their threads."""
    prompts = [f"Once upon a time there was a {'very ' * (i % 4)}little dog." for i in range(count)]
    threads = [
        threading.Thread(target=ask, args=(running, p), kwargs={"n": 1 + i % 3, "seed": i})
        for i, p in enumerate(prompts)
    ]
    llm.loop.pause()
    for thread in threads:
        thread.start()
    wait_for(lambda: len(running.bridge.jobs) == count)
    llm.loop.resume()
    return threads


def told_of(page):
    """Walk over the map by keyboard and return what is told of each block: holders, or None."""
    page.focus("#map")
    page.keyboard.press("Home")
    told = []
    for block in range(NUM_BLOCKS):
        if block:
            page.keyboard.press("ArrowRight")
        text = page.inner_text("#detail strong")
        number, what = re.match(r"Block (\d+): (.*)", text, re.DOTALL).groups()
        assert int(number) == block, "one cell a key"
        sharers = re.search(r"(\d+) sharers", what)
        if what.startswith("in use"):
            told.append(int(sharers[1]) if sharers else 1)
        else:
            assert what.startswith(("free", "held by a step")), what
            told.append(0)
    return told


def holders(tables):
    counts = [0] * NUM_BLOCKS
    for table in tables.values():
        for block in table:
            counts[block] += 1
    return counts


def pause_when_shared(llm):
    """Stop the engine when blocks are shared; return its state then."""
    for _ in range(200):
        llm.loop.pause()
        state = llm.loop.call(lambda: state_of(llm))
        if max(holders(state["tables"])) > 1:
            return state
        llm.loop.resume()
        time.sleep(0.01)
    raise AssertionError("nothing came to be shared")


def test_the_live_map_shows_the_tables_of_the_engine(page, running, llm):
    threads = load(running, llm)
    state = pause_when_shared(llm)
    try:
        wanted = holders(state["tables"])
        page.wait_for_timeout(400)  # two messages
        assert told_of(page) == wanted
        used = sum(count > 0 for count in state["counts"])
        # Lists are written once a second.
        wait_for(lambda: page.inner_text("#usage").startswith(f"{used} of {NUM_BLOCKS} in use"))
        wait_for(lambda: page.inner_text("#n-running") != "0")
    finally:
        llm.loop.resume()
        for thread in threads:
            thread.join(60)
    wait_for(lambda: not running.bridge.jobs)
    page.wait_for_timeout(400)
    assert set(told_of(page)) == {0}


def test_the_waiting_list_is_in_the_queues_order(page, running, llm):
    """Who is preempted stands before those who never ran, though the page hears of it later."""
    scheduler = llm.engine.scheduler
    threads = load(running, llm, 12)

    def names():
        return [e.get_attribute("data-name") for e in page.query_selector_all("#waiting li")]

    try:
        for _ in range(200):
            llm.loop.pause()
            line = llm.loop.call(lambda: llm.engine.line(100))
            was_admitted = [s.was_admitted for s in scheduler.roster.waiting]
            if any(was_admitted) and not all(was_admitted):
                break
            llm.loop.resume()
            time.sleep(0.002)
        assert any(was_admitted), "some were preempted, others never ran"
        assert len(line) > 2
        wait_for(lambda: page.wait_for_timeout(100) or names() == line)
    finally:
        llm.loop.resume()
        for thread in threads:
            thread.join(60)
    answer = httpx.get(f"{running.url}/v1/queue?limit=0")
    assert answer.status_code == 400


def test_forks_copies_preemptions_and_evictions_are_seen_when_they_happen(
    page, running, llm, tmp_path
):
    since = llm.loop.call(lambda: llm.engine.scheduler.trace.num_noted)
    wait_for(lambda: not llm.engine.has_unfinished())
    picture = llm.loop.call(llm.engine.picture)
    for thread in load(running, llm):
        thread.join(60)
    events = llm.engine.trace(since)
    kinds = [event["kind"] for event in events]
    assert {"fork", "copy", "preempt", "evict"} <= set(kinds)
    # A film begins with its pool.
    opening = {
        "kind": "pool", "number": -1, "time": events[0]["time"], "num_blocks": NUM_BLOCKS,
        "block_size": picture.get("block_size", 16),
    }  # fmt: skip
    film = [opening, *events]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in film))
    page.set_input_files("#file", str(path))
    page.wait_for_selector("#film:not([hidden])")
    for kind in ("fork", "copy", "preempt", "evict"):
        place = next(i for i, event in enumerate(film) if event["kind"] == kind)
        for at in (place, place + 1):  # before it, and after it
            page.evaluate(
                "at => { const bar = document.getElementById('scrub'); bar.value = at;"
                " bar.dispatchEvent(new Event('input')); }",
                at,
            )
            pool = Pool()
            for event in film[:at]:
                pool.take(event)
            assert told_of(page) == holders({k: v for k, v in pool.tables.items() if v}), (kind, at)
    page.click("#live")
    page.wait_for_selector("#film", state="hidden")


def test_cells_are_coloured_by_what_they_are(page, running, llm):
    """A click tells the block; its colour is that of its state, and states differ."""
    threads = load(running, llm)
    pause_when_shared(llm)
    try:
        page.wait_for_timeout(400)
        box = page.locator("#map").bounding_box()
        ratio = page.evaluate("document.getElementById('map').width") / box["width"]
        found = {}
        step = 4
        for x in range(2, int(box["width"]) - 2, step):
            page.mouse.click(box["x"] + x, box["y"] + 3)
            text = page.inner_text("#detail")
            number = re.match(r"Block (\d+): ([^\n]*)", text)
            if number is None or int(number[1]) in found:
                if number is not None and int(number[1]) == NUM_BLOCKS - 1:
                    break
                continue
            pixel = page.evaluate(
                "([x, y]) => [...document.getElementById('map').getContext('2d')"
                ".getImageData(x, y, 1, 1).data].slice(0, 3)",
                [round((x + 1) * ratio), round(5 * ratio)],
            )
            found[int(number[1])] = (number[2], tuple(pixel))
            if len(found) >= NUM_BLOCKS:
                break
    finally:
        llm.loop.resume()
        for thread in threads:
            thread.join(60)
    assert len(found) > NUM_BLOCKS // 2
    held = {colour for what, colour in found.values() if what.startswith("in use")}
    free = {colour for what, colour in found.values() if what.startswith("free")}
    assert held
    assert not held & free


@pytest.fixture(scope="module")
def large():
    """A cache of which a few requests use little."""
    made = LLM("story", device="cpu", num_blocks=4200, max_num_seqs=6)
    with serving(AsyncLLM(made), loop=made.loop, routers=routers) as server:
        yield made, server
    made.close()


def cells_of(page):
    """Colours of the map's cells that are no ground, by walking over it; and its cell in pixels."""
    return page.evaluate(
        "() => { const map = document.getElementById('map');"
        " const { data } = map.getContext('2d').getImageData(0, 0, map.width, map.height);"
        " const ground = getComputedStyle(document.querySelector('.card')).backgroundColor"
        "   .match(/\\d+/g).map(Number); let count = 0;"
        " for (let i = 0; i < data.length; i += 4)"
        "   if (ground.some((v, c) => data[i + c] !== v)) count++;"
        " return count / (map.width * map.height); }"
    )


def test_of_a_large_cache_the_blocks_in_use_are_seen(browser, large):
    llm, server = large
    page = browser.new_page(viewport={"width": 1100, "height": 800})
    page.goto(server.url)
    until(page, "document.getElementById('status').textContent === 'live'")
    assert page.input_value("#view") == "used"
    assert page.is_visible("#none")
    threads = load(server, llm, 4)
    state = pause_when_shared(llm)
    try:
        used = sum(count > 0 for count in state["counts"])
        wait_for(lambda: page.inner_text("#usage").startswith(f"{used} of 4,200 in use"))
        assert not page.is_visible("#none")
        seen = cells_of(page)
        page.focus("#map")
        page.keyboard.press("Home")
        told = set()
        for _ in range(2 * used):
            told.add(page.inner_text("#detail strong").split(":")[0])
            page.keyboard.press("ArrowRight")
        assert told == {f"Block {b}" for b, count in enumerate(state["counts"]) if count}
        page.click("#larger")
        page.wait_for_timeout(100)
        page.select_option("#view", "all")
        page.wait_for_timeout(100)
        page.focus("#map")
        page.keyboard.press("End")
        assert page.inner_text("#detail strong").startswith("Block 4199: free")
        assert seen > 4 * used / 4200, "a cell of all blocks would be far smaller"
    finally:
        llm.loop.resume()
        for thread in threads:
            thread.join(60)
    page.close()


def test_every_running_request_is_listed(browser, large):
    page = browser.new_page(viewport={"width": 1100, "height": 800})
    page.goto(large[1].url)
    until(page, "document.getElementById('status').textContent === 'live'")
    names = [f"r-{i}" for i in range(90)]
    picture = {
        "num_blocks": 200, "block_size": 16, "time": 1.0, "next": 0, "known": [], "counts": [],
        "requests": [], "waiting": [], "tables": [],
    }  # fmt: skip
    film = [{"kind": "pool", "time": 1.0, **{k: picture[k] for k in ("num_blocks", "block_size")}}]
    for i, name in enumerate(names):
        film.append({"kind": "arrive", "time": 1.0, "request_id": name, "user": "",
                     "num_tokens": 3, "num_samples": 1})  # fmt: skip
        film.append({"kind": "admit", "time": 1.0, "request_id": name, "seq_id": i, "index": 0,
                     "blocks": [i], "num_found": 0})  # fmt: skip
    text = "".join(json.dumps(event) + "\n" for event in film).encode()
    page.set_input_files("#file", {"name": "t.jsonl", "mimeType": "", "buffer": text})
    until(page, "document.querySelectorAll('#running li').length === 90")
    assert page.inner_text("#n-running") == "90"
    page.close()


def test_the_head_says_what_serves_and_the_legend_has_every_frame(page):
    until(page, "document.getElementById('about').textContent !== ''")
    told = page.inner_text("#about")
    assert re.match(rf"model story\W+version {re.escape(__version__)}\W+on cpu\W+up \d", told)
    assert page.title() == "story · tilewise"
    legend = page.inner_text("#legend")
    for what in ("chosen", "just forked", "just copied", "just evicted"):
        assert what in legend


def test_the_playground_chats(page, running):
    page.check("#as-chat")
    page.fill("#max", "8")
    for turn, text in enumerate(("Tell me of a fox.", "And then?")):
        page.fill("#prompt", text)
        page.press("#prompt", "Enter")
        until(
            page,
            f"document.querySelectorAll('.said.assistant').length === {turn + 1} && "
            "!document.getElementById('send').disabled",
        )
    said = page.locator(".said span").all_inner_texts()
    assert [said[0], said[2]] == ["Tell me of a fox.", "And then?"]
    assert all(said)
    assert "8 tokens" in page.inner_text("#play-told")
    page.click("#anew")
    assert page.locator(".said").count() == 0
    page.check("#as-text")
    assert page.is_visible("#n")


def test_a_message_that_is_refused_can_be_sent_once_more(browser, running):
    page = browser.new_page()
    page.goto(running.url)
    page.check("#as-chat")
    page.fill("#max", "5000")
    page.fill("#prompt", "Too long")
    page.press("#prompt", "Enter")
    until(page, "document.getElementById('play-told').textContent.includes('must be')")
    assert page.input_value("#prompt") == "Too long"
    assert page.locator(".said").count() == 0
    page.close()


# Text and its ground, for every element that has text of its own and is seen.
CONTRAST = """
() => {
  const parse = (c) => (c.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    const style = getComputedStyle(e), box = e.getBoundingClientRect();
    if (!own || style.visibility === "hidden" || box.width < 2 || box.height < 2) continue;
    if (e.closest("script, style, [disabled], [aria-hidden=true], .unseen, .skip")) continue;
    const [a, b] = [light(parse(style.color)), light(ground(e))].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize), bold = Number(style.fontWeight) >= 700;
    const wanted = size >= 24 || (bold && size >= 18.66) ? 3 : 4.5;
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < wanted) found.push(`${e.tagName} ${e.textContent.trim().slice(0, 30)}: ` +
      ratio.toFixed(2));
  }
  return found;
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1100, 380])
def test_text_stands_out_and_nothing_is_cut_off(page, running, scheme, width):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    page.wait_for_timeout(100)
    assert page.evaluate(CONTRAST) == []
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width, "no part is wider than the screen"
    is_dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", is_dark)[:3])) < 300) == (scheme == "dark")


def test_everything_is_reached_and_done_by_keyboard(page, running):
    page.evaluate("document.activeElement.blur()")
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        name = page.evaluate(
            "document.activeElement.id || document.activeElement.className || 'body'"
        )
        if seen and name == seen[0]:
            break
        seen.append(name)
        if name not in ("body", "file", "skip"):
            outline = page.evaluate(
                "(e => getComputedStyle(e).outlineStyle)(document.activeElement)"
            )
            assert outline != "none", f"{name} must show that it has the focus"
    assert seen[0] == "skip", "the first key leads past the map"
    assert [
        name for name in seen if name in ("map", "prompt", "n", "max", "temperature", "send")
    ] == ["map", "prompt", "n", "max", "temperature", "send"]
    page.focus("#prompt")
    page.keyboard.press("Control+A")
    page.keyboard.type("The dragon")
    page.focus("#max")
    page.keyboard.press("Control+A")
    page.keyboard.type("12")
    page.focus("#send")
    page.keyboard.press("Enter")
    until(
        page,
        "document.querySelectorAll('#samples .sample').length === 2 && "
        "!document.getElementById('send').disabled",
    )
    texts = page.locator("#samples .sample").all_inner_texts()
    assert all(len(text) > 10 for text in texts)


def test_a_key_is_asked_for_and_kept_in_this_tab_alone(browser, llm):
    with serving(AsyncLLM(llm), loop=llm.loop, routers=routers, keys=KEYS) as locked:
        context = browser.new_context()
        page = context.new_page()
        page.goto(locked.url)
        page.fill("input[type=password]", "key-of-nobody")
        page.keyboard.press("Enter")
        until(page, "document.getElementById('told').textContent.length > 5")
        page.fill("input[type=password]", "key-of-root")
        page.keyboard.press("Enter")
        until(page, "document.getElementById('status')?.textContent === 'live'")
        assert "key" not in page.url
        assert page.evaluate("document.cookie + JSON.stringify(localStorage)") == "{}"
        page.click("#leave")
        page.wait_for_selector("input[type=password]")
        assert page.evaluate("sessionStorage.length") == 0
        other = context.new_page()
        other.goto(locked.url)
        assert other.locator("input[type=password]").count() == 1
        context.close()
