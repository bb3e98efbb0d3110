"""What pages of other sites make a browser send, to a server that asks nobody for a key."""

from __future__ import annotations

import socket

import httpx
import pytest

from tests.server.serving import serving
from tilewise.server.keys import Caller, hash_of
from tilewise.server.routes import admin_router

BODY = b'{"prompt":"Hi","max_tokens":1}'


def routers(service):
    return [admin_router(service)]


@pytest.fixture(scope="module")
def running():
    with serving(routers=routers, is_for_this_machine=True) as server:
        yield server


def post(running, path="/v1/completions", content=BODY, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(running.url + path, content=content, headers=named)


@pytest.mark.parametrize("path", ["/v1/completions", "/pause", "/reset_prefix_cache", "/abort"])
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example", "content_type": "text/plain"},
        {"origin": "null"},
        {"origin": "http://[", "content_type": "text/plain"},
        {"origin": "http://127.0.0.1:1"},  # another server of this machine
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site", "origin": "http://127.0.0.1:1"},
    ],
)
def test_another_sites_page_changes_nothing(running, path, headers):
    answer = post(running, path, **headers)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "foreign_origin"
    assert not running.bridge.is_paused
    assert not running.bridge.jobs


def test_the_own_page_and_programs_may_ask(running):
    own = f"http://127.0.0.1:{running.port}"
    for headers in (
        {}, {"origin": own}, {"origin": own.replace("http", "https")},
        {"origin": own, "sec_fetch_site": "same-origin"}, {"sec_fetch_site": "none"},
    ):  # fmt: skip
        assert post(running, **headers).status_code == 200
    read = httpx.get(f"{running.url}/health", headers={"sec-fetch-site": "cross-site"})
    assert read.status_code == 200  # a link to the page; its text stays unread by the other site
    assert "access-control-allow-origin" not in read.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LocalHost.:8000", 200), ("chat.localhost:1", 200),
        ("127.0.0.1:8000", 200), ("[::1]:8000", 200), ("[::1]", 200), ("10.0.0.7", 200),
        ("evil.example", 403), ("evil.example:8000", 403), ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403), ("notlocalhost", 403),
    ],
)  # fmt: skip
def test_a_name_that_was_made_to_point_here_is_refused(running, host, status):
    answer = httpx.get(f"{running.url}/v1/models", headers={"host": host})
    assert answer.status_code == status
    if status == 403:
        assert "--allow-open" in answer.json()["error"]["message"]


def test_where_keys_are_set_the_key_decides():
    keys = {hash_of("k"): Caller("alice")}
    with serving(keys=keys, is_for_this_machine=False) as server:
        told = {"origin": "http://app.example", "host": "proxy.example"}
        assert post(server, **told).status_code == 401
        assert post(server, authorization="Bearer k", **told).status_code == 200


def test_a_compressed_body_is_refused_by_name(running):
    answer = post(running, content_encoding="gzip")
    assert answer.status_code == 415
    assert "content-encoding must be identity, got gzip" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "more",
    [
        b"Host: localhost\r\n", b"Host: evil.example\r\n",
        b"Host: localhost\r\nOrigin: http://evil.example\r\n",
        b"Host: localhost\r\nX-Long: " + b"x" * 20_000 + b"\r\n",
    ],
    ids=["right", "foreign host", "foreign origin", "long headers"],
)  # fmt: skip
def test_two_lengths_of_a_body_end_the_connection(running, more):
    """Behind a proxy that believes the other length, the rest would be somebody else's request."""
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection((running.host, running.port), timeout=10) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\n"
            b"Transfer-Encoding: chunked\r\n" + more + b"\r\n0\r\n\r\n" + hidden
        )
        told = b""
        while part := client.recv(65536):
            told += part
    assert told.startswith(b"HTTP/1.1 400 ")
    assert told.count(b"HTTP/1.1 ") == 1


HOSTS = [
    "localhost/health?x=", "localhost/health#", "127.0.0.1/ready", "/health", "x/health?",
    "localhost@evil.example", "evil.example/.localhost", "evil.example#.localhost", "[::1]/health",
    "localhost:80/health", "127.0.0.1:80@evil.example", "localhost\\health",
    "evil.example?.localhost",
]  # fmt: skip


@pytest.fixture(scope="module")
def keyed():
    with serving(keys={hash_of("key-of-alice"): Caller("alice")}, routers=routers) as server:
        yield server


def _status(running, path, host, key=None):
    with socket.create_connection((running.host, running.port), timeout=60) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(BODY)}\r\n"
        if key is not None:
            head += f"Authorization: Bearer {key}\r\n"
        client.sendall(head.encode() + b"Connection: close\r\n\r\n" + BODY)
        return int(client.recv(100).split()[1])


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_header_moves_no_path(running, keyed, host):
    """A framework put it before the path: a route that needs a key became one that does not."""
    assert _status(running, "/v1/completions", host) in (400, 403)
    for path in ("/v1/completions", "/pause"):
        assert _status(keyed, path, host) in (400, 401)
    assert _status(keyed, "/v1/completions", host, "key-of-alice") in (200, 400)
    assert _status(keyed, "/pause", host, "key-of-alice") in (400, 403)


@pytest.fixture(scope="module")
def shared():
    origins = frozenset({"https://app.example"})
    with serving(routers=routers, is_for_this_machine=True, allowed_origins=origins) as server:
        yield server


def test_the_page_of_an_allowed_site_may_ask_and_read(shared):
    site = {"origin": "https://App.example", "sec_fetch_site": "cross-site"}
    answer = post(shared, **site)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://App.example"
    assert answer.headers["vary"] == "origin"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    wrong = post(shared, content=b"{", **site)
    assert wrong.status_code == 400
    assert "access-control-allow-origin" in wrong.headers, "errors are read, too"
    for other in ("https://evil.example", "https://app.example.evil", "null"):
        answer = post(shared, **{**site, "origin": other})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers


def test_a_browser_is_told_beforehand_what_may_be_sent(shared):
    asked = {
        "origin": "https://app.example", "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-stainless-os",
    }  # fmt: skip
    url = f"{shared.url}/v1/chat/completions"
    told = httpx.options(url, headers=asked)
    assert told.status_code == 204
    assert told.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    assert "POST" in told.headers["access-control-allow-methods"]
    told = httpx.options(url, headers={**asked, "origin": "https://evil.example"})
    assert told.status_code != 204
    assert "access-control-allow-origin" not in told.headers


def test_a_key_is_needed_from_every_site_and_not_before_a_request():
    keys = {hash_of("k"): Caller("alice")}
    with serving(keys=keys, allowed_origins=frozenset({"*"})) as server:
        site = {"origin": "http://anywhere.example"}
        assert httpx.options(f"{server.url}/v1/models", headers=site).status_code == 204
        refused = post(server, **site)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == site["origin"]
        assert post(server, authorization="Bearer k", **site).status_code == 200
