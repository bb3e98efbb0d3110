"""Any history of owners keeps the pool and the prefix tree consistent, and hits exact."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tilewise.cache.allocator import BlockAllocator
from tilewise.cache.prefix import PrefixCache, PrefixNode
from tilewise.errors import CacheFullError

P = 2  # small blocks and a small vocabulary make collisions of content common
NUM_BLOCKS = 7

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
SALTS = st.sampled_from(["", "0", "1"])


class Table:
    """A sequence as the scheduler would keep it."""

    def __init__(
        self,
        salt: str,
        tokens: list[int],
        blocks: list[int],
        num_registered: int,
        node: PrefixNode | None,
    ) -> None:
        self.salt, self.tokens, self.blocks = salt, tokens, blocks
        self.num_registered, self.node = num_registered, node


class Blocks(RuleBasedStateMachine):
    """Random owners over a real pool, beside a model that knows what each block holds."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockAllocator(NUM_BLOCKS)
        self.cache = PrefixCache([self.pool], [None], P)
        self.live: list[Table] = []
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}  # registered: the whole prefix

    def allocate(self, n: int) -> list[int] | None:
        num_free = self.pool.num_free
        try:
            blocks = self.pool.allocate(n)
        except CacheFullError:
            assert n > num_free
            return None
        assert len(blocks) == n <= num_free
        for block in blocks:
            assert self.pool.ref_count(block) == 1
            self.content.pop(block, None)
        return blocks

    def register(self, table: Table) -> None:
        blocks = table.blocks
        for i in range(table.num_registered, len(table.tokens) // P):
            node = self.cache.child(table.node, table.salt, table.tokens[i * P : (i + 1) * P])
            self.cache.hold(node)
            self.cache.drop(table.node)
            table.node = node
            kept = self.cache.put(node, 0, blocks[i])
            truth = (table.salt, tuple(table.tokens[: (i + 1) * P]))
            if kept == blocks[i]:
                assert truth not in self.content.values()
                self.content[kept] = truth
            else:
                assert self.content[kept] == truth
                self.pool.share([kept])
                self.pool.release([blocks[i]])
                blocks[i] = kept
        table.num_registered = len(table.tokens) // P

    @rule(target=tables, tokens=TOKENS, salt=SALTS)
    def admit(self, tokens: list[int], salt: str):
        nodes = self.cache.find(tokens, salt)
        hits = [node.blocks[0] for node in nodes]
        usable = (len(tokens) - 1) // P
        held = set(self.content.values())
        expected = 0
        while expected < usable and (salt, tuple(tokens[: (expected + 1) * P])) in held:
            expected += 1
        assert len(hits) == expected, "the longest chain is found"
        for i, block in enumerate(hits):
            assert self.content[block] == (salt, tuple(tokens[: (i + 1) * P]))
        node = nodes[-1] if nodes else None
        if node is not None:
            self.cache.hold(node)
        self.pool.share(hits)
        fresh = self.allocate(-(-len(tokens) // P) - len(hits))
        if fresh is None:
            self.pool.release(hits)
            self.cache.drop(node)
            return multiple()
        table = Table(salt, list(tokens), hits + fresh, len(hits), node)
        self.register(table)
        self.live.append(table)
        return table

    @rule(table=tables, token=st.integers(0, 1))
    def append(self, table: Table, token: int) -> None:
        if len(table.tokens) % P == 0:
            fresh = self.allocate(1)
            if fresh is None:
                return
            table.blocks += fresh
        elif self.pool.ref_count(table.blocks[-1]) > 1:
            fresh = self.allocate(1)
            if fresh is None:
                return
            self.pool.release([table.blocks[-1]])
            table.blocks[-1] = fresh[0]
        table.tokens.append(token)
        self.register(table)

    @rule(target=tables, table=tables)
    def fork(self, table: Table) -> Table:
        self.pool.share(table.blocks)
        tokens, blocks = list(table.tokens), list(table.blocks)
        child = Table(table.salt, tokens, blocks, table.num_registered, table.node)
        if table.node is not None:
            self.cache.hold(table.node)
        self.live.append(child)
        return child

    @rule(table=consumes(tables))
    def release(self, table: Table) -> None:
        self.pool.release(table.blocks)
        self.cache.drop(table.node)
        self.live.remove(table)

    @rule()
    def reset_when_idle(self) -> None:
        if not self.live:
            self.cache.reset()
            self.content.clear()

    @invariant()
    def consistent(self) -> None:
        self.pool.check_integrity()
        self.cache.check_integrity([t.node for t in self.live if t.node is not None])
        owners = [0] * NUM_BLOCKS
        for table in self.live:
            for block in table.blocks:
                owners[block] += 1
        assert owners == [self.pool.ref_count(b) for b in range(NUM_BLOCKS)]
        cached = [b for b in range(NUM_BLOCKS) if self.pool.is_cached(b)]
        assert len(cached) == len(self.content)


Blocks.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAnyHistory = Blocks.TestCase
