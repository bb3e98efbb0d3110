"""A tree of contents: exact, shared by prefixes, and no larger than what needs it."""

from __future__ import annotations

from tilewise.cache.contents import Contents


def test_a_node_is_found_by_its_salt_and_all_that_comes_before_it():
    contents = Contents()
    a = contents.child(contents.child(contents.root("s"), b"1"), b"2")
    assert contents.child(contents.child(contents.root("s"), b"1"), b"2") is a
    others = [
        contents.child(contents.child(contents.root("t"), b"1"), b"2"),
        contents.child(contents.child(contents.root("s"), b"3"), b"2"),
        contents.child(contents.root("s"), b"2"),
    ]
    assert all(other is not a and other.digest != a.digest for other in others)


def test_a_content_is_the_whole_prefix():
    contents = Contents()
    parent = contents.child(contents.root("s"), b"1")
    node = contents.child(parent, b"2")
    assert node.content() == ("s", b"12", node.digest, parent.digest)
    assert parent.content().parent == contents.root("s").digest


def test_what_nothing_needs_is_dropped_with_those_before_it():
    contents = Contents()
    a = contents.child(contents.root(""), b"1")
    b, c = contents.child(a, b"2"), contents.child(a, b"3")
    c.slot = 0
    contents.prune(b)
    assert contents.all() == [contents.root(""), a, c]
    c.slot = None
    a.holders = 1
    contents.prune(c)
    assert contents.all() == [contents.root(""), a]
    a.holders = 0
    contents.prune(a)
    assert len(contents) == 0


def test_below_lists_parents_first():
    contents = Contents()
    root = contents.root("")
    a = contents.child(root, b"1")
    b = contents.child(a, b"2")
    assert contents.below(root) == [root, a, b]
