"""The page at `/`: one document that contains its style and script and loads nothing else.

The content security policy lists the hashes of the contents, so that no other script runs and no
other address is contacted. With keys set a browser, which sends no key, gets the gate: a form that
asks for the key and fetches the page with it. The key is sent in a header and stored for the tab
(sessionStorage), never in an address.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

__all__ = ["gate", "headers", "page"]

# Without an icon in the page browsers request one: four blocks, one of them in use.
_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path fill="#8a94a0" '
    'd="M1 1h6v6H1zM9 9h6v6H9zM1 9h6v6H1z"/><path fill="#1558b0" d="M9 1h6v6H9z"/></svg>'
)

FILES = ("index.html", "gate.html", "page.css", "page.js", "gate.js")


@cache
def _text(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def page() -> bytes:
    """Return the HTML document of the page in UTF-8, with its style, script and icon in it."""
    return _filled("index.html", "page.js")


def gate() -> bytes:
    """Return the HTML document in UTF-8 of the form that asks for the API key."""
    return _filled("gate.html", "gate.js")


@cache
def headers() -> dict[str, str]:
    """Return the HTTP headers of `page` and of `gate`.

    One content security policy fits both documents, as the gate is replaced by the page.
    """
    scripts = " ".join(_hash(_text(name)) for name in ("page.js", "gate.js"))
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src {_hash(_text('page.css'))}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy,
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
    }


@cache
def _filled(document: str, script: str) -> bytes:
    text = _text(document).replace("@STYLE@", _text("page.css"))
    text = text.replace("@ICON@", base64.b64encode(_ICON.encode()).decode())
    return text.replace("@SCRIPT@", _text(script)).encode()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
