"""Take the pictures of the page: `python lab/plots/page_pictures.py`.

A server of the packaged model with few blocks is loaded with requests that share, fork and preempt;
Chromium (in PATH) opens the page by playwright (the extra `clients`).
"""

from __future__ import annotations

import json
import shutil
import threading
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.server.serving import serving
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.server.live import live_router
from tilewise.server.routes import admin_router

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
VIEWS = {"light": ("light", 1180, 820), "dark": ("dark", 1180, 820), "phone": ("light", 390, 844)}


def ask(url: str, prompt: str, n: int, seed: int) -> None:
    body = {
        "prompt": prompt, "max_tokens": 400, "n": n, "seed": seed, "ignore_eos": True,
        "temperature": 1.0,
    }  # fmt: skip
    data = json.dumps(body).encode()
    urllib.request.urlopen(f"{url}/v1/completions", data, timeout=120).read()


def main() -> None:
    """Write page_light.png, page_dark.png and page_phone.png beside this file."""
    llm = LLM("story", device="cpu", num_blocks=120, max_num_seqs=12, swap_space_gib=0.02)
    path = shutil.which("chromium")
    with (
        serving(
            AsyncLLM(llm), loop=llm.loop, routers=lambda s: [admin_router(s), live_router(s)]
        ) as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        for name, (scheme, width, height) in VIEWS.items():
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            page.goto(server.url)
            page.wait_for_timeout(500)
            page.fill("#max", "40")
            page.click("#send")
            page.wait_for_timeout(1500)
            beginnings = [
                "Once upon a time there was a little girl who lived near the river with her dog",
                "Once upon a time there was a little girl who lived near the river and a frog",
                "One day the big red ball rolled under the old tree",
            ]
            threads = [
                threading.Thread(target=ask, args=(server.url, beginnings[i % 3], 1 + i % 4, i))
                for i in range(9)
            ]
            for thread in threads:
                thread.start()
            before = llm.engine.scheduler.stats().num_preemptions
            page.wait_for_timeout(1500)
            while llm.engine.scheduler.stats().num_preemptions - before < 3 and any(
                t.is_alive() for t in threads
            ):
                time.sleep(0.02)
            llm.loop.pause()
            page.wait_for_timeout(1400)
            page.focus("#map")
            page.keyboard.press("Home")
            for _ in range(6):
                page.keyboard.press("ArrowRight")
            page.wait_for_timeout(300)
            page.screenshot(path=IMAGES / f"page_{name}.png", full_page=False)
            llm.loop.resume()
            for thread in threads:
                thread.join(120)
            page.close()
        browser.close()
    llm.close()


if __name__ == "__main__":
    main()
