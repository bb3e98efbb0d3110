"""What the scheduler reports about itself. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewise.engine.record.ages import Counts

__all__ = ["SchedulerStats"]


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot; counts since the start unless it says now.

    Attributes:
        num_running: sequences that hold blocks, now.
        num_waiting: sequences that wait for blocks or a seat, now.
        num_blocks: size of the pool.
        block_size: slots per block.
        blocks_used: blocks with an owner, now.
        blocks_peak: the most there ever were.
        slots_used: slots of used blocks that hold a token, now; shared blocks count once.
        slots_peak: the same in the first step that reached blocks_peak.
        prefix_query_tokens: tokens of the sequences admitted, once per admission.
        prefix_hit_tokens: how many of them the prefix cache had.
        num_preemptions: how often a sequence that had run lost its blocks.
        num_swapped: how many of these went to main memory.
        swap_blocks_used: blocks of main memory of sequences that wait, or on their way, now.
        swap_blocks_cold: blocks of main memory that hold a prefix, now.
        num_recalled_tokens: tokens of prefixes that came back from main memory or files.
        num_drafts: guesses of tokens that were verified.
        num_accepted_drafts: how many of them were right.
        waiting_by_reason: of those that wait now, how many for what: "swapped" and "preempted" have
            run before; of the others the first in line waits for "seats", "blocks" or the token
            "budget", the rest are "behind" it.
        num_tokens_lost: tokens that were computed twice, as their blocks were taken away.
        step_tokens: tokens of a step.
        block_lifetime, block_idle, block_reuse_gap: seconds, see `ages.Ages`.
        other_groups: where the layers are of several groups (`CacheSpec.groups`), of all but the
            first: blocks with an owner, now, and all blocks. The other counts are the first one's.
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

    @property
    def used_fraction(self) -> float:
        """Share of the blocks that have an owner, now, in the group where it is highest."""
        pools = ((self.blocks_used, self.num_blocks), *self.other_groups)
        return max(used / total for used, total in pools)

    @property
    def wasted_fraction(self) -> float:
        """Share of the slots of used blocks that hold no token, now; 0 when none is used."""
        return self._wasted(self.slots_used, self.blocks_used)

    @property
    def peak_wasted_fraction(self) -> float:
        """The same in the first step that reached blocks_peak."""
        return self._wasted(self.slots_peak, self.blocks_peak)

    def _wasted(self, slots: int, blocks: int) -> float:
        return 1 - slots / (blocks * self.block_size) if blocks else 0.0
