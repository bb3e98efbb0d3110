"""Choose the replica of a request: where its beginning is cached, weighed against the work there.

    cost of a replica  = its unfinished work + tokens of this prompt that it has not cached
    work of a request  = tokens of its prompt that were not cached, until its first token is there,
                         and output_weight times the tokens of its answer, until it has ended

The replica with the lowest cost is chosen. So a beginning that many prompts share stays on one
replica until the work there outweighs computing it once more, and is then cached on two. The router
assumes that a replica caches what was sent to it, and drops the least recently sent first, as the
replica's own cache does, which is never asked. No torch, no Ray: a replica is a name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Asked", "PrefixRouter", "RoundRobin", "Router"]

# Cost of a token of an answer relative to one of a prompt: on an H200 a decode step of 256 rows
# takes 34 us a row and a step of a prompt 23 us a token (lab/results/engine_h200.json and
# engine_vllm_h200.json), steps of fewer rows more.
OUTPUT_WEIGHT = 2.0
# Assumed tokens of an answer before any has ended, and the weight of each answer in their mean.
FIRST_OUTPUT, OUTPUT_SHARE = 128.0, 0.02
# Assumed tokens that a replica caches before it reports them: Llama-3-8B on 80 GB.
CAPACITY = 400_000


@dataclass(frozen=True, slots=True)
class Asked:
    """The properties of a request that decide its route.

    Attributes:
        pieces: the hashes of consecutive pieces of the prompt, each of which covers all text before
            it, too: an equal hash means an equal beginning.
        piece_tokens: the approximate tokens of a piece.
        prompt_tokens: the approximate tokens of the whole prompt.
        output_tokens: the largest number of tokens of the answer, all samples together; None if the
            request does not say.
    """

    pieces: tuple[int, ...] = ()
    piece_tokens: int = 64
    prompt_tokens: int = 0
    output_tokens: int | None = None


class Router(Protocol):
    """The interface of routers, which choose a replica for each request.

    A gateway reports to the router what happens to a request: sent, answered, ended. A ticket
    identifies the request.
    """

    def join(self, name: str, capacity: int = CAPACITY) -> None:
        """Add a replica that caches `capacity` tokens, or update that number."""

    def leave(self, name: str) -> None:
        """Remove a replica; an unknown name is ignored."""

    def choose(self, asked: Asked, among: Collection[str] | None = None) -> str | None:
        """Return the name of the replica for a request, one of `among` if given; None if there is
        none.

        Nothing is recorded: the caller reports the request by `sent`.
        """

    def sent(self, ticket: Hashable, asked: Asked, name: str) -> None:
        """Record that a request was sent to a replica."""

    def answers(self, ticket: Hashable) -> None:
        """Record that the first part of a request's answer has come."""

    def ended(self, ticket: Hashable, output_tokens: int | None = None) -> None:
        """Record the end of a request, with the number of tokens of its answer if that is known."""


@dataclass(slots=True)
class _Replica:
    number: int  # rank in the order of joining
    capacity: int
    work: float = 0.0
    kept: OrderedDict[int, int] = field(
        default_factory=OrderedDict
    )  # piece -> tokens, oldest first
    kept_tokens: int = 0


@dataclass(slots=True)
class _Sent:
    name: str
    prompt_work: float
    output_work: float


