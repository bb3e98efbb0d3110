"""Namespaces of cached blocks, by the weights that computed them. No torch."""

from __future__ import annotations

import secrets

__all__ = ["new_version", "unversioned", "versioned"]


def new_version() -> str:
    """Return a name for weights that no others have, in this process or any other."""
    return secrets.token_hex(8)


def versioned(salt: str, version: str) -> str:
    """Return the namespace of the blocks of a salt and of weights; "" is those of the start.

    No namespace of `adapters.salted` begins so: behind two NULs it has a third.
    """
    return f"\0\0{version}\0{salt}" if version else salt


def unversioned(salt: str, version: str) -> str:
    """Return the salt of a namespace."""
    return salt.removeprefix(versioned("", version)) if version else salt
