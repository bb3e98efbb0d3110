"""Our server beside another: the made model, what is judged, and a whole run of a tiny shape."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.scripts import load
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
    return {"most": {"runs": [rate, rate]}, "rate": [both]}


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
    peers.tell(found)
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
    run = peers._Run(argparse.Namespace(start_s=60.0), tmp_path, document, {}, lambda _: None)
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


# Answers streams of as many tokens as were asked for, one less from the COUNT-th on.
SERVER = """
import http.server, json, subprocess, sys
served, child = [], subprocess.Popen(["sleep", "600"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert "seed" not in asked
        served.append(0)
        if len(served) >= COUNT:
            print("Traceback (most recent call last):", flush=True)
            print(f"ValueError: no more {child.pid}", flush=True)
        count = asked["max_tokens"] - (len(served) >= COUNT)
        usage = {"completion_tokens": count, "prompt_tokens": len(asked["prompt"])}
        events = [{"choices": [{"index": 0, "text": "a"}]}] * count + [{"usage": usage}]
        self.send_response(200)
        self.end_headers()
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\\n\\n".encode())
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def run_of(peers, folder, counts, **options):
    """A run of such servers that are ready, and all that it writes."""
    written = []
    options = {"start_s": 60.0, "repeats": 2, "rates": 1, "seconds": 100.0, **options}
    run = peers._Run(
        argparse.Namespace(**options), folder, {"errors": {}}, {},
        lambda found: written.append(json.loads(json.dumps(found))),
    )  # fmt: skip
    for name, count in counts.items():
        port = peers.free_port()
        command = [sys.executable, "-c", SERVER.replace("COUNT", str(count)), str(port)]
        run._waiting[name] = peers.ServerProcess(name, command, port, folder, {})
    run.wait_for_all()
    return run, written


def asked_of(peers, requests):
    workload = peers.Workload("nano", [[1, 2]] * requests, [3] * requests, 0.6, requests)
    return peers.asked_of(workload)


def test_what_was_found_is_written_after_every_run(peers, tmp_path):
    run, written = run_of(peers, tmp_path, {"tilewise": 10**6, "vllm": 10**6})
    try:
        asked = asked_of(peers, 4)
        before = len(written)
        peers.most(run, asked)
        peers.at_rate(run, asked)
    finally:
        run.stop()
    told = [
        {name: [len(row["most"]["runs"]), len(row.get("rate", []))] for name, row in one.items()}
        for one in (document["servers"] for document in written[before:])
    ]
    assert told == [
        {"tilewise": [1, 0]},
        {"tilewise": [1, 0], "vllm": [1, 0]},
        {"tilewise": [2, 0], "vllm": [1, 0]},
        {"tilewise": [2, 0], "vllm": [2, 0]},
        {"tilewise": [2, 1], "vllm": [2, 0]},
        {"tilewise": [2, 1], "vllm": [2, 1]},
    ]
    assert len(written[-1]["holds"]) == 5
    best = written[-1]["servers"]["vllm"]["most"]
    assert best["tokens_per_second"] == max(best["runs"])
    assert best["events_per_token"] == 1.0
    assert written[-1]["rate"] == 0.7 * best["requests_per_second"]


def test_a_server_that_answers_wrongly_leaves_the_others_their_rows(peers, tmp_path, capsys):
    run, written = run_of(peers, tmp_path, {"tilewise": 10**6, "vllm": 7})
    try:
        peers.most(run, asked_of(peers, 4))
        peers.at_rate(run, asked_of(peers, 4))
    finally:
        run.stop()
    [last] = written[-1:]
    assert "vllm answered one of 3 tokens with 2 tokens: ValueError: no more" in str(last["errors"])
    assert list(last["logs"]) == ["vllm"]
    assert "ValueError: no more" in capsys.readouterr().out
    assert len(last["servers"]["tilewise"]["rate"]) == 1
    # What it had started has ended with it.
    child = int(last["logs"]["vllm"].split()[-1])
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text()


def test_nothing_begins_that_would_end_too_late(peers, tmp_path):
    run, _ = run_of(peers, tmp_path, {"tilewise": 10**6}, seconds=100.0)
    try:
        peers.most(run, asked_of(peers, 4))
        run.options.seconds = 0.0
        peers.most(run, asked_of(peers, 4))
        peers.at_rate(run, asked_of(peers, 4))
        peers.directly(run, None, {})
    finally:
        run.stop()
    assert len(run.rows["tilewise"]["most"]["runs"]) == 2
    assert "rate" not in run.rows["tilewise"]
    late = [name for name, why in run.document["errors"].items() if "no time" in why]
    assert late[0] == "all at once to tilewise"
    assert late[1].endswith("requests/s")
    assert late[2] == "direct"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tiny_shape_is_measured_to_the_end(tmp_path):
    done = subprocess.run(
        [sys.executable, "lab/serve_peers.py", "--device", "cpu", "--shape", "tiny",
         "--requests", "6", "--lengths", "4", "8", "--peers", "process", "--repeats", "1",
         "--json", str(tmp_path / "found.json")],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    for name in ("tilewise", "process"):
        assert found["servers"][name]["most"]["failed"] == 0
        [rate] = found["servers"][name]["rate"]
        assert rate["failed"] == 0
    assert len(found["holds"]) == 2
