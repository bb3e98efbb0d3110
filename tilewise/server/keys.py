"""API keys: callers by name, with hashes of their keys that are compared in constant time.

Keys are long random strings, so that a plain SHA-256, without salt or many rounds, protects them.

A keys file is TOML, a table for each key:

    [keys.alice]
    hash = "sha256:2bb80d53..."     # `tilewise key alice` prints this and the key
    priority = 0                    # lower runs earlier
    weight = 1.0                    # share of tokens under --scheduling-policy fair
    tokens_per_minute = 100000
    max_requests = 16               # at once
    max_prompt_tokens = 8000
    group = "team"                  # keys of a group share prefixes
    admin = false
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tilewise.errors import shown

__all__ = ["ANYBODY", "MAX_NAME", "Caller", "KeyRing", "hash_of", "new_key", "read_keys"]

PREFIX = "sha256:"
MIN_KEY = 8  # characters of a key that the operator chose: shorter ones can be guessed
MOST = 2**53  # largest number in a keys file: floats up to it are exact
MAX_NAME = 64  # characters of the name of a key or of a group


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of an API key.

    Attributes:
        name: the key's name in logs and metrics, and the engine's user for fair shares; "" if the
            server has no keys.
        priority: the lowest priority value of the key's requests, lower runs earlier; a request may
            only add to it.
        weight: the key's share of tokens under the fair policy.
        tokens_per_minute: the largest number of prompt and generated tokens a minute; None for no
            limit.
        max_requests: the largest number of requests at the same time; None for no limit.
        max_prompt_tokens: the largest prompt; None for the server's limit.
        group: the name of a group, whose callers share cached prefixes; None shares with no other.
        admin: True if the key may use the administration routes and see all callers' requests.
    """

    name: str = ""
    priority: int = 0
    weight: float = 1.0
    tokens_per_minute: int | None = None
    max_requests: int | None = None
    max_prompt_tokens: int | None = None
    group: str | None = None
    admin: bool = False

    def salt(self, asked: str | None) -> str:
        """Return the salt of a request of this caller: its namespace of the prefix cache.

        It is made of the caller's group, or else name, and of `asked`, the cache_salt in the
        request; "" if there is neither. The length of the name stands before the name, so that two
        callers can never have equal namespaces.
        """
        kind, owner = ("group", self.group) if self.group is not None else ("key", self.name)
        if not owner and not asked:
            return ""
        return f"{kind}:{len(owner)}:{owner}:{asked or ''}"


ANYBODY = Caller(admin=True)  # the caller of all requests where there are no keys


def hash_of(key: str) -> str:
    """Return the hash under which a keys file lists a key: "sha256:" and 64 hexadecimal digits."""
    return PREFIX + hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """Draw a new key: "tw-" and 256 random bits as text."""
    return f"tw-{secrets.token_urlsafe(32)}"


class KeyRing:
    """The keys that the server accepts; it finds the caller of a key.

    Args:
        callers: the callers by the hash of their key, see hash_of().
    """

    def __init__(self, callers: dict[str, Caller]) -> None:
        self._callers = [(bytes.fromhex(h.removeprefix(PREFIX)), c) for h, c in callers.items()]

    def __len__(self) -> int:
        return len(self._callers)

    @property
    def callers(self) -> list[Caller]:
        """All callers that have a key."""
        return [caller for _, caller in self._callers]

    def find(self, key: str) -> Caller | None:
        """Return the caller with this key, or None; every stored hash is compared."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found: Caller | None = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def read_keys(path: Path) -> dict[str, Caller]:
    """Read a keys file.

    Returns:
        The callers by the hash of their key.

    Raises:
        ValueError: the file is not TOML, has an unknown or ill-typed entry, or the same key twice.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    # int() raises ValueError for numbers of thousands of digits, too
    except (ValueError, RecursionError) as error:
        raise ValueError(f"keys file {path} must be TOML, got {error}") from None
    tables = content.pop("keys", None)
    if content or not isinstance(tables, dict) or not tables:
        raise ValueError(f"keys file {path} must hold tables [keys.NAME] and nothing else")
    callers: dict[str, Caller] = {}
    for name, table in tables.items():
        digest, caller = _caller(path, name, table)
        if digest in callers:
            raise ValueError(f"keys file {path} must hold each key once, got {name!r} again")
        callers[digest] = caller
    return callers


_KINDS: dict[str, tuple[type, ...]] = {
    "priority": (int,),
    "weight": (int, float),
    "tokens_per_minute": (int,),
    "max_requests": (int,),
    "max_prompt_tokens": (int,),
    "group": (str,),
    "admin": (bool,),
}


# Scripts hash an empty string or a line end by mistake. A hash does not show other lengths.
_SHORT = frozenset(map(hash_of, ("", "\n", "\r\n", " ")))


def _caller(path: Path, name: str, table: Any) -> tuple[str, Caller]:
    if not isinstance(table, dict):
        raise ValueError(f"keys file {path} must hold a table for {name!r}")
    if not 1 <= len(name) <= MAX_NAME:
        # "" is the caller without a key, and the engine would refuse every request with a long name
        raise ValueError(f"names of keys must be 1 ... {MAX_NAME} characters, got {len(name)}")
    digest = table.pop("hash", None)
    digits = digest.removeprefix(PREFIX) if isinstance(digest, str) else ""
    if len(digits) != 64 or any(c not in "0123456789abcdef" for c in digits):
        # The value is not repeated: it may be the key itself, entered here by mistake.
        raise ValueError(f"hash of key {name!r} must be sha256: and 64 hexadecimal digits")
    if PREFIX + digits in _SHORT:
        raise ValueError(
            f"hash of key {name!r} must be of a key of at least {MIN_KEY} characters, got none"
        )
    for entry, value in table.items():
        if entry not in _KINDS:
            known = ", ".join(f.name for f in fields(Caller) if f.name != "name")
            raise ValueError(f"entries of key {name!r} must be hash, {known}, got {entry!r}")
        is_bool = isinstance(value, bool)
        if not isinstance(value, _KINDS[entry]) or (is_bool and bool not in _KINDS[entry]):
            wanted = " or ".join(kind.__name__ for kind in _KINDS[entry])
            raise ValueError(f"{entry} of key {name!r} must be {wanted}, got {value!r}")
        if entry == "group" and not 1 <= (length := len(str(value))) <= MAX_NAME:
            raise ValueError(
                f"group of key {name!r} must be 1 ... {MAX_NAME} characters, got {length}"
            )
        if isinstance(value, int | float) and entry not in ("priority", "admin") and not value > 0:
            raise ValueError(f"{entry} of key {name!r} must be above 0, got {value!r}")
        if isinstance(value, int | float) and not abs(value) < MOST:
            raise ValueError(f"{entry} of key {name!r} must be below 2^53, got {shown(value)}")
    return PREFIX + digits, Caller(name=name, **table)
