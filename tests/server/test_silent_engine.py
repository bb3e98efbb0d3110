"""An engine that hangs: what is asked of it is answered without it, and the server ends in time."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from tests import warm
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving, wait_for
from tilewise.errors import EngineClosedError
from tilewise.server import questions
from tilewise.server.adapters import adapters_router
from tilewise.server.engine_process import remote
from tilewise.server.engine_process.remote import RemoteEngine
from tilewise.server.live import live_router
from tilewise.server.questions import EngineSilent, Questions
from tilewise.server.routes import admin_router
from tilewise.server.weights import weights_router

# Says that it is made, as `engine_process.host` does, and then nothing any more.
HANGS = """
import socket, sys, time
import msgspec
stream, calls = (socket.socket(fileno=int(n)) for n in sys.argv[1:])
calls.recv(1 << 20)
made = {"limits": LIMITS, "devices": "cpu", "config": {"vocab_size": 4096, "hidden_size": 8},
        "start_seconds": {}}
body = msgspec.msgpack.encode([True, made])
calls.sendall(len(body).to_bytes(4, "little") + body)
time.sleep(600)
"""


class Hanging(FakeEngine):
    """Answers no question until it is told to."""

    def __init__(self):
        super().__init__()
        self.goes_on = threading.Event()
        self.is_asked = 0

    def stats(self):
        self._wait()
        return super().stats()

    def line(self, most):
        self._wait()
        return []

    def explain(self, request_id):
        self._wait()
        return {"request_id": request_id, "state": "running"}

    def picture(self):
        self._wait()

    def pause(self):
        self._wait()

    def resume(self):
        self._wait()

    def trace(self, since=0):
        self._wait()
        return []

    def _wait(self):
        self.is_asked += 1
        assert self.goes_on.wait(120)


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(questions, "ANSWER_S", 0.05)
    made = Hanging()
    yield made
    made.goes_on.set()


def served(engine):
    return serving(engine, routers=lambda s: [admin_router(s), live_router(s)])


def gauge(text):
    [line] = [one for one in text.splitlines() if one.startswith("tilewise:engine_answers{")]
    return float(line.rsplit(" ", 1)[1])


def test_metrics_tell_what_is_known_and_that_the_engine_hangs(engine):
    with served(engine) as running:
        text = httpx.get(f"{running.url}/metrics").text
        assert gauge(text) == 0.0
        assert "tilewise:http_requests_in_flight" in text
        assert "tilewise:num_requests_running{" not in text  # nothing is known of it
        engine.goes_on.set()
        text = httpx.get(f"{running.url}/metrics").text
        assert gauge(text) == 1.0
        assert "tilewise:num_requests_running{" in text
        engine.goes_on.clear()
        text = httpx.get(f"{running.url}/metrics").text
        assert gauge(text) == 0.0
        assert "tilewise:num_requests_running{" in text  # as it was


def test_the_queue_is_told_as_far_as_it_is_known(engine):
    engine.is_held = True
    with served(engine) as running:
        body = {"prompt": [1], "stream": True, "request_id": "mine"}
        thread = threading.Thread(
            target=lambda: httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
        )
        thread.start()
        wait_for(lambda: engine.live)
        told = httpx.get(f"{running.url}/v1/queue").json()
        assert told["data"] == ["cmpl-mine"]
        assert told["engine"] == "the engine must answer within 0.05 s, and did not"
        engine.is_held = False
        thread.join(60)


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/pause"), ("GET", "/v1/trace"), ("GET", "/v1/explain/cmpl-a")]
)
def test_what_only_the_engine_knows_is_503(engine, method, path):
    engine.is_held = True
    with served(engine) as running:
        body = {"prompt": [1], "request_id": "a"}
        thread = threading.Thread(
            target=lambda: httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
        )
        thread.start()
        wait_for(lambda: engine.live)
        told = httpx.request(method, running.url + path)
        assert (told.status_code, told.json()["error"]["code"]) == (503, "engine_silent")
        assert not running.bridge.is_paused
        engine.is_held = False
        thread.join(60)


def test_steps_are_expected_again_although_the_engine_did_not_say_that_it_resumed(engine):
    with served(engine) as running:
        engine.goes_on.set()
        assert httpx.post(f"{running.url}/pause").status_code == 200
        engine.goes_on.clear()
        assert running.bridge.is_paused
        running.bridge._last_output = -1e9
        told = httpx.post(f"{running.url}/resume")
        assert (told.status_code, told.json()["error"]["code"]) == (503, "engine_silent")
        assert not running.bridge.is_paused
        assert time.monotonic() - running.bridge._last_output < 60  # a pause is no silence


def test_nothing_is_paused_where_the_engine_has_ended(engine, monkeypatch):
    with served(engine) as running:
        engine.goes_on.set()
        assert httpx.post(f"{running.url}/pause").status_code == 200

        def ended():
            raise EngineClosedError("the engine has failed")

        monkeypatch.setattr(engine, "resume", ended)
        told = httpx.post(f"{running.url}/resume")
        assert (told.status_code, told.json()["error"]["code"]) == (503, "engine_error")
        assert told.json()["error"]["message"] == "the engine has failed"
        assert not running.bridge.is_paused


def test_a_request_is_aborted_although_the_engine_hangs(engine):
    engine.is_held = True
    with served(engine) as running:
        found = []
        body = {"prompt": [1], "request_id": "a"}
        url = f"{running.url}/v1/completions"
        thread = threading.Thread(
            target=lambda: found.append(httpx.post(url, json=body, timeout=60).json())
        )
        thread.start()
        wait_for(lambda: engine.live)
        told = httpx.post(f"{running.url}/abort", json={"all": True}).json()
        assert told == {"aborted": ["cmpl-a"]}
        thread.join(60)
        assert found[0]["error"]["code"] == "aborted"


def test_a_stream_of_events_ends(engine):
    with served(engine) as running:
        assert httpx.get(f"{running.url}/v1/events").text == ""


def test_an_engine_that_hangs_is_not_asked_for_ever(engine, monkeypatch):
    monkeypatch.setattr(questions, "MOST", 2)

    async def ask():
        asked = Questions()
        for _ in range(3):
            with pytest.raises(EngineSilent):
                await asked.ask(engine.stats)
        assert engine.is_asked == 2
        engine.goes_on.set()
        while asked._num_open:
            await asyncio.sleep(0.001)
        assert (await asked.ask(engine.stats)).scheduler is not None

    asyncio.run(ask())


@pytest.fixture
def process(monkeypatch):
    """An engine whose process hangs; one that has not been closed is killed."""
    begin = subprocess.Popen

    def started(command, **options):
        code = HANGS.replace("LIMITS", repr(dataclasses.asdict(FakeEngine().limits)))
        return begin([sys.executable, "-c", code, *command[-2:]], **options)

    monkeypatch.setattr(remote.subprocess, "Popen", started)
    monkeypatch.setattr(remote, "ANSWER_S", 0.0)
    made = RemoteEngine("story", {})
    yield made
    made.close(0.0)


def test_a_process_that_hangs_is_killed_when_its_time_is_over(process):
    engine = process

    def ask():
        with pytest.raises(EngineClosedError):
            engine.stats()

    waiting = threading.Thread(target=ask, daemon=True)
    waiting.start()  # who asked before holds the line
    assert engine.close(0.05) is False
    assert engine._process.returncode == -signal.SIGKILL
    waiting.join(60)
    assert not waiting.is_alive()


@pytest.mark.parametrize(
    "work",
    [
        lambda engine: engine.sleep(),
        lambda engine: engine.wake(),
        lambda engine: engine.update_weights("story"),
        lambda engine: engine.load_lora_adapter("a", "a"),
        lambda engine: engine.facts(),
        lambda engine: engine.abort("a"),
        lambda engine: engine.reset_prefix_cache(),
        lambda engine: engine.fingerprint_of("a"),
        lambda engine: engine.unload_lora_adapter("a"),
    ],
    ids=[
        "sleep", "wake", "update_weights", "load_lora_adapter", "facts", "abort",
        "reset_prefix_cache", "fingerprint_of", "unload_lora_adapter",
    ],
)  # fmt: skip
def test_a_process_that_hangs_is_not_waited_for(process, monkeypatch, work):
    monkeypatch.setattr(remote, "SILENCE_S", 0.01)

    async def main():
        with pytest.raises(EngineSilent, match="must answer within 0.01 s"):
            await asyncio.wait_for(work(process), 10)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_an_engine_that_was_closed_takes_no_more_requests(process, monkeypatch):
    monkeypatch.setattr(remote, "SILENCE_S", 0.01)

    async def main():
        with pytest.raises(EngineSilent):  # it is closed all the same
            await process.aclose()
        with pytest.raises(EngineClosedError, match="was closed"):
            await anext(process.generate({"prompt_token_ids": [1]}))
        with pytest.raises(EngineClosedError, match="was closed"):
            await process.embed({"prompt_token_ids": [1]})

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/sleep", {}),
        ("/wake_up", {}),
        ("/update_weights", {"path": "story"}),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "a"}),
        ("/v1/unload_lora_adapter", {"lora_name": "a"}),
        ("/v1/completions", {"prompt": [1], "recipe": True}),
    ],
)
def test_long_work_of_an_engine_that_hangs_is_503(engine, monkeypatch, path, body):
    monkeypatch.setattr(questions, "WORK_S", 0.05)

    async def hang(*arguments, **keywords):
        await asyncio.sleep(60)

    for name in ("sleep", "wake", "update_weights", "load_lora_adapter", "unload_lora_adapter",
                 "facts"):  # fmt: skip
        monkeypatch.setattr(engine, name, hang, raising=False)

    def routers(service):
        return [weights_router(service), adapters_router(service)]

    with serving(engine, routers=routers, changes_weights=True) as running:
        told = httpx.post(running.url + path, json=body, timeout=10)
        assert (told.status_code, told.json()["error"]["code"]) == (503, "engine_silent")
        assert (
            told.json()["error"]["message"] == "the engine must answer within 0.05 s, and did not"
        )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_whose_engine_hangs_answers_and_ends_when_it_is_told_to():
    command = [sys.executable, "-m", "tilewise", "serve", "--port", "0", "--num-blocks", "64",
               "--engine-process", "--shutdown-timeout", "3"]  # fmt: skip
    with warm.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        pid, url = None, None
        for line in server.stderr:
            if "in process " in line:
                pid = int(line.split("in process ")[1].split()[0])
            if " at http" in line:
                url = line.split(" at ")[1].split()[0]
                break
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(pid, signal.SIGSTOP)
            assert gauge(httpx.get(f"{url}/metrics", timeout=60).text) == 0.0
            assert "engine" in httpx.get(f"{url}/v1/queue", timeout=60).json()
            begun = time.monotonic()
            server.terminate()
            assert "shutting down" in "".join(lines)
        for _ in server.stderr:
            pass
        assert server.wait(60) == 0
        assert time.monotonic() - begun < 3 + 15  # 100 s before