class PrefixRouter:
    """The router that chooses the replica with the least work, including the tokens of the prompt
    that the replica has not cached.

    Args:
        output_weight: the cost of a token of an answer relative to one of a prompt.

    Example:
        >>> router = PrefixRouter()
        >>> router.join("a"), router.join("b")
        >>> name = router.choose(asked)
        >>> router.sent("request 1", asked, name)
    """

    def __init__(self, *, output_weight: float = OUTPUT_WEIGHT) -> None:
        if not 0 <= output_weight < float("inf"):
            raise ValueError(f"output_weight must be finite and at least 0, got {output_weight}")
        self.output_weight = output_weight
        self.mean_output = FIRST_OUTPUT
        self._replicas: dict[str, _Replica] = {}
        self._holders: dict[int, int] = {}  # piece -> bit set of the replicas that cache it
        self._by_number: dict[int, str] = {}
        self._sent: dict[Hashable, _Sent] = {}
        self._next = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the replicas, in the order in which they joined."""
        return tuple(self._replicas)

    def join(self, name: str, capacity: int = CAPACITY) -> None:
        """Add a replica, or update the number of tokens that it caches.

        Raises:
            ValueError: the capacity is below 1.
        """
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 token, got {capacity}")
        known = self._replicas.get(name)
        if known is not None:
            known.capacity = capacity
            self._evict(known)
            return
        self._replicas[name] = _Replica(self._next, capacity)
        self._by_number[self._next] = name
        self._next += 1

    def leave(self, name: str) -> None:
        """Remove a replica, its cached pieces and its requests; an unknown name is ignored."""
        gone = self._replicas.pop(name, None)
        if gone is None:
            return
        del self._by_number[gone.number]
        for piece in gone.kept:
            self._release(piece, gone.number)
        for ticket in [t for t, s in self._sent.items() if s.name == name]:
            del self._sent[ticket]

    def work(self, name: str) -> float:
        """Return the unfinished work of a replica, in tokens of prompts; KeyError for an unknown
        name."""
        return self._replicas[name].work

    def choose(self, asked: Asked, among: Collection[str] | None = None) -> str | None:
        """Return the replica, of `among` if given, with the least unfinished work plus uncached
        tokens of this prompt.

        Of equal ones it is the one that caches the fewest tokens, then the one that joined first;
        None if there is none.
        """
        found = self._kept(asked)
        best: tuple[float, int, int] | None = None
        chosen = None
        for name, replica in self._replicas.items():
            if among is not None and name not in among:
                continue
            cost = replica.work + asked.prompt_tokens - found.get(name, 0)
            key = (cost, replica.kept_tokens, replica.number)
            if best is None or key < best:
                best, chosen = key, name
        return chosen

    def kept(self, asked: Asked, name: str) -> int:
        """Return how many leading tokens of a prompt a replica is assumed to cache."""
        return self._kept(asked).get(name, 0)

    def _kept(self, asked: Asked) -> dict[str, int]:
        """Return the number of a prompt's leading tokens that each replica caches, by the replica's
        name.

        Replicas that cache none are left out.
        """
        found: dict[str, int] = {}
        among, length = -1, 0
        for piece in asked.pieces:
            holders = self._holders.get(piece, 0) & among
            if among != holders and length:
                found |= self._kept_by(among & ~holders, length, asked)
            among = holders
            if not among:
                break
            length += asked.piece_tokens
        if among > 0:
            found |= self._kept_by(among, length, asked)
        return found

    def _kept_by(self, bits: int, length: int, asked: Asked) -> dict[str, int]:
        """Return `length`, at most the prompt's tokens, for each replica of the bit set `bits`, by
        name."""
        found: dict[str, int] = {}
        while bits:
            lowest = bits & -bits
            found[self._by_number[lowest.bit_length() - 1]] = min(length, asked.prompt_tokens)
            bits ^= lowest
        return found

    def sent(self, ticket: Hashable, asked: Asked, name: str) -> None:
        """Record that a request was sent to a replica, which from now on has its work and caches
        its prompt.

        The pieces that the replica used least recently are dropped beyond its capacity.

        Raises:
            ValueError: there is no such replica, or the ticket is another request's.
        """
        replica = self._replicas.get(name)
        if replica is None:
            raise ValueError(f"name must be one of {', '.join(self._replicas)}, got {name!r}")
        if ticket in self._sent:
            raise ValueError(f"ticket must be a request's own, got {ticket!r} again")
        output = self.mean_output
        if asked.output_tokens is not None:
            output = min(output, asked.output_tokens)
        work = _Sent(
            name,
            float(max(asked.prompt_tokens - self.kept(asked, name), 0)),
            self.output_weight * output,
        )
        self._sent[ticket] = work
        replica.work += work.prompt_work + work.output_work
        bit = 1 << replica.number
        # the beginning counts as used last, so that it is dropped last
        for piece in reversed(asked.pieces):
            if piece in replica.kept:
                replica.kept.move_to_end(piece)
                continue
            replica.kept[piece] = asked.piece_tokens
            replica.kept_tokens += asked.piece_tokens
            self._holders[piece] = self._holders.get(piece, 0) | bit
        self._evict(replica)

    def answers(self, ticket: Hashable) -> None:
        """Record a request's first token: its prompt is no longer work. An unknown ticket is
        ignored."""
        sent = self._sent.get(ticket)
        if sent is not None:
            self._replicas[sent.name].work -= sent.prompt_work
            sent.prompt_work = 0.0

    def ended(self, ticket: Hashable, output_tokens: int | None = None) -> None:
        """Record the end of a request, whose work is then over; an unknown ticket is ignored.

        `output_tokens`, if given, enters the mean length by which later answers are estimated.
        """
        if output_tokens is not None:
            self.mean_output += OUTPUT_SHARE * (output_tokens - self.mean_output)
        sent = self._sent.pop(ticket, None)
        if sent is not None:
            self._replicas[sent.name].work -= sent.prompt_work + sent.output_work

    def _evict(self, replica: _Replica) -> None:
        while replica.kept_tokens > replica.capacity:
            piece, tokens = replica.kept.popitem(last=False)
            replica.kept_tokens -= tokens
            self._release(piece, replica.number)

    def _release(self, piece: int, number: int) -> None:
        left = self._holders[piece] & ~(1 << number)
        if left:
            self._holders[piece] = left
        else:
            del self._holders[piece]


class RoundRobin:
    """The router that chooses the replicas in rotation, whatever their caches and work: a
    baseline."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._last = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the replicas, in the order in which they joined."""
        return tuple(self._names)

    def join(self, name: str, capacity: int = CAPACITY) -> None:
        """Add a replica; its capacity has no effect."""
        if name not in self._names:
            self._names.append(name)

    def leave(self, name: str) -> None:
        """Remove a replica; an unknown name is ignored."""
        if name in self._names:
            self._names.remove(name)

    def choose(self, asked: Asked, among: Collection[str] | None = None) -> str | None:
        """Return the next replica, of `among` if given, after the one to which a request was sent
        last; None if there is none."""
        names = self._names
        first = names.index(self._last) + 1 if self._last in names else 0
        for name in names[first:] + names[:first]:
            if among is None or name in among:
                return name
        return None

    def sent(self, ticket: Hashable, asked: Asked, name: str) -> None:
        """Record `name` as the replica that was used last."""
        self._last = name

    def answers(self, ticket: Hashable) -> None:
        """Do nothing: rotation does not depend on work."""

    def ended(self, ticket: Hashable, output_tokens: int | None = None) -> None:
        """Do nothing: rotation does not depend on work."""
