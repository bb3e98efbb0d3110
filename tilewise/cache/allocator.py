"""Ownership of cache blocks: reference counts and an ordered free list. No torch.

A block is in one of three states:

    used         ref count >= 1, in no list
    free         ref count 0, content worthless
    free, cached ref count 0, content still known to the prefix cache; share() takes it back

The free list is doubly linked through two integer arrays, so that a cached block can leave its
middle in O(1). Its head is reused next: worthless blocks first (the last released of them first,
since its memory is warm), then cached ones, the least recently used first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tilewise.errors import CacheFullError

__all__ = ["BlockAllocator"]


class BlockAllocator:
    """Hand out block ids 0 ... num_blocks - 1 and count their owners.

    Args:
        num_blocks: the size of the pool, at least 1; every block can be handed out.

    Attributes:
        on_evict: a function called with the id of a cached block just before it is handed out
            again.

    Raises:
        ValueError: num_blocks is below 1.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] | None = None
        self._ref = [0] * num_blocks
        self._cached = bytearray(num_blocks)
        # A ring with one sentinel, index num_blocks: its next is the head, its prev the tail.
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        """The number of blocks that allocate() could hand out, cached ones included."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """The number of blocks with at least one owner."""
        return self.num_blocks - self._num_free

    def ref_count(self, block_id: int) -> int:
        """Return how many owners a block has."""
        return self._ref[block_id]

    def is_cached(self, block_id: int) -> bool:
        """Return whether the prefix cache knows a block's content."""
        return bool(self._cached[block_id])

    def allocate(self, n: int) -> list[int]:
        """Take n blocks from the head of the free list, each with one owner, and return their ids.

        `on_evict` is called for each cached block among them, which then is no longer cached.

        Raises:
            ValueError: n is negative.
            CacheFullError: fewer than n blocks are free; nothing is taken.
        """
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}")
        if n > self._num_free:
            raise CacheFullError(
                f"n must be at most the {self._num_free} free of {self.num_blocks} blocks, got {n}"
            )
        return [self._pop_head() for _ in range(n)]

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one owner to each block; a free cached block leaves the free list.

        Raises:
            ValueError: a block is free and not cached, so that it holds nothing to share.
        """
        for block in block_ids:
            if self._ref[block] == 0:
                if not self._cached[block]:
                    raise ValueError(f"block must be used or cached to be shared, got {block}")
                self._unlink(block)
            self._ref[block] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Remove one owner from each block; blocks without an owner become free.

        Args:
            block_ids: the blocks in order of position. The last is freed first, so that the tail of
                a prefix is reused before its head.

        Raises:
            ValueError: a block has no owner.
        """
        for block in reversed(block_ids):
            if self._ref[block] == 0:
                raise ValueError(f"block must have an owner to be released, got {block}")
            self._ref[block] -= 1
            if self._ref[block] == 0:
                self._link(block)

    def mark_cached(self, block_id: int) -> None:
        """Mark the content of a used block as cached, so that it is kept after its release.

        Raises:
            ValueError: the block has no owner.
        """
        if self._ref[block_id] == 0:
            raise ValueError(f"block must have an owner to be cached, got {block_id}")
        self._cached[block_id] = 1

    def unmark_cached(self, block_id: int) -> None:
        """Mark a block's content as no longer cached; a free block is then reused next. Others are
        not changed."""
        if not self._cached[block_id]:
            return
        self._cached[block_id] = 0
        if self._ref[block_id] == 0:
            self._unlink(block_id)
            self._link(block_id)

    def free_order(self) -> list[int]:
        """Return the free blocks in the order in which they will be allocated."""
        order: list[int] = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks and len(order) <= self.num_blocks:
            order.append(block)
            block = self._next[block]
        return order

    def check_integrity(self) -> None:
        """Verify the invariants of the pool.

        Raises:
            AssertionError: an invariant is broken, and the message names it.
        """
        free = self.free_order()
        unowned = {block for block, count in enumerate(self._ref) if not count}
        cached = [self._cached[block] for block in free]
        ring = [self.num_blocks, *free, self.num_blocks]
        linked = [self._prev[block] for block in ring[1:]] == ring[:-1]
        rules = [
            (min(self._ref) >= 0, "ref counts are at least 0"),
            (len(free) == len(set(free)), "each free block is listed once"),
            (set(free) == unowned, "the free list holds exactly the blocks without an owner"),
            (len(free) == self._num_free, "free + used = num_blocks"),
            (linked, "prev is the inverse of next"),
            (cached == sorted(cached), "free blocks without cached content come first"),
        ]
        for holds, rule in rules:
            if not holds:
                raise AssertionError(f"broken invariant: {rule}")

    def _pop_head(self) -> int:
        block = self._next[self.num_blocks]
        if self._cached[block]:
            if self.on_evict is not None:
                self.on_evict(block)
            self._cached[block] = 0
        self._unlink(block)
        self._ref[block] = 1
        return block

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._num_free -= 1

    def _link(self, block: int) -> None:
        """Insert a block into the free list: cached ones at the tail, worthless ones at the
        head."""
        end = self.num_blocks
        before = self._prev[end] if self._cached[block] else end
        after = self._next[before]
        self._prev[block], self._next[block] = before, after
        self._next[before] = self._prev[after] = block
        self._num_free += 1
