"""HTTP as no client of good will speaks it, over raw sockets."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import resource
import socket
import time

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving, wait_for
from tilewise.server import run as run_module
from tilewise.server.limits import RequestLimits
from tilewise.server.run import ServerOptions

BODY = json.dumps({"prompt": "Once", "max_tokens": 3}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def running():
    options = ServerOptions(header_timeout_s=1.0, shutdown_timeout_s=2.0)
    limits = RequestLimits(max_body_bytes=5000)
    with serving(FakeEngine(), limits=limits, options=options, body_timeout_s=0.6) as server:
        yield server
        assert not server.bridge.jobs
        assert not server.engine.live


def connect(running):
    sock = socket.create_connection((running.host, running.port))
    sock.settimeout(60)
    return sock


def answer_of(sock):
    """Return all that comes until the server closes, or a whole answer is there."""
    data = b""
    try:
        while part := sock.recv(65536):
            data += part
            head, _, body = data.partition(b"\r\n\r\n")
            length = [v for v in head.lower().split(b"\r\n") if v.startswith(b"content-length:")]
            if length and len(body) >= int(length[0].split(b":")[1]):
                break
    except ConnectionError:
        pass
    return data


def talk(running, *pieces, pause=0.0):
    with connect(running) as sock:
        try:
            for piece in pieces:
                sock.sendall(piece)
                time.sleep(pause)
        except ConnectionError:
            pass
        return answer_of(sock)


def status(data):
    return int(data.split(b" ", 2)[1]) if data.startswith(b"HTTP/1.1 ") else None


def test_a_request_may_come_byte_by_byte():
    whole = HEAD + LENGTH % len(BODY) + BODY
    with serving(FakeEngine()) as running:  # which waits as long as a busy machine needs
        data = talk(running, *[whole[i : i + 1] for i in range(len(whole))], pause=0.0005)
    assert status(data) == 200
    assert b'"finish_reason": "length"' in data


def chunk(data, size=None):
    return b"%x\r\n%b\r\n" % (len(data) if size is None else size, data)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (chunk(BODY) + b"0\r\n\r\n", {200}),
        (b"".join(chunk(BODY[i : i + 1]) for i in range(len(BODY))) + b"0\r\n\r\n", {200}),
        (b"%x;a=b\r\n%b\r\n0\r\nTrailer: x\r\n\r\n" % (len(BODY), BODY), {200}),
        (chunk(BODY, len(BODY) + 5) + b"0\r\n\r\n", {400, 408, None}),
        (chunk(BODY, len(BODY) - 5), {400, None}),
        (b"-5\r\n" + BODY, {400, None}),
        (b"0x10\r\n" + BODY, {400, None}),
        (b"ffffffffffffffffffff\r\n" + BODY, {400, 408, 413, None}),
        (chunk(BODY), {408}),  # it never ends
        (b"", {408}),
        (chunk(b" " * 4000) * 3, {413}),
        (b"\r\n\r\n", {400, None}),
    ],
)
def test_chunks_are_read_or_refused(running, body, wanted):
    assert status(talk(running, HEAD + CHUNKED, body)) in wanted
    assert httpx.get(f"{running.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("head", "wanted"),
    [
        (HEAD + LENGTH % 999_999_999_999, {413}),
        (HEAD + b"Content-Length: 10\r\nContent-Length: 11\r\n\r\n", {400, None}),
        (HEAD + b"Content-Length: 10, 10\r\n\r\n", {400, 408, None}),
        (HEAD + b"Content-Length: +10\r\n\r\n", {400, None}),
        (HEAD + b"Content-Length: 1e1\r\n\r\n", {400, None}),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", {400, 501, None}),
        # Two lengths: what one proxy takes for a body, another takes for the next request.
        (HEAD + b"Content-Length: 4\r\n" + CHUNKED + b"0\r\n\r\nGET /x", {400, None}),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX : y\r\n\r\n", {400, None}),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n", {400, None}),
        (b"GET http://elsewhere/health HTTP/1.1\r\nHost: x\r\n\r\n", {200, 400, 404}),
        (b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n", {200, 400, 505, None}),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
         {200, 400, 426}),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 404, 405, None}),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n", {400, 404, 405, None}),
        (b"TRACE /health HTTP/1.1\r\nHost: x\r\n\r\n", {405}),
        (b"GET /%ff%00%2e%2e/ HTTP/1.1\r\nHost: x\r\n\r\n", {400, 404}),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200, {400, None}),
    ],
)  # fmt: skip
def test_heads_are_read_or_refused(running, head, wanted):
    data = talk(running, head)
    assert status(data) in wanted, data[:200]
    if status(data) is not None and status(data) >= 400:
        # What followed may have been taken for a further request, and refused as well.
        told, _ = json.JSONDecoder().raw_decode(data.partition(b"\r\n\r\n")[2].decode())
        assert told["error"]["message"]
    assert httpx.get(f"{running.url}/health").status_code == 200


def test_headers_of_megabytes_are_not_read(running):
    for line in (b"X: " + b"a" * 10**7, b"".join(b"X%d: y\r\n" % i for i in range(10**6))):
        data = talk(running, b"GET /health HTTP/1.1\r\nHost: x\r\n", line, b"\r\n\r\n")
        assert status(data) in (400, 431, None)
    many = {f"x-{i}": "y" * 100 for i in range(200)}
    refused = httpx.get(f"{running.url}/health", headers=many)
    assert refused.status_code == 431
    assert refused.json()["error"]["code"] == "request_header_fields_too_large"
    long = talk(running, b"GET /" + b"a" * 10**6 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert status(long) in (400, 414, 431, None)


def test_pipelined_answers_come_in_order_and_whole(running):
    """Jobs and plain routes in turn, on one connection, all sent at once."""
    count = 12
    with connect(running) as sock:
        for number in range(count):
            body = json.dumps(
                {"prompt": "x", "max_tokens": 1 + number, "request_id": f"pipe{number}",
                 "stream": number % 3 == 2}
            ).encode()  # fmt: skip
            sock.sendall(HEAD + LENGTH % len(body) + body)
        sock.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        data = b""
        while part := sock.recv(65536):
            data += part
    assert data.count(b"HTTP/1.1 200") == count + 1
    places = [data.index(b"cmpl-pipe%d" % number) for number in range(count)]
    assert places == sorted(places)
    assert data.index(b'"version"') > places[-1]
    assert data.count(b"[DONE]") == count // 3


def test_a_client_that_sends_the_next_request_and_leaves_ends_the_first(running):
    running.engine.step_s = 0.01
    try:
        with connect(running) as sock:
            body = json.dumps({"prompt": "x", "max_tokens": 900, "ignore_eos": True}).encode()
            sock.sendall((HEAD + LENGTH % len(body) + body) * 3)
            wait_for(lambda: running.engine.live)
        wait_for(lambda: not running.engine.live and not running.bridge.jobs)
    finally:
        running.engine.step_s = 0.0


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    cut=st.integers(0, 200),
    noise=st.binary(max_size=40),
    tail=st.booleans(),
)
def test_noise_in_a_request_is_never_the_servers_error(running, cut, noise, tail):
    whole = HEAD + LENGTH % len(BODY) + BODY
    broken = whole[:cut] + noise + (whole[cut:] if tail else b"")
    with connect(running) as sock:
        sock.sendall(broken)
        sock.shutdown(socket.SHUT_WR)
        data = answer_of(sock)
    code = status(data)
    assert code is None or code < 500 or code in (501, 505), data[:300]
    assert b"Traceback" not in data


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [10_000])
def test_ten_thousand_idle_connections_keep_nobody_waiting(count):
    """Bound by descriptors: each connection is two of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * count + 500
    if soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            count = (hard - 500) // 2
            if count < 1000:
                pytest.skip(f"needs {wanted} descriptors, may have {hard}")
            wanted = hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    draw = random.Random(1)
    options = ServerOptions(header_timeout_s=120.0, shutdown_timeout_s=2.0)
    with serving(FakeEngine(), options=options) as running:
        idle = []
        try:
            for number in range(count):
                sock = socket.create_connection((running.host, running.port), timeout=30)
                if draw.random() < 0.3:
                    sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Half: ")
                idle.append(sock)
                if number % 500 == 0:
                    assert httpx.get(f"{running.url}/health", timeout=5).status_code == 200
            wait_for(lambda: len(running.server.server_state.connections) >= count, 60)
            begun = time.monotonic()
            for _ in range(20):
                body = {"prompt": "x", "max_tokens": 5}
                answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=10)
                assert answer.status_code == 200
            assert time.monotonic() - begun < 10
            print(f"{count} idle connections; 20 answers in {time.monotonic() - begun:.2f} s")
        finally:
            for sock in idle:
                sock.close()
        wait_for(lambda: len(running.server.server_state.connections) < 5, 60)


