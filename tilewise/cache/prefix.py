"""Find the blocks that already hold the beginning of a prompt. No torch.

Cached blocks form a tree. A block's key is (parent, tokens): the parent is the block before it, or
the salt for the first block of a prompt, and tokens are its own block_size token ids. A dictionary
maps keys to blocks, and a dictionary compares whole keys, so a hit is exact by induction: the
parent is the very block that was matched one step before, the tokens are equal one by one, and a
salt (a string) never equals a block (an integer). No digest stands for content anywhere. What is
hashed to find a key is a byte string, for which Python uses a keyed hash with a secret per process,
so an attacker cannot craft prompts that collide.

A block id may serve as the parent's name because a parent stays cached at least as long as its
children: each owner of a child owns the parent, and owners release tails first, so that the child
is always reused before the parent. Because equal content is stored once (register() names the
older block and the caller adopts it), this also holds for sequences that computed the same prefix
side by side.

A prompt may leave the tree inside a block: its tokens begin as those of a child do, and go on in
another way. The children of each block are kept in the order of their packed tokens, where the one
with the longest common beginning stands beside the place that the prompt's own tokens would have:
begins_inside() finds it by bisection, however many children there are.

Idea: vLLM's hash chain over full blocks (Kwon et al., 2023, section 4.4 and later), with the
chain's digests replaced by the identity of the parent.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

from tilewise.cache.allocator import BlockAllocator

__all__ = ["PrefixCache"]

Key = tuple[int | str, bytes]


def _pack(token_ids: Sequence[int]) -> bytes:
    """Return token ids as bytes, 4 each: compact, and hashed with the process's secret."""
    return array("i", token_ids).tobytes()


