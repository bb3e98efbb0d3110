"""What a scheduler says about itself: counts, a sentence, and whether it is in order. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewise.engine.request import Sequence
from tilewise.engine.stats import SchedulerStats

if TYPE_CHECKING:
    from tilewise.engine.scheduling.scheduler import Scheduler

__all__ = ["check_integrity", "explain", "line", "picture", "stats"]


def stats(scheduler: Scheduler) -> SchedulerStats:
    """Return a snapshot."""
    running, swap = scheduler.roster.running, scheduler.tables.memory
    num_queried, num_hit = scheduler.tables.prefix_counts
    return SchedulerStats(
        num_running=len(running),
        num_waiting=len(scheduler.roster.waiting),
        num_blocks=scheduler.limits.num_blocks,
        block_size=scheduler.limits.block_size,
        blocks_used=scheduler.tables.allocator.num_used,
        blocks_peak=scheduler.tables.blocks_peak,
        slots_used=scheduler.tables.slots_used({s: s.num_computed_tokens for s in running}),
        slots_peak=scheduler.tables.slots_peak,
        prefix_query_tokens=num_queried,
        prefix_hit_tokens=num_hit,
        num_preemptions=scheduler.preemption.num_preemptions,
        num_swapped=scheduler.preemption.num_swapped,
        swap_blocks_used=swap.num_used if swap else 0,
        swap_blocks_cold=swap.num_cold if swap else 0,
        num_recalled_tokens=swap.num_recalled * scheduler.limits.block_size if swap else 0,
        num_drafts=scheduler.speculation.num_drafts if scheduler.speculation else 0,
        num_accepted_drafts=scheduler.speculation.num_accepted if scheduler.speculation else 0,
        waiting_by_reason=waiting_by_reason(scheduler),
        num_tokens_lost=scheduler.trace.num_lost,
        step_tokens=scheduler.trace.ages.step_tokens.read(),
        block_lifetime=scheduler.trace.ages.lifetime.read(),
        block_idle=scheduler.trace.ages.idle.read(),
        block_reuse_gap=scheduler.trace.ages.reuse_gap.read(),
        other_groups=scheduler.tables.groups_used,
    )


REASONS = ("swapped", "preempted", "seats", "blocks", "budget", "behind")


def waiting_by_reason(scheduler: Scheduler) -> dict[str, int]:
    """Return how many sequences wait for what, see `SchedulerStats`."""
    counts = dict.fromkeys(REASONS, 0)
    for place, seq in enumerate(scheduler.roster.waiting):
        if seq.swap_slots:
            reason = "swapped"
        elif seq.num_preemptions:
            reason = "preempted"
        else:
            reason = _lacks(scheduler, seq)[0] if place == 0 else "behind"
        counts[reason] += 1
    return counts


def _lacks(scheduler: Scheduler, seq: Sequence) -> tuple[str, int]:
    """Return what the first in line waits for, and how many blocks it lacks."""
    running = scheduler.roster.running
    if sum(map(scheduler.seats, running)) >= scheduler.limits.max_num_seqs:
        return "seats", 0
    missing = scheduler.tables.missing_blocks(seq, spare=len(running))
    return ("blocks", missing) if missing else ("budget", 0)


def picture(scheduler: Scheduler) -> dict[str, Any]:
    """Return who holds which block, as JSON, for a reader that follows the trace from now on.

    Returns:
        next: number of the first event that it does not contain.
        time: now, of the trace's clock.
        num_blocks, block_size: of the pool.
        counts: owners of each block that has one: [block, owners].
        known: blocks that the prefix cache finds.
        parents: of each of these, the block before it in its prefix; -1 of a first one, or where a
            window has let go of that block.
        order: of these, those without an owner, the one to be evicted next first.
        budget: tokens of a step at most.
        tables: of the sequences that hold blocks: seq_id, request_id, index, blocks.
        waiting: [request_id, index] of the samples that wait, the next to be admitted first.
        requests: of all these, what their event `arrive` had, and its time.
    """
    trace, pool = scheduler.trace, scheduler.tables.allocator
    running = scheduler.roster.running
    waiting = scheduler.order.line(scheduler.roster.waiting, len(scheduler.roster.waiting))
    blocks = range(scheduler.limits.num_blocks)
    known = [b for b in blocks if pool.is_cached(b)]
    requests = {seq.request.request_id: seq.request for seq in (*running, *waiting)}
    accounts = {key: trace.account(key) for key in requests}
    return {
        "next": trace.num_noted,
        "time": trace.clock(),
        "num_blocks": scheduler.limits.num_blocks,
        "block_size": scheduler.limits.block_size,
        "counts": [[b, pool.ref_count(b)] for b in blocks if pool.ref_count(b)],
        "known": known,
        "parents": [scheduler.tables.parent_of(b) for b in known],
        "order": [b for b in pool.free_order() if pool.is_cached(b)],
        "budget": scheduler.limits.max_num_batched_tokens,
        "tables": [
            {
                "seq_id": seq.seq_id,
                "request_id": seq.request.request_id,
                "index": seq.index,
                "blocks": [-1] * (len(seq.block_ids) - len(seq.held_blocks)) + seq.held_blocks,
            }
            for seq in running
        ],
        "waiting": [[seq.request.request_id, seq.index] for seq in waiting],
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


def line(scheduler: Scheduler, most: int) -> list[str]:
    """Return the ids of the requests that wait, at most so many, the next to be admitted first."""
    waiting = scheduler.order.line(scheduler.roster.waiting, most)
    return list(dict.fromkeys(seq.request.request_id for seq in waiting))


def explain(scheduler: Scheduler, request_id: str) -> str:
    """Say in one line what a request is doing or what it waits for."""
    unfinished = scheduler.roster.unfinished(request_id)
    if not unfinished:
        return "unknown or finished"
    seq = unfinished[0]
    if seq.block_ids:
        return f"running: {seq.num_computed_tokens} of {seq.num_tokens} tokens are computed"
    kept = f"swapped out with {seq.num_swapped_tokens} tokens; " if seq.swap_slots else ""
    place = scheduler.order.place(seq, scheduler.roster.waiting)
    if place > 0:
        return f"waiting: {kept}{place} sequence{' is' if place == 1 else 's are'} before it"
    reason, missing = _lacks(scheduler, seq)
    if reason == "seats":
        return f"waiting: {kept}all {scheduler.limits.max_num_seqs} seats are taken"
    if reason == "blocks":
        return f"waiting: {kept}{missing} more cache blocks must become free"
    return f"waiting: {kept}next in line for the token budget"


def check_integrity(scheduler: Scheduler) -> None:
    """Verify the invariants, between steps or beside unfinished ones; meant for tests.

    Raises:
        AssertionError: names the invariant that is broken.
    """
    running = scheduler.roster.running
    scheduler.roster.check_integrity()
    scheduler.tables.check_integrity(running, scheduler.roster.waiting)
    has_work = all(
        s.num_computed_tokens < s.num_tokens or (s.search and s.search.is_resting(s))
        for s in running
    )
    ahead = [
        (s.num_computed_tokens, s.num_scheduled_tokens, s.num_tokens + s.num_pending)
        for s in running
    ]
    rules = [
        (len(running) <= scheduler.limits.max_num_seqs, "every running sequence has a seat"),
        (has_work, "a running sequence has a token to compute"),
        (all(a <= b <= c for a, b, c in ahead), "computed, scheduled, known or drawn"),
        (
            scheduler._steps
            or all(
                a == b and not s.num_pending for s, (a, b, _) in zip(running, ahead, strict=True)
            ),
            "what is scheduled and not computed is in an unfinished step",
        ),
    ]
    for holds, rule in rules:
        if not holds:
            raise AssertionError(f"broken invariant: {rule}")
