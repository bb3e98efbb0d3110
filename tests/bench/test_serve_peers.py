"""Our server beside another: the made model, what is judged, and a whole run of a tiny shape."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.scripts import load
from tilewise.engine.tokenizer import load_tokenizer
from tilewise.models.config import read_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def peers():
    return load("serve_peers")


def test_every_id_of_the_made_model_has_a_text_of_its_own(peers, tmp_path):
    folder = peers.write_model("tiny", tmp_path / "tiny")
    tokenizer, size = load_tokenizer(folder), read_config(folder).vocab_size
    texts = [tokenizer.token_bytes(i) for i in range(size)]
    assert len(set(texts)) == size
    assert tokenizer.decode([300, 4095, tokenizer.eos_token_id]) == " w300 w4095"
    for text in ("plain", "caf\u00e9 \u2192 \U0001f600\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def server(rate, *times):
    (ttft, itl) = times
    both = {"ttft": {"p50": ttft, "p99": 2 * ttft}, "itl": {"p50": itl, "p99": 2 * itl}}
    return {"most": {"runs": [rate, rate]}, "rate": both}


def test_rows_hold_by_their_bounds(peers, capsys):
    document = {
        "direct_tokens_per_second": [1000.0, 1000.0],
        "servers": {"tilewise": server(950.0, 10.0, 5.0), "vllm": server(900.0, 9.0, 6.0)},
    }
    found = peers.held(document)
    assert {name for name, one in found.items() if not one["holds"]} == {
        "ttft p50 over vllm's", "ttft p99 over vllm's",
    }  # fmt: skip
    assert found["of the engine called directly"]["found"] == 0.95
    assert "FAILS  ttft p99 over vllm's: 1.111" in capsys.readouterr().out
    assert peers.held({"servers": {}}) == {}
    alone = {"direct_tokens_per_second": [1000.0], "servers": {"tilewise": server(800.0, 1, 1)}}
    assert [one["holds"] for one in peers.held(alone).values()] == [False]


def test_of_a_server_that_does_not_start_the_cause_is_told(peers, tmp_path, capsys):
    log = (
        "(ApiServer pid=6) WARNING this can cause `OSError: [Errno 24] Too many open files`\n"
        "(EngineCore pid=7) ERROR 11-24 [core.py:9] Traceback (most recent call last):\n"
        "(EngineCore pid=7) ERROR 11-24 [core.py:9] ValueError: Free memory on device is less\n"
        + "(ApiServer pid=6)   a line of a traceback\n" * 200
        + "(ApiServer pid=6) RuntimeError: Engine core initialization failed.\n"
    )
    told = peers.cause_of(log)
    assert told.startswith("ValueError: Free memory on device is less | RuntimeError: Engine core")
    assert peers.cause_of("usage: vllm [-h]\n\nvllm: no such option --x\n").endswith("option --x")
    command = [sys.executable, "-c", f"import sys; sys.stderr.write({log!r}); sys.exit(3)"]
    server = peers.ServerProcess("vllm", command, 1, tmp_path, {})
    document = {"errors": {}}
    run = peers._Run(argparse.Namespace(start_s=60.0), tmp_path, document, {})
    run._waiting["vllm"] = server
    run.wait_for_all()
    assert "vllm ended with 3 after" in document["errors"]["vllm"]
    assert told in document["errors"]["vllm"]
    assert document["logs"]["vllm"] == log
    assert run.ready == {}
    printed = capsys.readouterr().out
    # Its own process's error, which stands first, and with what it ended.
    assert "core.py:9] ValueError: Free memory" in printed
    assert "\n(ApiServer pid=6) RuntimeError: Engine core initialization failed.\n" in printed
    assert len(printed) < 2 * peers.LOG_SHOWN


def test_of_a_long_log_what_leads_to_the_first_error_and_the_end_are_shown(peers):
    long, end = "a line\n" * 10_000, "RuntimeError: the last\n"
    frames = '  File "a.py", line 1\n' * 500
    trace = f"Traceback (most recent call last):\n{frames}ValueError: the first\n"
    cut = peers.shown_of(f"WARNING OSError: no\n{long}{trace}{long}{end}")
    before, after = cut.split("\n[...]\n")
    assert before.endswith("line 1\nValueError: the first")
    assert after.endswith(end)
    assert len(cut) < peers.LOG_SHOWN + 20
    for near in (long + trace, long + end, f"{end}{long}"[: peers.LOG_SHOWN]):
        assert peers.shown_of(near) == near[-peers.LOG_SHOWN :]


def test_on_a_card_ours_is_compared_with_the_engine_in_both_places(peers):
    share = {name: server(rate, 1, 1) for name, rate in (("tilewise", 950.0), ("thread", 800.0))}
    found = peers.held({"direct_tokens_per_second": [1000.0], "servers": share})
    assert {name: one["holds"] for name, one in found.items()} == {
        "of the engine called directly": True, "the same, the engine beside HTTP": False,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tiny_shape_is_measured_to_the_end(tmp_path):
    done = subprocess.run(
        [sys.executable, "benchmarks/serve_peers.py", "--device", "cpu", "--shape", "tiny",
         "--requests", "6", "--lengths", "4", "8", "--peers", "process", "--repeats", "1",
         "--json", str(tmp_path / "found.json")],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    for name in ("tilewise", "process"):
        assert found["servers"][name]["most"]["failed"] == 0
        assert found["servers"][name]["rate"]["failed"] == 0
    assert len(found["holds"]) == 2
