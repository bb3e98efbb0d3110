"""The names of contents: one for each prefix, with its first block's beside it."""

from __future__ import annotations

from tilewise.cache.allocator import BlockAllocator
from tilewise.cache.contents import child_digest, content_of, root_digest
from tilewise.cache.prefix import PrefixCache


def chain(tokens, salt=""):
    tree = PrefixCache([BlockAllocator(8), BlockAllocator(8)], [None, 3], 2)
    nodes = []
    for i in range(0, len(tokens), 2):
        nodes.append(tree.child(nodes[-1] if nodes else None, salt, tokens[i : i + 2]))
    return nodes


def test_content_names_its_first_block():
    """Who forgets that forgets all behind it, also where the files between have gone."""
    first, second, third = map(content_of, chain([1, 2, 3, 4, 5, 6], "s"))
    assert first.parent == root_digest("s")
    assert first.digest == second.parent == third.parent
    assert third.digest == child_digest(second.digest, third.tokens[-8:])
    assert third.tokens == b"".join(i.to_bytes(4, "little") for i in range(1, 7))
    # The digest is kept, and is no other when the last block is asked first.
    assert content_of(chain([1, 2, 3, 4, 5, 6], "s")[2]) == third


def test_prefixes_of_other_salts_and_other_beginnings_have_other_names():
    texts = [([1, 2, 3, 4], "s"), ([1, 2, 3, 4], "t"), ([5, 6, 3, 4], "s"), ([3, 4], "s")]
    assert len({content_of(chain(*text)[-1]).digest for text in texts}) == 4
