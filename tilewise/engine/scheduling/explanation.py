"""What a request waits for, since when, behind which requests, and its cost so far. No torch."""

from __future__ import annotations

from typing import Any

from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.tables.swap_space import slots_of

__all__ = ["MOST_NAMED", "explain"]

MOST_NAMED = 16  # requests that are named of those before it


def explain(scheduler: Scheduler, request_id: str) -> dict[str, Any]:
    """Return the state of a request and its reasons, for people and as JSON.

    Returns:
        request_id and "state": "unknown" (never seen, or ended long ago) has nothing more. Of
        "waiting", "running" and "finished":
            waits_for: one sentence; None if it has finished.
            since_s: seconds in this state.
            age_s: seconds since its arrival, until its end if it has ended.
            behind, num_behind: the ids of the first requests before it in the queue, or of those
                that run if it is the first in the queue; and the number of all of them.
            num_prompt_tokens, num_cached_tokens, cached_share: the length of its prompt, and how
                much of it the prefix cache had; 0 while it waits for the first time.
            num_generated_tokens: of all samples that are unfinished.
            num_preemptions: of all samples.
            num_swapped_blocks: blocks of main memory that keep what its samples had computed.
            swapped_s: seconds since it was last swapped out; None if no such block is kept.
            num_tokens_lost: tokens that were computed, lost with their blocks and not found later.
            finish_reasons: the reasons of the samples that have ended.
    """
    trace = scheduler.trace
    account = trace.account(request_id)
    if account is None:
        return {"request_id": request_id, "state": "unknown"}
    unfinished = scheduler.roster.unfinished(request_id)
    state, waits_for, behind = "finished", None, list[str]()
    num_cached = account.num_cached
    if unfinished:
        is_running = any(seq.block_ids for seq in unfinished)
        state, waits_for = "running" if is_running else "waiting", scheduler.explain(request_id)
        num_cached = max(num_cached, *(seq.num_cached_tokens for seq in unfinished))
        if not is_running:
            behind = _behind(scheduler, request_id)
    kept = [(i, s) for q in unfinished for i, own in enumerate(slots_of(q)) for s in own]
    slots = {(group, slot) for group, slot in kept if slot >= 0}
    now = trace.clock()
    return {
        "request_id": request_id,
        "state": state,
        "waits_for": waits_for,
        "since_s": now - account.since,
        "age_s": (now if unfinished else account.since) - account.arrived,
        "behind": behind[:MOST_NAMED],
        "num_behind": len(behind),
        "num_prompt_tokens": account.num_prompt,
        "num_cached_tokens": num_cached,
        "cached_share": num_cached / account.num_prompt,
        "num_generated_tokens": sum(s.num_tokens - s.num_prompt_tokens for s in unfinished),
        "num_preemptions": account.num_preemptions,
        "num_swapped_blocks": len(slots),
        "swapped_s": now - account.swapped if slots else None,
        "num_tokens_lost": account.num_lost,
        "finish_reasons": list(account.reasons),
    }


def _behind(scheduler: Scheduler, request_id: str) -> list[str]:
    """Return the ids of the requests that a waiting request waits for: those before it in the
    queue, or, if it is the first, those that run."""
    before: dict[str, None] = {}
    waiting = scheduler.roster.waiting
    for seq in scheduler.order.line(waiting, len(waiting)):
        if seq.request.request_id == request_id:
            break
        before[seq.request.request_id] = None
    if not before:
        before = dict.fromkeys(seq.request.request_id for seq in scheduler.roster.running)
    return list(before)
