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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tilewise.bench.trace import TraceRequest

POLICIES = ("max", "pow2", "oracle")


@dataclass(frozen=True, slots=True)
class Shares:
    """Slots of the cache memory in one step, by what they are for; their sum is all of it.

    Attributes:
        tokens: hold a token.
        reserved: will hold one of the sequence that has them.
        internal: belong to a sequence that will never use them.
        external: belong to none: too small, too far apart, or kept free.
        batch: sequences that run.
    """

    tokens: int
    reserved: int
    internal: int
    external: int
    batch: int


class BuddyAllocator:
    """Pieces of 2^k slots at multiples of 2^k, split and joined by halves (Knuth, 2.5)."""

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
        """Return (start, size) of the lowest of the smallest pieces that fit, or None."""
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
        """Take a piece back and join it with its buddy while that is free."""
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
    """Return how many slots a request asks for."""
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
    requests: Sequence[TraceRequest], policy: str, num_slots: int, *, max_len: int, budget: int
) -> Iterator[Shares]:
    """Serve requests that all wait from the beginning; yield the memory of each step.

    Only of steps in which some still wait: with an empty queue free memory is no waste.

    Args:
        policy: "max", "pow2" or "oracle".
        num_slots: tokens that the memory could hold.
        max_len: of a sequence; what "max" reserves.
        budget: tokens of one step.
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


def _shares(running: Sequence[_Running], num_slots: int) -> Shares:
    tokens = sum(one.cached for one in running)
    needed = sum(one.request.prompt + one.request.output for one in running)
    asked = sum(one.asked for one in running)
    return Shares(tokens, needed - tokens, asked - needed, num_slots - asked, len(running))