class PrefixCache:
    """Remember which block holds which tokens after which prefix.

    Args:
        allocator: the pool; its on_evict hook is taken.
        block_size: tokens per block; only full blocks are remembered.

    Attributes:
        num_query_tokens: tokens of all admitted sequences, see count().
        num_hit_tokens: how many of them were found here.
        on_evict: called with a registered block just before it is forgotten because it is given
            away; those before it are registered still.
    """

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.allocator = allocator
        self.block_size = block_size
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.on_evict: Callable[[int], None] | None = None
        self._block_of: dict[Key, int] = {}
        self._key_of: list[Key | None] = [None] * allocator.num_blocks
        self._children_of: dict[int, list[bytes]] = {}  # packed tokens, in order
        self._stamp_of = [0] * allocator.num_blocks
        self._num_registrations = 0
        allocator.on_evict = self._evict

    pack = staticmethod(_pack)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content is known, used or free."""
        return len(self._block_of)

    def match(
        self, token_ids: Sequence[int], salt: str = "", known: Sequence[int] = ()
    ) -> list[int]:
        """Return the longest chain of cached blocks that begins token_ids.

        The chain covers at most len(token_ids) - 1 tokens, because the last one must be computed
        for its logits. Owners are not counted: call share() before the next allocate().

        Args:
            token_ids: a prompt, with what was generated after it if it resumes.
            salt: namespace; only blocks registered under an equal salt are found.
            known: what an earlier call found for the same tokens, if the last of these blocks has
                kept its stamp(); it is not looked up again.
        """
        size = self.block_size
        blocks = list(known)
        parent: int | str = blocks[-1] if blocks else salt
        for start in range(len(blocks) * size, (len(token_ids) - 1) // size * size, size):
            block = self._block_of.get((parent, _pack(token_ids[start : start + size])))
            if block is None:
                break
            blocks.append(block)
            parent = block
        return blocks

    def begins_inside(self, parent: int, token_ids: Sequence[int]) -> tuple[int, int]:
        """Return the child of a registered block that has most of its first tokens in common.

        Only children of a block are looked at, not the first blocks of prompts: what is made of a
        part of a block then has the same first block, so that forget() reaches it, too.

        Args:
            parent: a registered block.
            token_ids: at most block_size tokens that come after it.

        Returns:
            The block, and how many tokens agree; (-1, 0) if none does.
        """
        children = self._children_of.get(parent)
        if children is None:
            return -1, 0
        wanted = _pack(token_ids)
        place = bisect_left(children, wanted)
        best, most = b"", 0
        for tokens in children[max(0, place - 1) : place + 1]:
            count = 0
            while count < len(wanted) and tokens[count : count + 4] == wanted[count : count + 4]:
                count += 4
            if count > most:
                best, most = tokens, count
        return (self._block_of[parent, best], most // 4) if most else (-1, 0)

    def register(self, block_id: int, parent: int | str, token_ids: Sequence[int]) -> int:
        """Remember the content of a full block and return the block that stands for it.

        Args:
            block_id: a used block whose keys and values are computed.
            parent: the registered block before it, or the salt if it is the first.
            token_ids: its block_size tokens.

        Returns:
            block_id, or an older block of equal content: the caller then shares that one, releases
            its own and uses the older in its place.

        Raises:
            ValueError: token_ids is not one block, block_id is registered already or parent is not.
        """
        if self._key_of[block_id] is not None:
            raise ValueError(f"block_id must not be registered yet, got {block_id}")
        if len(token_ids) != self.block_size:
            raise ValueError(f"token_ids must be {self.block_size} tokens, got {len(token_ids)}")
        if isinstance(parent, int) and self._key_of[parent] is None:
            raise ValueError(f"parent must be a registered block, got {parent}")
        key = (parent, _pack(token_ids))
        kept = self._block_of.setdefault(key, block_id)
        if kept == block_id:
            self.allocator.mark_cached(block_id)
            self._key_of[block_id] = key
            self._num_registrations += 1
            self._stamp_of[block_id] = self._num_registrations
            if isinstance(parent, int):
                insort(self._children_of.setdefault(parent, []), key[1])
        return kept

    def stamp(self, block_id: int) -> int:
        """Return a number that a block has as long as it stays registered; 0 if it is not.

        Its parents are registered at least as long, so the stamp of its last block tells whether a
        whole chain is still what it was.
        """
        return self._stamp_of[block_id]

    def key(self, block_id: int) -> Key:
        """Return the parent and the packed tokens of a registered block."""
        key = self._key_of[block_id]
        assert key is not None, "only registered blocks have a key"
        return key

    def holds(self, block_id: int, parent: int | str, token_ids: Sequence[int]) -> bool:
        """Return whether block_id is registered with exactly this content."""
        return self._key_of[block_id] == (parent, _pack(token_ids))

    def forget(self, block_id: int) -> set[int]:
        """Make a registered block and all that follow it unfindable, owned or not.

        Returns:
            These blocks.

        Raises:
            ValueError: block_id is not registered.
        """
        if self._key_of[block_id] is None:
            raise ValueError(f"block_id must be registered to be forgotten, got {block_id}")
        followers: dict[int, list[int]] = {}
        for block, key in enumerate(self._key_of):
            if key is not None and isinstance(key[0], int):
                followers.setdefault(key[0], []).append(block)
        forgotten = [block_id]
        for block in forgotten:  # it grows meanwhile
            forgotten += followers.get(block, ())
        for block in reversed(forgotten):
            self._forget(block)
            self.allocator.unmark_cached(block)
        return set(forgotten)

    def count(self, num_query_tokens: int, num_hit_tokens: int) -> None:
        """Add one admitted sequence to the statistics."""
        self.num_query_tokens += num_query_tokens
        self.num_hit_tokens += num_hit_tokens

    def reset(self) -> None:
        """Forget everything, as after a change of the model's weights.

        Raises:
            ValueError: a registered block is in use.
        """
        used = [b for b in self._block_of.values() if self.allocator.ref_count(b)]
        if used:
            raise ValueError(f"cached blocks must be unused to be forgotten, got {len(used)} used")
        for block in self._block_of.values():
            self._key_of[block] = None
            self._stamp_of[block] = 0
            self.allocator.unmark_cached(block)
        self._block_of.clear()
        self._children_of.clear()

    def check_integrity(self) -> None:
        """Verify the invariants of the tree; the pool's own are allocator.check_integrity().

        Raises:
            AssertionError: names the invariant that is broken.
        """
        known = {b: key for b, key in enumerate(self._key_of) if key is not None}
        flagged = {b for b in range(self.allocator.num_blocks) if self.allocator.is_cached(b)}
        edges = [(b, key[0]) for b, key in known.items() if isinstance(key[0], int)]
        children: dict[int, list[bytes]] = {}
        for block, parent in edges:
            insort(children.setdefault(parent, []), known[block][1])
        rank = {b: i for i, b in enumerate(self.allocator.free_order())}
        never = self.allocator.num_blocks  # a used block is reused after every free one
        rules = [
            ({key: b for b, key in known.items()} == self._block_of, "one block per key"),
            (
                set(known) == {b for b, stamp in enumerate(self._stamp_of) if stamp},
                "registered blocks have a stamp",
            ),
            (set(known) == flagged, "the allocator keeps exactly the registered blocks"),
            (children == self._children_of, "the children of a block are listed in order"),
            (all(parent in known for _, parent in edges), "a parent is cached as long as a child"),
            (
                all(rank.get(b, never) < rank.get(p, never) or p not in rank for b, p in edges),
                "a child is reused before its parent",
            ),
        ]
        for holds, rule in rules:
            if not holds:
                raise AssertionError(f"broken invariant: {rule}")

    def _evict(self, block_id: int) -> None:
        if self.on_evict is not None:
            self.on_evict(block_id)
        self._forget(block_id)

    def _forget(self, block_id: int) -> None:
        key = self._key_of[block_id]
        assert key is not None, "only registered blocks are evicted"
        assert block_id not in self._children_of, "children are evicted before their parent"
        del self._block_of[key]
        self._key_of[block_id] = None
        self._stamp_of[block_id] = 0
        if isinstance(key[0], int):
            siblings = self._children_of[key[0]]
            del siblings[bisect_left(siblings, key[1])]
            if not siblings:
                del self._children_of[key[0]]
