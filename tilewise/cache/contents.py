"""What a block holds, named independently of where it lies. No torch.

A tree of contents: the root is a salt, and each node below it the tokens of one block after those
of its parent. Nodes are found by comparing whole keys, so a hit is as exact as the prefix cache's.
A node lives as long as it has a child, a block in main memory or a block on the device that names
it. Its digest is only the name of a file, which carries the content itself.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

__all__ = ["Content", "Contents", "Node", "child_digest", "root_digest"]


def root_digest(salt: str) -> bytes:
    """Return the digest of a salt, 16 bytes."""
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def child_digest(parent: bytes, tokens: bytes) -> bytes:
    """Return the digest of a block's tokens after a parent's digest, 16 bytes."""
    return hashlib.blake2b(parent + tokens, digest_size=16).digest()


class Content(NamedTuple):
    """One block of a prefix.

    Attributes:
        salt: of the prefix.
        tokens: of the prefix up to the end of the block, 4 bytes each.
        digest: of the block.
        parent: the digest of the first block of the prefix, or for that of its salt: a store that
            forgets a first block forgets all behind it, also where files between have gone.
    """

    salt: str
    tokens: bytes
    digest: bytes
    parent: bytes


class Node:
    """A block's content; made by Contents only.

    Attributes:
        parent: what comes before; None for a root.
        tokens: of this block, packed.
        digest: of the whole prefix.
        salt: of the root.
        slot: the block in main memory that holds it, or None.
        holders: device blocks that name it.
    """

    __slots__ = ("children", "digest", "holders", "parent", "salt", "slot", "tokens")

    def __init__(self, parent: Node | None, salt: str, tokens: bytes, digest: bytes) -> None:
        self.parent, self.salt, self.tokens, self.digest = parent, salt, tokens, digest
        self.children: dict[bytes, Node] = {}
        self.slot: int | None = None
        self.holders = 0

    def content(self) -> Content:
        """Return what the block holds, with all that comes before."""
        parts: list[bytes] = []
        node = first = self
        while node.parent is not None:
            parts.append(node.tokens)
            first, node = node, node.parent
        parent = node.digest if first is self else first.digest
        return Content(self.salt, b"".join(reversed(parts)), self.digest, parent)


class Contents:
    """The trees of all salts."""

    def __init__(self) -> None:
        self._roots: dict[str, Node] = {}

    def __len__(self) -> int:
        return len(self._roots)

    def root(self, salt: str) -> Node:
        """Return the root of a salt, made if need be."""
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = Node(None, salt, b"", root_digest(salt))
        return node

    def child(self, parent: Node, tokens: bytes) -> Node:
        """Return the node of a block after its parent, made if need be."""
        node = parent.children.get(tokens)
        if node is None:
            node = Node(parent, parent.salt, tokens, child_digest(parent.digest, tokens))
            parent.children[tokens] = node
        return node

    def prune(self, node: Node) -> None:
        """Drop a node that nothing needs, and those before it that only it needed."""
        while not (node.children or node.holders or node.slot is not None):
            if node.parent is None:
                self._roots.pop(node.salt, None)
                return
            node.parent.children.pop(node.tokens, None)
            node = node.parent

    def below(self, node: Node) -> list[Node]:
        """Return a node and all that follow it, parents first."""
        found = [node]
        for each in found:  # it grows meanwhile
            found += each.children.values()
        return found

    def all(self) -> list[Node]:
        """Return every node."""
        return [node for root in self._roots.values() for node in self.below(root)]