def test_a_lack_of_files_is_told_seldom_and_all_else_at_once(caplog, monkeypatch):
    """asyncio's own lines were 1.2 MB a second: one with a traceback for each that waits."""
    loop, told = asyncio.new_event_loop(), []
    monkeypatch.setattr(loop, "default_exception_handler", told.append)
    now = 100.0
    monkeypatch.setattr(loop, "time", lambda: now)
    failures = run_module._Failures()
    loop.set_exception_handler(failures)
    full = OSError(errno.EMFILE, "Too many open files")
    for _ in range(1000):
        loop.call_exception_handler({"message": "accept", "exception": full})
    assert [r.getMessage() for r in caplog.records] == [
        "connections wait until others end: Too many open files"
    ]
    now += run_module.FLOOD_S
    loop.call_exception_handler({"message": "accept", "exception": full})
    assert len(caplog.records) == 2
    assert not told
    for other in ({"message": "x", "exception": OSError(errno.EPIPE, "x")}, {"message": "y"}):
        loop.call_exception_handler(other)
    assert len(told) == 2
    loop.close()


def test_few_connections_are_accepted_in_one_turn_and_many_may_wait(monkeypatch):
    heard = []
    listen = socket.socket.listen
    monkeypatch.setattr(socket.socket, "listen", lambda sock, n: (heard.append(n), listen(sock, n)))
    with serving() as running:
        assert running.server.config.backlog == run_module.ACCEPTED
        assert heard == [run_module.ACCEPTED, run_module.BACKLOG]
