"""A scheduler's report on itself: counts, explanations, and the check of its invariants. No
torch."""

from __future__ import annotations

from typing import Any

from tilewise.engine.request import Sequence
from tilewise.engine.scheduling.beams import Beams
from tilewise.engine.scheduling.preemption import Preemption
from tilewise.engine.scheduling.roster import Roster, seats
from tilewise.engine.scheduling.speculative import Speculation
from tilewise.engine.stats import SchedulerStats
from tilewise.engine.tables.admission import Limits
from tilewise.engine.tables.block_tables import BlockTables

__all__ = ["Insight"]

REASONS = ("swapped", "preempted", "seats", "adapters", "blocks", "budget", "behind")


class Insight:
    """Reads the parts of a scheduler, and changes none.

    Args:
        roster: the sequences that run and wait.
        tables: the block tables of these sequences.
        limits: the limits of a step.
        beams: the beam searches of the scheduler.
        preemption: the counter of the sequences that lost their blocks.
    """

    def __init__(
        self,
        roster: Roster,
        tables: BlockTables,
        limits: Limits,
        beams: Beams,
        preemption: Preemption,
    ) -> None:
        self.roster, self.tables, self.limits = roster, tables, limits
        self.beams, self.preemption = beams, preemption

    def stats(self, speculation: Speculation | None) -> SchedulerStats:
        """Return a snapshot of queues and blocks, and the totals since the start.

        `speculation` gives the counts of drafts, which are 0 without it.
        """
        running, swap = self.roster.running, self.tables.memory
        num_queried, num_hit = self.tables.prefix_counts
        states = self.tables.states
        return SchedulerStats(
            num_running=len(running),
            num_waiting=len(self.roster.waiting),
            num_blocks=self.limits.num_blocks,
            block_size=self.limits.block_size,
            blocks_used=self.tables.allocator.num_used,
            blocks_peak=self.tables.blocks_peak,
            slots_used=self.tables.slots_used({s: s.num_computed_tokens for s in running}),
            slots_peak=self.tables.slots_peak,
            prefix_query_tokens=num_queried,
            prefix_hit_tokens=num_hit,
            num_preemptions=self.preemption.num_preemptions,
            num_swapped=self.preemption.num_swapped,
            swap_blocks_used=swap.num_used if swap else 0,
            swap_blocks_cold=swap.num_cold if swap else 0,
            num_recalled_tokens=swap.num_recalled * self.limits.block_size if swap else 0,
            num_drafts=speculation.num_drafts if speculation else 0,
            num_accepted_drafts=speculation.num_accepted if speculation else 0,
            waiting_by_reason=self.waiting_by_reason(),
            num_tokens_lost=self.tables.trace.num_lost,
            step_tokens=self.tables.trace.ages.step_tokens.read(),
            block_lifetime=self.tables.trace.ages.lifetime.read(),
            block_idle=self.tables.trace.ages.idle.read(),
            block_reuse_gap=self.tables.trace.ages.reuse_gap.read(),
            other_groups=self.tables.groups_used,
            **({} if states is None else states.counts()),
        )

    def waiting_by_reason(self) -> dict[str, int]:
        """Return the number of waiting sequences by reason, see `SchedulerStats`."""
        counts = dict.fromkeys(REASONS, 0)
        for place, seq in enumerate(self.roster.waiting):
            if seq.swap_slots:
                reason = "swapped"
            elif seq.num_preemptions:
                reason = "preempted"
            else:
                reason = self._lacks(seq)[0] if place == 0 else "behind"
            counts[reason] += 1
        return counts

    def _lacks(self, seq: Sequence) -> tuple[str, int]:
        """Return why a sequence, the next to be admitted, waits, and the number of blocks that it
        lacks.

        The reason is "seats", "adapters", "blocks" or "budget"; the number is 0 but for "blocks".
        """
        running = self.roster.running
        if sum(map(seats, running)) >= self.limits.max_num_seqs:
            return "seats", 0
        adapter = seq.request.adapter
        if adapter is not None:
            used = self.roster.adapters()
            if adapter.number not in used and len(used) == self.limits.max_loras:
                return "adapters", 0
        missing = self.tables.missing_blocks(seq, spare=len(running))
        return ("blocks", missing) if missing else ("budget", 0)

    def picture(self) -> dict[str, Any]:
        """Return the owners of all blocks, as JSON, for a reader that follows the trace from now
        on.

        Returns:
            next: the number of the first event that is not included.
            time: the current time of the trace's clock.
            num_blocks, block_size: the size of the pool and of a block.
            counts: [block, owners] of each block that has owners.
            known: the blocks that the prefix cache finds.
            parents: for each of these the block before it in its prefix; -1 for a first one, or if
                a window has released that block.
            order: those of them without an owner, the one to be evicted next first.
            budget: the largest number of tokens of a step.
            tables: seq_id, request_id, index and blocks of the sequences that hold blocks; of a
                model with states also the slot of its state, and the tokens at its last checkpoint.
            checkpoints: [checkpoint, tokens] of each that the prefix cache finds, in such a model.
            waiting: [request_id, index] of the waiting samples, the next to be admitted first.
            requests: for all these requests the fields of their event `arrive`, and its time.
        """
        trace, pool = self.tables.trace, self.tables.allocator
        running = self.roster.running
        waiting = self.roster.order.line(self.roster.waiting, len(self.roster.waiting))
        states = self.tables.states
        blocks = range(self.limits.num_blocks)
        known = [b for b in blocks if pool.is_cached(b)]
        requests = {seq.request.request_id: seq.request for seq in (*running, *waiting)}
        accounts = {key: trace.account(key) for key in requests}
        return {
            "next": trace.num_noted,
            "time": trace.clock(),
            "num_blocks": self.limits.num_blocks,
            "block_size": self.limits.block_size,
            "counts": [[b, pool.ref_count(b)] for b in blocks if pool.ref_count(b)],
            "known": known,
            "parents": [self.tables.parent_of(b) for b in known],
            "order": [b for b in pool.free_order() if pool.is_cached(b)],
            "budget": self.limits.max_num_batched_tokens,
            "tables": [
                {
                    "seq_id": seq.seq_id,
                    "request_id": seq.request.request_id,
                    "index": seq.index,
                    "blocks": [-1] * (len(seq.block_ids) - len(held)) + held,
                    **({} if states is None else states.told_of(seq)),
                }
                for seq in running
                for held in (self.tables.held(seq, 0),)
            ],
            "waiting": [[seq.request.request_id, seq.index] for seq in waiting],
            **({} if states is None else {"checkpoints": states.positions()}),
            "requests": [
                {
                    "request_id": key,
                    "user": request.user,
                    "num_tokens": len(request.prompt_token_ids),
                    "num_samples": request.sampling.n,
                    "time": account.arrived,
                }
                for key, request in requests.items()
                if (account := accounts[key]) is not None
            ],
        }

    def line(self, most: int) -> list[str]:
        """Return the ids of the first waiting requests, at most `most`, the next one first."""
        waiting = self.roster.order.line(self.roster.waiting, most)
        return list(dict.fromkeys(seq.request.request_id for seq in waiting))

    def explain(self, request_id: str) -> str:
        """Return the state of a request in one line: how far it is computed, or why it waits.

        The line says "unknown or finished" for any other request.
        """
        unfinished = self.roster.unfinished(request_id)
        if not unfinished:
            return "unknown or finished"
        seq = unfinished[0]
        if seq.block_ids:
            text = f"running: {seq.num_computed_tokens} of {seq.num_tokens} tokens are computed"
            if self.tables.states is not None and self.tables.states.told_of(seq)["checkpoint"]:
                known = self.tables.states.told_of(seq)["checkpoint"]
                text += f", a checkpoint of its states is at {known}"
            return text
        kept = f"swapped out with {seq.num_swapped_tokens} tokens; " if seq.swap_slots else ""
        place = self.roster.order.place(seq, self.roster.waiting)
        if place > 0:
            return f"waiting: {kept}{place} sequence{' is' if place == 1 else 's are'} before it"
        reason, missing = self._lacks(seq)
        if reason == "seats":
            return f"waiting: {kept}all {self.limits.max_num_seqs} seats are taken"
        if reason == "adapters":
            most = self.limits.max_loras
            return f"waiting: {kept}one of the {most} adapters in use must be let go of"
        if reason == "blocks":
            return f"waiting: {kept}{missing} more cache blocks must become free"
        return f"waiting: {kept}next in line for the token budget"

    def check_integrity(self, *, has_steps: bool) -> None:
        """Verify the invariants of roster, block tables and counters of sequences; meant for tests.

        Args:
            has_steps: True if steps are unfinished.

        Raises:
            AssertionError: an invariant is broken, and the message names it.
        """
        running = self.roster.running
        self.roster.check_integrity()
        self.tables.check_integrity(running, self.roster.waiting)
        has_work = all(
            s.num_computed_tokens < s.num_tokens or self.beams.is_resting(s) for s in running
        )
        ahead = [
            (s.num_computed_tokens, s.num_scheduled_tokens, s.num_tokens + s.num_pending)
            for s in running
        ]
        rules = [
            (len(running) <= self.limits.max_num_seqs, "every running sequence has a seat"),
            (has_work, "a running sequence has a token to compute"),
            (all(a <= b <= c for a, b, c in ahead), "computed, scheduled, known or drawn"),
            (
                has_steps
                or all(
                    a == b and not s.num_pending
                    for s, (a, b, _) in zip(running, ahead, strict=True)
                ),
                "what is scheduled and not computed is in an unfinished step",
            ),
        ]
        for holds, rule in rules:
            if not holds:
                raise AssertionError(f"broken invariant: {rule}")
