"""Take steps back whose transfers have failed; no request ends. No torch.

The blocks that such a step was to move between device and main memory have not arrived, or in part,
and may have been written since. Sequences that need them are recomputed; all others keep what
finished steps have computed. A step writes nothing before those tokens, so its sequences can be
scheduled again.

The first in order may lose its blocks so, too. All requests end nevertheless: of three steps in a
row one moves nothing (`Engine._recover`), and that one succeeds or ends the request that breaks it.
"""

from __future__ import annotations

from tilewise.engine.scheduling.scheduler import Scheduler

__all__ = ["pause_transfers", "resume_transfers", "withdraw"]


def withdraw(scheduler: Scheduler) -> None:
    """Take all unfinished steps back, as if they had not been scheduled.

    A sequence with a window is recomputed if the window has released blocks that its next token,
    which is an earlier one again, must see: they may have other contents by now.
    """
    steps, preemption = list(scheduler._steps), scheduler.preemption
    scheduler.steady.forget()
    for step in steps:
        scheduler.tables.end_step(0)
        for run, preemptions in zip(step.batch.sequences, step.preemptions, strict=True):
            seq = scheduler.roster.live.get(run.seq_id)
            if seq is not None and seq.num_preemptions == preemptions:
                seq.num_scheduled_tokens, seq.num_pending = seq.num_computed_tokens, 0
    scheduler._steps.clear()
    tables, running = scheduler.tables, scheduler.roster.running
    if tables.states is not None:
        tables.states.end_update()
    for number in range(len(scheduler.limits.windows)):
        batches = [step.batch.of_group(number) for step in steps]
        copies = {copy for batch in batches for _, copy in batch.block_copies}
        for seq in [s for s in running if not copies.isdisjoint(tables.held(s, number))]:
            preemption.recompute(seq)
    for seq in [s for s in running if tables.has_passed(s)]:
        preemption.recompute(seq)
    for i, step in enumerate(steps):
        preemption.revoke(step.batch, [later.batch for later in steps[i + 1 :]])


def pause_transfers(scheduler: Scheduler) -> None:
    """Move no blocks between device and main memory until resume_transfers() is called.

    Waiting sequences that are swapped out lose what main memory has of them, and are recomputed.
    """
    if scheduler.tables.memory is not None:
        scheduler.tables.memory.is_paused = True
    for seq in scheduler.roster.waiting:
        scheduler.tables.drop_swapped(seq)


def resume_transfers(scheduler: Scheduler) -> None:
    """Move blocks between device and main memory again, after pause_transfers()."""
    if scheduler.tables.memory is not None:
        scheduler.tables.memory.is_paused = False
