"""Namespaces of cached blocks, by the weights that computed them. No torch."""

from __future__ import annotations

import secrets

__all__ = ["new_version", "unversioned", "versioned"]


def new_version() -> str:
    """Return a random name for new weights, which no others have, in this process or any other."""
    return secrets.token_hex(8)


def versioned(salt: str, version: str) -> str:
    """Return the namespace in the prefix cache of a salt and a version of the weights.

    Version "" is that of the start, whose namespace is the salt. Others begin with two NULs; those
    of `adapters.salted` with three, so none is equal.
    """
    return f"\0\0{version}\0{salt}" if version else salt


def unversioned(salt: str, version: str) -> str:
    """Return the salt of which `versioned` made a namespace for this version."""
    return salt.removeprefix(versioned("", version)) if version else salt
