"""A worker answers every line, says what failed, and its process never keeps the caller waiting."""

from __future__ import annotations

import io
import json
import sys
import time

import pytest

from tilewise.bench.engines import process, worker
from tilewise.bench.engines.process import EngineFailed, EngineProcess


class Echo:
    """An engine that returns its prompts' first ids, or too few."""

    def __init__(self, settings):
        if settings.get("is_broken"):
            raise ValueError("settings must be whole")
        self.missing = settings.get("missing", 0)

    def facts(self):
        return {"version": "1"}

    def generate(self, prompts, new_tokens, temperature, n):
        return [
            p[:1] * (count - self.missing) for p, count in zip(prompts, new_tokens, strict=True)
        ]

    def profile(self, request):
        return {"seen": request["prefill_s"]}


def answers(*requests):
    found = []
    lines = io.StringIO("".join(json.dumps(request) + "\n" for request in requests))
    worker.serve(Echo, lines, found.append)
    return found


GENERATE = {"do": "generate", "prompts": [[7], [8, 9]], "new_tokens": [2, 1], "n": 1}
GENERATE |= {"temperature": 0.0}


def test_a_worker_starts_generates_and_looks_inside():
    start, done, ids, look = answers(
        {}, GENERATE, GENERATE | {"ids": True}, {"do": "profile", "prefill_s": 0.5}
    )
    assert start["start_s"] >= 0
    assert start["version"] == done["version"] == "1"
    assert (done["ids"], ids["ids"]) == (None, [[7, 7], [8]])
    assert done["seconds"] >= 0
    assert look == {"seen": 0.5}


def test_a_worker_goes_on_after_a_failure_and_ends_when_told():
    start, error, again, ended = [
        *answers({"missing": 1}, GENERATE, GENERATE, {"do": "stop"}),
        None,
    ]
    assert "error" not in start
    assert error["error"] == again["error"]
    assert error["error"] == "RuntimeError: 3 new tokens were asked for, got 1"
    assert ended is None


def test_a_worker_that_cannot_start_says_why():
    found = []
    with pytest.raises(ValueError, match="whole"):
        worker.serve(Echo, io.StringIO('{"is_broken": true}\n'), found.append)
    assert found == [{"error": "ValueError: settings must be whole"}]


def script(tmp_path, monkeypatch, text):
    """Let the process run `text` instead of a worker."""
    path = tmp_path / "engine.py"
    path.write_text(text)
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{path}"\n')
    fake.chmod(0o755)
    return str(fake)


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a shell script")
def test_an_engine_that_ends_shows_the_end_of_its_log(tmp_path, monkeypatch):
    python = script(tmp_path, monkeypatch, "import sys\nsys.exit('no such GPU')")
    with pytest.raises(EngineFailed, match="vllm ended: no such GPU"):
        EngineProcess("vllm", {}, tmp_path / "log", python=python)


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a shell script")
def test_an_engine_that_hangs_is_stopped(tmp_path, monkeypatch):
    text = "import time\ninput()\nprint('{}', flush=True)\ntime.sleep(60)"
    python = script(tmp_path, monkeypatch, text)
    engine = EngineProcess("vllm", {}, tmp_path / "log", python=python)
    monkeypatch.setattr(process.subprocess.Popen, "wait", _short(process.subprocess.Popen.wait))
    began = time.perf_counter()
    with pytest.raises(EngineFailed, match="gave no answer in 0 s"):
        engine.ask({"do": "generate"}, 0.2)
    with pytest.raises(EngineFailed, match="vllm ended"):
        engine.ask({"do": "generate"}, 5)
    assert time.perf_counter() - began < 20


def _short(wait):
    return lambda self, timeout=None: wait(self, None if timeout is None else 0.2)
