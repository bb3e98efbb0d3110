"""Steps that are taken back, as their transfers have failed: no request ends. No torch.

What such a step was to move between device and main memory has not arrived, or in part, and its
blocks may have been written since. Who needs it is computed again; all others keep what finished
steps have computed. A step writes nothing before what they have, so it can come again as another.

The first in order may lose its blocks so, too. All end nevertheless: of three steps in a row one
moves nothing (`Engine._recover`), and that one succeeds or ends who breaks it.
"""

from __future__ import annotations

from tilewise.engine.scheduling.scheduler import Scheduler

__all__ = ["pause_transfers", "resume_transfers", "withdraw"]


def withdraw(scheduler: Scheduler) -> None:
    """Take all unfinished steps back, as if they had not been scheduled.

    A sequence whose window has passed what its next token sees, now that this is an earlier one
    again, is computed again: those blocks may be others' by now.
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
    """Move nothing until resume_transfers(); what was swapped out is computed again."""
    if scheduler.tables.memory is not None:
        scheduler.tables.memory.is_paused = True
    for seq in scheduler.roster.waiting:
        scheduler.tables.drop_swapped(seq)


def resume_transfers(scheduler: Scheduler) -> None:
    """Use main memory again."""
    if scheduler.tables.memory is not None:
        scheduler.tables.memory.is_paused = False
