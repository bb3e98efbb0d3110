"""Who loses its blocks when others need them, and whether main memory keeps what it had. No torch.

recompute  the sequence gives its blocks back and is computed again, but for what the prefix cache
           still has of it
swap       what all running samples of its request have computed goes to main memory, and comes back
           before they run again: all of it or nothing, as they share blocks. It is recomputed
           instead where there is no room, where a sample runs that must not lose its place, or
           where others of the samples are in main memory already: those that come back together
           are then those that were there together, and so they fit. Beams are always recomputed:
           they fork and are dropped while some of them wait.
auto       whichever takes less time: moving its blocks out and in, or computing again the tokens
           that the prefix cache does not know

The victim is the newest sequence, or the cheapest: the one that loses the fewest tokens that the
prefix cache will not give back, for each block that becomes free because no other sequence owns it.
The first in order is never a victim, nor is one that runs already in the step being built.

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
    """Takes blocks back.

    Args:
        roster: who runs.
        tables: whose blocks.
        beams: who has a place in a search.
        preemption: one of `config.PREEMPTIONS`.
        victim: one of `config.VICTIMS`.

    Attributes:
        rates: what "auto" compares; it recomputes while one of them is not known.
        num_preemptions: how often a sequence that had run lost its blocks.
        num_swapped: how many of these went to main memory.
        left: seq_ids that lost their blocks since they were last asked for.

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
        """Return `left` and empty it."""
        left = tuple(self.left)
        self.left.clear()
        return left

    def preempt(self, first: int) -> None:
        """Take the blocks of one that runs at place `first` or behind, and not at 0.

        With a swap all samples of its request go.
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
        """Take the blocks of one that runs; it waits, and runs again from what is known of it."""
        self.tables.trace.preempt(seq)
        self.roster.displace(seq)
        self.left.append(seq.seq_id)
        # A sequence that has not run yet has lost nothing.
        self.num_preemptions += seq.num_told_blocks > 0 or bool(seq.swap_slots)
        self.tables.release(seq)
        seq.num_preemptions += 1
        self.beams.regroup(seq)

    def group(self, seq: Sequence) -> list[Sequence]:
        """Return those that come back together with one that waits."""
        if not seq.swap_slots:
            return [seq]
        return [s for s in self.roster.requests[seq.request.request_id] if s.swap_slots]

    def revoke(self, batch: Batch, later: list[Batch]) -> None:
        """Compute again what a failed step was to move out, or to bring back.

        Args:
            batch: of the failed step.
            later: of the steps that began after it and are unfinished.
        """
        roster = self.roster
        spoilt, lost = self.tables.revoke(batch, later, roster.running, list(roster.waiting))
        for seq in spoilt:
            self.recompute(seq)
        for seq in lost:
            self.tables.drop_swapped(seq)

    def forget(self, family: list[Sequence]) -> None:
        """Let go of what was kept of all who may have found blocks of samples that have failed."""
        for seq in self.roster.waiting:
            if seq.swap_slots and self._begin_alike(seq, family):
                self.tables.drop_swapped(seq)

    def _begin_alike(self, seq: Sequence, family: list[Sequence]) -> bool:
        """Whether a sequence may have found the first block of one of the others."""
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
        """Tokens lost for each block that becomes free."""
        count = self.tables.allocator.ref_count
        freed = sum(count(block) == 1 for block in self.tables.held(seq, 0))
        return self._lost_tokens(seq) / freed if freed else float("inf")

    def _lost_tokens(self, seq: Sequence) -> int:
        return seq.num_computed_tokens - seq.num_registered_blocks * self.tables.block_size

    def _family(self, seq: Sequence, first: int) -> list[Sequence]:
        """Return the sequences that are swapped with one; none if that is not possible."""
        running = self.roster.running
        if self.tables.memory is None or self.preemption == "recompute":
            return []
        if self.beams.search_of(seq) is not None:
            return []
        samples = self.roster.requests[seq.request.request_id]
        family = [s for s in samples if s.block_ids]
        behind = set(running[first:])
        if any(s.num_computed_tokens == 0 or s.is_doubtful or s not in behind for s in family):
            return []
        if seq.scores_prompt:  # the runner forgets what it has scored
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
