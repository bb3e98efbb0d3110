"""Reference counts, the order of reuse, and the refusals of the block pool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tilewise.cache.allocator import BlockAllocator
from tilewise.errors import CacheFullError


def test_every_block_can_be_handed_out():
    pool = BlockAllocator(4)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]
    assert (pool.num_free, pool.num_used) == (0, 4)
    pool.check_integrity()


def test_asking_for_too_many_takes_nothing():
    pool = BlockAllocator(4)
    pool.allocate(1)
    with pytest.raises(CacheFullError, match="at most the 3 free of 4 blocks, got 4"):
        pool.allocate(4)
    assert pool.num_free == 3
    pool.check_integrity()


def test_asking_for_none_is_fine_in_a_full_pool():
    pool = BlockAllocator(1)
    pool.allocate(1)
    assert pool.allocate(0) == []


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="n must be at least 0, got -1"):
        BlockAllocator(4).allocate(-1)


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        BlockAllocator(0)


def test_a_shared_block_is_free_after_its_last_owner():
    pool = BlockAllocator(2)
    [block] = pool.allocate(1)
    pool.share([block])
    pool.release([block])
    assert (pool.ref_count(block), pool.num_used) == (1, 1)
    pool.release([block])
    assert (pool.ref_count(block), pool.num_used) == (0, 0)
    pool.check_integrity()


def test_a_double_release_is_refused():
    pool = BlockAllocator(2)
    [block] = pool.allocate(1)
    pool.release([block])
    with pytest.raises(ValueError, match=f"must have an owner to be released, got {block}"):
        pool.release([block])
    pool.check_integrity()


def test_worthless_blocks_are_reused_first_and_the_last_released_before_others():
    pool = BlockAllocator(5)
    blocks = pool.allocate(5)
    pool.mark_cached(blocks[0])
    pool.release(blocks[:3])  # 0 cached, 1 and 2 not
    assert pool.free_order() == [blocks[1], blocks[2], blocks[0]]
    assert pool.allocate(3) == [blocks[1], blocks[2], blocks[0]]


def test_cached_blocks_are_reused_least_recently_used_first_tail_before_head():
    pool = BlockAllocator(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for block in old + new:
        pool.mark_cached(block)
    pool.release(old)
    pool.release(new)
    assert pool.free_order() == [old[1], old[0], new[1], new[0]]


def test_a_cached_block_comes_back_from_the_middle_of_the_free_list():
    pool = BlockAllocator(5)
    blocks = pool.allocate(5)
    for block in blocks:
        pool.mark_cached(block)
    pool.release(blocks)
    pool.share([blocks[2]])
    assert pool.ref_count(blocks[2]) == 1
    assert pool.free_order() == [blocks[i] for i in (4, 3, 1, 0)]
    pool.check_integrity()


def test_a_free_block_without_content_cannot_be_shared():
    pool = BlockAllocator(2)
    with pytest.raises(ValueError, match="must be used or cached to be shared, got 1"):
        pool.share([1])


def test_only_a_used_block_can_be_cached():
    with pytest.raises(ValueError, match="must have an owner to be cached, got 0"):
        BlockAllocator(2).mark_cached(0)


def test_reuse_of_a_cached_block_is_announced_once():
    pool = BlockAllocator(3)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    blocks = pool.allocate(3)
    pool.mark_cached(blocks[1])
    pool.release(blocks)
    assert evicted == []
    pool.allocate(3)
    assert evicted == [blocks[1]]
    assert not pool.is_cached(blocks[1])


def test_content_that_became_worthless_is_reused_next():
    pool = BlockAllocator(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.mark_cached(block)
    pool.release(blocks)
    pool.unmark_cached(blocks[0])
    assert pool.free_order()[0] == blocks[0]
    pool.check_integrity()


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda p: p._ref.__setitem__(0, -1), "ref counts are at least 0"),
        (lambda p: p._ref.__setitem__(3, 0), "exactly the blocks without an owner"),
        (lambda p: p._ref.__setitem__(1, 1), "exactly the blocks without an owner"),
        (lambda p: p._next.__setitem__(2, 1), "each free block is listed once"),
        (lambda p: p._prev.__setitem__(2, 0), "prev is the inverse of next"),
        (lambda p: setattr(p, "_num_free", 4), r"free \+ used = num_blocks"),
        (lambda p: p._cached.__setitem__(0, 1), "without cached content come first"),
    ],
)
def test_damage_is_named(damage, rule: str):
    pool = BlockAllocator(4)
    pool.release(pool.allocate(4)[:3])  # free: 0, 1, 2; used: 3
    assert pool.free_order() == [0, 1, 2]
    pool.check_integrity()
    damage(pool)
    with pytest.raises(AssertionError, match=rule):
        pool.check_integrity()


def test_allocator_prefix_and_scheduler_import_no_torch():
    modules = (
        "tilewise.cache.allocator, tilewise.cache.prefix, tilewise.engine.scheduling.scheduler"
    )
    code = (
        "import sys, types\n"
        "for name in ('tilewise', 'tilewise.cache', 'tilewise.engine'):\n"
        "    package = types.ModuleType(name)\n"  # the packages' own __init__ may import more
        "    package.__path__ = [name.replace('.', '/')]\n"
        "    sys.modules[name] = package\n"
        f"import {modules}\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=root)
