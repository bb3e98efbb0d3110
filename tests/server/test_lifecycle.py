"""What becomes of requests whose client leaves, stalls or abuses HTTP, and when a server ends."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import random
import socket
import ssl
import subprocess
import sys
import threading
import time
from shutil import which
from types import SimpleNamespace

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving, wait_for
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.server import live
from tilewise.server.bridge import Bridge
from tilewise.server.command import _tls
from tilewise.server.job import Direct, Job, sink_of
from tilewise.server.keys import Caller
from tilewise.server.limits import RequestLimits
from tilewise.server.messages import messages_router
from tilewise.server.reply import Reply
from tilewise.server.run import ServerOptions

BODY = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True}


def connect(running, receive_buffer=None):
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.connect((running.host, running.port))
    sock.settimeout(60)
    return sock


def post(sock, body, path="/v1/completions", extra=""):
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n{extra}\r\n"
    sock.sendall(head.encode() + content)


def read_all(sock):
    data = b""
    try:
        while part := sock.recv(65536):
            data += part
    except ConnectionError:
        pass
    return data


def settled(running):
    wait_for(lambda: not running.engine.live and not running.bridge.jobs)
    wait_for(lambda: not running.tasks())
    assert running.bridge.queue.num_live == 0
    assert running.bridge.queue.num_waiting == 0


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_ends_its_work_at_once(is_stream, caplog):
    caplog.set_level("INFO", "tilewise.server")
    with serving(FakeEngine(step_s=0.01)) as running:
        sock = connect(running)
        post(sock, {**BODY, "stream": is_stream})
        wait_for(lambda: running.engine.live)
        if is_stream:
            sock.recv(100)
        [request_id] = running.engine.live
        sock.close()
        wait_for(lambda: not running.engine.live, 5)  # of 9 s that the work would take
        assert running.engine.aborted == [request_id]
        settled(running)
    line = json.loads(caplog.records[-1].message)
    assert (line["status"], line["reason"]) == (499, "client_closed_request")


def test_a_client_that_leaves_ends_all_prompts_of_its_request():
    with serving(FakeEngine(step_s=0.01)) as running:
        sock = connect(running)
        post(sock, {**BODY, "prompt": ["a", "b", "c"], "n": 2})
        wait_for(lambda: len(running.engine.live) == 3)
        sock.close()
        wait_for(lambda: len(running.engine.aborted) == 3)
        settled(running)


def test_a_client_that_leaves_the_queue_frees_its_place():
    with serving() as running:
        running.engine.is_held = True
        sock = connect(running)
        post(sock, BODY)
        wait_for(lambda: running.bridge.queue.num_waiting == 1)
        sock.close()
        settled(running)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_while_its_text_is_prepared_never_reaches_the_engine(path):
    with serving(bridge_options={"num_threads": 1}) as running:
        may_go_on = threading.Event()
        busy = running.bridge._pool.submit(may_go_on.wait, 60)  # the only thread has other work
        sock = connect(running)
        text = "Once upon a time. " * 40
        messages = [{"role": "user", "content": text}]
        body = {"prompt": text} if path == "/v1/completions" else {"messages": messages}
        post(sock, {**body, "max_tokens": 9}, path)
        wait_for(lambda: running.bridge._pending == 1)
        sock.close()
        wait_for(lambda: not running.bridge.jobs)
        may_go_on.set()
        assert busy.result(60)
        wait_for(lambda: running.bridge._pending == 0)
        settled(running)
        assert not running.engine.seen
        assert not running.engine.aborted
        text = httpx.get(f"{running.url}/metrics").text
        assert 'dropped_streams_total{model_name="story",reason="client_left"} 1.0' in text
        assert "client_closed_request" not in text, "who leaves was not refused"


def test_a_slow_reader_is_dropped_with_the_reason_in_the_log(caplog):
    caplog.set_level(logging.INFO, "tilewise.server")
    engine = FakeEngine(max_model_len=20_000)
    options = {"slow_reader_s": 0.3}
    with serving(engine, bridge_options=options, send_buffer=4096) as running:
        sock = connect(running, receive_buffer=4096)
        post(sock, {**BODY, "max_tokens": 15_000, "stream": True, "return_token_ids": True})
        wait_for(lambda: "has read nothing" in caplog.text)
        settled(running)
        text = httpx.get(f"{running.url}/metrics").text
        assert 'tilewise:dropped_streams_total{model_name="story",reason="slow_reader"} 1.0' in text
        # A copy: the server's own thread adds and removes connections meanwhile.
        mine, connections = sock.getsockname(), running.server.server_state.connections
        wait_for(lambda: mine not in [c.client for c in connections.copy()])
        sock.close()


def test_a_client_that_does_not_read_events_is_dropped_and_gives_its_place_to_another(
    caplog, monkeypatch
):
    caplog.set_level(logging.WARNING, "tilewise.server")
    engine = FakeEngine()
    engine.picture = lambda: {"next": 0, "blocks": [0] * 10**6}
    monkeypatch.setattr(live, "MOST_STREAMS", 1)

    def status(running):
        with httpx.stream("GET", f"{running.url}/v1/events", timeout=20) as answer:
            return answer.status_code

    with serving(
        engine, bridge_options={"slow_reader_s": 0.3}, send_buffer=4096,
        routers=lambda service: [live.live_router(service)],
    ) as running:  # fmt: skip
        sock = connect(running, receive_buffer=4096)
        sock.sendall(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(12) == b"HTTP/1.1 200"
        wait_for(lambda: "a stream of events dropped" in caplog.text)
        wait_for(lambda: status(running) == 200)
        sock.close()


def test_nothing_overtakes_a_part_that_waits_for_its_client():
    """A client that reads again is written to by the task that waits, which has not run yet."""
    written, is_open = [], [True]

    async def main():
        drained = asyncio.Event()
        job = Job("cmpl-1", Caller(""), asyncio.current_task(), 0.0)
        sink = sink_of(job, lambda _, output: output)

        async def send(message):
            if message.get("body"):
                await drained.wait()
                written.append(message["body"])

        async def stream(_):
            yield b"1"
            is_open[0] = False
            yield b"2"

        bridge = SimpleNamespace(send=functools.partial(Bridge.send, None))
        reply = Reply(bridge, "cmpl", None, stream=stream)
        direct = Direct(lambda: is_open[0], written.append, written.append)
        task = asyncio.create_task(reply._write_stream(job, send, direct))
        while job.sending_since is None:
            await asyncio.sleep(0)
        is_open[0] = True
        drained.set()
        if sink.is_open():
            sink.take(0, b"3")
        await task
        assert sink.is_open()

    asyncio.run(main())
    assert written == [b"1", b"2"]


def test_headers_that_never_end_are_waited_for_only_so_long():
    with serving(options=ServerOptions(header_timeout_s=1.0, shutdown_timeout_s=1)) as running:
        silent, slow, again = (connect(running) for _ in range(3))
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: ")
        again.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while b'{"status":"ok"}' not in answer:
            answer += again.recv(1000)
        again.sendall(b"GET /he")  # half a request after a whole one
        for sock in (silent, slow, again):
            assert read_all(sock) == b""
            sock.close()
        assert httpx.get(f"{running.url}/health").status_code == 200


def test_a_body_that_never_ends_is_waited_for_only_so_long():
    with serving(body_timeout_s=0.2) as running:
        sock = connect(running)
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        assert b" 408 " in sock.recv(10_000)
        sock.close()
        settled(running)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # without a host
        b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X: " + b"a" * 100_000,
    ],
)
def test_what_is_not_http_is_refused_and_the_connection_closed(running_plain, raw):
    sock = connect(running_plain)
    sock.sendall(raw)
    answer = read_all(sock)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    sock.close()
    assert httpx.get(f"{running_plain.url}/health").status_code == 200


@pytest.fixture(scope="module")
def running_plain():
    limits = RequestLimits(max_body_bytes=2000, max_header_bytes=1000, max_timeout_s=0.2)
    with serving(limits=limits) as server:
        yield server


def test_pipelined_requests_are_answered_in_order(running_plain):
    sock = connect(running_plain)
    one = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    sock.sendall(one * 5 + last)
    answer = read_all(sock)
    assert answer.count(b"HTTP/1.1 200 OK") == 6
    assert answer.rindex(b'"version"') < answer.index(b'"ready"')
    sock.close()


def test_a_body_over_the_limit_is_413_with_the_numbers(running_plain):
    url = f"{running_plain.url}/v1/completions"
    answer = httpx.post(url, content=b"x" * 2001)
    assert answer.status_code == 413
    assert "2,000 bytes, got 2,001" in answer.json()["error"]["message"]
    chunked = httpx.post(url, content=iter([b"x" * 1500, b"x" * 1500]))  # without a length
    assert chunked.status_code == 413


def test_headers_over_the_limit_are_431(running_plain):
    answer = httpx.get(f"{running_plain.url}/health", headers={"x-long": "a" * 1000})
    assert answer.status_code == 431
    assert answer.json()["error"]["code"] == "request_header_fields_too_large"


def test_a_deadline_in_the_queue_is_504_and_later_a_finish_reason():
    limits = RequestLimits(max_timeout_s=60)
    with serving(FakeEngine(step_s=0.01), limits=limits) as running:
        url = f"{running.url}/v1/completions"
        some = httpx.post(url, json={**BODY, "timeout": 1.0}).json()
        assert some["choices"][0]["finish_reason"] == "deadline"
        assert 0 < some["usage"]["completion_tokens"] < 900
        running.engine.is_held = True
        for is_stream in (False, True):
            late = httpx.post(url, json={**BODY, "timeout": 0.1, "stream": is_stream})
            assert late.status_code == 504
            assert late.json()["error"]["type"] == "timeout_error"
        running.engine.is_held = False


@pytest.mark.parametrize("at", [0, 3])
def test_an_engine_that_fails_tells_its_requests(at):
    with serving() as running:
        running.engine.fails_at = at
        url = f"{running.url}/v1/completions"
        whole = httpx.post(url, json=BODY)
        assert whole.status_code == 500
        assert "logits must be finite" in whole.json()["error"]["message"]
        stream = httpx.post(url, json={**BODY, "stream": True})
        assert stream.status_code == (500 if at == 0 else 200)
        assert '"code":"engine_error"' in stream.text
        assert "[DONE]" not in stream.text
        running.engine.fails_at = None
        assert httpx.post(url, json={**BODY, "max_tokens": 2}).status_code == 200
        settled(running)


def test_health_is_bad_when_work_is_there_and_no_step_ends():
    with serving(bridge_options={"stall_s": 0.2}) as running:
        assert httpx.get(f"{running.url}/health").status_code == 200  # idle is healthy
        time.sleep(0.3)
        assert httpx.get(f"{running.url}/health").status_code == 200
        running.engine.is_held = True
        sock = connect(running)
        post(sock, BODY)
        wait_for(lambda: running.engine.live)
        running.bridge._last_output = -1e9
        running.engine.last_step_time = -1e9
        time.sleep(0.3)
        answer = httpx.get(f"{running.url}/health")
        assert answer.status_code == 503
        assert "no step has ended" in answer.json()["reason"]
        running.engine.is_held = False
        wait_for(lambda: httpx.get(f"{running.url}/health").status_code == 200)
        sock.close()
        running.engine.is_alive = False
        assert running.bridge.trouble() == "the engine's thread has ended"


def test_a_server_that_ends_lets_running_requests_end_and_takes_no_more():
    options = ServerOptions(shutdown_timeout_s=10)
    with serving(FakeEngine(step_s=0.01), options=options) as running:
        found = {}
        url = f"{running.url}/v1/completions"

        def ask():
            found["answer"] = httpx.post(url, json={**BODY, "max_tokens": 60}, timeout=30)

        with httpx.Client() as other:
            other.get(f"{running.url}/health")  # its connection is open already
            asking = threading.Thread(target=ask)
            asking.start()
            wait_for(lambda: running.engine.live)
            running.event_loop.call_soon_threadsafe(running.server.stop)
            wait_for(lambda: running.bridge.is_draining)
            refused = other.post(url, json=BODY)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert other.get(f"{running.url}/ready").status_code == 503
            assert other.get(f"{running.url}/health").status_code == 200
        asking.join(60)
        assert found["answer"].json()["choices"][0]["finish_reason"] == "length"
        running._thread.join(60)
        assert not running._thread.is_alive()


def test_requests_that_outlast_the_shutdown_are_told_so():
    options = ServerOptions(shutdown_timeout_s=0.2)
    with serving(FakeEngine(step_s=0.01), options=options) as running:
        socks = [connect(running) for _ in range(2)]
        for sock, is_stream in zip(socks, (False, True), strict=True):
            post(sock, {**BODY, "stream": is_stream})
        wait_for(lambda: len(running.engine.live) == 2)
        assert socks[1].recv(1, socket.MSG_PEEK), "the stream has begun"
        running.event_loop.call_soon_threadsafe(running.server.stop)
        whole, stream = (read_all(sock) for sock in socks)
        assert b" 503 " in whole.split(b"\r\n")[0]
        assert b"shutting down" in whole
        assert b" 200 " in stream.split(b"\r\n")[0]
        assert b"shutting down" in stream
        assert len(running.engine.aborted) == 2
        for sock in socks:
            sock.close()


def test_an_engine_that_has_ended_ends_the_server_with_an_exit_code():
    with serving() as running:
        running.engine.is_held = True
        sock = connect(running)
        post(sock, BODY)
        wait_for(lambda: running.engine.live)
        running.engine.is_alive = False
        assert b" 503 " in read_all(sock).split(b"\r\n")[0]
        running._thread.join(60)
        assert not running._thread.is_alive()
        assert running.server.exit_code == 1
        sock.close()


def test_an_engine_that_breaks_restarts_once_and_then_ends_the_server(caplog):
    llm = LLM("story", device="cpu", num_blocks=64, max_num_seqs=4)
    with serving(AsyncLLM(llm), loop=llm.loop) as running:
        url = f"{running.url}/v1/completions"
        body = {"prompt": "Once", "max_tokens": 3}

        def break_it():
            llm.engine.scheduler.update = None

        llm.loop.call(break_it)
        failed = httpx.post(url, json=body, timeout=30)
        assert failed.status_code == 500
        assert failed.json()["error"]["code"] == "engine_error"
        assert httpx.post(url, json=body, timeout=30).status_code == 200  # with a new scheduler
        assert httpx.get(f"{running.url}/health").status_code == 200
        wait_for(lambda: "begins anew, restart 1" in caplog.text)
        make = llm.engine.restart

        def restart(scheduler):
            make(scheduler)
            scheduler.update = None

        llm.engine.restart = restart
        llm.loop.call(break_it)
        assert httpx.post(url, json=body, timeout=30).status_code == 500
        assert httpx.post(url, json=body, timeout=30).status_code == 500
        running._thread.join(60)
        assert not running._thread.is_alive()
        assert running.server.exit_code == 1


@pytest.mark.skipif(which("openssl") is None, reason="openssl makes the certificate")
def test_tls_serves_and_plain_http_is_refused(tmp_path, caplog):
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    tls = _tls({"ssl_keyfile": key, "ssl_certfile": certificate})
    with serving(options=ServerOptions(tls=tls, shutdown_timeout_s=1)) as running:
        url = running.url.replace("http://", "https://")
        trusted = ssl.create_default_context(cafile=certificate)
        answer = httpx.post(
            f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, verify=trusted
        )
        assert answer.status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")  # a certificate that nobody signed
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{running.url}/health")
    assert "Exception in callback" not in caplog.text  # when a client has left
    with pytest.raises(ValueError, match="must be a certificate and its key"):
        _tls({"ssl_keyfile": certificate, "ssl_certfile": certificate})


@pytest.mark.skipif(which("openssl") is None, reason="openssl makes the certificate")
def test_a_key_with_a_passphrase_is_one_sentence_and_no_question(tmp_path):
    """OpenSSL asks at the terminal, and a service that has one waits for ever."""
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-passout", "pass:secret", "-keyout", key, "-out", certificate, "-days", "2",
         "-subj", "/CN=localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tilewise", "serve", "--ssl-keyfile", key, "--ssl-certfile",
         certificate],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert "--ssl-keyfile must be a key without a passphrase" in line


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "once " * 200}),
        ("/tokenize", {"messages": [{"role": "user", "content": "once"}]}),
        ("/detokenize", {"tokens": [1, 2, 3]}),
        ("/v1/messages/count_tokens",
         {"model": "story", "messages": [{"role": "user", "content": "once"}]}),
    ],
)  # fmt: skip
def test_a_client_that_leaves_takes_its_text_back(path, body):
    gate, waits = threading.Event(), []
    routers = lambda service: [messages_router(service)]  # noqa: E731
    with serving(bridge_options={"num_threads": 1}, routers=routers) as running:
        bridge = running.bridge

        async def hold():
            waits.append(asyncio.ensure_future(bridge.in_thread(gate.wait)))

        try:
            asyncio.run_coroutine_threadsafe(hold(), running.event_loop).result(60)
            sock = connect(running)
            post(sock, body, path)
            wait_for(lambda: bridge._pending == 2)
            sock.close()
            wait_for(lambda: bridge._pending == 1)
            assert not gate.is_set()
        finally:
            gate.set()
        answer = httpx.post(f"{running.url}{path}", json=body, timeout=60)
        assert answer.status_code == 200, "who stays is answered"
        wait_for(lambda: not bridge._pending)


def test_a_long_text_is_counted_no_further_when_its_client_has_left(monkeypatch):
    with serving() as running:
        tokenizer, gate, counted = running.engine.tokenizer, threading.Event(), []
        real = tokenizer.encode_plain

        def counts(text):
            counted.append(len(text))
            gate.wait(60)
            return real(text)

        monkeypatch.setattr(tokenizer, "encode_plain", counts)
        monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: counted.append("whole"))
        sock = connect(running)
        # More than are counted at once, and as few tokens as may be.
        post(sock, {"prompt": "once upon a time " * 80_000}, "/tokenize")
        wait_for(lambda: counted)
        sock.close()
        wait_for(lambda: not running.tasks())
        gate.set()
        wait_for(lambda: not running.bridge._pending)
        time.sleep(0.1)
        assert len(counted) == 1


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_clients_that_leave_stall_and_abort_leave_nothing_behind(count):
    draw = random.Random(17)
    engine = FakeEngine(step_s=0.002)
    with serving(engine, bridge_options={"slow_reader_s": 0.5}) as running:

        def client(i):
            kind = draw.choice(["leave", "half", "whole", "stream", "stall", "wrong", "early"])
            sock = connect(running, 4096 if kind == "stall" else None)
            try:
                if kind == "half":
                    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
                elif kind == "wrong":
                    post(sock, {"prompt": "x", "n": "no"})
                    sock.recv(1000)
                elif kind == "early":
                    content = b"Content-Length: 500\r\n\r\n{"
                    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + content)
                else:
                    tokens = 12 if kind in ("whole", "stream") else 400
                    body = {**BODY, "max_tokens": tokens, "stream": kind != "whole"}
                    post(sock, body, extra="Connection: close\r\n")
                    if kind in ("whole", "stream"):
                        data = read_all(sock)
                        assert b" 200 " in data.split(b"\r\n")[0]
                    elif kind == "stall":
                        time.sleep(draw.random() * 0.5)
                    else:
                        time.sleep(draw.random() * 0.05)
            finally:
                sock.close()

        failures = []

        def guarded(i):
            try:
                client(i)
            except Exception as error:
                failures.append(error)

        for start in range(0, count, 40):
            threads = [
                threading.Thread(target=guarded, args=(i,)) for i in range(start, start + 40)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        assert not failures
        settled(running)
        assert httpx.get(f"{running.url}/health").status_code == 200


def test_a_forked_server_gives_requests_other_names():
    code = (
        "import os; from tilewise.server.job import new_id; child = os.fork()\n"
        "if child: os.waitpid(child, 0)\nprint(new_id(), flush=True)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    names = told.stdout.split()
    assert len(names) == 2, told.stderr
    assert names[0] != names[1]
