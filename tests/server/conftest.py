"""Clients of httpx share what they read of certificates: servers here speak plain HTTP."""

from __future__ import annotations

import functools

import httpx
import pytest


@pytest.fixture(scope="package", autouse=True)
def one_tls_context():
    """Else each call of httpx reads all certificates: 26 ms of a core beside 0.5 for the rest."""
    transports = httpx._transports.default
    with pytest.MonkeyPatch.context() as patch:
        made_once = functools.cache(transports.create_ssl_context)
        patch.setattr(transports, "create_ssl_context", made_once)
        yield
