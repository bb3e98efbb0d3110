"""Find the blocks that hold the beginning of a prompt, in every group of layers. No torch.

Contents form a tree: a node is the tokens of one block after those of its parent, and the root of a
tree is a salt. A node lists the block that holds its content in each group of layers, or none.
Nodes are found by comparing whole keys, so a hit is exact by induction: the parent is the very node
that was matched one step before, and the tokens are equal one by one. No digest stands for content
anywhere. The key that is hashed is a byte string, for which Python uses a keyed hash with a secret
per process, so an attacker cannot craft prompts that collide.

Every group must have the blocks of a hit: without a window all h of them, and with a window those
that the query at position h * block_size sees. With main memory (`Keeper`) a block may also lie in
a slot there, which the node lists.

A group with a window releases blocks from the front of a sequence, so that a parent's block may be
gone while its child's is read. So a node lives as long as it has a child, a block in some group, or
a sequence that continues it. Without a window each owner of a child owns the parent too, and owners
release tails first, so that a child is reused before its parent.

Equal content is stored once: put() returns the older block, and the caller adopts it.

A prompt may leave the tree inside a block: its tokens begin as those of a child do, and then
differ. The children of each node are kept in the order of their packed tokens, where the one with
the longest common beginning is next to the place of the prompt's own tokens: begins_inside() finds
it by bisection, however many children there are.

Idea: vLLM's hash chain over full blocks (Kwon et al., 2023, section 4.4 and later), with the
chain's digests replaced by the identity of the parent.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

from tilewise.cache.allocator import BlockAllocator

__all__ = ["Keeper", "PrefixCache", "PrefixNode", "first_block", "pack"]


MOST_CHILDREN = 8  # children that begins_inside() examines


def pack(token_ids: Sequence[int]) -> bytes:
    """Return token ids as bytes, 4 each: compact, and hashed with the process's secret."""
    return array("i", token_ids).tobytes()


def first_block(position: int, window: int | None, block_size: int) -> int:
    """Return the index, in its sequence, of the first block that a query at `position` sees.

    `window` counts the visible keys, the query's own included; None gives 0.
    """
    return 0 if window is None else max(0, position - window + 1) // block_size


class PrefixNode:
    """The content of one block after those of its parent, in the tree of known prefixes.

    PrefixCache alone makes nodes.

    Attributes:
        parent: the node of the block before; None for a root.
        tokens: the packed tokens of this block; empty for a root.
        salt: the salt of the root.
        blocks: the id of the block that holds the content in each group of layers, -1 for none.
        slots: the slot in main memory that holds the content for each group of layers, -1 for none.
        num_users: the number of sequences whose last known block this is.
        is_forgotten: True if no search finds the node or its descendants any more.
        digest: the digest of the prefix up to this block; empty until `contents.content_of` needs
            it.
        order: the packed tokens of the node's children, sorted.
    """

    __slots__ = (
        "blocks",
        "children",
        "digest",
        "is_forgotten",
        "num_users",
        "order",
        "parent",
        "salt",
        "slots",
        "tokens",
    )

    def __init__(
        self,
        parent: PrefixNode | None,
        salt: str,
        tokens: bytes,
        blocks: list[int],
        slots: list[int],
    ) -> None:
        self.parent, self.salt, self.tokens = parent, salt, tokens
        self.blocks, self.slots = blocks, slots
        self.children: dict[bytes, PrefixNode] = {}
        self.order: list[bytes] = []
        self.num_users = 0
        self.is_forgotten = False
        self.digest = b""


class Keeper(Protocol):
    """The interface of the main memory that keeps content of reused blocks, see
    `engine.tables.swap_space`."""

    @property
    def is_paused(self) -> bool:
        """Return whether main memory must not be searched now."""
        ...

    def keep(self, group: int, block: int, node: PrefixNode) -> None:
        """Copy the content of a known block, which is about to be reused, to main memory if there
        is room, and note the slot in `node`."""
        ...

    def take_off(self, group: int, node: PrefixNode) -> None:
        """Drop the copy in main memory of a node's block in a group, if there is one."""
        ...


