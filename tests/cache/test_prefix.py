"""The tree of cached blocks: what is found, what is never found, what is forgotten first.

Where layers are of several groups, a hit is what every group has, as far as its window sees.
"""

from __future__ import annotations

import random

import pytest

from tilewise.cache import prefix as prefix_module
from tilewise.cache.allocator import BlockAllocator
from tilewise.cache.prefix import PrefixCache, first_block

P = 4  # block size


def fresh(num_blocks: int = 8) -> tuple[BlockAllocator, PrefixCache]:
    pool = BlockAllocator(num_blocks)
    return pool, PrefixCache([pool], [None], P)


def match(cache: PrefixCache, tokens: list[int], salt: str = "") -> list[int]:
    return [node.blocks[0] for node in cache.find(tokens, salt)]


def compute(
    pool: BlockAllocator, cache: PrefixCache, tokens: list[int], salt: str = ""
) -> list[int]:
    """Act as a sequence that computes tokens: hit, allocate, register; return its table."""
    nodes = cache.find(tokens, salt)
    table = [node.blocks[0] for node in nodes]
    num_hits = len(table)
    pool.share(table)
    table += pool.allocate(-(-len(tokens) // P) - num_hits)
    node = nodes[-1] if nodes else None
    for i in range(num_hits, len(tokens) // P):
        node = cache.child(node, salt, tokens[i * P : (i + 1) * P])
        kept = cache.put(node, 0, table[i])
        if kept != table[i]:
            pool.share([kept])
            pool.release([table[i]])
            table[i] = kept
    pool.check_integrity()
    cache.check_integrity([])
    return table


def test_an_equal_beginning_is_found_block_by_block():
    pool, cache = fresh()
    table = compute(pool, cache, list(range(12)))
    assert match(cache, [*range(8), 99, 98, 97, 96, 95]) == table[:2]
    assert match(cache, [*range(4), 99, *range(5, 20)]) == table[:1]
    assert match(cache, [99, *range(1, 12)]) == []


def test_the_last_token_is_never_a_hit():
    pool, cache = fresh()
    table = compute(pool, cache, list(range(8)))
    assert match(cache, list(range(8))) == table[:1]
    assert match(cache, list(range(9))) == table[:2]
    assert match(cache, [0]) == match(cache, []) == []


def test_only_full_blocks_are_found():
    pool, cache = fresh()
    table = compute(pool, cache, list(range(7)))
    assert match(cache, list(range(20))) == table[:1]


def test_equal_tokens_after_another_beginning_are_not_found():
    pool, cache = fresh()
    compute(pool, cache, [1, 1, 1, 1, 5, 5, 5, 5])
    compute(pool, cache, [2, 2, 2, 2])
    assert len(match(cache, [2, 2, 2, 2, 5, 5, 5, 5, 0])) == 1


def test_salts_never_share():
    pool, cache = fresh()
    table = compute(pool, cache, list(range(8)), salt="alice")
    assert match(cache, list(range(9)), "alice") == table
    assert match(cache, list(range(9)), "bob") == []
    assert match(cache, list(range(9))) == []


def test_a_salt_cannot_pose_as_a_block():
    pool, cache = fresh()
    table = compute(pool, cache, list(range(8)))
    assert match(cache, [4, 5, 6, 7, 0], str(table[0])) == []


def test_colliding_hashes_do_not_share(monkeypatch: pytest.MonkeyPatch):
    class Colliding(bytes):
        """Content whose hash is the same for all."""

        __slots__ = ()
        __hash__ = lambda self: 0  # noqa: E731
        __eq__ = bytes.__eq__

    pack = prefix_module.pack
    monkeypatch.setattr(prefix_module, "pack", lambda tokens: Colliding(pack(tokens)))
    pool, cache = fresh(16)
    tables = [compute(pool, cache, [t] * 8) for t in range(4)]
    assert len({b for table in tables for b in table}) == 8
    for token, table in enumerate(tables):
        assert match(cache, [token] * 9) == table
    assert match(cache, [7] * 9) == []


def test_the_boundaries_of_tokens_are_part_of_the_key():
    pool, cache = fresh()
    compute(pool, cache, [256, 0, 0, 0])
    assert match(cache, [0, 1, 0, 0, 9]) == []
    assert match(cache, [1, 0, 0, 0, 9]) == []


def test_an_owner_of_equal_content_adopts_a_block_that_is_already_free():
    pool, cache = fresh()
    [mine] = pool.allocate(1)
    theirs = compute(pool, cache, [1, 2, 3, 4])
    pool.release(theirs)
    kept = cache.put(cache.child(None, "", [1, 2, 3, 4]), 0, mine)
    assert kept == theirs[0]
    pool.share([kept])
    pool.release([mine])
    assert pool.num_used == 1
    pool.check_integrity()
    cache.check_integrity([])


def test_a_released_prefix_is_still_found_until_its_blocks_are_reused():
    pool, cache = fresh(4)
    table = compute(pool, cache, list(range(12)))
    pool.release(table)
    assert match(cache, list(range(13))) == table
    pool.allocate(2)  # the uncached block, then the tail of the prefix
    assert match(cache, list(range(13))) == table[:2]
    cache.check_integrity([])


def test_the_least_recently_used_prefix_is_forgotten_first():
    pool, cache = fresh(2)
    a = compute(pool, cache, [1] * 4)
    pool.release(a)
    b = compute(pool, cache, [2] * 4)
    pool.release(b)
    pool.share(match(cache, [1] * 5))
    pool.release(a)  # a was used after b
    pool.allocate(1)
    assert match(cache, [2] * 5) == []
    assert match(cache, [1] * 5) == a


def test_a_used_prefix_is_never_forgotten():
    pool, cache = fresh(3)
    table = compute(pool, cache, list(range(8)))
    pool.allocate(1)
    assert match(cache, list(range(9))) == table


def test_matching_changes_nothing():
    pool, cache = fresh()
    table = compute(pool, cache, list(range(8)))
    pool.release(table)
    before = pool.free_order()
    match(cache, list(range(9)))
    assert pool.free_order() == before
    assert pool.num_used == 0


def test_a_block_is_forgotten_with_all_that_follow_it_and_whoever_owns_them():
    pool, cache = fresh()
    used = compute(pool, cache, list(range(12)))
    branch = compute(pool, cache, [0, 1, 2, 3, *range(20, 24)])
    other = compute(pool, cache, list(range(30, 34)))
    pool.release(branch)
    assert cache.forget_block(0, 7) == []
    assert set(cache.forget_block(0, used[1])) == set(used[1:])
    cache.check_integrity([])
    assert match(cache, list(range(13))) == used[:1]
    assert match(cache, [0, 1, 2, 3, *range(20, 25)]) == branch
    assert cache.forget(list(range(12)), "") == [set(branch)]
    cache.check_integrity([])
    pool.check_integrity()
    assert match(cache, [0, 1, 2, 3, *range(20, 25)]) == []
    assert match(cache, list(range(30, 35))) == other
    pool.release(used)


def test_what_was_found_before_is_looked_up_no_further_than_it_may_have_changed():
    pool, cache = fresh(6)
    tokens = list(range(20))
    pool.release(compute(pool, cache, tokens[:12]))
    before = cache.find(tokens)
    assert cache.find_again(tokens, "", before, in_slots=True) is before
    pool.release(compute(pool, cache, tokens[:17]))
    again = cache.find_again(tokens, "", before, in_slots=True)
    assert again == cache.find(tokens)
    assert len(again) == 4
    pool.allocate(4)  # of the free ones the last blocks of the prefix go first
    assert cache.find_again(tokens, "", again, in_slots=True) == cache.find(tokens) == again[:2]
    cache.forget(tokens, "")
    assert cache.find_again(tokens, "", again, in_slots=True) == []
    before = [cache.child(None, "", tokens[:4])]
    [block] = pool.allocate(1)
    cache.put(before[0], 0, block)
    pool.release([block])
    assert cache.find_again(tokens, "", before, in_slots=True) is before
    cache.reset()
    assert cache.find_again(tokens, "", before, in_slots=True) == []


def test_reset_forgets_everything():
    pool, cache = fresh()
    pool.release(compute(pool, cache, list(range(8))))
    cache.reset()
    assert match(cache, list(range(9))) == []
    assert not any(map(pool.is_cached, range(8)))
    pool.check_integrity()
    cache.check_integrity([])


def test_statistics_add_up():
    _, cache = fresh()
    cache.count(10, 4)
    cache.count(6, 0)
    assert (cache.num_query_tokens, cache.num_hit_tokens) == (16, 4)


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda p, c, t: c._node_at[0].pop(t[1]), "a block holds one content"),
        (lambda p, c, t: p._cached.__setitem__(t[2], 0), "exactly the known blocks"),
        (lambda p, c, t: c._node_at[0][t[0]].order.clear(), "children are listed in order"),
        (lambda p, c, t: p.release(t[:1]), "a child is reused before its parent"),
        (lambda p, c, t: c._evict(0, t[1]) or p.unmark_cached(t[1]), "as long as a child"),
        (lambda p, c, t: c.hold(c._node_at[0][t[0]]), "users of a node are counted"),
    ],
)
def test_damage_is_named(damage, rule: str):
    pool, cache = fresh()
    table = compute(pool, cache, list(range(12)))
    damage(pool, cache, table)
    with pytest.raises(AssertionError, match=rule):
        cache.check_integrity([])


# Several groups of layers


def prefix(*windows, num_blocks=8, block_size=2):
    pools = [BlockAllocator(num_blocks) for _ in windows]
    return PrefixCache(pools, windows, block_size), pools


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
