"""Clients of httpx: what they share, and how patient they are."""

from __future__ import annotations

import functools

import httpx
import pytest

# Its own patience is 5 s, for connections that are there and servers with a core of their own.
PATIENCE_S = 60.0


@pytest.fixture(scope="package", autouse=True)
def patient_clients():
    """Let calls that name no timeout, whose default was made with them, bear a busy machine."""
    default = httpx._config.DEFAULT_TIMEOUT_CONFIG
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "read", "write", "pool"):
            patch.setattr(default, name, PATIENCE_S)
        yield


@pytest.fixture(scope="package", autouse=True)
def one_tls_context():
    """Else each call of httpx reads all certificates: 26 ms of a core beside 0.5 for the rest.

    Servers here speak plain HTTP.
    """
    transports = httpx._transports.default
    with pytest.MonkeyPatch.context() as patch:
        made_once = functools.cache(transports.create_ssl_context)
        patch.setattr(transports, "create_ssl_context", made_once)
        yield
