"""Choose the sequences that lose their blocks to others, and whether to swap them out. No torch.

recompute  the sequence releases its blocks and is computed again, except for what the prefix cache
           still has of it
swap       the computed blocks of all running samples of its request go to main memory, and come
           back before they run again: all of them or none, as they share blocks. The sequence is
           recomputed instead if there is no room, if one of the samples must not lose its place, or
           if some of the samples are in main memory already. Those that come back together are then
           those that were there together, and so they fit. Beams are always recomputed: they fork
           and are dropped while some of them wait.
auto       the faster of the two: moving its blocks out and in, or computing again the tokens that
           the prefix cache does not have

The victim is the newest sequence, or the cheapest: the one that loses the fewest tokens that are
not in the prefix cache, for each block that becomes free because no other sequence owns it. The
first in order is never a victim, nor is one that runs already in the step being built.

Source: Kwon et al. 2023, "Efficient Memory Management for LLM Serving with PagedAttention",
section 4.5.
"""

from __future__ import annotations

from tilewise.engine.batch import Batch
from tilewise.engine.config import check_preemption
from tilewise.engine.request import Sequence
from tilewise.engine.scheduling.beams import Beams
from tilewise.engine.scheduling.roster import Roster
from tilewise.engine.tables.block_tables import BlockTables
from tilewise.engine.tables.rates import Rates

__all__ = ["Preemption", "Rates"]


class Preemption:
    """Chooses running sequences that lose their blocks to others, and swaps or recomputes them.

    Args:
        roster: the running and waiting sequences.
        tables: the block tables of the sequences that may be preempted.
        beams: the beam searches, whose resting beams are preempted first.
        preemption: one of `config.PREEMPTIONS`.
        victim: one of `config.VICTIMS`.

    Attributes:
        rates: the speeds that "auto" compares; it recomputes while one of them is not known.
        num_preemptions: the number of times that a sequence that had run lost its blocks.
        num_swapped: the number of these that were swapped out.
        left: the seq_ids of sequences that lost their blocks since the last take_left().

    Raises:
        ValueError: an argument is none of those, or there is no main memory to swap to.
    """

    def __init__(
        self,
        roster: Roster,
        tables: BlockTables,
        beams: Beams,
        preemption: str = "auto",
        victim: str = "newest",
    ) -> None:
        check_preemption(preemption, victim, has_swap_space=tables.memory is not None)
        self.roster, self.tables, self.beams = roster, tables, beams
        self.preemption, self.victim = preemption, victim
        self.rates = Rates()
        self.num_preemptions = self.num_swapped = 0
        self.left: list[int] = []

    def take_left(self) -> tuple[int, ...]:
        """Return the seq_ids of sequences that lost their blocks since the last call, and forget
        them."""
        left = tuple(self.left)
        self.left.clear()
        return left

    def preempt(self, first: int) -> None:
        """Take the blocks of a running sequence at index `first` or later, but never of that at
        index 0.

        The sequence waits; it is swapped out or will be recomputed.

        If it is swapped out, all running samples of its request are.
        """
        first = max(first, 1)
        seq = self._choose(first)
        family = self._family(seq, first)
        if family and self._prefers_swap(family) and self.tables.swap_out(family):
            self.num_swapped += len(family)
            for sample in reversed(family):
                self.recompute(sample)
            return
        self.recompute(seq)

    def recompute(self, seq: Sequence) -> None:
        """Release the blocks of a running sequence, and let the sequence wait.

        When it runs again, its tokens are computed again; only tokens that were swapped out to main
        memory before are copied back.
        """
        self.tables.trace.preempt(seq)
        self.roster.displace(seq)
        self.left.append(seq.seq_id)
        # A sequence that has not run yet has lost nothing.
        self.num_preemptions += seq.num_told_blocks > 0 or bool(seq.swap_slots)
        self.tables.release(seq)
        seq.num_preemptions += 1
        self.beams.regroup(seq)

    def group(self, seq: Sequence) -> list[Sequence]:
        """Return the sequences that are admitted together with a waiting one, itself included.

        They are all swapped-out samples of its request if it is swapped out, else the sequence
        alone.
        """
        if not seq.swap_slots:
            return [seq]
        return [s for s in self.roster.requests[seq.request.request_id] if s.swap_slots]

    def revoke(self, batch: Batch, later: list[Batch]) -> None:
        """Let sequences be recomputed whose blocks a failed step was to swap out or in.

        Running ones lose their blocks and wait; waiting ones lose their blocks of main memory.

        Args:
            batch: the batch of the failed step.
            later: the batches of the unfinished steps that began after it.
        """
        roster = self.roster
        spoilt, lost = self.tables.revoke(batch, later, roster.running, list(roster.waiting))
        for seq in spoilt:
            self.recompute(seq)
        for seq in lost:
            self.tables.drop_swapped(seq)

    def forget(self, family: list[Sequence]) -> None:
        """Drop the swapped-out blocks of waiting sequences that may hold what failed samples have
        computed.

        These are sequences that begin with the first block of a sample of `family`, with its salt.
        """
        for seq in self.roster.waiting:
            if seq.swap_slots and self._begin_alike(seq, family):
                self.tables.drop_swapped(seq)

    def _begin_alike(self, seq: Sequence, family: list[Sequence]) -> bool:
        """Return whether a sequence may have found the first block of one of the others."""
        size = self.tables.block_size
        return any(
            seq.request.salt == other.request.salt
            and seq.token_ids[:size] == other.token_ids[:size]
            for other in family
        )

    def _choose(self, first: int) -> Sequence:
        running = self.roster.running
        if self.victim == "newest":
            return running[-1]
        return min(reversed(running[first:]), key=self._cost)

    def _cost(self, seq: Sequence) -> float:
        """Return the tokens that a sequence would lose for each block that becomes free; inf if
        none does."""
        count = self.tables.allocator.ref_count
        freed = sum(count(block) == 1 for block in self.tables.held(seq, 0))
        return self._lost_tokens(seq) / freed if freed else float("inf")

    def _lost_tokens(self, seq: Sequence) -> int:
        if self.tables.states is not None:
            return self.tables.states.num_lost(seq)
        return seq.num_computed_tokens - seq.num_registered_blocks * self.tables.block_size

    def _family(self, seq: Sequence, first: int) -> list[Sequence]:
        """Return the samples of a request that must be swapped out together; none if that is
        impossible.

        Args:
            seq: one of them.
            first: the index in the list of running sequences from which all of them must stand.
        """
        running = self.roster.running
        if self.tables.memory is None or self.preemption == "recompute":
            return []
        if self.tables.states is not None:  # what is cached of it moves, and comes back by a hit
            return []
        if self.beams.search_of(seq) is not None:
            return []
        samples = self.roster.requests[seq.request.request_id]
        family = [s for s in samples if s.block_ids]
        behind = set(running[first:])
        if any(s.num_computed_tokens == 0 or s.is_doubtful or s not in behind for s in family):
            return []
        if seq.scores_prompt:  # the runner drops its partial scores
            return []
        return [] if any(s.swap_slots for s in samples) else family

    def _prefers_swap(self, family: list[Sequence]) -> bool:
        if self.preemption == "swap":
            return True
        rates = self.rates
        if not (rates.prefill_tokens and rates.link_blocks):
            return False
        counts = self.tables.num_kept(family)
        weights = rates.group_shares or (1.0,) * len(counts)
        moved = sum(count * weight for count, weight in zip(counts, weights, strict=True))
        lost = sum(map(self._lost_tokens, family))
        return 2 * moved / rates.link_blocks < rates.recompute_seconds(lost)
