"""Contents of several pools: a hit is what every group has, as far as its window sees."""

from __future__ import annotations

import random

import pytest

from tilewise.cache.allocator import BlockAllocator
from tilewise.cache.grouped_prefix import GroupedPrefix, first_block


def prefix(*windows, num_blocks=8, block_size=2):
    pools = [BlockAllocator(num_blocks) for _ in windows]
    return GroupedPrefix(pools, windows, block_size), pools


def store(cache, pools, tokens, salt="", groups=None):
    """Keep every full block of tokens in the groups; return the tables, which are released."""
    size, node = cache.block_size, None
    tables = [pool.allocate(len(tokens) // size) for pool in pools]
    for i in range(len(tokens) // size):
        node = cache.child(node, salt, tokens[i * size : (i + 1) * size])
        for group in range(len(pools)) if groups is None else groups:
            assert cache.put(node, group, tables[group][i]) == tables[group][i]
    for pool, table in zip(pools, tables, strict=True):
        pool.release(table)
    cache.check_integrity([])
    return tables


def found(cache, tokens, salt=""):
    return [node.blocks for node in cache.find(tokens, salt)]


@pytest.mark.parametrize(
    ("position", "window", "first"),
    [(0, 5, 0), (4, 5, 0), (5, 5, 0), (7, 5, 0), (8, 5, 1), (11, 5, 1), (12, 5, 2), (8, 1, 2),
     (99, None, 0)],
)  # fmt: skip
def test_the_first_block_is_that_of_the_oldest_key_in_the_window(position, window, first):
    assert first_block(position, window, 4) == first
    keys = range(0 if window is None else max(0, position - window + 1), position + 1)
    assert min(keys) // 4 == first


def test_a_hit_is_what_all_groups_have():
    cache, pools = prefix(None, 3)
    full, window = store(cache, pools, [1, 2, 3, 4, 5, 6])
    expected = [list(pair) for pair in zip(full, window, strict=True)]
    assert found(cache, [1, 2, 3, 4, 5, 6, 7]) == expected
    assert found(cache, [1, 2, 3, 4, 5, 6]) == expected[:2]  # the last token is computed
    assert found(cache, [1, 2, 9, 4, 5, 6, 7]) == expected[:1]
    assert found(cache, [1, 2, 3, 4, 5, 6, 7], "salt") == []


def test_a_window_group_must_have_its_last_blocks_only():
    cache, pools = prefix(None, 3)
    _, window = store(cache, pools, [1, 2, 3, 4, 5, 6, 7, 8])
    pools[1].unmark_cached(window[0])  # as if given away
    cache._evict(1, window[0])
    # At 8 a query sees 6 and 7, of block 3; at 2 it sees 0 and 1, of block 0, which is gone.
    assert len(found(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])) == 4
    assert len(found(cache, [1, 2, 3])) == 0
    pools[1].unmark_cached(window[3])
    cache._evict(1, window[3])
    assert len(found(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])) == 3
    assert len(found(cache, [1, 2, 3, 4, 5])) == 2


def test_a_full_group_ends_the_hit_where_it_lacks_a_block():
    cache, pools = prefix(3, None)
    _, full = store(cache, pools, [1, 2, 3, 4, 5, 6])
    pools[1].unmark_cached(full[1])
    cache._evict(1, full[1])
    assert len(found(cache, [1, 2, 3, 4, 5, 6, 7])) == 1


def test_what_a_sequence_holds_counts_as_had():
    cache, pools = prefix(4)
    [table] = store(cache, pools, [1, 2, 3, 4, 5, 6])
    second = cache.find([1, 2, 3, 4, 5])[-1]
    cache.hold(second)
    for block in table[:2]:
        pools[0].unmark_cached(block)
        cache._evict(0, block)
    assert cache.find([1, 2, 3, 4, 5, 6, 7]) == []
    assert [n.blocks for n in cache.find([1, 2, 3, 4, 5, 6, 7], "", second, 2)] == [[table[2]]]
    cache.drop(second)


def test_a_parent_may_go_before_its_child_and_nothing_is_kept_for_nothing():
    cache, pools = prefix(2, num_blocks=3)
    store(cache, pools, [1, 2, 3, 4, 5, 6])
    version = cache.version
    pools[0].allocate(2)  # evicts
    assert cache.version > version
    cache.check_integrity([])
    pools[0].allocate(1)
    cache.check_integrity([])
    assert not cache._roots


def test_a_hit_changes_when_its_last_user_leaves():
    """A query at 6 sees itself alone, so that its hit needs a name and no block."""
    cache, pools = prefix(1)
    [table] = store(cache, pools, [1, 2, 3, 4, 5, 6])
    last = cache.find([1, 2, 3, 4, 5, 6, 7])[-1]
    cache.hold(last)
    pools[0].unmark_cached(table[2])
    cache._evict(0, table[2])
    assert len(cache.find([1, 2, 3, 4, 5, 6, 7])) == 3
    version = cache.version
    cache.drop(last)
    assert cache.version > version
    assert len(cache.find([1, 2, 3, 4, 5, 6, 7])) == 2


def test_equal_content_is_stored_once():
    cache, pools = prefix(None)
    node = cache.child(None, "", [1, 2])
    older, newer = pools[0].allocate(2)
    assert cache.put(node, 0, older) == older
    assert cache.put(node, 0, newer) == older
    cache.check_integrity([])


def test_what_is_forgotten_is_found_by_nobody():
    cache, pools = prefix(None, 5)
    full, window = store(cache, pools, [1, 2, 3, 4, 5, 6])
    other = store(cache, pools, [7, 7])
    assert cache.forget([1, 2, 3], "") == [set(full), set(window)]
    assert found(cache, [1, 2, 3, 4]) == []
    assert found(cache, [7, 7, 7]) == [[table[0] for table in other]]
    assert cache.forget([9, 9], "") == cache.forget([1, 2], "salt") == [set(), set()]
    cache.check_integrity([])
    cache.reset()
    assert found(cache, [7, 7, 7]) == []
    cache.check_integrity([])


def test_a_beginning_is_that_of_the_child_with_most_tokens_in_common():
    """Whatever comes and goes; of the children that every group has."""
    rng, size = random.Random(3), 3
    cache, pools = prefix(None, 4, num_blocks=60, block_size=size)
    store(cache, pools, [0] * size)
    [parent] = cache.find([0] * (size + 1))
    for round_number in range(300):
        tokens = [rng.randrange(4) for _ in range(size)]
        if rng.random() < 0.3 and parent.children:
            child = parent.children[rng.choice(parent.order)]
            for group in range(len(pools)):
                if child.blocks[group] >= 0:
                    cache.forget_block(group, child.blocks[group])
        elif len(parent.children) < 12:
            node = cache.child(parent, "", tokens)
            # A child that the second group lacks is passed over.
            for group, pool in enumerate(pools[: 1 if round_number % 4 == 0 else 2]):
                block = pool.allocate(1)
                cache.put(node, group, *block)
                pool.release(block)
        cache.check_integrity([])
        wanted = [rng.randrange(4) for _ in range(rng.randrange(1, size + 1))]
        whole = [list(memoryview(node.tokens).cast("i")) for node in parent.children.values()
                 if min(node.blocks) >= 0]  # fmt: skip
        most = max((common(tokens, wanted) for tokens in whole), default=0)
        found, count = cache.begins_inside(parent, wanted)
        assert count == most
        assert (found is None) == (most == 0)
        if found is not None:
            assert found.parent is parent
            assert min(found.blocks) >= 0
            assert common(list(memoryview(found.tokens).cast("i")), wanted) == most


def common(tokens, wanted):
    pairs = zip(tokens, wanted, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(wanted)))


def test_a_forgotten_node_has_no_beginnings():
    cache, pools = prefix(None, 3)
    store(cache, pools, [1, 2, 3, 4])
    [node] = cache.find([1, 2, 9])
    assert cache.begins_inside(node, [3, 9])[1] == 1
    cache.hold(node)
    cache.forget([1, 2, 3], "")
    assert cache.begins_inside(node, [3, 9]) == (None, 0)
    cache.drop(node)
    cache.check_integrity([])
