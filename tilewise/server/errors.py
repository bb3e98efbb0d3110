"""Errors that a client receives, in the format of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

__all__ = ["ApiError", "ClientLeft", "invalid", "named", "renamed", "unknown", "unserved"]

MAX_NAME = 80  # characters of a field's path that an error repeats: clients choose names in it

# OpenAI's error types by status; any other status is an error of the server.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "client_closed_request",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error to send to the client: an answer with an HTTP status of 400 or above.

    Args:
        status: the HTTP status.
        message: one sentence; "name must <rule>, got <value>" where a field is at fault.
        param: the path of the field at fault, such as "messages[0].content"; None for no field.
        code: a machine-readable code; None takes the status's default.
        retry_after_s: seconds after which a retry may succeed; None sends no Retry-After header.
        kind: the error's type; None takes the status's default.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or HTTPStatus(status).name.lower()
        self.retry_after_s = retry_after_s
        self.kind = kind or _TYPES.get(status, "server_error")

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer: the JSON object `{"error": ...}` that OpenAI's clients expect."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer beside its content's: retry-after if known, and
        www-authenticate with status 401."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


class ClientLeft(ApiError):
    """The client has closed its connection: an error that is logged with nginx's status 499, and
    not sent."""

    def __init__(self) -> None:
        super().__init__(499, "the client has closed the connection", code="client_closed_request")


def invalid(message: str, param: str | None = None, *, code: str = "invalid_value") -> ApiError:
    """Return the error 400 for an invalid value in a request; arguments as in `ApiError`."""
    return ApiError(400, message, param=param, code=code)


def renamed(error: ApiError, names: Sequence[tuple[str, str]]) -> ApiError:
    """Return a chat's error with its field renamed, in `param` and in the message, as another form
    of the API names it; the error itself if no name fits.

    Args:
        names: pairs (name in a chat, name in the other form); the first pair whose name is the
            field or contains it is used.
    """
    param = error.param or ""
    for old, new in names:
        if param == old or param.startswith((old + ".", old + "[")):
            told = ApiError(
                error.status,
                error.message.replace(old, new, 1),
                param=new + param[len(old) :],
                code=error.code,
                retry_after_s=error.retry_after_s,
                kind=error.kind,
            )
            return told.with_traceback(error.__traceback__)
    return error


def named(path: str) -> str:
    """Return the path of a field for an error message: shortened, and of printable characters."""
    text = path if path.isascii() and path.isprintable() else ascii(path)[1:-1]
    return text if len(text) <= MAX_NAME else f"{text[:MAX_NAME]}... ({len(text)} characters)"


def unknown(path: str) -> ApiError:
    """Return the error 400, code "unknown_parameter", for a field that no API has."""
    where = named(path)
    return invalid(f"{where} is not a known field", where, code="unknown_parameter")


def unserved(param: str, what: str = "") -> ApiError:
    """Return the error 400, code "unsupported_parameter", for a known field, or a value of one,
    that this server does not support.

    Args:
        param: the path of the field.
        what: the reason, appended to the message.
    """
    because = f": {what}" if what else ""
    return invalid(f"{param} is not served here{because}", param, code="unsupported_parameter")
