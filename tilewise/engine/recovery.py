"""A step that failed as a whole, tried again in halves: what breaks it ends alone. No torch.

Why a step may be run again, or in parts, in any order:

    keys and values  a run writes the same slots again, from the same tokens. A block that is
                     written has one owner, so no other run of the step reads it.
    copies           are repeated by the part that writes to their destination, before it writes.
                     Of a source the step changes at most slots past what was shared, and these the
                     destination's owner writes itself.
    random numbers   are counted by tokens drawn, and a failed attempt has drawn none.
    bookkeeping      none was done: blocks become findable, and tokens known, when the scheduler
                     takes the results, which it does once, for the step as a whole.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tilewise.engine.batch import BROKEN, PENDING, Batch, SampledToken, ScheduledSequence
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.steps.runner import Runner
from tilewise.errors import DeviceLostError

__all__ = ["Rerun", "run_again"]


class Rerun(NamedTuple):
    """The result of a step that was run again after a failure.

    Attributes:
        samples: the results for Scheduler.update(); BROKEN for sequences that have none.
        errors: the exceptions of the requests that must end, by request id.
    """

    samples: list[list[SampledToken]]
    errors: dict[str, Exception]


def run_again(runner: Runner, scheduler: Scheduler, batch: Batch, error: Exception | None) -> Rerun:
    """Run the oldest unfinished step again, in halves where it fails, and return the results.

    One request that breaks a step of n sequences is found in at most 2 log2(n) attempts. At most 2
    log2(n) + 2 times a part is halved: after that it ends as a whole.

    Args:
        runner: the runner; no step that it was given is unfinished.
        scheduler: the scheduler; it has taken the results of all older steps, so that every token
            is known.
        batch: the step that failed.
        error: the exception that the whole step raised; None if the whole step was not tried after
            all steps before it had finished.

    Raises:
        DeviceLostError: the runner can compute no more.
    """
    runs = {
        place: known
        for place, run in enumerate(batch.sequences)
        if (known := _known(scheduler, run)) is not None
    }
    samples = [[BROKEN] * run.num_samples for run in batch.sequences]
    errors: dict[str, Exception] = {}
    splits_left = 2 * len(runs).bit_length() + 2
    parts = deque([(list(runs), error)])
    while parts:
        places, error = parts.popleft()
        places = [i for i in places if _request_id(scheduler, runs[i]) not in errors]
        if not places:
            continue
        if error is None:
            try:
                runner.reset()
                drawn = runner.submit(batch.part([runs[i] for i in places])).result()
            except Exception as raised:
                error = raised
            else:
                for place, tokens in zip(places, drawn, strict=True):
                    samples[place] = tokens
                continue
        if isinstance(error, DeviceLostError):
            raise error
        if runner.is_lost():
            raise DeviceLostError(f"the engine's device is lost: {error}") from error
        if len(places) > 1 and splits_left:
            splits_left -= 1
            middle = len(places) // 2
            parts.extendleft([(places[middle:], None), (places[:middle], None)])
        else:
            errors |= dict.fromkeys((_request_id(scheduler, runs[i]) for i in places), error)
    runner.reset()
    return Rerun(samples, errors)


def _known(scheduler: Scheduler, run: ScheduledSequence) -> ScheduledSequence | None:
    """Return a run changed so that it can be computed once more: its token known, its block tables
    told whole.

    None if its sequence has ended, or has lost its blocks and so has another table.
    """
    seq = scheduler.roster.live.get(run.seq_id)
    if seq is None or seq.block_ids is not run.block_ids:
        return None
    if run.token_ids[-1] == PENDING:
        run = run._replace(token_ids=(seq.token_ids[run.start],))
    if run.others:
        run = run._replace(others=tuple((table, 0) for table, _ in run.others))
    return run._replace(first_new_block=0)


def _request_id(scheduler: Scheduler, run: ScheduledSequence) -> str:
    return scheduler.roster.live[run.seq_id].request.request_id
