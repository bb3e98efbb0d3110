"""The tree of cached blocks: what is found, what is never found, what is forgotten first."""

from __future__ import annotations

import pytest

from tilewise.cache import prefix as prefix_module
from tilewise.cache.allocator import BlockAllocator
from tilewise.cache.prefix import PrefixCache

P = 4  # block size


def fresh(num_blocks: int = 8) -> tuple[BlockAllocator, PrefixCache]:
    pool = BlockAllocator(num_blocks)
    return pool, PrefixCache(pool, P)


def compute(
    pool: BlockAllocator, cache: PrefixCache, tokens: list[int], salt: str = ""
) -> list[int]:
    """Act as a sequence that computes tokens: hit, allocate, register; return its table."""
    table = cache.match(tokens, salt)
    num_hits = len(table)
    pool.share(table)
    table += pool.allocate(-(-len(tokens) // P) - num_hits)
    for i in range(num_hits, len(tokens) // P):
        parent = table[i - 1] if i else salt
        kept = cache.register(table[i], parent, tokens[i * P : (i + 1) * P])
        if kept != table[i]:
            pool.share([kept])
            pool.release([table[i]])
            table[i] = kept
    pool.check_integrity()
    cache.check_integrity()
    return table


def test_an_equal_beginning_is_found_block_by_block():
    pool, cache = fresh()
    table = compute(pool, cache, list(range(12)))
    assert cache.match([*range(8), 99, 98, 97, 96, 95]) == table[:2]
    assert cache.match([*range(4), 99, *range(5, 20)]) == table[:1]
    assert cache.match([99, *range(1, 12)]) == []


def test_the_last_token_is_never_a_hit():
    pool, cache = fresh()
    table = compute(pool, cache, list(range(8)))
    assert cache.match(list(range(8))) == table[:1]
    assert cache.match(list(range(9))) == table[:2]
    assert cache.match([0]) == cache.match([]) == []


def test_only_full_blocks_are_found():
    pool, cache = fresh()
    table = compute(pool, cache, list(range(7)))
    assert cache.match(list(range(20))) == table[:1]


def test_equal_tokens_after_another_beginning_are_not_found():
    pool, cache = fresh()
    compute(pool, cache, [1, 1, 1, 1, 5, 5, 5, 5])
    compute(pool, cache, [2, 2, 2, 2])
    assert len(cache.match([2, 2, 2, 2, 5, 5, 5, 5, 0])) == 1


def test_salts_never_share():
    pool, cache = fresh()
    table = compute(pool, cache, list(range(8)), salt="alice")
    assert cache.match(list(range(9)), "alice") == table
    assert cache.match(list(range(9)), "bob") == []
    assert cache.match(list(range(9))) == []


def test_a_salt_cannot_pose_as_a_block():
    pool, cache = fresh()
    table = compute(pool, cache, list(range(8)))
    assert cache.match([4, 5, 6, 7, 0], str(table[0])) == []


def test_colliding_hashes_do_not_share(monkeypatch: pytest.MonkeyPatch):
    class Colliding(bytes):
        """Content whose hash is the same for all."""

        __slots__ = ()
        __hash__ = lambda self: 0  # noqa: E731
        __eq__ = bytes.__eq__

    pack = prefix_module._pack
    monkeypatch.setattr(prefix_module, "_pack", lambda tokens: Colliding(pack(tokens)))
    pool, cache = fresh(16)
    tables = [compute(pool, cache, [t] * 8) for t in range(4)]
    assert len({b for table in tables for b in table}) == 8
    for token, table in enumerate(tables):
        assert cache.match([token] * 9) == table
    assert cache.match([7] * 9) == []


def test_the_boundaries_of_tokens_are_part_of_the_key():
    pool, cache = fresh()
    compute(pool, cache, [256, 0, 0, 0])
    assert cache.match([0, 1, 0, 0, 9]) == []
    assert cache.match([1, 0, 0, 0, 9]) == []


def test_equal_content_is_stored_once_and_the_first_stays():
    pool, cache = fresh()
    first, second = pool.allocate(1), pool.allocate(1)
    assert cache.register(first[0], "", [1, 2, 3, 4]) == first[0]
    assert cache.register(second[0], "", [1, 2, 3, 4]) == first[0]
    assert cache.num_cached_blocks == 1
    cache.check_integrity()


def test_an_owner_of_equal_content_adopts_a_block_that_is_already_free():
    pool, cache = fresh()
    [mine] = pool.allocate(1)
    theirs = compute(pool, cache, [1, 2, 3, 4])
    pool.release(theirs)
    kept = cache.register(mine, "", [1, 2, 3, 4])
    assert kept == theirs[0]
    pool.share([kept])
    pool.release([mine])
    assert pool.num_used == 1
    pool.check_integrity()
    cache.check_integrity()


def test_a_released_prefix_is_still_found_until_its_blocks_are_reused():
    pool, cache = fresh(4)
    table = compute(pool, cache, list(range(12)))
    pool.release(table)
    assert cache.match(list(range(13))) == table
    pool.allocate(2)  # the uncached block, then the tail of the prefix
    assert cache.match(list(range(13))) == table[:2]
    cache.check_integrity()


def test_the_least_recently_used_prefix_is_forgotten_first():
    pool, cache = fresh(2)
    a = compute(pool, cache, [1] * 4)
    pool.release(a)
    b = compute(pool, cache, [2] * 4)
    pool.release(b)
    pool.share(cache.match([1] * 5))
    pool.release(a)  # a was used after b
    pool.allocate(1)
    assert cache.match([2] * 5) == []
    assert cache.match([1] * 5) == a


def test_a_used_prefix_is_never_forgotten():
    pool, cache = fresh(3)
    table = compute(pool, cache, list(range(8)))
    pool.allocate(1)
    assert cache.match(list(range(9))) == table


def test_matching_changes_nothing():
    pool, cache = fresh()
    table = compute(pool, cache, list(range(8)))
    pool.release(table)
    before = pool.free_order()
    cache.match(list(range(9)))
    assert pool.free_order() == before
    assert pool.num_used == 0


def test_a_block_is_forgotten_with_all_that_follow_it_and_whoever_owns_them():
    pool, cache = fresh()
    used = compute(pool, cache, list(range(12)))
    branch = compute(pool, cache, [0, 1, 2, 3, *range(20, 24)])
    other = compute(pool, cache, list(range(30, 34)))
    pool.release(branch)
    with pytest.raises(ValueError, match="block_id must be registered to be forgotten, got 7"):
        cache.forget(7)
    assert cache.forget(used[1]) == set(used[1:])
    cache.check_integrity()
    assert cache.match(list(range(13))) == used[:1]
    assert cache.match([0, 1, 2, 3, *range(20, 25)]) == branch
    assert cache.forget(used[0]) == set(branch)
    cache.check_integrity()
    pool.check_integrity()
    assert cache.match([0, 1, 2, 3, *range(20, 25)]) == []
    assert cache.match(list(range(30, 35))) == other
    pool.release(used)
    assert cache.num_cached_blocks == 1


def test_reset_forgets_everything():
    pool, cache = fresh()
    pool.release(compute(pool, cache, list(range(8))))
    cache.reset()
    assert cache.match(list(range(9))) == []
    assert cache.num_cached_blocks == 0
    pool.check_integrity()
    cache.check_integrity()


def test_reset_is_refused_while_a_cached_block_is_used():
    pool, cache = fresh()
    table = compute(pool, cache, list(range(8)))
    with pytest.raises(ValueError, match="must be unused to be forgotten, got 2 used"):
        cache.reset()
    assert cache.match(list(range(9))) == table


def test_a_partial_block_cannot_be_registered():
    pool, cache = fresh()
    [block] = pool.allocate(1)
    with pytest.raises(ValueError, match="token_ids must be 4 tokens, got 3"):
        cache.register(block, "", [1, 2, 3])


def test_a_child_of_an_unknown_parent_cannot_be_registered():
    pool, cache = fresh()
    parent, child = pool.allocate(2)
    with pytest.raises(ValueError, match=f"parent must be a registered block, got {parent}"):
        cache.register(child, parent, [1, 2, 3, 4])


def test_a_block_cannot_be_registered_twice():
    pool, cache = fresh()
    [block] = pool.allocate(1)
    cache.register(block, "", [1, 2, 3, 4])
    with pytest.raises(ValueError, match=f"must not be registered yet, got {block}"):
        cache.register(block, "", [5, 6, 7, 8])


def test_statistics_add_up():
    _, cache = fresh()
    cache.count(10, 4)
    cache.count(6, 0)
    assert (cache.num_query_tokens, cache.num_hit_tokens) == (16, 4)


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda p, c, t: c._key_of.__setitem__(t[1], None), "one block per key"),
        (lambda p, c, t: p._cached.__setitem__(t[2], 0), "exactly the registered blocks"),
        (lambda p, c, t: c._children_of[t[0]].clear(), "children of a block are listed in order"),
        (lambda p, c, t: p.release(t[:1]), "a child is reused before its parent"),
    ],
)
def test_damage_is_named(damage, rule: str):
    pool, cache = fresh()
    table = compute(pool, cache, list(range(12)))
    damage(pool, cache, table)
    with pytest.raises(AssertionError, match=rule):
        cache.check_integrity()