class PrefixCache:
    """An index of the blocks that hold given tokens after a given prefix, in the pool of each
    group.

    Args:
        allocators: the allocator of each group of layers; their on_evict hooks are set here.
        windows: the window of each group, in keys; None for all keys.
        block_size: the tokens of a block; only full blocks are indexed.

    Attributes:
        num_query_tokens: the tokens of all admitted sequences, see count().
        num_hit_tokens: the number of these tokens whose blocks were found here.
        is_whole: True if there is one group, and it keeps every token.
        version: a counter that changes whenever the result of a search may have changed.
        keeper: the main memory behind the pools; None without.
    """

    def __init__(
        self, allocators: Sequence[BlockAllocator], windows: Sequence[int | None], block_size: int
    ) -> None:
        self.allocators, self.windows, self.block_size = list(allocators), list(windows), block_size
        self.is_whole = self.windows == [None]
        self.num_query_tokens = self.num_hit_tokens = 0
        self.version = 0
        self.keeper: Keeper | None = None
        self._nowhere = [-1] * len(self.allocators)  # the slots of all nodes without main memory
        self._roots: dict[str, PrefixNode] = {}
        self._node_at: list[dict[int, PrefixNode]] = [{} for _ in self.allocators]
        for group, allocator in enumerate(self.allocators):
            allocator.on_evict = partial(self._evict, group)

    def find(
        self,
        token_ids: Sequence[int],
        salt: str = "",
        after: PrefixNode | None = None,
        num_known: int = 0,
        *,
        in_slots: bool = False,
    ) -> list[PrefixNode]:
        """Return the nodes of the longest hit, which covers at most len(token_ids) - 1 tokens.

        Args:
            token_ids: the tokens of a prompt, and those generated after it if it resumes.
            salt: the namespace; only content registered under an equal salt is found.
            after: the node of the last block that the sequence has already, in every group as far
                as its next query sees.
            num_known: the number of blocks up to and with `after`; these are not in the result.
            in_slots: True if blocks in main memory count, too.
        """
        size = self.block_size
        node = self._roots.get(salt) if after is None else after
        if node is None or node.is_forgotten:
            return []
        found: list[PrefixNode] = []
        in_slots = in_slots and self._has_slots
        if self.is_whole:
            for start in range(num_known * size, (len(token_ids) - 1) // size * size, size):
                node = node.children.get(pack(token_ids[start : start + size]))
                if node is None or not (node.blocks[0] >= 0 or (in_slots and node.slots[0] >= 0)):
                    break
                found.append(node)
            return found
        runs = [num_known] * len(self.windows)  # blocks in a row, up to the last one
        num_hit = 0
        for i in range(num_known, (len(token_ids) - 1) // size):
            node = node.children.get(pack(token_ids[i * size : (i + 1) * size]))
            if node is None:
                break
            found.append(node)
            is_hit = True
            for group, window in enumerate(self.windows):
                is_there = node.blocks[group] >= 0 or (in_slots and node.slots[group] >= 0)
                runs[group] = runs[group] + 1 if is_there else 0
                first = first_block((i + 1) * size, window, size)
                is_hit &= runs[group] >= i + 1 - first
            if is_hit:
                num_hit = len(found)
        return found[:num_hit]

    def find_again(
        self, token_ids: Sequence[int], salt: str, before: list[PrefixNode], *, in_slots: bool
    ) -> list[PrefixNode]:
        """Return the current result of find(), given an earlier one for the same tokens and salt.

        In a cache of whole prefixes only the part that may have changed is searched again; without
        a change the result is the list `before` itself.

        Args:
            before: the earlier result.
            in_slots: True to count nodes whose block is in main memory only, as in find().
        """
        if not self.is_whole:
            return self.find(token_ids, salt, in_slots=in_slots)
        may_be_slot, known = in_slots and self._has_slots, 0
        for node in before:
            if node.blocks[0] < 0 and not (may_be_slot and node.slots[0] >= 0):
                break
            known += 1
        kept = before if known == len(before) else before[:known]
        after = kept[-1] if kept else None
        more = self.find(token_ids, salt, after, known, in_slots=in_slots)
        return kept + more if more else kept

    def depth(
        self, token_ids: Sequence[int], salt: str, after: PrefixNode | None, num_known: int
    ) -> int:
        """Return how many leading blocks of `token_ids` have a node, also if no block holds their
        content.

        `num_known` blocks up to `after` are counted without a search.

        Args:
            token_ids, salt, after, num_known: see find().
        """
        size, node = self.block_size, self._roots.get(salt) if after is None else after
        depth = num_known
        while node is not None and (depth + 1) * size <= len(token_ids):
            node = node.children.get(pack(token_ids[depth * size : (depth + 1) * size]))
            depth += node is not None
        return depth

    def child(self, parent: PrefixNode | None, salt: str, tokens: Sequence[int]) -> PrefixNode:
        """Return the node of a block after its parent, made if need be, without a block id.

        The caller must call hold() or put() for it afterwards.

        Args:
            parent: the node of the block before; None for the first block of a prompt.
            salt: the salt of the prompt.
            tokens: the block_size tokens of the block.
        """
        return self.register(parent, salt, tokens, list(self._nowhere))

    def register(
        self, parent: PrefixNode | None, salt: str, tokens: Sequence[int], blocks: list[int]
    ) -> PrefixNode:
        """Record that blocks hold the tokens after `parent`; return the node of these tokens.

        If a group has an older block of equal content, the node keeps listing the older one: the
        caller must share that block, release its own and use the older one in its place.

        Args:
            parent: the node of the block before; None for the first block of a prompt.
            salt: the salt of the prompt.
            tokens: the block_size tokens of the block.
            blocks: the block in each group, -1 for none. A new node keeps this list.
        """
        if parent is None:
            parent = self._roots.get(salt)
            if parent is None:
                blocks_of_none, slots = list(self._nowhere), list(self._nowhere)
                parent = self._roots[salt] = PrefixNode(None, salt, b"", blocks_of_none, slots)
        key = pack(tokens)
        node = parent.children.get(key)
        if node is not None:
            for group, block in enumerate(blocks):
                if block >= 0:
                    self.put(node, group, block)
            return node
        slots = self._nowhere if self.keeper is None else list(self._nowhere)
        node = parent.children[key] = PrefixNode(parent, salt, key, blocks, slots)
        if parent.order:
            insort(parent.order, key)
        else:
            parent.order.append(key)
        for group, block in enumerate(blocks):
            if block >= 0:
                self._node_at[group][block] = node
                self.allocators[group].mark_cached(block)
        self.version += 1
        return node

    def begins_inside(
        self, node: PrefixNode, token_ids: Sequence[int]
    ) -> tuple[PrefixNode | None, int]:
        """Return the child of a node with the longest common beginning with token_ids, and its
        length.

        Only children with a block in every group count. At most MOST_CHILDREN children are
        examined, the nearest in the order of their tokens first, so that such a child may be
        missed.

        Args:
            node: the node of a block; first blocks of prompts are not searched, see `PrefixCache`.
            token_ids: at most block_size tokens that come after the node's prefix.

        Returns:
            The child, and the number of its first tokens that agree; (None, 0) if there is no such
            child.
        """
        wanted, order = pack(token_ids), node.order
        after = bisect_left(order, wanted)
        before = after - 1
        for _ in range(MOST_CHILDREN):
            left = _count_common(order[before], wanted) if before >= 0 else 0
            right = _count_common(order[after], wanted) if after < len(order) else 0
            if left == right == 0:
                break
            child = node.children[order[before if left > right else after]]
            if min(child.blocks) >= 0:
                return child, max(left, right)
            before, after = (before - 1, after) if left > right else (before, after + 1)
        return None, 0

    def nodes_at(self, group: int) -> Mapping[int, PrefixNode]:
        """Return the nodes with a block in a group, by the id of the block; the cache's own
        mapping, not a copy."""
        return self._node_at[group]

    def root(self, salt: str) -> PrefixNode | None:
        """Return the root of a salt, the parent of the nodes of first blocks; None if no prefix has
        the salt."""
        return self._roots.get(salt)

    def put(self, node: PrefixNode, group: int, block: int) -> int:
        """Record that a used block has a node's content; return the block that the node lists.

        If the node lists an older block in this group, that one is returned: the caller must share
        it, release its own and use the older one in its place.
        """
        kept = node.blocks[group]
        if kept >= 0:
            return kept
        node.blocks[group] = block
        self._node_at[group][block] = node
        self.allocators[group].mark_cached(block)
        self.version += 1
        return block

    def hold(self, node: PrefixNode) -> None:
        """Count one more sequence whose last known block is `node`, which stays in the tree."""
        node.num_users += 1

    def drop(self, node: PrefixNode | None) -> None:
        """Undo one hold() of `node`; a node without users, children, blocks and slots leaves the
        tree. None does nothing."""
        if node is not None:
            node.num_users -= 1
            if not (node.num_users or node.children):
                self.prune(node)

    def forget(self, token_ids: Sequence[int], salt: str) -> list[set[int]]:
        """Make every prefix that begins with the first block of these tokens unfindable.

        Blocks that sequences own are forgotten, too; they stay allocated.

        Returns:
            For each group, the set of ids of the forgotten blocks.
        """
        forgotten: list[set[int]] = [set() for _ in self.allocators]
        root = self._roots.get(salt)
        first = None
        if root is not None:
            first = root.children.get(pack(token_ids[: self.block_size]))
        if root is None or first is None:
            return forgotten
        _take_out(first, root)
        self.version += 1
        nodes = [first]
        for node in nodes:  # it grows meanwhile
            nodes += node.children.values()
        for node in reversed(nodes):  # children become free before their parents
            node.is_forgotten = True
            node.children, node.order = {}, []
            for group, block in enumerate(node.blocks):
                if block >= 0:
                    self._take_off(node, group)
                    self.allocators[group].unmark_cached(block)
                    forgotten[group].add(block)
                if self.keeper is not None:
                    self.keeper.take_off(group, node)
        self.prune(root)
        return forgotten

    def forget_block(self, group: int, block: int) -> list[int]:
        """Make a block unfindable, because its content has not arrived; nothing for a block that is
        unknown.

        If every layer sees the whole prefix, the blocks after it cannot be found without it, so
        they are forgotten, too. If not, they stay: a window may begin behind this block.

        Returns:
            The ids of the blocks that are no longer found.
        """
        first = self._node_at[group].get(block)
        if first is None:
            return []
        nodes, forgotten = [first], list[int]()
        for node in nodes if self.is_whole else ():  # it grows meanwhile
            nodes += node.children.values()
        for node in reversed(nodes):  # children become free before their parents
            if node.blocks[group] >= 0:
                forgotten.append(node.blocks[group])
                self._take_off(node, group)
                self.allocators[group].unmark_cached(forgotten[-1])
            self.prune(node)
        return forgotten

    def parent_of(self, block: int) -> int:
        """Return the block of the first group with the content before that of `block`, a known
        block of this group.

        -1 if `block` is the first of its prompt, or the content before it has no block.
        """
        parent = self._node_at[0][block].parent
        return -1 if parent is None else parent.blocks[0]

    def count(self, num_query_tokens: int, num_hit_tokens: int) -> None:
        """Add the tokens of one admitted sequence, and those found in the cache, to the
        statistics."""
        self.num_query_tokens += num_query_tokens
        self.num_hit_tokens += num_hit_tokens

    def reset(self) -> None:
        """Forget all prefixes, those in main memory included; the caller must have made sure that
        no sequence owns a block."""
        if self.keeper is not None:
            for node in self._all():
                for group in range(len(self.allocators)):
                    self.keeper.take_off(group, node)
        for group, blocks in enumerate(self._node_at):
            for block, node in blocks.items():
                self.allocators[group].unmark_cached(block)
                node.blocks[group] = -1
            blocks.clear()
        self._roots.clear()
        self.version += 1

    def holds(self, node: PrefixNode, depth: int, token_ids: Sequence[int], salt: str) -> bool:
        """Return whether `node` stands for the first `depth` blocks of token_ids under `salt` and
        can be found."""
        size = self.block_size
        at: PrefixNode = node
        for i in range(depth, 0, -1):
            tokens = pack(token_ids[(i - 1) * size : i * size])
            if at.tokens != tokens or at.parent is None or at.parent.children.get(tokens) is not at:
                return False
            at = at.parent
        return self._roots.get(salt) is at

    def check_integrity(self, users: Sequence[PrefixNode]) -> None:
        """Verify that nodes, blocks and sequences agree.

        Args:
            users: the nodes that sequences hold, one entry for each hold().

        Raises:
            AssertionError: an invariant is broken, and the message names it.
        """
        nodes = self._all()
        held = [id(node) for node in users]
        at: list[dict[int, PrefixNode]] = [
            {node.blocks[g]: node for node in nodes if node.blocks[g] >= 0}
            for g in range(len(self.allocators))
        ]
        cached = [{b for b in range(a.num_blocks) if a.is_cached(b)} for a in self.allocators]
        needed = [
            n.children or n.num_users or max(n.blocks) >= 0 or max(n.slots) >= 0 for n in nodes
        ]
        rules = [
            (at == self._node_at, "a block holds one content, by which it is found"),
            (cached == [set(blocks) for blocks in at], "the pools keep exactly the known blocks"),
            (all(n.num_users == held.count(id(n)) for n in nodes), "users of a node are counted"),
            (all(needed), "no content is kept for nothing"),
            (not any(n.is_forgotten for n in nodes), "what is forgotten is not found"),
            (all(n.order == sorted(n.children) for n in nodes), "children are listed in order"),
            (max(self._nowhere) < 0, "nothing is in slots without main memory"),
        ]
        if self.is_whole:
            pool = self.allocators[0]
            pairs = [
                (n.blocks[0], n.parent.blocks[0]) for n in nodes if n.parent and n.parent.parent
            ]
            edges = [(block, parent) for block, parent in pairs if block >= 0]
            rank = {block: i for i, block in enumerate(pool.free_order())}
            never = pool.num_blocks  # a used block is reused after every free one
            rules += [
                (all(parent >= 0 for _, parent in edges), "a parent is cached as long as a child"),
                (
                    all(rank.get(b, never) < rank.get(p, never) or p not in rank for b, p in edges),
                    "a child is reused before its parent",
                ),
            ]
        for holds, rule in rules:
            if not holds:
                raise AssertionError(f"broken invariant: {rule}")

    @property
    def _has_slots(self) -> bool:
        return self.keeper is not None and not self.keeper.is_paused

    def _all(self) -> list[PrefixNode]:
        """Return all nodes that a lookup can reach, each after its parent.

        The roots, one for each salt, come first. A node that was taken out of the tree is not among
        the nodes, even if a sequence still uses it.
        """
        nodes = list(self._roots.values())
        for node in nodes:  # it grows meanwhile
            nodes += node.children.values()
        return nodes

    def _evict(self, group: int, block: int) -> None:
        node = self._node_at[group][block]
        if self.keeper is not None:
            self.keeper.keep(group, block, node)
        self._take_off(node, group)
        if not (node.children or node.num_users):
            self.prune(node)

    def _take_off(self, node: PrefixNode, group: int) -> None:
        del self._node_at[group][node.blocks[group]]
        node.blocks[group] = -1
        self.version += 1

    def prune(self, node: PrefixNode) -> None:
        """Remove a node without child, block, slot and sequence from the tree, and then its
        ancestors that have none of these either. Any other node stays."""
        nowhere = self._nowhere
        while not (node.children or node.num_users) and node.blocks == node.slots == nowhere:
            self.version += 1
            parent = node.parent
            if parent is None:
                if self._roots.get(node.salt) is node:
                    del self._roots[node.salt]
                return
            if parent.children.get(node.tokens) is node:
                _take_out(node, parent)
            node = parent


def _take_out(node: PrefixNode, parent: PrefixNode) -> None:
    """Remove `node` from the children of `parent` and from their sorted order."""
    del parent.children[node.tokens]
    del parent.order[bisect_left(parent.order, node.tokens)]


def _count_common(tokens: bytes, wanted: bytes) -> int:
    """Return the number of leading tokens, 4 bytes each, that two packed runs have in common."""
    count = 0
    while count < len(wanted) and tokens[count : count + 4] == wanted[count : count + 4]:
        count += 4
    return count // 4
