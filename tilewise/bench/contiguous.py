"""Serving from contiguous pieces of memory, as engines did before paging: what a trace wastes.

A sequence gets one piece for all the tokens that it may ever have, since neighbours leave no room
to grow. How long it will be is known (oracle), guessed as the next power of two of its answer
(pow2), or not known at all (max). Pieces come from a buddy allocator, as in the measurements of the
PagedAttention paper. Steps are those of the engine's scheduler: running sequences first, then the
queue in its order, within a budget of tokens; a piece is never taken away.

Source: Kwon et al. 2023, "Efficient Memory Management for LLM Serving with PagedAttention",
sections 3.1 and 6.1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from tilewise.bench.trace import TraceRequest
from tilewise.cache.allocator import BlockAllocator
from tilewise.engine.request import Sequence
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.tables.block_tables import BlockTables
from tilewise.engine.tables.holdings import Places

POLICIES = ("max", "pow2", "oracle")


@dataclass(frozen=True, slots=True)
class Shares:
    """The numbers of slots of the cache memory in one step, by their use; their sum is all slots.

    Attributes:
        tokens: slots that hold a token.
        reserved: slots that will hold a token of the sequence that has them.
        internal: slots that belong to a sequence that will never use them.
        external: slots that belong to no sequence: pieces too small, too far apart, or kept free.
        batch: number of sequences that run; it is no part of the sum.
    """

    tokens: int
    reserved: int
    internal: int
    external: int
    batch: int


class BuddyAllocator:
    """An allocator of pieces of 2^k slots at multiples of 2^k, split and joined by halves (Knuth,
    2.5)."""

    def __init__(self, num_slots: int) -> None:
        self._free: dict[int, set[int]] = {}
        self._tops: dict[int, int] = {}  # of regions that have no buddy: start -> size
        start = 0
        for bit in reversed(range(num_slots.bit_length())):
            if num_slots >> bit & 1:
                self._free.setdefault(1 << bit, set()).add(start)
                self._tops[start] = 1 << bit
                start += 1 << bit

    def allocate(self, num_slots: int) -> tuple[int, int] | None:
        """Take a piece of `num_slots` slots, rounded up to a power of two; return its (start,
        size), or None if no free piece is as large.

        It is the beginning of the lowest of the smallest free pieces that fit; the rest stays free.
        """
        wanted = 1 << (num_slots - 1).bit_length()
        sizes = sorted(size for size, starts in self._free.items() if starts and size >= wanted)
        if not sizes:
            return None
        size = sizes[0]
        start = min(self._free[size])
        self._free[size].remove(start)
        while size > wanted:
            size //= 2
            self._free.setdefault(size, set()).add(start + size)
        return start, size

    def release(self, piece: tuple[int, int]) -> None:
        """Free a piece (start, size); as long as its buddy is free too, join the two."""
        start, size = piece
        base = max(top for top in self._tops if top <= start)
        while size < self._tops[base]:
            buddy = base + ((start - base) ^ size)
            if buddy not in self._free.get(size, ()):
                break
            self._free[size].remove(buddy)
            start, size = min(start, buddy), 2 * size
        self._free.setdefault(size, set()).add(start)


def asked_for(policy: str, max_len: int) -> Callable[[TraceRequest], int]:
    """Return a function from a request to the number of slots that it asks for.

    Args:
        policy: "max" asks for `max_len`, "pow2" for the prompt and the next power of two of the
            answer, at most `max_len`, anything else for the true length.
        max_len: the largest length of a sequence.
    """
    if policy == "max":
        return lambda request: max_len
    if policy == "pow2":
        return lambda r: min(max_len, r.prompt + (1 << (r.output - 1).bit_length()))
    return lambda request: request.prompt + request.output


@dataclass(slots=True)
class _Running:
    request: TraceRequest
    asked: int
    piece: tuple[int, int]
    cached: int = 0
    generated: int = 0


def replay(
    requests: Seq[TraceRequest], policy: str, num_slots: int, *, max_len: int, budget: int
) -> Iterator[Shares]:
    """Serve requests that all wait from the beginning, with pieces of a buddy allocator; yield the
    use of the memory in each step.

    Only steps in which some requests still wait are yielded: with an empty queue free memory is no
    waste.

    Args:
        requests: the requests, in the order of the queue.
        policy: "max", "pow2" or "oracle".
        num_slots: tokens that the memory could hold.
        max_len: the largest length of a sequence, which "max" reserves.
        budget: tokens of one step.

    Raises:
        ValueError: the memory cannot hold the first request that waits.
    """
    buddy, size_of = BuddyAllocator(num_slots), asked_for(policy, max_len)
    waiting, running = deque(requests), list[_Running]()
    while waiting:
        left = budget
        runs: list[tuple[_Running, int]] = []
        for one in running:
            count = min(max(one.request.prompt + one.generated - one.cached, 1), left)
            runs.append((one, count))
            left -= count
        while waiting and left > 0:
            piece = buddy.allocate(size_of(waiting[0]))
            if piece is None:
                break
            request = waiting.popleft()
            running.append(_Running(request, size_of(request), piece))
            runs.append((running[-1], min(request.prompt, left)))
            left -= runs[-1][1]
        if not running:
            raise ValueError(
                f"num_slots must fit one sequence of {max_len} tokens, got {num_slots}"
            )
        for one, count in runs:
            one.cached += count
            one.generated += one.cached >= one.request.prompt + one.generated
        if waiting:
            yield _shares(running, num_slots)
        for one in [r for r in running if r.generated == r.request.output]:
            running.remove(one)
            buddy.release(one.piece)


def _shares(running: Seq[_Running], num_slots: int) -> Shares:
    tokens = sum(one.cached for one in running)
    needed = sum(one.request.prompt + one.request.output for one in running)
    asked = sum(one.asked for one in running)
    return Shares(tokens, needed - tokens, asked - needed, num_slots - asked, len(running))


class PieceAllocator(BlockAllocator):
    """A buddy allocator in place of the block tables' own allocator; a piece's start stands for a
    block id.

    Attributes:
        slots_taken: the number of slots of all pieces that have an owner.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(1)
        self.slots_taken = 0
        self._buddy = BuddyAllocator(num_slots)
        self._size_of: dict[int, int] = {}  # by start

    @property
    def num_used(self) -> int:
        """Number of pieces that have an owner."""
        return len(self._size_of)

    def take(self, num_slots: int, count: int) -> list[int]:
        """Take `count` pieces of at least num_slots slots each and return their starts; take none
        and return [] if there are fewer."""
        found: list[tuple[int, int]] = []
        for _ in range(count):
            piece = self._buddy.allocate(num_slots)
            if piece is None:
                for each in found:
                    self._buddy.release(each)
                return []
            found.append(piece)
        self._size_of |= dict(found)
        self.slots_taken += sum(size for _, size in found)
        return [start for start, _ in found]

    def release(self, block_ids: Seq[int]) -> None:
        """Free the pieces that begin at these starts."""
        for start in block_ids:
            size = self._size_of.pop(start)
            self.slots_taken -= size
            self._buddy.release((start, size))


