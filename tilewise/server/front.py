"""ASGI middleware before all routes: request id, header limit, API key and origin.

With keys set every route but /health and /ready needs one. So does a route that does not exist, or
a client without a key could find out which exist. The 401 of `/` is a form that asks for the key.

Without keys the danger is a browser: any page that its user opens can post to this machine, and a
page whose host name resolves to this machine can read the answers too. So requests from another
site's page are refused, and a server bound to this machine only accepts this machine's names.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse, Response

from tilewise.server import page
from tilewise.server.bodies import Bodies
from tilewise.server.errors import ApiError, invalid
from tilewise.server.fairness import Turns
from tilewise.server.job import new_id
from tilewise.server.keys import ANYBODY, Caller, KeyRing

__all__ = ["Front", "caller_of", "trace_headers"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = frozenset({"/health", "/ready"})
_EXPOSED = (b"access-control-expose-headers", b"x-request-id, x-tilewise-ignored, retry-after")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]*)?")
_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")


class Front:
    """An ASGI application that checks each request and passes accepted ones to another application.

    It checks the size of the headers, the key or the origin, answers refused requests itself, and
    starts requests in the order of `Turns`.

    Args:
        app: the ASGI application that serves accepted requests.
        keys: the accepted API keys; if empty, no key is needed.
        max_header_bytes: the largest size of all header names and values together; 431 above.
        is_for_this_machine: True if a request's Host header must be a name of this machine.
        bodies: the bound on bodies in memory; what a request reserved is released at its end.
        allowed_origins: other sites, as browsers write them in Origin, whose pages may send
            requests and read answers; "*" allows any.
    """

    def __init__(
        self,
        app: App,
        keys: KeyRing,
        max_header_bytes: int,
        is_for_this_machine: bool,
        bodies: Bodies,
        allowed_origins: frozenset[str] = frozenset(),
    ) -> None:
        self._app = app
        self._origins = allowed_origins
        self._is_for_this_machine = is_for_this_machine
        self._keys = keys
        self._max_header_bytes = max_header_bytes
        self._turns = Turns()
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI request; one that is not HTTP is passed on unchecked.

        The caller is put into scope["state"], a request id and CORS headers are added to the
        answer, and the bytes reserved for the body are given back at the end.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        asked = next((value for name, value in headers if name == b"x-request-id"), b"")
        request_id = asked if _ID.fullmatch(asked) else new_id().encode()
        extra = [(b"x-request-id", request_id), (b"x-content-type-options", b"nosniff")]
        origin = self._allowed_origin(headers)
        if origin is not None:
            extra += [(b"access-control-allow-origin", origin), (b"vary", b"origin"), _EXPOSED]

        async def send_with_id(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                ignored = scope.get("state", {}).get("ignored")
                told = [(b"x-tilewise-ignored", ", ".join(ignored).encode())] if ignored else []
                message = {**message, "headers": [*message["headers"], *extra, *told]}
            await send(message)

        if origin is not None and scope["method"] == "OPTIONS":
            # A browser sends its preflight request without the key.
            await Response(None, 204, _preflight(headers))(scope, receive, send_with_id)
            return

        try:
            names = [name for name, _ in headers]
            if b"content-length" in names and b"transfer-encoding" in names:
                # A proxy may parse this request's end differently, so nothing more is read of this
                # connection.
                raise invalid(
                    "headers must have content-length or transfer-encoding, got both",
                    code="invalid_http",
                )
            size = sum(len(name) + len(value) for name, value in headers)
            if size > self._max_header_bytes:
                raise ApiError(
                    431, f"headers must be at most {self._max_header_bytes:,} bytes, got {size:,}"
                )
            if not len(self._keys):
                self._check_browser(scope["method"], dict(headers), origin is not None)
            scope.setdefault("state", {})["caller"] = self._caller(scope["path"], headers)
        except ApiError as error:
            more = {"connection": "close"} if error.code == "invalid_http" else {}
            answer: Response = JSONResponse(error.body, error.status, {**error.headers, **more})
            if error.status == 401 and scope["path"] == "/" and scope["method"] == "GET":
                # A browser cannot send a key before it has loaded the page that asks for it.
                answer = Response(page.gate(), error.status, {**error.headers, **page.headers()})
            await answer(scope, receive, send_with_id)
            return
        state = scope["state"]
        if len(self._keys) > 1 and scope["method"] == "POST":
            await self._turns.take(state["caller"].name)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if "body_bytes" in state:
                self._bodies.give_back(state["caller"], state["body_bytes"])

    def _allowed_origin(self, headers: list[tuple[bytes, bytes]]) -> bytes | None:
        """Return the Origin header of a request if `allowed_origins` has that site, in any case of
        letters, or "*", which allows all sites; None otherwise, and without the header."""
        if not self._origins:
            return None
        origin = next((value for name, value in headers if name == b"origin"), None)
        if origin is None:
            return None
        is_allowed = "*" in self._origins or origin.decode("latin-1").lower() in self._origins
        return origin if is_allowed else None

    def _check_browser(
        self, method: str, headers: dict[bytes, bytes], is_allowed: bool = False
    ) -> None:
        """Refuse a request, to a server without keys, that a page of another site may have sent.

        A wrong Host header is refused as well if the server is for this machine alone.

        Args:
            method: the HTTP method; those that change nothing may come from any site.
            headers: the request's headers.
            is_allowed: True if the request's origin is allowed.

        Raises:
            ApiError: 403, the host or the origin is foreign.
        """
        host = headers.get(b"host", b"").decode("latin-1")
        # Every browser sends a Host header; other clients may omit it.
        if self._is_for_this_machine and host and not _is_this_machines(host):
            raise ApiError(
                403,
                "host must be localhost or an address, as no key is set: --allow-open lets "
                f"others ask, got {host[:80]}",
                code="foreign_host",
            )
        if is_allowed or method in (
            "GET",
            "HEAD",
            "OPTIONS",
        ):  # these methods change nothing, and other sites cannot read the answers
            return
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        if site is not None:
            is_foreign = site not in (b"same-origin", b"none")
        else:
            own = [f"{scheme}://{host}".lower() for scheme in ("http", "https")]
            is_foreign = origin is not None and origin.decode("latin-1").lower() not in own
        if is_foreign:
            raise ApiError(
                403,
                "origin must be this server's own, as no key is set, got "
                f"{(origin or b'another').decode('latin-1')[:80]}",
                code="foreign_origin",
            )

    def _caller(self, path: str, headers: list[tuple[bytes, bytes]]) -> Caller:
        if not len(self._keys):
            return ANYBODY
        found = None
        for name, value in headers:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                found = value[7:].strip()
            elif name == b"x-api-key":  # the header that Anthropic's clients send
                found = value
        caller = None if found is None else self._keys.find(found.decode("latin-1"))
        if caller is not None:
            return caller
        if path in OPEN:
            return Caller()
        why = "no key was given" if found is None else "it is none of those that this server knows"
        raise ApiError(
            401, f"authorization must be Bearer and a key: {why}", code="invalid_api_key"
        )


def _is_this_machines(host: str) -> bool:
    """Return whether a Host header is an address, or a name that no DNS server can redefine."""
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    name = found[1].strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _preflight(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers that answer a browser's preflight request."""
    asked = next((v for name, v in headers if name == b"access-control-request-headers"), b"")
    return {
        "access-control-allow-methods": "GET, POST, OPTIONS",
        "access-control-allow-headers": asked.decode("latin-1") or "authorization, content-type",
        "access-control-max-age": "600",
    }


def trace_headers(scope: Scope) -> dict[str, str]:
    """Return the client's headers traceparent and tracestate, as far as it sent them."""
    return {
        name.decode(): value.decode("latin-1")
        for name, value in scope["headers"]
        if name in (b"traceparent", b"tracestate")
    }


def caller_of(scope: Scope) -> Caller:
    """Return the caller that `Front` found by the request's key; `ANYBODY` if no keys are set."""
    caller: Caller = scope["state"]["caller"]
    return caller
