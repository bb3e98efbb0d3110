"""The scheduler's counters. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewise.engine.record.ages import Counts

__all__ = ["SchedulerStats"]


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot of the scheduler; values are counts since the start, or of the present where the
    text says now.

    Attributes:
        num_running: the sequences that hold blocks, now.
        num_waiting: the sequences that wait for blocks or a seat, now.
        num_blocks: the size of the pool.
        block_size: the slots of a block.
        blocks_used: the blocks with an owner, now.
        blocks_peak: the largest blocks_used so far.
        slots_used: the slots of used blocks that hold a token, now; shared blocks count once.
        slots_peak: the value of slots_used in the first step that reached blocks_peak.
        prefix_query_tokens: the tokens of the sequences admitted, once per admission.
        prefix_hit_tokens: the number of them found in the prefix cache.
        num_preemptions: the number of times that a sequence that had run lost its blocks.
        num_swapped: the number of preemptions in which the blocks were swapped out.
        swap_blocks_used: the blocks of main memory of waiting sequences, or in transfer, now.
        swap_blocks_cold: the blocks of main memory that hold a prefix, now.
        num_recalled_tokens: the tokens of prefixes that came back from main memory or files.
        num_drafts: the drafts that were verified.
        num_accepted_drafts: the number of drafts that were right.
        waiting_by_reason: the number of waiting sequences by reason, now. "swapped" and "preempted"
            ones have run before; of the others the first in line waits for "seats", "adapters",
            "blocks" or the token "budget", the rest are "behind" it.
        num_tokens_lost: the tokens that were computed twice, as their blocks were taken away.
        step_tokens: the histogram of tokens of a step.
        block_lifetime, block_idle, block_reuse_gap: histograms of seconds, see `ages.Ages`.
        other_groups: the blocks with an owner, now, and all blocks of each group of layers
            (`CacheSpec.groups`) but the first, to which the other counts refer.
        state_slots: the slots of states that running sequences have, now, and all slots.
        checkpoints: the checkpoints of states that the prefix cache finds, now, and all of them.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    block_size: int
    blocks_used: int
    blocks_peak: int
    slots_used: int
    slots_peak: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_preemptions: int
    num_swapped: int = 0
    swap_blocks_used: int = 0
    swap_blocks_cold: int = 0
    num_recalled_tokens: int = 0
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    waiting_by_reason: Mapping[str, int] = field(default_factory=dict)
    num_tokens_lost: int = 0
    step_tokens: Counts = field(default_factory=Counts)
    block_lifetime: Counts = field(default_factory=Counts)
    block_idle: Counts = field(default_factory=Counts)
    block_reuse_gap: Counts = field(default_factory=Counts)
    other_groups: tuple[tuple[int, int], ...] = ()
    state_slots: tuple[int, int] = (0, 0)
    checkpoints: tuple[int, int] = (0, 0)

    @property
    def used_fraction(self) -> float:
        """The share of the blocks that have an owner, now, in the group where it is highest."""
        pools = ((self.blocks_used, self.num_blocks), *self.other_groups)
        return max(used / total for used, total in pools)

    @property
    def wasted_fraction(self) -> float:
        """The share of the slots of used blocks that hold no token, now; 0 when none is used."""
        return self._wasted(self.slots_used, self.blocks_used)

    @property
    def peak_wasted_fraction(self) -> float:
        """The wasted_fraction of the first step that reached blocks_peak."""
        return self._wasted(self.slots_peak, self.blocks_peak)

    def _wasted(self, slots: int, blocks: int) -> float:
        return 1 - slots / (blocks * self.block_size) if blocks else 0.0