class ContiguousTables(BlockTables):
    """Pieces of a buddy allocator behind the methods that the scheduler calls.

    With these in place of its own tables the engine's scheduler serves as engines did before
    paging: a sequence is admitted when there is a piece for all it may ever have, and for each of
    its request's samples another. A piece is named by its start and never grows. Copying a prompt
    from sample to sample costs nothing here, which is kind to contiguous allocation.

    Args:
        num_slots: tokens that the memory could hold.
        policy: "max", "pow2" or "oracle".
        max_len: the largest length of a sequence, which "max" reserves.

    Raises:
        ValueError: policy is none of these, or the memory has no piece for the longest sequence.
    """

    def __init__(self, num_slots: int, policy: str, max_len: int) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
        # A block longer than any sequence: tables of one block, which no token steps out of.
        size = max(num_slots, max_len) + 1
        super().__init__((1,), size, (None,), size, enable_prefix_caching=False)
        self.pieces = PieceAllocator(num_slots)
        self.allocator = self.pools[0].allocator = self.pieces
        self._asked_for = asked_for(policy, max_len)
        self._reserved: dict[str, list[int]] = {}  # for samples that have yet to fork
        whole = self.pieces.take(max_len, 1)
        if not whole:
            raise ValueError(f"num_slots must fit one piece of {max_len} tokens, got {num_slots}")
        self.pieces.release(whole)

    def missing_blocks(self, seq: Sequence, spare: int) -> int:
        """Return 0 if a sequence can be admitted now, else 1, whatever number of pieces it
        lacks."""
        starts = self._take(seq)
        self.pieces.release(starts)
        return int(not starts)

    def refuses(self, seq: Sequence, spare: int) -> bool:
        """Return whether there is no piece for a sequence now."""
        return self.missing_blocks(seq, spare) > 0

    def reserve(self, seq: Sequence, spare: int) -> bool:
        """Admit a sequence: give it a piece, and reserve one more for each sample that will fork.

        Returns False, and takes nothing, if there are too few pieces.
        """
        starts = self._take(seq)
        if not starts:
            return False
        seq.block_ids = starts[:1]
        self.places[seq] = Places([], [], [0])
        if len(starts) > 1:
            self._reserved[seq.request.request_id] = starts[1:]
        seq.num_registered_blocks = seq.num_computed_tokens = seq.num_scheduled_tokens = 0
        return True

    def extend(self, seq: Sequence, end: int) -> bool:
        """Return True: a piece is as long as its sequence will ever be."""
        return True

    def fork(self, parent: Sequence, child: Sequence, gone: Sequence | None = None) -> None:
        """Give the new sample `child` one of the pieces that were reserved when its parent was
        admitted."""
        reserved = self._reserved[parent.request.request_id]
        child.block_ids = [reserved.pop()]
        self.places[child] = Places([], [], [0])
        if not reserved:
            del self._reserved[parent.request.request_id]
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_scheduled_tokens = parent.num_scheduled_tokens

    def release(self, seq: Sequence) -> None:
        """Take a sequence's piece back, and those of samples that have not forked."""
        if seq.index == 0 and seq.num_tokens == seq.num_prompt_tokens:
            seq.block_ids = seq.block_ids + self._reserved.pop(seq.request.request_id, [])
        super().release(seq)

    def slots_used(self, computed: dict[Sequence, int]) -> int:
        """Return how many slots hold a token: the sum of the sequences' computed tokens."""
        return sum(computed.values())

    def _take(self, seq: Sequence) -> list[int]:
        """Take a piece for a sequence and one for each sample that will fork from it; return their
        starts, [] if there are too few."""
        is_whole = seq.num_tokens == seq.num_prompt_tokens
        samples = seq.request.sampling.num_samples if is_whole and seq.index == 0 else 1
        asked = TraceRequest(0.0, seq.num_prompt_tokens, seq.max_len - seq.num_prompt_tokens)
        return self.pieces.take(self._asked_for(asked), samples)


def use_tables(scheduler: Scheduler, tables: BlockTables) -> None:
    """Replace the block tables of a scheduler that has served nothing, in it and in all of its
    parts that refer to them."""
    own = scheduler.tables
    for part in (scheduler, *vars(scheduler).values()):
        if getattr(part, "tables", None) is own:
            part.tables = tables
    scheduler.trace = tables.trace
