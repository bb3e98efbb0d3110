"""Seeds of samples: 63 bits each, from what the caller has given. No torch."""

from __future__ import annotations

import hashlib

__all__ = ["derive_seed"]


def derive_seed(*parts: object) -> int:
    """Return a seed in 0 ... 2^63 - 1: a BLAKE2 hash of the texts of all parts, equal in every
    process."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
