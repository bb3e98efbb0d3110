"""Names of block contents, independent of where a block lies. No torch.

The digest of a prefix only names a file, which contains the tokens themselves.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from tilewise.cache.prefix import PrefixNode

__all__ = ["Content", "child_digest", "content_of", "path_to", "root_digest"]


def root_digest(salt: str) -> bytes:
    """Return the digest of a salt, 16 bytes: the parent of a prompt's first block in
    `child_digest`."""
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def child_digest(parent: bytes, tokens: bytes) -> bytes:
    """Return the digest, 16 bytes, of a prefix that ends with a block: of the parent's digest and
    `tokens`."""
    return hashlib.blake2b(parent + tokens, digest_size=16).digest()


class Content(NamedTuple):
    """The content of one block of a prefix, as a store of files names and checks it.

    Attributes:
        salt: the salt of the prefix.
        tokens: the tokens of the prefix up to the end of the block, 4 bytes each.
        digest: the digest of the prefix up to the block.
        parent: the digest of the first block of the prefix, or for that block the digest of its
            salt. A store that forgets a first block forgets all blocks after it, even if files
            between are gone.
    """

    salt: str
    tokens: bytes
    digest: bytes
    parent: bytes


def content_of(node: PrefixNode) -> Content:
    """Return the content of a node's block, with all tokens before it. Digests are kept in the
    nodes."""
    chain = path_to(node)
    root = digest = root_digest(node.salt)
    first = root
    for each in chain:
        if not each.digest:
            each.digest = child_digest(digest, each.tokens)
        first = each.digest if digest is root else first
        digest = each.digest
    tokens = b"".join(each.tokens for each in chain)
    return Content(node.salt, tokens, digest, root if len(chain) == 1 else first)


def path_to(node: PrefixNode) -> list[PrefixNode]:
    """Return the nodes from that of the first block to `node`, both included; the root is left
    out."""
    nodes: list[PrefixNode] = []
    at = node
    while at.parent is not None:
        nodes.append(at)
        at = at.parent
    return nodes[::-1]
