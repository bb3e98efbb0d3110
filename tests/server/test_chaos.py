"""Clients that do what clients do, many at once, and what is left of them afterwards: nothing."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from pathlib import Path

import httpx
import pytest

from tests.server.serving import serving, wait_for
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.engine.tables.block_files import BlockFiles
from tilewise.server.keys import Caller, hash_of
from tilewise.server.limits import Queue, RequestLimits
from tilewise.server.messages import messages_router
from tilewise.server.responses import responses_router
from tilewise.server.routes import admin_router

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    hash_of("key-of-alice"): Caller("alice"),
    hash_of("key-of-bob"): Caller("bob", max_requests=6, tokens_per_minute=20_000),
    hash_of("key-of-root"): Caller("root", admin=True),
}
KINDS = (
    "whole", "stream", "leave", "leave early", "stall", "abort", "late", "samples", "beyond",
    "no key", "half", "too long", "chat", "message", "response", "schema",
)  # fmt: skip


def routers(service):
    return [make(service) for make in (admin_router, messages_router, responses_router)]


class Chaos:
    """Draws clients and counts what they were told.

    Attributes:
        statuses: how often each came.
        wrong: what no client should have seen.
    """

    def __init__(self, running, seed):
        self.running, self.draw = running, random.Random(seed)
        self.statuses, self.wrong = {}, []
        self.number = 0

    async def many(self, count, at_once=40):
        seats = asyncio.Semaphore(at_once)

        async def one(kind, seed):
            async with seats:
                await self.guarded(kind, random.Random(seed))

        kinds = [KINDS[i % len(KINDS)] for i in range(count)]
        self.draw.shuffle(kinds)
        await asyncio.gather(*[one(kind, self.draw.random()) for kind in kinds])

    async def guarded(self, kind, draw):
        try:
            async with asyncio.timeout(60):
                await self.client(kind, draw)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # a server may close on a client that behaves so
        except Exception as error:
            self.wrong.append((kind, repr(error)))

    async def client(self, kind, draw):
        self.number += 1
        words = " ".join(draw.choice(["Once", "a", "dog", "the", "sun"]) for _ in range(12))
        path, key = "/v1/completions", draw.choice(["key-of-alice", "key-of-alice", "key-of-bob"])
        body = {"prompt": words, "max_tokens": draw.randint(1, 12), "seed": draw.randint(0, 99)}
        allowed = {200, 429, 503}
        if kind in ("stream", "leave", "stall", "abort"):
            body["stream"] = True
        if kind in ("leave", "leave early", "stall", "abort"):
            body |= {"max_tokens": 150, "ignore_eos": True}
        if kind == "late":
            body |= {"timeout": 0.02, "max_tokens": 100}
            allowed = {200, 429, 503, 504}
        if kind == "samples":
            body |= {"n": 3, "prompt": [words, words + " tree"]}
        if kind == "beyond":
            body |= draw.choice(
                [{"n": 10**6}, {"max_tokens": -1}, {"prompt": [5] * 5000}, {"odd": 1},
                 {"prompt": [5] * 350, "max_tokens": 300}]
            )  # fmt: skip
            allowed = {400, 429}
        if kind == "no key":
            key = draw.choice(["", "wrong-key-wrong-key", "KEY-OF-ALICE"])
            allowed = {401}
        if kind == "schema":
            body |= {"structured_outputs": {"choice": ["yes", "no"]}, "temperature": 0}
        if kind in ("chat", "message"):
            path = "/v1/chat/completions" if kind == "chat" else "/v1/messages"
            del body["prompt"], body["seed"]
            body |= {"messages": [{"role": "user", "content": words}], "model": "story"}
        if kind == "response":
            path, body = "/v1/responses", {"input": words, "max_output_tokens": 6}
        if kind == "abort":
            body["request_id"] = f"chaos{self.number}"
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        if key:
            head += f"Authorization: Bearer {key}\r\n"
        if kind == "too long":
            head, allowed = head + "X-Long: " + "a" * 20_000 + "\r\n", {431}
        whole = head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content
        reader, writer = await asyncio.open_connection(self.running.host, self.running.port)
        try:
            if kind == "half":
                writer.write(whole[: draw.randint(1, len(whole) - 1)])
                await writer.drain()
                await asyncio.sleep(draw.random() * 0.05)
                return
            writer.write(whole)
            await writer.drain()
            if kind == "leave early":
                await asyncio.sleep(draw.random() * 0.05)
                return
            status = int((await reader.readline()).split(b" ")[1])
            self.statuses[status] = self.statuses.get(status, 0) + 1
            if status not in allowed:
                answer = await reader.read()
                # One aborts the newest of them now and then, which may not have begun.
                if not (kind == "abort" and status == 400 and b'"code":"aborted"' in answer):
                    self.wrong.append((kind, status, answer))
            if status != 200:
                return
            if kind == "leave":
                await reader.read(100)
                return
            if kind == "stall":
                await asyncio.sleep(draw.random() * 0.6)
                return
            if kind == "abort":
                await reader.read(50)
                await self.abort(f"cmpl-chaos{self.number}" if draw.random() < 0.1
                                 else "cmpl-" + body["request_id"])  # fmt: skip
            data = await reader.read()
            if kind == "stream" and b"[DONE]" not in data:
                self.wrong.append((kind, data[-300:]))
        finally:
            writer.close()

    async def abort(self, job):
        content = json.dumps({"request_ids": [job]}).encode()
        reader, writer = await asyncio.open_connection(self.running.host, self.running.port)
        writer.write(
            b"POST /abort HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer "
            b"key-of-root\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)
        )
        if b" 200 " not in await reader.readline():
            self.wrong.append(("abort", await reader.read()))
        writer.close()


def nothing_is_left(llm, running):
    wait_for(lambda: not running.bridge.jobs and not running.tasks(), 30)
    wait_for(lambda: llm.loop.num_live == 0, 30)
    wait_for(lambda: not llm.engine.has_unfinished(), 30)
    stats = llm.loop.call(lambda: llm.engine.scheduler.stats())
    assert stats.blocks_used == 0
    assert stats.swap_blocks_used == 0
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    llm.loop.call(llm.engine.scheduler.check_integrity)
    assert running.bridge.queue.num_live == running.bridge.queue.num_waiting == 0
    wait_for(lambda: not running.server.server_state.connections, 30)
    with httpx.Client(base_url=running.url, headers={"x-api-key": "key-of-alice"}) as http:
        assert http.get("/health").status_code == 200
        answer = http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3}, timeout=60)
        assert answer.status_code == 200
    wait_for(lambda: not running.bridge.jobs)


@pytest.fixture(scope="module")
def llm():
    # Few blocks and a place to swap: sequences are preempted all the time.
    made = LLM("story", device="cpu", num_blocks=32, max_num_seqs=8, swap_space_gib=0.02)
    yield made
    made.close()


@pytest.fixture(scope="module")
def running(llm):
    with serving(
        AsyncLLM(llm), loop=llm.loop, keys=KEYS, routers=routers,
        queue=Queue(max_requests=200), limits=RequestLimits(max_body_bytes=10**5),
        bridge_options={"slow_reader_s": 0.3}, body_timeout_s=0.5,
    ) as server:  # fmt: skip
        yield server


@pytest.mark.parametrize("count", [128, pytest.param(1000, marks=pytest.mark.slow)])
def test_clients_that_do_all_there_is_leave_nothing_behind(llm, running, count):
    chaos = Chaos(running, count)
    asyncio.run(chaos.many(count))
    assert not chaos.wrong, chaos.wrong[:3]
    assert {200, 400, 401, 431} <= set(chaos.statuses)
    nothing_is_left(llm, running)


def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seconds", [0, pytest.param(600, marks=pytest.mark.slow)])
def test_memory_stays_while_clients_come_and_go(llm, running, seconds, monkeypatch):
    """The everyday form has 96 clients after 64, of whom each may leave 0.1 MiB."""
    # The ring of events grows to its bound, 7 MiB here, for some 4,000 clients: it begins full.
    monkeypatch.setattr(llm.engine.scheduler.trace, "capacity", 2**13)
    at_once, rounds = (4, 6) if seconds == 0 else (24, 0)
    # What is allocated once: 16 MiB more between 64 clients and 1,300 of them.
    asyncio.run(Chaos(running, 1).many(64 if rounds else 2000, at_once))
    begun, seen, told = time.monotonic(), [], 0
    while len(seen) < rounds or time.monotonic() - begun < seconds:
        chaos = Chaos(running, len(seen))
        asyncio.run(chaos.many(16 if rounds else 64, at_once))
        assert not chaos.wrong, chaos.wrong[:3]
        told += chaos.number
        wait_for(lambda: not running.bridge.jobs, 30)
        seen.append(resident())
        time.sleep(0.1)
    nothing_is_left(llm, running)
    quarter = max(1, len(seen) // 4)
    first, last = min(seen[:quarter]), min(seen[-quarter:])
    print([round(size / 2**20, 1) for size in seen[:: max(1, len(seen) // 20)]])
    print(f"{told} clients in {seconds} s: {first / 2**20:.1f} to {last / 2**20:.1f} MiB")
    assert last <= 1.02 * first


@pytest.mark.parametrize("period", [2, 3, 7])
def test_a_runner_that_fails_again_and_again_leaves_no_client_without_an_answer(
    llm, running, monkeypatch, period
):
    """Every n-th step fails: the others of its requests are run again in parts."""
    submit, steps = llm.engine.runner.submit, [0, 0]

    def failing(batch):
        steps[0] += 1
        if steps[0] % period == 0:
            steps[1] += 1
            raise RuntimeError("out of luck")
        return submit(batch)

    found = []

    def client(number):
        body = {
            "prompt": f"Number {number}", "max_tokens": 8, "ignore_eos": True,
            "stream": number % 2 == 0,
        }  # fmt: skip
        headers = {"authorization": "Bearer key-of-alice"}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=60)
        found.append((answer.status_code, "engine_error" in answer.text, number))

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.runner, "submit", failing)
        threads = [threading.Thread(target=client, args=(n,)) for n in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(found) == 12
    assert steps[1] > 0
    for status, is_failed, number in found:
        assert status == 200 if not is_failed else status in (200, 500), number
    nothing_is_left(llm, running)


def test_a_full_disk_under_the_cache_costs_no_answer(tmp_path, monkeypatch, caplog):
    """Prefixes that leave the cache go to main memory and from there to files, which fail."""
    monkeypatch.setattr(
        BlockFiles, "_write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    made = LLM(
        "story", device="cpu", num_blocks=32, max_num_seqs=4, swap_space_gib=0.003,
        offload_dir=tmp_path,
    )  # fmt: skip
    try:
        with serving(AsyncLLM(made), loop=made.loop) as running, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            texts = {}
            for turn in (1, 2):
                for number in range(8):
                    body = {
                        "prompt": [5 + number] * 150, "max_tokens": 4, "temperature": 0,
                        "ignore_eos": True,
                    }  # fmt: skip
                    answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
                    assert answer.status_code == 200
                    text = answer.json()["choices"][0]["text"]
                    assert texts.setdefault(number, text) == text, turn
            assert httpx.get(f"{running.url}/health").status_code == 200
            wait_for(lambda: made.engine.scheduler.stats().blocks_used == 0)
            assert not list(tmp_path.rglob("*.block"))
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            made.close()


def start(*arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", "tilewise", "serve", *arguments],
        stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    for line in process.stderr:
        if found := re.search(r"serving \S+ at (\S+)", line):
            process.reader = threading.Thread(target=process.stderr.read, daemon=True)
            process.reader.start()
            return process, found.group(1)
    raise AssertionError("it did not start")


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    process.reader.join(20)
    process.stderr.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_that_was_killed_starts_again_at_its_port_and_answers_the_same():
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 12, "seed": 3}).encode()
    process, url = start("--port", "0")
    port = url.rsplit(":", 1)[1]
    texts = []
    try:
        for _ in range(2):
            with urllib.request.urlopen(f"{url}/v1/completions", body, timeout=60) as answer:
                texts.append(json.load(answer)["choices"][0]["text"])
            long = json.dumps(
                {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
            ).encode()
            stream = urllib.request.urlopen(f"{url}/v1/completions", long, timeout=60)
            stream.readline()
            kill(process)  # with work under way
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                stream.read()
            stream.close()
            if len(texts) == 1:
                process, again = start("--port", port)
                assert again == url
        assert texts[0] == texts[1]
        # No child of it lives on: the template's process ends with its pipe.
        time.sleep(0.5)
        listed = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True).stdout
        orphans = [line for line in listed.splitlines() if "templates.work()" in line]
        assert not [line for line in orphans if line.split()[0] in ("1", str(process.pid))]
    finally:
        kill(process)
